"""Inputs for tests of mechanisms that forget."""

import torch
from torch import Tensor

SIZES = {"vocabulary_size": 11, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}
B, H, G, K, V = 2, 4, 2, 6, 3


def draw(length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, length, K), (B, G, length, K), (B, G, length, V)
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def off(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
