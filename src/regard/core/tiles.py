"""A guard against CPUs that advertise matrix tiles (AMX) the system will not let a process use.

On such a machine a bfloat16 matrix product crashes with an illegal instruction. oneDNN reads its limit from the
environment when it is first used, so setting it while regard is imported is early enough, and only such machines are
limited. No torch here: this runs before it is imported.
"""

import ctypes
import os
import sys
from pathlib import Path

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # x86-64 Linux


def tiles_are_forbidden(cpuinfo: str, permitted: bool) -> bool:
    """Whether the CPU claims tiles that the system refuses.

    >>> tiles_are_forbidden("flags : fpu amx_tile amx_bf16", permitted=False)
    True
    """
    return "amx_tile" in cpuinfo and not permitted


def guard() -> None:
    """Keep oneDNN from using tiles that are forbidden; a limit set by the user stays."""
    info = Path("/proc/cpuinfo")
    if sys.platform != "linux" or not info.is_file() or "amx_tile" not in (text := info.read_text()):
        return
    permitted = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
    if tiles_are_forbidden(text, permitted):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
