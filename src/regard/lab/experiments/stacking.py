"""Why a layer's output has the size of its input: layers can follow one another."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator


def depth(width: int, dim: int, most: int) -> int:
    """How many layers can follow one another that read vectors of `dim` and write vectors of `width`."""
    return most if width == dim else 1


@experiment(
    claims=("004.12.2",),
    title="Equal sizes let layers be stacked",
    statement=(
        "A self-attention layer whose outputs have the size $D$ of its inputs can be repeated without anything in "
        "between, and joined to its input by a residual connection. Heads of value length $V$ write vectors of "
        "$H \\cdot V$: without an output projection that fits only if $H \\cdot V = D$."
    ),
    formula=r"x_{l+1} = x_l + \operatorname{Sa}(x_l) \quad\Longleftrightarrow\quad H \cdot V = D",
)
def stacking(
    *,
    dim: Annotated[int, Between(4, 512, log=True)] = 64,
    num_heads: Annotated[int, Between(1, 16)] = 4,
    value_lengths: Annotated[tuple[int, ...], Between(1, 256, log=True)] = (4, 8, 16, 32, 64),
    depth_limit: Annotated[int, Between(2, 64)] = 12,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Apply a layer to its own output until it refuses, with and without the output projection.

    >>> stacking(value_lengths=(8, 16), depth_limit=4).verdict
    'holds'
    """
    x = torch.randn(1, 8, dim, generator=generator(seed))
    checks, rows = [], []
    for length in value_lengths:
        layer = rg.MultiHeadAttention(dim, num_heads, qk_length=max(1, dim // num_heads), value_length=length)
        bare, width = _layers(layer, x, depth_limit, project=False), num_heads * length
        whole = _layers(layer, x, depth_limit, project=True)
        checks += [
            Check(name=f"layers without W_o, V = {length}", predicted=depth(width, dim, depth_limit), measured=bare),
            Check(name=f"layers with W_o, V = {length}", predicted=depth_limit, measured=whole),
        ]
        rows.append({"V": length, "H·V": width, "D": dim, "layers without W_o": bare, "layers with W_o": whole})
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, depth_limit))


@torch.no_grad()
def _layers(layer: rg.MultiHeadAttention, x: Tensor, most: int, *, project: bool) -> int:
    """How many layers with a residual connection follow one another before one refuses its input."""
    for number in range(most):
        try:
            out = layer(x) if project else layer.combine_heads(layer.attend(*layer.project(x))[0])
        except (ValueError, RuntimeError):
            return number
        x = x + out if out.shape == x.shape else out
    return most


def _figure(rows: Sequence[dict[str, int]], most: int) -> Figure:
    rows = sorted(rows, key=lambda row: row["V"])
    dim = rows[0]["D"]
    figure = new_figure(
        7.5,
        3.6,
        title="Without an output projection, layers stack only where H·V = D",
        note=f"Layers applied before one refuses its input, {most} at most.",
    )
    axes = figure.subplots()
    widths = [row["H·V"] for row in rows]
    axes.axvline(dim, color=COLOURS[6], linewidth=1, linestyle="--", label=f"D = {dim}")
    axes.plot(widths, [row["layers with W_o"] for row in rows], "s-", color=COLOURS[2], label="with W_o")
    axes.plot(widths, [row["layers without W_o"] for row in rows], "o", color=COLOURS[1], label="without W_o")
    axes.vlines(widths, 0, [row["layers without W_o"] for row in rows], color=COLOURS[1], linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.15 * most)
    dress(axes, x="width of the heads' output, H·V", y="layers")
    axes.legend(fontsize=8, frameon=False, loc="center left")
    return figure
