"""The laws on a CUDA device. Run by hand where there is one: `pytest -m gpu`."""

import re

import pytest
import torch

import regard as rg
from regard.core.laws.case import within_budget
from regard.core.mechanisms import REGISTRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEFT = torch.arange(300) >= torch.tensor([[40], [0]])
MASKS = {
    "none": None,
    "causal": rg.causal,
    "padding right": rg.padding([300, 90]),
    "padding left": rg.padding(valid=LEFT),
    "holes": rg.padding(valid=LEFT & (torch.arange(300) % 3 > 0)),
    "window": rg.window(before=5, after=2),
    "combined": rg.causal & rg.padding([300, 90]) & (rg.window(before=9) | rg.global_tokens(2)),
    "segments": rg.segments(torch.arange(300)[None] // 70),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", REGISTRY)
def test_cuda_agrees_with_the_cpu_reference(name, mask):
    mechanism, rule = REGISTRY[name], MASKS[mask]
    q, k, v = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8), torch.randn(2, 2, 300, 8)
    try:
        rg.explain(q, k, v, mechanism, rule)
    except ValueError as refused:
        pytest.skip(f"refused: {refused}")
    exact = rg.attend(q.double(), k.double(), v.double(), mechanism, rule, path="reference")
    leaves = [t.cuda().double().requires_grad_() for t in (q, k, v)]
    out = rg.attend(*leaves, mechanism, rule)
    torch.testing.assert_close(out.cpu(), exact, rtol=0, atol=1e-10)
    assert all(
        g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves, materialize_grads=True, allow_unused=True)
    )
    weights = rg.weights(*leaves[:2], mechanism, rule)
    torch.testing.assert_close(mechanism.mix(weights, leaves[2]).cpu(), mechanism.mix(weights.cpu(), v.double()))


@pytest.mark.parametrize("name", [name for name in REGISTRY if REGISTRY[name].streams(8) is None])
def test_cuda_streams_as_it_computes_whole(name):
    mechanism = REGISTRY[name]
    q, k, v = (torch.randn(2, heads, 300, 8, device="cuda", dtype=torch.float64) for heads in (4, 2, 2))
    rule = rg.causal & rg.padding(valid=LEFT)
    whole = rg.attend(q, k, v, mechanism, rule)
    state = mechanism.start(
        batch=2, num_kv_heads=2, qk_length=8, value_length=8, capacity=300, dtype=q.dtype, device="cuda"
    )
    for start in range(0, 300, 50):
        piece = slice(start, start + 50)
        seen = rg.causal & rg.padding(valid=LEFT[:, : start + 50])
        out, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, mask=seen)
        torch.testing.assert_close(out, whole[:, :, piece], rtol=0, atol=1e-10)


def test_half_precision_on_cuda_stays_finite():
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) * 30 for _ in range(3))
    for mechanism in REGISTRY.values():
        out = rg.attend(q, k, v, mechanism)
        assert out.isfinite().all(), mechanism


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_many_lengths_are_one_call(side, causal):
    lengths = torch.tensor([300, 0, 1, 299, 17, 150, 80, 200])
    place = torch.arange(300)
    valid = place < lengths[:, None] if side == "right" else place >= 300 - lengths[:, None]
    rule = rg.causal & rg.padding(valid=valid) if causal else rg.padding(valid=valid)
    q, k, v = (torch.randn(8, heads, 300, 16, dtype=torch.float64) for heads in (4, 2, 2))
    exact = [t.clone().requires_grad_() for t in (q, k, v)]
    leaves = [t.cuda().requires_grad_() for t in (q, k, v)]
    assert rg.explain(*leaves, mask=rule).path == "masked"
    out, expected = rg.attend(*leaves, mask=rule), rg.attend(*exact, mask=rule, path="reference")
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-10)
    ours, theirs = (
        torch.autograd.grad(result.square().sum(), tensors) for result, tensors in ((out, leaves), (expected, exact))
    )
    for actual, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=0, atol=1e-9)


