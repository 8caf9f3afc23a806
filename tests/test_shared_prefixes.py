"""Forks and repeated rows hold their prompt once, whoever extends it, and what cannot share it gets copies."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from test_state_sequences import STREAMING, G, H, K, V, every_stream


@dataclass(frozen=True, kw_only=True)
class Sigmoid(rg.Mechanism):
    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(q @ k.transpose(-1, -2))


def occupied(states: list[Any]) -> int:
    """Bytes of all buffers of some states, each counted once."""
    buffers = [buffer for state in states for run in state.runs for buffer in run.buffers]
    tensors = {tensor.data_ptr(): tensor for buffer in buffers for tensor in buffer.tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("mechanism", "hidden", "storage"),
    [
        (rg.Softmax(), "nothing", None),
        (rg.Softmax(), "left padding", torch.int8),
        (rg.Softmax(), "window", None),
        (rg.Softmax(), "holes", None),
        (rg.Softmax(softcap=3.0), "window", torch.int8),
        (rg.Argmax(), "left padding", None),
    ],
    ids=str,
)
def test_a_hundred_forks_of_a_prompt_hold_it_once(
    mechanism: rg.Softmax, hidden: str, storage: torch.dtype | None
) -> None:
    """Memory of one prompt and a hundred tails, also for forks of a long fork, and the numbers of copies."""
    length, longest = 4096, 4096 + 2300
    x = torch.randn(2, 2, longest, 16, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(2, longest, dtype=torch.bool)
    valid[1, :10] = hidden != "left padding"
    valid[1, 5:9] &= hidden != "holes"
    start = mechanism.start(batch=2, num_kv_heads=1, qk_length=16, value_length=16, capacity=longest, storage=storage)

    def grown(state: Any, count: int) -> tuple[Tensor, Any, Any]:
        low, high = state.length, state.length + count
        mask = rg.causal & rg.padding(valid=valid[:, :high])
        mask = mask & rg.window(before=high - 40) if hidden == "window" else mask
        new = x[:, :, low:high]
        return *mechanism.extend(new, new[:, :1].flip(3), new[:, 1:], state, mask), mask

    def is_right(out: Tensor, state: Any, mask: Any) -> bool:
        q = x[:, :, state.length - 1 : state.length]
        expected = rg.attend(q, state.keys, state.values, mechanism, mask, path="reference")
        return torch.allclose(out[:, :, -1:], expected, atol=1e-5)

    padding = rg.padding(valid=valid[:, :length]).between(0, length, length)
    prompt = start.append(x[:, :1, :length].flip(3), x[:, 1:, :length], padding)
    size = occupied([prompt])
    forks = [grown(prompt, 1)[1] for _ in range(99)]
    first, branch, rule = grown(prompt, 2100)
    assert is_right(first, branch, rule)
    assert occupied([prompt, *forks, branch]) <= size + size // longest * (99 * 64 + 2300)
    assert "shared=4096" in repr(branch)
    assert is_right(*grown(forks[5], 1))
    grown(branch, 1)
    out, fork, rule = grown(branch, 1)
    assert is_right(out, fork, rule)
    assert occupied([branch, fork]) <= occupied([branch]) + size // longest * 64
    assert is_right(*grown(fork.crop(length + 3), 2))
    assert is_right(*grown(fork.crop(length - 3), 2))


def test_a_hundred_continuations_of_a_prompt_hold_it_once() -> None:
    """Memory of one prompt and a hundred tails, whatever the dtype, and the same numbers as a hundred copies."""
    length, rows, sizes = 4096, 100, {"num_kv_heads": 2, "qk_length": 16, "value_length": 16}
    generator = torch.Generator().manual_seed(0)

    def draw(batch: int, heads: int, tokens: int) -> Tensor:
        return torch.randn(batch, heads, tokens, 16, generator=generator)

    for storage in (None, torch.int8):
        mechanism = rg.Softmax()
        prompt = mechanism.start(batch=1, capacity=length + 300, storage=storage, **sizes)
        _, prompt = mechanism.extend(draw(1, 4, length), draw(1, 2, length), draw(1, 2, length), prompt, rg.causal)
        many = prompt.reorder(torch.zeros(rows, dtype=torch.long))
        keys, values = prompt.keys.expand(rows, -1, -1, -1), prompt.values.expand(rows, -1, -1, -1)
        for count in (1, 3, 1):
            q, k, v = draw(rows, 4, count), draw(rows, 2, count), draw(rows, 2, count)
            out, many = mechanism.extend(q, k, v, many, rg.causal)
            kept = many.runs[0].buffer
            keys, values = (
                torch.cat([t, kept.read(w, many.length - length)[:, :, -count:]], 2)
                for w, t in enumerate((keys, values))
            )
            assert torch.allclose(out, rg.attend(q, keys, values, mechanism, rg.causal, path="reference"), atol=1e-5)
        tails = prompt.nbytes // (length + 300) * rows * 64
        assert many.nbytes <= prompt.nbytes + tails


def test_what_cannot_be_merged_gets_copies_once() -> None:
    """A bias or a gradient over a shared prefix: right, and no copy at the next step."""
    mechanism, sizes = rg.Softmax(), {"num_kv_heads": G, "qk_length": K, "value_length": V, "dtype": torch.float64}
    generator = torch.Generator().manual_seed(0)

    def draw(batch: int, heads: int, tokens: int, size: int) -> Tensor:
        return torch.randn(batch, heads, tokens, size, generator=generator, dtype=torch.float64)

    q, k, v = draw(1, H, 300, K), draw(1, G, 300, K), draw(1, G, 300, V)
    prompt = mechanism.extend(q, k, v, mechanism.start(batch=1, capacity=310, **sizes), rg.causal)[1]
    many = prompt.reorder(torch.zeros(3, dtype=torch.long))
    assert many.in_parts
    assert not prompt.in_parts
    q, new_k, new_v = draw(3, H, 1, K), draw(3, G, 1, K), draw(3, G, 1, V)
    keys = torch.cat([k.expand(3, -1, -1, -1), new_k], 2), torch.cat([v.expand(3, -1, -1, -1), new_v], 2)
    bias = draw(1, 1, 1, 301)
    for term, query in ((bias, q), (None, q.clone().requires_grad_())):
        out, longer = mechanism.extend(query, new_k, new_v, many, rg.causal, bias=term)
        assert not longer.in_parts
        assert torch.allclose(out, rg.attend(q, *keys, mechanism, rg.causal, bias=term, path="reference"), atol=1e-12)


@pytest.mark.parametrize("learned", ["k", "v", "prefix"])
def test_gradients_over_a_shared_prefix_are_those_of_copies(learned: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(batch: int, heads: int, tokens: int, size: int) -> Tensor:
        return torch.randn(batch, heads, tokens, size, generator=generator, dtype=torch.float64)

    mechanism, sizes = rg.Softmax(), {"num_kv_heads": G, "qk_length": K, "value_length": V, "dtype": torch.float64}
    q, k, v = draw(1, H, 300, K), draw(1, G, 300, K), draw(1, G, 300, V)
    k.requires_grad_(learned == "prefix")
    prompt = mechanism.extend(q, k, v, mechanism.start(batch=1, capacity=310, **sizes), rg.causal)[1]
    with torch.no_grad():
        many = prompt.reorder(torch.zeros(3, dtype=torch.long))
    if learned == "prefix":
        many = prompt.reorder(torch.zeros(3, dtype=torch.long))
    q, new_k, new_v = draw(3, H, 2, K), draw(3, G, 2, K), draw(3, G, 2, V)
    leaf = {"k": new_k, "v": new_v, "prefix": k}[learned].requires_grad_()
    whole = torch.cat([k.expand(3, -1, -1, -1), new_k], 2), torch.cat([v.expand(3, -1, -1, -1), new_v], 2)
    out, _ = mechanism.extend(q, new_k, new_v, many, rg.causal)
    expected = rg.attend(q, *whole, mechanism, rg.causal, path="reference")
    grads = [torch.autograd.grad(result.square().sum(), leaf)[0] for result in (out, expected)]
    assert torch.allclose(*grads, atol=1e-12)


def test_a_shared_state_goes_on_with_any_mechanism_that_keeps_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, G, 300, size, generator=generator, dtype=torch.float64) for size in (K, V))
    q = torch.randn(3, H, 1, K, generator=generator, dtype=torch.float64)
    state = rg.Softmax().start(batch=1, num_kv_heads=G, qk_length=K, value_length=V, dtype=torch.float64).append(k, v)
    new = k[:, :, :1].expand(3, -1, -1, -1), v[:, :, :1].expand(3, -1, -1, -1)
    many = state.reorder(torch.zeros(3, dtype=torch.long))
    assert many.in_parts
    out, _ = Sigmoid().extend(q, *new, many, rg.causal)
    whole = [torch.cat([old.expand(3, -1, -1, -1), more], 2) for old, more in zip((k, v), new, strict=True)]
    assert torch.allclose(out, rg.attend(q, *whole, Sigmoid(), rg.causal, path="reference"), atol=1e-12)


@every_stream
def test_threads_that_extend_one_state_are_all_right(name: str) -> None:
    """Many threads claim the same positions of one buffer; one of them writes there, the others copy."""
    mechanism, past, workers, rounds = STREAMING[name], 20, 4, 40
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, size: int) -> Tensor:
        return torch.randn(1, heads, length, size, generator=generator, dtype=torch.float64)

    q, k, v = draw(H, past, K), draw(G, past, K), draw(G, past, V)
    more = [(draw(H, 1, K), draw(G, 1, K), draw(G, 1, V)) for _ in range(workers)]
    expected = [
        rg.attend(new_q, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), mechanism, path="reference")
        for new_q, new_k, new_v in more
    ]
    wrong: list[float] = []

    def work(worker: int, state: Any, together: threading.Barrier) -> None:
        together.wait()
        out, longer = mechanism.extend(*more[worker], state, mask=rg.causal)
        early = longer.crop(past) if longer.earliest <= past else state
        again, _ = mechanism.extend(*more[worker], early, mask=rg.causal)
        difference = max((out - expected[worker]).abs().max().item(), (again - expected[worker]).abs().max().item())
        if not difference <= 1e-9:
            wrong.append(difference)

    for _ in range(rounds):
        empty = mechanism.start(
            batch=1, num_kv_heads=G, qk_length=K, value_length=V, capacity=past + 1, dtype=torch.float64
        )
        _, state = mechanism.extend(q, k, v, empty, mask=rg.causal)
        together = threading.Barrier(workers)
        threads = [threading.Thread(target=work, args=(worker, state, together)) for worker in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("past", [20, 2100], ids=["copied", "shared"])
def test_600_extensions_of_one_state_by_two_threads_are_all_right(past: int) -> None:
    mechanism, kinds = rg.Softmax(), 6
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 1, past, 16, generator=generator) for _ in range(2))
    tokens = torch.randn(kinds, 3, 1, 1, 1, 16, generator=generator)
    state = mechanism.start(batch=1, num_kv_heads=1, qk_length=16, value_length=16, capacity=past + 9).append(k, v)
    expected = [
        rg.attend(q, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), mechanism, path="reference")
        for q, new_k, new_v in tokens
    ]
    forks: list[tuple[int, Tensor, Any]] = []
    together = threading.Barrier(2)

    def work(first: int) -> None:
        together.wait()
        for turn in range(300):
            kind = (first + turn) % kinds
            forks.append((kind, *mechanism.extend(*tokens[kind], state, mask=rg.causal)))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(forks) == 600
    assert all(torch.allclose(out, expected[kind], atol=1e-6) for kind, out, _ in forks)
    assert all(torch.equal(longer.keys[:, :, -1:], tokens[kind, 1]) for kind, _, longer in forks)
    in_place = [longer for _, _, longer in forks if longer.buffer is state.buffer]
    assert len(in_place) == 1
    assert sum(longer.in_parts for _, _, longer in forks) == (599 if past > 1000 else 0)


@every_stream
def test_forks_and_orders_hold_what_was_met_not_the_capacity(name: str) -> None:
    mechanism = STREAMING[name]
    sizes = []
    for capacity in (128, 4096):
        state = mechanism.start(batch=2, num_kv_heads=G, qk_length=K, value_length=V, capacity=capacity)
        tokens = torch.randn(2, H, 40, K), torch.randn(2, G, 40, K), torch.randn(2, G, 40, V)
        _, state = mechanism.extend(*tokens, state, mask=rg.causal)
        mechanism.extend(*(t[:, :, :1] for t in tokens), state, mask=rg.causal)
        _, fork = mechanism.extend(*(t[:, :, :1] for t in tokens), state, mask=rg.causal)
        sizes.append((state.reorder(torch.tensor([1, 0])).nbytes, fork.nbytes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [24, 32])
def test_a_fork_in_half_precision_is_the_whole_sequence(dtype: torch.dtype, length: int) -> None:
    """Also at a head dimension that the JIT-compiled code does not take."""
    tokens = 2100
    q, k, v = (t.to(dtype) for t in torch.randn(3, 1, 2, tokens + 1, length).unbind())
    sizes = {"batch": 1, "num_kv_heads": 2, "qk_length": length, "value_length": length, "capacity": tokens + 1}
    with torch.no_grad():
        _, state = rg.Softmax().extend(
            q[:, :, :tokens], k[:, :, :tokens], v[:, :, :tokens], rg.Softmax().start(**sizes, dtype=dtype), rg.causal
        )
        newest = q[:, :, tokens:], k[:, :, tokens:], v[:, :, tokens:]
        rg.Softmax().extend(*newest, state, rg.causal)
        out, fork = rg.Softmax().extend(*newest, state, rg.causal)
    assert "shared" in repr(fork)
    assert out.dtype == dtype
    expected = rg.attend(newest[0].double(), k.double(), v.double(), rg.Softmax(), rg.causal)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=1e-2)
