"""The sums of a stream between calls of many tokens: from the layout a state keeps to that of the kernels, and back."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.kernels import feature_attention, square_attention, square_sizes
from regard.core.kernels.step_attention import Form


@dataclass(frozen=True, eq=False)
class Pairs:
    """The features of a second-order polynomial, as a state's sums hold them, on one device.

    Feature c is scale_c x_i x_j of coordinates left_c and right_c, where coordinate qk_length is 1. The squares come
    first, then qk_length linear features, then the constant one.
    """

    qk_length: int
    coefficients: tuple[float, float, float]
    left: Tensor
    right: Tensor
    scale: Tensor
    source: Tensor
    """For each feature of quadratic.py, the index of the same product among the state's features."""
    divided: Tensor
    """1 over the scale of that product; 0 for a feature of quadratic.py that is padding."""
    target: Tensor
    """For each product among the state's features, the index of quadratic.py's feature."""

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.left, self.right, self.scale

    @property
    def form(self) -> Form:
        """phi as the kernels for one token compute it."""
        a, b, d = self.coefficients
        rest = a - b * b / (4 * d)
        return Form("square", b / (2 * d), d, rest / d if abs(rest) > 1e-12 else 0.0)


def pairs_of(
    qk_length: int,
    coefficients: tuple[float, float, float],
    pairs: tuple[Tensor, Tensor, Tensor],
    device: torch.device,
) -> Pairs:
    """The tables of a polynomial, on a device."""
    left, right, scale = pairs
    squares = len(left) - qk_length - 1
    i, j = left[:squares].long(), right[:squares].long()
    target = _feature(i, j)
    blocks = -(-qk_length // 16)
    source = torch.zeros(blocks * (blocks + 1) * square_sizes.UNIT, dtype=torch.long)
    divided = torch.zeros(len(source))
    # Within a block of 16 the kernels hold both (i, j) and (j, i), and the state may hold one of them.
    for a, b in ((i, j), (j, i)):
        source[_feature(a, b)] = torch.arange(squares)
        divided[_feature(a, b)] = 1 / scale[:squares]
    tables = (table.to(device) for table in (left, right, scale, source, divided, target))
    return Pairs(qk_length, coefficients, *tables)


def _feature(i: Tensor, j: Tensor) -> Tensor:
    """Where quadratic.py has the feature of coordinates i and j: its `feature`."""
    swap = i // 16 > j // 16
    first, second = torch.where(swap, j, i), torch.where(swap, i, j)
    block = second // 16
    return (block * (block + 1) + first // 8) * 128 + first % 8 * 16 + second % 16


@dataclass(frozen=True)
class SquareSums:
    """Sums of a second-order polynomial, for keys and values of aligned lengths."""

    pairs: Pairs
    tiles: square_sizes.Tiles

    def unpack(self, sums: Tensor, normaliser: Tensor) -> square_sizes.Sums:
        """From a state's sums (B, G, C, V) and normaliser (B, G, N)."""
        t, length, value_length = self.tiles, self.pairs.qk_length, sums.shape[3]
        a, b, _ = self.pairs.coefficients
        sums, normaliser = sums.flatten(0, 1), normaliser.flatten(0, 1).unflatten(-1, (length + 1, length + 1))
        wide, long = t.v - value_length, t.d - length
        square = F.pad(sums[:, self.pairs.source] * self.pairs.divided[:, None], (0, wide))
        linear = sums[:, -length - 1 : -1] * (1 / math.sqrt(b) if b else 0.0)
        parts = [
            F.pad(linear, (0, wide, 0, long)),
            F.pad(normaliser[:, :length, :length], (0, long, 0, long)),
            F.pad(normaliser[:, :length, length], (0, long)),
            F.pad(sums[:, -1] * (1 / math.sqrt(a) if a else 0.0), (0, wide)),
            normaliser[:, length, length:],
        ]
        small = torch.cat([part.flatten(1) for part in parts], 1)
        return square, F.pad(small, (0, t.size - small.shape[1]))

    def pack(self, kernel_sums: square_sizes.Sums, like: Tensor) -> tuple[Tensor, Tensor]:
        """The state's sums, shaped `like` others, and normaliser, from the kernels' layout."""
        t, length, shape = self.tiles, self.pairs.qk_length, like.shape
        a, b, _ = self.pairs.coefficients
        square, small = kernel_sums
        linear, second, first, constant, count, _ = small.split(
            [t.d * t.v, t.d * t.d, t.d, t.v, 1, t.size - t.d * t.v - t.d * t.d - t.d - t.v - 1], 1
        )
        squares = square[:, self.pairs.target] * self.pairs.scale[: len(self.pairs.target), None]
        linear = linear.unflatten(1, (t.d, t.v))[:, :length] * math.sqrt(b)
        sums = torch.cat([squares, linear, constant[:, None] * math.sqrt(a)], 1)[..., : shape[3]]
        side = first[:, :length, None]
        upper = torch.cat([second.unflatten(1, (t.d, t.d))[:, :length, :length], side], 2)
        lower = torch.cat([side.mT, count[:, None]], 2)
        return sums.reshape(shape).contiguous(), torch.cat([upper, lower], 1).reshape(*shape[:2], -1)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, kernel_sums: Any, folds: bool
    ) -> tuple[Tensor, Any]:
        """The output of the last tokens of k and v, which come after those in the sums; and, if it folds, the sums with
        all of them."""
        work = square_sizes.work_of(q, k, v, *self.pairs.coefficients, True)
        final = square_sizes.no_sums(work, q) if folds else None
        if not work.queries:
            assert final is not None
            square_attention.fold(work, k, v, bounds, kernel_sums, final)
            return q.new_empty(*q.shape[:3], v.shape[3]), final
        return square_attention.forward(work, q, k, v, bounds, False, kernel_sums, final)[0], final


@dataclass(frozen=True)
class FeatureSums:
    """Sums of few features, "elu" or "given", for keys and values of aligned lengths."""

    feature_map: str
    tiles: feature_attention.Tiles

    def unpack(self, sums: Tensor, normaliser: Tensor) -> Tensor:
        """From a state's sums (B, G, C, V) and normaliser (B, G, C)."""
        t, (features, value_length) = self.tiles, sums.shape[2:]
        padded = F.pad(sums.flatten(0, 1), (0, t.v - value_length, 0, t.c - features)).flatten(1)
        return torch.cat([padded, F.pad(normaliser.flatten(0, 1), (0, t.c - features))], 1)

    def pack(self, kernel_sums: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The state's sums, shaped `like` others, and normaliser, from the kernels' layout."""
        t, shape = self.tiles, like.shape
        sums, first = kernel_sums.split([t.c * t.v, t.c], 1)
        sums = sums.unflatten(1, (t.c, t.v))[:, : shape[2], : shape[3]]
        return sums.reshape(shape).contiguous(), first[:, : shape[2]].reshape(shape[:3]).contiguous()

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, kernel_sums: Any, folds: bool
    ) -> tuple[Tensor, Any]:
        """The output of the last tokens of k and v, which come after those in the sums; and, if it folds, the sums with
        all of them."""
        work = feature_attention.work_of(q, k, v, self.feature_map, True)
        final = feature_attention.no_sums(work, q) if folds else None
        if not work.queries:
            assert final is not None
            feature_attention.fold(work, k, v, bounds, kernel_sums, final)
            return q.new_empty(*q.shape[:3], v.shape[3]), final
        return feature_attention.forward(work, q, k, v, bounds, kernel_sums, final)[0], final
