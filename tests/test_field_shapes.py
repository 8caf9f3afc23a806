"""Defects reported against the libraries of the field: shapes, strides and grouped heads."""

import math

import pytest
import torch
import torch.nn.functional as F

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
    usable_paths,
)
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens

# Shapes and strides


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "last axis strided": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every other": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "sliced": lambda t: F.pad(t, (2, 3, 1, 4), value=math.nan)[:, :, 1:-4, 2:-3],
    "fortran": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}


@every_mechanism
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([40, 11]), rg.window(before=5)], ids=repr)
def test_pytorch_187506_non_contiguous_inputs(name: str, layout: str, mask: rg.Mask | None) -> None:
    """Non-contiguous inputs gave garbage: strides were ignored."""
    mechanism, tensors = PAIRS[name], inputs(40)
    strided = tuple(LAYOUTS[layout](t) for t in tensors)
    assert not any(t.is_contiguous() for t in strided)
    expected = plain(mechanism, *tensors, everything(40, 40) if mask is None else mask.visible(B, H, 40, 40))
    for path in usable_paths(mechanism, *strided, mask):
        assert close(rg.attend(*strided, mechanism, mask, path=path), expected), path


@every_mechanism
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("mask", [None, rg.causal], ids=repr)
def test_pytorch_112577_expanded_inputs(name: str, axis: int, mask: rg.Mask | None) -> None:
    """Stride-0 inputs gave garbage, forward or backward."""
    mechanism = PAIRS[name]
    narrow = tuple(t.narrow(axis, 0, 1).clone().requires_grad_() for t in inputs(70))
    out = rg.attend(*(t.expand(o.shape) for t, o in zip(narrow, inputs(70), strict=True)), mechanism, mask)
    copies = tuple(t.detach().clone().requires_grad_() for t in narrow)
    full = (t.expand(o.shape).contiguous() for t, o in zip(copies, inputs(70), strict=True))
    expected = plain(mechanism, *full, everything(70, 70) if mask is None else lower(70, 70))
    assert close(out, expected)
    grads = torch.autograd.grad(out.square().sum(), narrow, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(expected.square().sum(), copies, allow_unused=True, materialize_grads=True)
    for gradient, expected in zip(grads, wanted, strict=True):
        assert close(gradient, expected)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (0, 1), (0, 2)])
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0), (2, 5)])
@pytest.mark.parametrize("mask", [None, "causal", "padding"])
def test_pytorch_141218_zero_size_inputs(
    name: str, heads: int, groups: int, batch: int, length: int, mask: str | None
) -> None:
    """A zero-size grouped input crashed the process. Empty batches, sequences and heads give empty outputs."""
    mechanism = REGISTRY[name]
    if mask == "causal" and not weighs_tokens(mechanism, 8):
        pytest.skip("Channel is never causal")
    rule = {None: None, "causal": rg.causal, "padding": rg.padding([length] * batch)}[mask]
    q, k, v = (draw(batch, n, length, K).requires_grad_() for n in (heads, groups, groups))
    out = rg.attend(q, k, v, mechanism, rule)
    assert out.shape == (batch, heads, length, K)
    assert out.isfinite().all()
    grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    weights = rg.weights(q, k, mechanism, rule)
    assert weights.shape == ((batch, heads, length, length) if weighs_tokens(mechanism, 8) else (batch, heads, K, K))


@every_mechanism
@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([0, 0]), rg.window(before=2)], ids=repr)
def test_queries_over_no_keys_get_zero(name: str, mask: rg.Mask | None) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(6, 0))
    out = rg.attend(q, k, v, PAIRS[name], mask)
    assert torch.equal(out, torch.zeros(B, H, 6, V, dtype=torch.float64))
    assert rg.weights(q, k, PAIRS[name], mask).shape == (B, H, 6, 0)
    torch.autograd.grad(out.sum(), (q, k, v))


@every_mechanism
@pytest.mark.parametrize(("qk_length", "value_length"), [(3, 8), (8, 3), (1, 1), (7, 33)])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (3, 20), (20, 3), (1, 150), (150, 1)])
def test_head_lengths_and_sequence_lengths_may_all_differ(
    name: str, qk_length: int, value_length: int, queries: int, keys: int
) -> None:
    mechanism = PAIRS[name]
    q, k, v = draw(B, H, queries, qk_length), draw(B, G, keys, qk_length), draw(B, G, keys, value_length, seed=1)
    assert close(rg.attend(q, k, v, mechanism), plain(mechanism, q, k, v, everything(queries, keys)))


@pytest.mark.parametrize("name", REGISTRY)
def test_pytorch_124464_the_same_inputs_give_the_same_output(name: str) -> None:
    """Dropout was active in evaluation: nothing here is random, whatever the global seed."""
    x = draw(B, H, 50, K)
    torch.manual_seed(1)
    first = rg.attend(x, x, x, REGISTRY[name])
    torch.manual_seed(2)
    assert torch.equal(rg.attend(x, x, x, REGISTRY[name]), first)


# Heads


@pytest.mark.parametrize("name", [name for name, mechanism in REGISTRY.items() if "groups" not in mechanism.excuses])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_onnx_7274_grouped_heads_are_repeated_not_tiled(name: str, groups: int) -> None:
    """Query head h reads key/value head h // (H // G), not h % G."""
    mechanism = REGISTRY[name]
    q, k, v = draw(B, 6, 20, K), draw(B, groups, 20, K, seed=1), draw(B, groups, 20, K, seed=2)
    wide = tuple(torch.stack([t[:, h // (6 // groups)] for h in range(6)], dim=1) for t in (k, v))
    assert close(rg.attend(q, k, v, mechanism), rg.attend(q, *wide, mechanism))
    assert close(rg.weights(q, k, mechanism), rg.weights(q, wide[0], mechanism))
