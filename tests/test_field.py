"""One named test for each defect, reported against the libraries of the field, that could be one of the core's.

Here: masks, empty rows and leaks; shapes, streams and weights have files of their own."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from field_cases import (
    PAIRS,
    B,
    G,
    H,
    V,
    close,
    draw,
    every_mechanism,
    everything,
    inputs,
    lower,
    plain,
    plain_weights,
    stream,
    usable_paths,
)

# Masks


@every_mechanism
def test_pytorch_170400_true_means_may_attend(name: str) -> None:
    """True keeps in SDPA and drops in nn.MultiheadAttention; here it keeps, always."""
    q, k, v = inputs(6)
    only_first = torch.zeros(6, 6, dtype=torch.bool)
    only_first[:, 0] = True
    assert close(rg.attend(q, k, v, PAIRS[name], only_first), plain(PAIRS[name], q, k, v, only_first))
    weights = rg.weights(q, k, PAIRS[name], only_first)
    assert (weights[..., 1:] == 0).all()
    assert (weights[..., 0] - 1).abs().max() <= 1e-12


@every_mechanism
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "window", "dense", "global", "segments"])
def test_transformer_engine_614_every_path_reads_a_mask_alike(name: str, mask: str) -> None:
    """The same mask was read with opposite polarity by two paths."""
    mechanism, (q, k, v) = PAIRS[name], inputs(9)
    table = draw(9, 9, seed=5) > 0
    masks: dict[str, rg.Mask | None] = {
        "none": None,
        "causal": rg.causal,
        "padding": rg.padding([9, 4]),
        "window": rg.window(before=2, after=1),
        "dense": rg.dense(table),
        "global": rg.global_tokens(2) | rg.window(),
        "segments": rg.segments([[0, 0, 0, 1, 1, 1, 1, 2, 2]]),
    }
    rule = masks[mask]
    visible = everything(9, 9) if rule is None else rule.visible(B, H, 9, 9)
    expected = plain(mechanism, q, k, v, visible)
    paths = usable_paths(mechanism, q, k, v, rule)
    assert "reference" in paths
    for path in paths:
        assert close(rg.attend(q, k, v, mechanism, rule, path=path), expected), path


@every_mechanism
@pytest.mark.parametrize("keys", [1, 7, 300])
def test_pytorch_108108_cached_step_sees_all_keys(name: str, keys: int) -> None:
    """is_causal was aligned top-left, so that one query over a cache saw key 0 only."""
    q, k, v = inputs(1, keys)
    assert close(rg.attend(q, k, v, PAIRS[name], rg.causal), plain(PAIRS[name], q, k, v, everything(1, keys)))


@every_mechanism
@pytest.mark.parametrize(("queries", "keys"), [(4, 9), (70, 300), (9, 4), (300, 70)])
def test_pytorch_144858_causality_is_aligned_to_the_last_key(name: str, queries: int, keys: int) -> None:
    """A chunk of queries over a longer (or shorter) sequence was aligned to the first key."""
    q, k, v = inputs(queries, keys)
    expected = plain(PAIRS[name], q, k, v, lower(queries, keys))
    for path in [None, *usable_paths(PAIRS[name], q, k, v, rg.causal)]:
        out = rg.attend(q, k, v, PAIRS[name], rg.causal, path=path)
        assert close(out, expected)
        assert (out[:, :, : max(0, queries - keys)] == 0).all()


@every_mechanism
def test_pytorch_187801_a_mask_and_causality_intersect_on_every_path(name: str) -> None:
    """A mask and is_causal together intersected on one backend and raised on another."""
    mechanism, (q, k, v) = PAIRS[name], inputs(8)
    table = draw(8, 8, seed=7) > 0
    for mask in (rg.causal & rg.dense(table), rg.dense(table) & rg.causal):
        for path in usable_paths(mechanism, q, k, v, mask):
            out = rg.attend(q, k, v, mechanism, mask, path=path)
            assert close(out, plain(mechanism, q, k, v, table & lower(8, 8)))


@dataclass(frozen=True, kw_only=True)
class Cauchy(rg.Mechanism):
    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return 1 / (1 + (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1))


def test_transformers_45811_a_users_mechanism_keeps_causality() -> None:
    """A custom attention, registered without its mask, silently lost causality."""
    q, k, v = inputs(12)
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, 7:], changed_v[:, :, 7:] = 0.0, -99.0
    before, after = rg.attend(q, k, v, Cauchy(), rg.causal), rg.attend(q, changed_k, changed_v, Cauchy(), rg.causal)
    assert close(after[:, :, :7], before[:, :, :7])
    assert (after[:, :, 7:] - before[:, :, 7:]).abs().max() > 1
    streamed, _ = stream(Cauchy(), (q, k, v), [0, 5, 6, 12])
    assert close(streamed, before)


# Empty rows


@every_mechanism
@pytest.mark.parametrize("length", [5, 200])
def test_pytorch_41508_an_empty_row_is_zero_with_and_without_weights(name: str, length: int) -> None:
    """A fully masked row gave NaN with weights requested and 0 without."""
    q, k, v = (t.requires_grad_() for t in inputs(length))
    nobody = rg.padding([0, length])
    out, weights = rg.attend(q, k, v, PAIRS[name], nobody), rg.weights(q, k, PAIRS[name], nobody)
    assert (out[0] == 0).all()
    assert (weights[0] == 0).all()
    assert out[1].abs().max() > 0
    grads = torch.autograd.grad(out.sum() + weights.sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[0] == 0).all() for grad in grads)


@every_mechanism
def test_onnxruntime_28958_an_empty_row_is_no_average(name: str) -> None:
    """A finite sentinel instead of -inf gave an empty row the mean of all values, hidden ones."""
    q, k, _ = inputs(6)
    v = torch.full((B, G, 6, V), 1000.0, dtype=torch.float64)
    mask = rg.dense(torch.arange(6)[:, None].expand(6, 6) != 2)
    for path in usable_paths(PAIRS[name], q, k, v, mask):
        out = rg.attend(q, k, v, PAIRS[name], mask, path=path)
        assert (out[:, :, 2] == 0).all(), path
        assert close(out[:, :, [0, 1, 3, 4, 5]], v.repeat_interleave(2, 1)[:, :, :5])


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_transformers_17306_two_masks_in_half_make_no_nan(name: str, dtype: torch.dtype) -> None:
    """finfo.min added twice, for causality and for padding, overflowed to -inf and NaN in half."""
    q, k, v = (t.requires_grad_() for t in inputs(20, dtype=dtype))
    left = torch.arange(20) >= torch.tensor([[0], [15]])
    out = rg.attend(q, k, v, PAIRS[name], rg.causal & rg.padding(valid=left) & rg.window(before=3))
    assert out.isfinite().all()
    assert (out[1, :, :15] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)


@every_mechanism
@pytest.mark.parametrize("length", [6, 200])
def test_an_empty_rows_nan_query_spoils_no_gradient(name: str, length: int) -> None:
    """A query that sees nothing is 0 and gives nothing back, even if it is itself NaN (left padding of a bad token)."""
    q, k, v = inputs(length)
    q[1, :, :3] = math.nan
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    left = torch.arange(length) >= torch.tensor([[0], [3]])
    for mask in (rg.causal & rg.padding(valid=left), rg.causal & rg.padding(valid=left) & rg.window(before=4)):
        for path in usable_paths(PAIRS[name], q, k, v, mask):
            out = rg.attend(q, k, v, PAIRS[name], mask, path=path)
            assert (out[1, :, :3] == 0).all(), path
            assert out.isfinite().all(), path
            grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True, materialize_grads=True)
            assert all(grad.isfinite().all() for grad in grads), f"{path}: {mask}"


# Leaks


POISONS = pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
GRADIENTS = pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])


@every_mechanism
@POISONS
@GRADIENTS
def test_pytorch_101967_nothing_masked_leaks(name: str, poison: float, gradients: bool) -> None:
    """NaN in a masked key or value reached the output, since 0 · NaN is NaN."""
    mechanism, (q, k, v) = PAIRS[name], inputs(12)
    k[1, :, 7:], v[1, :, 7:] = poison, poison
    for mask in (
        rg.padding([12, 7]),
        rg.padding([12, 7]) & rg.causal,
        rg.padding([12, 7]) & rg.window(before=3, after=3),
    ):
        leaves = tuple(t.clone().requires_grad_(gradients) for t in (q, k, v))
        with torch.set_grad_enabled(gradients):
            out = rg.attend(*leaves, mechanism, mask)
        clean = (q, k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0))
        assert close(out.detach(), plain(mechanism, *clean, mask.visible(B, H, 12, 12)))
        if gradients:
            grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True)
            assert all(grad.isfinite().all() for grad in grads)
            assert all((grad[1, :, 7:] == 0).all() for grad in grads[1:])
        weights = rg.weights(q, k, mechanism, mask)
        assert close(weights, plain_weights(mechanism, *clean[:2], mask.visible(B, H, 12, 12)))


@every_mechanism
@POISONS
@GRADIENTS
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("length", [9, 150])
def test_pytorch_141128_a_visible_nan_is_not_hidden(
    name: str, poison: float, gradients: bool, where: str, length: int
) -> None:
    """NaN input was turned into zeros. A bad number reaches, as NaN, exactly the queries that see it.

    An infinite key may rightly weigh nothing; then it shows only where gradients would meet it.
    """
    mechanism, tensors, at = PAIRS[name], inputs(length), 4
    tensors["qkv".index(where)][0, 1, at, 0] = poison
    with torch.set_grad_enabled(gradients):
        leaves = tuple(t.clone().requires_grad_(gradients) for t in tensors)
        out = rg.attend(*leaves, mechanism, rg.causal).detach()
    if gradients or where == "v" or math.isnan(poison):
        assert out[0, 2:, at:].isnan().all()
    clean = plain(mechanism, *(t.nan_to_num(0, 0, 0) for t in tensors), lower(length, length))
    assert close(out[0, 2:, :at], clean[0, 2:, :at])
    assert close(out[0, :2], clean[0, :2])
    assert close(out[1], clean[1])


@every_mechanism
@pytest.mark.parametrize(("where", "poison"), [("k", math.nan), ("v", math.nan), ("v", math.inf), ("v", -math.inf)])
def test_pytorch_141128_a_visible_nan_is_not_hidden_without_a_mask(name: str, poison: float, where: str) -> None:
    """What the last query sees is the same with causality and without. An infinite key may rightly weigh nothing."""
    mechanism, tensors = PAIRS[name], inputs(9)
    tensors["qkv".index(where)][0, 1, 4, 0] = poison
    last = tensors[0][:, :, -1:], *tensors[1:]
    for out in (rg.attend(*tensors, mechanism, rg.causal)[:, :, -1], rg.attend(*last, mechanism)[:, :, 0]):
        bad = (~out.isfinite()).any(-1)
        assert bad.tolist() == [[False, False, True, True], [False] * 4]
    weights = [rg.weights(*last[:2], mechanism), rg.weights(*tensors[:2], mechanism, rg.causal)[:, :, -1:]]
    assert torch.equal(weights[0].isnan().any(-1), weights[1].isnan().any(-1))


@every_mechanism
@pytest.mark.parametrize("mask", [None, rg.causal, rg.window(before=3)], ids=repr)
@pytest.mark.parametrize("length", [9, 150])
def test_pytorch_141128_a_nan_query_is_its_own_rows_nan(name: str, mask: rg.Mask | None, length: int) -> None:
    """On every path, a NaN query gives NaN to its own row and to no other."""
    mechanism, (q, k, v) = PAIRS[name], inputs(length)
    q[0, 1, 5, 2] = math.nan
    visible = everything(length, length) if mask is None else mask.visible(B, H, length, length)
    expected = plain(mechanism, q.nan_to_num(0), k, v, visible)
    expected[0, 1, 5] = math.nan
    for path in usable_paths(mechanism, q, k, v, mask):
        out = rg.attend(q, k, v, mechanism, mask, path=path)
        assert torch.equal(out.isnan(), expected.isnan()), path
        assert close(out.nan_to_num(0), expected.nan_to_num(0)), path


def test_pytorch_141128_a_nan_bias_is_not_a_mask() -> None:
    """A NaN in the bias of a visible pair shows; in the bias of a hidden pair it does not."""
    q, k, v = inputs(6)
    bias = torch.zeros(6, 6, dtype=torch.float64)
    bias[4, 2] = bias[1, 5] = math.nan
    out = rg.attend(q, k, v, rg.Softmax(), rg.causal, bias=bias)
    assert out[:, :, 4].isnan().all()
    assert close(out[:, :, [0, 1, 2, 3, 5]], plain(rg.Softmax(), q, k, v, lower(6, 6))[:, :, [0, 1, 2, 3, 5]])
