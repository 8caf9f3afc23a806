"""Any sequence of state operations gives what the plain formula gives over the same history."""

import math
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import regard as rg
from regard.mechanisms import REGISTRY

H, G, K, V = 2, 1, 4, 3
CAPACITY = 400
STREAMING = {name: mechanism for name, mechanism in REGISTRY.items() if mechanism.streams(K) is None}
every_stream = pytest.mark.parametrize("name", STREAMING)


@dataclass
class History:
    """A state, and all that it has met."""

    state: Any
    keys: Tensor
    values: Tensor
    valid: Tensor

    @property
    def batch(self) -> int:
        return len(self.keys)


class Sequences(RuleBasedStateMachine):
    """States that fork, reorder, crop and grow, in any order, beside their plain histories."""

    mechanism: rg.Mechanism

    @initialize(
        batch=st.integers(1, 3), seed=st.integers(0, 9), prompt=st.sampled_from([130, 20, 200, 0]), holes=st.booleans()
    )
    def begin(self, batch: int, seed: int, prompt: int, holes: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        state = self.mechanism.start(
            batch=batch, num_kv_heads=G, qk_length=K, value_length=V, capacity=CAPACITY, dtype=torch.float64
        )
        empty = History(state, self.draw(batch, G, 0, K), self.draw(batch, G, 0, V), torch.ones(batch, 0).bool())
        self.histories = [empty]
        self.grow(empty, prompt, torch.rand(batch, prompt, generator=self.generator) < 0.7 if holes else None, False)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def pick(self, data: Any) -> History:
        """Mostly the newest: what goes wrong shows in what comes after it."""
        return self.histories[data.draw(st.sampled_from([-1, -1, -1, 0, -2]), label="which") % len(self.histories)]

    @rule(
        data=st.data(),
        count=st.sampled_from([130, 1, 90, 1, 64, 7, 63]),
        hidden=st.sampled_from(["none", "left", "holes"]),
        poison=st.booleans(),
    )
    def extend(self, data: Any, count: int, hidden: str, poison: bool) -> None:
        past = self.pick(data)
        count = min(count, CAPACITY - past.state.length)
        new = None
        if hidden == "left":
            rows = [data.draw(st.integers(0, count), label="padding") for _ in range(past.batch)]
            new = torch.arange(count) >= torch.tensor(rows)[:, None]
        elif hidden == "holes":
            new = torch.rand(past.batch, count, generator=self.generator) < 0.7
        self.grow(past, count, new, poison)

    def grow(self, past: History, count: int, new: Tensor | None, poison: bool) -> None:
        """Extend a state by tokens of which `new` says which are real, and compare with the plain formula."""
        new = torch.ones(past.batch, count, dtype=torch.bool) if new is None else new
        q, k, v = (self.draw(past.batch, heads, count, size) for heads, size in ((H, K), (G, K), (G, V)))
        clean = torch.cat([past.keys, k], 2), torch.cat([past.values, v], 2)
        valid = torch.cat([past.valid, new], 1)
        if poison:
            k, v = (t.masked_fill(~new[:, None, :, None], math.nan) for t in (k, v))
        mask = rg.causal if bool(valid.all()) else rg.causal & rg.padding(valid=valid)
        out, state = self.mechanism.extend(q, k, v, past.state, mask=mask)
        expected = rg.attend(q, *clean, self.mechanism, rg.causal & rg.padding(valid=valid), path="reference")
        assert torch.allclose(out, expected, rtol=0, atol=1e-9 * max([1.0, *expected.abs().flatten().tolist()]))
        self.remember(History(state, *clean, valid))

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        past = self.pick(data)
        index = torch.tensor(data.draw(st.lists(st.integers(0, past.batch - 1), min_size=1, max_size=3), label="rows"))
        self.remember(History(past.state.reorder(index), past.keys[index], past.values[index], past.valid[index]))

    @rule(data=st.data(), back=st.integers(1, 70))
    def crop(self, data: Any, back: int) -> None:
        past = self.pick(data)
        length = max(getattr(past.state, "folded", 0), past.state.length - back)
        cut = past.keys[:, :, :length], past.values[:, :, :length], past.valid[:, :length]
        self.remember(History(past.state.crop(length), *cut))

    def remember(self, history: History) -> None:
        self.histories = [*self.histories[-4:], history]

    @invariant()
    def lengths_agree(self) -> None:
        for past in getattr(self, "histories", ()):
            assert past.state.length == past.keys.shape[2]


@every_stream
def test_any_sequence_of_operations_is_its_history(name: str) -> None:
    kind = type("Sequences", (Sequences,), {"mechanism": STREAMING[name]})
    limits = settings(
        max_examples=40, stateful_step_count=8, phases=[Phase.generate], deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(kind, settings=limits)


@every_stream
def test_every_allowed_crop_goes_on(name: str) -> None:
    """A kernel may have folded more than its cropped length alone would have."""
    mechanism, length = STREAMING[name], 200
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, size, generator=generator, dtype=torch.float64)
               for heads, size in ((H, K), (G, K), (G, V)))  # fmt: skip
    whole = rg.attend(q, k, v, mechanism, rg.causal, path="reference")
    start = mechanism.start(batch=1, num_kv_heads=G, qk_length=K, value_length=V, capacity=length, dtype=torch.float64)
    for met in (130, 200):
        _, state = mechanism.extend(q[:, :, :met], k[:, :, :met], v[:, :, :met], start, mask=rg.causal)
        for kept in range(getattr(state, "folded", 0), met):
            here = slice(kept, kept + 1)
            out, _ = mechanism.extend(q[:, :, here], k[:, :, here], v[:, :, here], state.crop(kept), mask=rg.causal)
            assert torch.allclose(out, whole[:, :, here], atol=1e-9)


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

    def work(own: int, state: Any, together: threading.Barrier) -> None:
        together.wait()
        out, longer = mechanism.extend(*more[own], state, mask=rg.causal)
        again, _ = mechanism.extend(*more[own], longer.crop(past), mask=rg.causal)
        difference = max((out - expected[own]).abs().max().item(), (again - expected[own]).abs().max().item())
        if not difference <= 1e-9:
            wrong.append(difference)

    for _ in range(rounds):
        empty = mechanism.start(
            batch=1, num_kv_heads=G, qk_length=K, value_length=V, capacity=past + 1, dtype=torch.float64
        )
        _, state = mechanism.extend(q, k, v, empty, mask=rg.causal)
        together = threading.Barrier(workers)
        threads = [threading.Thread(target=work, args=(own, state, together)) for own in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


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
