"""One query over a long cache on a CPU, in machine code of our own: keys and values are read once.

PyTorch reads a decode step's cache once a query head, or through products made for many rows. Here all query heads of a
key/value head share one pass (see decode_code.py), on PyTorch's own threads. Padding and a window leave an interval of
keys, and what they hide is not read.
"""

import ctypes
import struct
from math import e, gcd, log, log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard import cpu
from regard.call import Call, Path
from regard.eager import transformed
from regard.mask import Span
from regard.paths import sdpa

LONGEST = 256
"""The longest heads this code is made for."""
LEAST = 1 << 19
"""Elements of keys and values from which on a pass of our own is faster than PyTorch's kernels, which start sooner."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := sdpa.few(call)) is not None:
        return reason
    if call.queries > 1 or call.heads // call.groups > sdpa.MOST_ROWS:
        return f"made for one query, and up to {sdpa.MOST_ROWS} heads of it a key/value head"
    if call.structure.rest is not None or (call.structure.paddings and call.structure.rows is None):
        return "the keys that the mask shows are no interval"
    return unfit(call)


def unfit(call: Call) -> str | None:
    """Why no pass of our own over this call's keys and values is possible, or worth it; None if one is."""
    if (reason := cpu.missing()) is not None:
        return reason
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "made for float32, bfloat16 and float16"
    if call.qk_length % cpu.LANES or call.value_length % cpu.LANES or max(call.qk_length, call.value_length) > LONGEST:
        return f"made for heads whose lengths are multiples of {cpu.LANES}, up to {LONGEST}"
    if call.batch * call.groups * call.keys * (call.qk_length + call.value_length) < LEAST:
        return "a small cache: PyTorch's own kernels start sooner"
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
    rows = call.structure.rows
    spans = None if rows is None else torch.tensor(rows, device=call.q.device)
    return torch.ops.regard.decode(call.q, call.k, call.v, sdpa.scale(call), spans, call.structure.before)


PATH = Path("decode", cannot, run, last_sees_all=True, slices=True)

_LIBRARY = torch.library.Library("regard", "DEF")
_LIBRARY.define("decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? spans, int? before) -> Tensor")
_LIBRARY.define("decode_part(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None, before: int | None) -> Tensor:
    """Softmax attention of one query, (B, H, 1, K), to the keys [spans[b, 0], spans[b, 1]) of each batch row b, and of
    those to the last `before` + 1 of all."""
    seen = _seen(q.shape[0], k.shape[2], spans, before)
    sums, totals, _ = _pass(q, k, v, scale, seen)
    out = sums / totals[..., None]
    for row, (low, high) in enumerate(seen):
        if low >= high:
            out[row] = 0
    return out[:, :, None].to(q.dtype)


def _decode_part(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of a few queries, (B, H, T, K), to all keys, and its log-sum-exp (B, H, T), in float32."""
    batch, heads, queries, qk_length = q.shape
    room = 1 << (queries - 1).bit_length()  # code is compiled for a number of rows: few of them are enough
    rows = F.pad(q, (0, 0, 0, room - queries)).reshape(batch, heads * room, 1, qk_length)
    sums, totals, tops = _pass(rows, k, v, scale, [(0, k.shape[2])] * batch)
    out, lse = sums / totals[..., None], (totals.log2() + tops) * log(2)
    out, lse = (t.unflatten(1, (heads, room))[:, :, :queries].contiguous() for t in (out, lse))
    return out, lse


def _pass(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: list[Span]) -> tuple[Tensor, Tensor, Tensor]:
    """Of one query over the keys that each batch row sees: the sums of weighted values (B, H, V), of weights (B, H),
    and the largest scores (B, H), in base 2, that both are relative to."""
    # llvmlite is imported only when a decode step needs it.
    from regard.paths.decode_code import BLOCK, FIELDS, source
    from regard.paths.machine_code import compiled

    batch, heads, queries, qk_length = q.shape
    groups, keys, value_length = k.shape[1], k.shape[2], v.shape[3]
    rows, pairs, threads = heads // groups, batch * groups, torch.get_num_threads()
    if queries != 1 or qk_length % cpu.LANES or value_length % cpu.LANES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"decode: expected one query, one dtype and head lengths that are multiples of {cpu.LANES}")
    edges = (ctypes.c_int64 * (2 * batch))(*(edge for span in seen for edge in span))
    code = compiled(source, qk_length, value_length, rows, str(q.dtype).removeprefix("torch."), cpu.LANES)
    # As many parts as give every thread as much to do, within what their sums may take.
    parts = max(1, min(threads // gcd(pairs, threads), 8 * threads // pairs, keys // BLOCK))
    q, k, v = q.contiguous(), *(t if t.stride(3) == 1 else t.contiguous() for t in (k, v))
    sums = torch.empty(pairs, parts, rows, value_length, dtype=torch.float32, device="cpu")
    tops = torch.empty(pairs, parts, rows, dtype=torch.float32, device="cpu")
    totals = torch.empty_like(tops)
    told = {"next": 0, "tasks": pairs * parts, "parts": parts, "groups": groups, "spans": ctypes.addressof(edges)}
    for name, tensor in {"q": q, "k": k, "v": v, "sums": sums, "tops": tops, "totals": totals}.items():
        told[name] = tensor.data_ptr()
    for name, tensor in {"k": k, "v": v}.items():
        told[f"{name}_batch"], told[f"{name}_head"], told[f"{name}_token"], _ = tensor.stride()
    (told["scale"],) = struct.unpack("q", struct.pack("d", scale * log2(e)))
    fields = (ctypes.c_int64 * len(FIELDS))(*(told[name] for name in FIELDS))
    cpu.in_parallel(code, ctypes.addressof(fields), min(threads, pairs * parts))
    if parts > 1:
        top = tops.amax(1, keepdim=True)
        share = torch.exp2(tops - top)
        sums, totals, tops = (sums * share[..., None]).sum(1), (totals * share).sum(1), top
    return sums.view(batch, heads, value_length), totals.view(batch, heads), tops.view(batch, heads)


def _seen(batch: int, keys: int, spans: Tensor | None, before: int | None) -> list[Span]:
    """The keys that each batch row sees, within those that there are."""
    oldest = 0 if before is None else max(0, keys - 1 - before)
    given = [(0, keys)] * batch if spans is None else spans.tolist()
    if len(given) != batch:
        raise ValueError(f"spans: expected one for each of {batch} batch rows, got {len(given)}")
    return [(max(low, oldest), min(high, keys)) for low, high in given]


def _shape(q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None, before: int | None) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _part_shapes(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
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


def _flops(q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None, before: int | None, **_: Any) -> int:
    """Of the keys that are read."""
    seen = _seen(q.shape[0], k.shape[2], spans, before)
    pairs = q.shape[1] * sum(max(0, high - low) for low, high in seen)
    return 2 * pairs * (q.shape[3] + v.shape[3])


def _part_flops(q: Tensor, k: Tensor, v: Tensor, scale: float, **_: Any) -> int:
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])


for _name, _run, _fake, _count in (
    ("decode", _decode, _shape, _flops),
    ("decode_part", _decode_part, _part_shapes, _part_flops),
):
    _LIBRARY.impl(_name, _run, "CPU")
    _LIBRARY.impl(_name, _underived(getattr(torch.ops.regard, _name).default), "Autograd")
    torch.library.register_fake(f"regard::{_name}", _fake)
    register_flop_formula(getattr(torch.ops.regard, _name), get_raw=True)(_count)
