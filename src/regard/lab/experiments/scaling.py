"""Why scores are divided by sqrt(d): the variance of an inner product grows with the head dimension."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
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
    std: Annotated[float, Between(0.1, 4)] = 1.0,
    samples: Annotated[int, Between(1_000, 1_000_000, log=True)] = 20_000,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure mean and variance of the library's own scores over the head dimension.

    >>> scaling(dims=(4, 64), samples=20_000).verdict
    'holds'
    """
    random = generator(seed)
    checks, rows = [], []
    for centre in centres:
        for d in dims:
            products = _products(d, centre, std, samples, random)
            length, spread = expected(d, centre, std)
            average, unscaled = mean(products * UNSCALED.scale(d)), variance(products * UNSCALED.scale(d))
            scaled = variance(products * SCALED.scale(d))
            checks += [
                _check(f"mean of q·k, d = {d}, μ = {centre:g}", length, average, 0.25 * spread**0.5),
                _check(f"variance of q·k, d = {d}, μ = {centre:g}", spread, unscaled, 0.25 * spread),
                _check(f"variance of q·k/√d, d = {d}, μ = {centre:g}", spread / d, scaled, 0.25 * spread / d),
            ]
            rows.append(
                {
                    "d": d,
                    "mean of an entry": centre,
                    "mean of q·k": average.value,
                    "variance of q·k": unscaled.value,
                    "by the formula": spread,
                    "variance of q·k/√d": scaled.value,
                }
            )
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, std))


def _products(d: int, centre: float, std: float, samples: int, random: torch.Generator) -> Tensor:
    """Scores of so many independent queries and keys before scaling, as the library computes them."""
    parts = []
    for begin in range(0, samples, step := max(1, (1 << 22) // d)):
        q, k = (centre + std * torch.randn(min(step, samples - begin), 1, d, generator=random) for _ in range(2))
        parts.append(UNSCALED.score(q, k).flatten())
    return torch.cat(parts)


def _check(name: str, predicted: float, estimate: Estimate, tolerance: float) -> Check:
    return Check(
        name=name, predicted=predicted, measured=estimate.value, tolerance=tolerance, interval=estimate.interval
    )


def _figure(rows: Sequence[dict[str, float]], std: float) -> Figure:
    figure = new_figure(
        7.5, 3.8, title="Variance of a score over the head dimension", note=f"Entries have s = {std:g}."
    )
    axes = figure.subplots()
    for colour, centre in zip(COLOURS, dict.fromkeys(row["mean of an entry"] for row in rows), strict=False):
        mine = [row for row in rows if row["mean of an entry"] == centre]
        dims = [row["d"] for row in mine]
        axes.plot(dims, [row["by the formula"] for row in mine], color=colour, label=f"formula, μ = {centre:g}")
        axes.plot(dims, [row["variance of q·k"] for row in mine], "o", color=colour, label=f"q·k, μ = {centre:g}")
        axes.plot(
            dims, [row["variance of q·k/√d"] for row in mine], "s--", color=colour, label=f"q·k/√d, μ = {centre:g}"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    dress(axes, x="head dimension d", y="variance")
    axes.legend(fontsize=8, frameon=False)
    return figure
