"""Polynomial kernels: similarity is a polynomial of q·k, in a score form and a feature form that are exactly equal.

    Quadratic:   (q·k + c)²  =  (q·k)² + 2c q·k + c²
    Taylor:      1 + s + s²/2,  s = q·k / sqrt(K)            the exponential's first three terms
    Polynomial:  (q·k + c)^degree                            even degrees only: an odd one gives negative weights

The feature map is the symmetric one: (q·k)² = sum over a ≤ b of (1 or 2)·q_a q_b·k_a k_b, so the quadratic has
(D+1)(D+2)/2 features. The sums use blocks of it: outer products of 16 coordinates with all later ones are plain
multiplications into one buffer, where gathering by index would be limited by memory bandwidth. That rounds the number
of features up a little (`summed_length`). The denominator needs no features at all: sum over s of (q·k_s)² = qᵀ(sum
over s of k_s k_sᵀ)q.
"""

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.core.eager import kept, transformed
from regard.core.families.features import FeatureMechanism

FEW = 64
"""Up to this many tokens over the batch, features are gathered by an index table: one operator per block would take
longer."""


@dataclass(frozen=True, kw_only=True)
class _Square(FeatureMechanism):
    """similarity = a + b q·k + d (q·k)², all three at least 0."""

    short: ClassVar[bool] = True
    fused_form: ClassVar[str] = "square"

    def coefficients(self, qk_length: int) -> tuple[float, float, float]:
        raise NotImplementedError

    def similarity(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        # Computed as d (q·k + b/2d)² plus a constant: never below 0, however it is rounded.
        a, b, d = self.coefficients(q.shape[-1])
        score = (q @ k.transpose(-1, -2)).add_(b / (2 * d))
        square = score.square() if score.requires_grad or transformed() else score.square_()
        rest = a - b * b / (4 * d)
        if d != 1:
            square = square.mul_(d)
        return square if abs(rest) < 1e-12 else square.add_(rest)

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        a, b, d = self.coefficients(x.shape[-1])
        rows, columns, twice = _upper(x.shape[-1])
        squares = x[..., rows] * x[..., columns] * (twice * math.sqrt(d)).to(x)
        return torch.cat([squares, x * math.sqrt(b), torch.full_like(x[..., :1], math.sqrt(a))], dim=-1)

    def feature_length(self, qk_length: int) -> int:
        return (qk_length + 1) * (qk_length + 2) // 2

    def summed_length(self, qk_length: int) -> int:
        # The areas of `_blocks` in closed form, since every decode step needs it.
        size = _block(qk_length)
        whole, rest = divmod(qk_length, size)
        rows = whole - (rest == 0)  # blocks with something to the right of them
        right = size * (rows * qk_length - size * rows * (rows + 1) // 2)
        return whole * size**2 + rest**2 + right + qk_length + 1

    def summed_features(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[:-1].numel() <= FEW and not x.requires_grad and not (transformed() or torch.compiler.is_compiling()):
            left, right, scales = _table(self, x.shape[-1], x.dtype, x.device)
            extended = F.pad(x, (0, 1), value=1.0).flatten(0, -2)
            # Single tokens row by row, as the sums are read; several tokens side by side, which copies whole rows.
            columns = extended.unsqueeze(-1) if x.shape[-2] == 1 else extended.t().contiguous().unsqueeze(0)
            products = columns.index_select(-2, left).mul_(columns.index_select(-2, right)).mul_(scales)
            return products.transpose(-1, -2).reshape(*x.shape[:-1], len(scales))
        a, b, d = self.coefficients(x.shape[-1])
        columns = x.transpose(-1, -2).contiguous()  # tokens last, so that every product runs along them
        # An off-diagonal block also counts for its mirror image: twice the product, a factor sqrt(2) on either side.
        blocks = _blocks(x.shape[-1])
        left = (columns if d == 1 else columns * math.sqrt(d)).unsqueeze(-2)
        on, off = columns.unsqueeze(-3), (columns if len(blocks) == 1 else columns * math.sqrt(2)).unsqueeze(-3)
        pairs = [
            (left.narrow(-3, start, stop - start), (on if start == begin else off).narrow(-2, begin, end - begin))
            for start, stop, begin, end in blocks
        ]
        if out is None:
            outer = [(p * q).flatten(-3, -2) for p, q in pairs]
            rest = [columns * math.sqrt(b), torch.full_like(columns[..., :1, :], math.sqrt(a))]
            return torch.cat([*outer, *rest], dim=-2).transpose(-1, -2)
        many, (length, size) = x.shape[:-2], x.shape[-2:]
        total, at = self.summed_length(size), 0
        features = out[: x.shape[:-1].numel() * total].view(*many, total, length)
        for p, q in pairs:
            rows, wide = p.shape[-3], q.shape[-2]
            torch.mul(p, q, out=features.narrow(-2, at, rows * wide).view(*many, rows, wide, length))
            at += rows * wide
        torch.mul(columns, math.sqrt(b), out=features.narrow(-2, at, size))
        features[..., -1, :].fill_(math.sqrt(a))
        return features.transpose(-1, -2)

    def summed_pairs(self, qk_length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """`summed_features` as a table, on the CPU: feature c is scale_c x_i x_j, where coordinate qk_length is 1."""
        a, b, d = self.coefficients(qk_length)
        pairs: list[tuple[int, int, float]] = []
        for start, stop, begin, end in _blocks(qk_length):
            scale = math.sqrt(d if start == begin else 2 * d)
            pairs += [(i, j, scale) for i in range(start, stop) for j in range(begin, end)]
        pairs += [(i, qk_length, math.sqrt(b)) for i in range(qk_length)]
        left, right, scales = zip(*pairs, (qk_length, qk_length, math.sqrt(a)), strict=True)
        table = torch.tensor([left, right], dtype=torch.int32, device="cpu")
        return table[0], table[1], torch.tensor(scales, dtype=dtype, device="cpu")

    def feature_flops(self, qk_length: int) -> int:
        return 0

    def normaliser_length(self, qk_length: int) -> int:
        return (qk_length + 1) ** 2

    def normaliser(self, k: Tensor, phi: Tensor, real: Tensor | None) -> Tensor:
        """sum of [k, 1] [k, 1]ᵀ: the sums of k kᵀ and of k, and the count, in one square."""
        extended = F.pad(k, (0, 1), value=1.0)
        if real is not None:
            extended = extended.masked_fill(~real[..., None], 0)
        return (extended.transpose(-1, -2) @ extended).flatten(-2)

    def denominator(self, q: Tensor, phi: Tensor, normaliser: Tensor) -> Tensor:
        # The sum of d (q·k + b/2d)² plus a constant, as in `similarity`: d [q, b/2d] square [q, b/2d]ᵀ.
        a, b, d = self.coefficients(q.shape[-1])
        length = q.shape[-1] + 1
        square, rest = normaliser.view(*normaliser.shape[:-1], length, length), a - b * b / (4 * d)
        extended = F.pad(q, (0, 1), value=b / (2 * d))
        total = ((extended @ square) * extended).sum(-1)
        if d != 1:
            total = total * d
        return total if abs(rest) < 1e-12 else total + rest * square[..., -1, -1:]

    def normaliser_flops(self, qk_length: int) -> tuple[int, int]:
        return 2 * (qk_length + 1) ** 2, 2 * (qk_length + 1) ** 2


@dataclass(frozen=True, kw_only=True)
class Quadratic(_Square):
    """(q·k + c)², c at least 0.

    >>> import regard as rg, torch
    >>> x, y = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    >>> phi = rg.Quadratic().features
    >>> len(phi(x)), torch.allclose(phi(x) @ phi(y), (x @ y + 1) ** 2)
    (10, True)
    """

    c: float = 1.0

    def __post_init__(self) -> None:
        _check_constant(self.c)

    def coefficients(self, qk_length: int) -> tuple[float, float, float]:
        return self.c**2, 2 * self.c, 1.0


@dataclass(frozen=True, kw_only=True)
class Taylor(_Square):
    """1 + s + s²/2 with s = q·k / sqrt(qk_length): softmax's exponential to second order, always above 0.

    >>> import regard as rg, torch
    >>> x = torch.full((1, 4), 0.5)
    >>> rg.Taylor().similarity(x, x).item()
    1.625
    """

    def coefficients(self, qk_length: int) -> tuple[float, float, float]:
        return 1.0, qk_length**-0.5, 0.5 / qk_length


@dataclass(frozen=True, kw_only=True)
class Polynomial(FeatureMechanism):
    """(q·k + c)^degree for an even degree, with one feature for each monomial of at most that degree.

    >>> import regard as rg, torch
    >>> x, y = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    >>> phi = rg.Polynomial(degree=4).features
    >>> len(phi(x)), torch.allclose(phi(x) @ phi(y), (x @ y + 1) ** 4)
    (35, True)
    """

    short: ClassVar[bool] = True
    degree: int = 2
    c: float = 1.0

    def __post_init__(self) -> None:
        _check_constant(self.c)
        if not isinstance(self.degree, int) or self.degree < 2 or self.degree % 2:
            raise ValueError(
                f"degree: expected an even number of at least 2, got {self.degree!r}; an odd one gives negative weights"
            )

    def similarity(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        return (q @ k.transpose(-1, -2) + self.c) ** self.degree

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        index, scale = _monomials(x.shape[-1], self.degree)
        extended = torch.cat([x, torch.full_like(x[..., :1], math.sqrt(self.c))], dim=-1)
        return math.prod(extended[..., column] for column in index) * scale.to(x)

    def feature_length(self, qk_length: int) -> int:
        return math.comb(qk_length + self.degree, self.degree)

    def feature_flops(self, qk_length: int) -> int:
        return 0


def _check_constant(c: float) -> None:
    if not isinstance(c, int | float) or not 0 <= c < math.inf:
        raise ValueError(f"c: expected a finite number of at least 0, got {c!r}")


def _block(length: int) -> int:
    """Rows of a block."""
    return 16 if length <= 48 else 8


def _blocks(length: int) -> tuple[tuple[int, int, int, int], ...]:
    """Blocks (start, stop) × (begin, end) of the upper triangle: on the diagonal, and everything to the right of it."""
    size = _block(length)
    edges = [(a, min(a + size, length)) for a in range(0, length, size)]
    right = [(start, stop, stop, length) for start, stop in edges if stop < length]
    return tuple([(start, stop, start, stop) for start, stop in edges] + right)


@kept(32)
def _table(mechanism: _Square, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`summed_pairs` on a device, with the scales as a column; cached, since a mechanism without tensors is a value."""
    left, right, scales = mechanism.summed_pairs(length, dtype)
    return left.to(device), right.to(device), scales[:, None].to(device)


@kept(32)
def _upper(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of each pair of the upper triangle, and the square root of its multiplicity in the square."""
    rows, columns = torch.triu_indices(length, length, device="cpu")
    return rows, columns, (1 + (rows != columns).double()).sqrt()


@kept(32)
def _monomials(length: int, degree: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Index columns of every monomial of length + 1 coordinates, and the square root of its multinomial coefficient."""
    chosen = list(combinations_with_replacement(range(length + 1), degree))
    ways = [
        math.factorial(degree) / math.prod(math.factorial(monomial.count(i)) for i in set(monomial))
        for monomial in chosen
    ]
    return tuple(torch.tensor(chosen, device="cpu").unbind(1)), torch.tensor(
        ways, dtype=torch.float64, device="cpu"
    ).sqrt()
