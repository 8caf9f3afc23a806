"""Facts about each mechanism: its formula, its ends, its published form."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import regard as rg
from regard.core.laws.case import within_budget
from regard.core.mechanisms import REGISTRY
from regard.core.mechanisms.polynomial import FEW
from regard.core.paths import torch_softmax


def make(length=20, groups=2, size=8, value=8, dtype=torch.float64, keys=None):
    return (
        torch.randn(2, 4, length, size, dtype=dtype),
        torch.randn(2, groups, length if keys is None else keys, size, dtype=dtype),
        torch.randn(2, groups, length if keys is None else keys, value, dtype=dtype),
    )


def wide(tensor):
    return tensor.repeat_interleave(2, dim=1)


def test_softmax_is_torchs_sdpa():
    q, k, v = make()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(rg.attend(q, k, v, mask=rg.causal), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.3, 2.0, 50.0, 1e6, 1e30])
def test_softmax_at_any_beta_is_the_formula(beta):
    q, k, v = make()
    scores = q @ wide(k).transpose(-1, -2)
    scores = beta * (scores - scores.amax(-1, keepdim=True))
    torch.testing.assert_close(rg.attend(q, k, v, rg.Softmax(beta=beta)), scores.softmax(-1) @ wide(v))


def test_the_continuum_ends_in_argmax_and_uniform():
    q, k, _ = make()
    torch.testing.assert_close(rg.weights(q, k, rg.Softmax(beta=1e9)), rg.weights(q, k, rg.Argmax()))
    torch.testing.assert_close(rg.weights(q, k, rg.Softmax(beta=1e-15)), rg.weights(q, k, rg.Uniform()))
    assert rg.Argmax() == rg.Softmax(beta=math.inf)
    assert rg.Uniform() == rg.Softmax(beta=0.0)


def test_argmax_on_the_worked_example():
    q = torch.tensor([[[[1.0, 1.0, 2.0]]]])
    k = torch.tensor([[[[1.0, 2, 0], [0, 3, 4], [5, 0, 0], [0, 0, 1]]]])
    v = torch.tensor([[[[2.0, 0, 1], [1, 4, 3], [0, -1, 4], [1, 0, -1]]]])
    assert rg.attend(q, k, v, rg.Argmax()).flatten().tolist() == [1, 4, 3]


def test_argmax_ties_share_equally_under_a_mask():
    q = torch.ones(1, 1, 4, 1)
    k = torch.tensor([3.0, 1.0, 3.0, 3.0]).view(1, 1, 4, 1)
    expected = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [1 / 2, 0, 1 / 2, 0], [1 / 3, 0, 1 / 3, 1 / 3]])
    torch.testing.assert_close(rg.weights(q, k, rg.Argmax(), rg.causal)[0, 0], expected)


def test_hard_attention_gives_queries_and_keys_no_gradient():
    q, k, v = (t.requires_grad_() for t in make())
    rg.attend(q, k, v, rg.Argmax(), rg.causal).sum().backward()
    assert all(t.grad is None or t.grad.abs().sum() == 0 for t in (q, k))
    assert v.grad.abs().sum() > 0


def test_softcap_bends_the_scores():
    q, k, v = make()
    scores = 5 * torch.tanh(q @ wide(k).transpose(-1, -2) / math.sqrt(8) / 5)
    torch.testing.assert_close(rg.attend(q, k, v, rg.Softmax(softcap=5.0)), scores.softmax(-1) @ wide(v))


@pytest.mark.parametrize("shape", [(), (20,), (20, 20), (1, 20, 1), (4, 1, 20), (2, 4, 20, 20), (2, 1, 1, 20)], ids=str)
@pytest.mark.parametrize("mask", [None, rg.causal, rg.window(before=3, after=2)], ids=repr)
def test_a_bias_is_added_to_the_scores(mask, shape):
    q, k, v = make()
    bias = torch.randn(shape, dtype=torch.float64)
    scores = q @ wide(k).transpose(-1, -2) / math.sqrt(8) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask.visible(2, 4, 20, 20), -math.inf)
    expected = scores.softmax(-1) @ wide(v)
    torch.testing.assert_close(rg.attend(q, k, v, mask=mask, bias=bias), expected)
    torch.testing.assert_close(rg.weights(q, k, mask=mask, bias=bias) @ wide(v), expected)


def test_a_bias_of_minus_infinity_hides_and_an_empty_row_gives_zero():
    q, k, v = (t.requires_grad_() for t in make())
    bias = torch.zeros(20, 20, dtype=torch.float64)
    bias[3] = -math.inf
    bias[5, 7:] = -math.inf
    out = rg.attend(q, k, v, bias=bias)
    hidden = rg.attend(q, k, v, mask=rg.dense(bias > -math.inf))
    torch.testing.assert_close(out, hidden)
    assert out[:, :, 3].abs().sum() == 0
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_a_bias_learns():
    q, k, v = make()
    bias = torch.zeros(4, 20, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: rg.attend(q, k, v, mask=rg.causal, bias=b), bias, fast_mode=True)


@pytest.mark.parametrize("queries", [5, FEW + 1])  # gathered, and in blocks
@pytest.mark.parametrize("size", [1, 4, 16, 17, 33, 64])
@pytest.mark.parametrize("mechanism", [rg.Quadratic(), rg.Quadratic(c=0.5), rg.Quadratic(c=0), rg.Taylor()], ids=repr)
def test_score_form_feature_form_and_summed_form_are_equal(mechanism, size, queries):
    q, k = torch.randn(queries, size, dtype=torch.float64), torch.randn(7, size, dtype=torch.float64)
    expected = mechanism.similarity(q, k)
    torch.testing.assert_close(mechanism.features(q) @ mechanism.features(k).T, expected)
    torch.testing.assert_close(mechanism.summed_features(q) @ mechanism.summed_features(k).T, expected)
    room = torch.full((queries * mechanism.summed_length(size),), math.nan, dtype=torch.float64)
    assert torch.equal(mechanism.summed_features(q, room), mechanism.summed_features(q))
    assert mechanism.features(q).shape[-1] == mechanism.feature_length(size) == (size + 1) * (size + 2) // 2
    assert mechanism.summed_length(size) == mechanism.summed_features(q).shape[-1]


def test_the_blocks_round_the_features_up_only_a_little():
    lengths = {
        size: (rg.Quadratic().feature_length(size), rg.Quadratic().summed_length(size)) for size in (32, 64, 128)
    }
    assert lengths == {32: (561, 801), 64: (2145, 2369), 128: (8385, 8833)}


@pytest.mark.parametrize("degree", [2, 4, 6])
def test_polynomial_features_are_exact(degree):
    q, k = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    mechanism = rg.Polynomial(degree=degree, c=0.7)
    torch.testing.assert_close(mechanism.features(q) @ mechanism.features(k).T, (q @ k.T + 0.7) ** degree)


def test_a_polynomial_with_too_many_features_keeps_the_score_form():
    q, k, v = make(300, size=32)
    mechanism = rg.Polynomial(degree=4)
    plan = rg.explain(q, k, v, mechanism, rg.causal)
    assert plan.path == "blocks"
    assert "58,905 features" in plan.rejected["chunked"]
    state = mechanism.start(batch=2, num_kv_heads=2, qk_length=32, value_length=8, capacity=300, dtype=q.dtype)
    out, _ = mechanism.extend(q, k, v, state, mask=rg.causal & rg.window(before=20))
    torch.testing.assert_close(out, rg.attend(q, k, v, mechanism, rg.causal & rg.window(before=20)))


def test_a_quadratic_row_of_zero_similarity_gives_zero_not_nan():
    q = torch.ones(1, 1, 1, 4, requires_grad=True)
    k = torch.full((1, 1, 3, 4), -0.25, requires_grad=True)  # q·k = -1
    out = rg.attend(q, k, torch.randn(1, 1, 3, 2), rg.Quadratic())
    assert out.abs().sum() == 0
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k))


def test_random_features_approach_softmax():
    q, k, v = make(length=30)
    q, k = q / 2, k / 2
    exact = rg.attend(q, k, v)
    off = [(rg.attend(q, k, v, rg.RandomFeatures(n=n)) - exact).abs().mean().item() for n in (16, 256, 4096)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.03


def test_random_features_are_the_seeds():
    x = torch.randn(3, 8)
    assert torch.equal(rg.RandomFeatures(seed=1).features(x), rg.RandomFeatures(seed=1).features(x))
    assert not torch.equal(rg.RandomFeatures(seed=1).features(x), rg.RandomFeatures(seed=2).features(x))


@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([600, 90]), rg.causal & rg.padding([600, 90])], ids=repr)
def test_a_learned_feature_map_learns_the_same_as_in_the_plain_formula(mask):
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(8, 6, dtype=torch.float64), torch.nn.Softplus())
    mechanism = rg.Kernel(feature_map=module)
    tensors = [t.requires_grad_() for t in make(600)]
    by_path = {}
    for path in ("chunked", "reference"):
        out = rg.attend(*tensors, mechanism, mask, path=path)
        by_path[path] = torch.autograd.grad(out.square().sum(), [*tensors, *module.parameters()])
    for fast, plain in zip(by_path["chunked"], by_path["reference"], strict=True):
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize(("scale", "roles"), [("tokens", "qkv"), ("channels", "kvq")])
def test_channel_is_davits_in_both_published_conventions(scale, roles):
    q, k, v = (torch.randn(2, 3, 49, 8, dtype=torch.float64) for _ in range(3))
    if scale == "tokens":
        expected = torch.softmax((q * 49**-0.5).transpose(-1, -2) @ k, -1) @ v.transpose(-1, -2)
    else:
        expected = torch.softmax((k * 8**-0.5).transpose(-1, -2) @ v, -1) @ q.transpose(-1, -2)
    by_role = {"q": q, "k": k, "v": v}
    out = rg.attend(*(by_role[role] for role in roles), rg.Channel(scale=scale))
    torch.testing.assert_close(out, expected.transpose(-1, -2))


@pytest.mark.parametrize(
    ("mask", "path"),
    [
        (None, "sdpa"),
        (rg.causal, "sdpa"),
        (rg.padding([300, 7]), "sdpa"),
        (rg.causal & rg.padding([300, 7]), "sdpa"),
        (rg.causal & rg.window(before=9), "blocks"),
        (rg.global_tokens(2) | rg.window(before=3), "blocks"),
        (rg.dense(torch.ones(300, 300, dtype=torch.bool)), "blocks"),
    ],
    ids=repr,
)
def test_the_choice_of_path_for_softmax(mask, path):
    q, k, v = make(300, size=6, value=6, dtype=torch.float32)  # no length of our machine code
    plan = rg.explain(q, k, v, mask=mask)
    assert plan.path == path
    assert set(plan.rejected) == {other.name for other in rg.Softmax().paths()} - {path}
    assert all(plan.rejected.values())


@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([300, 7]), rg.causal & rg.padding([300, 7])], ids=repr)
def test_a_known_structure_never_becomes_a_dense_mask(mask, monkeypatch):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch_softmax.F, "scaled_dot_product_attention", lambda *a, **o: seen.append(o) or real(*a, **o)
    )
    rg.attend(*make(300), mask=mask)
    assert seen
    assert all(options.get("attn_mask") is None for options in seen)


def test_explain_needs_no_numbers():
    q = k = v = torch.empty(1, 8, 1 << 20, 64, device="meta")
    assert rg.explain(q, k, v, rg.Quadratic(), rg.causal).path == "chunked"


def test_the_plan_reads_well():
    q, k, v = make(300, size=6, value=6, dtype=torch.float32)
    text = str(rg.explain(q, k, v, mask=rg.causal & rg.window(before=9)))
    assert "path       blocks" in text
    assert "not        sdpa       a window would need a dense mask" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Quadratic(), rg.Elu()], ids=repr)
def test_long_sequences_stay_within_the_error_budget(mechanism, dtype):
    q, k, v = (t[:1].to(dtype) for t in make(2000, dtype=torch.float64))
    exact = rg.attend(q.double(), k.double(), v.double(), mechanism, rg.causal, path="reference")
    plain = mechanism.mix(rg.weights(q, k, mechanism, rg.causal), v)
    within_budget("a long sequence", rg.attend(q, k, v, mechanism, rg.causal), exact, plain)


LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 193, 255, 256, 257, 511, 513)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Argmax(), rg.Quadratic(), rg.Elu(), rg.Taylor()], ids=repr)
def test_whole_and_streamed_agree_at_the_edges_of_chunks(mechanism, length):
    q, k, v = make(length)
    exact = rg.attend(q, k, v, mechanism, rg.causal, path="reference")
    torch.testing.assert_close(rg.attend(q, k, v, mechanism, rg.causal), exact, rtol=0, atol=1e-12)
    for size in (1, 64, 100):
        state = mechanism.start(batch=2, num_kv_heads=2, qk_length=8, value_length=8, capacity=length, dtype=q.dtype)
        for start in range(0, length, size):
            piece = slice(start, start + size)
            out, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, mask=rg.causal)
            torch.testing.assert_close(out, exact[:, :, piece], rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [100, 600])
@pytest.mark.parametrize("name", REGISTRY)
def test_autocast_changes_nothing(name, length):
    mechanism, mask = REGISTRY[name], None if name.startswith("channel") else rg.causal
    tensors = [t.requires_grad_() for t in make(length, dtype=torch.float32)]

    def gradients(out):
        return torch.autograd.grad(out.sum(), tensors, allow_unused=True, materialize_grads=True)

    expected = rg.attend(*tensors, mechanism, mask)
    with torch.autocast("cpu", torch.bfloat16):
        out = rg.attend(*tensors, mechanism, mask)
        weights = rg.weights(*tensors[:2], mechanism, mask)
    assert torch.equal(out, expected)
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(gradients(out), gradients(expected), strict=True))
    assert torch.equal(weights, rg.weights(*tensors[:2], mechanism, mask))


def test_a_stream_under_autocast_is_the_stream():
    q, k, v = make(300, dtype=torch.float32)
    for mechanism in (rg.Softmax(), rg.Quadratic()):
        start = dict(batch=2, num_kv_heads=2, qk_length=8, value_length=8, capacity=300)
        expected, _ = mechanism.extend(q, k, v, mechanism.start(**start), mask=rg.causal)
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = mechanism.extend(q, k, v, mechanism.start(**start), mask=rg.causal)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_learned_feature_map_serves_inputs_of_any_dtype(dtype):
    mechanism = rg.Kernel(feature_map=torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Softplus()).to(dtype))
    q, k, v = make(300, dtype=torch.float32)
    out = rg.attend(q, k, v, mechanism, rg.causal)
    assert out.dtype == torch.float32
    assert (out - rg.attend(q, k, v, mechanism, rg.causal, path="reference")).abs().max() < 0.02
    assert rg.attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mechanism, rg.causal).isfinite().all()


def test_a_feature_map_on_another_device_is_measured_there():
    module = torch.nn.Linear(8, 6, device="meta")
    assert rg.Kernel(feature_map=module).feature_length(8) == 6


def test_a_nan_bias_in_a_row_that_sees_nothing_spoils_no_gradient():
    q, k, v = (t.requires_grad_() for t in make())
    bias = torch.zeros(20, 20, dtype=torch.float64)
    bias[3] = math.nan
    hidden = torch.ones(20, 20, dtype=torch.bool)
    hidden[3] = False
    out = rg.attend(q, k, v, mask=rg.dense(hidden), bias=bias)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_channel_weights_show_a_nan_that_attend_shows():
    q, k, v = make()
    k[0, 0, 3] = math.nan
    for mask in (None, rg.padding([20, 10])):
        assert rg.weights(q, k, rg.Channel(), mask)[0, :2].isnan().all()
        assert rg.attend(q, k, v, rg.Channel(), mask)[0, :2].isnan().all()
    assert rg.weights(q, k, rg.Channel(), rg.padding([3, 10])).isfinite().all()


@pytest.mark.filterwarnings("ignore:There is a performance drop because")  # torch's kernel has no batching rule
def test_causal_softmax_can_be_mapped_over_queries():
    q, k, v = make(6)
    mapped = torch.func.vmap(lambda query: rg.attend(query, k, v, mask=rg.causal))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(mapped[1], rg.attend(2 * q, k, v, mask=rg.causal))


def test_a_changed_part_of_softmax_is_not_passed_by():
    """PyTorch's kernels compute the formula as it was."""

    class Sharp(rg.Softmax):
        def scale(self, qk_length):
            return 5.0

    q = k = v = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    assert torch.allclose(rg.attend(q, k, v, Sharp()), rg.weights(q, k, Sharp()) @ v)
    assert torch.allclose(rg.attend(q, k, v, Sharp()), rg.attend(q, k, v, rg.Softmax(beta=5.0)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"__annotations__": {"scale": float}, "scale": 1.0}, "expected a field of another name than 'scale'"),
        ({"__annotations__": {"ordered": bool}, "ordered": True}, "expected a field of another name than 'ordered'"),
        ({"__init__": lambda self: None}, "expected fields, as of a dataclass, got an __init__"),
    ],
)
def test_a_class_that_would_be_misunderstood_is_refused_when_it_is_made(body, message):
    with pytest.raises(TypeError, match=message):
        type("Mine", (rg.ScoreMechanism,), body)


@pytest.mark.parametrize("name", ["features", "similarity"])
def test_a_shipped_kernel_keeps_its_formula(name):
    """Its faster forms would go on with the old one."""
    with pytest.raises(TypeError, match=r"Mine: expected to inherit from rg\.FeatureMechanism"):
        type("Mine", (rg.Quadratic,), {name: lambda self, *x: x[0]})


def test_mechanisms_with_arrays_are_compared():
    @dataclass(frozen=True, kw_only=True)
    class Table(rg.Mechanism):
        values: Any

    table = np.ones(3)
    assert Table(values=table) == Table(values=table)
    assert Table(values=table) != Table(values=np.ones(3))
