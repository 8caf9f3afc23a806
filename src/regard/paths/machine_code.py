"""Machine code of a decode step, made for one processor and one set of sizes while the program runs.

    x_s = scale · log2(e) · q·k_s        m = max of x_s        out = sum of 2^(x_s - m) v_s / sum of 2^(x_s - m)

PyTorch's products are made for many rows; a step of a stream has a few. This is one pass over the keys and values, a
block of `BLOCK` tokens at a time: its scores, their powers of two, and the sum of its values, for up to 4 query rows
together, so that what is read serves up to 4 multiply-adds and a block's sums stay in registers. Keys and values are
read in the order they lie in. Where a block brings a larger score, the sums so far are scaled down.

Python writes the code out and LLVM (by llvmlite) makes it fit the processor: some 0.1 s for each new set of sizes.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

BLOCK = 128
"""Tokens whose scores are kept at a time."""
FIELDS = (
    "next", "tasks", "parts", "groups", "spans", "q", "k", "v", "sums", "tops", "totals",
    "k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token", "scale",
)  # fmt: skip
"""What the code is told, 8 bytes each: a counter that all threads draw their tasks from, sizes, addresses, strides in
elements, and the scale times log2(e) as a double. A task is a part of one key/value head's tokens."""

_I64, _I32, _F32, _F64 = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.DoubleType()
_POINTER = ir.PointerType()
_STORED = {"float32": _F32, "float16": ir.HalfType(), "bfloat16": ir.IntType(16)}
_LOWEST = -3.4028234663852886e38
"""The largest score before any is known: the lowest that is finite, since from -inf nothing can be taken off."""
_ROUNDER = 1.5 * 2**23
"""Added to a float32, leaves its nearest whole number in the last bits."""
_POWERS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
"""ln(2)^n / n! from n = 6 down, Taylor's: 2^x within 2e-7 for |x| <= 1/2."""


