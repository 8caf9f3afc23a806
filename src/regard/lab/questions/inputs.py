"""What questions measure with: a layer, numbers that are always the same, weights of scores."""

from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.lab.statistics import generator

B, T, S, E, H, K, V = 2, 5, 7, 32, 4, 8, 6


def weights_of(scores: Tensor) -> Tensor:
    """The softmax of scores, as the library computes weights: keys are unit vectors.

    >>> weights_of(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """
    units = torch.eye(scores.shape[-1], dtype=scores.dtype)
    return rg.weights(scores[None, None, None], units[None, None], rg.Softmax(beta=1.0))[0, 0, 0]


def layer(**changes: Any) -> rg.MultiHeadAttention:
    """The layer of the questions: E = 32, four heads, keys of length 8 and values of length 6.

    >>> layer().W_v.out_features
    24
    """
    sizes: dict[str, Any] = {"embedding_dim": E, "num_heads": H, "qk_length": K, "value_length": V, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return rg.MultiHeadAttention(**sizes)


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Random numbers of a shape, always the same.

    >>> numbers(2, 3).shape
    torch.Size([2, 3])
    """
    return torch.randn(*size, generator=generator(seed))
