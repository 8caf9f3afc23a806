"""Pairs of computations timed in turn, and their results."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.core.files import write_text
from regard.training.machine import environment as environment


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


def save(results: Sequence[Result], folder: str | Path) -> Path:
    """Write results and their environment to `cpu.json` in a folder, atomically."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "results": [result.to_dict() for result in results]}
    return write_text(target / "cpu.json", json.dumps(content, indent=1) + "\n")
