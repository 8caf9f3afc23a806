"""What a new token costs in masked attention: one more row, while all old outputs stay."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.cost import count_flops
from regard.core.style import COLOURS, Figure, Patch, dress, new_figure, to_rgba
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

ROUNDING = 1e-12
"""Relative error of float64 results: the budget of the library's laws."""


def token_flops(n: int, d: int) -> int:
    """FLOPs of a token after n others: four projections, its query with n + 1 keys, and n + 1 values."""
    return 8 * d**2 + 4 * (n + 1) * d


@experiment(
    claims=("004.12.7",),
    title="A new token in masked attention",
    statement=(
        "A new token in masked self-attention over $N$ tokens needs its key, query and value. Its key then meets the "
        "queries of all tokens: the attention weights grow from $N \\times N$ to $(N+1) \\times (N+1)$, and all output "
        "vectors are computed again."
    ),
    formula=r"y_{N+1} = \sum_{m=1}^{N+1} \operatorname{softmax}_m\left[k_m^T q_{N+1}\right] v_m",
    instead=(
        "Under the mask no old query sees the new key. Only the new query meets N + 1 keys: N + 1 new weights and one "
        "new output, for 8·D² + 4·(N + 1)·D FLOPs with the projections, if keys and values are kept. Old outputs stay, "
        "to the last bit."
    ),
)
def new_token(
    *,
    lengths: Annotated[tuple[int, ...], Between(1, 1024, log=True)] = (4, 16, 64, 256),
    head_length: Annotated[int, Between(1, 128, log=True)] = 16,
    num_heads: Annotated[int, Between(1, 8)] = 4,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Extend a layer's state by one token: its FLOPs, the new weights, and how far the old outputs move.

    >>> new_token(lengths=(4, 16), head_length=4).verdict
    'does not hold'
    """
    dim = num_heads * head_length
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        layer = rg.MultiHeadAttention(dim, num_heads).double()
    statement, instead, rows = [], [], []
    for n in lengths:
        x = torch.randn(1, n + 1, dim, generator=generator(seed), dtype=torch.float64)
        row = _measured(layer, x)
        statement += [
            Check(name=f"new weights of a head, N = {n}", predicted=2 * n + 1, measured=row["new weights"]),
            Check(name=f"outputs that are new or change, N = {n}", predicted=n + 1, measured=row["changed outputs"]),
        ]
        instead += [
            Check(name=f"new weights of a head, N = {n}", predicted=n + 1, measured=row["new weights"]),
            Check(name=f"outputs that are new or change, N = {n}", predicted=1, measured=row["changed outputs"]),
            Check(
                name=f"old outputs that another new token changes by a bit, N = {n}",
                predicted=0,
                measured=row["outputs that another token changes"],
            ),
            Check(name=f"FLOPs of extend, N = {n}", predicted=token_flops(n, dim), measured=row["FLOPs"]),
            Check(
                name=f"extend's output and the whole sequence's, N = {n}",
                predicted=0,
                measured=row["apart"],
                tolerance=ROUNDING,
            ),
        ]
        work = rg.Work(
            query_length=n + 1,
            key_length=n + 1,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            qk_length=head_length,
            value_length=head_length,
            mask=rg.causal,
        )
        rows.append({"N": n, **row, "FLOPs of all": rg.layer_cost(work, embedding_dim=dim).flops})
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(rows, dim)
    )


@torch.no_grad()
def _measured(layer: rg.MultiHeadAttention, x: Tensor) -> dict[str, float]:
    """What the last token changes."""
    n = x.shape[1] - 1
    before, after = layer(x[:, :n], mask=rg.causal), layer(x, mask=rg.causal)
    first, state = layer.extend(x[:, :n], layer.start(batch=1, capacity=n + 1), mask=rg.causal)
    last, _ = layer.extend(x[:, n:], state, mask=rg.causal)
    largest = after.abs().max()
    moved = (after[:, :n] - before).abs().amax(-1) > ROUNDING * largest
    other = layer(torch.cat([x[:, :n], -x[:, n:]], 1), mask=rg.causal)
    return {
        "new weights": _visible(layer, x) - _visible(layer, x[:, :n]),
        "changed outputs": 1 + int(moved.sum()),
        "outputs that another token changes": int((other != after)[:, :n].any(-1).sum()),
        "apart": ((torch.cat([first, last], 1) - after).abs().max() / largest).item(),
        "FLOPs": count_flops(lambda: layer.extend(x[:, n:], state, mask=rg.causal)),
    }


def _visible(layer: rg.MultiHeadAttention, x: Tensor) -> int:
    """How many weights of the first head are not 0."""
    q, k, _ = layer.project(x)
    return int((rg.weights(q, k, layer.mechanism, rg.causal)[0, 0] > 0).sum())


def _figure(rows: Sequence[dict[str, float]], dim: int) -> Figure:
    figure = new_figure(
        8.5,
        4,
        title="A new token adds a row of weights; no old query sees its key",
        note=f"D = {dim}. Points: counted as the layer runs. Lines: the formula, and the cost of the whole sequence.",
    )
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    size = 8
    kinds = torch.tril(torch.ones(size, size))
    kinds[-1] = 2
    kinds[:-1, -1] = 3
    colours = ("#f1f3f5", "#9fb3c8", COLOURS[2], COLOURS[1])
    left.imshow([[to_rgba(colours[int(kind)]) for kind in row] for row in kinds])
    dress(left, title=f"weights with the {size}th token", x="key", y="query")
    left.grid(visible=False)
    names = ("hidden", "old weights", "new weights", "meant by the document,\nhidden by the mask")
    handles = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    left.legend(handles=handles, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    lengths = sorted(int(row["N"]) for row in rows)
    ordered = sorted(rows, key=lambda row: row["N"])
    right.plot(lengths, [token_flops(n, dim) for n in lengths], color=COLOURS[2], label="8D² + 4(N + 1)D")
    right.plot(lengths, [row["FLOPs"] for row in ordered], "o", color=COLOURS[2], label="extend, counted")
    right.plot(
        lengths, [row["FLOPs of all"] for row in ordered], "x--", color=COLOURS[1], label="all N + 1 tokens again"
    )
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    dress(right, title="FLOPs", x="tokens before, N", y="FLOPs")
    right.legend(fontsize=8, frameon=False)
    return figure
