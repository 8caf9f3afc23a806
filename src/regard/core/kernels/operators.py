"""The kernels as operators, `torch.ops.regard.…`: torch.compile, fake tensors and autograd know them.

Each has a forward and a backward operator. The backward one has no derivative and raises if asked for one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from regard.core.eager import recorded, untouched
from regard.core.kernels import feature_attention, square_attention, square_sizes

_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""What operators compute, as plain functions."""


def _operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    def register(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"regard::{name}", mutates_args=())(function)
        _FUNCTIONS[operator] = function
        return operator

    return register


def run(operator: Any, *arguments: Any) -> Any:
    """Call an operator; where nothing is traced or derived, the plain function, which spares most of the time around
    the kernels."""
    plain = untouched()
    for argument in arguments:
        if isinstance(argument, Tensor):
            plain = plain and not recorded(argument) and not isinstance(argument, FakeTensor)
    return _FUNCTIONS[operator](*arguments) if plain else operator(*arguments)


def _results(q: Tensor, v: Tensor, recorded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of the output, the digits that its rounding took, and its denominators."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, torch.empty_like(out) if recorded else out.new_empty(0), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@_operator("square_attention")
def square(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, a: float, b: float, d: float, causal: bool, recorded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the kernel a + b q·k + d (q·k)²."""
    work = square_sizes.work_of(q, k, v, a, b, d, causal)
    return square_attention.forward(work, q, k, v, bounds, recorded)


@square.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, a: float, b: float, d: float, causal: bool, recorded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(q, v, recorded)


@_operator("square_attention_backward")
def square_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest_out: Tensor, den: Tensor, bounds: Tensor | None,
    a: float, b: float, d: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    work = square_sizes.work_of(q, k, v, a, b, d, causal)
    return square_attention.backward(work, grad, q, k, v, bounds, out, rest_out, den)


@square_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest_out: Tensor, den: Tensor, bounds: Tensor | None,
    a: float, b: float, d: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(q, k, v)


@_operator("feature_attention")
def feature(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, feature_map: str, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention with the kernel phi(q)·phi(k): phi is "elu", or "given" if q and k are the features."""
    work = feature_attention.work_of(q, k, v, feature_map, causal)
    return feature_attention.forward(work, q, k, v, bounds)


@feature.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, feature_map: str, causal: bool) -> tuple[Tensor, Tensor]:
    out, _, den = _results(q, v, recorded=False)
    return out, den


@_operator("feature_attention_backward")
def feature_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, den: Tensor, bounds: Tensor | None, feature_map: str,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    work = feature_attention.work_of(q, k, v, feature_map, causal)
    return feature_attention.backward(work, grad, q, k, v, bounds, out, den)


@feature_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, den: Tensor, bounds: Tensor | None, feature_map: str,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(q, k, v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bounds, *options = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)
    ctx.options = options
    ctx.mark_non_differentiable(*output[1:])


def _pull_back(operator: Any, taken: int) -> Any:
    """The backward pass by an operator that takes the first `taken` options of the forward one."""

    def pull(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grad if grad.stride(3) == 1 else grad.contiguous()  # that of a sum is one number, expanded
        gradients = run(operator, grad, *ctx.saved_tensors, *ctx.options[:taken])
        return (*gradients, None, *[None] * len(ctx.options))

    return pull


square.register_autograd(_pull_back(square_backward, 4), setup_context=_keep)
feature.register_autograd(_pull_back(feature_backward, 2), setup_context=_keep)
