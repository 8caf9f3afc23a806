"""PyTorch's own softmax kernels, and what it takes to call them: which tensors they accept, what they do not derive,
what they count.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.utils.flop_counter import flop_registry, register_flop_formula

from regard.core.eager import recorded, symbolic

PLANNED = 128
"""On a GPU, lengths of which multiples are worth a plan of cuDNN's."""
MOST_ROWS = 64
"""Query rows of a key/value head that are one tile on a CPU, so that each key is read once for all of them."""


def fitted(q: Tensor, k: Tensor, v: Tensor, scale: float, longest: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Tensors with which PyTorch's fused kernels compute this: unit stride, heads of one length, a scale above 0."""
    if scale == 0:  # the kernel hides a future key by -inf, and 0 · -inf is NaN: 0 scores from 0 queries instead
        q, scale = q * 0, 1.0
    derived = torch.compiler.is_compiling() or q.requires_grad or k.requires_grad or v.requires_grad
    if q.is_cpu and q.dtype.itemsize == 2 and torch.is_grad_enabled() and derived:
        # The CPU kernel rounds its gradients to half inside the sums: 3 and more times the plain formula's error.
        q, k, v = q.float(), k.float(), v.float()
    if longest != v.shape[-1] or longest != q.shape[-1]:
        q, k, v = (F.pad(t, (0, longest - t.shape[-1])) for t in (q, k, v))
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return q, k, v, scale


def plain(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **options: Any) -> Tensor:
    """SDPA where its fused kernel applies: equal head lengths, unit stride, grouped heads left as they are."""
    if _ready(q, k, v, scale):
        return F.scaled_dot_product_attention(q, k, v, scale=scale, **options)
    if k.shape[2] == 1:
        v = shown(k, v)
    kind, size, mask = q.dtype, v.shape[-1], options.get("attn_mask")
    if q.shape[1] != k.shape[1] and few(q, k) and not options.get("is_causal") and _flat(mask):
        tile = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # len(q) would fix a batch that a trace holds open
        return plain(tile, k, v, scale=scale, **options).reshape(*q.shape[:3], size)
    fresh = q.is_cuda and q.dtype.itemsize == 2 and (q.shape[2] % PLANNED > 0 or k.shape[2] % PLANNED > 0)
    longest = max(size, q.shape[-1])
    longest += -longest % 8 if fresh else 0
    q, k, v, scale = fitted(q, k, v, scale, longest)
    if q.is_cuda and q.shape[1] != k.shape[1] and options.get("attn_mask") is not None:
        # No kernel but cuDNN's takes grouped heads and a mask.
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    out = unplanned(q, k, v, scale=scale, **options) if fresh and not torch.compiler.is_compiling() else None
    if out is None:
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, **options)
    refuse_second_derivatives(out)
    out = out if size == longest else out[..., :size]
    return out if out.dtype == kind else out.to(kind)


def _ready(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the CPU's kernel takes them as they are: asked first, since a step of a stream is a short call."""
    if not q.is_cpu or scale == 0 or torch.is_grad_enabled():
        return False
    _, heads, _, length = q.shape
    alike = k.shape[1] == heads and v.shape[3] == length and k.shape[2] > 1
    return alike and q.stride(3) == 1 and k.stride(3) == 1 and v.stride(3) == 1


def shown(k: Tensor, v: Tensor) -> Tensor:
    """The value of a key that is alone, NaN if the key is not finite: of such a key PyTorch's CPU kernel makes 0."""
    return v + (k * 0).sum(-1, keepdim=True)


def _flat(mask: Tensor | None) -> bool:
    """Whether a mask is alike for all heads and queries."""
    return mask is None or mask.shape[1:3] == (1, 1)


def few(q: Tensor, k: Tensor) -> bool:
    """Whether the query rows of a key/value head are one tile, which a CPU's kernel would not make of several heads."""
    repeats = q.shape[1] // max(1, k.shape[1])
    return q.is_cpu and not symbolic(q.shape[2]) and repeats * q.shape[2] <= MOST_ROWS


def refuse_second_derivatives(out: Tensor) -> None:
    """Let the gradients of PyTorch's fused kernels say where second derivatives are: the kernels have none."""
    node = None if torch.compiler.is_compiling() else out.grad_fn
    if node is not None and type(node).__name__.startswith("ScaledDotProduct"):
        node.register_hook(lambda grads, _: _Once.apply(*grads) if torch.is_grad_enabled() else None)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """Gradients as they are, which raise where they would be derived."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("sdpa: second derivatives are not implemented; compute with path='reference'")


def unplanned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor | None:
    """SDPA by PyTorch's flash or memory-efficient kernel, called by name; None if neither can serve.

    In half precision SDPA would take cuDNN, which makes a plan for each new shape: some 17 ms, where a call takes less
    than one. Lengths that grow with each token, or differ from batch to batch, are all new shapes. SDPA's switch for
    cuDNN is one for all threads of the process, so nobody may turn it for one call.
    """
    params = SDPAParams(q, k, v, attn_mask, 0.0, is_causal, enable_gqa)
    if attn_mask is None and can_use_flash_attention(params):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    if enable_gqa or not can_use_efficient_attention(params):
        return None
    bias = None if attn_mask is None else _aligned_bias(attn_mask, q, k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, recorded(q, k, v), 0.0, is_causal, scale=scale
    )[0]


def _aligned_bias(visible: Tensor, q: Tensor, keys: int) -> Tensor:
    """A bool mask as scores to add, (B, H, T, S), its rows 16 numbers apart, as the memory-efficient kernel asks."""
    room = q.new_full((*visible.shape[:-1], keys + -keys % 16), -torch.inf)[..., :keys]
    return room.masked_fill_(visible, 0).expand(*q.shape[:3], keys)


def _count_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the CPU kernel, every pair counted, as torch's own formulas for the GPU kernels do."""
    batch, heads, queries, length = q
    return int(2 * batch * heads * queries * k[2] * (length + v[3]))


def _count_backward_flops(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Five products: the scores again, and the gradients of weights, values, queries and keys."""
    batch, heads, queries, length = q
    return int(2 * batch * heads * queries * k[2] * (3 * length + 2 * v[3]))


# Torch's counter has no formula for its own CPU kernel and counts 0 (pytorch#195460).
for _kernel, _formula in (
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, _count_flops),
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, _count_backward_flops),
):
    if _kernel not in flop_registry:
        register_flop_formula(_kernel)(_formula)
