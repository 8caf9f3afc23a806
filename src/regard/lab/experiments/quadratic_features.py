"""The quadratic kernel as an inner product of features: how many features, and that both forms are equal."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

QUADRATIC = rg.Quadratic()
ROUNDING = 1e-12
"""Relative error of float64 results: the budget of the library's laws."""


def similarity(q: Tensor, k: Tensor) -> Tensor:
    """(q·k + 1)² of all queries and keys."""
    return (q @ k.transpose(-1, -2) + 1) ** 2


def feature_count(d: int) -> int:
    """1, D linear features, D squares and D(D − 1)/2 products of two: (D + 1)(D + 2)/2."""
    return 1 + d + d + d * (d - 1) // 2


@experiment(
    claims=("003.6b",),
    title="The quadratic kernel and its features",
    statement=(
        "The similarity $(q \\cdot k + 1)^2$ is the inner product $\\varphi(q) \\cdot \\varphi(k)$ of the features "
        "$1$, $\\sqrt{2} x_i$, $x_i^2$ and $\\sqrt{2} x_i x_j$: $1 + D + D + D(D-1)/2 = (D+1)(D+2)/2$ of them. "
        "Attention with either form is the same."
    ),
    formula=r"(q \cdot k + 1)^2 = \varphi(q) \cdot \varphi(k), \qquad C = \frac{(D+1)(D+2)}{2}",
)
def quadratic_features(
    *,
    dims: Annotated[tuple[int, ...], Between(1, 128, log=True)] = (1, 2, 4, 8, 16, 32, 64),
    length: Annotated[int, Between(1, 1024, log=True)] = 300,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Compare features with the similarity, and attention by running sums of features with attention by scores.

    >>> quadratic_features(dims=(1, 3), length=20).verdict
    'holds'
    """
    random = generator(seed)
    checks, rows = [], []
    for d in dims:
        q, k, v = (torch.randn(1, 1, length, d, generator=random, dtype=torch.float64) for _ in range(3))
        phi_q, phi_k = QUADRATIC.features(q), QUADRATIC.features(k)
        # The products of an inner product add up to |phi(q)| |phi(k)| at most, of which rounding is a part.
        size = phi_q.norm(dim=-1)[..., None] * phi_k.norm(dim=-1)[..., None, :]
        apart = ((phi_q @ phi_k.transpose(-1, -2) - similarity(q, k)).abs() / size).max().item()
        row = {"D": d, "C": phi_q.shape[-1], "C in running sums": QUADRATIC.summed_length(d), "similarity apart": apart}
        checks += [
            Check(name=f"features, D = {d}", predicted=feature_count(d), measured=phi_q.shape[-1]),
            Check(name=f"similarity of features, D = {d}", predicted=0, measured=apart, tolerance=ROUNDING),
        ]
        for name, mask in (("all keys", None), ("causal", rg.causal)):
            sums, scores = (rg.attend(q, k, v, QUADRATIC, mask, path=path) for path in ("chunked", "reference"))
            row[f"{name} apart"] = ((sums - scores).abs().max() / scores.abs().max()).item()
            checks.append(
                Check(
                    name=f"attention by sums and by scores, {name}, D = {d}",
                    predicted=0,
                    measured=row[f"{name} apart"],
                    tolerance=ROUNDING,
                )
            )
        rows.append(row)
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, length))


def _figure(rows: Sequence[dict[str, float]], length: int) -> Figure:
    figure = new_figure(
        8.5,
        3.9,
        title="(q·k + 1)² has (D + 1)(D + 2)/2 features, and both forms agree to rounding",
        note=f"{length} queries and keys, float64. In running sums the features are kept in blocks, rounded up.",
    )
    left, right = figure.subplots(1, 2)
    rows = sorted(rows, key=lambda row: row["D"])
    dims = [int(row["D"]) for row in rows]
    left.plot(dims, [feature_count(d) for d in dims], color=COLOURS[0], label="(D + 1)(D + 2)/2")
    left.plot(dims, [row["C"] for row in rows], "o", color=COLOURS[0], label="features of the library")
    left.plot(dims, [row["C in running sums"] for row in rows], "x", color=COLOURS[6], label="in running sums")
    left.set_yscale("log")
    for colour, marker, name in (
        (COLOURS[0], "o", "similarity apart"),
        (COLOURS[1], "s", "all keys apart"),
        (COLOURS[2], "^", "causal apart"),
    ):
        label = {"similarity apart": "similarity"}.get(name, f"attention, {name.removesuffix(' apart')}")
        right.plot(dims, [max(row[name], 1e-17) for row in rows], marker, color=colour, label=label)
    right.axhline(ROUNDING, color=COLOURS[6], linewidth=1, linestyle="--", label="rounding")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    left.legend(fontsize=8, frameon=False)
    right.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.93))
    dress(left, title="number of features", x="head dimension D", y="C")
    dress(right, title="score form against features", x="head dimension D", y="relative difference")
    return figure
