"""What softmax and a quadratic kernel cost over the length: counted FLOPs and bytes, and measured times."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Annotated, Any

import torch
from torch import Tensor

import regard as rg
from regard.core.cost import count_flops
from regard.core.families.mechanism import Mechanism
from regard.core.paths.sums import CHUNK
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator, power

MECHANISMS: dict[str, Mechanism] = {"softmax": rg.Softmax(), "quadratic": rg.Quadratic()}
LONG = (1 << 15, 1 << 16, 1 << 17, 1 << 18)
"""Lengths of the fitted powers: much longer than a chunk, in which linear attention compares all pairs."""
ENOUGH = 16
"""N over D² from which N counts as much larger than D²."""
PATHS = {"softmax": "reference", "quadratic": None}
"""How what is kept for a backward pass is measured: softmax by its formula, which keeps the weights."""


def softmax_flops(n: int, d: int) -> int:
    """FLOPs of n queries with n keys of length d, and of the sums of their values of the same length."""
    return 2 * n**2 * (d + d)


def kept_bytes(name: str, n: int, d: int) -> int:
    """Bytes in float32: at least softmax's n × n weights, at most the quadratic kernel's inputs, outputs and sums."""
    features = (d + 1) * (d + 2) // 2
    return 4 * n**2 if name == "softmax" else 4 * (4 * n * d + features * d)


@experiment(
    claims=("003.6c", "003.6d"),
    title="Cost over the length: softmax against a quadratic kernel",
    statement=(
        "Softmax attention takes $O(N^2(D+M))$ time and $O(N^2 + N(D+M))$ memory. Linear attention with $C$ features "
        "takes $O(NCM)$ time and $O(N(D+M) + CM)$ memory: with the quadratic kernel, where $C = O(D^2)$ and $M = D$, "
        "$O(ND^3)$ and $O(ND + D^3)$. It costs less where $N$ is much larger than $D^2$."
    ),
    formula=r"2N^2(D+M) > 4NCM \iff N > \frac{2CM}{D+M}, \qquad C = \frac{(D+1)(D+2)}{2}",
)
def complexity(
    *,
    dim: Annotated[int, Between(1, 64, log=True)] = 16,
    dims: Annotated[tuple[int, ...], Between(1, 128, log=True)] = (8, 16, 32, 64, 128),
    lengths: Annotated[tuple[int, ...], Between(16, 8192, log=True)] = (256, 512, 1024, 2048, 4096),
    rounds: Annotated[int, Between(1, 20)] = 3,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Count FLOPs and kept bytes as attention runs, fit powers of N and D over long lengths, and time both.

    >>> complexity(dim=4, dims=(4, 8), lengths=(64, 256), rounds=1).verdict
    'holds'
    """
    lengths, dims = tuple(sorted(set(lengths))), tuple(sorted(set(dims)))
    inputs = [torch.randn(1, 1, n, dim, generator=generator(seed)) for n in lengths]
    rows: list[dict[str, Any]] = [{"N": n} for n in lengths]
    checks: list[Check] = []
    for name, mechanism in MECHANISMS.items():
        for row, x in zip(rows, inputs, strict=True):
            n = row["N"]
            row[f"{name} FLOPs"] = count_flops(partial(rg.attend, x, x, x, mechanism))
            row[f"{name} bytes kept"] = kept = _kept(mechanism, x, PATHS[name])
            formula = softmax_flops(n, dim) if name == "softmax" else rg.cost(mechanism, _work(n, dim)).flops
            checks += [
                Check(name=f"FLOPs, {name}, N = {n}", predicted=formula, measured=row[f"{name} FLOPs"]),
                Check(
                    name=f"bytes kept for the backward pass, {name}, N = {n}",
                    predicted=kept_bytes(name, n, dim),
                    measured=kept,
                    rule="at least" if name == "softmax" else "at most",
                ),
            ]
        costs = [rg.cost(mechanism, _work(n, dim)) for n in LONG]
        # Keys of the last chunk are compared with all queries instead of being added to the sums.
        checks += [
            Check(
                name=f"power of N in {what}, {name}",
                predicted=2 if name == "softmax" else linear,
                measured=power(LONG, numbers),
                tolerance=CHUNK / LONG[0],
            )
            for what, numbers, linear in (
                ("FLOPs", [cost.flops for cost in costs], 1),
                ("memory besides inputs and output", [cost.activation_bytes for cost in costs], 0),
            )
        ]
    checks += _over_dims(dims)
    for name, times in _times(inputs, rounds).items():
        for row, seconds in zip(rows, times, strict=True):
            row[f"{name} ms"] = 1000 * seconds
    checks += _timed(rows, dim)
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, dim))


def _work(n: int, d: int) -> rg.Work:
    return rg.Work(
        query_length=n, key_length=n, num_heads=1, num_kv_heads=1, qk_length=d, value_length=d, dtype=torch.float32
    )


