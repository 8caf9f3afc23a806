"""Attention computes all tokens of a sequence together, a recurrent network one after another: times of both."""

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Annotated

import torch
from torch import nn

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator, power


def recurrent_flops(n: int, d: int) -> int:
    """FLOPs of a GRU: three gates, each from the input and from the state."""
    return 12 * n * d**2


def attention_flops(n: int, d: int) -> int:
    """FLOPs of self-attention: four projections, scores and sums of values."""
    return 8 * n * d**2 + 4 * n**2 * d


@experiment(
    claims=("002.1.4a", "002.1.4b"),
    title="A recurrent network and attention over the length",
    statement=(
        "A recurrent layer needs the state of one token before it can compute the next: $N$ steps one after another. "
        "Self-attention computes all $N$ tokens in parallel, so that it is faster although it compares all pairs, and "
        "any two tokens are one step apart instead of up to $N$."
    ),
    formula=r"h_t = f(x_t, h_{t-1}) \quad\text{against}\quad Y = \operatorname{softmax}(QK^T)\,V",
)
def recurrence(
    *,
    lengths: Annotated[tuple[int, ...], Between(1, 4096, log=True)] = (16, 64, 256, 1024, 2048),
    head_length: Annotated[int, Between(1, 128, log=True)] = 32,
    num_heads: Annotated[int, Between(1, 16)] = 4,
    rounds: Annotated[int, Between(1, 20)] = 5,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Time a GRU of torch and the library's attention in turn. Times decide nothing: the verdict is "measured here".

    >>> recurrence(lengths=(4, 8), head_length=4, rounds=1).verdict
    'measured here'
    """
    dim = num_heads * head_length
    lengths = tuple(sorted(set(lengths)))
    layers: dict[str, nn.Module] = {
        "GRU": nn.GRU(dim, dim, batch_first=True),
        "attention": rg.MultiHeadAttention(dim, num_heads),
    }
    times = {(name, n): math.inf for n in lengths for name in layers}
    with torch.no_grad():
        inputs = {n: torch.randn(1, n, dim, generator=generator(seed)) for n in lengths}
        for _ in range(rounds + 1):  # in the first round code is compiled
            for name, n in times:
                times[name, n] = min(times[name, n], _seconds(layers[name], inputs[n]))
    checks = []
    for n in lengths:
        checks.append(
            Check(
                name=f"time of the GRU over attention's, N = {n}",
                predicted=1,
                measured=times["GRU", n] / times["attention", n],
                rule="at least",
                timed=True,
            )
        )
    if len(lengths) > 1:
        last = lengths[-2:]
        checks.append(
            Check(
                name="power of N in the GRU's time, the two longest",
                predicted=1,
                measured=power(last, [times["GRU", n] for n in last]),
                tolerance=0.3,
                timed=True,
            )
        )
    rows = [
        {
            "N": n,
            "GRU ms": 1000 * times["GRU", n],
            "attention ms": 1000 * times["attention", n],
            "GRU FLOPs": recurrent_flops(n, dim),
            "attention FLOPs": attention_flops(n, dim),
        }
        for n in lengths
    ]
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, dim))


def _seconds(compute: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    begin = perf_counter()
    compute(x)
    return perf_counter() - begin


def _figure(rows: Sequence[dict[str, float]], dim: int) -> Figure:
    figure = new_figure(
        8.5,
        4,
        title="A recurrent network waits for every token, attention takes them all at once",
        note=f"D = {dim}, batch 1, float32, threads: {torch.get_num_threads()}. FLOPs by the formulas.",
    )
    left, right = figure.subplots(1, 2)
    lengths = [row["N"] for row in rows]
    for colour, marker, name in zip(COLOURS, "os", ("GRU", "attention"), strict=False):
        left.plot(lengths, [row[f"{name} ms"] for row in rows], f"{marker}-", color=colour, label=name)
        rate = [row[f"{name} FLOPs"] / row[f"{name} ms"] / 1e6 for row in rows]
        right.plot(lengths, rate, f"{marker}-", color=colour, label=name)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=8, frameon=False)
    dress(left, title="time of a sequence", x="length N", y="ms")
    dress(right, title="how well it uses the processor", x="length N", y="GFLOP/s")
    return figure
