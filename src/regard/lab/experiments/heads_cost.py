"""What heads of length D/H save: nothing of the weights, and nothing of the scores; they cost as much as one head."""

from collections.abc import Sequence
from math import gcd
from typing import Annotated

import torch

import regard as rg
from regard.core.cost import count_flops
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment


def weights_of_heads(dim: int, num_heads: int, head_length: int) -> int:
    """Weights of one projection: num_heads times a matrix from dim to head_length."""
    return num_heads * dim * head_length


def score_flops(n: int, num_heads: int, head_length: int) -> int:
    """FLOPs of the products of n queries and n keys in all heads."""
    return 2 * n**2 * num_heads * head_length


def printed_weights(dim: int, num_heads: int) -> int:
    """The weights of all heads as the document has them: num_heads matrices of D/H × D/H."""
    return num_heads * (dim // num_heads) ** 2


def printed_score_flops(n: int, dim: int, num_heads: int) -> float:
    """FLOPs of one head's scores, were they to fall with (D/H)² as the document has it."""
    return 2 * n**2 * dim / num_heads**2


@experiment(
    claims=("004.12.5",),
    title="What heads of length D/H save",
    statement=(
        "With $D/H$ numbers per head instead of $D$, a projection of all $H$ heads has $H(D/H)^2 = D^2/H$ weights, "
        "and the scores of a head cost $1/H^2$ of those of a single head of length $D$."
    ),
    formula=r"H \cdot D \cdot \frac{D}{H} = D^2, \qquad H \cdot N^2 \cdot \frac{D}{H} = N^2 D",
    instead=(
        "A head's projection is D × D/H, so that all heads together have D² weights for any H; a head's scores cost "
        "1/H, and those of all heads N²·D multiply-adds for any H. Heads of length D would cost H times that."
    ),
)
def heads_cost(
    *,
    dim: Annotated[int, Between(4, 1024, log=True)] = 256,
    length: Annotated[int, Between(2, 1024, log=True)] = 128,
    heads: Annotated[tuple[int, ...], Between(1, 64, log=True)] = (1, 2, 4, 8, 16),
) -> Measurements:
    """Count weights and FLOPs of real layers over the number of heads; of a number that does not divide `dim`, its
    largest factor that does is taken.

    >>> heads_cost(dim=16, length=8, heads=(1, 2, 4)).verdict
    'does not hold'
    """
    x = torch.zeros(1, length, dim)
    statement, instead, rows = [], [], []
    for count in sorted({gcd(count, dim) for count in heads}):
        narrow, wide = (rg.MultiHeadAttention(dim, count, qk_length=size) for size in (dim // count, dim))
        scores, wide_scores = (_score_flops(layer, x) for layer in (narrow, wide))
        weights, wide_weights = narrow.W_q.weight.numel(), wide.W_q.weight.numel()
        statement += [
            Check(name=f"weights of W_q, H = {count}", predicted=printed_weights(dim, count), measured=weights),
            Check(
                name=f"FLOPs of a head's scores, H = {count}",
                predicted=printed_score_flops(length, dim, count),
                measured=scores / count,
            ),
        ]
        for name, size, total, flops in (
            ("D/H", dim // count, weights, scores),
            ("D", dim, wide_weights, wide_scores),
        ):
            instead += [
                Check(
                    name=f"weights of W_q, {count} heads of length {name}",
                    predicted=weights_of_heads(dim, count, size),
                    measured=total,
                ),
                Check(
                    name=f"FLOPs of scores, {count} heads of length {name}",
                    predicted=score_flops(length, count, size),
                    measured=flops,
                ),
            ]
        rows.append(
            {
                "H": count,
                "weights of W_q": weights,
                "as printed": printed_weights(dim, count),
                "FLOPs of scores": scores,
                "weights of W_q, length D": wide_weights,
                "FLOPs of scores, length D": wide_scores,
            }
        )
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(rows, dim, length)
    )


def _score_flops(layer: rg.MultiHeadAttention, x: torch.Tensor) -> int:
    q, k, _ = layer.project(x)
    return count_flops(lambda: rg.weights(q, k, layer.mechanism))


def _figure(rows: Sequence[dict[str, int]], dim: int, length: int) -> Figure:
    figure = new_figure(
        8.5,
        3.9,
        title="Heads of length D/H cost what a single head does: D² weights, not D²/H",
        note=f"D = {dim}, N = {length}. Points: counted of real layers. Lines: formulas.",
    )
    left, right = figure.subplots(1, 2)
    heads = [row["H"] for row in rows]
    for axes, of in ((left, "weights of W_q"), (right, "FLOPs of scores")):
        for colour, marker, name, label in (
            (COLOURS[0], "o", of, "heads of length D/H"),
            (COLOURS[1], "s", f"{of}, length D", "heads of length D"),
        ):
            sizes = [dim if label.endswith(" D") else dim // count for count in heads]
            line = [
                weights_of_heads(dim, count, size) if axes is left else score_flops(length, count, size)
                for count, size in zip(heads, sizes, strict=True)
            ]
            axes.plot(heads, line, color=colour)
            axes.plot(heads, [row[name] for row in rows], marker, color=colour, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        dress(axes, title=of, x="heads H", y=of)
    left.plot(heads, [row["as printed"] for row in rows], "x--", color=COLOURS[6], label="as printed, D²/H")
    printed = [count * printed_score_flops(length, dim, count) for count in heads]
    right.plot(heads, printed, "x--", color=COLOURS[6], label="as printed, 1/H² a head")
    left.legend(fontsize=8, frameon=False)
    right.legend(fontsize=8, frameon=False)
    return figure
