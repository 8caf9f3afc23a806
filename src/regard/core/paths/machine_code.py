"""A small language for CPU programs, on top of LLVM's IR builder; compiler.py compiles them for this CPU.

A program is one function `void step(int64_t fields[])`, generated for one set of sizes. A function that many threads
call draws tasks from a counter, `fields[0]`, until none is left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I64, I32, F32, F64 = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()
STORED = {"float32": F32, "float16": ir.HalfType(), "bfloat16": ir.IntType(16), "int8": ir.IntType(8)}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_ROUNDER = 1.5 * 2**23
"""Added to a float32, it leaves the nearest integer in the last bits."""
_POWERS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
"""The Taylor coefficients ln(2)^n / n! from n = 6 down: 2^x within 2e-7 for |x| <= 1/2."""


class Code:
    """The program so far, and the operations to write it with: on vectors of `lanes` float32 numbers."""

    def __init__(self, lanes: int, dtype: str, name: str = "step") -> None:
        self.lanes, self.dtype, self.stored = lanes, dtype, STORED[dtype]
        self.size = _BYTES[dtype]
        self.kind, self.bits = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.module = ir.Module()
        self._fma = ir.Function(self.module, ir.FunctionType(self.kind, [self.kind] * 3), f"llvm.fma.v{lanes}f32")
        hint = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        self._prefetch = ir.Function(self.module, hint, "llvm.prefetch.p0")
        self.b: Any = self.begin(name)

    def begin(self, name: str) -> Any:
        """Begin a new function `void name(int64_t fields[])`."""
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        self._entry = function.append_basic_block("entry")
        self.b = ir.IRBuilder(self._entry)
        return self.b

    def fields(self, names: Sequence[str]) -> dict[str, Any]:
        """The arguments of the function, 8 bytes each; all but the first, which is the counter."""
        return {name: self.read(self.b.function.args[0], place, I64) for place, name in enumerate(names) if place}

    @contextmanager
    def tasks(self, count: Any) -> Iterator[Any]:
        """The numbers below `count` that this thread draws; the function ends when none is left."""
        b = self.b
        draw, work, done = (b.append_basic_block(name) for name in ("draw", "work", "done"))
        b.branch(draw)
        b.position_at_end(draw)
        task = b.atomic_rmw("add", self.at(b.function.args[0], 0, I64), I64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", task, count), work, done)
        b.position_at_end(done)
        b.ret_void()
        b.position_at_end(work)
        yield task
        b.branch(draw)

    @contextmanager
    def loop(self, start: Any, stop: Any, stride: Any = 1) -> Iterator[Any]:
        """`for index in range(start, stop, stride)`."""
        b = self.b
        before, head, body, after = b.block, *(b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, after)
        b.position_at_end(body)
        yield index
        index.add_incoming(b.add(index, I64(stride) if isinstance(stride, int) else stride), b.block)
        b.branch(head)
        b.position_at_end(after)

    def at(self, pointer: Any, index: Any, kind: Any = F32) -> Any:
        """&pointer[index]."""
        return self.b.gep(pointer, [I64(index) if isinstance(index, int) else index], source_etype=kind)

    def read(self, pointer: Any, index: Any, kind: Any = F32) -> Any:
        return self.b.load(self.at(pointer, index, kind), typ=kind)

    def write(self, value: Any, pointer: Any, index: Any, kind: Any = F32) -> None:
        """A number, or a vector of them."""
        place = self.b.bitcast(self.at(pointer, index, kind), value.type.as_pointer())
        self.b.store(value, place, align=4 if kind is F32 else 1)

    def narrow(self, x: Any, kind: Any) -> Any:
        """A vector of float32 converted to a storage type, rounded to nearest."""
        if kind is F32:
            return x
        stored = ir.VectorType(kind, self.lanes)
        if isinstance(kind, ir.HalfType):
            return self.b.fptrunc(x, stored)
        bits = self.b.bitcast(x, self.bits)  # bfloat16: the upper half of a float32; ties to even
        odd = self.b.and_(self.b.lshr(bits, self.whole(16)), self.whole(1))
        rounded = self.b.lshr(self.b.add(bits, self.b.add(odd, self.whole(0x7FFF))), self.whole(16))
        return self.b.trunc(self.b.select(self.b.fcmp_unordered("uno", x, x), self.whole(0x7FC0), rounded), stored)

    def number(self, pointer: Any, index: Any, kind: Any) -> Any:
        """A stored number as float32."""
        stored = self.read(pointer, index, kind)
        if kind is F32:
            return stored
        if isinstance(kind, ir.HalfType):
            return self.b.fpext(stored, F32)
        return self.b.bitcast(self.b.shl(self.b.zext(stored, I32), I32(16)), F32)  # bfloat16

    def vector(self, pointer: Any, index: Any, kind: Any = F32) -> Any:
        """Stored numbers as float32."""
        place = self.at(pointer, index, kind)
        stored = self.b.load(place, typ=ir.VectorType(kind, self.lanes), align=1)
        if kind is F32:
            return stored
        if isinstance(kind, ir.HalfType):
            return self.b.fpext(stored, self.kind)
        if kind is STORED["int8"]:
            return self.b.sitofp(self.b.sext(stored, self.bits), self.kind)
        wide = self.b.shl(self.b.zext(stored, self.bits), self.whole(16))  # bfloat16: the upper half of a float32
        return self.b.bitcast(wide, self.kind)

    def register(self, value: Any) -> Any:
        """A mutable vector (a stack slot that LLVM turns into a register)."""
        with self.b.goto_block(self._entry):
            place = self.b.alloca(self.kind)
        self.b.store(value, place)
        return place

    def constant(self, value: float) -> Any:
        if value == 0:
            return ir.Constant(self.kind, None)  # shorter for LLVM to parse
        return ir.Constant(self.kind, [F32(value)] * self.lanes)

    def whole(self, value: int) -> Any:
        return ir.Constant(self.bits, [I32(value)] * self.lanes)

    def splat(self, number: Any) -> Any:
        """One number in every lane."""
        return self.picked(self.b.insert_element(self.constant(0), number, I32(0)), [0] * self.lanes)

    def few(self, pointer: Any, index: Any, count: int) -> Any:
        """`count` float32 numbers."""
        return self.b.load(self.at(pointer, index), typ=ir.VectorType(F32, count), align=4)

    def repeated(self, pointer: Any, count: int) -> Any:
        """`count` stored numbers, repeated to fill a vector."""
        return self.picked(self.few(pointer, 0, count), [lane % count for lane in range(self.lanes)])

    def least(self, x: Any, y: Any) -> Any:
        """The smaller of two whole numbers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def most(self, x: Any, y: Any) -> Any:
        """The larger of two whole numbers."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def prefetch(self, place: Any, count: int) -> None:
        """Prefetch `count` stored numbers into the CPU's nearest cache; reading past the end does no harm."""
        line = 64 // self.size
        for first in range(0, count, line):
            self.b.call(self._prefetch, [self.at(place, first, self.stored), I32(0), I32(3), I32(1)])

    def picked(self, x: Any, places: Sequence[int], y: Any = None) -> Any:
        """The numbers at these indices of x, or of x followed by y."""
        return self.b.shuffle_vector(
            x, x if y is None else y, ir.Constant(ir.VectorType(I32, len(places)), list(places))
        )

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.b.call(self._fma, [x, y, z])

    def larger(self, x: Any, y: Any) -> Any:
        """The larger number in each lane; y where x is NaN, so that a NaN score affects its weight but not the
        maximum."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def joined(self, join: Any, x: Any, count: int) -> Any:
        """Lanes i, i + count, i + 2 count … reduced by `join`, with the result in each of them."""
        apart = self.lanes
        while apart > count:
            apart //= 2
            x = join(x, self.picked(x, [(lane + apart) % self.lanes for lane in range(self.lanes)]))
        return x

    def sums(self, vectors: list[Any]) -> Any:
        """The sum of each vector. Pairs of vectors are added into one, half of the lanes for each, then the last vector
        is summed within itself."""
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
        """2^x for x <= 0: the integer part goes into the exponent's bits, the rest through a polynomial. NaN stays
        NaN."""
        b = self.b
        near = b.fadd(x, self.constant(_ROUNDER))
        rest = b.fsub(x, b.fsub(near, self.constant(_ROUNDER)))
        total = self.constant(_POWERS[0])
        for factor in _POWERS[1:]:
            total = self.fma(total, rest, self.constant(factor))
        exponent = b.add(b.shl(b.bitcast(near, self.bits), self.whole(23)), self.whole(127 << 23))
        tiny = b.fcmp_ordered("<", x, self.constant(-126))
        return b.select(tiny, self.constant(0), b.fmul(total, b.bitcast(exponent, self.kind)))
