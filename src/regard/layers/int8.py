"""Projections with int8 weights, a quarter of the bytes: one float32 scale for each of their rows.

    W ≈ scale · Q             scale = max |W| / 127 of each row,       Q = W / scale, rounded to nearest
    x ≈ unit · (128 hi + lo)  unit = max |x| / (127 · 128) of each token,  hi and lo of 8 bits each

Tokens as two digits, instead of the one of most int8 layers, make the product exact in whole numbers and lose at most
1 / 16256 of a token's largest number, 64 times less than the weights lose of theirs. It needs a CPU with VNNI (x86
since 2019); on others the weights are made float32 again at each use: right, smaller, but slower.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from regard.layers.linear import Linear, linear
from regard.state import quantize

BASE, LARGEST = 128, 127
UNITS = torch.tensor([BASE, 1.0]).div_(LARGEST * BASE)[:, None, None]
MOST_PRODUCTS = 1 << 22
"""Results computed at a time: those of whole numbers take four times the memory of the ones they become."""

# Without VNNI oneDNN adds pairs of products in 16 bits, which overflow.
_whole = torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()


class Digits(NamedTuple):
    """Tokens as two int8 digits, high ones first, and what one of each is worth."""

    numbers: Int[Tensor, "2 M D"]
    units: Float[Tensor, "2 M 1"]


def digits(x: Float[Tensor, "M D"]) -> Digits:
    """Tokens as digits.

    >>> import torch
    >>> from regard.layers.int8 import digits
    >>> x = torch.randn(3, 8)
    >>> found = digits(x)
    >>> bool(((found.numbers * found.units).sum(0) - x).abs().max() <= x.abs().max() / 16000)
    True
    """
    largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True)
    units = largest.clamp_(min=1e-30) * UNITS
    # The two units differ by a power of two, so that the two quotients are the same number; int8 drops its fraction.
    return Digits((x / units).fmod_(BASE).to(torch.int8), units)


def product(x: Digits, weight: Int[Tensor, "E D"], scale: Float[Tensor, "E 1"]) -> Float[Tensor, "M E"]:
    """x W^T."""
    rows, step = x.units.shape[1], max(16, MOST_PRODUCTS // weight.shape[0])
    if rows <= step:
        whole = torch._int_mm(x.numbers.flatten(0, 1), weight.t()).unflatten(0, (2, rows))
        return (whole * x.units).sum(0).mul_(scale[:, 0])
    out = x.units.new_empty(rows, weight.shape[0])
    for start in range(0, rows, step):
        part = slice(start, start + step)
        out[part] = product(Digits(x.numbers[:, part], x.units[:, part]), weight, scale)
    return out


class Int8Linear(Linear):
    """A projection with int8 weights, for inference on the CPU in float32.

    >>> import torch
    >>> from regard.layers.int8 import Int8Linear
    >>> layer, x = torch.nn.Linear(64, 32).requires_grad_(False), torch.randn(5, 64)
    >>> small = Int8Linear(layer).eval()
    >>> off = (small(x) - layer(x)).abs()
    >>> bool((off <= x.abs().sum(-1, keepdim=True) * small.scale.max()).all())
    True
    """

    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        numbers, scale = quantize(layer.weight.detach())
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        return project_all(x, self)[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


class Int8Embedding(nn.Embedding):
    """A table of int8 rows that are made float32 when they are looked up; `tied_head` uses it as it is."""

    scale: Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta")
        numbers, scale = quantize(table.weight.detach())
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b E"]:
        return F.embedding(tokens, self.weight) * F.embedding(tokens, self.scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


def project_all(x: Float[Tensor, "*b D"], *layers: nn.Module) -> tuple[Tensor, ...]:
    """Several projections of the same tokens, whose digits are found once.

    >>> import torch
    >>> from regard.layers.int8 import project_all
    >>> [tuple(one.shape) for one in project_all(torch.randn(2, 8), torch.nn.Linear(8, 4), torch.nn.Linear(8, 3))]
    [(2, 4), (2, 3)]
    """
    small = [one for one in layers if isinstance(one, Int8Linear)]
    if len(small) < len(layers):
        return tuple(one(x) for one in layers)
    found = _products(x, small)
    return tuple(one if layer.bias is None else one.add_(layer.bias) for one, layer in zip(found, small, strict=True))


def tied_head(x: Float[Tensor, "*b D"], table: nn.Embedding) -> Float[Tensor, "*b E"]:
    """x against each row of a table.

    >>> import torch
    >>> from regard.layers.int8 import tied_head
    >>> tied_head(torch.randn(2, 8), torch.nn.Embedding(50, 8)).shape
    torch.Size([2, 50])
    """
    return _products(x, [table])[0] if isinstance(table, Int8Embedding) else linear(x, table.weight)


def _products(x: Tensor, layers: "list[Int8Linear] | list[Int8Embedding]") -> list[Tensor]:
    for layer in layers:
        if layer.training:
            raise ValueError("model: expected eval mode, int8 weights do not learn, got training mode")
        if x.dtype != torch.float32 or x.device.type != "cpu" or layer.weight.device.type != "cpu":
            given = f"{x.dtype} on {x.device}, weights on {layer.weight.device}"
            raise ValueError(f"x: expected float32 on the CPU, for int8 weights, got {given}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x: expected no gradient, which int8 weights have none of, got one; use torch.no_grad()")
    rows = x.reshape(-1, x.shape[-1])
    if not _whole:
        found = [F.linear(rows, layer.weight.float()).mul_(layer.scale[:, 0]) for layer in layers]
    else:
        split = digits(rows)
        found = [product(split, layer.weight, layer.scale) for layer in layers]
    return [one.view(*x.shape[:-1], one.shape[-1]) for one in found]


def _count_flops(x: tuple[int, ...], weight: tuple[int, ...], **kwargs: object) -> int:
    return 2 * x[0] * x[1] * weight[1]


if torch.ops.aten._int_mm not in flop_registry:  # torch's counter knows no product of whole numbers
    register_flop_formula(torch.ops.aten._int_mm)(_count_flops)
