"""The machine, the versions and the commit of a measurement."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from regard.training.records import commit


def environment() -> dict[str, Any]:
    """The machine, versions and commit of a result.

    >>> sorted(environment())
    ['commit', 'cores', 'cpu', 'date', 'instructions', 'python', 'threads', 'torch', 'transformers']
    """
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "instructions": instructions(torch.backends.cpu.get_cpu_capability(), _cpuinfo("flags")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": _transformers(),
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _transformers() -> str | None:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def instructions(capability: str, flags: str) -> str:
    """The instruction set that torch uses, and whether the processor has a wider one that was disabled.

    >>> instructions("AVX2", "fpu avx2"), instructions("AVX512", "fpu avx2 avx512f")
    ('AVX2', 'AVX-512')
    >>> instructions("AVX2", "fpu avx2 avx512f")
    'AVX2 (imitated on an AVX-512 processor)'
    """
    name = "AVX-512" if capability == "AVX512" else capability
    return f"{name} (imitated on an AVX-512 processor)" if name != "AVX-512" and "avx512f" in flags.split() else name


def _cpuinfo(name: str) -> str:
    """A field of /proc/cpuinfo for the first core; empty if there is none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
