"""Projections and norms: every product agrees with torch's, and is counted."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.core import cpu
from regard.models.layers import linear as linear_file
from regard.models.layers.linear import (
    Linear,
    by_machine_code,
    by_onednn,
    lay_together,
    linear,
    projections,
    recorded_by_onednn,
)
from regard.models.layers.network import RMSNorm


@pytest.mark.parametrize("missing", [None, "no machine code"])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 128, 129])
def test_every_product_agrees_and_is_counted(monkeypatch, rows, missing):
    monkeypatch.setattr(cpu, "missing", cpu.missing if missing is None else lambda: missing)
    monkeypatch.setattr(cpu, "SLOW_BLAS", False)
    x, layer = torch.randn(2, rows, 512), Linear(512, 8192)
    with torch.no_grad():
        assert by_machine_code(x, layer.weight) == (rows <= 4 and cpu.missing() is None)
        assert by_onednn(x, layer.weight) == (rows <= 128 and cpu.MAY_COMPILE)
        with FlopCounterMode(display=False) as counter:
            out = layer(x)
    assert counter.get_total_flops() == 2 * 2 * rows * 512 * 8192
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    plain = F.linear(x, layer.weight, layer.bias)
    assert (out - exact).abs().max() <= 4 * (plain - exact).abs().max() + 1e-6
    for by in (by_machine_code, by_onednn):  # they have no gradient
        assert not by(x, layer.weight)
        assert not by(x.double(), layer.weight.double())
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.fixture
def slow_blas(monkeypatch):
    """As where BLAS multiplies at half the CPU's rate."""
    monkeypatch.setattr(cpu, "SLOW_BLAS", True)


@pytest.mark.skipif(not cpu.MAY_COMPILE, reason="oneDNN cannot run here")
@pytest.mark.parametrize("frozen", [None, "x", "weight", "bias"])
@pytest.mark.parametrize(("rows", "width", "size"), [(128, 192, 512), (200, 512, 96), (3, 1024, 1024)])
def test_where_blas_is_slow_onednn_computes_outputs_and_gradients(slow_blas, rows, width, size, frozen):
    x, layer = torch.randn(2, rows, width), Linear(width, size, bias=frozen != "bias")
    grad = torch.randn(size, 2, rows).permute(1, 2, 0)
    x.requires_grad_(frozen != "x")
    layer.weight.requires_grad_(frozen != "weight")
    leaves = [leaf for leaf in (x, layer.weight, layer.bias) if leaf is not None and leaf.requires_grad]
    assert recorded_by_onednn(x, layer.weight)
    with torch.profiler.profile() as profile:
        out = layer(x)
        grads = torch.autograd.grad(out, leaves, grad)
    products = sum(event.count for event in profile.key_averages() if event.key == "mkldnn::_linear_pointwise")
    assert products == 1 + (frozen != "x") + (frozen != "weight")
    with torch.no_grad():
        assert torch.equal(layer(x), out), "the same with and without gradients"
    with FlopCounterMode(display=False) as counter:
        layer(x).backward(grad)
    assert counter.get_total_flops() == products * 2 * 2 * rows * width * size
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    bias = exact[-1] if layer.bias is not None else None
    x64, weight64 = exact[0] if frozen != "x" else x.double(), layer.weight.double()
    if frozen != "weight":
        weight64 = exact[1] if frozen != "x" else exact[0]
    out64 = F.linear(x64, weight64, bias)
    for ours, wanted in zip((out, *grads), (out64, *torch.autograd.grad(out64, exact, grad.double())), strict=True):
        assert (ours - wanted).abs().max() <= 3e-6 * wanted.abs().max()


class Shell(torch.Tensor):
    """A subclass of a user's."""


