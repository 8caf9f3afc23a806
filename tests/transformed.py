"""Inputs and comparisons for tests of what PyTorch does with functions."""

import math

import torch
from torch import Tensor

B, H, G, T, K = 2, 4, 2, 7, 3


def inputs(length: int = T, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, length, K, generator=generator, dtype=dtype) for heads in (H, G, G))
    return q, k, v


def spoiled(tensor: Tensor) -> Tensor:
    """With a NaN in the last token."""
    return torch.cat([tensor[:, :, :-1], torch.full_like(tensor[:, :, -1:], math.nan)], dim=2)


def close(actual: Tensor, expected: Tensor) -> bool:
    """Equal, NaN where NaN is expected."""
    return torch.allclose(actual, expected, rtol=1e-11, atol=1e-11, equal_nan=True)
