"""What the processor and the operating system let this process do.

torch tells the instruction set (`ATEN_CPU_CAPABILITY` can lower it). Machine code needs that, llvmlite, PyTorch's own
threads, and memory that may be written first and executed later.
"""

import ctypes
import mmap
import platform
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_ARM = platform.machine() in ("aarch64", "arm64")
LANES = 4 if _ARM else {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 0)
"""Float32 numbers in a register of this processor; 0 where no machine code is made for it."""
MATRIX_UNITS = bool(torch.cpu._is_amx_tile_supported())
"""Whether the processor multiplies tiles of half-precision numbers (AMX), which our code does not."""
_OPENMP = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_HAS_LLVM = find_spec("llvmlite") is not None


def _may_compile() -> bool:
    """Whether memory may be written and then executed: a page is tried, which harms nothing if it is refused."""
    if sys.platform != "linux":
        return True
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE) as page:
        view = ctypes.c_char.from_buffer(page)
        executable = mmap.PROT_READ | mmap.PROT_EXEC
        refused = ctypes.CDLL(None).mprotect(ctypes.c_void_p(ctypes.addressof(view)), mmap.PAGESIZE, executable)
        del view  # or the page cannot be closed
    return refused == 0


MAY_COMPILE = _may_compile()
"""Whether code can be made at run time: by LLVM, which dies where it cannot, and by oneDNN, which raises. A hardened
process may not (`PR_SET_MDWE`, systemd's MemoryDenyWriteExecute, SELinux)."""


def missing() -> str | None:
    """What machine code lacks here; None if nothing."""
    if sys.platform != "linux":
        return f"made for Linux, on which PyTorch's threads are GNU OpenMP's; this is {sys.platform}"
    if not LANES:
        return "made for processors with AVX2, AVX-512 or NEON"
    if not _HAS_LLVM:
        return "llvmlite is not installed"
    if not _OPENMP:
        return "PyTorch comes without GNU OpenMP here, on whose threads it runs"
    return None if MAY_COMPILE else "the system forbids code made at run time (W^X, MemoryDenyWriteExecute)"


def in_parallel(code: int, fields: int, threads: int) -> None:
    """`code(fields)` on each of some threads, PyTorch's own: others would wait for its threads, which spin.

    One, or as many as PyTorch has: for a smaller team OpenMP ends the threads to spare, and PyTorch has to start them
    again."""
    if threads == 1:
        _FUNCTION(code)(fields)
    else:
        _openmp().GOMP_parallel(ctypes.c_void_p(code), ctypes.c_void_p(fields), threads, 0)


@cache
def openmp() -> int:
    """The address of the function that calls another on several of PyTorch's threads."""
    return ctypes.cast(_openmp().GOMP_parallel, ctypes.c_void_p).value or 0


@cache
def _openmp() -> Any:
    return ctypes.CDLL(str(_OPENMP[0]))
