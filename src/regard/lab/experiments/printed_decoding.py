"""Decoding with a KV cache as a document prints it: two axes are swapped, and a factor is missing."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

PRINTED, RIGHT = "bhn,bhvn->bhv", "bhn,bhnv->bhv"
"""The product of weights and cached values (B, H, N, V): as printed, and with its axes in order."""


def printed_step(layer: rg.MultiHeadAttention, x: Tensor, cache: tuple[Tensor, Tensor], product: str) -> Tensor:
    """The newest token's output (B, E) from cached keys and values, as printed: its scores are not scaled."""
    q = torch.einsum("bd,hdk->bhk", x, _per_head(layer.W_q, layer.qk_length))
    keys, values = cache
    weights = torch.einsum("bhk,bhnk->bhn", q, keys).softmax(-1)
    mixed = torch.einsum(product, weights, values)
    return torch.einsum("bhv,hvd->bd", mixed, _per_head(layer.W_o, layer.value_length, outputs=True))


@experiment(
    claims=("003.4.einsum",),
    title="Incremental decoding as printed",
    statement=(
        "A decoder with a KV cache appends the key and the value of the newest token, and computes its attention over "
        "the cache. The printed steps for multi-head and multi-query attention give the same outputs as scaled "
        "dot-product attention over the whole sequence."
    ),
    formula=r"o_h = \sum_n \operatorname{softmax}_n(q_h \cdot k_{hn}) \, v_{hn}",
    instead=(
        "The product with the values names their axes in the wrong order and raises, except by chance; both forms "
        "leave out 1/sqrt(k), so they are attention with beta = 1. With the axes in order and the scale, both are "
        "equal to attention over the whole sequence."
    ),
)
def printed_decoding(
    *,
    heads: Annotated[int, Between(2, 16)] = 4,
    d: Annotated[int, Between(2, 64, log=True)] = 16,
    tokens: Annotated[int, Between(2, 128, log=True)] = 32,
    batch: Annotated[int, Between(1, 8)] = 2,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Decode token by token, as printed and repaired, beside the library's layer over the whole sequence.

    >>> printed_decoding(heads=2, d=4, tokens=6).verdict
    'does not hold'
    """
    random = generator(seed)
    statement: list[Check] = []
    instead: list[Check] = []
    rows: list[dict[str, Any]] = []
    for name, groups in (("MHA", heads), ("MQA", 1)):
        layer = rg.MultiHeadAttention(heads * d, heads, groups, bias=False).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=(heads * d) ** -0.5, generator=random)
        x = torch.randn(batch, tokens, heads * d, generator=random, dtype=torch.float64)
        with torch.no_grad():
            whole = layer(x, mask=rg.causal)
            unscaled = _with_scale(layer, x, 1.0)
            _, k, v = layer.project(x)
            k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
            mine: list[dict[str, Any]] = []
            for end in range(1, tokens + 1):
                past, newest = (k[:, :, :end], v[:, :, :end]), x[:, end - 1]
                repaired = printed_step(layer, newest, past, RIGHT)
                scaled = printed_step(layer, newest, (past[0] * d**-0.5, past[1]), RIGHT)
                # Multi-query attention has another product, whose axes are in order.
                printed = _attempt(layer, newest, past) if groups > 1 else repaired
                target = whole[:, end - 1]
                mine.append(
                    {
                        "attention": name,
                        "tokens": end,
                        "runs": int(printed is not None),
                        "printed": None if printed is None else _distance(printed, target),
                        "axes in order": _distance(repaired, target),
                        "β = 1": _distance(repaired, unscaled[:, end - 1]),
                        "axes and scale": _distance(scaled, target),
                    }
                )
        size = 1e-13 * (1 + whole.abs().max().item())
        statement += [
            Check(name=f"{name}: steps that raise", predicted=0, measured=sum(1 - row["runs"] for row in mine)),
            Check(
                name=f"{name}: difference from the whole, axes in order",
                predicted=0,
                measured=max(row["axes in order"] for row in mine),
                tolerance=size,
            ),
        ]
        instead += [
            Check(
                name=f"{name}: difference from β = 1, axes in order",
                predicted=0,
                measured=max(row["β = 1"] for row in mine),
                tolerance=size,
            ),
            Check(
                name=f"{name}: difference from the whole, axes in order and scaled",
                predicted=0,
                measured=max(row["axes and scale"] for row in mine),
                tolerance=size,
            ),
            Check(
                name=f"{name}: difference of the library's stream from the whole",
                predicted=0,
                measured=_distance(_streamed(layer, x), whole),
                tolerance=size,
            ),
        ]
        rows += mine
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(rows, d)
    )


def _per_head(linear: torch.nn.Linear, length: int, *, outputs: bool = False) -> Tensor:
    """A projection's weight as (H, E, K), or W_o's as (H, V, E)."""
    weight = linear.weight
    if outputs:
        return weight.T.unflatten(0, (-1, length))
    return weight.unflatten(0, (-1, length)).transpose(1, 2)


def _attempt(layer: rg.MultiHeadAttention, x: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor | None:
    """A step as printed; None if it raises."""
    try:
        return printed_step(layer, x, cache, PRINTED)
    except RuntimeError:
        return None


def _with_scale(layer: rg.MultiHeadAttention, x: Tensor, beta: float) -> Tensor:
    """The layer's output with another temperature."""
    q, k, v = layer.project(x)
    return layer.W_o(layer.combine_heads(rg.attend(q, k, v, rg.Softmax(beta=beta), rg.causal)))


def _streamed(layer: rg.MultiHeadAttention, x: Tensor) -> Tensor:
    """The library's outputs, one token at a time."""
    state, outputs = layer.start(batch=len(x), capacity=x.shape[1]), []
    for token in x.split(1, dim=1):
        out, state = layer.extend(token, state, rg.causal)
        outputs.append(out)
    return torch.cat(outputs, dim=1)


def _distance(out: Tensor, target: Tensor) -> float:
    return (out - target).abs().max().item()


def _figure(rows: Sequence[Mapping[str, Any]], d: int) -> Figure:
    figure = new_figure(
        7.5,
        3.8,
        title="Decoding as printed is not the attention of the whole sequence",
        note=f"Largest difference over batch and width. As printed, multi-head attention runs for 1 and for {d} tokens "
        "alone (values have that length).",
    )
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("MHA", "MQA"), strict=True):
        mine = [row for row in rows if row["attention"] == name]
        ends = [row["tokens"] for row in mine]
        runs = [row for row in mine if row["printed"] is not None]
        axes.plot(ends, [row["axes in order"] for row in mine], color=COLOURS[0], label="axes in order")
        axes.plot(
            [row["tokens"] for row in runs], [row["printed"] for row in runs], "o", color=COLOURS[1], markersize=4,
            label="as printed, where it runs",
        )  # fmt: skip
        axes.plot(ends, [row["axes and scale"] for row in mine], "s", color=COLOURS[2], markersize=3,
                  label="axes in order, scores scaled")  # fmt: skip
        axes.set_yscale("symlog", linthresh=1e-16)
        axes.set_yticks([0, 1e-16, 1e-12, 1e-8, 1e-4, 1])
        axes.set_ylim(0, 100)
        dress(axes, title=name, x="tokens in the cache", y="difference from the whole" if name == "MHA" else "")
    panels[0].legend(fontsize=8, frameon=False, loc="center right")
    return figure
