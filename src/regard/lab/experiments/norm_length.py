"""The length of a vector after layer normalization, and what epsilon takes from it."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch

from regard.core.style import Figure, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator
from regard.models.layers.network import norm

ROUNDING = 1e-12


def shrinkage(variance: float, epsilon: float) -> float:
    """The share of gamma sqrt(d) that is left with an epsilon above 0."""
    return math.sqrt(variance / (variance + epsilon))


@experiment(
    claims=("000.3b",),
    title="Layer normalization gives every vector the length γ√d",
    statement=(
        "The output $y$ of layer normalization with scale $\\gamma$ and shift $\\beta$ satisfies "
        "$\\lVert y - \\beta\\mathbf{1}\\rVert = \\gamma\\sqrt{d}$ for every input."
    ),
    formula=r"\lVert y - \beta\mathbf{1}\rVert = \gamma\sqrt{d}\,\sqrt{\frac{\sigma^2}{\sigma^2 + \varepsilon}}",
    condition=(
        "$\\varepsilon = 0$, and the entries of the input are not all equal. With $\\varepsilon > 0$, as layers have "
        "it, the vector is shorter by the factor $\\sqrt{\\sigma^2 / (\\sigma^2 + \\varepsilon)}$, where $\\sigma^2$ "
        "is the variance of its entries: next to nothing for usual inputs, all of it for tiny ones."
    ),
)
def norm_length(
    *,
    epsilons: Annotated[tuple[float, ...], Between(1e-12, 1, log=True)] = (1e-5, 1e-2),
    stds: Annotated[tuple[float, ...], Between(1e-8, 100, log=True)] = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1, 10),
    dim: Annotated[int, Between(2, 4096, log=True)] = 64,
    gamma: Annotated[float, Between(0.1, 10, log=True)] = 1.5,
    beta: Annotated[float, Between(-10, 10)] = 0.5,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure lengths after the norm of our blocks over the spread of the input and epsilon.

    >>> norm_length(stds=(0.01, 1)).verdict
    'holds under a condition'
    """
    random = generator(seed)
    rows = []
    for std in sorted(set(stds)):
        x = std * torch.randn(dim, generator=random, dtype=torch.float64)
        variance = x.var(correction=0).item()
        for epsilon in (0.0, *sorted(set(epsilons))):
            rows.append(
                {
                    "epsilon": epsilon,
                    "std of the entries": variance**0.5,
                    "length": _length(x, epsilon, gamma, beta),
                    "by the formula": gamma * dim**0.5 * shrinkage(variance, epsilon),
                }
            )
    full = gamma * dim**0.5
    return Measurements(
        statement=tuple(_check(row, full) for row in rows),
        within=tuple(_check(row, full) for row in rows if row["epsilon"] == 0),
        instead=tuple(_check(row, row["by the formula"]) for row in rows if row["epsilon"] > 0),
        table=tuple(rows),
        draw=lambda: _figure(rows, full, dim),
    )


def _length(x: torch.Tensor, epsilon: float, gamma: float, beta: float) -> float:
    layer = norm("layer", len(x), epsilon).double()
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), (gamma, beta), strict=True):
            parameter.fill_(value)
        return (layer(x) - beta).norm().item()


def _check(row: dict[str, float], predicted: float) -> Check:
    return Check(
        name=f"length, σ = {row['std of the entries']:.2g}, ε = {row['epsilon']:g}",
        predicted=predicted,
        measured=row["length"],
        tolerance=ROUNDING * predicted,
    )


def _figure(rows: Sequence[dict[str, float]], full: float, dim: int) -> Figure:
    figure = new_figure(
        7.5,
        3.8,
        title="The length is γ√d while ε is small beside the variance",
        note=f"Lines: formula. Points: measured, d = {dim}. Vertical lines: σ² = ε.",
    )
    axes = figure.subplots()
    spreads = [row["std of the entries"] for row in rows]
    low, high = math.log10(min(spreads)) - 0.2, math.log10(max(spreads)) + 0.2
    steps = torch.logspace(low, high, 100).tolist()
    epsilons = list(dict.fromkeys(row["epsilon"] for row in rows))
    for (colour, marker), epsilon in zip(line_styles(len(epsilons)), epsilons, strict=True):
        mine = [row for row in rows if row["epsilon"] == epsilon]
        axes.plot(steps, [full * shrinkage(step**2, epsilon) for step in steps], color=colour)
        axes.plot(
            [row["std of the entries"] for row in mine],
            [row["length"] for row in mine],
            marker,
            color=colour,
            label=f"ε = {epsilon:g}",
        )
        if steps[0] ** 2 < epsilon < steps[-1] ** 2:
            axes.axvline(epsilon**0.5, color=colour, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    dress(axes, x="standard deviation σ of the input's entries", y="‖y − β1‖")
    axes.legend(fontsize=8, frameon=False)
    return figure
