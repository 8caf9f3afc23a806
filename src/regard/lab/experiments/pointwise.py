"""Attention of each token to itself alone is a convolution of width 1."""

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.core.style import WEIGHT_MAP, Figure, dress, lattice, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

ROUNDING = 1e-12


def kernel(layer: rg.MultiHeadAttention) -> tuple[Tensor, Tensor]:
    """Weight (E, E, 1) and bias (E,) of the convolution: the product of the projections of values and outputs."""
    weight = layer.W_o.weight @ layer.W_v.weight
    return weight[:, :, None], layer.W_o.weight @ layer.W_v.bias + layer.W_o.bias


@experiment(
    claims=("002.1.3d",),
    title="Diagonal attention is a 1×1 convolution",
    statement=(
        "If the matrix of weights is diagonal, self-attention applies one and the same linear map $W_o W_v$ to every "
        "position by itself: a convolution of width 1. Nothing passes from one position to another."
    ),
    formula=r"y_t = W_o (W_v x_t + b_v) + b_o",
)
def pointwise(
    *,
    length: Annotated[int, Between(1, 256, log=True)] = 12,
    heads: Annotated[tuple[int, ...], Between(1, 16)] = (1, 2, 4),
    head_length: Annotated[int, Between(1, 64, log=True)] = 8,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Compare layers whose tokens see themselves alone with a convolution, and look for what crosses positions.

    >>> pointwise(heads=(2,)).verdict
    'holds'
    """
    random = generator(seed)
    checks, rows = [], []
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for count in dict.fromkeys(heads):
        width = count * head_length
        x = torch.randn(1, length, width, generator=random, dtype=torch.float64)
        layer = _layer(width, count, random)
        alone = rg.window(before=0, after=0)
        with torch.no_grad():
            out = layer(x, mask=alone)
            convolved = F.conv1d(x.mT, *kernel(layer)).mT
            q, k, _ = layer.project(x)
        weights = rg.weights(q, k, layer.mechanism, alone)
        apart = (out - convolved).abs().max().item()
        crossing, reach = _reach(layer, x, alone)
        everything, wide = _reach(layer, x, None)
        checks += [
            Check(
                name=f"largest weight off the diagonal, {count} heads",
                predicted=0,
                measured=(weights - torch.eye(length, dtype=torch.float64)).abs().max().item(),
            ),
            Check(name=f"layer − conv1d, {count} heads", predicted=0, measured=apart, tolerance=ROUNDING),
            Check(name=f"largest gradient between positions, {count} heads", predicted=0, measured=crossing),
        ]
        rows.append(
            {
                "heads": count,
                "width": width,
                "layer − conv1d": apart,
                "largest gradient between positions": crossing,
                "without the mask": everything,
            }
        )
        parts[count] = reach, wide
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, parts))


def _layer(width: int, heads: int, random: torch.Generator) -> rg.MultiHeadAttention:
    """A layer with random projections and biases, all from `random`."""
    layer = rg.MultiHeadAttention(width, heads).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) * width**-0.5)
    return layer


def _reach(layer: rg.MultiHeadAttention, x: Tensor, mask: rg.Mask | None) -> tuple[float, Tensor]:
    """The largest derivative of an output by another position's input, and the size of all of them, (T, T)."""
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, mask=mask)[0].sum(-1), x)[:, 0]
    sizes = jacobian.abs().amax(-1)
    return (sizes - sizes.diag().diag()).max().item(), sizes


def _figure(rows: Sequence[dict[str, float]], parts: dict[int, tuple[Tensor, Tensor]]) -> Figure:
    row = rows[-1]
    reach, wide = parts[int(row["heads"])]
    figure = new_figure(
        7.5,
        3.8,
        title="Diagonal weights: every output is of its own position alone",
        note=f"Sizes of derivatives, relative to the largest; {row['heads']} heads. Left: layer − conv1d is "
        f"{row['layer − conv1d']:.0e} at most.",
    )
    for axes, sizes, title in zip(
        figure.subplots(1, 2), (reach, wide), ("tokens see themselves alone", "tokens see all"), strict=True
    ):
        axes.imshow(sizes / sizes.max(), cmap=WEIGHT_MAP, vmin=0, vmax=1)
        lattice(axes, *sizes.shape)
        dress(axes, title=title, x="input position", y="output position")
        axes.grid(visible=False, which="major")
    return figure
