"""Pairs of computations timed in turn, their results, and the machine that they ran on."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.core.files import write_text
from regard.training.records import commit


@dataclass(frozen=True)
class Pair:
    """Two computations of the same thing, and the tolerance between their results."""

    ours: Callable[[], Tensor]
    peer: Callable[[], Tensor]
    check: Callable[[], tuple[Tensor, Tensor]] | None = None
    """Two results that must agree, if the pair computes different things on purpose: a kernel against softmax."""
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Bench:
    """A named comparison with its goal, the ratio to reach."""

    name: str
    title: str
    peer: str
    goal: float | None
    make: "Callable[[], Pair] | None" = None
    rounds: int = 15
    special: "Callable[[Bench], Result] | None" = None
    """How to measure if there is no pair to time."""


@dataclass(frozen=True)
class Result:
    """The result of a benchmark."""

    name: str
    title: str
    peer: str
    goal: float | None
    ratio: float
    ours_ms: float
    peer_ms: float
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the goal is reached; None if there is none."""
        return None if self.goal is None else self.ratio >= self.goal

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def interleaved(
    calls: Sequence[Callable[[], Any]], rounds: int, begin_round: Callable[[str], None] | None = None
) -> list[float]:
    """Median seconds of each call, timed in turn so that slow phases of the machine affect all calls alike.

    `begin_round` is called with the name of each round as it begins.

    >>> a, b = interleaved([lambda: None, lambda: None], rounds=3)
    >>> a >= 0 and b >= 0
    True
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for number in range(rounds):
        if begin_round is not None:
            begin_round(f"round {number + 1} of {rounds}")
        for slot, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            slot.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in times]


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


def save(results: Sequence[Result], folder: str | Path) -> Path:
    """Write results and their environment to `cpu.json` in a folder, atomically."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "results": [result.to_dict() for result in results]}
    return write_text(target / "cpu.json", json.dumps(content, indent=1) + "\n")


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
