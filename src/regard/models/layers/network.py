"""Norms and position-wise networks: the parts of a block that treat each token by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.eager import transformed
from regard.core.paths import gpu
from regard.models.layers.linear import Linear


class Activation(NamedTuple):
    """The function of a position-wise network."""

    function: Callable[[Tensor], Tensor]
    gated: bool = False
    """Whether its output is multiplied by a second projection."""
    published: tuple[str, ...] = ()
    """Its names in config.json files; saving writes the first."""


_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS = {
    "relu": Activation(F.relu, published=("relu",)),
    "gelu": Activation(F.gelu, published=("gelu",)),
    "gelu_tanh": Activation(_gelu_tanh, published=("gelu_new", "gelu_pytorch_tanh")),
    "silu": Activation(F.silu, published=("silu",)),
    "swiglu": Activation(F.silu, gated=True, published=("gated-silu",)),
    "geglu": Activation(F.gelu, gated=True),
    # T5 computes the tanh form under both names.
    "geglu_tanh": Activation(_gelu_tanh, gated=True, published=("gated-gelu", "gated-gelu_new")),
    "reglu": Activation(F.relu, gated=True, published=("gated-relu",)),
}
"""All activations, by their names in our configs."""


def times(left: Tensor, right: Tensor) -> Tensor:
    """left · right. Without gradients the result overwrites `left`, which no other code may still use.

    >>> import torch
    >>> from regard.models.layers.network import times
    >>> times(torch.tensor([2.0]), torch.tensor([3.0]))
    tensor([6.])
    """
    return left * right if torch.is_grad_enabled() or left.dtype != right.dtype else left.mul_(right)


class PositionWise(nn.Module):
    """down(f(up x)), or gated: down(f(gate x) · up x).

    >>> import torch
    >>> from regard.models.layers.network import PositionWise
    >>> PositionWise(8, 32, activation="swiglu")(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, embedding_dim: int, hidden_dim: int, *, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation, self.gated, _ = ACTIVATIONS[activation]
        if self.gated:
            self.gate = Linear(embedding_dim, hidden_dim, bias=bias)
        self.up = Linear(embedding_dim, hidden_dim, bias=bias)
        self.down = Linear(hidden_dim, embedding_dim, bias=bias)

    def forward(self, x: Float[Tensor, "*b E"]) -> Float[Tensor, "*b E"]:
        if self.gated and self.activation is F.silu and gpu.launches(x):
            from regard.core.kernels import elementwise

            return self.down(elementwise.gated(self.gate(x), self.up(x)))
        if self.gated:
            return self.down(times(self.activation(self.gate(x)), self.up(x)))
        return self.down(self.activation(self.up(x)))


class RMSNorm(nn.Module):
    """x / sqrt(mean x² + epsilon) · weight, with the mean in float32 for every dtype, as published checkpoints expect.

    `rounded` also rounds x to float32, as Llama's norm does and T5's does not; only float64 models notice.

    >>> import torch
    >>> from regard.models.layers.network import RMSNorm
    >>> RMSNorm(4)(torch.tensor([2.0, 2.0, 2.0, 2.0])).tolist()
    [0.9999998807907104, 0.9999998807907104, 0.9999998807907104, 0.9999998807907104]
    """

    def __init__(self, embedding_dim: int, epsilon: float = 1e-6, *, rounded: bool = True) -> None:
        super().__init__()
        self.epsilon, self.rounded = epsilon, rounded
        self.weight = nn.Parameter(torch.ones(embedding_dim))

    def forward(self, x: Float[Tensor, "*b E"]) -> Float[Tensor, "*b E"]:
        if x.dtype == self.weight.dtype == torch.float32:
            if not x.is_cpu or torch.compiler.is_compiling() or transformed():
                return torch.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
            if torch.is_grad_enabled():
                out: Tensor = _RecordedNorm.apply(x, self.weight, self.epsilon)  # type: ignore[no-untyped-call]
                return out
            return (x * _inverse_size(x, self.epsilon)).mul_(self.weight)
        if x.dtype == self.weight.dtype and gpu.launches(x):
            # Triton is imported only where it is used.
            from regard.core.kernels import elementwise

            return elementwise.rms_norm(x, self.weight, self.epsilon)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return times(((wide if self.rounded else x) * scale).to(x.dtype), self.weight)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, epsilon={self.epsilon}"


def _inverse_size(x: Float[Tensor, "*b E"], epsilon: float) -> Float[Tensor, "*b 1"]:
    """1 / sqrt(mean x² + epsilon), in few and small operations."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(x.new_tensor(epsilon), size, size, value=1 / x.shape[-1]).rsqrt()


class _RecordedNorm(torch.autograd.Function):
    """RMSNorm on a CPU with gradients. Torch's has a backward pass of many small operators, and takes four times as
    long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _inverse_size(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.epsilon = epsilon
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            scale = _inverse_size(x, ctx.epsilon)
        normed = x * scale
        by_weight = grad * normed
        along = by_weight @ (weight / -x.shape[-1])
        by_x = torch.addcmul(grad * weight, normed, along[..., None]) * scale
        return by_x, by_weight.flatten(0, -2).sum(0), None


def norm(kind: str, embedding_dim: int, epsilon: float) -> nn.Module:
    """The norm with that name: `layer`, `rms` (Llama's) or `rms_t5`.

    >>> from regard.models.layers.network import norm
    >>> norm("rms", 4, 1e-6)
    RMSNorm((4,), epsilon=1e-06)
    """
    if kind == "layer":
        return nn.LayerNorm(embedding_dim, eps=epsilon)
    if kind in ("rms", "rms_t5"):
        return RMSNorm(embedding_dim, epsilon, rounded=kind == "rms")
    raise ValueError(f"norm: expected layer, rms or rms_t5, got {kind!r}")
