"""Programs of machine_code.py, JIT-compiled for this CPU by LLVM (llvmlite), and cached on disk.

Compiling takes 0.1 s or more for each set of sizes, for which a new process would wait at its first tokens. Objects are
cached under `$XDG_CACHE_HOME/regard` (`~/.cache/regard`), named by all they depend on: the program's text, the
processor, and the versions of LLVM and llvmlite. Since an object is executed, it is read only from a folder that nobody
else can write to or replace, and only if its checksum is right. A folder that cannot be used is no error: then nothing
is cached.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from regard.core import cpu, files

MOST_OBJECTS = 256
"""Cached objects, about 20 kB each; the least recently used are deleted."""
_compiling = threading.Lock()
_engines: list[Any] = []
"""Engines own the compiled code, which lives as long as the process."""


def compiled(program: Callable[..., str], *sizes: Any) -> int:
    """The address of the function that `program(*sizes)` writes, for the instruction set that torch reports."""
    with _compiling:
        return _compiled(program, sizes, cpu.LANES)


@cache
def _compiled(program: Callable[..., str], sizes: tuple[Any, ...], lanes: int) -> int:
    text = program(*sizes)
    name = hashlib.sha256("\n".join((*described(lanes), text)).encode()).hexdigest()
    machine, _ = host(lanes)
    code = load(name)
    if code is None:
        code = machine.emit_object(optimized(text, machine))
        store(name, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address("step")


def host(lanes: int) -> tuple[Any, tuple[str, ...]]:
    """LLVM's machine for this processor, with no more than AVX2 where there are 8 lanes, and its description."""
    features = llvm.get_host_cpu_features()
    if lanes == 8:
        features.update({name: False for name in features if name.startswith(("avx512", "avx10", "evex", "amx"))})
    processor = (llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten())
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return _machine(*processor), processor


def described(lanes: int) -> tuple[str, ...]:
    """What compiled code depends on besides its program: the processor, LLVM and llvmlite."""
    return (*host(lanes)[1], llvmlite.__version__, str(llvm.llvm_version_info))


def elsewhere(triple: str, processor: str, features: str) -> Any:
    """LLVM's machine for another processor: its code can be inspected here, but not run."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return _machine(triple, processor, features)


def _machine(triple: str, processor: str, features: str) -> Any:
    return llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=features, opt=3)


def optimized(text: str, machine: Any) -> Any:
    """A program as LLVM's module, ready for a machine."""
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # Programs are already vectorised and unrolled; LLVM's search for more takes longer than everything else.
    options.loop_unrolling = options.loop_vectorization = options.loop_interleaving = options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module


def load(name: str) -> bytes | None:
    """A cached object; None unless it is complete and only this user could have written it."""
    try:
        folder = _folder()
        if folder is None or not _private(folder):
            return None
        data = (folder / name).read_bytes()
        if data[:32] != _checksum(name, data[32:]):
            return None
        os.utime(folder / name)
        return data[32:]
    except OSError:
        return None


def store(name: str, code: bytes) -> None:
    """Cache an object for later processes, if possible, and delete the least recently used."""
    try:
        folder = _folder()
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(folder):
            return
        files.write(folder / name, lambda beside: beside.write_bytes(_checksum(name, code) + code))
        for path in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime)[:-MOST_OBJECTS]:
            path.unlink(missing_ok=True)
    except OSError:  # a full disk, or another process deletes the same file
        return


def _folder() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG standard says to ignore a relative path
        base = os.path.expanduser("~/.cache")
    return Path(base, "regard", "code") if os.path.isabs(base) else None


def _private(folder: Path) -> bool:
    """Whether only this user and root can have written to a folder, or replaced it."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return False
    return all(_keeps(parent) for parent in {*folder.parents, *folder.resolve().parents})


def _keeps(parent: Path) -> bool:
    """Whether nobody else can rename the contents of a folder: its owner can, and anyone with write permission unless
    it is sticky, as /tmp is."""
    status = parent.stat()
    return status.st_uid in (0, os.geteuid()) and (not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX))


def _checksum(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + code).digest()
