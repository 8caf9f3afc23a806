"""Attention inside what PyTorch does with functions: threads, compilation, and transforms of whole functions."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.call import all_finite

B, H, G, T, K = 2, 4, 2, 7, 3


def inputs(length: int = T, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, length, K, generator=generator, dtype=dtype) for heads in (H, G, G))
    return q, k, v


def spoiled(tensor: Tensor) -> Tensor:
    """With a NaN in the last token."""
    return torch.cat([tensor[:, :, :-1], torch.full_like(tensor[:, :, -1:], math.nan)], dim=2)


@contextmanager
def another_thread_takes_all_for_finite() -> Iterator[None]:
    inside, done = threading.Event(), threading.Event()

    def trust() -> None:
        with all_finite():
            inside.set()
            done.wait()

    thread = threading.Thread(target=trust)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_all_finite_is_a_policy_of_its_own_thread(compiled: bool) -> None:
    """A training thread trusts its numbers; a thread that serves beside it must not."""
    q, k, v = inputs()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attend(q, k, v, mask=rg.causal)

    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    expected = attend(q, k, v)[:, :, :-1]
    with all_finite():  # where there is a graph, one is made for this policy
        assert torch.equal(call(q, k, v)[:, :, :-1], expected)
    with another_thread_takes_all_for_finite():
        out = call(q, spoiled(k), spoiled(v))
    assert torch.equal(out[:, :, :-1], expected)
    assert out[:, :, -1].isnan().all()
