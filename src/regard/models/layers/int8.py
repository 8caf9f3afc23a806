"""Projections with int8 weights: a decode step reads a quarter of the bytes.

    W ≈ scale · Q      Q in int8, rounded to nearest; scale = max |W| / 127 for each row

Tokens and all sums stay float32: JIT-compiled code (linear_code.py) converts the weights in registers, or a few rows at
a time in the CPU core's cache. One token takes a quarter of float32's time, a prompt at most as long as in float32.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.eager import recorded, transformed
from regard.core.states.buffer import quantize
from regard.models.layers.linear import Linear, linear


def product(x: Float[Tensor, "*b D"], weight: Int[Tensor, "E D"], scale: Float[Tensor, "E"]) -> Float[Tensor, "*b E"]:
    """x W^T.

    >>> import torch
    >>> from regard.models.layers.int8 import product
    >>> product(torch.ones(1, 16), torch.ones(3, 16, dtype=torch.int8), torch.tensor([1.0, 2.0, 3.0]))
    tensor([[16., 32., 48.]])
    """
    if transformed() or torch.compiler.is_exporting():
        return F.linear(x, weight.float() * scale[:, None])
    return torch.ops.regard.linear(x, weight, scale)


class Int8Linear(Linear):
    """A projection with int8 weights, for inference on the CPU in float32.

    >>> import torch
    >>> from regard.models.layers.int8 import Int8Linear
    >>> layer, x = torch.nn.Linear(256, 64).requires_grad_(False), torch.randn(5, 256)
    >>> small = Int8Linear(layer).eval()
    >>> torch.allclose(small(x), layer(x), atol=0.05)
    True
    """

    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        numbers, scale = quantize(layer.weight.detach())
        self.weight = nn.Parameter(numbers, requires_grad=False)
        bias = None if layer.bias is None else layer.bias.detach().to(torch.float32, copy=True)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("scale", scale[:, 0].float())

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        _check(x, self)
        out = product(x, self.weight, self.scale)
        return out if self.bias is None else out.add_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


class Int8Embedding(nn.Embedding):
    """An embedding with int8 rows, which lookup converts to float32; `tied_head` multiplies by the int8 table itself.

    >>> import torch
    >>> from regard.models.layers.int8 import Int8Embedding
    >>> table = torch.nn.Embedding(10, 64).requires_grad_(False)
    >>> torch.allclose(Int8Embedding(table)(torch.arange(10)), table.weight, atol=0.02)
    True
    """

    scale: Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta")
        numbers, scale = quantize(table.weight.detach())
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.register_buffer("scale", scale[:, 0].float())

    def forward(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b E"]:
        return F.embedding(tokens, self.weight) * self.scale[tokens, None]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


def tied_head(x: Float[Tensor, "*b D"], table: nn.Embedding) -> Float[Tensor, "*b E"]:
    """x W^T, for the table W of an embedding: the logits of a tied head.

    >>> import torch
    >>> from regard.models.layers.int8 import tied_head
    >>> tied_head(torch.randn(2, 8), torch.nn.Embedding(50, 8)).shape
    torch.Size([2, 50])
    """
    if not isinstance(table, Int8Embedding):
        return linear(x, table.weight)
    _check(x, table)
    return product(x, table.weight, table.scale)


def _check(x: Tensor, module: Int8Linear | Int8Embedding) -> None:
    if module.training:
        raise ValueError("model: expected eval mode, since int8 weights cannot be trained, got training mode")
    if x.dtype != torch.float32 or x.device.type != "cpu" or module.weight.device.type != "cpu":
        got = f"{x.dtype} on {x.device}, weights on {module.weight.device}"
        raise ValueError(f"model: expected float32 on the CPU, since the weights are int8, got {got}")
    if recorded(x):
        raise ValueError(
            "x: expected no gradients, since int8 weights have none, got requires_grad; use torch.no_grad()"
        )
