"""A few queries over many keys on a CPU, in machine code of our own: keys and values are read once.

PyTorch reads a decode step's cache once a query head, or through products made for many rows. Here all query heads of a
key/value head, and all new tokens, share one pass (see decode_code.py), on PyTorch's own threads. Causality, padding
and a window leave an interval of keys to each query; what they hide from all is not read, and what they hide from some
reaches those alone who see it: nobody has to look for NaN.
"""

import ctypes
import struct
from functools import cache
from math import e, gcd, log, log2
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard import cpu
from regard.call import Call, Path
from regard.eager import symbolic, transformed
from regard.mask import Span
from regard.paths import probe, sdpa

LONGEST = 256
"""The longest heads this code is made for."""
MOST_IN_HALF = 64
"""Queries in half precision up to which reading the keys takes longer than arithmetic in matrix units would."""
LEAST, LEAST_OF_MANY = 1 << 18, 1 << 22
"""Multiplications from which on a pass of our own is faster than PyTorch's kernels, which start sooner: for one query
or new tokens over a history, and for other queries, of which PyTorch makes tiles."""
_FAR = 1 << 40
"""A distance that no key has."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if symbolic(call.queries, call.keys):
        return "a trace that holds a length open takes one form for all of them"
    if (reason := sdpa.unfit(call)) is not None:
        return reason
    if call.bias is not None:
        return "a bias needs the score form"
    if not call.q.is_cpu:
        return "made for the CPU"
    if call.structure.rest is not None or (call.structure.paddings and call.structure.rows is None):
        return "the keys that the mask shows are no interval"
    if (reason := probe.missing()) is not None:
        return reason
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "made for float32, bfloat16 and float16"
    if cpu.MATRIX_UNITS and call.q.dtype != torch.float32 and call.queries > MOST_IN_HALF:
        return f"more than {MOST_IN_HALF} queries in half precision are faster in this processor's matrix units"
    if call.qk_length % cpu.LANES or call.value_length % cpu.LANES or max(call.qk_length, call.value_length) > LONGEST:
        return f"made for heads whose lengths are multiples of {cpu.LANES}, up to {LONGEST}"
    few = call.queries == 1 or (call.structure.causal and not call.square)
    work = call.batch * call.heads * call.queries * call.keys * (call.qk_length + call.value_length)
    if work < (LEAST if few else LEAST_OF_MANY):
        return "little work: PyTorch's own kernels start sooner"
    return _derived(call)


def _derived(call: Call) -> str | None:
    """Why PyTorch would have to look inside, to derive or to transform; None if it need not."""
    if torch.compiler.is_exporting():
        return "an exported program holds PyTorch's operators alone"
    if torch.compiler.is_compiling():
        return "a trace with gradients enabled may have to derive it" if torch.is_grad_enabled() else None
    if torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad):
        return "gradients are recorded"
    return "a transform of torch.func, or forward derivatives, would have to reach inside" if transformed() else None


def run(call: Call) -> Tensor:
    """one pass over keys and values, in machine code made for this processor."""
    known = call.structure
    spans = None if known.rows is None else torch.tensor(known.rows, device=call.q.device)
    return torch.ops.regard.decode(call.q, call.k, call.v, sdpa.scale(call), spans, known.before, known.after)


PATH = Path("decode", cannot, run, guards_itself=True)

_LIBRARY = torch.library.Library("regard", "DEF")
_LIBRARY.define("decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? spans, int? before, int? after) -> Tensor")
_LIBRARY.define("decode_part(Tensor q, Tensor k, Tensor v, float scale, int? after) -> (Tensor, Tensor)")


def _decode(
    q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None, before: int | None, after: int | None
) -> Tensor:
    """Softmax attention of queries (B, H, T, K), the last of which stands at the last key: each sees the keys from
    `before` before it to `after` behind it, of those [spans[b, 0], spans[b, 1]) in batch row b. 0 if it sees none."""
    return _pass(q, k, v, scale, _spans(len(q), k.shape[2], spans), before, after)[0].to(q.dtype)


def _decode_part(q: Tensor, k: Tensor, v: Tensor, scale: float, after: int | None) -> tuple[Tensor, Tensor]:
    """The same without spans, and its log-sum-exp (B, H, T), both in float32."""
    out, tops, totals = _pass(q, k, v, scale, [(0, k.shape[2])] * len(q), None, after)
    return out, (totals.log2() + tops) * log(2)


def _pass(
    q: Tensor, k: Tensor, v: Tensor, scale: float, spans: list[Span], before: int | None, after: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, (B, H, T, V), and for each query the largest score, in base 2, and the sum of weights relative to
    it, (B, H, T)."""
    batch, heads, queries, qk_length = q.shape
    _, groups, keys, value_length = v.shape
    if qk_length % cpu.LANES or value_length % cpu.LANES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"decode: expected one dtype and head lengths that are multiples of {cpu.LANES}")
    if (reason := cpu.missing()) is not None:
        raise ValueError(f"decode: expected a machine that can run it, got one that cannot: {reason}")
    rows, threads = heads // groups * queries, torch.get_num_threads()
    program, chunk, block, fields = _program(qk_length, value_length, rows, q.dtype, cpu.LANES)
    chunks = -(-rows // chunk)
    units = batch * groups * chunks
    # As many parts as give every thread as much to do, within what their sums may take.
    parts = max(1, min(threads // gcd(units, threads), 8 * threads // units, keys // block))
    q, k, v = q.contiguous(), *(t if t.stride(3) == 1 else t.contiguous() for t in (k, v))
    numbers = units * parts * chunk
    sums = torch.empty(numbers * (value_length + 2), dtype=torch.float32, device="cpu")
    out = torch.empty(batch, heads, queries, value_length, dtype=torch.float32, device="cpu")
    edges = (ctypes.c_int64 * (2 * batch))(*(edge for span in spans for edge in span))
    done = (ctypes.c_int64 * units)()
    tops = sums.data_ptr() + 4 * numbers * value_length
    (factor,) = struct.unpack("q", struct.pack("d", scale * log2(e)))
    told = fields(
        0, units * parts, parts, chunks, chunk, groups, rows, queries, keys - queries,
        _FAR if before is None else before, _FAR if after is None else after,
        ctypes.addressof(edges), ctypes.addressof(done), q.data_ptr(), k.data_ptr(), v.data_ptr(),
        sums.data_ptr(), tops, tops + 4 * numbers, out.data_ptr(), *k.stride()[:3], *v.stride()[:3], factor,
    )  # fmt: skip
    cpu.in_parallel(program, ctypes.addressof(told), min(threads, units * parts))
    statistics = sums[numbers * value_length :].view(2, batch, groups, chunks, parts, chunk)[:, :, :, :, 0]
    tops, totals = statistics.flatten(3)[..., :rows].reshape(2, batch, heads, queries)
    return out, tops, totals


@cache
def _program(qk_length: int, value_length: int, rows: int, dtype: torch.dtype, lanes: int) -> tuple[int, int, int, Any]:
    """The code for query rows of a key/value head, how many of them a task has, the tokens it reads at a time, and the
    type of what it is told."""
    # llvmlite is imported only when a pass needs it.
    from regard.paths.compiler import compiled
    from regard.paths.decode_code import BLOCK, CHUNK, FIELDS, source, tiles

    tile, width = tiles(rows, lanes)
    chunk = -(-rows // (-(-rows // CHUNK) * tile)) * tile
    code = compiled(source, qk_length, value_length, tile, str(dtype).removeprefix("torch."), width)
    return code, chunk, BLOCK, ctypes.c_int64 * len(FIELDS)


def _spans(batch: int, keys: int, spans: Tensor | None) -> list[Span]:
    """The keys that each batch row may see, within those that there are."""
    if spans is None:
        return [(0, keys)] * batch
    if len(spans) != batch:
        raise ValueError(f"spans: expected one for each of {batch} batch rows, got {len(spans)}")
    return [(max(low, 0), min(high, keys)) for low, high in spans.tolist()]


def _shape(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _part_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)


def _underived(operator: Any) -> Any:
    """Better an error than no gradient, where PyTorch derives what `cannot` did not foresee."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        tangents = (forward_ad.unpack_dual(t).tangent for t in (q, k, v)) if forward_ad._current_level >= 0 else ()
        if (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)) or any(
            tangent is not None for tangent in tangents
        ):
            raise NotImplementedError(f"{operator.name()} has no derivative; compute with path='reference'")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, *rest)

    return run


def _flops(
    q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None, before: int | None, after: int | None, **_: Any
) -> int:
    """Of the pairs that are seen."""
    batch, heads, queries, qk_length = q.shape
    keys, pairs = k.shape[2], 0
    for low, high in _spans(batch, keys, spans):
        for position in range(keys - queries, keys):
            first = low if before is None else max(low, position - before)
            pairs += max(0, (high if after is None else min(high, position + after + 1)) - first)
    return 2 * heads * pairs * (qk_length + v.shape[3])


def _part_flops(q: Tensor, k: Tensor, v: Tensor, scale: float, after: int | None, **_: Any) -> int:
    return _flops(q, k, v, scale, None, None, after)


for _name, _compute, _fake, _count in (
    ("decode", _decode, _shape, _flops),
    ("decode_part", _decode_part, _part_shapes, _part_flops),
):
    _LIBRARY.impl(_name, _compute, "CPU")
    _LIBRARY.impl(_name, _underived(getattr(torch.ops.regard, _name).default), "Autograd")
    torch.library.register_fake(f"regard::{_name}", _fake)
    register_flop_formula(getattr(torch.ops.regard, _name), get_raw=True)(_count)
