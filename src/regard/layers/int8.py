"""Projections with int8 weights, a quarter of the bytes that a token must read.

    W ≈ scale · Q      Q of 8 bits, rounded to nearest; scale = max |W| / 127 for each row, rounded up to bfloat16

A few tokens meet them in bfloat16, in torch's own product, made for that: 2.2 times as fast as float32, and rounding
the tokens changes less than rounding the weights did. Many tokens, and logits, where a bfloat16 result would be too
coarse, are split in two digits instead, and multiplied as whole numbers, which is exact:

    x ≈ unit · (128 hi + lo)      hi and lo of 8 bits; unit = max |x| / (127 · 128) for each token

That needs a CPU with VNNI; on others the weights are made float32 again at each use: right, but slow.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from regard.buffer import quantize
from regard.layers.linear import Linear, linear

FEW = 8
"""Tokens up to which the bfloat16 product is the faster one (2 cores of an AMD EPYC)."""
STEP = 64
"""Of the bfloat16 product's loops: it reads past the end of tokens whose length is no multiple of theirs."""
BASE, LARGEST = 128, 127
UNITS = torch.tensor([BASE, 1.0]).div_(LARGEST * BASE)[:, None, None]
MOST_WIDTH = 2**31 // (BASE * LARGEST**2)
"""Up to this length of a token, both digits' results together fit 32 bits."""
MOST_RESULTS = 1 << 22
"""Results computed at a time: as whole numbers they take three times the memory."""

# Without VNNI oneDNN adds products in 16 bits, where they overflow. A processor that is told to be one without AVX-512
# (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA) still says that it has it.
_whole = (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.cpu._is_vnni_supported()
    and torch.backends.mkldnn.is_available()
)
_bfloat16 = torch.ops.aten._weight_int8pack_mm.default


def small_weight(weight: Float[Tensor, "E D"]) -> tuple[Int[Tensor, "E D"], Float[Tensor, "E"]]:
    """int8 numbers, and the scale of each row.

    >>> import torch
    >>> from regard.layers.int8 import small_weight
    >>> weight = torch.randn(3, 8)
    >>> numbers, scale = small_weight(weight)
    >>> bool(((numbers * scale[:, None].float() - weight).abs() <= scale[:, None] / 2).all())
    True
    """
    largest = weight.detach().abs().amax(-1, keepdim=True)
    scale = (largest * ((1 + 2**-8) / LARGEST)).bfloat16()  # more than rounding takes away again
    return quantize(weight.detach(), scale.float())[0], scale[:, 0]


def digits(x: Float[Tensor, "M D"]) -> tuple[Int[Tensor, "2 M D"], Float[Tensor, "2 M 1"]]:
    """Tokens as two digits, high ones first, and what one of each is worth.

    >>> import torch
    >>> from regard.layers.int8 import digits
    >>> x = torch.randn(3, 8)
    >>> numbers, units = digits(x)
    >>> bool(((numbers * units).sum(0) - x).abs().max() <= x.abs().max() / 16000)
    True
    """
    units = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).clamp_(min=1e-30) * UNITS
    # The units differ by a power of two, so that both quotients are the same number. int8 drops the fractions.
    return (x / units).fmod_(BASE).to(torch.int8), units


def product(x: Float[Tensor, "M D"], weight: Int[Tensor, "E D"], scale: Float[Tensor, "E"]) -> Float[Tensor, "M E"]:
    """x W^T, by digits."""
    if not _whole or x.shape[1] == 1:  # torch's whole product of length 1 is never written
        return F.linear(x, weight.float()).mul_(scale)
    step = max(16, MOST_RESULTS // weight.shape[0])
    if len(x) > step:
        return torch.cat([product(part, weight, scale) for part in x.split(step)])
    numbers, units = digits(x)
    whole = torch._int_mm(numbers.flatten(0, 1), weight.t())
    high, low = (whole if x.shape[1] <= MOST_WIDTH else whole.float()).view(2, len(x), len(weight))
    return torch.add(low, high, alpha=BASE).mul(units[1]).mul_(scale)


class Int8Linear(Linear):
    """A projection with int8 weights, for inference on the CPU in float32.

    >>> import torch
    >>> from regard.layers.int8 import Int8Linear
    >>> layer, x = torch.nn.Linear(256, 64).requires_grad_(False), torch.randn(5, 256)
    >>> small = Int8Linear(layer).eval()
    >>> torch.allclose(small(x), layer(x), atol=0.05)
    True
    """

    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        numbers, scale = small_weight(layer.weight)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        _check(x, self)
        rows = x.reshape(-1, self.in_features)
        if len(rows) <= FEW and self.in_features % STEP == 0:
            out = _bfloat16(rows.bfloat16(), self.weight, self.scale.bfloat16()).float()
        else:
            out = product(rows, self.weight, self.scale)
        out = out if self.bias is None else out.add_(self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


class Int8Embedding(nn.Embedding):
    """A table of int8 rows that become float32 when they are looked up; `tied_head` uses it as it is.

    >>> import torch
    >>> from regard.layers.int8 import Int8Embedding
    >>> table = torch.nn.Embedding(10, 64).requires_grad_(False)
    >>> torch.allclose(Int8Embedding(table)(torch.arange(10)), table.weight, atol=0.02)
    True
    """

    scale: Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta")
        numbers, scale = small_weight(table.weight)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b E"]:
        return F.embedding(tokens, self.weight) * self.scale[tokens].float()[..., None]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


def tied_head(x: Float[Tensor, "*b D"], table: nn.Embedding) -> Float[Tensor, "*b E"]:
    """x against each row of a table.

    >>> import torch
    >>> from regard.layers.int8 import tied_head
    >>> tied_head(torch.randn(2, 8), torch.nn.Embedding(50, 8)).shape
    torch.Size([2, 50])
    """
    if not isinstance(table, Int8Embedding):
        return linear(x, table.weight)
    _check(x, table)
    rows = x.reshape(-1, table.embedding_dim)
    return product(rows, table.weight, table.scale).view(*x.shape[:-1], table.num_embeddings)


def _check(x: Tensor, module: Int8Linear | Int8Embedding) -> None:
    if module.training:
        raise ValueError("model: expected eval mode, int8 weights do not learn, got training mode")
    if x.dtype != torch.float32 or x.device.type != "cpu" or module.weight.device.type != "cpu":
        given = f"{x.dtype} on {x.device}, weights on {module.weight.device}"
        raise ValueError(f"model: expected float32 on the CPU, for int8 weights, got {given}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x: expected no gradients, int8 weights have none, got some; use torch.no_grad()")


def _count_flops(x: tuple[int, ...], weight: tuple[int, ...], *args: object, **kwargs: object) -> int:
    return 2 * x[0] * x[1] * weight[1]


def _count_flops_transposed(x: tuple[int, ...], weight: tuple[int, ...], *args: object, **kwargs: object) -> int:
    return 2 * x[0] * x[1] * weight[0]


# torch's counter knows neither product; by digits a token is two.
for known, formula in (
    (torch.ops.aten._int_mm, _count_flops),
    (torch.ops.aten._weight_int8pack_mm, _count_flops_transposed),
):
    if known not in flop_registry:
        register_flop_formula(known)(formula)
