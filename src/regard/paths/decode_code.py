"""Machine code of a decode step, made for one processor and one set of sizes while the program runs.

    x_s = scale · log2(e) · q·k_s        m = max of x_s        out = sum of 2^(x_s - m) v_s / sum of 2^(x_s - m)

PyTorch's products are made for many rows; a step of a stream has a few. This is one pass over the keys and values, a
block of `BLOCK` tokens at a time: its scores, their powers of two, and the sum of its values, for up to 4 query rows
together, so that what is read serves up to 4 multiply-adds and a block's sums stay in registers. Keys and values are
read in the order they lie in. Where a block brings a larger score, the sums so far are scaled down.

Compiled once for each new set of sizes, in some 0.1 s (see machine_code.py).
"""

import math
from typing import Any

from regard.paths.machine_code import F32, F64, I64, POINTER, Code

BLOCK = 128
"""Tokens whose scores are kept at a time."""
FIELDS = (
    "next", "tasks", "parts", "groups", "spans", "q", "k", "v", "sums", "tops", "totals",
    "k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token", "scale",
)  # fmt: skip
"""What the code is told, 8 bytes each: a counter that all threads draw their tasks from, sizes, addresses, strides in
elements, and the scale times log2(e) as a double. A task is a part of one key/value head's tokens."""

_LOWEST = -3.4028234663852886e38
"""The largest score before any is known: the lowest that is finite, since from -inf nothing can be taken off."""


def source(qk_length: int, value_length: int, rows: int, dtype: str, lanes: int) -> str:
    """The code of a step in LLVM's language. Each task leaves `sums` (rows, value_length) of the values, and each row's
    largest score and sum of weights in `tops` and `totals`."""
    code = Code(lanes, dtype)
    b, stored, field = code.b, code.stored, code.fields(FIELDS)
    address = {name: b.inttoptr(field[name], POINTER) for name in FIELDS[4:11]}
    scale = b.fptrunc(b.bitcast(field["scale"], F64), F32)
    queries = b.alloca(F32, I64(rows * qk_length))
    weights = b.alloca(F32, I64(4 * BLOCK))

    with code.tasks(field["tasks"]) as task:
        head, part = b.sdiv(task, field["parts"]), b.srem(task, field["parts"])
        batch, group = b.sdiv(head, field["groups"]), b.srem(head, field["groups"])
        first, last = (code.read(address["spans"], b.add(b.mul(batch, I64(2)), I64(end)), I64) for end in (0, 1))
        low, high = (
            b.add(first, b.sdiv(b.mul(b.sub(last, first), end), field["parts"])) for end in (part, b.add(part, I64(1)))
        )
        k, v = (
            code.at(
                address[name], b.add(b.mul(batch, field[f"{name}_batch"]), b.mul(group, field[f"{name}_head"])), stored
            )
            for name in ("k", "v")
        )
        q = code.at(address["q"], b.mul(head, I64(rows * qk_length)), stored)
        sums = code.at(address["sums"], b.mul(task, I64(rows * value_length)))
        tops, totals = (code.at(address[name], b.mul(task, I64(rows))) for name in ("tops", "totals"))
        with code.loop(I64(0), I64(rows * qk_length), lanes) as i:
            code.write(b.fmul(code.vector(q, i, stored), code.splat(scale)), queries, i)
        with code.loop(I64(0), I64(rows * value_length), lanes) as i:
            code.write(code.constant(0), sums, i)
        with code.loop(I64(0), I64(rows)) as i:
            code.write(F32(_LOWEST), tops, i)
            code.write(F32(0), totals, i)

        with code.loop(low, high, BLOCK) as start:
            count = code.least(b.sub(high, start), I64(BLOCK))

            def tile(size: int, row: Any) -> None:
                here = code.at(queries, b.mul(row, I64(qk_length)))
                keys, values = (code.at(t, b.mul(start, field[f"{n}_token"]), stored) for n, t in (("k", k), ("v", v)))

                def fetch(s: Any) -> None:
                    """Values are read some columns at a time, which no processor foresees; many rows hide that."""
                    if rows <= 4:
                        code.prefetch(code.at(values, b.mul(s, field["v_token"]), stored), value_length)

                _score(code, size, here, keys, field["k_token"], count, qk_length, weights, fetch)
                fading = _weigh(code, size, weights, count, code.at(tops, row), code.at(totals, row))
                out = code.at(sums, b.mul(row, I64(value_length)))
                _add(code, size, fading, weights, values, field["v_token"], count, value_length, out)

            taken = 0
            for size in (4, 2, 1):
                whole = (rows - taken) // size * size
                if whole > size:
                    with code.loop(I64(taken), I64(taken + whole), size) as row:
                        tile(size, row)
                elif whole:
                    tile(size, I64(taken))
                taken += whole
    return str(code.module)


