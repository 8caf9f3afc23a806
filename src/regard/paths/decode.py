"""A few queries over a long cache on a CPU, in machine code of our own: keys and values are read once.

PyTorch reads a decode step's cache once a query head, or through products made for many rows. Here all query rows of a
key/value head share one pass (see machine_code.py), on PyTorch's own threads. Padding and, for one query, a window are
intervals of keys: what they hide is never read.
"""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import e, log2
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard.call import Call, Path
from regard.paths import sdpa

LONGEST = 256
"""Numbers of a head up to which this code is made."""
LEAST = 1 << 19
"""Numbers of keys and values from which on a pass of our own is faster than PyTorch's products, which start sooner."""
LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 0)
"""Float32 numbers in a register of this processor; 0 where no code is made for it."""
_THREADS = sorted((File(torch.__file__).parent / "lib").glob("libgomp*"))
_HAS_LLVM = find_spec("llvmlite") is not None


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := sdpa.few(call) or missing()) is not None:
        return reason
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "made for float32, bfloat16 and float16"
    known = call.structure
    if known.rest is not None or (known.positional and call.queries > 1):
        return "the mask hides keys from some queries"
    if known.paddings and known.rows is None:
        return "padding with holes is no interval of keys"
    if call.qk_length % LANES or call.value_length % LANES or max(call.qk_length, call.value_length) > LONGEST:
        return f"made for heads whose lengths are multiples of {LANES}, up to {LONGEST}"
    if call.batch * call.groups * call.keys * (call.qk_length + call.value_length) < LEAST:
        return "a small cache: PyTorch's own kernels start sooner"
    if torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad):
        return "gradients are recorded"
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return "within a transform of torch.func"
    return None


def missing() -> str | None:
    """What this machine lacks; None if nothing."""
    if not LANES:
        return "made for processors with AVX2 or AVX-512"
    if not _HAS_LLVM:
        return "llvmlite is not installed"
    return None if _THREADS else "PyTorch comes without GNU OpenMP here, on whose threads it runs"


def run(call: Call) -> Tensor:
    """one pass over keys and values, in machine code made for this processor."""
    spans = call.structure.rows or ((0, call.keys),) * call.batch
    window = call.structure.before
    oldest = 0 if window is None else max(0, call.keys - 1 - window)
    edges = [edge for low, high in spans for edge in (max(low, oldest), min(high, call.keys))]
    return torch.ops.regard.decode(call.q, call.k, call.v, sdpa.scale(call), edges)


PATH = Path("decode", cannot, run)

_LIBRARY = torch.library.Library("regard", "DEF")
_LIBRARY.define("decode(Tensor q, Tensor k, Tensor v, float scale, SymInt[] edges) -> Tensor")


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float, edges: Sequence[int]) -> Tensor:
    """Plain softmax attention of (B, H, T, K) to the keys [edges[2b], edges[2b + 1]) of each batch row b."""
    from regard.paths.machine_code import FIELDS, compiled  # LLVM is loaded by who decodes

    batch, heads, queries, qk_length = q.shape
    groups, value_length = k.shape[1], v.shape[3]
    rows, pairs, threads = heads // groups * queries, batch * groups, torch.get_num_threads()
    parts = 1 if pairs % threads == 0 else threads
    q, k, v = q.contiguous(), *(t if t.stride(3) == 1 else t.contiguous() for t in (k, v))
    sums = torch.empty(pairs, parts, rows, value_length)
    found = torch.empty(2, pairs, parts, rows)
    spans = (ctypes.c_int64 * len(edges))(*edges)
    (scaled,) = struct.unpack("q", struct.pack("d", scale * log2(e)))
    sizes, strides = (pairs * parts, parts, groups), (*k.stride()[:3], *v.stride()[:3])
    addresses = [t.data_ptr() for t in (q, k, v, sums, found)]
    fields = (ctypes.c_int64 * len(FIELDS))(0, *sizes, *addresses, ctypes.addressof(spans), *strides, scaled)
    code, _ = compiled(qk_length, value_length, rows, str(q.dtype).removeprefix("torch."), LANES)
    _in_parallel(code, ctypes.addressof(fields), min(threads, pairs * parts))
    top, total = found
    if parts > 1:
        share = torch.exp2(top - top.amax(1, keepdim=True))
        sums, total = (sums * share[..., None]).sum(1), (total * share).sum(1)
    out = sums.view(batch, heads, queries, value_length) / total.view(batch, heads, queries, 1)
    for row, (low, high) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        if low >= high:
            out[row] = 0
    return out.to(q.dtype)


def _in_parallel(code: int, fields: int, threads: int) -> None:
    """`code(fields)` on each of some threads, PyTorch's own: others would wait for its threads, which spin."""
    if threads == 1:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code)(fields)
    else:
        _openmp().GOMP_parallel(ctypes.c_void_p(code), ctypes.c_void_p(fields), threads, 0)


@cache
def _openmp() -> Any:
    return ctypes.CDLL(str(_THREADS[0]))


_LIBRARY.impl("decode", _decode, "CPU")


def _shape(q: Tensor, k: Tensor, v: Tensor, scale: float, edges: Sequence[int]) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


torch.library.register_fake("regard::decode", _shape)
register_flop_formula(torch.ops.regard.decode)(sdpa.count_flops)
