"""Estimates with confidence intervals, and random numbers of a seed.

The intervals are at 99.999 %: a report has a few hundred of them, and one that misses the truth by chance would turn
a verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

DEVIATIONS = 4.417
"""Standard errors on either side of an estimate, for a confidence of 99.999 %."""


@dataclass(frozen=True)
class Estimate:
    """A measured number and its confidence interval."""

    value: float
    interval: tuple[float, float]


def mean(samples: Tensor) -> Estimate:
    """The mean of independent samples.

    >>> mean(torch.tensor([1.0, 3.0])).value
    2.0
    """
    samples = samples.double().flatten()
    value, error = samples.mean().item(), samples.std().item() / math.sqrt(len(samples))
    return Estimate(value, (value - DEVIATIONS * error, value + DEVIATIONS * error))


def variance(samples: Tensor) -> Estimate:
    """The variance of independent samples."""
    samples = samples.double().flatten()
    return mean((samples - samples.mean()).square() * len(samples) / (len(samples) - 1))


def median(samples: Tensor) -> Estimate:
    """The median of independent samples of any distribution: its interval ends at two of the samples.

    >>> median(torch.arange(101.0))
    Estimate(value=50.0, interval=(27.0, 73.0))
    """
    ranked = samples.double().flatten().sort().values
    # How many samples are below the median is binomial, with standard deviation √n/2.
    low = max(0, math.floor(len(ranked) / 2 - DEVIATIONS * math.sqrt(len(ranked)) / 2 - 0.5))
    return Estimate(ranked.median().item(), (ranked[low].item(), ranked[-1 - low].item()))


def ratio(above: Tensor, below: Tensor) -> Estimate:
    """The mean of `above` over the mean of `below`, of independent pairs of samples.

    >>> ratio(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    Estimate(value=0.5, interval=(0.5, 0.5))
    """
    above, below = above.double().flatten(), below.double().flatten()
    value, size = (above.mean() / below.mean()).item(), below.mean().item()
    error = (above - value * below).std().item() / size / math.sqrt(len(above))
    return Estimate(value, (value - DEVIATIONS * error, value + DEVIATIONS * error))


def over(above: Estimate, below: Estimate) -> Estimate:
    """An estimate over another that is above 0, where both are: the interval is as wide as theirs allow.

    >>> over(Estimate(4.0, (2.0, 6.0)), Estimate(2.0, (1.0, 2.0)))
    Estimate(value=2.0, interval=(1.0, 6.0))
    """
    (low, high), (least, most) = above.interval, below.interval
    return Estimate(above.value / below.value, (low / most, high / least))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the straight line nearest to points, by least squares; of powers, pass logarithms.

    >>> slope([0, 1, 2], [1, 3, 5])
    2.0
    """
    across, up = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    across = across - across.mean()
    return ((across * (up - up.mean())).sum() / across.square().sum()).item()


def power(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power law y = c x^p nearest to points.

    >>> round(power([1, 10, 100], [3, 300, 30000]), 9)
    2.0
    """
    return slope([math.log(value) for value in x], [math.log(value) for value in y])


def generator(seed: int) -> torch.Generator:
    """Random numbers of a seed."""
    return torch.Generator().manual_seed(seed)


def randomised(module: M, random: torch.Generator) -> M:
    """The module itself, in float64, with normal parameters that keep the variance of what they are applied to.

    >>> layer = randomised(nn.Linear(100, 4), generator(0))
    >>> layer.weight.dtype, round(layer.weight.std().item(), 1)
    (torch.float64, 0.1)
    """
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(values * parameter.shape[-1] ** -0.5)
    return module
