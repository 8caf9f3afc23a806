"""Why scores are divided by sqrt(d): the variance of an inner product grows with the head dimension."""

from collections.abc import Sequence
from itertools import product
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import Figure, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import Estimate, generator, mean, variance

UNSCALED, SCALED = rg.Softmax(beta=1.0), rg.Softmax()


def expected(d: int, centre: float, std: float) -> tuple[float, float]:
    """Mean and variance of q·k, whose entries are independent with this mean and standard deviation."""
    length = d * centre**2  # |mu|^2
    return length, 2 * std**2 * length + d * std**4


@experiment(
    claims=("000.1a", "001.4", "003.1"),
    title="Why scores are divided by √d",
    statement=(
        "Let the entries of queries and keys be independent, with mean $\\mu$ and standard deviation $s$. Then the "
        "inner product of a query and a key has mean $\\lVert\\mu\\rVert^2$ and variance "
        "$2 s^2\\lVert\\mu\\rVert^2 + d s^4$. With mean 0 and $s = 1$ that is $d$, so dividing scores by $\\sqrt{d}$ "
        "keeps their variance at 1."
    ),
    formula=r"\operatorname{Var}(q \cdot k) = 2 s^2 \lVert\mu\rVert^2 + d s^4",
)
def scaling(
    *,
    dims: Annotated[tuple[int, ...], Between(1, 8192, log=True)] = (4, 16, 64, 256, 1024, 4096),
    centres: Annotated[tuple[float, ...], Between(-4, 4)] = (0.0, 0.5),
    stds: Annotated[tuple[float, ...], Between(0.1, 4)] = (1.0, 0.5),
    samples: Annotated[int, Between(1_000, 1_000_000, log=True)] = 20_000,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure mean and variance of the library's own scores over the head dimension.

    >>> scaling(dims=(4, 64), samples=20_000).verdict
    'holds'
    """
    random = generator(seed)
    checks, rows = [], []
    entries = list(product(dict.fromkeys(centres), dict.fromkeys(stds)))
    for d in dims:
        for (centre, std), products in zip(entries, _products(d, entries, samples, random), strict=True):
            length, spread = expected(d, centre, std)
            average, unscaled = mean(products * UNSCALED.scale(d)), variance(products * UNSCALED.scale(d))
            scaled = variance(products * SCALED.scale(d))
            where = f"d = {d}, μ = {centre:g}, s = {std:g}"
            checks += [
                _check(f"mean of q·k, {where}", length, average, 0.25 * spread**0.5),
                _check(f"variance of q·k, {where}", spread, unscaled, 0.25 * spread),
                _check(f"variance of q·k/√d, {where}", spread / d, scaled, 0.25 * spread / d),
            ]
            rows.append(
                {
                    "d": d,
                    "mean of an entry": centre,
                    "its standard deviation": std,
                    "mean of q·k": average.value,
                    "variance of q·k": unscaled.value,
                    "by the formula": spread,
                    "variance of q·k/√d": scaled.value,
                }
            )
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, entries))


def _products(
    d: int, entries: Sequence[tuple[float, float]], samples: int, random: torch.Generator
) -> tuple[Tensor, ...]:
    """Scores of so many independent queries and keys before scaling, as the library computes them, for each mean and
    standard deviation of their entries; all of them share the random numbers, whose drawing takes the time."""
    parts = []
    for begin in range(0, samples, step := max(1, (1 << 18) // d)):
        q, k = torch.randn(2, min(step, samples - begin), 1, d, generator=random)
        parts.append([UNSCALED.score(centre + std * q, centre + std * k).flatten() for centre, std in entries])
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _check(name: str, predicted: float, estimate: Estimate, tolerance: float) -> Check:
    return Check(
        name=name, predicted=predicted, measured=estimate.value, tolerance=tolerance, interval=estimate.interval
    )


def _figure(rows: Sequence[dict[str, float]], entries: Sequence[tuple[float, float]]) -> Figure:
    figure = new_figure(
        8.5,
        4.2,
        title="The variance of a score grows with d; divided by √d it does not",
        note="Lines: formula. Points: measured. Entries of queries and keys have mean μ and standard deviation s.",
    )
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measured, title in zip(
        panels, ("variance of q·k", "variance of q·k/√d"), ("without the scale", "divided by √d"), strict=True
    ):
        for (colour, marker), (centre, std) in zip(line_styles(len(entries)), entries, strict=True):
            mine = [row for row in rows if (row["mean of an entry"], row["its standard deviation"]) == (centre, std)]
            dims = [row["d"] for row in mine]
            shares = [row["d"] if axes is panels[1] else 1 for row in mine]
            formula = [row["by the formula"] / share for row, share in zip(mine, shares, strict=True)]
            axes.plot(dims, formula, color=colour)
            axes.plot(dims, [row[measured] for row in mine], marker, color=colour, label=f"μ = {centre:g}, s = {std:g}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        dress(axes, title=title, x="head dimension d", y="variance of a score" if axes is panels[0] else "")
    panels[0].legend(fontsize=8, frameon=False)
    return figure
