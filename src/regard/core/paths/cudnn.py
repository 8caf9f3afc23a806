"""cuDNN's softmax attention on a GPU, called by name: the fastest there is for long sequences.

SDPA chooses a backend by switches that all threads of the process share, so they may not be turned for a call.
cuDNN makes a plan for each new shape, some 17 ms, so it is asked for round lengths alone.

It hides a key by weight 0, and 0 · NaN is NaN. A second kernel, of ours, looks at each head's last query, which sees
every key, and computes the heads again where it gave a number that is not finite; the others are done at once.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Again, Path, never
from regard.core.eager import recorded, untouched
from regard.core.masks.guard import finite
from regard.core.paths import gpu, sdpa
from regard.core.paths.torch_softmax import PLANNED

LEAST, LEAST_SHORT = 1024, 2048 + PLANNED
"""Causal lengths from which cuDNN, with the second kernel, is faster than one of ours alone: for heads of more than 64
numbers, and for shorter heads. With gradients cuDNN is faster at any length."""


_CUDNN = torch._scaled_dot_product_cudnn_attention
"""The function that PyTorch's own functions call: 19 µs less than `torch.ops.aten` takes."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := gpu.missing(call)) is not None:
        return reason
    if not untouched():
        return "traces, counters and modes see PyTorch's operators"
    if call.q.dtype == torch.float32:
        return "made for half precision"
    if call.structure.windowed or call.structure.paddings:
        return "windows and padding are left to a kernel of ours"
    if call.queries % PLANNED or call.keys % PLANNED or call.qk_length % 8 or call.qk_length != call.value_length:
        return f"made for lengths that are multiples of {PLANNED}: each has a plan; and for equal heads, multiples of 8"
    if call.structure.causal and not call.square:
        return "cuDNN aligns causality to the first key, not the last, when T and S differ"
    short = call.queries < (LEAST if call.qk_length > 64 else LEAST_SHORT)
    if call.structure.causal and short and not recorded(call.q, call.k, call.v):
        return "a short sequence: a kernel of ours is faster"
    return gpu.unfit(call)


def run(call: Call) -> Tensor:
    """cuDNN's kernel; heads that a masked NaN reached are computed again."""
    q, scale = gpu.scaled(call)
    q, k, v = gpu.unit_strides(q, call.k, call.v)
    causal = call.structure.causal
    mended = causal and not finite()  # nothing is hidden without a mask
    if recorded(call.q, call.k, call.v):
        return _Attention.apply(q, k, v, scale, causal, mended)  # type: ignore[no-untyped-call]
    return _forward(q, k, v, scale, causal, mended)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mended: bool) -> tuple[Any, ...]:
    from regard.core.kernels import band_attention

    out, lse, *rest = _CUDNN(q, k, v, None, True, 0.0, causal, False, scale=scale)
    if mended:
        band_attention.mend(band_attention.work_of(q, k, v, scale, None, 0), q, k, v, out, lse)
    return out, lse, rest


class _Attention(torch.autograd.Function):
    """The backward pass is cuDNN's too, mended likewise; once differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mended: bool) -> Tensor:
        out, lse, (*seen, seed, offset, _) = _forward(q, k, v, scale, causal, mended)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.options = seen, scale, causal, mended
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *rest = ctx.saved_tensors
        grads = _Gradients.apply(grad, q, k, v, out.detach(), *rest, *ctx.options)  # type: ignore[no-untyped-call]
        return (*grads, None, None, None)


class _Gradients(torch.autograd.Function):
    """The gradients of `_Attention`, which raise where they would be derived."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        seen: list[Any], scale: float, causal: bool, mended: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        from regard.core.kernels import band_attention

        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, *seen, 0.0, causal, scale=scale
        )
        if mended:
            work = band_attention.work_of(q, k, v, scale, None, 0)
            band_attention.mend_backward(work, q, k, v, grad, out, lse, grads)
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("cudnn: second derivatives are not implemented; compute with path='reference'")


def again(call: Call) -> Again | None:
    """What runs calls like this one."""
    from regard.core.kernels import band_attention
    from regard.core.kernels.launch import Chain

    scale, causal = sdpa.scale(call), call.structure.causal
    if scale == 0 or not gpu.dense(call):
        return None
    work = band_attention.work_of(call.q, call.k, call.v, scale, None, 0)
    mend = Chain(partial(band_attention.mend, work))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, *_ = _CUDNN(q, k, v, None, True, 0.0, causal, False, scale=scale)
        if causal and not finite():
            mend(q, k, v, out, lse)
        return out

    return run


PATH = Path("cudnn", cannot, run, never, again=again)
