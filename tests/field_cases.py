"""Cases for tests of the field's defects: mechanisms, inputs, and their formulas in float64."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.core.calls.call import Call
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens

PAIRS = {
    name: mechanism for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8) and not mechanism.ordered
}
every_mechanism = pytest.mark.parametrize("name", PAIRS)
B, H, G, K, V = 2, 4, 2, 5, 3


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(queries: int, keys: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    keys = queries if keys is None else keys
    q, k = draw(B, H, queries, K, dtype=dtype), draw(B, G, keys, K, seed=1, dtype=dtype)
    return q, k, draw(B, G, keys, V, seed=2, dtype=dtype)


def plain_weights(mechanism: rg.Mechanism, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """The weights in float64, from the formula of each mechanism, pair by pair; 0 for a query that sees nothing."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores, size = q @ k.transpose(-1, -2), q.shape[-1]
    if isinstance(mechanism, rg.Softmax):
        if mechanism.beta == math.inf:
            best = scores.masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
            similar = (scores == best).double()
        else:
            scores = scores * (size**-0.5 if mechanism.beta is None else mechanism.beta)
            if mechanism.softcap is not None:
                scores = mechanism.softcap * torch.tanh(scores / mechanism.softcap)
            similar = torch.exp(scores)
    elif isinstance(mechanism, rg.Quadratic | rg.Polynomial):
        similar = (scores + mechanism.c) ** getattr(mechanism, "degree", 2)
    elif isinstance(mechanism, rg.Taylor):
        similar = 1 + scores * size**-0.5 + scores**2 / (2 * size)
    else:
        similar = mechanism.features(q) @ mechanism.features(k).transpose(-1, -2)
    similar = torch.where(visible, similar, 0.0)
    total = similar.sum(-1, keepdim=True)
    return similar / torch.where(total == 0, 1.0, total)


def plain(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return plain_weights(mechanism, q, k, visible) @ v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def everything(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


def lower(queries: int, keys: int) -> Tensor:
    """Causality with the last query at the last key."""
    return torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]


def close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool(
        (actual - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item())
    )


def usable_paths(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None) -> list[str]:
    call = Call(mechanism, q, k, v, mask)
    return [path.name for path in mechanism.paths() if path.cannot(call) is None]


def stream(
    mechanism: rg.Mechanism, tensors: tuple[Tensor, ...], cuts: list[int], masks: Any = None, state: Any = None
) -> tuple[Tensor, Any]:
    q, k, _ = tensors
    if state is None:
        state = mechanism.start(
            batch=len(q), num_kv_heads=k.shape[1], qk_length=K, value_length=V, capacity=512, dtype=q.dtype
        )
    parts = []
    for low, high in pairwise(cuts):
        mask = rg.causal if masks is None else masks(high)
        out, state = mechanism.extend(*(t[:, :, low:high] for t in tensors), state, mask=mask)
        parts.append(out)
    return torch.cat(parts, dim=2), state