def kernels(run):
    """The kinds of attention that SDPA took."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    return {
        event.key for event in profile.key_averages() if re.match("aten::_scaled_dot_product_.*_attention$", event.key)
    }


@pytest.mark.parametrize("groups", [8, 2])
def test_lengths_that_are_not_round_make_no_plans(groups):
    # Heads of at most 128 go by kernels of ours, which make no plans (test_gpu_softmax.py).
    q, k, v = (torch.randn(6, heads, 1000, 160, device="cuda", dtype=torch.bfloat16) for heads in (8, groups, groups))
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    assert kernels(lambda: rg.attend(q, k, v, mask=rg.causal)) == {"aten::_scaled_dot_product_flash_attention"}
    rule = rg.padding([1000, 900, 3, 70, 500, 1])
    assert rg.explain(q, k, v, mask=rule).path == "masked"
    assert kernels(lambda: rg.attend(q, k, v, mask=rule)) == {"aten::_scaled_dot_product_efficient_attention"}
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    exact = rg.attend(q.double(), k.double(), v.double(), mask=rule, path="reference")
    assert (rg.attend(q, k, v, mask=rule) - exact).norm() < 1e-2 * exact.norm()


FUSED = {
    "quadratic 64": (rg.Quadratic(), rg.causal, 1, 16, 16, 3000, 3000, 64, 64),
    "quadratic 32, grouped": (rg.Quadratic(), rg.causal, 2, 32, 16, 1500, 1500, 32, 32),
    "quadratic 40 and 33, T < S": (rg.Quadratic(), rg.causal, 1, 4, 2, 1000, 1700, 40, 33),
    "quadratic 128, T > S": (rg.Quadratic(), rg.causal, 2, 2, 2, 700, 600, 128, 128),
    "quadratic, not causal": (rg.Quadratic(), None, 2, 2, 1, 900, 1100, 64, 128),
    "quadratic 128, not causal": (rg.Quadratic(), None, 1, 2, 2, 900, 1100, 128, 128),
    "quadratic, padded": (rg.Quadratic(c=0.3), rg.causal & rg.padding([1100, 700, 0]), 3, 2, 1, 1100, 1100, 64, 64),
    "taylor": (rg.Taylor(), rg.causal, 1, 2, 2, 1700, 900, 32, 64),
    "elu": (rg.Elu(), rg.causal, 2, 8, 4, 3000, 3000, 64, 64),
    "elu 33 and 20, padded": (rg.Elu(), rg.causal & rg.padding([1100, 700, 0]), 3, 2, 1, 1100, 1100, 33, 20),
    "elu 128": (rg.Elu(), rg.causal, 2, 2, 2, 700, 600, 128, 128),
    "elu, not causal": (rg.Elu(), None, 2, 2, 2, 700, 600, 128, 128),
    "given": (rg.Kernel(feature_map=torch.relu), rg.causal, 2, 2, 1, 1500, 1500, 64, 32),
}


def fused_case(name, dtype):
    mechanism, rule, batch, heads, groups, queries, keys, length, value_length = FUSED[name]
    sizes = (heads, queries, length), (groups, keys, length), (groups, keys, value_length)
    return mechanism, rule, [torch.randn(batch, *size, device="cuda", dtype=dtype) for size in sizes]


def plain(mechanism, q, k, v, rule):
    """The plain formula: exact weights, rounded, times the values."""
    visible = None if rule is None else rule.visible(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).cuda()
    return mechanism.mix(mechanism.weigh(q, k, visible).to(q.dtype), v).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_keep_the_error_budget(name, dtype):
    mechanism, rule, tensors = fused_case(name, dtype)
    recorded = dtype != torch.float32
    leaves = [[t.to(kind).requires_grad_(recorded) for t in tensors] for kind in (dtype, torch.float64, dtype)]
    plan = rg.explain(*leaves[0], mechanism, rule)
    if "more than 64" in plan.rejected.get("fused", ""):
        pytest.skip(f"refused: {plan.rejected['fused']}")
    assert plan.path == "fused"
    outs = [rg.attend(*leaves[0], mechanism, rule), *(plain(mechanism, *inputs, rule) for inputs in leaves[1:])]
    within_budget("output", *outs)
    again = rg.attend(*leaves[0], mechanism, rule)
    assert torch.equal(outs[0], again)
    if recorded:
        grad = torch.randn_like(outs[0])
        grads = [torch.autograd.grad(out, inputs, grad.to(out.dtype)) for out, inputs in zip(outs, leaves, strict=True)]
        for letter, *results in zip("qkv", *grads, strict=True):
            within_budget(f"gradient of {letter}", *results, gradient=True)
        assert all(map(torch.equal, grads[0], torch.autograd.grad(again, leaves[0], grad)))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ["quadratic, padded", "elu 33 and 20, padded", "quadratic 64", "given"])
def test_fused_kernels_never_wait_for_the_gpu(name):
    mechanism, rule, tensors = fused_case(name, torch.bfloat16)
    leaves = [t.requires_grad_() for t in tensors]
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = rg.attend(*leaves, mechanism, rule)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["quadratic 64", "quadratic 32, grouped", "elu"])
def test_fused_kernels_leak_nothing_hidden_and_hide_nothing_seen(name):
    mechanism, rule, (q, k, v) = fused_case(name, torch.bfloat16)
    clean = rg.attend(q, k, v, mechanism, rule)
    k[:, :, 1200], v[:, :, 1201] = torch.nan, torch.inf
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = rg.attend(*leaves, mechanism, rule)
    torch.testing.assert_close(out[:, :, :1200], clean[:, :, :1200])
    assert not out[:, :, 1200:].isfinite().any()
    grads = torch.autograd.grad(out[:, :, :1200].float().sum(), leaves)
    assert all(grad.isfinite().all() and not grad[:, :, 1200:].any() for grad in grads)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, of torch
@pytest.mark.parametrize("mechanism", [rg.Quadratic(), rg.Elu()], ids=str)
def test_fused_kernels_in_one_compiled_graph_and_under_autocast(mechanism):
    tensors = [torch.randn(2, 4, 600, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def step(q, k, v):
        return rg.attend(q, k, v, mechanism, rg.causal)

    plainly, compiled = step(*tensors), torch.compile(step, fullgraph=True)(*tensors)
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(step(*tensors), plainly)
    assert torch.equal(compiled, plainly)
    ours, theirs = (torch.autograd.grad(out.float().square().sum(), tensors) for out in (compiled, plainly))
    assert all(map(torch.equal, ours, theirs))


STREAMED = {
    "quadratic 64": (rg.Quadratic(), 2, 8, 4, 64, 64),
    "quadratic 32": (rg.Quadratic(), 1, 32, 16, 32, 32),
    "quadratic 128": (rg.Quadratic(c=0.3), 1, 4, 1, 128, 128),
    "taylor 40 and 33": (rg.Taylor(), 2, 2, 2, 40, 33),
    "elu 64": (rg.Elu(), 2, 8, 4, 64, 64),
    "elu 33 and 20": (rg.Elu(), 2, 32, 1, 33, 20),
    "given": (rg.Kernel(feature_map=torch.relu), 2, 2, 1, 64, 32),
}
PIECES = [700, 1, 1, 60, 1, 1300, 1, 1]


def stream_case(name, dtype):
    mechanism, batch, heads, groups, length, value_length = STREAMED[name]
    sizes = (heads, length), (groups, length), (groups, value_length)
    q, k, v = (torch.randn(batch, h, sum(PIECES), size, device="cuda", dtype=dtype) for h, size in sizes)
    state = mechanism.start(
        batch=batch, num_kv_heads=groups, qk_length=length, value_length=value_length, dtype=dtype, device="cuda"
    )
    return mechanism, (q, k, v), state


def stream_all(mechanism, tensors, state, rule=None):
    outs, low = [], 0
    for count in PIECES:
        q, k, v = (t[:, :, low : low + count] for t in tensors)
        low += count
        out, state = mechanism.extend(q, k, v, state, mask=rg.causal if rule is None else rg.causal & rule(low))
        outs.append(out)
    return torch.cat(outs, 2), state


def left_padded(batch):
    begins = torch.tensor([0, 650])[:batch, None]
    return lambda length: rg.padding(valid=torch.arange(length) >= begins)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in STREAMED), ("quadratic 64", torch.float32), ("elu 64", torch.float32)],
    ids=str,
)
def test_streams_by_kernels_keep_the_error_budget(name, dtype):
    mechanism, tensors, state = stream_case(name, dtype)
    rule = left_padded(len(tensors[0]))
    with torch.no_grad():
        assert rg.explain(*tensors, mechanism, rg.causal).notes == (
            "a state is extended by such tokens by the kernels of `fused`",
        )
        out, last = stream_all(mechanism, tensors, state, rule)
        whole = rg.causal & rule(sum(PIECES))
        exact, half = (plain(mechanism, *(t.to(kind) for t in tensors), whole) for kind in (torch.float64, dtype))
    within_budget("output", out, exact, half)
    real = rule(last.folded).valid(last.folded, "cuda")[:, None, :, None]
    k, v = (t[:, :, : last.folded].double() for t in tensors[1:])
    sums = (mechanism.summed_features(k) * real).mT @ v
    assert (last.sums - sums).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * sums.norm()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ["quadratic 64", "elu 64"])
def test_streams_by_kernels_never_wait_for_the_gpu(name):
    mechanism, tensors, state = stream_case(name, torch.bfloat16)
    rule = left_padded(2)
    with torch.no_grad():
        out, _ = stream_all(mechanism, tensors, state, rule)  # tables that stay are copied, kernels compiled
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            again, _ = stream_all(mechanism, tensors, state, rule)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, again)


@pytest.mark.parametrize("name", ["quadratic 64", "elu 64", "given"])
def test_streams_by_kernels_leak_nothing_hidden_and_hide_nothing_seen(name):
    mechanism, (q, k, v), state = stream_case(name, torch.bfloat16)
    rule = left_padded(2)
    with torch.no_grad():
        clean, _ = stream_all(mechanism, (q, k, v), state, rule)
        k[1, :, 30], v[1, :, 640], v[0, :, 761] = torch.nan, torch.inf, torch.nan
        out, _ = stream_all(mechanism, (q, k, v), state, rule)
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[0, :, :761], clean[0, :, :761])
    assert out[0, :, 761:].isnan().all()
