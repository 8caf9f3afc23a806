"""The laws on a CUDA device. Run by hand where there is one: `pytest -m gpu`."""

import re

import pytest
import torch

import regard as rg
from regard.mechanisms import REGISTRY

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
    found = rg.weights(*leaves[:2], mechanism, rule)
    torch.testing.assert_close(mechanism.mix(found, leaves[2]).cpu(), mechanism.mix(found.cpu(), v.double()))


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
    ours, theirs = (torch.autograd.grad(one.square().sum(), given) for one, given in ((out, leaves), (expected, exact)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-9)


def kernels(run):
    """The kinds of attention that SDPA took."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        run()
    return {one.key for one in found.key_averages() if re.match("aten::_scaled_dot_product_.*_attention$", one.key)}


@pytest.mark.parametrize("groups", [8, 2])
def test_lengths_that_are_not_round_make_no_plans(groups):
    q, k, v = (torch.randn(6, heads, 1000, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, groups, groups))
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    assert kernels(lambda: rg.attend(q, k, v, mask=rg.causal)) == {"aten::_scaled_dot_product_flash_attention"}
    rule = rg.padding([1000, 900, 3, 70, 500, 1])
    assert rg.explain(q, k, v, mask=rule).path == "masked"
    assert kernels(lambda: rg.attend(q, k, v, mask=rule)) == {"aten::_scaled_dot_product_efficient_attention"}
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    exact = rg.attend(q.double(), k.double(), v.double(), mask=rule, path="reference")
    assert (rg.attend(q, k, v, mask=rule) - exact).norm() < 1e-2 * exact.norm()
