"""Causal attention of new tokens over a history: parts merged by log-sum-exp are the whole, forward and backward."""

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.core.laws.case import exact_output, plain_output, within_budget
from regard.core.paths import torch_softmax

B, H, G = 2, 4, 2


def inputs(
    queries: int, keys: int, dtype: torch.dtype, groups: int = G, lengths: tuple[int, int] = (16, 16)
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((H, queries, lengths[0]), (groups, keys, lengths[0]), (groups, keys, lengths[1]))
    return [torch.randn(B, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def masks(keys: int) -> dict[str, rg.Mask]:
    place = torch.arange(keys)
    return {
        "causal": rg.causal,
        "left": rg.causal & rg.padding(valid=place >= torch.tensor([[keys // 3], [keys - 2]])),
        "right": rg.causal & rg.padding([keys, keys - 3]),
        "empty": rg.causal & rg.padding([keys, 0]),
    }


def run(compute, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = compute(*leaves)
    to = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, to)]


@pytest.mark.parametrize("mask", masks(9))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "groups", "lengths"),
    [(2, 9, 4, (16, 16)), (5, 70, 2, (5, 3)), (4, 60, 1, (8, 16)), (65, 300, 2, (16, 16)), (9, 5, 2, (4, 4))],
)
def test_parts_are_the_whole_with_gradients(queries, keys, groups, lengths, dtype, mask):
    tensors, rule = inputs(queries, keys, dtype, groups, lengths), masks(keys)[mask]
    assert rg.explain(*(t.clone().requires_grad_() for t in tensors), mask=rule).path == "parts"
    for mechanism in (rg.Softmax(), rg.Uniform()):
        results = run(lambda q, k, v, by=mechanism: rg.attend(q, k, v, by, rule), tensors)
        exact = run(lambda q, k, v, by=mechanism: exact_output(by, q, k, v, rule), [t.double() for t in tensors])
        plain = run(lambda q, k, v, by=mechanism: plain_output(by, q, k, v, rule), tensors)
        for name, result, good, rough in zip("oqkv", results, exact, plain, strict=True):
            within_budget(name, result, good, rough, gradient=name != "o")
        with torch.no_grad():
            out = rg.attend(*tensors, mechanism, rule, path="parts")
            within_budget("without gradients", out, exact[0], plain[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learns", [(True, True), (False, False)], ids=["with gradients", "without"])
def test_half_precision_is_widened_for_its_gradients_alone(dtype, learns):
    """PyTorch's CPU kernel is right forward in half precision, which takes half the memory."""
    recorded, required = learns
    for enabled, requires in ((True, required), (recorded, True)):
        q, k, v = (t.requires_grad_(requires) for t in inputs(5, 5, dtype))
        with torch.set_grad_enabled(enabled):
            *tensors, _ = torch_softmax.fitted(q, k, v, 0.25, 16)
            out = torch_softmax.plain(q, k, v, scale=0.25, is_causal=True)
        assert {t.dtype for t in tensors} == {torch.float32 if enabled and requires else dtype}
        assert out.dtype == dtype
        within_budget(
            "the output", out, *(form(rg.Softmax(), q, k, v, rg.causal) for form in (exact_output, plain_output))
        )


def test_second_order_is_refused():
    q, k, v = (t.requires_grad_() for t in inputs(2, 9, torch.float64))
    (grad,) = torch.autograd.grad(rg.attend(q, k, v, mask=rg.causal).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        grad.square().sum().backward()


def test_a_chat_in_turns_takes_parts_and_is_the_whole():
    mechanism, (q, k, v) = rg.Softmax(), inputs(40, 40, torch.float64)
    valid = torch.arange(40) >= torch.tensor([[0], [11]])
    whole = rg.attend(q, k, v, mask=rg.causal & rg.padding(valid=valid), path="reference")
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=16, value_length=16, capacity=40, dtype=torch.float64)
    for low, high in ((0, 13), (13, 15), (15, 40)):
        here, mask = slice(low, high), rg.causal & rg.padding(valid=valid[:, :high])
        out, state = mechanism.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, mask=mask)
        assert (out - whole[:, :, here]).abs().max() <= 1e-12