def _score(
    code: Code, size: int, queries: Any, keys: Any, stride: Any, count: Any, length: int, weights: Any, fetch: Any
) -> None:
    """weights[s, row] = queries[row] · keys[s]. A key after the other: in any other order memory answers later."""
    b = code.b
    with code.loop(I64(0), count) as s:
        fetch(s)
        here = code.at(keys, b.mul(s, stride), code.stored)
        products = [code.constant(0)] * size
        for column in range(0, length, code.lanes):
            key = code.vector(here, column, code.stored)
            for row in range(size):
                products[row] = code.fma(code.vector(queries, row * length + column), key, products[row])
        code.write(code.sums(products), weights, b.mul(s, I64(size)))


def _weigh(code: Code, size: int, scores: Any, count: Any, tops: Any, totals: Any) -> Any:
    """Powers of two in place of the scores (s, row); each row's largest score and sum of weights brought up to date.

    Gives the factor by which older sums of each row shrink. Lane i holds a number of row i % size throughout.
    """
    b = code.b
    filled = b.mul(count, I64(size))
    whole = b.and_(b.add(filled, I64(code.lanes - 1)), I64(-code.lanes))
    with code.loop(filled, whole) as i:
        code.write(F32(-math.inf), scores, i)
    before, summed = (code.repeated(rows, size) for rows in (tops, totals))
    best, added = code.register(before), code.register(code.constant(0))
    with code.loop(I64(0), whole, code.lanes) as i:
        b.store(code.larger(code.vector(scores, i), b.load(best)), best)
    top = code.joined(code.larger, b.load(best), size)
    fading = code.power(b.fsub(before, top))
    with code.loop(I64(0), whole, code.lanes) as i:
        weight = code.power(b.fsub(code.vector(scores, i), top))
        code.write(weight, scores, i)
        b.store(b.fadd(weight, b.load(added)), added)
    total = code.fma(summed, fading, code.joined(b.fadd, b.load(added), size))
    for rows, found in ((tops, top), (totals, total)):
        code.write(code.picked(found, range(size)), rows, 0)
    return fading


def _add(
    code: Code, size: int, fading: Any, weights: Any, values: Any, stride: Any, count: Any, length: int, out: Any
) -> None:
    """out[row] = fading[row] · out[row] + sum over s of weights[s, row] · values[s], some columns at a time."""
    b, wide = code.b, code.lanes * code.lanes // size
    for first in range(0, length, wide):
        columns = range(first, min(first + wide, length), code.lanes)
        cells = [(row, column) for row in range(size) for column in columns]
        shrunk = [code.picked(fading, [row] * code.lanes) for row in range(size)]
        held = {
            (row, column): code.register(b.fmul(shrunk[row], code.vector(out, row * length + column)))
            for row, column in cells
        }
        with code.loop(I64(0), count) as s:
            here = code.at(values, b.mul(s, stride), code.stored)
            value = {column: code.vector(here, column, code.stored) for column in columns}
            weight = [code.splat(code.read(weights, b.add(b.mul(s, I64(size)), I64(row)))) for row in range(size)]
            for row, column in cells:
                cell = held[row, column]
                b.store(code.fma(weight[row], value[column], b.load(cell)), cell)
        for row, column in cells:
            code.write(b.load(held[row, column]), out, row * length + column)
