"""What a decode step costs with many, some or one key/value head: FLOPs, bytes, and their ratio."""

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
from torch import Tensor

import regard as rg
from regard.core.cost import count_flops, heads_label
from regard.core.style import Figure, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator, slope

SHORT = 24
"""Tokens of the sequence that is streamed and computed whole."""
FAR = 10**12
"""A cache so long that nothing else counts."""
STEPS = 9
"""Timed decode steps, of which the median counts."""


def step_flops(batch: int, n: int, heads: int, groups: int, k: int) -> int:
    """FLOPs of one new token for each sequence: O(b d²) for projections, O(b n d) for attention."""
    d = heads * k
    return 4 * batch * d * (d + groups * k) + 4 * batch * n * d


def step_numbers(batch: int, n: int, heads: int, groups: int, k: int) -> int:
    """Numbers that move: O(d²) weights, O(b d) of the token, O(b n g k) of the cache."""
    d = heads * k
    weights, cache = 2 * d * (d + groups * k), 2 * batch * n * groups * k
    token = batch * (4 * d + 2 * (d + groups * k) + 2 * d)  # x and y twice; q, k, v, o written, q and o read
    return weights + token + cache


@experiment(
    claims=("003.4",),
    title="Decoding: FLOPs, bytes, and what multi-query attention saves",
    statement=(
        "A decode step of $b$ sequences with $n$ cached tokens takes $O(bd^2 + bnd)$ operations, for multi-head and "
        "for multi-query attention. It moves $O(d^2 + bd + bnd)$ numbers with multi-head attention, and "
        "$O(d^2 + bd + bnk)$ with multi-query attention, where all $h = d/k$ heads share keys and values. Its "
        "arithmetic intensity rises with that, by a factor up to $h$. The outputs are those of the whole sequence."
    ),
    formula=r"\frac{4bd(d + gk) + 4bnd}{2d(d + gk) + b(8d + 2gk) + 2bngk} \to \frac{2h}{g} \quad (n \to \infty)",
)
def intensity(
    *,
    lengths: Annotated[tuple[int, ...], Between(1, 8192, log=True)] = (16, 64, 256, 1024, 4096),
    heads: Annotated[int, Between(2, 16)] = 8,
    k: Annotated[int, Between(8, 64, log=True)] = 64,
    batch: Annotated[int, Between(1, 8)] = 4,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Count and time decode steps of the library's layers over the length of the cache.

    >>> intensity(lengths=(4, 8), heads=2, k=8, batch=1).verdict
    'holds'
    """
    random = generator(seed)
    checks: list[Check] = []
    rows: list[dict[str, Any]] = []
    for groups in sorted({heads, _some(heads), 1}, reverse=True):
        name = heads_label(heads, groups)
        layer = rg.MultiHeadAttention(heads * k, heads, groups, bias=False)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=(heads * k) ** -0.5, generator=random)
        checks.append(_stream_check(name, layer, batch, random))
        for n in lengths:
            flops, stored, seconds = _step(layer, batch, n, random)
            work = _work(layer, batch, n)
            cost = rg.layer_cost(work, heads * k)
            numbers = step_numbers(batch, n, heads, groups, k)
            checks += [
                Check(
                    name=f"FLOPs of a step, {name}, n = {n}",
                    predicted=step_flops(batch, n, heads, groups, k),
                    measured=flops,
                ),
                Check(name=f"bytes of a step, {name}, n = {n}", predicted=work.itemsize * numbers, measured=cost.bytes),
                Check(
                    name=f"bytes of the cache, {name}, n = {n}",
                    predicted=work.itemsize * 2 * batch * n * groups * k,
                    measured=stored,
                ),
            ]
            rows.append(
                {
                    "attention": name,
                    "key/value heads": groups,
                    "n": n,
                    "FLOPs": flops,
                    "numbers moved": cost.bytes // work.itemsize,
                    "FLOPs per number": flops / (cost.bytes / work.itemsize),
                    "by the formula": step_flops(batch, n, heads, groups, k) / numbers,
                    "ms": 1e3 * seconds,
                }
            )
        checks += [*_fit_checks(name, rows[-len(lengths) :], layer), _limit_check(name, layer, batch)]
    return Measurements(
        statement=(*checks, *_time_checks(rows, max(lengths))),
        table=tuple(rows),
        draw=lambda: _figure(rows, heads, k, batch),
    )


def _some(heads: int) -> int:
    """A number of key/value heads between one and all: the first divisor from the square root of all."""
    return next(g for g in range(1, heads + 1) if heads % g == 0 and g * g >= heads)


def _work(layer: rg.MultiHeadAttention, batch: int, n: int) -> rg.Work:
    return rg.Work(
        batch=batch,
        query_length=1,
        key_length=n,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        qk_length=layer.qk_length,
        value_length=layer.value_length,
        dtype=layer.dtype,
    )


@torch.no_grad()
def _stream_check(name: str, layer: rg.MultiHeadAttention, batch: int, random: torch.Generator) -> Check:
    """Token by token against the whole sequence, in float64."""
    layer = layer.double()
    x = torch.randn(batch, SHORT, layer.embedding_dim, generator=random, dtype=torch.float64)
    state, streamed = layer.start(batch=batch, capacity=SHORT), []
    for token in x.split(1, dim=1):
        out, state = layer.extend(token, state, rg.causal)
        streamed.append(out)
    whole = layer(x, mask=rg.causal)
    layer.float()
    return Check(
        name=f"streamed against whole, {name}",
        predicted=0,
        measured=(torch.cat(streamed, 1) - whole).abs().max().item(),
        tolerance=1e-13 * (1 + whole.abs().max().item()),
    )


@torch.no_grad()
def _step(layer: rg.MultiHeadAttention, batch: int, n: int, random: torch.Generator) -> tuple[int, int, float]:
    """The FLOPs of a step whose token is the n-th, the bytes of its cache, and its seconds."""
    past = layer.start(batch=batch, capacity=n)
    if n > 1:
        q, keys, values = (
            torch.randn(batch, count, n - 1, layer.qk_length, generator=random)
            for count in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        # What they attend to does not matter; with one visible key each, filling the cache takes no time.
        _, past = layer.mechanism.extend(q, keys, values, past, rg.causal & rg.window())
    x = torch.randn(batch, 1, layer.embedding_dim, generator=random)
    state = layer.extend(x, past, rg.causal)[1]
    flops = count_flops(lambda: layer.extend(x, past, rg.causal))
    return flops, state.nbytes, median(_seconds(layer, x, past) for _ in range(STEPS))


def _seconds(layer: rg.MultiHeadAttention, x: Tensor, past: object) -> float:
    begin = perf_counter()
    layer.extend(x, past, rg.causal)
    return perf_counter() - begin


def _fit_checks(name: str, rows: Sequence[Mapping[str, Any]], layer: rg.MultiHeadAttention) -> list[Check]:
    """FLOPs per number of one more cached token, by straight lines through what was counted over n."""
    lengths = [row["n"] for row in rows]
    if len(set(lengths)) < 2:
        return []
    fitted = slope(lengths, [row["FLOPs"] for row in rows]) / slope(lengths, [row["numbers moved"] for row in rows])
    limit = 2 * layer.num_heads / layer.num_kv_heads
    return [
        Check(
            name=f"FLOPs per number of one more token, fitted, {name}",
            predicted=limit,
            measured=fitted,
            tolerance=1e-9 * limit,
        )
    ]


def _limit_check(name: str, layer: rg.MultiHeadAttention, batch: int) -> Check:
    """FLOPs per number over an endless cache; what is not the cache adds its share of the bytes."""
    work = _work(layer, batch, FAR)
    cost, cache = (
        rg.layer_cost(work, layer.embedding_dim),
        work.itemsize * 2 * batch * FAR * layer.num_kv_heads * layer.qk_length,
    )
    limit = 2 * layer.num_heads / layer.num_kv_heads
    others = cost.flops / (4 * batch * FAR * layer.embedding_dim) + cost.bytes / cache - 2
    return Check(
        name=f"FLOPs per number over an endless cache, {name}",
        predicted=limit,
        measured=cost.flops / (cost.bytes / work.itemsize),
        tolerance=limit * (others + 1e-12),
    )


def _time_checks(rows: Sequence[Mapping[str, Any]], longest: int) -> list[Check]:
    """Times of a step at the longest cache: fewer key/value heads should take no longer."""
    times = {row["attention"]: row["ms"] for row in rows if row["n"] == longest}
    return [
        Check(
            name=f"ms of a step, {name} against MHA, n = {longest}",
            predicted=times["MHA"],
            measured=milliseconds,
            rule="at most",
            timed=True,
        )
        for name, milliseconds in times.items()
        if name != "MHA"
    ]


def _figure(rows: Sequence[Mapping[str, Any]], heads: int, k: int, batch: int) -> Figure:
    figure = new_figure(
        8.5,
        3.9,
        title="The fewer key/value heads, the more a decode step does with each number",
        note=f"{heads} heads of {k}, {batch} sequences, float32. Lines on the left: formula; dotted: its limit.",
    )
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["attention"] for row in rows))
    for name, (colour, marker) in zip(names, line_styles(len(names)), strict=True):
        mine = sorted((row for row in rows if row["attention"] == name), key=lambda row: int(row["n"]))
        lengths = [row["n"] for row in mine]
        groups = mine[0]["key/value heads"]
        left.plot(lengths, [row["by the formula"] for row in mine], color=colour)
        left.plot(lengths, [row["FLOPs per number"] for row in mine], marker, color=colour)
        left.axhline(2 * heads / groups, color=colour, linestyle=":")
        right.plot(lengths, [row["ms"] for row in mine], marker + "-", color=colour, label=f"{name}, {groups} kv heads")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    dress(left, title="Arithmetic intensity", x="cached tokens n", y="FLOPs per number moved")
    dress(right, title="Measured here", x="cached tokens n", y="ms a step")
    right.legend(fontsize=8, frameon=False, loc="upper left")
    return figure