@pytest.mark.skipif(not cpu.MAY_COMPILE, reason="oneDNN cannot run here")
def test_onednn_gets_dense_matrices_only_and_reads_a_bias_as_it_is(slow_blas, monkeypatch):
    wide, dense = torch.randn(256, 2048), []

    def watched(x, weight, bias, *others):
        dense.append((weight.is_contiguous() or weight.t().is_contiguous()) and (bias is None or bias.is_contiguous()))
        return onednn(x, weight, bias, *others)

    onednn = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(linear_file, "_onednn", watched)
    for x in (wide[:, :512], wide[:, ::4], wide[:1, :512].expand(256, 512), torch.randn(2, 512, 128).mT):
        for bias in (None, torch.arange(1024.0)[::2], torch.ones(1).expand(512), torch.ones(1), torch.ones(512)):
            weight = torch.randn(512, 512)
            leaves = [x.detach().requires_grad_(), weight.requires_grad_()]
            out, exact = linear(*leaves, bias), F.linear(*leaves, bias)
            assert (out - exact).abs().max() < 1e-3
            for ours, plain in zip(
                torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(exact.sum(), leaves), strict=True
            ):
                assert (ours - plain).abs().max() <= 1e-4 * plain.abs().max()
    assert dense == [True] * 48
    x, weight = torch.randn(256, 512), torch.randn(512, 512)
    assert recorded_by_onednn(x, weight)
    assert recorded_by_onednn(x, weight.t())
    for other in (torch.randn(512, 1024)[:, ::2], torch.randn(512, 1024)[:, :512], weight.as_subclass(Shell)):
        assert not recorded_by_onednn(x, other)
    torch.backends.mkldnn.enabled = False
    try:
        assert not recorded_by_onednn(x, weight)
    finally:
        torch.backends.mkldnn.enabled = True
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x[:, :300], weight)


@pytest.mark.skipif(not cpu.MAY_COMPILE, reason="oneDNN cannot run here")
def test_what_no_gradient_needs_is_not_kept(slow_blas):
    x, weight = torch.randn(256, 512), torch.randn(512, 512)
    for for_x in (False, True):
        for for_weight in (False, True):
            kept = []

            def keep(tensor, kept=kept):
                kept.append(tuple(tensor.shape))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, torch.Tensor.detach):
                linear(x.clone().requires_grad_(for_x), weight.clone().requires_grad_(for_weight))
            assert sorted(kept) == [(256, 512)] * for_weight + [(512, 512)] * for_x


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_where_blas_is_slow_other_derivatives_take_torchs_product(slow_blas):
    layer, x = Linear(512, 512), torch.randn(16, 512, requires_grad=True)
    assert recorded_by_onednn(x, layer.weight)
    assert not recorded_by_onednn(x[:4], layer.weight), "too small"
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    out = layer(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros_like(out), torch.ones_like(out))
        (grad,) = torch.autograd.grad(out, x, dual)
        tangent = forward_ad.unpack_dual(grad).tangent
    assert (tangent - layer.weight.sum(0)).abs().max() < 1e-4
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    wanted = 2 * layer.weight.detach().sum(1) @ layer.weight.detach()
    assert (second - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    rows = torch.randn(3, 16, 512)
    outs = torch.autograd.grad(layer(x), (x, layer.weight), rows, is_grads_batched=True, retain_graph=True)
    for at, row in enumerate(rows):
        for mapped, alone in zip(outs, torch.autograd.grad(layer(x), (x, layer.weight), row), strict=True):
            assert (mapped[at] - alone).abs().max() <= 1e-5 * alone.abs().max()
    state = dict(layer.named_parameters())
    mapped = torch.func.vmap(torch.func.grad(lambda x: torch.func.functional_call(layer, state, (x,)).sum()))(rows)
    assert (mapped - layer.weight.sum(0)).abs().max() < 1e-4
    assert (torch.compile(layer, backend="eager", fullgraph=True)(x) - layer(x)).abs().max() < 1e-5


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 576, 576), (2, 1536, 192), (3, 1008, 777), (4, 1024, 99)])
def test_few_rows_are_multiplied_in_machine_code_within_the_budget(rows, width, size, bias):
    layer = Linear(width, size, bias=bias)
    x = torch.randn(1, rows, width)
    with torch.no_grad():
        assert by_machine_code(x, layer.weight) == (width * size >= 100_000)
        out, plain = layer(x), F.linear(x, layer.weight, layer.bias)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
        x[0, 0, 5] = torch.nan
        bad = layer(x)[0].isnan()
    assert bad[0].all()
    assert not bad[1:].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its jvp
