"""Longer values: which lines of multi-head attention have to know about them."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, INK, Figure, lattice, new_figure, to_rgba
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

STEPS = ("split", "attention", "combine", "W_o")
CHANGES = ("W_v alone", "and W_o", "and splitting", "and combining")
"""What knows the length of values, one line of the code after the other."""


def changed_heads(layer: rg.MultiHeadAttention, x: Tensor, split: int, combined: int, output: Tensor) -> list[Tensor]:
    """Multi-head attention step by step, up to the step that raises.

    Values are split into heads of `split`, and combined to a width of `combined`; `output` is W_o's weight.
    """
    batch, tokens, _ = x.shape
    steps: list[Tensor] = []
    try:
        q, k = (layer.split_heads(linear(x), layer.qk_length) for linear in (layer.W_q, layer.W_k))
        steps.append(layer.W_v(x).view(batch, tokens, layer.num_heads, split).transpose(1, 2))
        steps.append((q @ k.mT / layer.qk_length**0.5).softmax(-1) @ steps[-1])
        steps.append(steps[-1].transpose(1, 2).reshape(batch, tokens, combined))
        steps.append(steps[-1] @ output.mT)
    except RuntimeError:
        pass
    return steps


@experiment(
    claims=("003.3b",),
    title="Longer value vectors",
    statement=(
        "If $W_v$ gives values that are $c$ times as long as queries and keys, only $W_o$ has to change: it reads "
        "$c$ times as many numbers, and gives as many as before, because of the residual connection."
    ),
    formula=r"W_o \in \mathbb{R}^{E \times H V}, \quad V = c\,K",
    condition="if heads are also split and combined by the length of the values, not by that of queries and keys",
)
def value_length(
    *,
    factor: Annotated[int, Between(2, 8)] = 2,
    heads: Annotated[int, Between(1, 16)] = 4,
    d: Annotated[int, Between(1, 128, log=True)] = 16,
    tokens: Annotated[int, Between(1, 128)] = 12,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Make one change after the other, and compare the last form with the library's layer.

    >>> value_length(heads=2, d=4).verdict
    'holds under a condition'
    """
    random = generator(seed)
    width, long = heads * d, factor * d
    layer = rg.MultiHeadAttention(width, heads, value_length=long, bias=False).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=width**-0.5, generator=random)
    x = torch.randn(2, tokens, width, generator=random, dtype=torch.float64)
    old = torch.randn(width, width, generator=random, dtype=torch.float64)
    with torch.no_grad():
        forms = (
            changed_heads(layer, x, d, width, old),
            changed_heads(layer, x, d, width, layer.W_o.weight),
            changed_heads(layer, x, long, width, layer.W_o.weight),
            changed_heads(layer, x, long, heads * long, layer.W_o.weight),
        )
        y = layer(x)
    reached = [len(steps) for steps in forms]
    whole = forms[-1][-1] if reached[-1] == len(STEPS) else torch.full_like(y, torch.nan)
    statement = (Check(name="steps that run when W_v and W_o are changed", predicted=len(STEPS), measured=reached[1]),)
    within = (
        Check(name="steps that run when splitting and combining are too", predicted=len(STEPS), measured=reached[3]),
        Check(
            name="difference from the library's layer",
            predicted=0,
            measured=(whole - y).abs().max().item(),
            tolerance=1e-12 * (1 + y.abs().max().item()),
        ),
        Check(name="width that W_o reads", predicted=factor * width, measured=layer.W_o.in_features),
        Check(name="width of the output, for the residual connection", predicted=width, measured=y.shape[-1]),
        Check(
            name="weights of the layer",
            predicted=2 * (1 + factor) * width**2,
            measured=sum(parameter.numel() for parameter in layer.parameters()),
        ),
    )
    rows = tuple(
        {"knows the length of values": change, "steps that run": count, "of": len(STEPS)}
        for change, count in zip(CHANGES, reached, strict=True)
    )
    return Measurements(statement=statement, within=within, table=rows, draw=lambda: _figure(rows, factor))


def _figure(rows: Sequence[Mapping[str, object]], factor: int) -> Figure:
    figure = new_figure(
        7.5,
        3.4,
        title=f"Values {factor} times as long: which lines have to know",
        note="One change after the other, from above; every row keeps the changes of those above it.",
    )
    axes = figure.subplots()
    counts = [int(str(row["steps that run"])) for row in rows]
    runs, raises, never = (to_rgba(colour, 0.55) for colour in (COLOURS[2], COLOURS[1], "#ffffff"))
    cells = [
        [runs if step < count else raises if step == count else never for step in range(len(STEPS))] for count in counts
    ]
    axes.imshow(cells, aspect="auto")
    for down, count in enumerate(counts):
        for across in range(min(count + 1, len(STEPS))):
            axes.text(
                across, down, "runs" if across < count else "raises", ha="center", va="center", color=INK, fontsize=9
            )
    lattice(axes, len(rows), len(STEPS))
    axes.set_xticks(range(len(STEPS)), STEPS, fontsize=9)
    axes.set_yticks(range(len(rows)), CHANGES, fontsize=9)
    axes.set_xlabel("step of the forward pass", fontsize=8.5)
    axes.set_ylabel("knows the length", fontsize=8.5)
    return figure
