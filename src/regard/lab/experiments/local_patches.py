"""Two ways to fewer pairs of patches, windows and global tokens: what they cost, and how far they reach."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F

import regard as rg
from regard.core.style import Figure, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

KINDS = ("all pairs", "window", "global tokens", "window and global tokens")


def pairs(kind: str, side: int, radius: int, tokens: int) -> int:
    """How many pairs are compared on a grid of side × side patches, with so many global tokens before them."""
    patches, reach = side**2, min(radius, side - 1)
    near = (side * (2 * reach + 1) - reach * (reach + 1)) ** 2  # along an axis, less what lies beyond the border
    around = tokens * (tokens + 2 * patches)
    return {
        "all pairs": patches**2,
        "window": near,
        "global tokens": around + patches,
        "window and global tokens": around + near,
    }[kind]


def layers_needed(kind: str, side: int, radius: int) -> int:
    """How many layers it takes until every patch has met every other patch."""
    steps = -(-(side - 1) // radius)
    return {
        "all pairs": 1,
        "window": steps,
        "global tokens": 2,
        "window and global tokens": min(2, steps),
    }[kind]


@experiment(
    claims=("004.12.8",),
    title="Windows and global tokens instead of all pairs of patches",
    statement=(
        "All pairs of $N = g^2$ patches are $N^2$. Where a patch sees only those up to $r$ rows and columns away, "
        "there are at most $(2r+1)^2 N$ pairs, and it takes $\\lceil (g-1)/r \\rceil$ layers until every patch has met "
        "every other. With $n$ global tokens, which see all and are seen by all, there are $n(2N + n)$ more pairs, and "
        "it takes two layers."
    ),
    formula=r"N^2 \quad\text{against}\quad (2r+1)^2 N + n(2N + n)",
)
def local_patches(
    *,
    sides: Annotated[tuple[int, ...], Between(2, 24)] = (4, 8, 12, 16),
    radius: Annotated[int, Between(1, 8)] = 2,
    tokens: Annotated[int, Between(1, 16)] = 1,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Count the weights above 0 under each mask, and multiply the weights of layers until every patch has met every
    other.

    >>> local_patches(sides=(3, 4), radius=1).verdict
    'holds'
    """
    checks, rows = [], []
    for side in sides:
        for kind in KINDS:
            measured, layers = _measured(kind, side, radius, tokens, seed)
            where = f"{kind}, {side}×{side}"
            checks += [
                Check(name=f"pairs, {where}", predicted=pairs(kind, side, radius, tokens), measured=measured),
                Check(name=f"layers, {where}", predicted=layers_needed(kind, side, radius), measured=layers),
            ]
            if kind == "window":
                bound = (2 * radius + 1) ** 2
                checks.append(
                    Check(name=f"pairs a patch, {where}", predicted=bound, measured=measured / side**2, rule="at most")
                )
            rows.append({"grid": f"{side}×{side}", "N": side**2, "mask": kind, "pairs": measured, "layers": layers})
    return Measurements(
        statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, sorted(set(sides)), radius, tokens)
    )


def _mask(kind: str, side: int, radius: int, tokens: int) -> rg.Mask | None:
    """The mask over the global tokens, if there are any, and the patches after them."""
    near = rg.window2d((side, side), radius)
    if kind == "window":
        return near
    if kind == "global tokens":
        return rg.global_tokens(tokens) | rg.window()
    if kind == "all pairs":
        return None
    patches = near.visible(1, 1, side**2, side**2)
    return rg.dense(F.pad(patches, (tokens, 0, tokens, 0), value=True))


def _measured(kind: str, side: int, radius: int, tokens: int, seed: int) -> tuple[int, int]:
    """The pairs with a weight above 0, and the layers after which every patch has a part in every other."""
    before = tokens if "global" in kind else 0
    x = torch.randn(1, 1, before + side**2, 8, generator=generator(seed), dtype=torch.float64)
    weights = rg.weights(x, x.flip(-1), mask=_mask(kind, side, radius, tokens))[0, 0]
    met = reached = weights > 0
    layers, step = 1, met.double()
    while layers <= side and not reached[before:, before:].all():
        reached, layers = reached.double() @ step > 0, layers + 1
    return int(met.sum()), layers


def _figure(rows: Sequence[dict[str, Any]], sides: Sequence[int], radius: int, tokens: int) -> Figure:
    figure = new_figure(
        8.5,
        4,
        title="Windows cost less but need many layers; with a global token it is two",
        note=f"Window radius {radius}, global tokens: {tokens}. Points: weights above 0. Lines: formulas.",
    )
    left, right = figure.subplots(1, 2)
    for (colour, marker), kind in zip(line_styles(len(KINDS)), KINDS, strict=True):
        mine = {row["N"]: row for row in rows if row["mask"] == kind}
        patches = [side**2 for side in sides]
        left.plot(patches, [pairs(kind, side, radius, tokens) for side in sides], color=colour, linewidth=1.2)
        left.plot(patches, [mine[n]["pairs"] for n in patches], marker, color=colour, label=kind)
        right.plot(patches, [layers_needed(kind, side, radius) for side in sides], color=colour, linewidth=1.2)
        right.plot(patches, [mine[n]["layers"] for n in patches], marker, color=colour)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    left.set_yscale("log")
    dress(left, title="cost of a layer", x="patches N", y="pairs compared")
    dress(right, title="reach", x="patches N", y="layers until all have met")
    left.legend(fontsize=8, frameon=False)
    return figure
