"""Projections: x W^T + b, by the fastest of the products that torch has on a CPU.

In float32 torch sends linear layers to its BLAS. oneDNN, which it sends half precision to, is 1.5 to 4 times faster
for few rows of large weights (2 cores of an AMD EPYC), as in a decoder's head. It has no gradient, so it serves where
none is recorded: under `torch.no_grad()`. One row and a middling weight, which is what a decoder's step consists of,
are faster still as a product of numbers and a sum where the weight comes from memory, as a model's does: 1.2 to 1.7
times, and the most exact of the three.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import flop_registry, register_flop_formula

LEAST_NUMBERS_BY_SUMS, MOST_WEIGHTS_BY_SUMS = 256, 400_000
"""Rows from so many numbers on, with weights up to so many, are multiplied and summed: sums must be long, and what lies
in between must stay in a core's own cache."""


class _Scratch(threading.local):
    """A place for products before they are summed, of each thread: fresh memory would cost more than they do."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.numbers = torch.empty(MOST_WEIGHTS_BY_SUMS, dtype=torch.float32, device="cpu")


_scratch = _Scratch()
_onednn: Any = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None


def linear(x: Float[Tensor, "*b D"], weight: Float[Tensor, "E D"], bias: Float[Tensor, "E"] | None = None) -> Tensor:
    """x W^T + b.

    >>> import torch
    >>> from regard.layers.linear import linear
    >>> x, weight = torch.randn(3, 512), torch.randn(8192, 512)
    >>> with torch.no_grad():
    ...     fast = linear(x, weight)
    >>> torch.allclose(fast, x @ weight.T, atol=1e-3)
    True
    """
    if not by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if not _by_sums(x, weight):
        return _onednn(x, weight, bias, "none", [], "")
    between = _scratch.numbers.as_strided(weight.shape, (weight.shape[1], 1))
    out = torch.mul(weight, x.reshape(-1), out=between).sum(-1).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product serves and is faster than the BLAS's.

    For one row it is 1.1 to 1.9 times as fast and the more exact of the two; for a few rows and large weights 1.3 to 4
    times as fast. Elsewhere it gains a tenth or two, and has two to three times the rounding error, which a model of
    many layers would see in its logits.
    """
    rows, weights = x.numel() // max(1, weight.shape[1]), weight.numel()
    least = 100_000 if rows == 1 else 800_000 if rows <= 8 else 4_000_000
    return (
        weights >= least
        and 0 < rows <= 256
        and _onednn is not None
        and not torch.is_grad_enabled()
        and x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and weight.is_cpu
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def _by_sums(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() == weight.shape[1]
        and weight.shape[1] >= LEAST_NUMBERS_BY_SUMS
        and weight.numel() <= MOST_WEIGHTS_BY_SUMS
        and not is_in_torch_dispatch_mode()  # who counts FLOPs would not know the sums for a product
        and torch._C._functorch.peek_interpreter_stack() is None  # torch.func knows no place to write to
    )


class Linear(nn.Linear):
    """`nn.Linear`, with the faster product where no gradient is recorded."""

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        return linear(x, self.weight, self.bias)


def projections(x: Float[Tensor, "*b D"], *layers: nn.Module) -> Sequence[Float[Tensor, "*b E"]]:
    """What each layer makes of one input, by one product where that is faster: in training on a GPU, and where oneDNN
    serves and `lay_together` made their weights one, since a small product takes as long as one of twice its size.

    >>> import torch
    >>> from regard.layers.linear import Linear, lay_together, projections
    >>> layers = [Linear(512, size, bias=False) for size in (512, 128, 128)]
    >>> lay_together(*layers)
    >>> x = torch.randn(1, 512)
    >>> with torch.no_grad():
    ...     [torch.allclose(one, layer(x), atol=1e-5) for one, layer in zip(projections(x, *layers), layers)]
    [True, True, True]
    """
    if torch.is_grad_enabled():
        together = _joined(x, layers) if x.is_cuda else None
    else:
        weight = _one_weight(layers)
        together = linear(x, weight) if weight is not None and by_onednn(x, weight) else None
    if together is None:
        return [layer(x) for layer in layers]
    return together.split([cast(int, layer.out_features) for layer in layers], -1)


def _joined(x: Tensor, layers: Sequence[nn.Module]) -> Tensor | None:
    """The product with all weights, put together for this once; None if a layer is not a plain one."""
    if not all(_plain(layer) for layer in layers) or len({layer.bias is None for layer in layers}) > 1:
        return None
    weight = torch.cat([cast(Tensor, layer.weight) for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([cast(Tensor, layer.bias) for layer in layers])
    return F.linear(x, weight, bias)


def _plain(layer: nn.Module) -> bool:
    """Whether a layer is nothing but its weight and bias: no other class, nobody who watches."""
    return type(layer) is Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def lay_together(*layers: nn.Linear) -> None:
    """Let the weights of projections of one input lie one after another in memory. Their values stay as they are."""
    parts = torch.cat([layer.weight.detach() for layer in layers]).split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part


def _one_weight(layers: Sequence[nn.Module]) -> Tensor | None:
    """The weights of layers as one, if they are plain ones without bias whose weights lie together."""
    end, rows = None, 0
    for layer in layers:
        if not _plain(layer) or layer.bias is not None:
            return None
        weight = layer.weight
        if end not in (None, weight.data_ptr()) or not weight.is_contiguous():
            return None
        end, rows = weight.data_ptr() + weight.nbytes, rows + len(weight)
    first = cast(Tensor, layers[0].weight)
    numbers = first.storage_offset() + rows * first.shape[1]
    if first.untyped_storage().nbytes() < numbers * first.element_size():  # neighbours by chance
        return None
    return first.as_strided((rows, first.shape[1]), first.stride())


def _count_flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(x) * weight[0])


if _onednn is not None and _onednn not in flop_registry:  # torch's counter knows its own product only
    register_flop_formula(_onednn)(_count_flops)
