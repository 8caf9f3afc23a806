"""A check that JIT-compiled code gives right numbers, on processors that our tests do not run on."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from regard.core.states.buffer import quantize


@cache
def off(decode: Callable[..., Tensor]) -> str | None:
    """The error of small calls, in each dtype and over int8, for one row and several, as a reason; None if all are
    right."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for queries in (1, 5):
            shapes = (1, 2, queries, 16), (1, 2, 130, 16), (1, 2, 130, 16)
            q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes)
            q, k, v = q.to(kind), k.to(kind), v.to(kind)
            (small_k, k_scales), (small_v, v_scales) = quantize(k), quantize(v)
            error = max(
                _error(decode, q, k, v, k, v),
                _error(decode, q, small_k * k_scales, small_v * v_scales, small_k, small_v, k_scales, v_scales),
            )
            if not error <= 4 * torch.finfo(kind).eps:
                return f"a test of JIT-compiled code on this CPU was off by {error:.1g} in {kind}"
    return None


def _error(decode: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *stored: Tensor) -> float:
    """The error of attention to stored keys and values (numbers, then scales) against attention to k and v."""
    out = decode(q, *stored[:2], 0.25, None, None, None, *stored[2:]).double()
    exact = torch.softmax(0.25 * q.double() @ k.double().mT, -1) @ v.double()
    return float((out - exact).abs().max().item())
