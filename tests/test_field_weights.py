"""Defects reported against the libraries of the field: weights, counting, and half precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from field_cases import (
    PAIRS,
    B,
    G,
    H,
    K,
    V,
    close,
    draw,
    every_mechanism,
    everything,
    inputs,
    lower,
    plain,
    plain_weights,
)
from regard.core.calls.call import Call
from regard.core.calls.choice import refusal

# Weights out


@every_mechanism
@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([200, 30]), rg.window(before=9)], ids=repr)
def test_pytorch_98505_weights_come_with_any_path(name: str, mask: rg.Mask | None) -> None:
    """Fast paths refused the attention weights for years (also pytorch#119811, #143993)."""
    mechanism, (q, k, v) = PAIRS[name], inputs(200)
    before = rg.attend(q, k, v, mechanism, mask)
    weights = rg.weights(q, k, mechanism, mask)
    assert torch.equal(rg.attend(q, k, v, mechanism, mask), before), "asking for weights changed the output"
    assert close(weights @ v.repeat_interleave(H // G, dim=1), before)
    assert (weights >= 0).all()
    assert close(weights.sum(-1), torch.ones(B, H, 200, dtype=torch.float64))


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_transformers_33996_weights_have_one_shape_and_dtype(name: str, dtype: torch.dtype) -> None:
    """None, a warning or a wrong shape came back instead of weights (also transformers#31990)."""
    mechanism, (q, k, _) = PAIRS[name], inputs(6, 9, dtype)
    weights = rg.weights(q, k, mechanism, rg.causal)
    assert weights.shape == (B, H, 6, 9)
    assert weights.dtype == dtype
    exact = plain_weights(mechanism, q, k, lower(6, 9))
    some = rg.weights(q, k, mechanism, rg.causal, rows=[-1, 2], heads=[3, 0])
    assert some.shape == (B, 2, 2, 9)
    allowed = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    assert (weights.double() - exact).abs().max() <= allowed
    assert (some.double() - exact[:, [3, 0]][:, :, [5, 2]]).abs().max() <= allowed
    assert rg.weights(q, k, mechanism, rg.causal, rows=[], heads=[]).shape == (B, 0, 0, 9)


# Counting


@pytest.mark.parametrize("mask", [None, rg.causal, rg.window(before=3), rg.padding([40, 7])], ids=repr)
def test_pytorch_195460_flops_are_counted_and_know_causality(mask: rg.Mask | None) -> None:
    """FLOP counters gave 0 for SDPA on a CPU, and ignored causality: only visible pairs count, and they do."""
    visible = everything(40, 40) if mask is None else mask.visible(B, H, 40, 40)
    pairs = int(visible.expand(B, H, 40, 40).sum())
    work = rg.Work(
        batch=B, query_length=40, key_length=40, num_heads=H, num_kv_heads=G, qk_length=K, value_length=V, mask=mask
    )
    assert rg.cost(rg.Softmax(), work).flops == 2 * pairs * (K + V)
    assert pairs > 0


HALF_BUDGETS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""One unit in the last place of the largest output: fixed, so that no code of ours sets its own allowance."""
LONG = 1100
"""Keys of a row, over which scores rounded to half would show."""


@every_mechanism
@pytest.mark.parametrize("dtype", HALF_BUDGETS, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "window", "table"])
@torch.no_grad()
def test_long_rows_in_half_precision_keep_a_fixed_budget(name: str, mask: str, dtype: torch.dtype) -> None:
    mechanism, queries = PAIRS[name], 3
    q, k, v = inputs(queries, LONG, dtype)
    if isinstance(mechanism, rg.Softmax):
        q = q * 6  # scores of some ±25, which half precision has 1 % apart, and bfloat16 12 %
    real = torch.arange(LONG) >= torch.tensor([[0], [40]])
    table, far = draw(queries, LONG, seed=9) > -1, torch.arange(LONG - queries, LONG) - 1050
    masks = {
        "none": (None, everything(queries, LONG)),
        "causal": (rg.causal, lower(queries, LONG)),
        "padding": (rg.padding(valid=real), real[:, None, None]),
        "window": (rg.window(before=1050), lower(queries, LONG) & (torch.arange(LONG) >= far[:, None])),
        "table": (rg.dense(table), table),
    }
    rule, visible = masks[mask]
    bias = (20 + draw(H, queries, LONG, seed=4)).to(dtype)
    for added in (None, bias) if refusal(mechanism, bias=True) is None else (None,):
        expected = plain(mechanism, q, k, v, visible) if added is None else biased(mechanism, q, k, v, visible, added)
        for path in [
            path.name for path in mechanism.paths() if path.cannot(Call(mechanism, q, k, v, rule, added)) is None
        ]:
            out = rg.attend(q, k, v, mechanism, rule, bias=added, path=path)
            off = (out.double() - expected).abs().max() / expected.abs().max()
            assert off <= HALF_BUDGETS[dtype], (path, "bias" if added is not None else "", off)


def biased(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor) -> Tensor:
    """Softmax with an additive term, in float64: weights without it times its exponential, over their sum."""
    similar = plain_weights(mechanism, q, k, visible) * bias.double().exp()
    return similar / similar.sum(-1, keepdim=True) @ v.double().repeat_interleave(H // G, dim=1)
