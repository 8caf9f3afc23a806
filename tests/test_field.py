"""One named test for each defect, reported against the libraries of the field, that could be one of the core's."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.core.calls.call import Call
from regard.core.calls.choice import refusal
from regard.core.families.features import RECENT
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens

PAIRS = {
    name: mechanism for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8) and not mechanism.ordered
}
every_mechanism = pytest.mark.parametrize("name", PAIRS)
B, H, G, K, V = 2, 4, 2, 5, 3


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(queries: int, keys: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    keys = queries if keys is None else keys
    q, k = draw(B, H, queries, K, dtype=dtype), draw(B, G, keys, K, seed=1, dtype=dtype)
    return q, k, draw(B, G, keys, V, seed=2, dtype=dtype)


def plain_weights(mechanism: rg.Mechanism, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """The weights in float64, from the formula of each mechanism, pair by pair; 0 for a query that sees nothing."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores, size = q @ k.transpose(-1, -2), q.shape[-1]
    if isinstance(mechanism, rg.Softmax):
        if mechanism.beta == math.inf:
            best = scores.masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
            similar = (scores == best).double()
        else:
            scores = scores * (size**-0.5 if mechanism.beta is None else mechanism.beta)
            if mechanism.softcap is not None:
                scores = mechanism.softcap * torch.tanh(scores / mechanism.softcap)
            similar = torch.exp(scores)
    elif isinstance(mechanism, rg.Quadratic | rg.Polynomial):
        similar = (scores + mechanism.c) ** getattr(mechanism, "degree", 2)
    elif isinstance(mechanism, rg.Taylor):
        similar = 1 + scores * size**-0.5 + scores**2 / (2 * size)
    else:
        similar = mechanism.features(q) @ mechanism.features(k).transpose(-1, -2)
    similar = torch.where(visible, similar, 0.0)
    total = similar.sum(-1, keepdim=True)
    return similar / torch.where(total == 0, 1.0, total)


