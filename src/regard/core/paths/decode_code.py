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
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from regard.core.paths.decode_block import add, look, look_at_scales, multiply, score_few, score_many, weigh, widen
from regard.core.paths.machine_code import F32, F64, I32, I64, POINTER, STORED, Code

BLOCK = 96
"""Tokens per block: a multiple of every number of keys that is scored together."""
WIDENED = 1 << 16
"""Bytes of a block's keys and values in float32: they are on the stack, and a thread's stack may be small."""
CHUNK = 64
"""The most query rows per task: their queries and sums stay in the CPU core's cache."""
FEW = (1, 2, 4)
"""Up to this many rows, a vector holds numbers of one key."""
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
class _Sizes:
    """What a program is generated for."""

    queries: Any
    """The dtype of queries."""
    qk_length: int
    value_length: int
    tile: int
    """Query rows computed together."""
    block: int
    """Tokens computed together."""


@dataclass(frozen=True)
class _Stack:
    """A thread's own memory."""

    queries: Any
    weights: Any
    """Scores and then weights of a block, (tokens, tile)."""
    fading: Any
    """The factors for the older sums of a tile's rows."""
    widened: dict[str, Any]
    """A block's keys and values in float32; empty if they are read as they are stored."""


@dataclass(frozen=True)
class _Rows:
    """The query rows of a task, and where their tokens and partial results are: values in the program, not in
    Python."""

    row: Any
    """The first row of the chunk among the rows of the key/value head."""
    height: Any
    """The number of rows in the chunk."""
    padded: Any
    """The same, rounded up to whole tiles."""
    first: Any
    last: Any
    """The span of keys of its batch row."""
    earliest: Any
    latest: Any
    """The earliest and latest position among the rows."""
    q: Any
    k: Any
    v: Any
    scales: dict[str, Any]
    """The scales of int8 keys and values."""
    sums: Any
    tops: Any
    totals: Any


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
    b, field = code.b, code.fields(FIELDS)
    sizes = _Sizes(STORED[dtype], qk_length, value_length, tile, block(qk_length, value_length, tile, stored, lanes))
    address = _addresses(code, field, value_length)
    scale = b.fptrunc(b.bitcast(field["scale"], F64), F32)
    stack = _stack(code, sizes, stored)
    with code.tasks(field["tasks"]) as number:
        unit, part = b.sdiv(number, field["parts"]), b.srem(number, field["parts"])
        head, chunk = b.sdiv(unit, field["chunks"]), b.srem(unit, field["chunks"])
        rows, begin, end = _rows(code, field, address, sizes, number, part, head, chunk)
        _take(code, rows.q, sizes.queries, stack.queries, scale, rows.height, rows.padded, tile, qk_length)
        with code.loop(I64(0), b.mul(rows.padded, I64(value_length)), lanes) as i:
            code.write(code.constant(0), rows.sums, i)
        with code.loop(I64(0), rows.padded) as i:
            code.write(F32(_LOWEST), rows.tops, i)
            code.write(F32(0), rows.totals, i)
        with code.loop(begin, end, sizes.block) as start:
            _attend(code, field, sizes, stack, rows, start, code.least(b.sub(end, start), I64(sizes.block)))
        ended = b.atomic_rmw("add", code.at(address["done"], unit, I64), I64(1), "acq_rel")
        with b.if_then(b.icmp_signed("==", ended, b.sub(field["parts"], I64(1)))):
            _merge(code, field, address, rows, unit, head, value_length, STORED[result])
    _start(code)
    return str(code.module)


def _addresses(code: Code, field: dict[str, Any], value_length: int) -> dict[str, Any]:
    """The tensors, and the parts of the memory for partial results."""
    b = code.b
    address = {
        name: b.inttoptr(field[name], POINTER) for name in ("q", "k", "v", "out", "tops", "k_scales", "v_scales")
    }
    units, numbers = b.sdiv(field["tasks"], field["parts"]), b.mul(field["tasks"], field["chunk"])
    address["done"] = b.inttoptr(field["room"], POINTER)
    address["sums"] = code.at(address["done"], units, I64)
    address["best"] = code.at(address["sums"], b.mul(numbers, I64(value_length)))
    address["totals"] = code.at(address["best"], numbers)
    return address


def _stack(code: Code, sizes: _Sizes, stored: str) -> _Stack:
    b, few = code.b, sizes.tile < code.lanes
    queries = b.alloca(F32, I64((sizes.tile if few else CHUNK) * sizes.qk_length))
    weights, fading = b.alloca(F32, I64(sizes.block * sizes.tile)), b.alloca(F32, I64(sizes.tile))
    widened = {}
    if stored != "float32" and not few:
        lengths = {"k": sizes.qk_length, "v": sizes.value_length}
        widened = {name: b.alloca(F32, I64(sizes.block * length)) for name, length in lengths.items()}
    return _Stack(queries, weights, fading, widened)


