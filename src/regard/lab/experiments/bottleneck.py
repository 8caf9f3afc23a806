"""What multi-head attention costs, and the length from which scores cost more than projections."""

from collections.abc import Sequence
from typing import Annotated

import torch

import regard as rg
from regard.core.cost import count_flops
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment


def layer_flops(n_t: int, n_s: int, d: int) -> int:
    """FLOPs of a layer: two projections of n_t queries, two of n_s keys, scores and sums of values."""
    return 4 * (n_t * d**2 + n_s * d**2 + n_t * n_s * d)


def turning_point(d: int) -> int:
    """The length at which the scores of self-attention cost as much as its projections: 4·n²·d = 8·n·d²."""
    return 2 * d


@experiment(
    claims=("000.2c", "000.2d"),
    title="The cost of multi-head attention, and its bottleneck",
    statement=(
        "For $n_t$ queries and $n_s$ keys of dimension $d$, multi-head attention costs "
        "$n_t d^2 + n_s d^2 + n_t n_s d$ up to constants, for any number of heads. For short sequences its projections "
        "are the bottleneck, for long ones the scores and the sums of values."
    ),
    formula=r"4\,(n_t d^2 + n_s d^2 + n_t n_s d) \text{ FLOPs}, \qquad 4 n^2 d > 8 n d^2 \iff n > 2d",
)
def bottleneck(
    *,
    targets: Annotated[tuple[int, ...], Between(1, 2048, log=True)] = (16, 128, 512),
    sources: Annotated[tuple[int, ...], Between(1, 2048, log=True)] = (16, 128, 512),
    head_lengths: Annotated[tuple[int, ...], Between(1, 128, log=True)] = (8, 32),
    num_heads: Annotated[int, Between(1, 16)] = 4,
) -> Measurements:
    """Count the FLOPs of real layers, and find the last length at which the library calls projections the bottleneck.

    >>> bottleneck(targets=(4,), sources=(4, 8), head_lengths=(4,)).verdict
    'holds'
    """
    checks, rows = [], []
    for length in head_lengths:
        d = num_heads * length
        layer = rg.MultiHeadAttention(d, num_heads)
        for n_t in targets:
            for n_s in sources:
                query, key = torch.zeros(1, n_t, d), torch.zeros(1, n_s, d)
                flops = _flops(layer, query, key)
                checks.append(
                    Check(
                        name=f"FLOPs, d = {d}, n_t = {n_t}, n_s = {n_s}",
                        predicted=layer_flops(n_t, n_s, d),
                        measured=flops,
                    )
                )
                rows.append({"d": d, "n_t": n_t, "n_s": n_s, "FLOPs": flops})
        checks.append(
            Check(
                name=f"last length with projections as the bottleneck, d = {d}",
                predicted=turning_point(d),
                measured=_last_length(num_heads, length),
            )
        )
    dims = [num_heads * length for length in dict.fromkeys(head_lengths)]
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, dims, num_heads))


def _flops(layer: rg.MultiHeadAttention, query: torch.Tensor, key: torch.Tensor) -> int:
    return count_flops(lambda: layer(query, key))


def _parts(num_heads: int, length: int, n: int) -> rg.LayerCost:
    """What the library says of self-attention over n tokens."""
    work = rg.Work(
        query_length=n,
        key_length=n,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        qk_length=length,
        value_length=length,
    )
    return rg.layer_cost(work, embedding_dim=num_heads * length)


def _last_length(num_heads: int, length: int) -> int:
    low, high = 1, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        if _parts(num_heads, length, middle).bottleneck == "projections":
            low = middle
        else:
            high = middle
    return low


def _figure(rows: Sequence[dict[str, int]], dims: Sequence[int], num_heads: int) -> Figure:
    figure = new_figure(
        8.5,
        4,
        title="Projections cost more up to n = 2d, scores and sums of values beyond",
        note=f"{num_heads} heads. Left: self-attention, by the library's formulas. Right: layers that ran.",
    )
    left, right = figure.subplots(1, 2)
    lengths = [2**power for power in range(3, 14)]
    for colour, d in zip(COLOURS, dims, strict=False):
        parts = [_parts(num_heads, d // num_heads, n) for n in lengths]
        left.plot(lengths, [part.projections.flops for part in parts], color=colour, label=f"projections, d = {d}")
        left.plot(lengths, [part.attention.flops for part in parts], "--", color=colour, label=f"attention, d = {d}")
        n = turning_point(d)
        left.plot(n, 8 * n * d**2, "o", color=colour)
        beside = (-62, 6) if d == max(dims) else (6, -11)
        left.annotate(f"n = 2d = {n}", (n, 8 * n * d**2), xytext=beside, textcoords="offset points", fontsize=8)
        mine = [row for row in rows if row["d"] == d]
        formula = [layer_flops(row["n_t"], row["n_s"], d) for row in mine]
        right.plot(formula, [row["FLOPs"] for row in mine], "o", color=colour, label=f"d = {d}")
    ends = [min(row["FLOPs"] for row in rows), max(row["FLOPs"] for row in rows)]
    right.plot(ends, ends, color=COLOURS[6], linewidth=1, label="equal")
    for axes in (left, right):
        axes.set_yscale("log")
    left.set_xscale("log", base=2)
    right.set_xscale("log")
    dress(left, title="where the bottleneck moves", x="length n", y="FLOPs")
    dress(right, title="all n_t, n_s and d", x="4 (n_t d² + n_s d² + n_t n_s d)", y="counted FLOPs")
    left.legend(fontsize=8, frameon=False)
    right.legend(fontsize=8, frameon=False)
    return figure
