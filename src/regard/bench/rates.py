"""What mechanisms reach on this machine, and where one really overtakes another."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard.attention import attend
from regard.bench.harness import interleaved
from regard.cost import Work, cost, with_length
from regard.mask import Mask, as_mask
from regard.mechanism import Mechanism


@dataclass(frozen=True)
class Rates:
    """FLOPs a second that mechanisms reach on this machine, at some lengths."""

    points: dict[Mechanism, tuple[tuple[int, float], ...]]
    """(length, FLOPs a second), by length."""

    def seconds(self, mechanism: Mechanism, work: Work) -> float:
        """The time some work should take: its FLOPs over the rate, read between the measured lengths."""
        points = self.points[mechanism]
        at = math.log(max(1, work.key_length))
        rate = points[0][1] if at <= math.log(points[0][0]) else points[-1][1]
        for (low, slow), (high, fast) in pairwise(points):
            if math.log(low) <= at <= math.log(high):
                rate = slow + (fast - slow) * (at - math.log(low)) / (math.log(high) - math.log(low))
        return cost(mechanism, work).flops / rate

    @property
    def table(self) -> dict[str, dict[str, float]]:
        """For each mechanism, the best rate measured."""
        return {repr(m): {"flops_per_second": max(rate for _, rate in pts)} for m, pts in self.points.items()}


def measure(
    mechanisms: Sequence[Mechanism], work: Work, lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192), rounds: int = 9
) -> Rates:
    """Measure what mechanisms reach on this machine for work of this shape."""
    works = [with_length(work, length) for length in lengths]
    pairs = [(mechanism, at) for mechanism in mechanisms for at in works]
    with torch.no_grad():
        times = interleaved([_attending(*pair) for pair in pairs], rounds)
    points: dict[Mechanism, tuple[tuple[int, float], ...]] = {}
    for (mechanism, at), seconds in zip(pairs, times, strict=True):
        points[mechanism] = (*points.get(mechanism, ()), (at.key_length, cost(mechanism, at).flops / seconds))
    return Rates(points)


def measured_crossover(first: Mechanism, second: Mechanism, work: Work, *, near: int, rounds: int = 9) -> int | None:
    """The length from which `second` really is faster, looked for from half to twice `near`; None if not there.

    Both are timed at lengths a quarter of an octave apart; the last change of sides is read between two of them.
    """
    lengths = sorted({max(2, round(near * 2 ** (step / 4))) for step in range(-4, 5)})
    works = [with_length(work, length) for length in lengths]
    with torch.no_grad():
        times = interleaved([_attending(one, at) for at in works for one in (first, second)], rounds)
    # Logarithms of length and of how many times faster the second is.
    gains = [
        (math.log(length), math.log(one / two))
        for length, one, two in zip(lengths, times[::2], times[1::2], strict=True)
    ]
    for (x, slower), (y, faster) in reversed(list(pairwise(gains))):
        if slower <= 0 < faster:
            return round(math.exp(x + (y - x) * -slower / (faster - slower)))
    return None


def _attending(mechanism: Mechanism, work: Work) -> Callable[[], Tensor]:
    shape = (work.batch, work.num_kv_heads, work.key_length)
    q = torch.randn(work.batch, work.num_heads, work.query_length, work.qk_length, dtype=work.dtype)
    k, v = (torch.randn(*shape, size, dtype=work.dtype) for size in (work.qk_length, work.value_length))
    rule: Mask | None = as_mask(work.mask)
    return lambda: attend(q, k, v, mechanism, rule)
