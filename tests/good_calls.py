"""Good calls of attention and of a stream, in which tests change what is wrong."""

from typing import Any

import torch
from torch import Tensor

import regard as rg

B, H, G, T, S, K, V = 2, 4, 2, 5, 7, 3, 6
COMPUTE = ("mm", "softmax", "scaled_dot_product", "dot", "mv", "einsum", "exp.", "elu")


def query(*shape: int, **how: Any) -> Tensor:
    return torch.ones(*(shape or (B, H, T, K)), **how)


def key(*shape: int, **how: Any) -> Tensor:
    return torch.ones(*(shape or (B, G, S, K)), **how)


def value(*shape: int, **how: Any) -> Tensor:
    return torch.ones(*(shape or (B, G, S, V)), **how)


def attend(mechanism: Any = None, mask: Any = None, q: Any = None, k: Any = None, v: Any = None, **more: Any) -> Tensor:
    """A good call, but for what is passed."""
    tensors = (new if tensor is None else tensor for tensor, new in ((q, query()), (k, key()), (v, value())))
    return rg.attend(*tensors, rg.Softmax() if mechanism is None else mechanism, mask, **more)


def square(mechanism: Any, mask: Any = None, **more: Any) -> Tensor:
    x = torch.ones(B, H, T, K)
    return rg.attend(x, x, x, mechanism, mask, **more)


def start(mechanism: rg.Mechanism, **change: Any) -> Any:
    sizes = dict(batch=B, num_kv_heads=G, qk_length=K, value_length=V, capacity=8, dtype=torch.float32) | change
    return mechanism.start(**sizes)


def extend(
    mechanism: rg.Mechanism | None = None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    state: Any = None,
    mask: Any = rg.causal,
    **more: Any,
) -> Any:
    """A good step of a stream, but for what is passed."""
    mechanism = rg.Softmax() if mechanism is None else mechanism
    state = start(mechanism) if state is None else state
    tensors = (query() if q is None else q, key(B, G, T, K) if k is None else k, value(B, G, T, V) if v is None else v)
    return mechanism.extend(*tensors, state, mask=mask, **more)


def truth(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def later(mechanism: rg.Mechanism, tokens: int = 5) -> Any:
    """A state that has met some tokens."""
    state = start(mechanism)
    _, state = mechanism.extend(query(B, H, tokens, K), key(B, G, tokens, K), value(B, G, tokens, V), state)
    return state
