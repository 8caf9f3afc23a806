"""PyTorch's softmax kernels, and how to call them: which tensors they accept, what they cannot differentiate, their
FLOPs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.utils.flop_counter import flop_registry, register_flop_formula

from regard.core.eager import recorded, symbolic

PLANNED = 128
"""On a GPU, only multiples of this length are worth a new cuDNN plan."""
MOST_ROWS = 64
"""Up to this many query rows per key/value head form one tile on a CPU, so that each key is read once for all of
them."""


def fitted(q: Tensor, k: Tensor, v: Tensor, scale: float, longest: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Tensors as PyTorch's fused kernels need them: unit stride, one head dimension, a scale above 0."""
    if scale == 0:  # the kernel masks with -inf, and 0 · -inf is NaN: zero queries give zero scores instead
        q, scale = q * 0, 1.0
    derived = torch.compiler.is_compiling() or q.requires_grad or k.requires_grad or v.requires_grad
    if q.is_cpu and q.dtype.itemsize == 2 and torch.is_grad_enabled() and derived:
        # The CPU kernel rounds its gradients to half precision inside the sums: at least 3 times the plain formula's
        # error.
        q, k, v = q.float(), k.float(), v.float()
    if longest != v.shape[-1] or longest != q.shape[-1]:
        q, k, v = (F.pad(t, (0, longest - t.shape[-1])) for t in (q, k, v))
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return q, k, v, scale


def plain(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **options: Any) -> Tensor:
    """SDPA, with tensors prepared so that its fused kernel applies: equal head dimensions, unit stride, grouped heads
    as they are."""
    if _ready(q, k, v, scale):
        return F.scaled_dot_product_attention(q, k, v, scale=scale, **options)
    if k.shape[2] == 1:
        v = shown(k, v)
    kind, size, mask = q.dtype, v.shape[-1], options.get("attn_mask")
    if q.shape[1] != k.shape[1] and few(q, k) and not options.get("is_causal") and _flat(mask):
        tile = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # len(q) would specialise a dynamic batch size
        return plain(tile, k, v, scale=scale, **options).reshape(*q.shape[:3], size)
    fresh = q.is_cuda and q.dtype.itemsize == 2 and (q.shape[2] % PLANNED > 0 or k.shape[2] % PLANNED > 0)
    longest = max(size, q.shape[-1])
    longest += -longest % 8 if fresh else 0
    q, k, v, scale = fitted(q, k, v, scale, longest)
    if q.is_cuda and q.shape[1] != k.shape[1] and options.get("attn_mask") is not None:
        # Only cuDNN's kernel takes grouped heads and a mask.
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
    """Whether the CPU kernel takes them as they are: a quick test, since a decode step is a short call."""
    if not q.is_cpu or scale == 0 or torch.is_grad_enabled():
        return False
    _, heads, _, length = q.shape
    alike = k.shape[1] == heads and v.shape[3] == length and k.shape[2] > 1
    return alike and q.stride(3) == 1 and k.stride(3) == 1 and v.stride(3) == 1


def shown(k: Tensor, v: Tensor) -> Tensor:
    """The value of a single key, made NaN if the key is not finite: PyTorch's CPU kernel would ignore that key."""
    return v + (k * 0).sum(-1, keepdim=True)


def _flat(mask: Tensor | None) -> bool:
    """Whether a mask is the same for all heads and queries."""
    return mask is None or mask.shape[1:3] == (1, 1)


def few(q: Tensor, k: Tensor) -> bool:
    """Whether the query rows of a key/value head fit one tile, which the CPU kernel does not form across heads."""
    repeats = q.shape[1] // max(1, k.shape[1])
    return q.is_cpu and not symbolic(q.shape[2]) and repeats * q.shape[2] <= MOST_ROWS


def refuse_second_derivatives(out: Tensor) -> None:
    """Make the gradients of PyTorch's fused kernels raise if they are differentiated: the kernels have no second
    derivative."""
    node = None if torch.compiler.is_compiling() else out.grad_fn
    if node is not None and type(node).__name__.startswith("ScaledDotProduct"):
        node.register_hook(lambda grads, _: _Once.apply(*grads) if torch.is_grad_enabled() else None)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """The identity on gradients, which raises if they are differentiated."""

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

    In half precision SDPA would take cuDNN, which makes a plan for each new shape: about 17 ms, where a call takes less
    than 1 ms. Lengths that grow with each token, or differ from batch to batch, are all new shapes. SDPA's switch for
    cuDNN is global to the process, so it must not be turned off for one call.
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
    """A bool mask as an additive bias, (B, H, T, S), with rows aligned to 16 numbers, as the memory-efficient kernel
    needs."""
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
