"""What a similarity must be so that attention's denominator is never 0."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

import regard as rg
from regard.core.style import Figure, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator, mean

QUADRATIC = rg.Quadratic()
POSITIVE = {"1 + s + s²/2": rg.Taylor(), "elu + 1": rg.Elu(), "random features": rg.RandomFeatures()}
"""Similarities that are above 0 for all queries and keys."""
SHARE = 0.1
"""The share of denominators below which the formula and the measurement are compared."""


def below(threshold: float, keys: int, d: int) -> float:
    """P(Σ (q·k + 1)² < threshold) for keys of independent standard normal entries and a query of length √d.

    Scores are then normal with variance d, and Σ (q·k + 1)² / d has a noncentral χ² distribution with `keys` degrees of
    freedom and noncentrality keys / d: a Poisson mixture of central ones.
    """
    mixed = torch.arange(200, dtype=torch.float64)
    rate = keys / d / 2
    shares = torch.exp(mixed * math.log(rate) - rate - torch.lgamma(mixed + 1))
    return (shares * torch.special.gammainc(keys / 2 + mixed, torch.full_like(mixed, threshold / d / 2))).sum().item()


@experiment(
    claims=("003.6a",),
    title="Denominators that reach 0",
    statement=(
        "Attention with a similarity divides by $\\sum_s \\operatorname{sim}(q, k_s)$. This is never 0 if the "
        "similarity always has the same sign, as $(q \\cdot k + 1)^2$ has."
    ),
    formula=r"\operatorname{sim}(q, k) = (q \cdot k + 1)^2 = 0 \iff q \cdot k = -1",
    condition=(
        "if the similarity is above 0 for all queries and keys; the square reaches 0, and a row of such keys has "
        "denominator 0, for which the library's contract is an output of 0"
    ),
)
def denominators(
    *,
    keys: Annotated[tuple[int, ...], Between(1, 32, log=True)] = (1, 2, 4, 8),
    d: Annotated[int, Between(1, 64, log=True)] = 16,
    samples: Annotated[int, Between(10_000, 100_000, log=True)] = 20_000,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Build a row whose denominator is 0, and measure how near to 0 those of random keys come.

    >>> denominators(keys=(1, 2)).verdict
    'holds under a condition'
    """
    random = generator(seed)
    most = max(keys)
    # Signs of whole numbers: q·k = -1 without rounding.
    q = torch.randint(0, 2, (1, 1, 1, d), generator=random, dtype=torch.float64) * 2 - 1
    k = torch.zeros(1, 1, most, d, dtype=torch.float64)
    k[..., 0] = -q[..., 0]
    v = torch.randn(1, 1, most, d, generator=random, dtype=torch.float64)
    smallest = torch.finfo(torch.float64).tiny
    statement = (
        Check(
            name=f"denominator of {most} keys with q·k = -1: above 0",
            predicted=smallest,
            measured=QUADRATIC.similarity(q, k).sum().item(),
            rule="at least",
        ),
    )
    within = [
        Check(
            name=f"denominator of the same keys, {name}: above 0",
            predicted=smallest,
            measured=mechanism.similarity(q, k).sum().item(),
            rule="at least",
        )
        for name, mechanism in POSITIVE.items()
    ]
    out, weights = rg.attend(q, k, v, QUADRATIC), rg.weights(q, k, QUADRATIC)
    within += [
        Check(name="1 + s + s²/2 at its least, s = -1", predicted=0.5, measured=_least(d), tolerance=1e-14),
        Check(name="output of the row with denominator 0", predicted=0, measured=out.abs().max().item()),
        Check(name="weights of that row", predicted=0, measured=weights.abs().max().item()),
    ]
    rows: list[dict[str, Any]] = []
    draws: dict[int, Tensor] = {}
    for count in keys:
        drawn = draws[count] = _denominators(count, d, samples, random)
        threshold = _threshold(SHARE, count, d)
        share = mean((drawn < threshold).double())
        within.append(
            Check(
                name=f"share of random denominators below {threshold:.3g}, {count} keys",
                predicted=SHARE,
                measured=share.value,
                tolerance=SHARE / 4,
                interval=share.interval,
            )
        )
        rows.append(
            {
                "keys": count,
                "samples": samples,
                "median": drawn.median().item(),
                "smallest": drawn.min().item(),
                "below one in so many, by the formula": _threshold(1 / samples, count, d),
            }
        )
    return Measurements(
        statement=statement, within=tuple(within), table=tuple(rows), draw=lambda: _figure(draws, d, samples)
    )


def _least(d: int) -> float:
    """The Taylor similarity of a query and a key whose scaled product is -1."""
    x = torch.full((1, d), d**-0.25, dtype=torch.float64)
    return rg.Taylor().similarity(x, -x).item()


def _denominators(keys: int, d: int, samples: int, random: torch.Generator) -> Tensor:
    """The denominators of so many queries of length √d, each with keys of its own."""
    parts = []
    for begin in range(0, samples, step := max(1, (1 << 21) // (d * keys))):
        size = min(step, samples - begin)
        q = torch.randn(size, 1, d, generator=random, dtype=torch.float64)
        q = q / q.norm(dim=-1, keepdim=True) * d**0.5
        k = torch.randn(size, keys, d, generator=random, dtype=torch.float64)
        parts.append(QUADRATIC.similarity(q, k).sum((-2, -1)))
    return torch.cat(parts)


def _threshold(share: float, keys: int, d: int) -> float:
    """The number that this share of denominators is below, by bisection of its logarithm."""
    low, high = -80.0, math.log(100 * keys * (d + 1))
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if below(math.exp(middle), keys, d) < share else (low, middle)
    return math.exp(low)


def _figure(draws: Mapping[int, Tensor], d: int, samples: int) -> Figure:
    figure = new_figure(
        7.5,
        3.9,
        title="How near to 0 the denominator of (q·k + 1)² comes on random data",
        note=f"{samples:,} queries, d = {d}. Lines: formula; its slope is half the number of keys. Points: measured.",
    )
    axes = figure.subplots()
    for (count, drawn), (colour, marker) in zip(draws.items(), line_styles(len(draws)), strict=True):
        shares = _shares(samples)
        thresholds = [_threshold(share, count, d) for share in shares]
        axes.plot(thresholds, shares, color=colour)
        shown = [(x, (drawn < x).double().mean().item()) for x in thresholds[::3]]
        axes.plot(
            *zip(*shown, strict=True), marker, color=colour, markersize=5, label=f"{count} key{'s' * (count > 1)}"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    dress(axes, x="x", y="share of denominators below x")
    axes.legend(fontsize=8, frameon=False)
    return figure


def _shares(samples: int) -> Sequence[float]:
    """Shares down to that of the ten smallest samples, evenly in their logarithm."""
    return [0.9 * (10 / samples / 0.9) ** (step / 30) for step in range(31)]
