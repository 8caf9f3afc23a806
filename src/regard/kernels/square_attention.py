"""Attention with a second-order polynomial kernel on a GPU: what is launched, forward and backward.

The kernels are in quadratic.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.common import prefix_kernel
from regard.kernels.quadratic import (
    far_kernel,
    near_kernel,
    near_keys_kernel,
    near_queries_kernel,
    pull_kernel,
    square_kernel,
    sum_chunks_kernel,
)

UNIT = 128
"""Features of a unit, as quadratic.py cuts the square."""


class Launch(NamedTuple):
    """Sizes of a program's tile, its warps and the stages of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles for one set of lengths and one dtype."""

    d: int
    v: int
    """qk_length and value_length, rounded up to a power of 2."""
    units: int
    chunk: int
    size: int
    """Numbers in the small sums of a chunk."""
    left: int
    right: int
    """Coordinates i and j of the features that a program of `square` holds."""
    sums: Launch
    square: Launch
    near: Launch
    far: Launch
    pull: Launch
    near_keys: Launch
    compute: Any
    precision: str


@lru_cache(maxsize=64)
def tiles(qk_length: int, value_length: int, dtype: torch.dtype) -> Tiles:
    """What fits registers and shared memory, and was fastest on an H200."""
    d, v = (max(16, triton.next_power_of_2(length)) for length in (qk_length, value_length))
    blocks = -(-qk_length // 16)
    half = dtype == torch.bfloat16
    wide = max(d, v) > 64
    taken = 128 // v  # coordinates of x that a step of `pull` takes
    if not half:  # float16 too: its range is too small for sums
        left, right = 4, 16 if d == 16 else 32
        sums, square, near, far, pull = (Launch(32, 0, 4, 2), Launch(32, 0, 4, 2), Launch(64, 32, 4, 2),
                                         Launch(64, 0, 4, 2), Launch(64, taken, 4, 2))  # fmt: skip
    elif wide:
        left, right = 8, 32
        sums, square, near, far, pull = (Launch(64, 0, 8, 1), Launch(64, 0, 8, 3), Launch(128, 64, 8, 2),
                                         Launch(128, 0, 8, 3), Launch(128, max(2, taken), 8, 2))  # fmt: skip
    else:
        left, right = 8, 16
        sums, square, near, far, pull = (Launch(32, 0, 4, 3), Launch(64, 0, 4, 3), Launch(128, 64, 4, 3),
                                         Launch(128, 0, 4, 3), Launch(128, taken, 4, 3))  # fmt: skip
    return Tiles(
        d=d,
        v=v,
        units=blocks * (blocks + 1),
        chunk=512,
        size=-(-(d * v + d * d + d + v + 1) // 16) * 16,
        left=left,
        right=right,
        sums=sums,
        square=square,
        near=near,
        far=far,
        pull=pull,
        compute=tl.bfloat16 if half else tl.float32,
        precision="tf32x3",
        near_keys=Launch(64, 64 if d > 32 else 32, 4, 3) if half and not wide else near,
    )


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


@dataclass(frozen=True)
class _Work:
    """One call: its sizes, and the tiles they are cut into."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    qk_length: int
    value_length: int
    causal: bool
    tiles: Tiles
    a: float
    b: float
    d: float
    bounds: Tensor | None
    """The first real key of each batch row and the one after the last, (2, B)."""

    @property
    def shift(self) -> int:
        """Where the first query stands."""
        return self.keys - self.queries if self.causal else 0

    @property
    def chunks(self) -> int:
        return -(-self.keys // self.tiles.chunk)

    @property
    def limits(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.bounds is None else (self.bounds[0], self.bounds[1])

    @property
    def kind(self) -> torch.dtype:
        """The dtype that matrix products take."""
        return torch.bfloat16 if self.tiles.compute == tl.bfloat16 else torch.float32

    @property
    def shared(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.groups

    @property
    def rest(self) -> float:
        """What is left of the kernel beside d·(q·k + b/2d)², over d."""
        rest = self.a - self.b * self.b / (4 * self.d)
        return rest / self.d if abs(rest) > 1e-12 else 0.0


def work_of(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, a: float, b: float, d: float, causal: bool
) -> _Work:
    """The sizes of a call."""
    batch, heads, queries, qk_length = q.shape
    groups, keys, value_length = k.shape[1], k.shape[2], v.shape[3]
    chosen = tiles(qk_length, value_length, q.dtype)
    return _Work(batch, heads, groups, queries, keys, qk_length, value_length, causal, chosen, a, b, d, bounds)


def _sums(work: _Work, x: Tensor, y: Tensor, backward: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor, Tensor]:
    """The small sums before each chunk (after it, in the backward pass), x with tokens last, and which chunks hold a
    NaN or infinity."""
    t, heads = work.tiles, x.shape[1]
    length, shift = x.shape[2], 0 if backward is None else work.shift
    shared = heads // work.groups
    slots = work.chunks if work.causal else -(-length // t.chunk)
    sums = x.new_empty(work.batch * heads, slots, t.size, dtype=torch.float32)
    bad = x.new_empty(work.batch * heads, slots, dtype=torch.int32)
    turned = x.new_empty(work.batch * heads, t.d, -(-length // 16) * 16, dtype=work.kind)
    grad, out, rest_out, den, e = (None,) * 5 if backward is None else backward
    low, high = work.limits
    sum_chunks_kernel[(slots, work.batch * heads)](
        x, y, grad, out, rest_out, den, e, turned, sums, bad, low, high,
        *_strides(x), *_strides(y), *((0, 0, 0) if grad is None else _strides(grad)),
        length, turned.shape[2], shift, heads, slots, t.size,
        D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, L=t.sums.rows, CHUNK=t.chunk,
        BOUNDED=low is not None and backward is None, BACKWARD=backward is not None, COMPUTE=t.compute,
        PRECISION=t.precision, num_warps=t.sums.warps, num_stages=t.sums.stages,
    )  # fmt: skip
    if not work.causal:
        return sums.view(work.batch, work.groups, shared * slots, t.size).sum(2), turned, bad
    before = sums.new_empty(work.batch * work.groups, slots, t.size)
    _prefix(sums, before, shared, reverse=backward is not None)
    return before, turned, bad


def _prefix(sums: Tensor, totals: Tensor, shared: int, reverse: bool, inclusive: bool = False) -> None:
    rows, slots = totals.shape[:2]
    size = totals[0, 0].numel()
    prefix_kernel[(triton.cdiv(size, 128), rows)](
        sums, totals, slots, size, SHARED=shared, REVERSE=reverse, INCLUSIVE=inclusive, STEPS=32, BLOCK=128, num_warps=4
    )


PROGRAMS = 200
"""Programs that sum along the whole length, below which chunks are summed side by side and then added up."""


def _square(work: _Work, x: Tensor, y: Tensor, turned: Tensor, reverse: bool) -> Tensor:
    """The state's square before each chunk but the first; reversed, after each but the last."""
    t, lines = work.tiles, work.batch * work.groups
    columns = triton.cdiv(work.qk_length, t.right)
    programs = columns * (columns + 1) // 2 * (t.right // t.left)
    low, high = work.limits
    length, shift = x.shape[2], work.shift if reverse else 0
    slots, segments, chunk, whole = 1, 1, t.chunk, work.causal and lines * programs >= PROGRAMS
    if whole:
        slots = work.chunks - 1
    elif work.causal:
        segments, shift = work.chunks - 1, shift - t.chunk if reverse else shift
    else:
        segments = max(1, min(triton.cdiv(length, 4 * t.square.rows), 264 // (lines * programs)))
        chunk = triton.cdiv(length, segments * t.square.rows) * t.square.rows
    if slots * segments == 0:
        return x.new_empty(0, dtype=work.kind)
    shape = (lines, slots - 1 + segments, t.units, UNIT, t.v)
    state = x.new_empty(shape, dtype=work.kind if whole else torch.float32)
    square_kernel[(programs, lines, segments)](
        x, y, turned, state, low, high, *_strides(x), *_strides(y), length, turned.shape[2], shift, work.groups, slots,
        t.units, D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, L=t.square.rows, CHUNK=chunk,
        SHARED=x.shape[1] // work.groups, LEFT=t.left, RIGHT=t.right, BOUNDED=low is not None and not reverse,
        REVERSE=reverse and whole, COMPUTE=t.compute, PRECISION=t.precision,
        num_warps=t.square.warps, num_stages=t.square.stages,
    )  # fmt: skip
    if whole:
        return state
    if not work.causal:
        return state.sum(1).to(work.kind)
    totals = x.new_empty(shape, dtype=work.kind)
    _prefix(state, totals, 1, reverse, inclusive=True)
    return totals


def _blocks(rows: int, shift: int, size: int) -> tuple[int, int]:
    """The first block of rows, by position, and how many there are."""
    first = shift // size
    return first, triton.cdiv(shift + rows, size) - first


def _near(work: _Work, q: Tensor, k: Tensor, v: Tensor, before: Tensor, bad: Tensor, num: Tensor, den: Tensor) -> None:
    t, low, high = work.tiles, *work.limits
    first, blocks = _blocks(work.queries, work.shift, t.near.rows)
    near_kernel[(blocks, work.batch * work.heads)](
        q, k, v, before, bad, num, den, low, high, *_strides(q), *_strides(k), *_strides(v),
        work.queries, work.shift, work.keys, work.heads, work.groups, work.chunks if work.causal else 1, t.size, first,
        work.a, work.b, work.d, work.b / (2 * work.d), work.rest,
        D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, M=t.near.rows, N=t.near.columns, CHUNK=t.chunk,
        CAUSAL=work.causal, BOUNDED=low is not None, COMPUTE=t.compute, PRECISION=t.precision,
        num_warps=t.near.warps, num_stages=t.near.stages,
    )  # fmt: skip


def _far(
    work: _Work, x: Tensor, state: Tensor, num: Tensor, den: Tensor, out: Tensor, rest_out: Tensor | None, reverse: bool
) -> None:
    t = work.tiles
    shift = 0 if reverse else work.shift
    first, blocks = _blocks(x.shape[2], shift, t.far.rows)
    far_kernel[(blocks, work.batch * x.shape[1])](
        x, state, num, den, out, rest_out, *_strides(x), x.shape[2], shift, x.shape[1] // work.groups, x.shape[1],
        work.chunks if work.causal else 1, first, work.d,
        D=work.qk_length, V=work.value_length, VB=t.v, UNITS=t.units, M=t.far.rows, CHUNK=t.chunk, CAUSAL=work.causal,
        STATED=state.numel() > 0, REVERSE=reverse, COMPUTE=t.compute, PRECISION=t.precision, STAGES=t.far.stages,
        num_warps=t.far.warps, num_stages=t.far.stages,
    )  # fmt: skip


def _pull(
    work: _Work, x: Tensor, y: Tensor, state: Tensor, acc: Tensor, live: Tensor, grad: Tensor, reverse: bool
) -> None:
    t = work.tiles
    shift = 0 if reverse else work.shift
    first, blocks = _blocks(x.shape[2], shift, t.pull.rows)
    pull_kernel[(blocks, work.batch * x.shape[1])](
        x, y, state, acc, live, grad, *_strides(x), *_strides(y),
        x.shape[2], shift, x.shape[1] // work.groups, x.shape[1], work.chunks if work.causal else 1, first, work.d,
        D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, UNITS=t.units, M=t.pull.rows, TAKEN=t.pull.columns,
        CHUNK=t.chunk, CAUSAL=work.causal, STATED=state.numel() > 0,
        REVERSE=reverse, COMPUTE=t.compute, PRECISION=t.precision, STAGES=t.pull.stages,
        num_warps=t.pull.warps, num_stages=t.pull.stages,
    )  # fmt: skip


def _near_queries(
    work: _Work, q: Tensor, w: Tensor, e: Tensor, k: Tensor, v: Tensor, before: Tensor, bad: Tensor, acc: Tensor
) -> None:
    t, low, high = work.tiles, *work.limits
    first, blocks = _blocks(work.queries, work.shift, t.near.rows)
    near_queries_kernel[(blocks, work.batch * work.heads)](
        q, w, e, k, v, before, bad, acc, low, high, *_strides(q), *_strides(w), *_strides(k), *_strides(v),
        work.queries, work.shift, work.keys, work.heads, work.groups, work.chunks if work.causal else 1, t.size, first,
        work.b, work.d,
        D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, M=t.near.rows, N=t.near.columns, CHUNK=t.chunk,
        CAUSAL=work.causal, BOUNDED=low is not None, COMPUTE=t.compute, PRECISION=t.precision,
        num_warps=t.near.warps, num_stages=t.near.stages,
    )  # fmt: skip


def _near_keys(
    work: _Work, k: Tensor, v: Tensor, q: Tensor, w: Tensor, e: Tensor, after: Tensor, k_acc: Tensor, v_acc: Tensor,
    live: Tensor,
) -> None:  # fmt: skip
    t, low, high = work.tiles, *work.limits
    near_keys_kernel[(triton.cdiv(work.keys, t.near_keys.rows), work.batch * work.groups)](
        k, v, q, w, e, after, k_acc, v_acc, live, low, high,
        *_strides(k), *_strides(v), *_strides(q), *_strides(w),
        work.keys, work.queries, work.shift, work.groups, work.chunks if work.causal else 1, t.size,
        work.a, work.b, work.d, work.rest,
        D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, M=t.near_keys.rows, N=t.near_keys.columns, CHUNK=t.chunk,
        SHARED=work.shared, CAUSAL=work.causal, BOUNDED=low is not None, COMPUTE=t.compute, PRECISION=t.precision,
        num_warps=t.near_keys.warps, num_stages=t.near_keys.stages,
    )  # fmt: skip


class _Beside:
    """Kernels launched within run beside those launched since it was made: `square` leaves parts of the chip idle.

    What they use is allocated outside, and the stream goes on when they are done, so no memory is freed too soon.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on = tensor.is_cuda
        if self.on:
            self.stream = torch.cuda.current_stream(tensor.device)
            self.other = _other_stream(self.stream)
            self.other.wait_stream(self.stream)

    def __enter__(self) -> None:
        if self.on:
            self.context = torch.cuda.stream(self.other)
            self.context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.on:
            self.context.__exit__(*error)
            self.stream.wait_stream(self.other)


@lru_cache(maxsize=64)
def _other_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream.device)


def forward(work: _Work, q: Tensor, k: Tensor, v: Tensor, recorded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, H, T, V), the digits that its rounding took (if a backward pass is to come), and its denominators
    (B, H, T)."""
    t = work.tiles
    num = q.new_empty(work.batch, work.heads, work.queries, t.v, dtype=torch.float32)
    den = q.new_empty(work.batch, work.heads, work.queries, dtype=torch.float32)
    out = q.new_empty(work.batch, work.heads, work.queries, work.value_length)
    rest_out = torch.empty_like(out) if recorded else None
    before, turned, bad = _sums(work, k, v, None)
    beside = _Beside(q)
    state = _square(work, k, v, turned, reverse=False)
    with beside:
        _near(work, q, k, v, before, bad, num, den)
    _far(work, q, state, num, den, out, rest_out, reverse=False)
    return out, out.new_empty(0) if rest_out is None else rest_out, den


def backward(
    work: _Work, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest_out: Tensor, den: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. What the forward pass summed is summed again: it is larger than the inputs."""
    t = work.tiles
    # Queries before the first key are in no chunk's sums, and nothing is written for them.
    new = torch.zeros_like if work.shift < 0 else torch.empty_like
    w, e = new(out, dtype=work.kind), new(den)
    before, turned, bad = _sums(work, k, v, None)
    after, turned_queries, _ = _sums(work, q, w, (grad, out, rest_out, den, e))
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (q, k, v))
    q_acc = q.new_empty(*q.shape[:3], t.d, dtype=torch.float32)
    beside = _Beside(q)
    state = _square(work, k, v, turned, reverse=False)
    with beside:
        _near_queries(work, q, w, e, k, v, before, bad, q_acc)
    _pull(work, q, w, state, q_acc, e, q_grad, reverse=False)
    del state, q_acc, before, turned
    k_acc = k.new_empty(*k.shape[:3], t.d, dtype=torch.float32)
    v_acc = k.new_empty(*k.shape[:3], t.v, dtype=torch.float32)
    live = k.new_empty(k.shape[:3], dtype=torch.float32)
    beside = _Beside(k)
    state = _square(work, q, w, turned_queries, reverse=True)
    with beside:
        _near_keys(work, k, v, q, w, e, after, k_acc, v_acc, live)
    _pull(work, k, v, state, k_acc, live, k_grad, reverse=True)
    _far(work, k, state, v_acc, live, v_grad, None, reverse=True)
    return q_grad, k_grad, v_grad
