"""How many weights, biases and attention weights self-attention has, and a fully connected layer in its place."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import nn

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator


def expected(d: int, n: int) -> dict[str, int]:
    """The counts for n inputs of length d."""
    return {
        "weights": 3 * d**2,
        "biases": 3 * d,
        "attention weights": n**2,
        "fully connected weights": d**2 * n**2,
        "fully connected biases": d * n,
    }


def printed(d: int, n: int) -> dict[str, int]:
    """The two counts that the document has otherwise."""
    return {"biases": 3, "fully connected biases": n**2}


@experiment(
    claims=("004.12.1",),
    title="Parameters of self-attention and of a fully connected layer",
    statement=(
        "For $N$ inputs of length $D$, queries, keys and values take $3D^2$ weights and $3$ biases, and there are "
        "$N^2$ attention weights. A fully connected layer from all $DN$ inputs to $DN$ outputs has $D^2N^2$ weights "
        "and $N^2$ biases."
    ),
    formula=r"3D^2 + 3D \quad\text{against}\quad D^2N^2 + DN",
    instead=(
        "A bias has a number for each output: 3·D biases of queries, keys and values, and D·N of the fully connected "
        "layer. The three counts of weights are right."
    ),
)
def counts(
    *,
    dims: Annotated[tuple[int, ...], Between(1, 512, log=True)] = (4, 16, 64, 256),
    lengths: Annotated[tuple[int, ...], Between(1, 256, log=True)] = (4, 16, 64, 128),
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Count the parameters of the library's layer, its attention weights, and those of torch's linear layer.

    >>> counts(dims=(4, 8), lengths=(4, 6)).verdict
    'does not hold'
    """
    statement, instead, rows = [], [], []
    for d in dims:
        for n in lengths:
            counted, right = _counted(d, n, seed), expected(d, n)
            for name, measured in counted.items():
                where = f"{name}, D = {d}, N = {n}"
                wrong = printed(d, n).get(name, right[name])
                statement.append(Check(name=where, predicted=wrong, measured=measured))
                if name in printed(d, n):
                    instead.append(Check(name=where, predicted=right[name], measured=measured))
            rows.append({"D": d, "N": n, **counted})
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(rows)
    )


def _counted(d: int, n: int, seed: int) -> dict[str, int]:
    """The same counts, of modules and of the weights that they compute."""
    layer = rg.MultiHeadAttention(d, num_heads=1)
    q, k, _ = layer.project(torch.randn(1, n, d, generator=generator(seed)))
    projections = (layer.W_q, layer.W_k, layer.W_v)
    connected = nn.Linear(d * n, d * n, device="meta")
    return {
        "weights": sum(projection.weight.numel() for projection in projections),
        "biases": sum(projection.bias.numel() for projection in projections),
        "attention weights": rg.weights(q, k, layer.mechanism).numel(),
        "fully connected weights": connected.weight.numel(),
        "fully connected biases": connected.bias.numel(),
    }


def _figure(rows: Sequence[dict[str, int]]) -> Figure:
    longest, widest = max(row["N"] for row in rows), max(row["D"] for row in rows)
    figure = new_figure(
        8.5,
        4,
        title="A bias has D numbers, not one: counts of modules and the formulas for them",
        note="Points: counted. Lines: the formulas. Crosses: the document's formulas for biases.",
    )
    left, right = figure.subplots(1, 2)
    over_d = [row for row in rows if row["N"] == longest]
    over_n = [row for row in rows if row["D"] == widest]
    for axes, mine, variable, fixed, names in (
        (left, over_d, "D", "N", ("weights", "biases")),
        (right, over_n, "N", "D", ("fully connected weights", "fully connected biases", "attention weights")),
    ):
        mine = sorted(mine, key=lambda row: row[variable])
        values = [row[variable] for row in mine]
        for colour, name in zip(COLOURS, names, strict=False):
            axes.plot(values, [expected(row["D"], row["N"])[name] for row in mine], color=colour, linewidth=1)
            axes.plot(values, [row[name] for row in mine], "o", color=colour, label=name)
            if "biases" in name:
                wrong = [printed(row["D"], row["N"])[name] for row in mine]
                axes.plot(values, wrong, "x--", color=colour, linewidth=1, zorder=4, label=f"{name}, as printed")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        dress(axes, title=f"over {variable}, {fixed} = {mine[0][fixed]}", x=variable, y="numbers")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.45)  # room for the legend
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    return figure
