"""The rates that mechanisms reach on this machine, and the length from which a mechanism is faster than another."""

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
    """FLOP/s that mechanisms reach on this machine, at some lengths."""

    points: tuple[tuple[Mechanism, tuple[tuple[int, float], ...]], ...]
    """(length, FLOP/s) of each mechanism, by length. Not a dict: a user's mechanism may not be hashable."""

    def seconds(self, mechanism: Mechanism, work: Work) -> float:
        """The predicted time of some work: its FLOPs over the rate, interpolated between the measured lengths."""
        points = next(points for timed, points in self.points if timed is mechanism)
        at = math.log(max(1, work.key_length))
        rate = points[0][1] if at <= math.log(points[0][0]) else points[-1][1]
        for (low, slow), (high, fast) in pairwise(points):
            if math.log(low) <= at <= math.log(high):
                rate = slow + (fast - slow) * (at - math.log(low)) / (math.log(high) - math.log(low))
        return cost(mechanism, work).flops / rate

    @property
    def table(self) -> dict[str, dict[str, float]]:
        """The best measured rate of each mechanism."""
        return {repr(m): {"flops_per_second": max(rate for _, rate in pts)} for m, pts in self.points}


LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Lengths at which rates are measured."""
LOOKS, ROUNDS = 3, 9
"""How often every length is timed: in the first look, and in the measurement."""


@dataclass(frozen=True)
class Crossing:
    """The length from which a mechanism is faster than another; None if there is none among the lengths tried."""

    rates: Rates
    predicted: int | None
    """Predicted from the rates of this machine."""
    measured: int | None
    """Measured by the clock."""


def crossing(
    first: Mechanism,
    second: Mechanism,
    work: Work,
    *,
    rounds: int = ROUNDS,
    begin_round: Callable[[str], None] | None = None,
) -> Crossing:
    """The length from which `second` is faster than `first` on this machine, predicted from its rates and measured.

    A first look gives a rough estimate. Then the lengths of the rates, and lengths from half to twice the estimate, a
    quarter of an octave apart, are timed in turn, so that slow phases of the machine affect prediction and measurement
    alike.
    """
    both = (first, second)
    look = _rates(both, work, _timed(both, work, LENGTHS, LOOKS, begin_round))
    near = crossover(first, second, work, seconds=look.seconds)
    if near is None:
        return Crossing(look, None, None)
    for _ in range(2):  # again if the first look was far off
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
    """The length from which a gain stays above 1, interpolated between two lengths; None if it does not cross 1.

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
    """Seconds by the index of the mechanism and the length, timed in turn."""
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