def plain(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return plain_weights(mechanism, q, k, visible) @ v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def everything(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


def lower(queries: int, keys: int) -> Tensor:
    """Causality with the last query at the last key."""
    return torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]


def close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool(
        (actual - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item())
    )


def usable_paths(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None) -> list[str]:
    call = Call(mechanism, q, k, v, mask)
    return [path.name for path in mechanism.paths() if path.cannot(call) is None]


def stream(
    mechanism: rg.Mechanism, tensors: tuple[Tensor, ...], cuts: list[int], masks: Any = None, state: Any = None
) -> tuple[Tensor, Any]:
    q, k, _ = tensors
    if state is None:
        state = mechanism.start(
            batch=len(q), num_kv_heads=k.shape[1], qk_length=K, value_length=V, capacity=512, dtype=q.dtype
        )
    parts = []
    for low, high in pairwise(cuts):
        mask = rg.causal if masks is None else masks(high)
        out, state = mechanism.extend(*(t[:, :, low:high] for t in tensors), state, mask=mask)
        parts.append(out)
    return torch.cat(parts, dim=2), state


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


# Caches


@every_mechanism
@pytest.mark.parametrize("cuts", [[0, 1, 2, 50, 300], list(range(0, 301, 60))], ids=["uneven", "even"])
def test_x_transformers_219_cache_on_is_cache_off(name: str, cuts: list[int]) -> None:
    """Generating with a cache gave other numbers than without (also x-transformers#311)."""
    tensors = inputs(300)
    out, _ = stream(PAIRS[name], tensors, cuts)
    assert close(out, plain(PAIRS[name], *tensors, lower(300, 300)))


@pytest.mark.parametrize("name", [name for name, mechanism in PAIRS.items() if isinstance(mechanism, rg.Softmax)])
@pytest.mark.parametrize("before", [0, 1, 4, 63, 64])
def test_transformers_37574_a_window_is_as_wide_streamed_as_whole(name: str, before: int) -> None:
    """The sliding window was off by one between the cached and the whole form (also transformers#39408)."""
    mechanism, tensors, length = PAIRS[name], inputs(150), 150
    mask = rg.causal & rg.window(before=before)
    visible = lower(length, length) & ~lower(length, length).tril(-before - 1)
    assert visible.sum(-1).tolist() == [min(i, before) + 1 for i in range(length)]
    expected = plain(mechanism, *tensors, visible)
    assert close(rg.attend(*tensors, mechanism, mask), expected)
    out, _ = stream(mechanism, tensors, [0, 1, 2, 66, 67, length], lambda _: mask)
    assert close(out, expected)


@every_mechanism
@pytest.mark.parametrize("remembered", [False, True])
def test_transformers_25420_left_padding_is_as_if_it_were_not_there(name: str, remembered: bool) -> None:
    """Left-padded rows came out otherwise than the same rows alone (also unsloth#3699)."""
    mechanism, (q, k, v), pads = PAIRS[name], inputs(200), [0, 37]

    def mask(length: int) -> rg.Mask:
        left = rg.padding(valid=torch.arange(length) >= torch.tensor(pads)[:, None])
        return rg.causal if remembered and length > 60 else rg.causal & left

    out, _ = stream(mechanism, (q, k, v), [0, 60, 61, 62, 200], mask)
    for row, pad in enumerate(pads):
        alone = tuple(t[row : row + 1, :, pad:] for t in (q, k, v))
        assert close(out[row : row + 1, :, pad:], plain(mechanism, *alone, lower(200 - pad, 200 - pad)))
        assert (out[row, :, :pad] == 0).all()


@every_mechanism
def test_transformer_lens_1005_unequal_prompts_are_each_as_alone(name: str) -> None:
    """A batch of unequal prompts, then common steps, was wrong or missing (also litgpt#345)."""
    mechanism, (q, k, v), lengths, width = PAIRS[name], inputs(60), [25, 9], 25

    def mask(length: int) -> rg.Mask:
        return rg.causal & rg.padding(lengths) if length <= width else rg.causal

    out, _ = stream(mechanism, (q, k, v), [0, width, width + 1, 60], mask)
    for row, length in enumerate(lengths):
        places = [*range(length), *range(width, 60)]
        alone = tuple(t[row : row + 1, :, places] for t in (q, k, v))
        assert close(out[row : row + 1, :, places], plain(mechanism, *alone, lower(len(places), len(places))))


@every_mechanism
def test_transformers_46612_beam_search_reorders_every_part_of_a_state(name: str) -> None:
    """Beam search did not reorder the recurrent state: it stayed with another hypothesis."""
    mechanism, tensors, past = PAIRS[name], inputs(RECENT + 80), RECENT + 60
    _, state = stream(mechanism, tensors, [0, past])
    for index in ([1, 0], [1, 1], [0, 1, 1, 0]):
        rows = tuple(t[index] for t in tensors)
        out, _ = stream(mechanism, rows, [past, past + 20], state=state.reorder(torch.tensor(index)))
        assert close(out, plain(mechanism, *rows, lower(past + 20, past + 20))[:, :, past:])


@every_mechanism
def test_fla_1272_padding_enters_neither_the_sums_nor_the_normaliser(name: str) -> None:
    """Only v was masked, so the padding's keys stayed in the normaliser (also transformers#48256)."""
    mechanism, (q, k, v) = PAIRS[name], inputs(300)
    real = torch.arange(300) >= torch.tensor([[0], [200]])
    k[~real[:, None].expand(B, G, 300)] = v[~real[:, None].expand(B, G, 300)] = 50.0
    expected = plain(mechanism, q, k, v, lower(300, 300) & real[:, None, None])
    assert close(rg.attend(q, k, v, mechanism, rg.causal & rg.padding(valid=real)), expected)
    masks = {250: rg.causal & rg.padding(valid=real[:, :250]), 300: rg.causal}
    out, _ = stream(mechanism, (q, k, v), [0, 250, 300], masks.__getitem__)
    assert close(out, expected)


# Linear attention

KERNELS = [name for name, mechanism in PAIRS.items() if not isinstance(mechanism, rg.Softmax)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("length", [63, 255, 256, 257, 600])
def test_fla_285_whole_is_chunked_is_step(name: str, length: int) -> None:
    """The whole form, the chunked form and the step form disagreed (also fla#494)."""
    mechanism, tensors = PAIRS[name], inputs(length)
    expected = plain(mechanism, *tensors, lower(length, length))
    for path in usable_paths(mechanism, *tensors, rg.causal):
        assert close(rg.attend(*tensors, mechanism, rg.causal, path=path), expected), path
    out, _ = stream(mechanism, tensors, [*range(5), *range(5, length, 50), length])
    assert close(out, expected)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sana_267_long_sequences_do_not_overflow_in_half(name: str, dtype: torch.dtype) -> None:
    """Sums over many tokens overflowed float16: they are kept in float32."""
    length = 3000
    q = k = torch.full((1, 1, length, K), 4.0, dtype=dtype)
    v = torch.full((1, 1, length, V), 30.0, dtype=dtype)
    mechanism = PAIRS[name]
    out = rg.attend(q, k, v, mechanism, rg.causal)
    assert (out.double() - 30).abs().max() <= 30 * torch.finfo(dtype).eps
    streamed, _ = stream(mechanism, (q, k, v), [0, 2990, 2991, length]) if mechanism.linear(K) else (out, None)
    assert (streamed.double() - 30).abs().max() <= 30 * torch.finfo(dtype).eps


def test_fast_transformers_130_the_crossover_is_known() -> None:
    """ "Linear is slower than softmax": from which length it is not, by the very costs that are stated."""
    work = rg.Work(query_length=1024, key_length=1024, num_heads=4, num_kv_heads=4, mask=rg.causal)
    length = rg.crossover(rg.Softmax(), rg.Quadratic(), work)

    def flops(mechanism: rg.Mechanism, at: int) -> int:
        sized = rg.Work(query_length=at, key_length=at, num_heads=4, num_kv_heads=4, mask=rg.causal)
        return rg.cost(mechanism, sized).flops

    assert length is not None
    assert flops(rg.Quadratic(), length) < flops(rg.Softmax(), length)
    assert flops(rg.Quadratic(), length - 1) >= flops(rg.Softmax(), length - 1)


@pytest.mark.parametrize("name", KERNELS)
def test_performer_pytorch_85_attention_maps_of_linear_attention(name: str) -> None:
    """ "Attention maps are not possible" with linear attention: they are, exactly."""
    mechanism, (q, k, v) = PAIRS[name], inputs(30)
    weights = rg.weights(q, k, mechanism, rg.causal)
    assert (weights >= 0).all()
    assert close(weights, plain_weights(mechanism, q, k, lower(30, 30)))
    out = weights @ v.repeat_interleave(H // G, dim=1)
    assert close(out, rg.attend(q, k, v, mechanism, rg.causal, path="chunked" if mechanism.linear(K) else None))


def test_fast_transformers_128_there_is_nothing_to_compile() -> None:
    """A compiled extension did not build: the package is Python only."""
    files = [file for file in Path(rg.__file__).parent.rglob("*") if file.is_file()]
    sources = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".pyx", ".so", ".pyd"}
    assert files
    assert [file.name for file in files if file.suffix in sources] == []


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
