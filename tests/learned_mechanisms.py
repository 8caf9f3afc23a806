"""Mechanisms that learn, and inputs for them."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import regard as rg
from regard.core.families.features import FeatureMechanism

SIZES = {"vocabulary_size": 11, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}


@dataclass(frozen=True, kw_only=True)
class Bilinear(rg.Mechanism):
    """A user's mechanism with a parameter and a tensor that does not learn."""

    W: nn.Parameter
    shift: torch.Tensor

    def similarity(self, q, k):
        return torch.sigmoid(q @ self.W @ k.transpose(-1, -2) + self.shift)


@dataclass(frozen=True, kw_only=True)
class Projected(FeatureMechanism):
    """A user's kernel with a parameter."""

    W: nn.Parameter

    def features(self, x):
        return torch.nn.functional.softplus(x @ self.W)

    def feature_length(self, qk_length):
        return self.W.shape[1]


LEARNED = {
    "a module": lambda: rg.Kernel(feature_map=nn.Sequential(nn.Linear(8, 6), nn.Softplus())),
    "a parameter": lambda: Bilinear(W=nn.Parameter(torch.randn(8, 8)), shift=torch.ones(1)),
    "a kernel's parameter": lambda: Projected(W=nn.Parameter(torch.randn(8, 6))),
    "a gate": lambda: rg.Gated(gate=nn.Sequential(nn.Linear(8, 8), nn.LogSigmoid())),
}
learned = pytest.mark.parametrize("make", LEARNED.values(), ids=LEARNED)


def attention(mechanism):
    return rg.MultiHeadAttention(16, 2, mechanism=mechanism)


def make_tensors(length, size=4, grad=True):
    return [torch.randn(1, 2, length, size, dtype=torch.float64, requires_grad=grad) for _ in range(3)]


def small_kernel():
    return rg.Kernel(feature_map=nn.Sequential(nn.Linear(4, 5), nn.Softplus()).double())


@dataclass(frozen=True, kw_only=True)
class Shifted(rg.Mechanism):
    """A similarity with a learned number, or one for each head."""

    shift: nn.Parameter

    def similarity(self, q, k):
        return torch.sigmoid(q @ k.transpose(-1, -2) + self.shift)
