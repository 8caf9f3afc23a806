"""What the program of softmax attention (decode_code.py) does with one block of tokens, for one tile of query rows:
scores, powers of two, weighted sums.

Scores and weights of a block are (tokens, rows). Up to 4 rows a vector holds numbers of one key; from 5 on a number of
each row.
"""

import math
from collections.abc import Iterator
from typing import Any

from regard.core.paths.machine_code import F32, I64, Code

PAGE = 4096
"""Bytes of memory after which the hardware prefetcher starts anew: stored numbers are prefetched so far ahead."""


def widen(code: Code, tensor: Any, stride: Any, count: Any, length: int, wide: Any, scales: Any | None) -> None:
    """A block of stored numbers as float32, (count, length), times the scale of each token if there are scales."""
    b = code.b
    with code.loop(I64(0), count) as s:
        _fetch_ahead(code, tensor, stride, s, length)
        here, there = code.at(tensor, b.mul(s, stride), code.stored), code.at(wide, b.mul(s, I64(length)))
        scale = None if scales is None else code.splat(code.read(scales, s))
        for column in range(0, length, code.lanes):
            numbers = code.vector(here, column, code.stored)
            code.write(numbers if scale is None else b.fmul(numbers, scale), there, column)


def look(code: Code, values: Any, stride: Any, stored: Any, count: Any, length: int, spoiled: Any) -> None:
    """NaN in every lane of `spoiled` if a value of the block is not finite, else 0."""
    b = code.b
    with code.loop(I64(0), count) as s:
        here = code.at(values, b.mul(s, stride), stored)
        for column in range(0, length, code.lanes):
            b.store(code.fma(code.vector(here, column, stored), code.constant(0), b.load(spoiled)), spoiled)
    b.store(code.joined(b.fadd, b.load(spoiled), 1), spoiled)


def look_at_scales(code: Code, scales: Any, count: Any, spoiled: Any) -> None:
    """NaN in every lane of `spoiled` if a scale of the block is not finite, else 0."""
    with code.loop(I64(0), count) as s:
        scale = code.splat(code.read(scales, s))
        code.b.store(code.fma(scale, code.constant(0), code.b.load(spoiled)), spoiled)


