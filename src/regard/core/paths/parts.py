"""Causal attention with unequal numbers of queries and keys, in two parts: keys that all queries see, and keys that
some see.

Partial attention is the output over some of the keys and the log-sum-exp of their scores. Two parts merge exactly:

    lse = log(exp(lse_a) + exp(lse_b))            out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The keys before the first query (a chat's history, a prompt read in chunks) need no mask, and the rest is square, as
PyTorch's is_causal expects. The backward pass of each part needs only the merged output and log-sum-exp (Liu et al.
2023, "Ring attention").
"""

from typing import Any

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Path
from regard.core.eager import batched, recorded, symbolic
from regard.core.paths import sdpa, torch_softmax
from regard.core.paths.rows import by_interval

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if not call.structure.causal:
        return "made for causal masks"
    if (reason := sdpa.not_intervals(call)) is not None:
        return reason
    if call.square:
        return "as many queries as keys are one call"
    if symbolic(call.queries, call.keys):
        return "made for lengths that are known: where the keys are split depends on them"
    return None if call.q.is_cpu else "made for the CPU"


def run(call: Call) -> Tensor:
    """old keys without a mask and new ones with is_causal, merged by their log-sum-exps."""
    offset = call.keys - call.queries
    if call.structure.rows is None:
        return _interval(call.q, call.k, call.v, sdpa.scale(call), offset)
    return by_interval(call, lambda q, k, v, low, high: _interval(q, k, v, sdpa.scale(call), offset - low))


def _interval(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
    """Query i sees the keys up to i + offset; all of them are real."""
    queries, keys = q.shape[2], k.shape[2]
    first = min(max(0, -offset), queries)  # earlier queries see no key
    last = min(max(first, keys - offset), queries)  # queries from here on see every key
    outputs = []
    if first:
        outputs.append(q.new_zeros(*q.shape[:2], first, v.shape[-1]))
    if first < last:
        old, new = first + offset, last + offset
        outputs.append(_merged(q[:, :, first:last], k[:, :, :new], v[:, :, :new], scale, old))
    if last < queries:
        outputs.append(torch_softmax.plain(q[:, :, last:], k, v, scale=scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _merged(q: Tensor, k: Tensor, v: Tensor, scale: float, old: int) -> Tensor:
    """Queries at the positions from `old` on, each over the keys up to its position."""
    if old == 0:
        return torch_softmax.plain(q, k, v, scale=scale, is_causal=True)
    size, kind = v.shape[-1], q.dtype
    q, k, v, scale = torch_softmax.fitted(q, k, v, scale, max(size, q.shape[-1]))
    if recorded(q, k, v):
        out = _Merged.apply(q, k, v, scale, old)  # type: ignore[no-untyped-call]
    else:
        out, _ = merge(*over_old(q, k[:, :, :old], v[:, :, :old], scale), *over_new(q, k, v, scale, old))
    out = out if out.shape[-1] == size else out[..., :size]
    return out.to(kind)


def over_old(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output over keys that all queries see, and its log-sum-exp: with the heads of a group as rows of one
    query."""
    v = torch_softmax.shown(k, v) if k.shape[2] == 1 else v
    tile = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # len(q) would specialise a dynamic batch size
    out, lse = _flash(tile, k, v, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def over_new(q: Tensor, k: Tensor, v: Tensor, scale: float, old: int) -> tuple[Tensor, Tensor]:
    """The output over the keys from `old` on, as many keys as queries, and its log-sum-exp."""
    return _flash(q, k[:, :, old:], v[:, :, old:], 0.0, True, scale=scale)


def over_tail(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output of queries at the last keys, each over the keys up to its position; and its log-sum-exp."""
    old = k.shape[2] - q.shape[2]
    if q.shape[2] == 1:
        return over_old(q, k, v, scale)
    if old == 0:
        return over_new(q, k, v, scale, 0)
    return merge(*over_old(q, k[:, :, :old], v[:, :, :old], scale), *over_new(q, k, v, scale, old))


def merge(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts as one, in the dtype of their log-sum-exps: float32 or better."""
    share = torch.sigmoid(first_lse - second_lse)[..., None]
    out = second.to(share.dtype).lerp(first.to(share.dtype), share)
    return out, torch.logaddexp(first_lse, second_lse)


class _Merged(torch.autograd.Function):
    """PyTorch cannot differentiate its log-sum-exp, so the merge has a backward pass here, differentiable once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, old: int) -> Tensor:
        history = over_old(q, k[:, :, :old], v[:, :, :old], scale)
        out, lse = merge(*history, *over_new(q, k, v, scale, old))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.old = scale, old
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # A vmap cannot enter an autograd.Function that refuses to be differentiated.
        gradients = _gradients if batched(grad) and not torch.is_grad_enabled() else _MergedGradients.apply
        return (*gradients(grad, q, k, v, out.detach(), lse, ctx.scale, ctx.old), None, None)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, old: int
) -> tuple[Tensor, ...]:
    """The gradients of `_Merged`."""
    grads = [
        _flash_backward(grad, q, k[:, :, part], v[:, :, part], out, lse, 0.0, part.start is not None, scale=scale)
        for part in (slice(None, old), slice(old, None))
    ]
    (q_old, k_old, v_old), (q_new, k_new, v_new) = grads
    return q_old + q_new, torch.cat([k_old, k_new], dim=2), torch.cat([v_old, v_new], dim=2)


class _MergedGradients(torch.autograd.Function):
    """`_gradients`, which raise if they are differentiated.

    `once_differentiable` is not enough: autograd skips its error if only some inputs need gradients.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return _gradients(*inputs)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("parts: second derivatives are not implemented; compute with path='reference'")


PATH = Path("parts", cannot, run)