def _rows(
    code: Code, field: dict[str, Any], address: dict[str, Any], sizes: _Sizes, number: Any, part: Any, head: Any,
    chunk: Any,
) -> tuple[_Rows, Any, Any]:  # fmt: skip
    """The rows of a task, and the tokens [begin, end) that it reads: its part of those that any of the rows sees."""
    b = code.b
    batch, group = b.sdiv(head, field["groups"]), b.srem(head, field["groups"])
    row = b.mul(chunk, field["chunk"])
    span = b.inttoptr(field["span"], POINTER)
    first, last = (code.read(span, b.add(b.mul(batch, field["spans"]), I64(end)), I64) for end in (0, 1))
    first, last = code.most(first, I64(0)), code.least(last, b.add(field["offset"], field["queries"]))
    height = code.least(field["chunk"], b.sub(field["rows"], row))
    earliest, latest = _positions(code, field, row, height)
    low = code.most(first, b.sub(earliest, field["before"]))
    high = code.most(low, code.least(last, b.add(latest, b.add(field["after"], I64(1)))))
    begin, end = (
        b.add(low, b.sdiv(b.mul(b.sub(high, low), edge), field["parts"])) for edge in (part, b.add(part, I64(1)))
    )

    def of_head(name: str, kind: Any) -> Any:
        place = b.add(b.mul(batch, field[f"{name}_batch"]), b.mul(group, field[f"{name}_head"]))
        return code.at(address[name], place, kind)

    k, v = of_head("k", code.stored), of_head("v", code.stored)
    scales = {name: of_head(f"{name}_scales", F32) for name in ("k", "v")} if code.dtype == "int8" else {}
    query = b.add(b.mul(head, field["rows"]), row)
    q = code.at(address["q"], b.mul(query, I64(sizes.qk_length)), sizes.queries)
    sums = code.at(address["sums"], b.mul(b.mul(number, field["chunk"]), I64(sizes.value_length)))
    tops, totals = (code.at(address[name], b.mul(number, field["chunk"])) for name in ("best", "totals"))
    padded = b.mul(b.sdiv(b.add(height, I64(sizes.tile - 1)), I64(sizes.tile)), I64(sizes.tile))
    rows = _Rows(row, height, padded, first, last, earliest, latest, q, k, v, scales, sums, tops, totals)
    return rows, begin, end


def _attend(
    code: Code, field: dict[str, Any], sizes: _Sizes, stack: _Stack, rows: _Rows, start: Any, tokens: Any
) -> None:
    """Add a block of tokens, from `start` on, to the sums of all rows."""
    b, tile, few = code.b, sizes.tile, sizes.tile < code.lanes
    keys, values = (
        code.at(tensor, b.mul(start, field[f"{name}_token"]), code.stored)
        for name, tensor in (("k", rows.k), ("v", rows.v))
    )
    key_stride, value_stride, kind = field["k_token"], field["v_token"], code.stored
    scales = {name: code.at(place, start) for name, place in rows.scales.items()}
    if stack.widened:
        wide = stack.widened
        widen(code, keys, key_stride, tokens, sizes.qk_length, wide["k"], scales.pop("k", None))
        widen(code, values, value_stride, tokens, sizes.value_length, wide["v"], scales.pop("v", None))
        keys, values, kind = wide["k"], wide["v"], F32
        key_stride, value_stride = I64(sizes.qk_length), I64(sizes.value_length)
    hidden = b.or_(
        b.icmp_signed("<", start, b.sub(rows.latest, field["before"])),
        b.icmp_signed(">", b.add(start, tokens), b.add(rows.earliest, b.add(field["after"], I64(1)))),
    )
    spoiled = code.register(code.constant(0))
    with b.if_then(hidden, likely=False):
        if scales:  # integers are finite
            look_at_scales(code, scales["v"], tokens, spoiled)
        else:
            look(code, values, value_stride, kind, tokens, sizes.value_length, spoiled)
    careful = b.fcmp_unordered("uno", *[b.extract_element(b.load(spoiled), I64(0))] * 2)
    with code.loop(I64(0), rows.padded, tile) as place:
        queries = code.at(stack.queries, b.mul(place, I64(sizes.qk_length)))
        tensors = keys, key_stride, tokens, sizes.qk_length, stack.weights, values, value_stride, sizes.value_length
        if few:
            score_few(code, tile, queries, *tensors)
        else:
            score_many(code, tile, queries, *tensors, fetch=not stack.widened)
        if scales:
            multiply(code, tile, stack.weights, tokens, scales["k"])
        with b.if_then(hidden, likely=False):
            _hide(code, field, rows, place, tile, start, tokens, stack.weights)
        weigh(code, tile, stack.weights, tokens, code.at(rows.tops, place), code.at(rows.totals, place), stack.fading)
        if scales:
            multiply(code, tile, stack.weights, tokens, scales["v"])

        def add_rows(row: Any, count: int, low: Any, high: Any, place: Any = place) -> None:
            out = code.at(rows.sums, b.mul(b.add(place, row), I64(sizes.value_length)))
            add(code, tile, count, code.at(stack.fading, row), code.at(stack.weights, row), values, value_stride, kind,
                low, high, sizes.value_length, out)  # fmt: skip

        with b.if_else(careful, likely=False) as (rarely, mostly):
            with rarely, code.loop(I64(0), I64(tile)) as row:
                add_rows(row, 1, *_visible(code, field, rows, b.add(place, row), start, tokens))
            with mostly, code.loop(I64(0), I64(tile), min(tile, 4)) as row:
                add_rows(row, min(tile, 4), I64(0), tokens)


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


