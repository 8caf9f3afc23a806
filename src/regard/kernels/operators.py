"""The kernels as operators, `torch.ops.regard.…`: torch.compile, fake tensors and autograd know them.

Each has a forward and a backward operator. The backward one has no derivative and raises if asked for one.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels import feature_attention, square_attention


def _results(q: Tensor, v: Tensor, recorded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of the output, the digits that its rounding took, and its denominators."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, torch.empty_like(out) if recorded else out.new_empty(0), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("regard::square_attention", mutates_args=())
def square(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, a: float, b: float, d: float, causal: bool, recorded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the kernel a + b q·k + d (q·k)²."""
    work = square_attention.work_of(q, k, v, bounds, a, b, d, causal)
    return square_attention.forward(work, q, k, v, recorded)


@square.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, a: float, b: float, d: float, causal: bool, recorded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(q, v, recorded)


@torch.library.custom_op("regard::square_attention_backward", mutates_args=())
def square_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest_out: Tensor, den: Tensor, bounds: Tensor | None,
    a: float, b: float, d: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    work = square_attention.work_of(q, k, v, bounds, a, b, d, causal)
    return square_attention.backward(work, grad, q, k, v, out, rest_out, den)


@square_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest_out: Tensor, den: Tensor, bounds: Tensor | None,
    a: float, b: float, d: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(q, k, v)


@torch.library.custom_op("regard::feature_attention", mutates_args=())
def feature(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, feature_map: str, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention with the kernel phi(q)·phi(k): phi is "elu", or "given" if q and k are the features."""
    work = feature_attention.work_of(q, k, v, bounds, feature_map, causal)
    return feature_attention.forward(work, q, k, v)


@feature.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, feature_map: str, causal: bool) -> tuple[Tensor, Tensor]:
    out, _, den = _results(q, v, recorded=False)
    return out, den


@torch.library.custom_op("regard::feature_attention_backward", mutates_args=())
def feature_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, den: Tensor, bounds: Tensor | None, feature_map: str,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    work = feature_attention.work_of(q, k, v, bounds, feature_map, causal)
    return feature_attention.backward(work, grad, q, k, v, out, den)


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

    def run(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = operator(grad, *ctx.saved_tensors, *ctx.options[:taken])
        return (*gradients, None, *[None] * len(ctx.options))

    return run


square.register_autograd(_pull_back(square_backward, 4), setup_context=_keep)
feature.register_autograd(_pull_back(feature_backward, 2), setup_context=_keep)
