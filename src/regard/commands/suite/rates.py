"""What mechanisms reach on this machine, and where one really overtakes another."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard.commands.suite.harness import interleaved
from regard.core.attention import attend
from regard.core.cost import Work, cost, crossover, with_length
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, as_mask


@dataclass(frozen=True)
class Rates:
    """FLOPs a second that mechanisms reach on this machine, at some lengths."""

    points: tuple[tuple[Mechanism, tuple[tuple[int, float], ...]], ...]
    """Of each mechanism (length, FLOPs a second), by length. No dict: a user's mechanism may hold a list."""

    def seconds(self, mechanism: Mechanism, work: Work) -> float:
        """The time some work should take: its FLOPs over the rate, read between the measured lengths."""
        points = next(points for known, points in self.points if known is mechanism)
        at = math.log(max(1, work.key_length))
        rate = points[0][1] if at <= math.log(points[0][0]) else points[-1][1]
        for (low, slow), (high, fast) in pairwise(points):
            if math.log(low) <= at <= math.log(high):
                rate = slow + (fast - slow) * (at - math.log(low)) / (math.log(high) - math.log(low))
        return cost(mechanism, work).flops / rate

    @property
    def table(self) -> dict[str, dict[str, float]]:
        """For each mechanism, the best rate measured."""
        return {repr(m): {"flops_per_second": max(rate for _, rate in pts)} for m, pts in self.points}


LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Where rates are measured."""
LOOKS, ROUNDS = 3, 9
"""How often every length is timed: to see where to look, and to measure."""


@dataclass(frozen=True)
class Crossing:
    """From which length on one mechanism is faster than another; None if from none, or from none that was looked at."""

    rates: Rates
    predicted: int | None
    """By the rates of this machine."""
    measured: int | None
    """By its clock."""


def crossing(
    first: Mechanism,
    second: Mechanism,
    work: Work,
    *,
    rounds: int = ROUNDS,
    begin_round: Callable[[str], None] | None = None,
) -> Crossing:
    """From which length on `second` is faster than `first` on this machine: as its rates predict, and as it is.

    A first look says where that may be. Then the lengths of the rates and those from half to twice of there, a quarter
    of an octave apart, are timed in turn: a slow while of the machine falls on prediction and measurement alike.
    """
    both = (first, second)
    look = _rates(both, work, _timed(both, work, LENGTHS, LOOKS, begin_round))
    near = crossover(first, second, work, seconds=look.seconds)
    if near is None:
        return Crossing(look, None, None)
    for _ in range(2):  # once more where the first look was far off
        around = sorted({max(2, round(near * 2 ** (step / 4))) for step in range(-4, 5)})
        times = _timed(both, work, sorted({*LENGTHS, *around}), rounds, begin_round)
        rates = _rates(both, work, times)
        predicted = crossover(first, second, work, seconds=rates.seconds)
        if predicted is None or around[0] <= predicted <= around[-1]:
            break
        near = predicted
    gains = [(length, times[0, length] / times[1, length]) for length in around]
    return Crossing(rates, predicted, overtaken(gains))


def overtaken(gains: Sequence[tuple[int, float]]) -> int | None:
    """The length after which a gain stays above 1, read between the two it lies between; None if it does not cross.

    >>> overtaken([(100, 0.5), (200, 2.0), (400, 0.5), (800, 2.0)]), overtaken([(100, 2.0), (200, 3.0)])
    (566, None)
    >>> print(overtaken([(100, 0.5), (200, 2.0), (400, 0.5)]))
    None
    """
    if gains[-1][1] <= 1:
        return None
    points = [(math.log(length), math.log(gain)) for length, gain in gains]
    for (x, slower), (y, faster) in reversed(list(pairwise(points))):
        if slower <= 0 < faster:
            return round(math.exp(x + (y - x) * -slower / (faster - slower)))
    return None


def _timed(
    mechanisms: Sequence[Mechanism],
    work: Work,
    lengths: Sequence[int],
    rounds: int,
    begin_round: Callable[[str], None] | None,
) -> dict[tuple[int, int], float]:
    """Seconds of each mechanism, by its place in the list, at each length, timed in turn."""
    cells = [(place, length) for length in lengths for place in range(len(mechanisms))]
    with torch.no_grad():
        calls = [_attending(mechanisms[place], with_length(work, length)) for place, length in cells]
        return dict(zip(cells, interleaved(calls, rounds, begin_round), strict=True))


def _rates(mechanisms: Sequence[Mechanism], work: Work, times: dict[tuple[int, int], float]) -> Rates:
    def rate(place: int, length: int) -> float:
        return cost(mechanisms[place], with_length(work, length)).flops / times[place, length]

    points = (tuple((length, rate(place, length)) for length in LENGTHS) for place in range(len(mechanisms)))
    return Rates(tuple(zip(mechanisms, points, strict=True)))


def _attending(mechanism: Mechanism, work: Work) -> Callable[[], Tensor]:
    shape = (work.batch, work.num_kv_heads, work.key_length)
    q = torch.randn(work.batch, work.num_heads, work.query_length, work.qk_length, dtype=work.dtype)
    k, v = (torch.randn(*shape, size, dtype=work.dtype) for size in (work.qk_length, work.value_length))
    rule: Mask | None = as_mask(work.mask)
    return lambda: attend(q, k, v, mechanism, rule)
