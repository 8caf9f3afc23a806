"""Multi-head attention as a document prints it: where it raises, and what a query that sees nothing gets."""

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import WEIGHT_MAP, Figure, colour_bar, lattice, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

HIDDEN_SCORE = -1e9


def printed_weights(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(K)) with −1e9 in place of hidden scores."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~visible, HIDDEN_SCORE).softmax(-1)


def printed_combine(x: Tensor) -> Tensor:
    """(B, H, T, V) to (B, T, H·V), by a view of the transposed tensor."""
    batch, heads, tokens, length = x.shape
    return x.transpose(1, 2).view(batch, tokens, heads * length)


@experiment(
    claims=("003.3",),
    title="Multi-head attention as printed",
    statement=(
        "Multi-head attention splits projections into heads, hides masked scores with $-10^9$, takes the softmax, and "
        "combines heads by a transposition and a `view`. This code runs, and a query does not attend to what the mask "
        "hides."
    ),
    formula=r"\operatorname{softmax}\Bigl(\frac{q k^\top}{\sqrt{d}} + m\Bigr) v, \quad m_{ts} \in \{0, -10^9\}",
    instead=(
        "A view of a transposed tensor raises, the number -1e9 does not fit into float16, and a query whose keys are "
        "all hidden gets the plain average of the values it must not see. The library copies where it combines heads, "
        "hides with -inf, and gives such a query exactly 0."
    ),
)
def printed_heads(
    *,
    heads: Annotated[int, Between(2, 16)] = 4,
    d: Annotated[int, Between(1, 128, log=True)] = 8,
    tokens: Annotated[int, Between(3, 64)] = 10,
    padding: Annotated[int, Between(1, 63)] = 3,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Run the printed steps and the library's layer on a causal sequence that is padded on the left.

    >>> printed_heads(heads=2, tokens=5, padding=2).verdict
    'does not hold'
    """
    random = generator(seed)
    padded = min(padding, tokens - 1)
    real = (torch.arange(tokens) >= padded)[None]
    mask = rg.causal & rg.padding(valid=real)
    visible = mask.visible(1, heads, tokens, tokens, torch.device("cpu"))
    layer = rg.MultiHeadAttention(heads * d, heads, bias=False).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=(heads * d) ** -0.5, generator=random)
    x = torch.randn(1, tokens, heads * d, generator=random, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = layer.project(x)
        weights, ours = printed_weights(q, k, visible), rg.weights(q, k, mask=mask)
        mixed = weights @ v
        y = layer(x, mask=mask)
        repaired = layer.W_o(mixed.transpose(1, 2).flatten(2))
        hidden, average = mixed[:, :, :padded], v.mean(2, keepdim=True)
        half_q, half_k, half_v = q.half(), k.half(), v.half()
        statement = (
            Check(name="errors when heads are combined", predicted=0, measured=_errors(lambda: printed_combine(mixed))),
            Check(
                name="errors in float16",
                predicted=0,
                measured=_errors(lambda: printed_weights(half_q, half_k, visible)),
            ),
            Check(name="weight on hidden keys", predicted=0, measured=weights.masked_fill(visible, 0).max().item()),
            Check(name="output of a query that sees nothing", predicted=0, measured=hidden.abs().max().item()),
        )
        instead = (
            Check(
                name="printed: distance of that output from the average of all values",
                predicted=0,
                measured=(hidden - average).abs().max().item(),
                tolerance=1e-13 * v.abs().max().item(),
            ),
            Check(
                name="ours: errors when heads are combined", predicted=0, measured=_errors(lambda: layer(x, mask=mask))
            ),
            Check(
                name="ours: errors in float16",
                predicted=0,
                measured=_errors(lambda: rg.attend(half_q, half_k, half_v, mask=mask)),
            ),
            Check(name="ours: weight on hidden keys", predicted=0, measured=ours.masked_fill(visible, 0).max().item()),
            Check(
                name="ours: output of a query that sees nothing", predicted=0, measured=y[:, :padded].abs().max().item()
            ),
            Check(
                name="difference at real tokens, when the printed steps are repaired",
                predicted=0,
                measured=(y - repaired)[:, padded:].abs().max().item(),
                tolerance=1e-13 * (1 + repaired.abs().max().item()),
            ),
        )
    rows = tuple(
        {
            "query": place,
            "keys it sees": int(visible[0, 0, place].sum()),
            "printed: weight on hidden keys": weights[0, :, place]
            .masked_fill(visible[0, :, place], 0)
            .sum(-1)
            .mean()
            .item(),
            "printed: output": mixed[0, :, place].norm().item(),
            "ours: output": rg.attend(q, k, v, mask=mask)[0, :, place].norm().item(),
        }
        for place in range(tokens)
    )
    return Measurements(
        statement=statement, instead=instead, table=rows, draw=lambda: _figure(weights[0, 0], ours[0, 0], padded)
    )


def _errors(compute: Callable[[], object]) -> int:
    """1 if torch refuses to run this, else 0."""
    try:
        compute()
    except RuntimeError:
        return 1
    return 0


def _figure(printed: Tensor, ours: Tensor, padded: int) -> Figure:
    figure = new_figure(
        7.5,
        4.0,
        title="Padding that sees nothing attends to all keys, as printed",
        note=f"Weights of head 0 in a causal sequence whose first {padded} tokens are padding.",
    )
    panels = figure.subplots(1, 2, sharey=True)
    for axes, weights, title in zip(
        panels, (printed, ours), ("printed: hidden scores are −1e9", "library"), strict=True
    ):
        image = axes.imshow(weights, cmap=WEIGHT_MAP, vmin=0, vmax=3 / len(weights))
        lattice(axes, *weights.shape)
        axes.axhline(padded - 0.5, color="black", linewidth=1)
        axes.set_title(title, fontsize=9.5, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlabel("key", fontsize=8.5)
    panels[0].set_ylabel("query", fontsize=8.5)
    colour_bar(figure, image, panels, "weight", extend="max")
    return figure