def _kept(mechanism: Mechanism, x: Tensor, path: str | None) -> int:
    """Bytes that attention keeps for its backward pass."""
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    q, k, v = (x.detach().clone().requires_grad_() for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rg.attend(q, k, v, mechanism, path=path)
    return sum(sizes)


def _over_dims(dims: Sequence[int]) -> list[Check]:
    """The power of D in the quadratic kernel's FLOPs, and which of both costs less where N is much larger than D²."""
    softmax, quadratic = MECHANISMS.values()
    checks = []
    for d in dims:
        n = max(ENOUGH * d**2, 2 * CHUNK)
        costs = [rg.cost(mechanism, _work(n, d)) for mechanism in (quadratic, softmax)]
        for what, (less, more) in (
            ("FLOPs", [cost.flops for cost in costs]),
            ("memory", [cost.activation_bytes for cost in costs]),
        ):
            checks.append(
                Check(
                    name=f"{what} of the quadratic kernel over softmax, D = {d}, N = {n:,}",
                    predicted=1,
                    measured=less / more,
                    rule="at most",
                )
            )
    if len(dims) > 1:
        flops = [rg.cost(quadratic, _work(LONG[-1], d)).flops for d in dims]
        checks.append(
            Check(name="power of D, quadratic kernel", predicted=3, measured=power(dims, flops), rule="at most")
        )
    return checks


@torch.no_grad()
def _times(inputs: Sequence[Tensor], rounds: int) -> dict[str, list[float]]:
    """Seconds by mechanism and length, the best of some rounds in which all take turns."""
    best = {name: [math.inf] * len(inputs) for name in MECHANISMS}
    for _ in range(rounds + 1):  # in the first round code is compiled
        for place, x in enumerate(inputs):
            for name, mechanism in MECHANISMS.items():
                best[name][place] = min(best[name][place], _seconds(mechanism, x))
    return best


def _seconds(mechanism: Mechanism, x: Tensor) -> float:
    begin = perf_counter()
    rg.attend(x, x, x, mechanism)
    return perf_counter() - begin


def _crossing(rows: Sequence[dict[str, Any]]) -> float:
    """The length from which the quadratic kernel is faster, between two that were timed; NaN if there is none."""
    gains = [(math.log(row["N"]), math.log(row["softmax ms"] / row["quadratic ms"])) for row in rows]
    for (low, slower), (high, faster) in reversed(list(pairwise(gains))):
        if slower <= 0 < faster:
            return math.exp(low + (high - low) * -slower / (faster - slower))
    return math.nan


def _predicted(rows: Sequence[dict[str, Any]], dim: int) -> float:
    """The same length, predicted from FLOPs and the rates at the longest that was timed."""
    rates = {mechanism: rows[-1][f"{name} FLOPs"] / rows[-1][f"{name} ms"] for name, mechanism in MECHANISMS.items()}
    softmax, quadratic = MECHANISMS.values()
    length = rg.crossover(
        softmax,
        quadratic,
        _work(CHUNK, dim),
        seconds=lambda mechanism, work: rg.cost(mechanism, work).flops / rates[mechanism],
    )
    return math.nan if length is None else length


def _timed(rows: Sequence[dict[str, Any]], dim: int) -> list[Check]:
    """What the clock says: it decides nothing."""
    predicted = _predicted(rows, dim)
    checks = [
        Check(
            name="length from which the quadratic kernel is faster",
            predicted=predicted,
            measured=_crossing(rows),
            tolerance=predicted / 2,
            timed=True,
        )
    ]
    last, exponents = rows[-2:], {"softmax": 2, "quadratic": 1}
    return checks + [
        Check(
            name=f"power of N in time, {name}, the two longest",
            predicted=exponent,
            measured=power([row["N"] for row in last], [row[f"{name} ms"] for row in last]),
            tolerance=0.3,
            timed=True,
        )
        for name, exponent in exponents.items()
        if len(last) > 1
    ]


def _figure(rows: Sequence[dict[str, Any]], dim: int) -> Figure:
    figure = new_figure(
        8.5,
        4,
        title="Softmax grows with the square of the length, the quadratic kernel linearly",
        note=f"D = M = {dim}, one head, float32. Points: counted, or timed, as attention runs. Lines: formulas, of "
        "bytes for softmax's weights alone and at most for inputs, outputs and sums; of times, powers of N. The "
        "backward pass of softmax is that of its plain formula.",
    )
    lengths = [row["N"] for row in rows]
    panels = figure.subplots(1, 3)
    for axes, what, title in zip(
        panels, ("FLOPs", "bytes kept", "ms"), ("FLOPs", "bytes kept for the backward pass", "ms, timed"), strict=True
    ):
        for colour, marker, (name, mechanism), exponent in zip(COLOURS, "os", MECHANISMS.items(), (2, 1), strict=False):
            points = [row[f"{name} {what}"] for row in rows]
            line = {
                "FLOPs": [rg.cost(mechanism, _work(n, dim)).flops for n in lengths],
                "bytes kept": [kept_bytes(name, n, dim) for n in lengths],
                "ms": [points[-1] * (n / lengths[-1]) ** exponent for n in lengths],
            }[what]
            axes.plot(lengths, line, color=colour, linewidth=1.2)
            axes.plot(lengths, points, marker, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        dress(axes, title=title, x="length N")
        axes.legend(fontsize=8, frameon=False, loc="lower right" if what == "FLOPs" else "upper left")
    softmax, quadratic = MECHANISMS.values()
    equal = rg.crossover(softmax, quadratic, _work(CHUNK, dim))
    for axes, length, words in ((panels[0], equal, "equal"), (panels[2], _crossing(rows), "equally fast")):
        if length is not None and lengths[0] <= length <= lengths[-1]:
            axes.axvline(length, color=COLOURS[6], linewidth=1, linestyle="--")
            late = length > (lengths[0] * lengths[-1]) ** 0.5  # then there are points on the left
            axes.text(
                length,
                axes.get_ylim()[0],
                f" {words} at {length:,.0f}",
                fontsize=8,
                va="bottom",
                ha="right" if late else "left",
                rotation=90 if late else 0,
            )
    return figure
