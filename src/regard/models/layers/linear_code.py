"""Machine code of x W^T, for tokens x in float32 and weights W in float32 or int8.

    out[m, e] = scale[e] · sum over d of x[m, d] W[e, d]

For a few tokens the time is that of reading the weights, so these are read once, in memory order and with prefetching,
and converted to float32 in registers. With more than `DIRECT` tokens, `ROWS` rows of int8 weights at a time are
converted to float32 in the CPU core's cache, and tiles of weights and tokens are multiplied in registers. Each thread
takes the next rows of the weights when it is done with its last.
"""

from typing import Any

from regard.core.paths.machine_code import F32, I64, POINTER, Code
from regard.models.layers.linear import MULTIPLE

FIELDS = ("next", "tasks", "tokens", "width", "rows", "step", "block", "x", "weight", "scale", "out")
"""The code's arguments, 8 bytes each: a counter from which all threads take their tasks, sizes, and addresses. A task
is `step` rows of the weights, at most `ROWS`; `block` of their columns, at most `COLUMNS`, are converted to float32 at
a time. The width and `block` are multiples of `MULTIPLE`."""
DIRECT, ROWS, COLUMNS = 4, 32, 768
_AHEAD = {"int8": 2048, "float32": 512}
"""Prefetch distance, in weights: rows are too short for the hardware prefetcher to predict the next."""


def source(dtype: str, lanes: int) -> str:
    """The program as LLVM IR."""
    code = Code(lanes, dtype)
    b, field = code.b, code.fields(FIELDS)
    address = {name: b.inttoptr(field[name], POINTER) for name in FIELDS[7:]}
    widened = b.alloca(F32, I64(ROWS * COLUMNS)) if dtype == "int8" else None
    with code.tasks(field["tasks"]) as task:
        low = b.mul(task, field["step"])
        high = code.least(b.add(low, field["step"]), field["rows"])
        for count in range(1, DIRECT + 1):
            with b.if_then(b.icmp_signed("==", field["tokens"], I64(count))), code.loop(low, high) as row:
                _direct(code, field, address, count, row)
        with (
            b.if_then(b.icmp_signed(">", field["tokens"], I64(DIRECT))),
            code.loop(I64(0), field["width"], field["block"]) as start,
        ):
            _tiles(code, field, address, widened, low, high, start)
    return str(code.module)


def _direct(code: Code, field: dict[str, Any], address: dict[str, Any], tokens: int, row: Any) -> None:
    """One row of weights times a few tokens. Several sums per token, so that additions do not wait for each other."""
    b, width, group = code.b, field["width"], 4 * code.lanes
    weights = code.at(address["weight"], b.mul(row, width), code.stored)
    x = [code.at(address["x"], b.mul(I64(token), width)) for token in range(tokens)]
    sums = [[code.register(code.constant(0)) for _ in range(max(1, 4 // tokens))] for _ in range(tokens)]

    def add(column: Any, turn: int) -> None:
        weight = code.vector(weights, column, code.stored)
        for token, registers in zip(x, sums, strict=True):
            place = registers[turn % len(registers)]
            b.store(code.fma(weight, code.vector(token, column), b.load(place)), place)

    whole = b.and_(width, I64(-group))
    with code.loop(I64(0), whole, group) as column:
        if tokens > 2:  # with fewer, hardware prefetching is fast enough
            code.prefetch(code.at(weights, b.add(column, I64(_AHEAD[code.dtype])), code.stored), group)
        for turn in range(4):
            add(b.add(column, I64(turn * code.lanes)), turn)
    with code.loop(whole, width, code.lanes) as column:
        add(column, 0)
    for token, registers in enumerate(sums):
        total = b.load(registers[0])
        for place in registers[1:]:
            total = b.fadd(total, b.load(place))
        _write(code, field, address, code.sums([total]), 1, row, I64(token))


def _tiles(
    code: Code, field: dict[str, Any], address: dict[str, Any], widened: Any, low: Any, high: Any, start: Any
) -> None:
    """The rows [low, high) times all tokens, over the block of columns that begins at `start`."""
    b = code.b
    count = code.least(b.sub(field["width"], start), field["block"])
    weights, stride, origin = address["weight"], field["width"], I64(0)
    if widened is None:
        weights = code.at(weights, start)
    else:
        with code.loop(low, high) as row:
            here = code.at(weights, b.add(b.mul(row, stride), start), code.stored)
            there = code.at(widened, b.mul(b.sub(row, low), field["block"]))
            with code.loop(I64(0), count, MULTIPLE) as column:
                code.prefetch(code.at(here, b.add(column, I64(_AHEAD[code.dtype])), code.stored), MULTIPLE)
                for lane in range(0, MULTIPLE, code.lanes):
                    place = b.add(column, I64(lane))
                    code.write(code.vector(here, place, code.stored), there, place)
        weights, stride, origin = widened, field["block"], low

    def tile(height: int, tokens: int, row: Any, token: Any) -> None:
        rows = [code.at(weights, b.mul(b.add(b.sub(row, origin), I64(i)), stride)) for i in range(height)]
        x = [code.at(address["x"], b.add(b.mul(b.add(token, I64(j)), field["width"]), start)) for j in range(tokens)]
        sums = [[code.register(code.constant(0)) for _ in range(height)] for _ in range(tokens)]
        with code.loop(I64(0), count, code.lanes) as column:
            weight = [code.vector(row_weights, column) for row_weights in rows]
            for j in range(tokens):
                number = code.vector(x[j], column)
                for i in range(height):
                    b.store(code.fma(weight[i], number, b.load(sums[j][i])), sums[j][i])
        for j in range(tokens):
            total = code.sums([b.load(place) for place in sums[j]])
            _write(code, field, address, total, height, row, b.add(token, I64(j)), start)

    tall, wide = 4 if code.lanes == 16 else 2, (6, 4, 2, 1)  # sums, weights and a token then fill the registers
    whole, first = b.sub(high, b.srem(b.sub(high, low), I64(tall))), I64(0)
    for tokens in wide:
        last = b.sub(field["tokens"], b.srem(b.sub(field["tokens"], first), I64(tokens)))
        with code.loop(first, last, tokens) as token:
            with code.loop(low, whole, tall) as row:
                tile(tall, tokens, row, token)
            with code.loop(whole, high) as row:
                tile(1, tokens, row, token)
        first = last


def _write(
    code: Code,
    field: dict[str, Any],
    address: dict[str, Any],
    sums: Any,
    height: int,
    row: Any,
    token: Any,
    start: Any = None,
) -> None:
    """Write the results of some rows and one token, added to those of earlier columns."""
    b = code.b
    place = b.add(b.mul(token, field["rows"]), row)
    if code.dtype == "int8":
        sums = b.fmul(sums, code.few(address["scale"], row, height))
    if start is not None:
        before = code.few(address["out"], place, height)
        sums = b.select(b.icmp_signed("==", start, I64(0)), sums, b.fadd(sums, before))
    code.write(sums, address["out"], place)
