"""Attention between channels against attention between patches: the ratio of their costs depends on the groups."""

from collections.abc import Sequence
from math import gcd
from typing import Annotated

import torch

import regard as rg
from regard.core.cost import count_flops
from regard.core.families.mechanism import Mechanism
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment

PATCH: Mechanism = rg.Softmax()
CHANNEL: Mechanism = rg.Channel()


def ratio(n: int, d: int, groups: int = 1) -> float:
    """Products between d channels in groups over those between n patches: n·d²/groups against n²·d."""
    return d / (groups * n)


@experiment(
    claims=("004.12.9",),
    title="Attention between channels against attention between patches",
    statement=(
        "Attention between $N = 256$ patches, with all $D = 512$ channels, takes $N^2 D$ = 33,554,432 multiply-adds; "
        "attention between the channels, with all patches, takes $N D^2$ = 67,108,864: $D/N$ = 2 times as many."
    ),
    formula=r"\frac{N D^2/G}{N^2 D} = \frac{D}{G N}",
    condition=(
        "For one group of channels, and the product of queries and keys alone. With G groups of channels the ratio is "
        "D/(G·N): 32 groups make attention between channels 16 times cheaper than between 16 × 16 patches."
    ),
    instead="With G groups of channels the ratio is D/(G·N).",
)
def channels(
    *,
    side: Annotated[int, Between(1, 32)] = 16,
    dim: Annotated[int, Between(1, 1024, log=True)] = 512,
    groups: Annotated[tuple[int, ...], Between(1, 1024, log=True)] = (1, 2, 4, 8, 16, 32),
) -> Measurements:
    """Count the products of the library's weights over the groups of channels; of a number that does not divide `dim`,
    its largest factor that does is taken.

    >>> channels(side=4, dim=32, groups=(1, 2, 4)).verdict
    'holds under a condition'
    """
    n = side**2
    patches = _multiply_adds(PATCH, n, dim, 1)
    statement, within, instead, rows = [], [], [], []
    for number in sorted({gcd(number, dim) for number in groups}):
        between = _multiply_adds(CHANNEL, n, dim, number)
        measured, where = between / patches, f"G = {number}"
        statement.append(Check(name=f"channels over patches, {where}", predicted=ratio(n, dim), measured=measured))
        instead.append(
            Check(name=f"channels over patches, {where}", predicted=ratio(n, dim, number), measured=measured)
        )
        if number == 1:
            within = [
                Check(name="multiply-adds between patches", predicted=n**2 * dim, measured=patches),
                Check(name=f"multiply-adds between channels, {where}", predicted=n * dim**2, measured=between),
                Check(name=f"channels over patches, {where}", predicted=ratio(n, dim), measured=measured),
            ]
        rows.append({"G": number, "between patches": patches, "between channels": between, "ratio": measured})
    return Measurements(
        statement=tuple(statement),
        within=tuple(within),
        instead=tuple(instead),
        table=tuple(rows),
        draw=lambda: _figure(rows, n, dim),
    )


def _multiply_adds(mechanism: Mechanism, n: int, d: int, heads: int) -> int:
    """Multiply-adds of the scores of n tokens with d channels in so many heads; a head of channels is a group."""
    x = torch.zeros(1, heads, n, d // heads)
    return count_flops(lambda: rg.weights(x, x, mechanism)) // 2


def _figure(rows: Sequence[dict[str, float]], n: int, d: int) -> Figure:
    figure = new_figure(
        7.5,
        3.9,
        title="The more groups of channels, the cheaper attention between channels",
        note=f"N = {n} patches, D = {d} channels. Points: counted of the library's weights. Line: the formula.",
    )
    axes = figure.subplots()
    groups = [int(row["G"]) for row in rows]
    axes.plot(groups, [ratio(n, d, number) for number in groups], color=COLOURS[0], label="D/(G·N)")
    axes.plot(groups, [row["ratio"] for row in rows], "o", color=COLOURS[0], label="counted")
    axes.axhline(1, color=COLOURS[6], linewidth=1)
    axes.axhline(ratio(n, d), color=COLOURS[1], linewidth=1, linestyle="--", label="as printed, for any G")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    dress(axes, x="groups of channels G", y="channels over patches")
    axes.legend(fontsize=8, frameon=False)
    return figure
