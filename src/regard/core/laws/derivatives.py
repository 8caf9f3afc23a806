"""Laws of derivatives: those of every path, of what is learned, and second ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from regard.core.attention import attend
from regard.core.calls.call import Call
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import Broken, Case, Triple, apply, error, exact_output, plain_output, within_budget
from regard.core.laws.streams import causal_rule, pieces, start, stream
from regard.core.masks.structure import FOREVER, structure_of


def finite_gradients(out: Tensor, inputs: tuple[Tensor, ...], to: Tensor | None = None) -> list[Tensor]:
    """Gradients of an output by queries, keys and values; Broken if one is not finite."""
    grads = torch.autograd.grad(
        out, inputs, torch.ones_like(out) if to is None else to, allow_unused=True, materialize_grads=True
    )
    for name, grad in zip("qkv", grads, strict=True):
        if not bool(grad.isfinite().all()):
            raise Broken(f"the gradient of {name} is not finite")
    return list(grads)


def differentiable(mechanism: Mechanism, case: Case) -> None:
    """Gradients are those of finite differences."""
    q, k, v = (t.requires_grad_() for t in case.tensors())
    if 0 in (case.batch, case.queries, case.keys):
        return
    rule = case.rule()
    try:
        torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mechanism, rule), (q, k, v), fast_mode=True)
    except GradcheckError as wrong:
        raise Broken(f"gradcheck fails: {str(wrong).splitlines()[0]}") from None


def double_only(mechanism: Mechanism, case: Case) -> str | None:
    """Why derivatives are not compared in the dtype of a case; None in float64."""
    return (
        None if case.kind == torch.float64 else "derivatives are compared in float64; the law of paths covers the rest"
    )


def paths_agree(mechanism: Mechanism, case: Case) -> None:
    """Every path gives the output and gradients of the plain formula."""
    rule = case.rule()

    def run(compute: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        leaves = tuple(t.detach().clone().requires_grad_() for t in tensors)
        out = compute(*leaves)
        to = torch.randn(out.shape, generator=case.generator, dtype=torch.float64).to(out)
        return [out.detach(), *finite_gradients(out, leaves, to)]

    tensors = case.tensors()
    exact = run(lambda q, k, v: exact_output(mechanism, q, k, v, rule), *(t.double() for t in tensors))
    plain = run(lambda q, k, v: plain_output(mechanism, q, k, v, rule), *tensors)
    call = Call(mechanism, *apply(lambda t: t.detach().requires_grad_(), tensors), rule)
    for path in mechanism.paths():
        if path.cannot(call) is not None:  # paths without a backward pass are covered by the laws without gradients
            continue
        results = run(lambda q, k, v, name=path.name: attend(q, k, v, mechanism, rule, path=name), *tensors)
        for what, result, good, rough in zip(("output", "q", "k", "v"), results, exact, plain, strict=True):
            name = f"path {path.name!r}: " + (what if what == "output" else f"the gradient of {what}")
            within_budget(name, result, good, rough, gradient=what != "output")


def learned(mechanism: Mechanism, case: Case) -> None:
    """What is learned gets the plain formula's gradient in every path and streamed."""
    if 0 in (case.batch, case.queries, case.keys):
        return
    q, k, v = _short(case)
    streams = mechanism.streams(case.qk_length, structure_of(causal_rule(case), FOREVER, FOREVER)) is None
    rule = causal_rule(case) if streams else case.rule()
    term = torch.randn(case.queries, case.keys, generator=case.generator, dtype=case.kind).to(q).requires_grad_()
    bias = term if mechanism.refuses(Call(mechanism, q, k, v, rule, term)) is None else None
    learned = (*mechanism.parameters(), *(() if bias is None else (bias,)))
    call = Call(mechanism, q, k, v, rule, bias)
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        f"path {path.name!r}": partial(attend, mechanism=mechanism, mask=rule, bias=bias, path=path.name)
        for path in mechanism.paths()
        if path.cannot(call) is None
    }
    if streams:
        state = start(mechanism, case, case.keys)
        ways["the stream"] = lambda q, k, v: stream(mechanism, case, (q, k, v), state, pieces(case), bias)[0]
    to = torch.randn(*q.shape[:3], case.value_length, generator=case.generator, dtype=case.kind).to(q)
    # Gradients of the learned tensors alone; then of the tokens too.
    plain, derived = (q, k, v), apply(lambda t: t.clone().requires_grad_(), (q, k, v))
    for tokens, leaves in ((plain, learned), (derived, (*learned, *derived))):
        if not leaves:
            continue
        exact = _gradients(attend(*tokens, mechanism, rule, bias=bias, path="reference"), leaves, to)
        names = [f"learned tensor {number + 1}" for number in range(len(learned))] + [*"qkv"]
        for way, compute in ways.items():
            for name, grad, good in zip(names, _gradients(compute(*tokens), leaves, to), exact, strict=False):
                within_budget(f"{way}: the gradient of {name}", grad, good, good, gradient=True)


def _short(case: Case) -> Triple:
    """Short queries and keys: near a zero of a polynomial similarity, sums and second derivatives lose digits to
    cancellation."""
    q, k, v = case.tensors()
    return q / 4, k / 4, v


def _gradients(out: Tensor, leaves: tuple[Tensor, ...], to: Tensor) -> tuple[Tensor, ...]:
    if not out.requires_grad:  # nothing is visible
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(out, leaves, to, allow_unused=True, materialize_grads=True)


def curved(mechanism: Mechanism, case: Case) -> None:
    """Second derivatives are those of the plain formula, or refused."""
    if 0 in (case.batch, case.queries, case.keys):
        return
    tokens = apply(lambda t: t.requires_grad_(), _short(case))
    leaves = (*tokens, *mechanism.parameters())
    call = Call(mechanism, *tokens, case.rule())

    def second(path: str) -> tuple[Tensor, ...]:
        out = attend(*tokens, mechanism, case.rule(), path=path)
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(out.sum() + out.square().sum(), leaves, create_graph=True, **options)
        total = out.sum() + sum(grad.square().sum() for grad in first)
        return torch.autograd.grad(total, leaves, **options)

    exact = second("reference")
    for path in mechanism.paths():
        if path.name == "reference" or path.cannot(call) is not None:
            continue
        try:
            results = second(path.name)
        except RuntimeError as refusal:  # refused by torch or by the path
            if "not implemented" not in str(refusal):
                raise
            continue
        for name, result, good in zip((*"qkv", *["a learned tensor"] * len(leaves)), results, exact, strict=False):
            size = max(1.0, good.abs().max().item())
            if not error(result, good) <= 1e-9 * size:
                raise Broken(f"path {path.name!r}: the second derivative by {name} is off by {error(result, good):.2g}")
