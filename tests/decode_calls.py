"""Calls for tests of the machine code for a few queries, and what they are compared with."""

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.core.laws.case import exact_output, plain_output
from regard.core.paths import decode_code
from regard.core.states.buffer import quantize

KINDS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, SOFTMAX = decode_code.BLOCK, rg.Softmax()


def tensors(
    kind: torch.dtype = torch.float32, batch=2, groups=2, repeats=3, keys=50, K=32, V=16, queries=1
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(keys)
    shapes = (batch, groups * repeats, queries, K), (batch, groups, keys, K), (batch, groups, keys, V)
    q, k, v = (torch.randn(shape).to(kind) for shape in shapes)
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None = None, mechanism: rg.Mechanism = SOFTMAX) -> Tensor:
    return rg.attend(q.double(), k.double(), v.double(), mechanism, mask, path="reference")


def near(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None, mechanism: rg.Mechanism) -> None:
    """Twice the plain formula's own error at most."""
    assert out.dtype == q.dtype
    wanted, plain = (compute(mechanism, q, k, v, mask) for compute in (exact_output, plain_output))
    assert (out - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + 1e-6


def agree(q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None = None, mechanism: rg.Mechanism = SOFTMAX) -> None:
    near(rg.attend(q, k, v, mechanism, mask, path="decode"), q, k, v, mask, mechanism)


def int8(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values as an int8 KV cache has them: numbers of both, scales of both."""
    (k, k_scales), (v, v_scales) = quantize(k), quantize(v)
    return k, v, k_scales, v_scales


def reason_against(q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None = None) -> str:
    plan = rg.explain(q, k, v, mask=mask)
    assert plan.path != "decode"
    with pytest.raises(ValueError, match="path: expected one that can serve this call, got 'decode'"):
        rg.attend(q, k, v, mask=mask, path="decode")
    return plan.rejected["decode"]
