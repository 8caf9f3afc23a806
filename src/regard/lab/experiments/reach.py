"""How far hard attention reaches: (k + 1)^n is a bound, which heads reach only if they pick new positions."""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import Figure, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

Chooser = Callable[[int, int], tuple[Tensor, Tensor]]
"""Queries (1, H, T, K) and keys (1, 1, T, K) of a layer, by its number and the number of heads."""


def bound(heads: int, layers: int) -> int:
    """The most positions that an output can come from: itself and one more for each head, in each layer."""
    return (heads + 1) ** layers


@experiment(
    claims=("000.2a",),
    title="How far hard attention reaches in n layers",
    statement=(
        "If every head attends to a single position (argmax attention), a layer with $k$ heads and a residual "
        "connection joins $k + 1$ positions. After $n$ layers an output depends on $(k+1)^n$ input positions."
    ),
    formula=r"\text{receptive field after } n \text{ layers} = (k + 1)^n",
    condition=(
        "The heads pick distinct positions whose receptive fields do not overlap, and there are $(k+1)^n$ positions: "
        "then head $h$ of layer $l$ looks, for instance, $h (k+1)^l$ positions back. In general $(k+1)^n$ is an upper "
        "bound, and so is the length of the sequence; heads that choose by content meet again and stay below it."
    ),
)
def reach(
    *,
    heads: Annotated[tuple[int, ...], Between(1, 8)] = (1, 2, 3),
    layers: Annotated[int, Between(1, 8)] = 6,
    length: Annotated[int, Between(2, 512, log=True)] = 256,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Count the input positions that outputs depend on, with random heads and with heads that pick new positions.

    >>> reach(heads=(2,), layers=3, length=32).verdict
    'holds under a condition'
    """
    random = generator(seed)
    statement, within, instead, rows = [], [], [], []
    for k in dict.fromkeys(heads):
        chosen = _reached(_random(length, random), k, layers, length)
        new = _reached(_shifts(length), k, layers, length)
        for n, (by_content, by_design) in enumerate(zip(chosen, new, strict=True), 1):
            most, case = bound(k, n), f"k = {k}, n = {n}"
            statement.append(
                Check(name=f"least reach by content, {case}", predicted=most, measured=by_content.min().item())
            )
            if most <= length:
                within.append(
                    Check(name=f"least reach of new positions, {case}", predicted=most, measured=by_design.min().item())
                )
            instead.append(
                Check(
                    name=f"largest reach of all, {case}",
                    predicted=min(most, length),
                    measured=max(by_content.max().item(), by_design.max().item()),
                    rule="at most",
                )
            )
            rows.append(
                {
                    "heads": k,
                    "layers": n,
                    "(k + 1)^n": most,
                    "mean reach by content": by_content.mean().item(),
                    "reach of new positions": by_design.mean().item(),
                }
            )
    return Measurements(
        statement=tuple(statement),
        within=tuple(within),
        instead=tuple(instead),
        table=tuple(rows),
        draw=lambda: _figure(rows, length),
    )


def _reached(choose: Chooser, heads: int, layers: int, length: int) -> list[Tensor]:
    """How many input positions each output depends on, after 1, 2, … layers of argmax attention with a residual.

    The values are the positions themselves, one-hot: what is not 0 in an output is the positions that it comes from.
    """
    x, reached = torch.eye(length, dtype=torch.float64)[None, None], []
    for layer in range(layers):
        q, k = choose(layer, heads)
        # All heads read the same values; their outputs are averaged, so that numbers stay in range.
        x = (x + rg.attend(q, k, x, rg.Argmax()).sum(1, keepdim=True)) / (heads + 1)
        reached.append((x[0, 0] > 0).sum(-1).double())
    return reached


def _random(length: int, random: torch.Generator) -> Chooser:
    """Queries and keys of random content, other ones in every layer and head."""

    def choose(layer: int, heads: int) -> tuple[Tensor, Tensor]:
        q = torch.randn(1, heads, length, 16, generator=random, dtype=torch.float64)
        return q, torch.randn(1, 1, length, 16, generator=random, dtype=torch.float64)

    return choose


def _shifts(length: int) -> Chooser:
    """Queries that look for the position h (k + 1)^l tokens back, around the sequence; keys are one-hot positions."""
    keys = torch.eye(length, dtype=torch.float64)

    def choose(layer: int, heads: int) -> tuple[Tensor, Tensor]:
        steps = [head * (heads + 1) ** layer for head in range(1, heads + 1)]
        return torch.stack([keys.roll(step, 1) for step in steps])[None], keys[None, None]

    return choose


def _figure(rows: Sequence[dict[str, float]], length: int) -> Figure:
    figure = new_figure(
        7.5,
        3.8,
        title="Hard attention reaches (k + 1)ⁿ only if heads pick new positions",
        note=f"Lines: (k + 1)ⁿ. Filled: heads that pick new positions. Hollow: by content. Dotted: {length} positions.",
    )
    axes = figure.subplots()
    counts = list(dict.fromkeys(int(row["heads"]) for row in rows))
    for (colour, marker), k in zip(line_styles(len(counts)), counts, strict=True):
        mine = [row for row in rows if row["heads"] == k]
        layers = [row["layers"] for row in mine]
        axes.plot(layers, [row["(k + 1)^n"] for row in mine], color=colour, linewidth=0.9)
        axes.plot(layers, [row["reach of new positions"] for row in mine], marker, color=colour, label=f"k = {k}")
        by_content = [row["mean reach by content"] for row in mine]
        axes.plot(layers, by_content, f"{marker}--", color=colour, markerfacecolor="white", linewidth=0.9)
    axes.axhline(length, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(1, 4 * length)
    dress(axes, x="layers n", y="input positions that an output depends on")
    axes.legend(fontsize=8, frameon=False)
    return figure
