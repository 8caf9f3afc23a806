"""Attention with a second-order polynomial kernel on a GPU: what is launched, forward and backward.

The kernels are in quadratic.py and quadratic_gradients.py, the sizes of calls in square_sizes.py.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.core.kernels.common import prefix_kernel
from regard.core.kernels.launch import ceil_divide, launch, limits, strides
from regard.core.kernels.quadratic import (
    alone_kernel,
    far_kernel,
    near_kernel,
    shift_kernel,
    square_kernel,
    sum_chunks_kernel,
)
from regard.core.kernels.quadratic_gradients import near_keys_kernel, near_queries_kernel, pull_kernel
from regard.core.kernels.square_sizes import UNIT, Sums, Work


def _sums(
    work: Work,
    x: Tensor,
    y: Tensor,
    bounds: Tensor | None,
    backward: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The small sums of each chunk, x with tokens last, and which chunks hold a NaN or infinity."""
    t, heads = work.tiles, x.shape[1]
    length, shift = x.shape[2], 0 if backward is None else work.shift
    slots = work.chunks if work.causal else -(-length // t.chunk)
    sums = x.new_empty(work.batch * heads, slots, t.size, dtype=torch.float32)
    bad = x.new_empty(work.batch * heads, slots, dtype=torch.int32)
    turned = x.new_empty(work.batch * heads, t.d, -(-length // 16) * 16, dtype=work.kind)
    grad, out, rest_out, den, e = (None,) * 5 if backward is None else backward
    low, high = (None, None) if bounds is None or backward is not None else (bounds[0], bounds[1])
    launch(
        work.launches, ("sums", backward is None, strides(grad)), sum_chunks_kernel, (slots, work.batch * heads, 1),
        (x, y, grad, out, rest_out, den, e, turned, sums, bad, low, high),
        lambda: ((*strides(x), *strides(y), *strides(grad), length, turned.shape[2], shift, heads, slots, t.size), dict(
            D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, L=t.sums.rows, CHUNK=t.chunk,
            BOUNDED=low is not None, BACKWARD=backward is not None, COMPUTE=t.compute,
            PRECISION=t.precision, num_warps=t.sums.warps, num_stages=t.sums.stages,
        )),
    )  # fmt: skip
    return sums, turned, bad


def _before(
    work: Work, sums: Tensor, reverse: bool = False, initial: Sums | None = None, final: Sums | None = None
) -> Tensor:
    """The small sums before each chunk; reversed, after it. Without causality, those of all chunks."""
    lines, slots, size = sums.shape
    shared = lines // (work.batch * work.groups)
    if not work.causal:
        return sums.view(work.batch, work.groups, shared * slots, size).sum(2)
    before = sums.new_empty(work.batch * work.groups, slots, size)
    begins, ends = (None if pair is None else pair[1] for pair in (initial, final))
    _prefix(work, sums, before, shared, reverse, False, begins, ends, steps=32)
    return before


def _prefix(
    work: Work, sums: Tensor, totals: Tensor, shared: int, reverse: bool, inclusive: bool,
    initial: Tensor | None, final: Tensor | None, steps: int,
) -> None:  # fmt: skip
    rows, slots = totals.shape[:2]
    size = totals.stride(1)
    launch(
        work.launches, ("prefix", slots, size, shared, reverse, inclusive),
        prefix_kernel, (ceil_divide(size, 32), rows, 1),
        (sums, totals, initial, final), lambda: ((slots, size), dict(
            SHARED=shared, REVERSE=reverse, INCLUSIVE=inclusive, STEPS=steps, BLOCK=32, num_warps=1,
        )),
    )  # fmt: skip


PROGRAMS = 200
"""Programs that sum along the whole length, below which more of them sum parts of it side by side."""
PARTS = 1056
"""How many they then are."""


def _square(
    work: Work,
    x: Tensor,
    y: Tensor,
    turned: Tensor,
    bounds: Tensor | None,
    reverse: bool = False,
    initial: Sums | None = None,
    final: Sums | None = None,
) -> Tensor:
    """The state's square before each chunk but the first; reversed, after each but the last.

    With sums to begin from, before the first too.
    """
    t, lines = work.tiles, work.batch * work.groups
    columns = ceil_divide(work.qk_length, t.right)
    programs = columns * (columns + 1) // 2 * (t.right // t.left)
    low, high = (None, None) if bounds is None or reverse else (bounds[0], bounds[1])
    begins, ends = (None if pair is None else pair[0] for pair in (initial, final))
    if not work.causal:
        return _whole_square(work, x, y, turned, low, high, programs, reverse).to(work.kind)
    kept = work.chunks - 1
    total, room = kept + (ends is not None), kept + (begins is not None)
    if total == 0:
        return x.new_empty(0, dtype=work.kind) if begins is None else begins.to(work.kind)
    span = total if lines * programs >= PROGRAMS else ceil_divide(total, ceil_divide(PARTS, lines * programs))
    segments, place = ceil_divide(total, span), ("square", room, total, reverse)
    state = x.new_empty(lines, room, t.units, UNIT, t.v, dtype=work.kind)
    sums = None if segments == 1 else x.new_empty(lines, segments, t.units * UNIT * t.v, dtype=torch.float32)
    if sums is None:
        _walk(
            work, place, x, y, turned, state, room, begins, ends, low, high, (programs, lines, 1), total, span, t.chunk,
            reverse, ends is not None,
        )  # fmt: skip
        return state
    if begins is not None:
        state[:, 0] = begins.view(lines, t.units, UNIT, t.v)
    stored = state if begins is None else state[:, 1:]
    _walk(
        work, place, x, y, turned, stored, room, None, sums, low, high, (programs, lines, segments), total, span,
        t.chunk, reverse, ends is not None,
    )  # fmt: skip
    before = torch.empty_like(sums)
    _prefix(work, sums, before, 1, False, False, begins, ends, steps=16)
    size = sums.shape[2]
    launch(
        work.launches, ("shift", room, total, reverse), shift_kernel, (ceil_divide(size, 1024), segments, lines),
        (stored, before), lambda: ((kept, span, room, size), dict(
            REVERSE=reverse, BLOCK=1024, num_warps=4,
        )),
    )  # fmt: skip
    return state


def _whole_square(
    work: Work, x: Tensor, y: Tensor, turned: Tensor, low: Tensor | None, high: Tensor | None, programs: int,
    queries: bool,
) -> Tensor:  # fmt: skip
    """The square of all tokens: keys, or `queries`."""
    t, lines, length = work.tiles, work.batch * work.groups, x.shape[2]
    segments = max(1, min(ceil_divide(length, 4 * t.square.rows), 264 // (lines * programs)))
    chunk = ceil_divide(length, segments * t.square.rows) * t.square.rows
    sums = x.new_empty(lines, segments, t.units, UNIT, t.v, dtype=torch.float32)
    grid = programs, lines, segments
    place = "whole square", queries
    _walk(work, place, x, y, turned, sums, segments, None, None, low, high, grid, segments, 1, chunk, False, False)
    return sums.sum(1)


def _walk(
    work: Work, place: Any, x: Tensor, y: Tensor, turned: Tensor, state: Tensor, room: int, initial: Tensor | None,
    final: Tensor | None, low: Tensor | None, high: Tensor | None, grid: tuple[int, int, int], total: int, span: int,
    chunk: int, reverse: bool, last: bool,
) -> None:  # fmt: skip
    t = work.tiles
    launch(
        work.launches, place, square_kernel, grid,
        (x, y, turned, state, initial, final, low, high),
        lambda: ((*strides(x), *strides(y), x.shape[2], turned.shape[2], work.shift if reverse else 0, work.groups,
                 total, span, room, t.units), dict(
            D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, L=t.square.rows, CHUNK=chunk,
            SHARED=x.shape[1] // work.groups, LEFT=t.left, RIGHT=t.right, BOUNDED=low is not None,
            REVERSE=reverse, LAST=last, WHOLE=not (work.shift if reverse else 0) and x.shape[2] % chunk == 0,
            COMPUTE=t.compute, PRECISION=t.precision,
            num_warps=t.square.warps, num_stages=t.square.stages,
        )),
    )  # fmt: skip


def _blocks(rows: int, shift: int, size: int) -> tuple[int, int]:
    """The first block of rows, by position, and how many there are."""
    first = shift // size
    return first, ceil_divide(shift + rows, size) - first


def _near(
    work: Work, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, before: Tensor, bad: Tensor, num: Tensor,
    den: Tensor, carried: bool,
) -> None:  # fmt: skip
    t = work.tiles
    low, high = limits(bounds)
    first, blocks = _blocks(work.queries, work.shift, t.near.rows)
    launch(
        work.launches, ("near", carried), near_kernel, (blocks, work.batch * work.heads, 1),
        (q, k, v, before, bad, num, den, low, high),
        lambda: ((*strides(q), *strides(k), *strides(v), work.queries, work.shift, work.keys, work.heads, work.groups,
                 work.chunks if work.causal else 1, t.size, first,
                 work.a, work.b, work.d, work.b / (2 * work.d), work.rest or None), dict(
            D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, M=t.near.rows, N=t.near.columns, CHUNK=t.chunk,
            CAUSAL=work.causal, CARRIED=carried, BOUNDED=low is not None, COMPUTE=t.compute, PRECISION=t.precision,
            num_warps=t.near.warps, num_stages=t.near.stages,
        )),
    )  # fmt: skip


def _alone(
    work: Work, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, out: Tensor, rest_out: Tensor | None,
    den: Tensor,
) -> None:  # fmt: skip
    t = work.tiles
    low, high = limits(bounds)
    first, blocks = _blocks(work.queries, work.shift, t.near.rows)
    launch(
        work.launches, "alone", alone_kernel, (blocks, work.batch * work.heads, 1),
        (q, k, v, out, rest_out, den, low, high),
        lambda: ((*strides(q), *strides(k), *strides(v), work.queries, work.shift, work.keys, work.heads, work.groups,
                 first, work.b / (2 * work.d), work.d, work.rest or None), dict(
            D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, M=t.near.rows, N=t.near.columns,
            BOUNDED=low is not None, COMPUTE=t.compute, PRECISION=t.precision,
            num_warps=t.near.warps, num_stages=t.near.stages,
        )),
    )  # fmt: skip


def _far(
    work: Work, x: Tensor, state: Tensor, num: Tensor, den: Tensor, out: Tensor, rest_out: Tensor | None,
    reverse: bool = False, carried: bool = False,
) -> None:  # fmt: skip
    t = work.tiles
    shift = 0 if reverse else work.shift
    first, blocks = _blocks(x.shape[2], shift, t.far.rows)
    launch(
        work.launches, ("far", reverse, carried), far_kernel, (blocks, work.batch * x.shape[1], 1),
        (x, state, num, den, out, rest_out),
        lambda: ((*strides(x), x.shape[2], shift, x.shape[1] // work.groups, x.shape[1],
                 work.chunks if work.causal else 1, first, work.d), dict(
            D=work.qk_length, V=work.value_length, VB=t.v, UNITS=t.units, M=t.far.rows, CHUNK=t.chunk,
            CAUSAL=work.causal, CARRIED=carried, STATED=state.numel() > 0, REVERSE=reverse,
            COMPUTE=t.compute, PRECISION=t.precision,
            STAGES=t.far.stages, num_warps=t.far.warps, num_stages=t.far.stages,
        )),
    )  # fmt: skip


def _pull(
    work: Work, x: Tensor, y: Tensor, state: Tensor, acc: Tensor, live: Tensor, grad: Tensor, reverse: bool
) -> None:
    t = work.tiles
    shift = 0 if reverse else work.shift
    first, blocks = _blocks(x.shape[2], shift, t.pull.rows)
    launch(
        work.launches, ("pull", reverse), pull_kernel, (blocks, work.batch * x.shape[1], 1),
        (x, y, state, acc, live, grad),
        lambda: ((*strides(x), *strides(y), x.shape[2], shift, x.shape[1] // work.groups, x.shape[1],
                 work.chunks if work.causal else 1, first, work.d), dict(
            D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, UNITS=t.units, M=t.pull.rows, TAKEN=t.pull.columns,
            CHUNK=t.chunk, CAUSAL=work.causal, STATED=state.numel() > 0,
            REVERSE=reverse, COMPUTE=t.compute, PRECISION=t.precision, STAGES=t.pull.stages,
            num_warps=t.pull.warps, num_stages=t.pull.stages,
        )),
    )  # fmt: skip


def _near_queries(
    work: Work, q: Tensor, w: Tensor, e: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, before: Tensor,
    bad: Tensor, acc: Tensor,
) -> None:  # fmt: skip
    t = work.tiles
    low, high = limits(bounds)
    first, blocks = _blocks(work.queries, work.shift, t.near.rows)
    launch(
        work.launches, "near queries", near_queries_kernel, (blocks, work.batch * work.heads, 1),
        (q, w, e, k, v, before, bad, acc, low, high),
        lambda: ((*strides(q), *strides(w), *strides(k), *strides(v), work.queries, work.shift, work.keys, work.heads,
                 work.groups, work.chunks if work.causal else 1, t.size, first, work.b, work.d), dict(
            D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, M=t.near.rows, N=t.near.columns, CHUNK=t.chunk,
            CAUSAL=work.causal, BOUNDED=low is not None, COMPUTE=t.compute, PRECISION=t.precision,
            num_warps=t.near.warps, num_stages=t.near.stages,
        )),
    )  # fmt: skip


def _near_keys(
    work: Work, k: Tensor, v: Tensor, q: Tensor, w: Tensor, e: Tensor, bounds: Tensor | None, after: Tensor,
    k_acc: Tensor, v_acc: Tensor, live: Tensor,
) -> None:  # fmt: skip
    t = work.tiles
    low, high = limits(bounds)
    launch(
        work.launches, "near keys", near_keys_kernel,
        (ceil_divide(work.keys, t.near_keys.rows), work.batch * work.groups, 1),
        (k, v, q, w, e, after, k_acc, v_acc, live, low, high),
        lambda: ((*strides(k), *strides(v), *strides(q), *strides(w), work.keys, work.queries, work.shift, work.groups,
                 work.chunks if work.causal else 1, t.size, work.a, work.b, work.d, work.rest), dict(
            D=work.qk_length, V=work.value_length, DB=t.d, VB=t.v, M=t.near_keys.rows, N=t.near_keys.columns,
            CHUNK=t.chunk, SHARED=work.shared, CAUSAL=work.causal, BOUNDED=low is not None,
            COMPUTE=t.compute, PRECISION=t.precision,
            num_warps=t.near_keys.warps, num_stages=t.near_keys.stages,
        )),
    )  # fmt: skip


BESIDE = 1 << 17
"""Rows of queries from which it takes longer to wait for a kernel than to launch another one beside it."""


class _Beside:
    """Kernels launched within run beside those launched since it was made: `square` leaves parts of the chip idle.

    What both use is allocated outside, and the stream goes on when they are done, so no memory is freed too soon.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on = tensor.is_cuda and tensor.shape[:3].numel() >= BESIDE
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


def forward(
    work: Work,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    recorded: bool = False,
    initial: Sums | None = None,
    final: Sums | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, H, T, V), the digits that its rounding took (if a backward pass is to come), and its denominators
    (B, H, T).

    Keys come after those in the sums `initial`; `final` is filled with the sums of all.
    """
    t = work.tiles
    carried = initial is not None
    den = q.new_empty(work.batch, work.heads, work.queries, dtype=torch.float32)
    out = q.new_empty(work.batch, work.heads, work.queries, work.value_length)
    rest_out = torch.empty_like(out) if recorded else None
    if work.causal and work.chunks == 1 and initial is final is None:
        _alone(work, q, k, v, bounds, out, rest_out, den)
        return out, out.new_empty(0) if rest_out is None else rest_out, den
    num = q.new_empty(work.batch, work.heads, work.queries, t.v, dtype=torch.float32)
    sums, turned, bad = _sums(work, k, v, bounds)
    beside = _Beside(q)
    state = _square(work, k, v, turned, bounds, False, initial, final)
    with beside:
        before = _before(work, sums, False, initial, final)
        _near(work, q, k, v, bounds, before, bad, num, den, carried)
    _far(work, q, state, num, den, out, rest_out, False, carried)
    return out, out.new_empty(0) if rest_out is None else rest_out, den


def backward(
    work: Work,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    out: Tensor,
    rest_out: Tensor,
    den: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. What the forward pass summed is summed again: it is larger than the inputs."""
    t = work.tiles
    # Queries before the first key are in no chunk's sums, and nothing is written for them.
    new = torch.zeros_like if work.shift < 0 else torch.empty_like
    w, e = new(out, dtype=work.kind), new(den)
    sums, turned, bad = _sums(work, k, v, bounds)
    query_sums, turned_queries, _ = _sums(work, q, w, bounds, (grad, out, rest_out, den, e))
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (q, k, v))
    q_acc = q.new_empty(*q.shape[:3], t.d, dtype=torch.float32)
    beside = _Beside(q)
    state = _square(work, k, v, turned, bounds)
    with beside:
        before = _before(work, sums)
        _near_queries(work, q, w, e, k, v, bounds, before, bad, q_acc)
    _pull(work, q, w, state, q_acc, e, q_grad, reverse=False)
    del state, q_acc, sums, before, turned
    k_acc = k.new_empty(*k.shape[:3], t.d, dtype=torch.float32)
    v_acc = k.new_empty(*k.shape[:3], t.v, dtype=torch.float32)
    live = k.new_empty(k.shape[:3], dtype=torch.float32)
    beside = _Beside(k)
    state = _square(work, q, w, turned_queries, bounds, reverse=True)
    with beside:
        after = _before(work, query_sums, reverse=True)
        _near_keys(work, k, v, q, w, e, bounds, after, k_acc, v_acc, live)
    _pull(work, k, v, state, k_acc, live, k_grad, reverse=True)
    _far(work, k, state, v_acc, live, v_grad, None, reverse=True)
    return q_grad, k_grad, v_grad


def fold(work: Work, k: Tensor, v: Tensor, bounds: Tensor | None, initial: Sums, final: Sums) -> None:
    """Fill `final` with the sums `initial` and those of more keys."""
    sums, turned, _ = _sums(work, k, v, bounds)
    _before(work, sums, False, initial, final)
    _square(work, k, v, turned, bounds, False, initial, final)
