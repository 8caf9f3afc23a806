"""Self-attention does not know the order of its inputs: permuted inputs give permuted outputs."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.core.style import COLOURS, Figure, Line2D, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator
from regard.models.layers.positions import Rotary, sinusoidal

ROUNDING = 1e-12
"""Relative error of float64 results: the budget of the library's laws."""


def permuted(x: Tensor, order: Tensor) -> Tensor:
    """X P, for inputs (…, N, D)."""
    return x[..., order, :]


@experiment(
    claims=("004.12.3",),
    title="Permuted inputs give permuted outputs",
    statement=(
        "Self-attention is equivariant to permutations: $\\operatorname{Sa}(XP) = \\operatorname{Sa}(X)P$, since the "
        "rows and the columns of its weights are permuted, $\\operatorname{softmax}(P^T K^T Q P) = "
        "P^T \\operatorname{softmax}(K^T Q) P$. (Without $P^T$ and $P$ around the softmax, as a derivation prints it, "
        "it is another output.) Positions and a causal mask break the equivariance."
    ),
    formula=r"\operatorname{Sa}(XP) = VP \cdot P^T \operatorname{softmax}(K^T Q)\, P = \operatorname{Sa}(X)\,P",
)
def equivariance(
    *,
    length: Annotated[int, Between(2, 512, log=True)] = 24,
    head_length: Annotated[int, Between(2, 64, log=True)] = 8,
    num_heads: Annotated[int, Between(1, 8)] = 2,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Compare the output for permuted inputs with the permuted output, for every mechanism, positions and masks.

    >>> equivariance(length=8, head_length=4).verdict
    'holds'
    """
    random = generator(seed)
    # A single cycle through all inputs: none stays in its place.
    cycle = torch.randperm(length, generator=random)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    dim = 2 * (head_length // 2) * num_heads  # rotary heads turn pairs of numbers
    x = torch.randn(1, length, dim, generator=random, dtype=torch.float64)
    rows: list[tuple[str, str, float]] = []
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        for name, mechanism in REGISTRY.items():
            layer = rg.MultiHeadAttention(dim, num_heads, mechanism=mechanism).double()
            rows.append((name, "by definition" if mechanism.ordered else "", _moved(layer, x, order)))
        layer = rg.MultiHeadAttention(dim, num_heads).double()
        turned = rg.MultiHeadAttention(dim, num_heads, rotary=Rotary(length=dim // num_heads)).double()
        places = sinusoidal(torch.arange(length), dim).double()
        rows += [
            ("softmax, causal mask", "mask", _moved(layer, x, order, rg.causal)),
            ("softmax, window", "mask", _moved(layer, x, order, rg.Window(1))),
            ("softmax, sinusoids", "positions", _moved(layer, x, order, places=places)),
            ("softmax, rotary", "positions", _moved(turned, x, order)),
        ]
        q, k, v = layer.project(x)
        weights, expected = rg.weights(q, k), permuted(rg.attend(q, k, v), order)
        printed = ((weights @ permuted(v, order) - expected).abs().max() / expected.abs().max()).item()
        again = rg.weights(permuted(q, order), permuted(k, order))
        both = (again - weights[..., order, :][..., order]).abs().max().item()
    checks = [
        Check(name=f"{name}: outputs apart", predicted=1e-3, measured=apart, rule="at least")
        if order_used
        else Check(name=f"{name}: outputs apart", predicted=0, measured=apart, tolerance=ROUNDING)
        for name, order_used, apart in rows
    ]
    checks += [
        Check(name="weights, rows and columns permuted", predicted=0, measured=both, tolerance=ROUNDING),
        Check(name="as printed, the values alone permuted: apart", predicted=1e-3, measured=printed, rule="at least"),
    ]
    table = [{"self-attention": name, "order used by": used, "apart": apart} for name, used, apart in rows]
    return Measurements(statement=tuple(checks), table=tuple(table), draw=lambda: _figure(rows, length))


def _moved(
    layer: rg.MultiHeadAttention,
    x: Tensor,
    order: Tensor,
    mask: rg.Mask | None = None,
    places: Tensor | float = 0.0,
) -> float:
    """How far Sa(XP) is from Sa(X)P, relative to the largest output."""
    expected = permuted(layer(x + places, mask=mask), order)
    return ((layer(permuted(x, order) + places, mask=mask) - expected).abs().max() / expected.abs().max()).item()


def _figure(rows: Sequence[tuple[str, str, float]], length: int) -> Figure:
    figure = new_figure(
        8,
        0.21 * len(rows) + 1.3,
        title="Permuted inputs give permuted outputs unless order is used",
        note=f"{length} inputs, float64, random layers. The largest difference relative to the largest output.",
    )
    axes = figure.subplots()
    words = {"": "no order", "by definition": "causal by definition", "mask": "mask", "positions": "positions"}
    styles = dict(zip(words, line_styles(len(words)), strict=True))
    for place, (_, order, apart) in enumerate(rows):
        shown, (colour, marker) = max(apart, 1e-17), styles[order]
        axes.plot([1e-17, shown], [place, place], color=colour, linewidth=1)
        axes.plot(shown, place, marker, color=colour)
    axes.set_xscale("log")
    axes.axvline(ROUNDING, color=COLOURS[6], linewidth=1, linestyle="--")
    axes.text(ROUNDING, -0.9, " rounding", fontsize=8, color=COLOURS[6])
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    dress(axes, x="distance between Sa(XP) and Sa(X)P")
    handles = [
        Line2D([], [], color=colour, marker=marker, label=words[kind]) for kind, (colour, marker) in styles.items()
    ]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="upper right")
    return figure
