"""How a Vision Transformer reads an image: patches by a convolution, learned positions, one or two layers as a head."""

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

ROUNDING = 1e-12
"""Relative error of float64 results: the budget of the library's laws."""


def embedded(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The patches of images (B, C, Y, X) as vectors, each by the same linear map."""
    size = weight.shape[-1]
    cut = rearrange(images, "b c (y v) (x u) -> b (y x) (c v u)", v=size, u=size)
    return F.linear(cut, weight.flatten(1), bias)


@experiment(
    claims=("002.1.5",),
    title="Patches, positions and heads of a Vision Transformer",
    statement=(
        "Cutting an image into patches and mapping each linearly is a convolution whose stride is its kernel. The "
        "Vision Transformer is an encoder without a decoder: every patch sees every other. Its positions are learned, "
        "one vector for each patch in reading order. Its head has a hidden layer in pre-training and is a single "
        "linear layer in fine-tuning."
    ),
    formula=r"x_p = W \operatorname{vec}(\text{patch}_p) + b + e_p, \qquad y = W_2 \tanh(W_1 z)",
)
def patches(
    *,
    grid: Annotated[int, Between(2, 12)] = 6,
    patch_size: Annotated[int, Between(1, 16)] = 8,
    num_layers: Annotated[int, Between(1, 6)] = 2,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Compare the embedding with conv2d and with a linear map of patches; permute patches with and without positions.

    >>> patches(grid=2, patch_size=2, num_layers=1).verdict
    'holds'
    """
    random = generator(seed)
    image = torch.randn(1, 3, grid * patch_size, grid * patch_size, generator=random, dtype=torch.float64)
    cycle = torch.randperm(grid**2, generator=random)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)  # a single cycle: no patch stays in its place
    moved = _permuted(image, order, patch_size)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        placed, bare = (
            _model(grid, patch_size, num_layers, positions).double().eval() for positions in ("learned", "none")
        )
        nn.init.normal_(placed.positions)  # as large as the embeddings, as after training
        convolution = placed.patches
        by_model = rearrange(convolution(image), "b e y x -> b (y x) e")
        conv2d = F.conv2d(image, convolution.weight, convolution.bias, stride=patch_size)
        by_conv2d, linear = (
            rearrange(conv2d, "b e y x -> b (y x) e"),
            embedded(image, convolution.weight, convolution.bias),
        )
        z = placed.features(image)
        hidden, head = _linear_layers(placed)
        pretrained = head(torch.tanh(hidden(z[:, 0])))
        logits = {
            "no positions": (bare(image), bare(moved)),
            "learned positions": (placed(image), placed(moved)),
        }
        tuned = placed.with_classes(5)
    with rg.trace(placed) as trace, torch.no_grad():
        placed(image)
    smallest = min(weights.min().item() for layer in trace.layers if (weights := layer.weights) is not None)
    checks = [
        _close("embedding and conv2d apart", by_model, by_conv2d),
        _close("conv2d and a linear map of patches apart", by_conv2d, linear),
        _close("logits and a hidden tanh layer apart", placed.predict(z), pretrained),
        Check(name="linear layers of the head, pre-training", predicted=2, measured=len(_linear_layers(placed))),
        Check(name="linear layers of the head, fine-tuning", predicted=1, measured=len(_linear_layers(tuned))),
        Check(
            name="attention layers over another sequence",
            predicted=0,
            measured=sum(block.cross is not None for block in placed.stack.blocks),
        ),
        Check(name="smallest attention weight", predicted=1e-300, measured=smallest, rule="at least"),
        Check(
            name="learned positions, one a patch and the class token's",
            predicted=grid**2 + 1,
            measured=placed.positions.shape[1],
        ),
        _close("logits of permuted patches apart, no positions", *logits["no positions"]),
        Check(
            name="logits of permuted patches apart, learned positions",
            predicted=1e-6,
            measured=_apart(*logits["learned positions"]),
            rule="at least",
        ),
    ]
    rows = [{"of": check.name, "measured": check.measured} for check in checks]
    return Measurements(
        statement=tuple(checks),
        table=tuple(rows),
        draw=lambda: _figure(by_conv2d.flatten().tolist(), linear.flatten().tolist(), logits),
    )


def _model(grid: int, patch_size: int, num_layers: int, positions: str) -> rg.VisionTransformer:
    return rg.VisionTransformer(
        rg.VisionConfig(
            image_size=grid * patch_size,
            patch_size=patch_size,
            embedding_dim=32,
            num_layers=num_layers,
            num_heads=4,
            num_classes=10,
            head="mlp",
            positions="learned" if positions == "learned" else "none",
        )
    )


def _permuted(images: Tensor, order: Tensor, size: int) -> Tensor:
    """Images whose patches stand in another order."""
    cut = rearrange(images, "b c (y v) (x u) -> b (y x) c v u", v=size, u=size)[:, order]
    return rearrange(cut, "b (y x) c v u -> b c (y v) (x u)", y=images.shape[2] // size)


def _linear_layers(model: rg.VisionTransformer) -> list[nn.Module]:
    """The linear layers after the stack, in order."""
    return [layer for layer in (model.hidden, model.head) if layer is not None]


def _apart(first: Tensor, second: Tensor) -> float:
    return ((first - second).abs().max() / second.abs().max()).item()


def _close(name: str, first: Tensor, second: Tensor) -> Check:
    return Check(name=name, predicted=0, measured=_apart(first, second), tolerance=ROUNDING)


def _figure(convolved: Sequence[float], linear: Sequence[float], logits: dict[str, tuple[Tensor, Tensor]]) -> Figure:
    figure = new_figure(
        8.5,
        4.2,
        title="Patches are a convolution, and only positions tell their order",
        note="On the line both are equal. Random weights, float64.",
    )
    left, right = figure.subplots(1, 2)
    left.plot(convolved, linear, ".", color=COLOURS[0], markersize=3)
    for colour, marker, (name, (before, after)) in zip(COLOURS[1:], "os", logits.items(), strict=False):
        right.plot(before.flatten().tolist(), after.flatten().tolist(), marker, color=colour, label=name)
    for axes in (left, right):
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=COLOURS[6], linewidth=0.8, zorder=1)
    dress(left, title="embeddings of patches", x="conv2d, stride = kernel", y="linear map of each patch")
    dress(right, title="logits when patches are permuted", x="logits of the image", y="of its permuted patches")
    right.legend(fontsize=8, frameon=False)
    return figure
