"""The CPU program of softmax attention from a few queries to many keys, generated for one set of sizes.

    x_ts = scale · log2(e) · q_t·k_s     m_t = max of x_ts     out_t = sum of 2^(x_ts - m_t) v_s / sum of 2^(x_ts - m_t)

PyTorch's matrix products are made for many rows; a decode step has a few. Here all query rows of a key/value head (its
query heads and new tokens) share one pass over the keys and values, `BLOCK` tokens at a time: scores, powers of two,
weighted sums (an online softmax). If a block has a larger score, the sums so far are scaled down.

Up to 4 rows are limited by memory bandwidth: a vector holds numbers of one key, in memory order. More rows are limited
by arithmetic: a vector holds one number of each row, so that no sum crosses lanes.

Query t of T is at position S - T + t and sees the keys from `before` positions before it to `after` after it, within
the span of its batch row. Blocks that no query sees are not read. In blocks that some see, the scores of hidden keys
become -inf; and if a value is not finite (0 times NaN is not 0), each row adds up only the values that it sees.

Keys and values may be int8, with a float32 scale for each token and head, as a KV cache stores them. They become
float32 in registers; up to 4 rows the scales are applied to scores and weights, which are fewer than the numbers of
keys and values.

As in PyTorch's SDPA, values are summed before the sum is divided: five values of 3e38 give inf, where the reference,
which divides the weights, gives 3e38.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from regard.core.paths.machine_code import F32, F64, I32, I64, POINTER, STORED, Code

BLOCK = 96
"""Tokens per block: a multiple of every number of keys that is scored together."""
WIDENED = 1 << 16
"""Bytes of a block's keys and values in float32: they are on the stack, and a thread's stack may be small."""
CHUNK = 64
"""The most query rows per task: their queries and sums stay in the CPU core's cache."""
FEW = (1, 2, 4)
"""Up to this many rows, a vector holds numbers of one key."""
PAGE = 4096
"""Bytes of memory after which the hardware prefetcher starts anew: stored numbers are prefetched so far ahead."""
ROOM = 1 << 15
"""Bytes on the stack for partial results of threads, so that a short call allocates nothing."""
FIELDS = (
    "next", "tasks", "parts", "chunks", "chunk", "groups", "rows", "queries", "offset", "before", "after", "spans",
    "q", "k", "v", "out", "tops", "room", "k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token",
    "k_scales", "v_scales", "k_scales_batch", "k_scales_head", "v_scales_batch", "v_scales_head",
    "threads", "parallel", "scale", "span",
)  # fmt: skip
"""The arguments, 8 bytes each: 0, the counter from which threads draw their tasks; sizes; addresses; strides in
elements; the number of threads, and OpenMP's function that starts them; the scale times log2(e) as a double; and at the
end the span of keys [first, last) of every batch row, or one for all (`spans` is the stride, 2 or 0). A task is a part
of the tokens for a chunk of the query rows of one key/value head; the thread that finishes a chunk's last part merges
its parts.

`room` is memory for partial results, 0 if they fit on the stack: for each unit (a chunk of a key/value head) the number
of finished parts, 8 bytes; then the sums, the largest scores and the sums of weights of every task's rows. `tops`, if
not 0, receives the queries' largest scores, in base 2, followed by their sums of weights relative to them."""

_LOWEST = -3.4028234663852886e38
"""The initial largest score: the lowest finite number, since -inf - (-inf) is NaN."""


@dataclass(frozen=True)
class _Task:
    """The rows of a task: values in the program, not in Python."""

    row: Any
    """The first row of the chunk among the rows of the key/value head."""
    height: Any
    """The number of rows in the chunk."""
    first: Any
    last: Any
    """The span of keys of its batch row."""


