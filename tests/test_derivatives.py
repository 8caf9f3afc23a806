"""Derivatives of what a mechanism learns: second ones, third ones, and those of a stream."""

import pytest
import torch
from torch import nn

import regard as rg
from learned_mechanisms import Bilinear, make_tensors, small_kernel
from regard.core.families.features import FeatureMechanism
from regard.core.mechanisms import REGISTRY


@pytest.mark.parametrize("square", [True, False], ids=["grad of squares", "grad of a sum"])
@pytest.mark.parametrize(
    "name", [name for name in REGISTRY if isinstance(REGISTRY[name], FeatureMechanism)] + ["learned"]
)
def test_second_derivatives_of_sums_are_the_plain_formulas(name, square):
    mechanism = REGISTRY.get(name) or small_kernel()
    inputs = [*make_tensors(300), *mechanism.parameters()]
    second = []
    for path in ("chunked", "reference"):
        out = rg.attend(*inputs[:3], mechanism, rg.causal, path=path)
        first = torch.autograd.grad(out.square().sum() if square else out.sum(), inputs, create_graph=True)
        total = out.sum() + sum(grad.square().sum() for grad in first)
        second.append(torch.autograd.grad(total, inputs))
    for fast, plain in zip(*second, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-8, atol=1e-8 * float(plain.abs().max()))


def test_second_derivatives_through_layers_that_share_a_mechanism():
    torch.manual_seed(1)
    mechanism, x = small_kernel(), torch.randn(1, 2, 260, 4, dtype=torch.float64, requires_grad=True)
    second = []
    for path in ("chunked", "reference"):
        inner = rg.attend(x, x, x, mechanism, rg.causal, path=path)
        out = rg.attend(inner, inner.square(), x, mechanism, rg.causal, path=path)
        first = torch.autograd.grad(out.square().sum(), [x, *mechanism.parameters()], create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), [x, *mechanism.parameters()]))
    for fast, plain in zip(*second, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-8, atol=1e-8 * float(plain.abs().max()))


def test_second_derivatives_of_merged_parts_are_refused():
    q, k, v = make_tensors(5)
    (first,) = torch.autograd.grad(
        rg.attend(q[:, :, :2], k, v, mask=rg.causal, path="parts").sum(), q, create_graph=True
    )
    with pytest.raises(NotImplementedError, match=r"second derivatives .* path='reference'"):
        torch.autograd.grad(first.square().sum(), q)


SECOND = {
    "sdpa": (None, True),
    "sdpa causal": (rg.causal, True),
    "sdpa padded": (rg.padding([3]), True),
    "blocks": (rg.window(before=1), True),
    "reference": (rg.causal, False),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("of", [0, 1, 2], ids=["q", "k", "v"])
def test_second_derivatives_of_softmax_are_the_plain_formulas_or_refused(name, of):
    """PyTorch's kernels have none, and the error says what has. A gradient that is not derived again is no error."""
    tensors, (mask, refused) = make_tensors(5), SECOND[name]

    def first(path):
        out = rg.attend(*tensors, mask=mask, path=path)
        return torch.autograd.grad(out.square().sum(), tensors, create_graph=True)[of]

    actual, expected = first(name.split()[0]), first("reference")
    assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-12)
    if refused:
        with pytest.raises(NotImplementedError, match=r"^sdpa: second derivatives .* path='reference'$"):
            torch.autograd.grad(actual.square().sum(), tensors)
        return
    second, exact = (torch.autograd.grad(grad.square().sum(), tensors) for grad in (actual, expected))
    assert all(torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11) for mine, theirs in zip(second, exact, strict=True))


def test_third_derivatives_of_sums_are_refused():
    q, k, v = make_tensors(5)
    (first,) = torch.autograd.grad(rg.attend(q, k, v, rg.Elu(), path="chunked").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivatives"):
        torch.autograd.grad(first.square().sum(), q, create_graph=True)


@pytest.mark.parametrize("learns", ["a bias", "a module", "a parameter", "a capture"])
def test_a_stream_of_plain_tokens_derives_what_is_learned(learns):
    q, k, v = make_tensors(200, grad=False)
    parameter = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    mechanism, bias = rg.Softmax(), None
    if learns == "a bias":
        bias = parameter = nn.Parameter(torch.randn(200, 200, dtype=torch.float64))
    elif learns == "a module":
        mechanism = small_kernel()
        parameter = mechanism.parameters()[0]
    elif learns == "a parameter":
        mechanism = Bilinear(W=parameter, shift=torch.ones(1, dtype=torch.float64))
    else:
        mechanism = rg.Kernel(feature_map=lambda x: torch.nn.functional.softplus(x @ parameter))
    state = mechanism.start(batch=1, num_kv_heads=2, qk_length=4, value_length=4, capacity=200, dtype=torch.float64)
    parts = []
    for start in range(0, 200, 40):
        piece = slice(start, start + 40)
        rows = None if bias is None else bias[piece, : start + 40]
        out, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, mask=rg.causal, bias=rows)
        parts.append(out)
    whole = rg.attend(q, k, v, mechanism, rg.causal, bias=bias, path="reference")
    streamed = torch.cat(parts, 2)
    torch.testing.assert_close(streamed, whole)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.square().sum(), parameter)[0] for out in (streamed, whole)), rtol=1e-8, atol=1e-8
    )