def test_derivatives_and_transforms_take_torchs_product():
    layer, x = Linear(512, 512), torch.randn(1, 512)
    with torch.no_grad():
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x))))
        assert (out.tangent - layer.weight.sum(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_row_has_its_own_dtype_whatever_the_default_is(dtype):
    layer, norm, x = Linear(512, 512), RMSNorm(512, 1e-8), torch.randn(1, 1, 512) * 1e-4
    with torch.no_grad():
        expected, scaled = layer(x), norm(x)
        torch.set_default_dtype(dtype)
        try:
            outs = layer(x), norm(x)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(outs[0], expected)
    assert torch.equal(outs[1], scaled)


def test_a_norm_without_gradients_is_the_formula():
    norm, x = RMSNorm(64, 1e-5), torch.randn(3, 7, 64) * torch.logspace(-4, 4, 7)[:, None]
    torch.nn.init.normal_(norm.weight)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    with torch.no_grad():
        out = norm(x)
    assert ((out - exact).norm(dim=-1) < 3e-7 * exact.norm(dim=-1)).all()


def test_projections_map_over_a_batch_of_single_rows():
    layer, x = Linear(512, 512), torch.randn(3, 1, 512)
    with torch.no_grad():
        assert (torch.func.vmap(layer)(x) - layer(x)).abs().max() < 1e-5


@pytest.mark.parametrize("by", ["compile", "export", "vmap", "fake"])
@torch.no_grad()
def test_a_layer_without_bias_is_traced_and_transformed_where_no_gradient_is_recorded(by):
    layer, x = rg.MultiHeadAttention(32, 4, bias=False), torch.randn(2, 5, 32)
    if by == "compile":
        out = torch.compile(layer, backend="eager", fullgraph=True)(x)
    elif by == "export":
        out = torch.export.export(layer, (x,)).module()(x)
    elif by == "vmap":
        many = {name: torch.stack([weight, weight]) for name, weight in layer.named_parameters()}
        out = torch.vmap(lambda weights: torch.func.functional_call(layer, weights, (x,)))(many)[1]
    else:
        with FakeTensorMode():
            assert rg.MultiHeadAttention(32, 4, bias=False)(torch.randn(2, 5, 32)).shape == x.shape
        return
    torch.testing.assert_close(out, layer(x))


def test_projections_of_one_input_are_one_product_once_their_weights_lie_together():
    layers = [Linear(1024, size, bias=False) for size in (1024, 512, 512)]
    values = [layer.weight.clone() for layer in layers]
    x = torch.randn(1, 1024)

    def products():
        with torch.no_grad(), torch.profiler.profile() as profile:
            outs = projections(x, *layers)
        for out, layer in zip(outs, layers, strict=True):
            assert (out - F.linear(x, layer.weight)).abs().max() < 1e-5
        return sum(
            event.count
            for event in profile.key_averages()
            if event.key in ("regard::linear", "mkldnn::_linear_pointwise")
        )

    before = products()
    lay_together(*layers)
    assert all(torch.equal(layer.weight, value) for layer, value in zip(layers, values, strict=True))
    assert (before, products()) == (3, 1)
    called = []
    layers[1].register_forward_hook(lambda *_: called.append(1))
    assert products() == 3
    assert called == [1], "a layer that somebody watches runs by itself"
    layers[0].weight.data = values[0]
    layers[1]._forward_hooks.clear()
    assert products() == 3
    projections(x, *layers)[2].sum().backward()
    assert layers[2].weight.grad is not None