def tiles(rows: int, lanes: int) -> tuple[int, int]:
    """The tile, the number of rows computed together out of `rows`; and the vector length to compute it with.

    The largest tile whose padded number of rows is within an eighth of the least.

    >>> tiles(3, 16), tiles(7, 16), tiles(20, 16), tiles(64, 16), tiles(64, 8)
    ((4, 16), (8, 8), (8, 8), (64, 16), (16, 8))
    """
    for tile in FEW:
        if rows <= tile < lanes:
            return tile, lanes
    # 16 registers can hold the sums of two vectors of rows, 32 those of four.
    choices = [(8, 8), (16, 16), (32, 16), (64, 16)] if lanes == 16 else [(lanes, lanes), (2 * lanes, lanes)]
    padded = [-(-rows // tile) * tile for tile, _ in choices]
    return max(choice for choice, size in zip(choices, padded, strict=True) if 8 * size <= 9 * min(padded))


def block(qk_length: int, value_length: int, tile: int, stored: str, lanes: int) -> int:
    """Tokens per block: fewer if their keys and values are converted to float32 and are long.

    >>> block(64, 64, 16, "float16", 16), block(256, 256, 16, "float16", 16), block(256, 256, 16, "float32", 16)
    (96, 24, 96)
    """
    if stored == "float32" or tile < lanes:
        return BLOCK
    return next(size for size in (BLOCK, BLOCK // 2, BLOCK // 4) if 4 * size * (qk_length + value_length) <= WIDENED)


def source(qk_length: int, value_length: int, tile: int, dtype: str, stored: str, result: str, lanes: int) -> str:
    """The program in LLVM IR, for `tile` query rows at a time in `dtype`, over keys and values of the dtype `stored`.
    It writes `out` (heads, rows, value_length) in the dtype `result`."""
    code = Code(lanes, stored, "work")
    b, field, few = code.b, code.fields(FIELDS), tile < lanes
    size = block(qk_length, value_length, tile, stored, lanes)
    address = {
        name: b.inttoptr(field[name], POINTER) for name in ("q", "k", "v", "out", "tops", "k_scales", "v_scales")
    }
    units, numbers = b.sdiv(field["tasks"], field["parts"]), b.mul(field["tasks"], field["chunk"])
    address["done"] = b.inttoptr(field["room"], POINTER)
    address["sums"] = code.at(address["done"], units, I64)
    address["best"] = code.at(address["sums"], b.mul(numbers, I64(value_length)))
    address["totals"] = code.at(address["best"], numbers)
    scale = b.fptrunc(b.bitcast(field["scale"], F64), F32)
    queries = b.alloca(F32, I64((tile if few else CHUNK) * qk_length))
    weights, fading = b.alloca(F32, I64(size * tile)), b.alloca(F32, I64(tile))
    widened = {}
    if stored != "float32" and not few:
        widened = {"k": b.alloca(F32, I64(size * qk_length)), "v": b.alloca(F32, I64(size * value_length))}

    with code.tasks(field["tasks"]) as number:
        unit, part = b.sdiv(number, field["parts"]), b.srem(number, field["parts"])
        head, chunk = b.sdiv(unit, field["chunks"]), b.srem(unit, field["chunks"])
        batch, group = b.sdiv(head, field["groups"]), b.srem(head, field["groups"])
        row = b.mul(chunk, field["chunk"])
        span = b.inttoptr(field["span"], POINTER)
        first, last = (code.read(span, b.add(b.mul(batch, field["spans"]), I64(end)), I64) for end in (0, 1))
        first, last = code.most(first, I64(0)), code.least(last, b.add(field["offset"], field["queries"]))
        task = _Task(row, code.least(field["chunk"], b.sub(field["rows"], row)), first, last)
        earliest, latest = _positions(code, field, task)
        low = code.most(first, b.sub(earliest, field["before"]))
        high = code.most(low, code.least(last, b.add(latest, b.add(field["after"], I64(1)))))
        begin, end = (
            b.add(low, b.sdiv(b.mul(b.sub(high, low), edge), field["parts"])) for edge in (part, b.add(part, I64(1)))
        )
        k, v = (
            code.at(address[name], b.add(b.mul(batch, field[f"{name}_batch"]), b.mul(group, field[f"{name}_head"])),
                    code.stored)
            for name in ("k", "v")
        )  # fmt: skip
        scales = {}
        if stored == "int8":
            scales = {
                name: code.at(address[f"{name}_scales"], b.add(
                    b.mul(batch, field[f"{name}_scales_batch"]), b.mul(group, field[f"{name}_scales_head"])
                ))
                for name in ("k", "v")
            }  # fmt: skip
        q = code.at(address["q"], b.mul(b.add(b.mul(head, field["rows"]), row), I64(qk_length)), STORED[dtype])
        sums = code.at(address["sums"], b.mul(b.mul(number, field["chunk"]), I64(value_length)))
        tops, totals = (code.at(address[name], b.mul(number, field["chunk"])) for name in ("best", "totals"))
        count = b.sdiv(b.add(task.height, I64(tile - 1)), I64(tile))
        padded = b.mul(count, I64(tile))
        _take(code, q, STORED[dtype], queries, scale, task.height, padded, tile, qk_length)
        with code.loop(I64(0), b.mul(padded, I64(value_length)), lanes) as i:
            code.write(code.constant(0), sums, i)
        with code.loop(I64(0), padded) as i:
            code.write(F32(_LOWEST), tops, i)
            code.write(F32(0), totals, i)

        with code.loop(begin, end, size) as start:
            tokens = code.least(b.sub(end, start), I64(size))
            keys, values = (code.at(t, b.mul(start, field[f"{n}_token"]), code.stored) for n, t in (("k", k), ("v", v)))
            key_stride, value_stride, kind = field["k_token"], field["v_token"], code.stored
            scale_of = {name: code.at(place, start) for name, place in scales.items()}
            if widened:
                _widen(code, keys, key_stride, tokens, qk_length, widened["k"], scale_of.pop("k", None))
                _widen(code, values, value_stride, tokens, value_length, widened["v"], scale_of.pop("v", None))
                keys, values, kind = widened["k"], widened["v"], F32
                key_stride, value_stride = I64(qk_length), I64(value_length)
            hidden = b.or_(
                b.icmp_signed("<", start, b.sub(latest, field["before"])),
                b.icmp_signed(">", b.add(start, tokens), b.add(earliest, b.add(field["after"], I64(1)))),
            )
            spoiled = code.register(code.constant(0))
            with b.if_then(hidden, likely=False):
                if scale_of:  # integers are finite
                    _look_at_scales(code, scale_of["v"], tokens, spoiled)
                else:
                    _look(code, values, value_stride, kind, tokens, value_length, spoiled)
            careful = b.fcmp_unordered("uno", *[b.extract_element(b.load(spoiled), I64(0))] * 2)
            with code.loop(I64(0), padded, tile) as place:
                here = code.at(queries, b.mul(place, I64(qk_length)))
                if few:
                    _score_few(code, tile, here, keys, key_stride, tokens, qk_length, weights,
                               values, value_stride, value_length)  # fmt: skip
                else:
                    _score_many(code, tile, here, keys, key_stride, tokens, qk_length, weights,
                                values, value_stride, value_length, not widened)  # fmt: skip
                if scale_of:
                    _multiply(code, tile, weights, tokens, scale_of["k"])
                with b.if_then(hidden, likely=False):
                    _hide(code, field, task, place, tile, start, tokens, weights)
                _weigh(code, tile, weights, tokens, code.at(tops, place), code.at(totals, place), fading)
                if scale_of:
                    _multiply(code, tile, weights, tokens, scale_of["v"])

                def add(row: Any, rows: int, low: Any, high: Any, place: Any = place) -> None:
                    out = code.at(sums, b.mul(b.add(place, row), I64(value_length)))
                    _add(code, tile, rows, code.at(fading, row), code.at(weights, row), values, value_stride, kind,
                         low, high, value_length, out)  # fmt: skip

                with b.if_else(careful, likely=False) as (rarely, mostly):
                    with rarely, code.loop(I64(0), I64(tile)) as row:
                        add(row, 1, *_visible(code, field, task, b.add(place, row), start, tokens))
                    with mostly, code.loop(I64(0), I64(tile), min(tile, 4)) as row:
                        add(row, min(tile, 4), I64(0), tokens)

        ended = b.atomic_rmw("add", code.at(address["done"], unit, I64), I64(1), "acq_rel")
        with b.if_then(b.icmp_signed("==", ended, b.sub(field["parts"], I64(1)))):
            _merge(code, field, address, task, unit, head, value_length, STORED[result])
    _start(code)
    return str(code.module)


def _start(code: Code) -> None:
    """`step(fields)`: runs the work on the given number of threads, on a copy of the fields, so that the caller's
    memory is not written to."""
    work, size = code.b.function, len(FIELDS) - 1
    b = code.begin("step")
    arguments = b.function.args[0]
    field, copy, room = code.fields(FIELDS[:size]), b.alloca(I64, I64(size + 1)), b.alloca(I64, I64(ROOM // 8))
    small = b.icmp_signed("==", field["room"], I64(0))
    changed = {
        "next": I64(0),
        "room": b.select(small, b.ptrtoint(room, I64), field["room"]),
        "span": b.ptrtoint(code.at(arguments, size, I64), I64),
    }
    for place, name in enumerate(FIELDS):
        b.store(changed.get(name, field.get(name)), code.at(copy, place, I64))
    done = b.inttoptr(changed["room"], POINTER)
    with code.loop(I64(0), b.sdiv(field["tasks"], field["parts"])) as unit:
        b.store(I64(0), code.at(done, unit, I64))
    parallel = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I32, I32])
    with b.if_else(b.icmp_signed("==", field["threads"], I64(1))) as (alone, together):
        with alone:
            b.call(work, [copy])
        with together:
            start = b.inttoptr(field["parallel"], parallel.as_pointer())
            b.call(start, [work, copy, b.trunc(field["threads"], I32), I32(0)])
    b.ret_void()


def _positions(code: Code, field: dict[str, Any], task: _Task) -> tuple[Any, Any]:
    """The earliest and latest position among a task's rows, which are the queries of each head in turn."""
    b, queries = code.b, field["queries"]
    bottom = b.sub(b.add(task.row, task.height), I64(1))
    alone = b.icmp_signed("==", b.sdiv(task.row, queries), b.sdiv(bottom, queries))
    earliest = b.select(alone, b.srem(task.row, queries), I64(0))
    latest = b.select(alone, b.srem(bottom, queries), b.sub(queries, I64(1)))
    return b.add(field["offset"], earliest), b.add(field["offset"], latest)


def _band(code: Code, field: dict[str, Any], task: _Task, row: Any) -> tuple[Any, Any]:
    """The keys [low, high) that a row of a task may see by its position, before its span is applied."""
    b = code.b
    position = b.add(field["offset"], b.srem(b.add(task.row, row), field["queries"]))
    return b.sub(position, field["before"]), b.add(position, b.add(field["after"], I64(1)))


def _visible(code: Code, field: dict[str, Any], task: _Task, row: Any, start: Any, count: Any) -> tuple[Any, Any]:
    """The tokens [low, high) of the block from `start` on that a row may see."""
    low, high = (
        code.least(count, code.most(I64(0), code.b.sub(edge, start))) for edge in _band(code, field, task, row)
    )
    return low, code.most(low, high)


def _look(code: Code, values: Any, stride: Any, stored: Any, count: Any, length: int, spoiled: Any) -> None:
    """NaN in every lane of `spoiled` if a value of the block is not finite, else 0."""
    b = code.b
    with code.loop(I64(0), count) as s:
        here = code.at(values, b.mul(s, stride), stored)
        for column in range(0, length, code.lanes):
            b.store(code.fma(code.vector(here, column, stored), code.constant(0), b.load(spoiled)), spoiled)
    b.store(code.joined(b.fadd, b.load(spoiled), 1), spoiled)


def _look_at_scales(code: Code, scales: Any, count: Any, spoiled: Any) -> None:
    """NaN in every lane of `spoiled` if a scale of the block is not finite, else 0."""
    with code.loop(I64(0), count) as s:
        scale = code.splat(code.read(scales, s))
        code.b.store(code.fma(scale, code.constant(0), code.b.load(spoiled)), spoiled)


def _multiply(code: Code, tile: int, weights: Any, count: Any, scales: Any) -> None:
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


def _take(
    code: Code, q: Any, kind: Any, queries: Any, scale: Any, height: Any, padded: Any, tile: int, length: int
) -> None:
    """queries = q times the scale, in float32: row after row, or (tiles, length, tile). Rows beyond the last repeat it;
    their results are not used."""
    b = code.b
    with code.loop(I64(0), padded) as row:
        here = code.at(q, b.mul(code.least(row, b.sub(height, I64(1))), I64(length)), kind)
        if tile < code.lanes:
            with code.loop(I64(0), I64(length), code.lanes) as i:
                there = b.add(b.mul(row, I64(length)), i)
                code.write(b.fmul(code.vector(here, i, kind), code.splat(scale)), queries, there)
        else:
            place = b.srem(row, I64(tile))
            there = code.at(queries, b.add(b.mul(b.sub(row, place), I64(length)), place))
            with code.loop(I64(0), I64(length)) as i:
                code.write(b.fmul(code.number(here, i, kind), scale), there, b.mul(i, I64(tile)))


def _widen(code: Code, tensor: Any, stride: Any, count: Any, length: int, wide: Any, scales: Any | None) -> None:
    """A block of stored numbers as float32, (count, length), times the scale of each token if there are scales."""
    b = code.b
    with code.loop(I64(0), count) as s:
        _fetch_ahead(code, tensor, stride, s, length)
        here, there = code.at(tensor, b.mul(s, stride), code.stored), code.at(wide, b.mul(s, I64(length)))
        scale = None if scales is None else code.splat(code.read(scales, s))
        for column in range(0, length, code.lanes):
            numbers = code.vector(here, column, code.stored)
            code.write(numbers if scale is None else b.fmul(numbers, scale), there, column)


def _fetch_ahead(code: Code, tensor: Any, stride: Any, token: Any, length: int) -> None:
    """Prefetch the stored numbers of the token a page after this one."""
    ahead = max(1, PAGE // (length * code.size))
    code.prefetch(code.at(tensor, code.b.mul(code.b.add(token, I64(ahead)), stride), code.stored), length)


def _groups(code: Code, count: Any, size: int) -> Iterator[tuple[Any, list[Any]]]:
    """Loop over tokens below `count`, `size` at a time: yields the first index, and all of them. In the last group the
    last token repeats."""
    b = code.b
    last = b.sub(count, I64(1))
    with code.loop(I64(0), count, size) as s:
        yield s, [code.least(b.add(s, I64(i)), last) for i in range(size)]


def _score_few(
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


def _score_many(
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


def _hide(
    code: Code, field: dict[str, Any], task: _Task, place: Any, tile: int, start: Any, count: Any, weights: Any
) -> None:
    """-inf in place of the scores of keys that a row may not see, in the block from `start` on."""
    b = code.b
    with code.loop(I64(0), I64(tile)) as row:
        low, high = _visible(code, field, task, b.add(place, row), start, count)
        for begin, end in ((I64(0), low), (high, count)):
            with code.loop(begin, end) as s:
                code.write(F32(-math.inf), weights, b.add(b.mul(s, I64(tile)), row))


def _weigh(code: Code, tile: int, scores: Any, count: Any, tops: Any, totals: Any, fading: Any) -> None:
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


def _add(
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


def _merge(
    code: Code, field: dict[str, Any], address: dict[str, Any], task: _Task, unit: Any, head: Any, length: int,
    result: Any,
) -> None:  # fmt: skip
    """out = the sums of all parts over their sums of weights, both relative to the largest score of all parts."""
    b, columns = code.b, range(0, length, code.lanes)
    with code.loop(I64(0), task.height) as row:
        best, total = code.register(code.constant(_LOWEST)), code.register(code.constant(0))
        sums = [code.register(code.constant(0)) for _ in columns]

        def place(part: Any, row: Any = row) -> Any:
            return b.add(b.mul(b.add(b.mul(unit, field["parts"]), part), field["chunk"]), row)

        with code.loop(I64(0), field["parts"]) as part:
            b.store(code.larger(code.splat(code.read(address["best"], place(part))), b.load(best)), best)
        with code.loop(I64(0), field["parts"]) as part:
            here = place(part)
            share = code.power(b.fsub(code.splat(code.read(address["best"], here)), b.load(best)))
            b.store(code.fma(share, code.splat(code.read(address["totals"], here)), b.load(total)), total)
            added = code.at(address["sums"], b.mul(here, I64(length)))
            for column, register in zip(columns, sums, strict=True):
                b.store(code.fma(share, code.vector(added, column), b.load(register)), register)
        query = b.add(b.mul(head, field["rows"]), b.add(task.row, row))
        with b.if_then(b.icmp_signed("!=", field["tops"], I64(0))):  # this is a part of a larger call
            count = b.mul(b.sdiv(field["tasks"], b.mul(field["parts"], field["chunks"])), field["rows"])
            for offset, register in ((I64(0), best), (count, total)):
                code.write(b.extract_element(b.load(register), I64(0)), address["tops"], b.add(offset, query))
        low, high = _band(code, field, task, row)
        empty = b.icmp_signed(">=", code.most(task.first, low), code.least(task.last, high))
        for column, register in zip(columns, sums, strict=True):
            mean = b.select(empty, code.constant(0), b.fdiv(b.load(register), b.load(total)))
            code.write(code.narrow(mean, result), address["out"], b.add(b.mul(query, I64(length)), I64(column)), result)