@cache
def compiled(qk_length: int, value_length: int, rows: int, dtype: str, lanes: int) -> tuple[int, Any]:
    """The address of `void step(int64_t fields[])` for these sizes, and what keeps it alive."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(source(qk_length, value_length, rows, dtype, lanes))
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine.get_function_address("step"), engine


def source(qk_length: int, value_length: int, rows: int, dtype: str, lanes: int) -> str:
    """The code of a step in LLVM's language. Each task leaves `sums` (rows, value_length) of the values, and each row's
    largest score and sum of weights in `tops` and `totals`."""
    code = _Code(lanes, dtype)
    b, stored = code.b, code.stored
    field = {name: code.read(code.b.function.args[0], place, _I64) for place, name in enumerate(FIELDS) if place}
    address = {name: b.inttoptr(field[name], _POINTER) for name in FIELDS[4:11]}
    scale = b.fptrunc(b.bitcast(field["scale"], _F64), _F32)
    queries = b.alloca(_F32, _I64(rows * qk_length))
    weights = b.alloca(_F32, _I64(4 * BLOCK))

    draw, work, done = (b.append_basic_block(name) for name in ("draw", "work", "done"))
    b.branch(draw)
    b.position_at_end(draw)
    task = b.atomic_rmw("add", code.at(b.function.args[0], 0, _I64), _I64(1), "monotonic")
    b.cbranch(b.icmp_signed("<", task, field["tasks"]), work, done)
    b.position_at_end(done)
    b.ret_void()

    b.position_at_end(work)
    head, part = b.sdiv(task, field["parts"]), b.srem(task, field["parts"])
    batch, group = b.sdiv(head, field["groups"]), b.srem(head, field["groups"])
    first, last = (code.read(address["spans"], b.add(b.mul(batch, _I64(2)), _I64(end)), _I64) for end in (0, 1))
    low, high = (
        b.add(first, b.sdiv(b.mul(b.sub(last, first), end), field["parts"])) for end in (part, b.add(part, _I64(1)))
    )
    k, v = (
        code.at(address[name], b.add(b.mul(batch, field[f"{name}_batch"]), b.mul(group, field[f"{name}_head"])), stored)
        for name in ("k", "v")
    )
    q = code.at(address["q"], b.mul(head, _I64(rows * qk_length)), stored)
    sums = code.at(address["sums"], b.mul(task, _I64(rows * value_length)))
    tops, totals = (code.at(address[name], b.mul(task, _I64(rows))) for name in ("tops", "totals"))
    with code.loop(_I64(0), _I64(rows * qk_length), lanes) as i:
        code.write(b.fmul(code.vector(q, i, stored), code.splat(scale)), queries, i)
    with code.loop(_I64(0), _I64(rows * value_length), lanes) as i:
        code.write(code.constant(0), sums, i)
    with code.loop(_I64(0), _I64(rows)) as i:
        code.write(_F32(_LOWEST), tops, i)
        code.write(_F32(0), totals, i)

    with code.loop(low, high, BLOCK) as start:
        left = b.sub(high, start)
        count = b.select(b.icmp_signed("<", left, _I64(BLOCK)), left, _I64(BLOCK))

        def tile(size: int, row: Any) -> None:
            here = code.at(queries, b.mul(row, _I64(qk_length)))
            keys, values = (code.at(t, b.mul(start, field[f"{n}_token"]), stored) for n, t in (("k", k), ("v", v)))
            _score(code, size, here, keys, field["k_token"], count, qk_length, weights)
            fading = _weigh(code, size, weights, count, code.at(tops, row), code.at(totals, row))
            out = code.at(sums, b.mul(row, _I64(value_length)))
            _add(code, size, fading, weights, values, field["v_token"], count, value_length, out)

        taken = 0
        for size in (4, 2, 1):
            whole = (rows - taken) // size * size
            if whole > size:
                with code.loop(_I64(taken), _I64(taken + whole), size) as row:
                    tile(size, row)
            elif whole:
                tile(size, _I64(taken))
            taken += whole
    b.branch(draw)
    return str(code.module)


def _score(
    code: "_Code", size: int, queries: Any, keys: Any, stride: Any, count: Any, length: int, weights: Any
) -> None:
    """weights[s, row] = queries[row] · keys[s]. A key after the other: in any other order memory answers later."""
    b = code.b
    with code.loop(_I64(0), count) as s:
        here = code.at(keys, b.mul(s, stride), code.stored)
        products = [code.constant(0)] * size
        for column in range(0, length, code.lanes):
            key = code.vector(here, column, code.stored)
            for row in range(size):
                products[row] = code.fma(code.vector(queries, row * length + column), key, products[row])
        code.write(code.sums(products), weights, b.mul(s, _I64(size)))


def _weigh(code: "_Code", size: int, scores: Any, count: Any, tops: Any, totals: Any) -> Any:
    """Powers of two in place of the scores (s, row); each row's largest score and sum of weights brought up to date.

    Gives the factor by which older sums of each row shrink. Lane i holds a number of row i % size throughout.
    """
    b = code.b
    filled = b.mul(count, _I64(size))
    whole = b.and_(b.add(filled, _I64(code.lanes - 1)), _I64(-code.lanes))
    with code.loop(filled, whole) as i:
        code.write(_F32(-math.inf), scores, i)
    before, summed = (code.repeated(rows, size) for rows in (tops, totals))
    best, added = code.register(before), code.register(code.constant(0))
    with code.loop(_I64(0), whole, code.lanes) as i:
        b.store(code.larger(code.vector(scores, i), b.load(best)), best)
    top = code.joined(code.larger, b.load(best), size)
    fading = code.power(b.fsub(before, top))
    with code.loop(_I64(0), whole, code.lanes) as i:
        weight = code.power(b.fsub(code.vector(scores, i), top))
        code.write(weight, scores, i)
        b.store(b.fadd(weight, b.load(added)), added)
    total = code.fma(summed, fading, code.joined(b.fadd, b.load(added), size))
    for rows, found in ((tops, top), (totals, total)):
        code.write(code.picked(found, range(size)), rows, 0)
    return fading


def _add(
    code: "_Code", size: int, fading: Any, weights: Any, values: Any, stride: Any, count: Any, length: int, out: Any
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
        with code.loop(_I64(0), count) as s:
            here = code.at(values, b.mul(s, stride), code.stored)
            value = {column: code.vector(here, column, code.stored) for column in columns}
            weight = [code.splat(code.read(weights, b.add(b.mul(s, _I64(size)), _I64(row)))) for row in range(size)]
            for row, column in cells:
                cell = held[row, column]
                b.store(code.fma(weight[row], value[column], b.load(cell)), cell)
        for row, column in cells:
            code.write(b.load(held[row, column]), out, row * length + column)


class _Code:
    """The code so far, and the few words it is written in: vectors of `lanes` float32."""

    def __init__(self, lanes: int, dtype: str) -> None:
        self.lanes, self.stored = lanes, _STORED[dtype]
        self.kind, self.bits = ir.VectorType(_F32, lanes), ir.VectorType(_I32, lanes)
        self.module = ir.Module()
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_POINTER]), "step")
        self._fma = ir.Function(self.module, ir.FunctionType(self.kind, [self.kind] * 3), f"llvm.fma.v{lanes}f32")
        self._entry = function.append_basic_block("entry")
        self.b: Any = ir.IRBuilder(self._entry)

    @contextmanager
    def loop(self, start: Any, stop: Any, stride: int = 1) -> Iterator[Any]:
        """`for index in range(start, stop, stride)`."""
        b = self.b
        before, head, body, after = b.block, *(b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(_I64)
        index.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, after)
        b.position_at_end(body)
        yield index
        index.add_incoming(b.add(index, _I64(stride)), b.block)
        b.branch(head)
        b.position_at_end(after)

    def at(self, pointer: Any, index: Any, kind: Any = _F32) -> Any:
        """&pointer[index]."""
        return self.b.gep(pointer, [_I64(index) if isinstance(index, int) else index], source_etype=kind)

    def read(self, pointer: Any, index: Any, kind: Any = _F32) -> Any:
        return self.b.load(self.at(pointer, index, kind), typ=kind)

    def write(self, value: Any, pointer: Any, index: Any) -> None:
        """A number, or a vector of them."""
        self.b.store(value, self.b.bitcast(self.at(pointer, index), value.type.as_pointer()), align=4)

    def vector(self, pointer: Any, index: Any, kind: Any = _F32) -> Any:
        """Stored numbers as float32."""
        place = self.at(pointer, index, kind)
        found = self.b.load(place, typ=ir.VectorType(kind, self.lanes), align=4 if kind is _F32 else 2)
        if kind is _F32:
            return found
        if isinstance(kind, ir.HalfType):
            return self.b.fpext(found, self.kind)
        wide = self.b.shl(self.b.zext(found, self.bits), self.whole(16))  # bfloat16: the upper half of a float32
        return self.b.bitcast(wide, self.kind)

    def register(self, value: Any) -> Any:
        """A vector that changes."""
        with self.b.goto_block(self._entry):
            place = self.b.alloca(self.kind)
        self.b.store(value, place)
        return place

    def constant(self, value: float) -> Any:
        return ir.Constant(self.kind, [_F32(value)] * self.lanes)

    def whole(self, value: int) -> Any:
        return ir.Constant(self.bits, [_I32(value)] * self.lanes)

    def splat(self, number: Any) -> Any:
        """One number in every lane."""
        return self.picked(self.b.insert_element(self.constant(0), number, _I32(0)), [0] * self.lanes)

    def repeated(self, pointer: Any, count: int) -> Any:
        """`count` stored numbers, again and again."""
        found = self.b.load(self.at(pointer, 0), typ=ir.VectorType(_F32, count), align=4)
        return self.picked(found, [lane % count for lane in range(self.lanes)])

    def picked(self, x: Any, places: Sequence[int], y: Any = None) -> Any:
        """The numbers at these places of x, or of x and y one behind the other."""
        return self.b.shuffle_vector(
            x, x if y is None else y, ir.Constant(ir.VectorType(_I32, len(places)), list(places))
        )

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.b.call(self._fma, [x, y, z])

    def larger(self, x: Any, y: Any) -> Any:
        """The larger number in each lane; y where x is NaN, so that a bad score spoils its weight and no maximum."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def joined(self, join: Any, x: Any, count: int) -> Any:
        """All lanes i, i + count, i + 2 count … joined, in each of them."""
        apart = self.lanes
        while apart > count:
            apart //= 2
            x = join(x, self.picked(x, [(lane + apart) % self.lanes for lane in range(self.lanes)]))
        return x

    def sums(self, vectors: list[Any]) -> Any:
        """The sum of each vector. Pairs are folded into one, half the lanes for each, then that one within itself."""
        width, count = self.lanes, len(vectors)
        while width > 1:
            half = width // 2
            if len(vectors) > 1:
                left = [lane for lane in range(2 * self.lanes) if lane % width < half]
                right = [lane + half for lane in left]
                pairs = zip(vectors[::2], vectors[1::2], strict=True)
                vectors = [self.b.fadd(self.picked(x, left, y), self.picked(x, right, y)) for x, y in pairs]
            else:
                (x,) = vectors
                vectors = [self.b.fadd(x, self.picked(x, [(lane + half) % self.lanes for lane in range(self.lanes)]))]
            width = half
        return self.picked(vectors[0], range(0, self.lanes, self.lanes // count))

    def power(self, x: Any) -> Any:
        """2^x for x <= 0: a power put together from bits, times a polynomial of what is left of x. NaN stays."""
        b = self.b
        near = b.fadd(x, self.constant(_ROUNDER))
        rest = b.fsub(x, b.fsub(near, self.constant(_ROUNDER)))
        found = self.constant(_POWERS[0])
        for factor in _POWERS[1:]:
            found = self.fma(found, rest, self.constant(factor))
        exponent = b.add(b.shl(b.bitcast(near, self.bits), self.whole(23)), self.whole(127 << 23))
        tiny = b.fcmp_ordered("<", x, self.constant(-126))
        return b.select(tiny, self.constant(0), b.fmul(found, b.bitcast(exponent, self.kind)))
