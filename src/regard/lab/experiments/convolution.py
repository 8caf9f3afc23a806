"""Equal attention to a token and its neighbours is a convolution, except at the edges."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, QUIET, WEIGHT_MAP, Figure, dress, lattice, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator
from regard.models.layers.positions import RelativeBias

ROUNDING = 1e-12
AWAY = -1e4
"""The score by distance of tokens that are no neighbours: below it exp is 0 in float64."""


def neighbours(position: int, length: int, radius: int) -> int:
    """How many tokens are at most `radius` away, the token itself among them."""
    return min(position + radius, length - 1) - max(position - radius, 0) + 1


@experiment(
    claims=("002.1.3e",),
    title="Attention to the neighbours is a convolution, but not at the edges",
    statement=(
        "Let positions make every token attend equally to itself and its two neighbours, with weights of 1/3 (in "
        "general, $1/(2r+1)$ within radius $r$). Then self-attention is a convolution of width 3 with equal entries."
    ),
    formula=r"a_{ij} = \frac{1}{2r+1} \text{ for } |i - j| \le r, \quad \text{else } 0",
    condition=(
        "The position is at least $r$ away from both edges. A token at an edge has fewer neighbours, and weights sum "
        "to 1: the first of them has 1/2, not 1/3. The output there is that of a convolution with zero padding, "
        "times $(2r+1)/m$ with $m$ neighbours."
    ),
)
def convolution(
    *,
    length: Annotated[int, Between(16, 512, log=True)] = 16,
    radius: Annotated[int, Between(1, 7)] = 1,
    channels: Annotated[int, Between(1, 256, log=True)] = 8,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Make the band from scores by distance, and compare attention with `conv1d` position by position.

    >>> convolution(radius=2).verdict
    'holds under a condition'
    """
    random = generator(seed)
    v = torch.randn(1, 1, length, channels, generator=random, dtype=torch.float64)
    flat = torch.zeros_like(v)
    bias = _by_distance(length, radius)
    weights, out = rg.weights(flat, flat, bias=bias)[0, 0], rg.attend(flat, flat, v, bias=bias)[0, 0]
    width = 2 * radius + 1
    kernel = torch.full((channels, 1, width), 1 / width, dtype=torch.float64)
    convolved = F.conv1d(v[0].mT, kernel, padding=radius, groups=channels)[0].mT
    counts = torch.tensor([neighbours(position, length, radius) for position in range(length)])
    inner = counts == width
    apart = (out - convolved).abs().amax(-1)
    mended = (out - convolved * (width / counts.double())[:, None]).abs().amax(-1)
    table = tuple(
        {
            "position": position,
            "neighbours": int(counts[position]),
            "largest weight": weights[position].max().item(),
            "attention − conv1d": apart[position].item(),
        }
        for position in range(length)
    )
    return Measurements(
        statement=(_equal("attention − conv1d, all positions", apart),),
        within=(
            _equal("attention − conv1d, inner positions", apart[inner]),
            _equal(f"weights − 1/{width} or 0, inner positions", _band_error(weights[inner], 1 / width)),
        ),
        instead=(
            _equal("attention − conv1d · (2r+1)/m, all positions", mended),
            Check(
                name="largest weight of the first position",
                predicted=1 / neighbours(0, length, radius),
                measured=weights[0].max().item(),
                tolerance=ROUNDING,
            ),
        ),
        table=table,
        draw=lambda: _figure(weights, apart, mended, radius),
    )


def _by_distance(length: int, radius: int) -> Tensor:
    """T5's bias, with 0 for tokens that are at most `radius` away and a very low score for all others."""
    positions = RelativeBias(1, bidirectional=True).double()
    distances = torch.arange(-radius, radius + 1)
    with torch.no_grad():
        positions.table.weight.fill_(AWAY)
        positions.table.weight[positions.buckets(distances)] = 0
        return positions(length, length)


def _band_error(weights: Tensor, share: float) -> Tensor:
    """How far weights are from `share` or 0, whichever is nearer."""
    return torch.minimum(weights.abs(), (weights - share).abs())


def _equal(name: str, differences: Tensor) -> Check:
    return Check(name=name, predicted=0, measured=differences.max().item(), tolerance=ROUNDING)


def _figure(weights: Tensor, apart: Tensor, mended: Tensor, radius: int) -> Figure:
    length = len(weights)
    figure = new_figure(
        8.5,
        3.8,
        title="Equal weights for neighbours are a convolution, except at the edges",
        note="Scores: T5's bias by distance, 0 for neighbours and −10,000 for others. conv1d pads with zeros.",
    )
    picture, axes = figure.subplots(1, 2, width_ratios=(1, 1.5))
    picture.imshow(weights, cmap=WEIGHT_MAP, vmin=0)
    lattice(picture, length, length)
    dress(picture, title=f"weights, radius {radius}", x="key", y="query")
    picture.grid(visible=False, which="major")
    places = list(range(length))
    axes.plot(places, apart, "o-", color=COLOURS[1], label="attention − conv1d")
    axes.plot(places, mended, "s", color=COLOURS[0], markersize=4, label="attention − conv1d · (2r+1)/m")
    for edge in (radius - 0.5, length - radius - 0.5):
        axes.axvline(edge, color=QUIET, linewidth=0.8, linestyle=":")
    dress(axes, x="position", y="largest difference over channels")
    axes.legend(fontsize=8, frameon=False)
    return figure
