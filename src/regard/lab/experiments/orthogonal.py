"""Orthogonal keys that are their own queries: no identity, unless the choice is hard."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import WEIGHT_MAP, Figure, dress, lattice, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

ROUNDING = 1e-12
SHOWN = 8
"""The number of keys in the heat maps."""


def diagonal(beta: float, n: int) -> float:
    """The weight that each of n orthonormal tokens gives to itself."""
    return 1 / (1 + (n - 1) * math.exp(-beta))


@experiment(
    claims=("002.1.3c",),
    title="Orthogonal keys do not make attention an identity",
    statement=(
        "If the keys are orthonormal and the queries equal the keys, then $Q K^\\top = I$, and self-attention returns "
        "its values unchanged, like an identity layer."
    ),
    formula=r"a_{ii} = \frac{e^{\beta}}{e^{\beta} + n - 1}",
    instead=(
        "The scores are the identity, the weights are not: softmax gives a key with score 0 the similarity 1. A token "
        "keeps the weight $e^\\beta / (e^\\beta + n - 1)$, 0.28 for 8 tokens and $\\beta = 1$, and shares the rest "
        "equally among the others. The output is the identity only in the limit $\\beta \\to \\infty$."
    ),
)
def orthogonal(
    *,
    sizes: Annotated[tuple[int, ...], Between(2, 1024, log=True)] = (4, 8, 64, 512),
    betas: Annotated[tuple[float, ...], Between(0.01, 1000, log=True)] = (0.1, 0.5, 1, 2, 4, 8, 16),
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure the weights of orthonormal tokens over beta and their number.

    >>> orthogonal(sizes=(8,), betas=(1.0,)).verdict
    'does not hold'
    """
    random = generator(seed)
    statement, instead, rows = [], [], []
    for n in sizes:
        keys = _orthonormal(n, random)
        values = torch.randn(1, 1, n, n, generator=random, dtype=torch.float64)
        for beta in betas:
            mechanism = rg.Softmax(beta=beta)
            weights = rg.weights(keys, keys, mechanism)[0, 0].diagonal()
            moved = (rg.attend(keys, keys, values, mechanism) - values).norm() / values.norm()
            case = f"n = {n}, β = {beta:g}"
            statement.append(Check(name=f"‖H − V‖/‖V‖, {case}", predicted=0, measured=moved.item(), tolerance=ROUNDING))
            predicted = diagonal(beta, n)
            worst = weights[(weights - predicted).abs().argmax()].item()
            instead.append(
                Check(name=f"weight of itself, {case}", predicted=predicted, measured=worst, tolerance=ROUNDING)
            )
            rows.append(
                {
                    "n": n,
                    "beta": beta,
                    "weight of itself": weights.mean().item(),
                    "by the formula": predicted,
                    "‖H − V‖/‖V‖": moved.item(),
                }
            )
        hard = (rg.attend(keys, keys, values, rg.Argmax()) - values).abs().max().item()
        instead.append(Check(name=f"largest |H − V|, n = {n}, β = ∞", predicted=0, measured=hard, tolerance=ROUNDING))
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(rows, seed)
    )


def _orthonormal(n: int, random: torch.Generator) -> Tensor:
    """n tokens of length 1 at right angles, (1, 1, n, n)."""
    return torch.linalg.qr(torch.randn(1, 1, n, n, generator=random, dtype=torch.float64)).Q


def _figure(rows: Sequence[dict[str, float]], seed: int) -> Figure:
    figure = new_figure(
        8.5,
        3.6,
        title="Softmax comes near the identity, a weight of 1, only for a large β",
        note="Lines: formula. Points: weights of the library. n orthonormal keys, queries equal to them.",
    )
    axes, *maps = figure.subplots(1, 3, width_ratios=(1.7, 1, 1))
    betas = sorted({row["beta"] for row in rows})
    steps = torch.logspace(math.log10(betas[0]), math.log10(betas[-1]), 100).tolist()
    sizes = list(dict.fromkeys(int(row["n"]) for row in rows))
    for (colour, marker), n in zip(line_styles(len(sizes)), sizes, strict=True):
        axes.plot(steps, [diagonal(beta, n) for beta in steps], color=colour)
        mine = [row for row in rows if row["n"] == n]
        axes.plot(
            [row["beta"] for row in mine], [row["weight of itself"] for row in mine], marker, color=colour, label=f"{n}"
        )
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    dress(axes, x="β", y="weight of a token for itself")
    axes.legend(fontsize=8, frameon=False, title="n", title_fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.95))
    keys = _orthonormal(SHOWN, generator(seed))
    for axes, beta in zip(maps, (1.0, 8.0), strict=True):
        weights = rg.weights(keys, keys, rg.Softmax(beta=beta))[0, 0]
        axes.imshow(weights, cmap=WEIGHT_MAP, vmin=0, vmax=1)
        lattice(axes, SHOWN, SHOWN)
        dress(axes, title=f"n = {SHOWN}, β = {beta:g}: {weights[0, 0]:.2f} itself", x="key", y="query")
        axes.grid(visible=False, which="major")
    return figure
