"""Whether a few numbers of machine code come out right, for a processor that our tests do not run on."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from regard.core.states.buffer import quantize


@cache
def off(decode: Callable[..., Tensor]) -> str | None:
    """How far small calls are off, in each dtype and over int8, for one row and several; None if all are right."""
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
                return f"a probe of machine code on this processor was off by {error:.1g} in {kind}"
    return None


def _error(decode: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *stored: Tensor) -> float:
    """How far attention to keys and values as they are stored (numbers, then scales) is from attention to k and v."""
    out = decode(q, *stored[:2], 0.25, None, None, None, *stored[2:]).double()
    exact = torch.softmax(0.25 * q.double() @ k.double().mT, -1) @ v.double()
    return float((out - exact).abs().max().item())
