"""Softmax attention without gradients on a CPU, JIT-compiled: keys and values are read once, as a decode step needs.

PyTorch reads the KV cache once for every query head, or through matrix products made for many rows. Here all query
heads of a key/value head, and all new tokens, share one pass (see decode_code.py), on PyTorch's threads. Causality,
padding and a sliding window leave an interval of keys to each query. Keys that no query sees are not read, and a key
reaches only the queries that see it, so no guard against NaN is needed.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from math import e, gcd, log, log2
from struct import Struct, pack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard.core import cpu
from regard.core.calls.call import Call
from regard.core.calls.choice import Path, never
from regard.core.eager import direct, recorded, symbolic, transformed
from regard.core.masks import FAR, Span
from regard.core.paths import probe, sdpa

LONGEST = 256
"""The largest head dimension."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of queries."""
MOST_IN_HALF = 64
"""Up to this many queries in half precision, reading the keys takes longer than the arithmetic, and matrix units do not
help."""
LEAST_SHARED = 1 << 19
"""From this many multiplications on, a second thread is worth its start."""
_LOG2E = log2(e)
_NO_SCALES: tuple[int, ...] = (0,) * 6
_ARGUMENTS = Struct("32qd2q")
"""The arguments of the program (decode_code.py), with one span."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if symbolic(call.queries, call.keys):
        return "a trace with a dynamic length needs one form for all lengths"
    if (reason := sdpa.unfit(call)) is not None:
        return reason
    if call.bias is not None:
        return "a bias needs the score form"
    if not call.q.is_cpu:
        return "made for the CPU"
    if call.structure.rest is not None or (call.structure.paddings and call.structure.rows is None):
        return "the keys that the mask shows are not an interval"
    if (reason := cpu.missing()) is not None:
        return reason
    if call.q.dtype not in DTYPES:
        return "made for float32, bfloat16 and float16"
    if cpu.MATRIX_UNITS and call.q.dtype != torch.float32 and call.queries > MOST_IN_HALF:
        return f"more than {MOST_IN_HALF} queries in half precision are faster in this CPU's matrix units"
    if call.qk_length % cpu.LANES or call.value_length % cpu.LANES or max(call.qk_length, call.value_length) > LONGEST:
        return f"made for head dimensions that are multiples of {cpu.LANES}, up to {LONGEST}"
    return _derived(call) or probe.off(call.q.dtype, call.scales is not None)


def missing() -> str | None:
    """Why JIT-compiled code for float32 cannot be used on this machine; None if it can.

    >>> from regard.core.paths import decode
    >>> reason = decode.missing()
    >>> reason is None or isinstance(reason, str)
    True
    """
    return cpu.missing() or probe.off(torch.float32)


def _derived(call: Call) -> str | None:
    """Why PyTorch would have to see the operators inside (gradients, transforms, export); None if it need not."""
    if torch.compiler.is_exporting():
        return "an exported program may contain PyTorch's operators only"
    if torch.compiler.is_compiling():
        return "a trace with gradients enabled may have to differentiate it" if torch.is_grad_enabled() else None
    if recorded(call.q, call.k, call.v):
        return "gradients are recorded"
    return "a torch.func transform or forward-mode differentiation needs plain operators" if transformed() else None


def run(call: Call) -> Tensor:
    """one pass over keys and values, JIT-compiled for this CPU."""
    structure, scale = call.structure, sdpa.scale(call)
    k_scales, v_scales = call.scales or (None, None)
    if direct(call.q, call.k, call.v):
        return _attention(
            call.q,
            call.k,
            call.v,
            k_scales,
            v_scales,
            scale,
            structure.rows,
            structure.before,
            structure.after,
            call.q.dtype,
        )
    spans = None if structure.rows is None else torch.tensor(structure.rows, device=call.q.device)
    return torch.ops.regard.decode(
        call.q, call.k, call.v, scale, spans, structure.before, structure.after, k_scales, v_scales
    )


PATH = Path("decode", cannot, run, never, reads_int8=True)

_LIBRARY = torch.library.Library("regard", "DEF")
_SCALES = "Tensor? k_scales=None, Tensor? v_scales=None"
_LIBRARY.define(
    f"decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? spans, int? before, int? after, {_SCALES}) -> Tensor"
)
_LIBRARY.define(
    f"decode_part(Tensor q, Tensor k, Tensor v, float scale, int? after, {_SCALES}, Tensor? spans=None, "
    "int? before=None, int? offset=None) -> (Tensor, Tensor)"
)


def compute(
    q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None, before: int | None, after: int | None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of queries (B, H, T, K), the last of which is at the last key: each sees the keys from `before`
    positions before it to `after` positions after it, within [spans[b, 0], spans[b, 1]) in batch row b. The output is 0
    if it sees none.

    int8 keys and values have scales, (B, G, S, 1) in float32: a token's numbers are k[…, s, :] · k_scales[…, s, :]."""
    _check(q, k, v)
    return _attention(q, k, v, k_scales, v_scales, scale, _spans(len(q), k.shape[2], spans), before, after, q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for sizes that would make the code read beyond its tensors. Attention checks its own calls, and
    bypasses the operators where every microsecond counts."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or 0 in tensor.shape or not tensor.is_cpu:
            raise ValueError(
                f"{name}: expected a CPU tensor of 4 dimensions, none of them 0, got {tuple(tensor.shape)} on "
                f"{tensor.device}"
            )
    if q.dtype not in DTYPES:
        raise ValueError(f"q: expected float32, bfloat16 or float16, got {q.dtype}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k: expected the batch and head dimension of q {tuple(q.shape)}, and a number of heads that divides its, "
            f"got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected the batch, heads and length of k, {tuple(k.shape[:3])}, got {tuple(v.shape)}")
    if max(q.shape[3], v.shape[3]) > LONGEST:
        raise ValueError(f"v: expected head dimensions of at most {LONGEST}, got {q.shape[3], v.shape[3]}")


def compute_part(
    q: Tensor, k: Tensor, v: Tensor, scale: float, after: int | None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, spans: Tensor | None = None,
    before: int | None = None, offset: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as `compute` over a part of the keys, and its log-sum-exp (B, H, T), both in float32: the first query is
    at position `offset`, counted from the part's first key (None: the last query is at the last key)."""
    _check(q, k, v)
    rows = _spans(len(q), k.shape[2], spans)
    return _part(q, k, v, k_scales, v_scales, scale, rows, before, after, offset)


def _part(
    q: Tensor, k: Tensor, v: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, scale: float,
    spans: Sequence[Span] | None, before: int | None, after: int | None, offset: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tops = torch.empty(2, *q.shape[:3], dtype=torch.float32, device="cpu")
    out = _attention(q, k, v, k_scales, v_scales, scale, spans, before, after, torch.float32, tops, offset)
    return out, (tops[1].log2() + tops[0]) * log(2)


def part(
    call: Call, spans: Sequence[Span] | None, before: int | None, after: int | None, offset: int
) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys and its log-sum-exp, both in float32, with the limits of `compute_part`."""
    k_scales, v_scales = call.scales or (None, None)
    if direct(call.q, call.k, call.v):
        return _part(call.q, call.k, call.v, k_scales, v_scales, sdpa.scale(call), spans, before, after, offset)
    rows = None if spans is None else torch.tensor(spans)
    return torch.ops.regard.decode_part(
        call.q, call.k, call.v, sdpa.scale(call), after, k_scales, v_scales, rows, before, offset
    )


def _attention(
    q: Tensor, k: Tensor, v: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, scale: float,
    spans: Sequence[Span] | None, before: int | None, after: int | None, result: torch.dtype,
    tops: Tensor | None = None, offset: int | None = None,
) -> Tensor:  # fmt: skip
    """The output, (B, H, T, V), in the dtype `result`. `tops`, (2, B, H, T), receives each query's largest score, in
    base 2, and the sum of weights relative to it; `offset` is the position of the first query. Every line here counts:
    a whole decode step takes a few microseconds."""
    batch, heads, queries, qk_length = q.shape
    _, groups, keys, value_length = v.shape
    kind, stored = q.dtype, k.dtype
    rows = heads // groups * queries
    scales = _NO_SCALES
    if stored is not kind or v.dtype is not kind:
        k_scales, v_scales = _checked(q, k, v, k_scales, v_scales)
        scales = k_scales.data_ptr(), v_scales.data_ptr(), *k_scales.stride()[:2], *v_scales.stride()[:2]
    step, chunks, chunk, block, most = _program(qk_length, value_length, rows, kind, stored, result, cpu.LANES)
    units = tasks = batch * groups * chunks
    parts = threads = 1
    reach = keys if before is None else min(keys, before + queries)
    if batch * heads * queries * reach * (qk_length + value_length) >= LEAST_SHARED:
        threads = torch.get_num_threads()
        # Enough parts to give every thread an equal share, within the memory for their sums.
        parts = max(1, min(threads // gcd(units, threads), 8 * threads // units, reach // block))
        tasks = units * parts
    q = q.contiguous()
    k_batch, k_head, k_token, k_number = k.stride()
    v_batch, v_head, v_token, v_number = v.stride()
    if k_number != 1 or v_number != 1:
        k, v = k.contiguous(), v.contiguous()
        (k_batch, k_head, k_token, _), (v_batch, v_head, v_token, _) = k.stride(), v.stride()
    if qk_length == value_length and result is kind:
        out = torch.empty_like(q)
    else:
        out = torch.empty(batch, heads, queries, value_length, dtype=result, device="cpu")
    size = 8 * units + 4 * tasks * chunk * (value_length + 2)
    room = torch.empty(size, dtype=torch.uint8, device="cpu") if size > most else None
    arguments = (
        0, tasks, parts, chunks, chunk, groups, rows, queries, keys - queries if offset is None else offset,
        FAR if before is None else before, FAR if after is None else after, 0 if spans is None else 2,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        0 if tops is None else tops.data_ptr(), 0 if room is None else room.data_ptr(),
        k_batch, k_head, k_token, v_batch, v_head, v_token, *scales,
        threads, 0 if threads == 1 else cpu.openmp(), scale * _LOG2E,
    )  # fmt: skip
    if spans is None:
        step(_ARGUMENTS.pack(*arguments, 0, keys))
    else:
        step(_ARGUMENTS.pack(*arguments, *spans[0]) + pack(f"{2 * len(spans) - 2}q", *chain.from_iterable(spans[1:])))
    return out


def _checked(
    q: Tensor, k: Tensor, v: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scales of int8 keys and values, contiguous over the tokens of a head."""
    if k_scales is None or v_scales is None or k.dtype is not torch.int8 or v.dtype is not torch.int8:
        raise ValueError(f"decode: expected one dtype, or int8 with scales, got {q.dtype}, {k.dtype} and {v.dtype}")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales.shape != (*k.shape[:3], 1) or scales.dtype is not torch.float32:
            raise ValueError(
                f"{name}: expected torch.float32 {(*k.shape[:3], 1)}, got {scales.dtype} {tuple(scales.shape)}"
            )
    return _dense(k_scales), _dense(v_scales)


def _dense(scales: Tensor) -> Tensor:
    return scales if scales.stride(2) == 1 else scales.contiguous()


@cache
def _program(
    qk_length: int,
    value_length: int,
    rows: int,
    kind: torch.dtype,
    stored: torch.dtype,
    result: torch.dtype,
    lanes: int,
) -> tuple[Callable[[bytes], None], int, int, int, int]:
    """The program for the query rows of a key/value head; the number of chunks they are split into, the rows of a
    chunk, the tokens read at a time, and the bytes of sums that fit on the stack."""
    if (reason := cpu.missing()) is not None:
        raise ValueError(f"decode: expected a machine that can run it, got one that cannot: {reason}")
    if qk_length % lanes or value_length % lanes:
        raise ValueError(
            f"decode: expected head dimensions that are multiples of {lanes}, got {qk_length, value_length}"
        )
    # llvmlite is imported only when a pass needs it.
    from regard.core.paths.compiler import compiled
    from regard.core.paths.decode_code import CHUNK, ROOM, block, source, tiles

    tile, width = tiles(rows, lanes)
    chunk = -(-rows // (-(-rows // CHUNK) * tile)) * tile
    names = [str(dtype).removeprefix("torch.") for dtype in (kind, stored, result)]
    code = compiled(source, qk_length, value_length, tile, *names, width)
    size = block(qk_length, value_length, tile, names[1], width)
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(code), -(-rows // chunk), chunk, size, ROOM


def _spans(batch: int, keys: int, spans: Tensor | None) -> list[Span] | None:
    """The keys that each batch row may see; None: all."""
    if spans is None:
        return None
    if spans.shape != (batch, 2) or spans.dtype.is_floating_point or spans.dtype == torch.bool:
        raise ValueError(
            f"spans: expected two whole numbers for each of {batch} batch rows, got {spans.dtype} {tuple(spans.shape)}"
        )
    return [(max(low, 0), min(high, keys)) for low, high in spans.tolist()]


def _shape(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _part_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)


def _underived(operator: Any) -> Any:
    """Raise an error, rather than give no gradient, if PyTorch differentiates the operator anyway."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        tangents = (forward_ad.unpack_dual(t).tangent for t in (q, k, v)) if forward_ad._current_level >= 0 else ()
        if recorded(q, k, v) or any(tangent is not None for tangent in tangents):
            raise NotImplementedError(f"{operator.name()} has no derivative; compute with path='reference'")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, *rest)

    return run


def _flops(
    q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None, before: int | None, after: int | None,
    *_: Any, offset: int | None = None, **__: Any,
) -> int:  # fmt: skip
    """FLOPs of the visible pairs."""
    batch, heads, queries, qk_length = q.shape
    keys, pairs = k.shape[2], 0
    start = keys - queries if offset is None else offset
    for low, high in _spans(batch, keys, spans) or [(0, keys)] * batch:
        for position in range(start, start + queries):
            first = low if before is None else max(low, position - before)
            pairs += max(0, (high if after is None else min(high, position + after + 1)) - first)
    return 2 * heads * pairs * (qk_length + v.shape[3])


def _part_flops(
    q: Tensor, k: Tensor, v: Tensor, scale: float, after: int | None, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None, spans: Tensor | None = None, before: int | None = None, offset: int | None = None,
    **_: Any,
) -> int:  # fmt: skip
    return _flops(q, k, v, scale, spans, before, after, offset=offset)


for _name, _run, _fake, _count in (
    ("decode", compute, _shape, _flops),
    ("decode_part", compute_part, _part_shapes, _part_flops),
):
    _LIBRARY.impl(_name, _run, "CPU")
    _LIBRARY.impl(_name, _underived(getattr(torch.ops.regard, _name).default), "Autograd")
    torch.library.register_fake(f"regard::{_name}", _fake)
    register_flop_formula(getattr(torch.ops.regard, _name), get_raw=True)(_count)