def _positions(code: Code, field: dict[str, Any], row: Any, height: Any) -> tuple[Any, Any]:
    """The earliest and latest position among `height` rows, which are the queries of each head in turn."""
    b, queries = code.b, field["queries"]
    bottom = b.sub(b.add(row, height), I64(1))
    alone = b.icmp_signed("==", b.sdiv(row, queries), b.sdiv(bottom, queries))
    earliest = b.select(alone, b.srem(row, queries), I64(0))
    latest = b.select(alone, b.srem(bottom, queries), b.sub(queries, I64(1)))
    return b.add(field["offset"], earliest), b.add(field["offset"], latest)


def _band(code: Code, field: dict[str, Any], rows: _Rows, row: Any) -> tuple[Any, Any]:
    """The keys [low, high) that a row of a task may see by its position, before its span is applied."""
    b = code.b
    position = b.add(field["offset"], b.srem(b.add(rows.row, row), field["queries"]))
    return b.sub(position, field["before"]), b.add(position, b.add(field["after"], I64(1)))


def _visible(code: Code, field: dict[str, Any], rows: _Rows, row: Any, start: Any, count: Any) -> tuple[Any, Any]:
    """The tokens [low, high) of the block from `start` on that a row may see."""
    low, high = (
        code.least(count, code.most(I64(0), code.b.sub(edge, start))) for edge in _band(code, field, rows, row)
    )
    return low, code.most(low, high)


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


def _hide(
    code: Code, field: dict[str, Any], rows: _Rows, place: Any, tile: int, start: Any, count: Any, weights: Any
) -> None:
    """-inf in place of the scores of keys that a row may not see, in the block from `start` on."""
    b = code.b
    with code.loop(I64(0), I64(tile)) as row:
        low, high = _visible(code, field, rows, b.add(place, row), start, count)
        for begin, end in ((I64(0), low), (high, count)):
            with code.loop(begin, end) as s:
                code.write(F32(-math.inf), weights, b.add(b.mul(s, I64(tile)), row))


def _merge(
    code: Code, field: dict[str, Any], address: dict[str, Any], rows: _Rows, unit: Any, head: Any, length: int,
    result: Any,
) -> None:  # fmt: skip
    """out = the sums of all parts over their sums of weights, both relative to the largest score of all parts."""
    b, columns = code.b, range(0, length, code.lanes)
    with code.loop(I64(0), rows.height) as row:
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
        query = b.add(b.mul(head, field["rows"]), b.add(rows.row, row))
        with b.if_then(b.icmp_signed("!=", field["tops"], I64(0))):  # this is a part of a larger call
            count = b.mul(b.sdiv(field["tasks"], b.mul(field["parts"], field["chunks"])), field["rows"])
            for offset, register in ((I64(0), best), (count, total)):
                code.write(b.extract_element(b.load(register), I64(0)), address["tops"], b.add(offset, query))
        low, high = _band(code, field, rows, row)
        empty = b.icmp_signed(">=", code.most(rows.first, low), code.least(rows.last, high))
        for column, register in zip(columns, sums, strict=True):
            mean = b.select(empty, code.constant(0), b.fdiv(b.load(register), b.load(total)))
            code.write(code.narrow(mean, result), address["out"], b.add(b.mul(query, I64(length)), I64(column)), result)
