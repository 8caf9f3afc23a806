"""What the processor and the operating system let this process do.

The instruction set is the one torch reports (`ATEN_CPU_CAPABILITY` can lower it). JIT-compiled code needs a supported
instruction set, llvmlite, PyTorch's OpenMP threads, and permission to execute memory that was written.
"""

import ctypes
import mmap
import os
import platform
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_ARM = platform.machine() in ("aarch64", "arm64")
LANES = 4 if _ARM else {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 0)
"""Float32 numbers in a vector register of this CPU; 0 if we generate no code for it."""
MATRIX_UNITS = bool(torch.cpu._is_amx_tile_supported())
"""Whether the CPU has matrix units for half precision (AMX), which our code does not use."""
_CPUINFO = Path("/proc/cpuinfo")


def _slow_blas() -> bool:
    """Whether PyTorch multiplies float32 matrices at half the rate that the CPU has: Intel's MKL uses AVX-512 on
    Intel's CPUs only, and oneDNN wherever it is. (`ONEDNN_MAX_CPU_ISA` can lower what oneDNN uses.)"""
    if LANES != 16 or not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return False
    lowered = not os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512").upper().startswith(("AVX512", "AVX10", "ALL", "DEF"))
    return not lowered and _CPUINFO.is_file() and "GenuineIntel" not in _CPUINFO.read_text(encoding="utf-8")


SLOW_BLAS = _slow_blas()
"""Whether oneDNN multiplies float32 matrices twice as fast as PyTorch's BLAS."""
_OPENMP = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_HAS_LLVM = find_spec("llvmlite") is not None


def _may_compile() -> bool:
    """Whether memory may be written and then executed: tried on one page, harmlessly."""
    if sys.platform != "linux":
        return True
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE) as page:
        view = ctypes.c_char.from_buffer(page)
        executable = mmap.PROT_READ | mmap.PROT_EXEC
        refused = ctypes.CDLL(None).mprotect(ctypes.c_void_p(ctypes.addressof(view)), mmap.PAGESIZE, executable)
        del view  # else the page cannot be closed
    return refused == 0


MAY_COMPILE = _may_compile()
"""Whether code can be generated at run time. If not, LLVM would crash and oneDNN raise. A hardened process may forbid
it (`PR_SET_MDWE`, systemd's MemoryDenyWriteExecute, SELinux)."""


def missing() -> str | None:
    """Why JIT-compiled code cannot run here; None if it can."""
    if sys.platform != "linux":
        return f"made for Linux, where PyTorch uses GNU OpenMP; this is {sys.platform}"
    if not LANES:
        return "made for processors with AVX2, AVX-512 or NEON"
    if not _HAS_LLVM:
        return 'needs llvmlite, which is not installed: pip install "regard[fast]"'
    if not _OPENMP:
        return "this PyTorch has no GNU OpenMP, whose threads it needs"
    return None if MAY_COMPILE else "the system forbids code generated at run time (W^X, MemoryDenyWriteExecute)"


def keep_freed_memory() -> None:
    """Let the C library keep what is freed for the next allocation, instead of returning it to the system.

    A training step allocates the same logits and gradients again and again; returned memory is mapped page by page each
    time, which takes 5 % of a small model's step. Only glibc has this setting; it is for the whole process.

    >>> keep_freed_memory()
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 * 2**20)  # the most that glibc takes
        mallopt(trim_threshold, 2**31 - 1)


def in_parallel(code: int, fields: int, threads: int) -> None:
    """Run `code(fields)` on each of `threads` threads of PyTorch's pool: other threads would wait for those, which
    spin.

    `threads` is 1, or as many as PyTorch has: for a smaller team OpenMP would end the spare threads, and PyTorch would
    have to start them again."""
    if threads == 1:
        _FUNCTION(code)(fields)
    else:
        _openmp().GOMP_parallel(ctypes.c_void_p(code), ctypes.c_void_p(fields), threads, 0)


@cache
def openmp() -> int:
    """The address of OpenMP's function that runs another function on several threads."""
    return ctypes.cast(_openmp().GOMP_parallel, ctypes.c_void_p).value or 0


@cache
def _openmp() -> Any:
    return ctypes.CDLL(str(_OPENMP[0]))
