"""The overhead of short calls and decode steps beyond the PyTorch kernels that they need."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.commands.suite.harness import Bench, Result, interleaved
from regard.core.attention import attend
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, causal, padding
from regard.core.mechanisms import Elu, Quadratic, Softmax

CALLS = 200
"""Calls that are timed together."""


class _Recorded(TorchDispatchMode):
    """Records the operators of a computation, to run them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def again(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def _call() -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v = (torch.randn(1, 8, 8, 64) for _ in range(3))
    return lambda: attend(q, k, v), lambda: F.scaled_dot_product_attention(q, k, v)


def _history(mechanism: Mechanism, batch: int, tokens: int, mask: Mask) -> tuple[Any, Tensor]:
    x = torch.randn(batch, 8, tokens, 64)
    state = mechanism.start(batch=batch, num_kv_heads=8, qk_length=64, value_length=64, capacity=tokens + 16)
    return mechanism.extend(x, x, x, state, mask)[1], x


def _step(padded: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    real = torch.arange(16) >= torch.tensor([[4 if padded else 0], [0]])
    mechanism, mask = Softmax(), causal & padding(valid=real) if padded else causal
    state, x = _history(mechanism, 2 if padded else 1, 16, mask)
    new = torch.randn(len(x), 8, 1, 64)
    keys = torch.cat([x, new], 2)
    visible = torch.cat([real, torch.ones(2, 1, dtype=torch.bool)], 1)[:, None, None] if padded else None

    def ours() -> Tensor:
        state.buffer.used = state.length  # the same step again, in place
        return mechanism.extend(new, new, new, state, causal)[0]

    return ours, lambda: F.scaled_dot_product_attention(new, keys, keys, attn_mask=visible)


def _kernel(mechanism: Mechanism) -> tuple[Callable[[], Any], Callable[[], Any]]:
    state, _ = _history(mechanism, 1, 300, causal)
    new = torch.randn(1, 8, 1, 64)

    def ours() -> Tensor:
        state.recent.buffer.used = state.recent.length
        return mechanism.extend(new, new, new, state, causal)[0]

    ours()
    with _Recorded() as recorded:
        ours()
    return ours, recorded.again


def _measure(make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]], allowed: int, bench: Bench) -> Result:
    def many(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                call()

        return run

    ours, peer = (seconds / CALLS for seconds in interleaved([many(call) for call in make()], bench.rounds))
    beyond = (ours - peer) * 1e6
    note = f"{ours * 1e6:.0f} µs, {beyond:.0f} beyond; {allowed} allowed"
    goal = peer / (peer + allowed * 1e-6)  # the ratio at which ours takes what is allowed beyond the peer
    return Result(bench.name, bench.title, bench.peer, goal, peer / ours, ours * 1e3, peer * 1e3, note)


def _bench(name: str, title: str, peer: str, make: Any, allowed: int) -> Bench:
    return Bench(name, title, peer, None, special=partial(_measure, make, allowed))


_SAME = "its own PyTorch operators"
BENCHES = [
    _bench("call-8", "a call of 8 tokens, 8 heads, D=64", "SDPA", _call, 12),
    _bench("step-16", "a step of a stream, 16 tokens before", "SDPA over a ready cache", partial(_step, False), 40),
    _bench("step-16-padded", "the same of 2 padded rows", "SDPA with a ready mask", partial(_step, True), 60),
    _bench("step-elu", "a step of Elu's stream, 300 tokens before", _SAME, partial(_kernel, Elu()), 150),
    _bench("step-quadratic", "a step of the quadratic's", _SAME, partial(_kernel, Quadratic()), 150),
]