def score_few(
    code: Code, tile: int, queries: Any, keys: Any, stride: Any, count: Any, length: int, weights: Any,
    values: Any, value_stride: Any, value_length: int,
) -> None:  # fmt: skip
    """weights[s, row] = queries[row] · keys[s]. Keys are read in memory order, which is fastest. Vectors are summed
    several together, as many as fit in registers beside the queries.

    Values are read a few columns at a time, which the hardware prefetcher cannot predict, so they are prefetched here.
    """
    b = code.b
    places = [(row, column) for row in range(tile) for column in range(0, length, code.lanes)]
    query = {(row, column): code.vector(queries, row * length + column) for row, column in places}
    for s, tokens in _groups(code, count, code.lanes if tile == 1 else 4 // tile):
        products = []
        for token in tokens:
            _fetch_ahead(code, keys, stride, token, length)
            code.prefetch(code.at(values, b.mul(token, value_stride), code.stored), value_length)
            here = code.at(keys, b.mul(token, stride), code.stored)
            sums = [code.constant(0)] * tile
            for column in range(0, length, code.lanes):
                key = code.vector(here, column, code.stored)
                for row in range(tile):
                    sums[row] = code.fma(query[row, column], key, sums[row])
            products += sums
        code.write(code.sums(products), weights, b.mul(s, I64(tile)))


def score_many(
    code: Code, tile: int, queries: Any, keys: Any, stride: Any, count: Any, length: int, weights: Any,
    values: Any, value_stride: Any, value_length: int, fetch: bool,
) -> None:  # fmt: skip
    """weights[s, row] = queries[:, row] · keys[s], one number of a key times a vector of rows at a time."""
    b, vectors = code.b, tile // code.lanes
    for s, tokens in _groups(code, count, 8 if vectors == 1 else 6):
        here = [code.at(keys, b.mul(token, stride)) for token in tokens]
        ahead = [
            code.at(keys, b.mul(b.add(s, I64(len(tokens))), stride)),
            code.at(values, b.mul(s, value_stride)),
        ]
        sums = [[code.register(code.constant(0)) for _ in range(vectors)] for _ in tokens]
        with code.loop(I64(0), I64(length), 2) as column:
            if fetch:
                for place in ahead:
                    code.prefetch(code.at(place, b.mul(column, I64(len(tokens)))), 2 * len(tokens))
            for i in range(2):
                place = b.add(column, I64(i))
                query = [
                    code.vector(queries, b.add(b.mul(place, I64(tile)), I64(j * code.lanes))) for j in range(vectors)
                ]
                for key, registers in zip(here, sums, strict=True):
                    number = code.splat(code.read(key, place))
                    for x, register in zip(query, registers, strict=True):
                        b.store(code.fma(x, number, b.load(register)), register)
        for i, registers in enumerate(sums):
            for j, register in enumerate(registers):
                there = b.add(b.mul(b.add(s, I64(i)), I64(tile)), I64(j * code.lanes))
                code.write(b.load(register), weights, there)


def multiply(code: Code, tile: int, weights: Any, count: Any, scales: Any) -> None:
    """weights[s, row] times scales[s], for the tokens s of a block."""
    b, size = code.b, code.lanes // tile
    whole = b.and_(count, I64(-size))
    with code.loop(I64(0), whole, size) as s:
        factors = code.picked(code.few(scales, s, size), [lane // tile for lane in range(code.lanes)])
        place = b.mul(s, I64(tile))
        code.write(b.fmul(code.vector(weights, place), factors), weights, place)
    with code.loop(whole, count) as s, code.loop(I64(0), I64(tile)) as row:
        place = b.add(b.mul(s, I64(tile)), row)
        code.write(b.fmul(code.read(weights, place), code.read(scales, s)), weights, place)


def weigh(code: Code, tile: int, scores: Any, count: Any, tops: Any, totals: Any, fading: Any) -> None:
    """Powers of two in place of the scores (s, row); each row's largest score and sum of weights are updated; `fading`
    gets the factor for its older sums. Lane i of a vector holds a number of row i % tile."""
    b, lanes = code.b, code.lanes
    size, stride = min(tile, lanes), max(tile, lanes)
    filled = b.mul(count, I64(tile))
    whole = b.and_(b.add(filled, I64(lanes - 1)), I64(-lanes))
    with code.loop(filled, whole) as i:
        code.write(F32(-math.inf), scores, i)
    for first in range(0, tile, lanes):
        rows = [code.at(t, first) for t in (tops, totals)]
        before, summed = (code.repeated(t, size) for t in rows)
        best, added = code.register(before), code.register(code.constant(0))
        with code.loop(I64(first), whole, stride) as i:
            b.store(code.larger(code.vector(scores, i), b.load(best)), best)
        top = code.joined(code.larger, b.load(best), size)
        shrink = code.power(b.fsub(before, top))
        with code.loop(I64(first), whole, stride) as i:
            weight = code.power(b.fsub(code.vector(scores, i), top))
            code.write(weight, scores, i)
            b.store(b.fadd(weight, b.load(added)), added)
        total = code.fma(summed, shrink, code.joined(b.fadd, b.load(added), size))
        for pointer, value in ((rows[0], top), (rows[1], total), (code.at(fading, first), shrink)):
            code.write(code.picked(value, range(size)), pointer, 0)


def add(
    code: Code, tile: int, rows: int, fading: Any, weights: Any, values: Any, stride: Any, stored: Any, low: Any,
    high: Any, length: int, out: Any,
) -> None:  # fmt: skip
    """out[row] = fading[row] · out[row] + sum over s in [low, high) of weights[s, row] · values[s], for up to 4 rows,
    some columns at a time."""
    b = code.b
    wide = min(length, code.lanes * (8 if code.lanes == 8 else 16) // rows)  # as many sums as registers can hold
    wide = next(size for size in range(wide, 0, -code.lanes) if length % size == 0)
    columns = range(0, wide, code.lanes)
    with code.loop(I64(0), I64(length), wide) as first:
        out, values = code.at(out, first), code.at(values, first, stored)
        cells = [(row, column) for row in range(rows) for column in columns]
        shrink = [code.splat(code.read(fading, row)) for row in range(rows)]
        totals = {
            (row, column): code.register(b.fmul(shrink[row], code.vector(out, row * length + column)))
            for row, column in cells
        }
        with code.loop(low, high) as s:
            here = code.at(values, b.mul(s, stride), stored)
            value = {column: code.vector(here, column, stored) for column in columns}
            weight = [code.splat(code.read(weights, b.add(b.mul(s, I64(tile)), I64(row)))) for row in range(rows)]
            for row, column in cells:
                cell = totals[row, column]
                b.store(code.fma(weight[row], value[column], b.load(cell)), cell)
        for row, column in cells:
            code.write(b.load(totals[row, column]), out, row * length + column)


def _groups(code: Code, count: Any, size: int) -> Iterator[tuple[Any, list[Any]]]:
    """Loop over tokens below `count`, `size` at a time: yields the first index, and all of them. In the last group the
    last token repeats."""
    b = code.b
    last = b.sub(count, I64(1))
    with code.loop(I64(0), count, size) as s:
        yield s, [code.least(b.add(s, I64(i)), last) for i in range(size)]


def _fetch_ahead(code: Code, tensor: Any, stride: Any, token: Any, length: int) -> None:
    """Prefetch the stored numbers of the token a page after this one."""
    ahead = max(1, PAGE // (length * code.size))
    code.prefetch(code.at(tensor, code.b.mul(code.b.add(token, I64(ahead)), stride), code.stored), length)
