"""Streams of every mechanism, and the plain formulas of their whole histories, written down again."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.core.families.features import RECENT

B, H, G, K, V = 3, 4, 2, 5, 6
CACHED = {"softmax": rg.Softmax(), "softcap": rg.Softmax(softcap=5.0), "argmax": rg.Argmax(), "uniform": rg.Uniform()}
SUMMED = {"quadratic": rg.Quadratic(), "taylor": rg.Taylor(), "elu": rg.Elu(), "random": rg.RandomFeatures(n=7)}
FADING = {
    "retention": rg.Retention(),
    "gated": rg.Gated(),
    "a gate": rg.Gated(gate=lambda k: -k.square().sum(-1, keepdim=True)),
    "features' gates": rg.Gated(gate=lambda k: -k.square()),
    "delta": rg.Delta(rate=lambda k: torch.sigmoid(k.sum(-1, keepdim=True))),
}
STREAMS = CACHED | SUMMED | FADING
LONG = 2 * RECENT + 45
"""Long enough that a kernel's state folds more than once, and not a multiple of anything."""

every_stream = pytest.mark.parametrize("name", STREAMS)
every_cache = pytest.mark.parametrize("name", CACHED)
every_sum = pytest.mark.parametrize("name", SUMMED)


def tokens(length: int, dtype: torch.dtype = torch.float64, batch: int = B, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, H, length, K), (batch, G, length, K), (batch, G, length, V)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def similarity(mechanism: rg.Mechanism, q: Tensor, k: Tensor) -> Tensor:
    """How alike queries and keys are, written down again from the formulas, up to a factor for each query."""
    scores = q @ k.transpose(-1, -2)
    if mechanism == rg.Argmax():
        raise AssertionError("a choice has no similarity")
    if isinstance(mechanism, rg.Softmax):
        scores = scores * (K**-0.5 if mechanism.beta is None else mechanism.beta)
        if mechanism.softcap is not None:
            scores = mechanism.softcap * torch.tanh(scores / mechanism.softcap)
        return torch.exp(scores)
    if isinstance(mechanism, rg.Quadratic):
        return (scores + 1) ** 2
    if isinstance(mechanism, rg.Taylor):
        return 1 + scores * K**-0.5 + scores**2 / (2 * K)
    return mechanism.features(q) @ mechanism.features(k).transpose(-1, -2)


def plain(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The plain formula in the tensors' own dtype."""
    if mechanism.ordered:
        return recurrence(mechanism, q, k, v, visible)
    k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    if mechanism == rg.Argmax():
        scores = (q @ k.transpose(-1, -2)).masked_fill(~visible, -math.inf)
        similar = (scores == scores.amax(-1, keepdim=True)) & visible
        similar = similar.to(q.dtype)
    else:
        similar = similarity(mechanism, q, k).masked_fill(~visible, 0)
    total = similar.sum(-1, keepdim=True)
    return (similar / total.masked_fill(total == 0, 1)) @ v


def recurrence(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T and q_t S_t, token by token; of a hidden key only retention's gate counts. The
    delta rule adds k_t (v_t - k_t S_{t-1})^T in its place, by its rate."""
    real = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)[:, 0, -1, :, None, None]  # (B or 1, T, 1, 1)
    delta = isinstance(mechanism, rg.Delta)
    gates = k.new_zeros(()).expand_as(k) if delta else mechanism.log_gates(k, None).expand_as(k)
    rates = torch.sigmoid(k.sum(-1, keepdim=True)) if delta else torch.ones_like(k[..., :1])
    k = torch.nn.functional.normalize(k, dim=-1) if delta else k
    k, v, gates, rates = (t.repeat_interleave(H // G, dim=1) for t in (k, v, gates, rates))
    if not isinstance(mechanism, rg.Retention):
        gates = gates.masked_fill(~real[:, None, :, :, 0], 0)
    sums, out = k.new_zeros(*k.shape[:2], K, v.shape[3]), []
    for t in range(k.shape[2]):
        value = v[:, :, t, None] - k[:, :, t, None] @ sums if delta else v[:, :, t, None]
        new = rates[:, :, t, :, None] * k[:, :, t, :, None] * value
        sums = gates[:, :, t, :, None].exp() * sums + new.masked_fill(~real[:, t, :, None], 0)
        out.append(q[:, :, t, None] @ sums * K**-0.5)
    return torch.cat(out, 2)


def triangle(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def start(mechanism: rg.Mechanism, capacity: int = 512, dtype: torch.dtype = torch.float64, batch: int = B) -> Any:
    return mechanism.start(
        batch=batch, num_kv_heads=G, qk_length=K, value_length=V, capacity=capacity, dtype=dtype, device="cpu"
    )


def piece(tensors: tuple[Tensor, ...], low: int, high: int) -> tuple[Tensor, ...]:
    return tuple(t[:, :, low:high] for t in tensors)


def stream(
    mechanism: rg.Mechanism, tensors: tuple[Tensor, ...], cuts: list[int], state: Any, masks: Any = None
) -> tuple[Tensor, Any]:
    """Extend a state by the pieces between the cuts; `masks(length)` is the mask over a history of that length."""
    parts = []
    for low, high in pairwise(cuts):
        mask = rg.causal if masks is None else masks(high)
        out, state = mechanism.extend(*piece(tensors, low, high), state, mask=mask)
        parts.append(out)
    return torch.cat(parts, dim=2), state


def close(actual: Tensor, expected: Tensor) -> bool:
    """Equal to 1e-12 in float64, values of any size counted from 1."""
    return bool((actual - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item()))


def left(starts: Tensor, length: int) -> rg.Mask:
    return rg.padding(valid=torch.arange(length) >= starts[:, None])
