"""Projections: x W^T + b, by the faster of the two products that torch has on a CPU.

In float32 torch sends linear layers to its BLAS. oneDNN, which it sends half precision to, is 1.5 to 4 times faster
for few rows of large weights (2 cores of an AMD EPYC), as in a decoder's head. It has no gradient, so it serves where
none is recorded: under `torch.no_grad()`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

LEAST_WEIGHTS = 4_000_000
MOST_ROWS = 256
"""Between these oneDNN's product is 1.5 to 4 times as fast. Elsewhere it gains a tenth or two, and has two to three
times the rounding error, which a model of many layers would see in its logits."""

_onednn = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None


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
    if _onednn is not None and by_onednn(x, weight):
        return _onednn(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product serves and is the faster one."""
    return (
        weight.numel() >= LEAST_WEIGHTS
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and 0 < x.numel() <= MOST_ROWS * weight.shape[1]
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


class Linear(nn.Linear):
    """`nn.Linear`, with the faster product where no gradient is recorded."""

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        return linear(x, self.weight, self.bias)


def _count_flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(x) * weight[0])


if _onednn is not None and _onednn not in flop_registry:  # torch's counter knows its own product only
    register_flop_formula(_onednn)(_count_flops)
