"""Any sequence of state operations gives what the plain formula gives over the same history."""

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
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
from safetensors.torch import save_file
from torch import Tensor

import regard as rg
from regard.checkpoints.sources import open_safetensors
from regard.core.masks.structure import Structure
from regard.core.mechanisms import REGISTRY
from regard.core.states.buffer import quantize
from regard.inference.generation.prompt import _Stored

H, G, K, V = 2, 1, 4, 3
CAPACITY = 600
STREAMING = {name: mechanism for name, mechanism in REGISTRY.items() if mechanism.streams(K) is None}
every_stream = pytest.mark.parametrize("name", STREAMING)


@dataclass(frozen=True, kw_only=True)
class Sigmoid(rg.Mechanism):
    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(q @ k.transpose(-1, -2))


@dataclass
class History:
    """A state, and all that it has met."""

    state: Any
    keys: Tensor
    values: Tensor
    valid: Tensor
    bad: Tensor
    """Which tokens came with a NaN in their values; what stands in `values` is what they would have been."""

    @property
    def batch(self) -> int:
        return len(self.keys)


class Sequences(RuleBasedStateMachine):
    """States that fork, reorder, crop and grow, in any order, beside their plain histories."""

    mechanism: rg.Mechanism
    sizes: tuple[int, int] = (K, V)
    dtype = torch.float64
    storage: torch.dtype | None = None
    error = 1e-9

    @initialize(
        batch=st.integers(1, 4),
        seed=st.integers(0, 9),
        prompt=st.sampled_from([130, 20, 300, 0]),
        hidden=st.sampled_from(["left", "right", "none", "holes"]),
    )
    def begin(self, batch: int, seed: int, prompt: int, hidden: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        keys, values = (self.draw(batch, G, 0, size) for size in self.sizes)
        none = torch.ones(batch, 0).bool()
        self.histories = [History(self.start(batch, CAPACITY), keys, values, none, none)]
        self.grow(self.histories[0], prompt, self.real(batch, prompt, hidden), "nothing")

    def start(self, batch: int, capacity: int) -> Any:
        k, v = self.sizes
        sizes = {"num_kv_heads": G, "qk_length": k, "value_length": v, "dtype": self.dtype, "storage": self.storage}
        return self.mechanism.start(batch=batch, capacity=capacity, **sizes)

    def real(self, batch: int, count: int, hidden: str) -> Tensor:
        """Which of new tokens are real: all, none, those from some position on or up to one, or any."""
        chance = torch.rand(batch, count if hidden == "holes" else 1, generator=self.generator)
        if hidden == "holes":
            return chance < 0.7
        edge = (count * chance * 1.2).long()
        kinds = {"left": torch.arange(count) >= edge, "right": torch.arange(count) < edge}
        return kinds.get(hidden, torch.full((batch, count), hidden != "all"))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def kept(self, tokens: Tensor) -> Tensor:
        """What a state keeps of tokens."""
        if self.storage is None:
            return tokens
        numbers, scale = quantize(tokens)
        return (numbers * scale).to(self.dtype)

    def pick(self, data: Any) -> History:
        """Mostly the newest: what goes wrong shows in what comes after it."""
        return self.histories[data.draw(st.sampled_from([-1, -1, -1, 0, -2]), label="which") % len(self.histories)]

    @rule(
        data=st.data(),
        count=st.sampled_from([130, 1, 90, 1, 64, 7, 63]),
        hidden=st.sampled_from(["none", "right", "left", "holes", "all"]),
        poison=st.sampled_from(["nothing", "what is hidden", "nothing", "a real token"]),
    )
    def extend(self, data: Any, count: int, hidden: str, poison: str) -> None:
        past = self.pick(data)
        count = min(count, CAPACITY - past.state.length)
        self.grow(past, count, self.real(past.batch, count, hidden), poison)

    @rule(data=st.data(), count=st.sampled_from([9, 1, 40]), hidden=st.sampled_from(["none", "left", "right", "holes"]))
    def fork(self, data: Any, count: int, hidden: str) -> None:
        """Two continuations of one state, and two of the second."""
        past = self.pick(data)
        for _ in range(2):
            few = min(count, CAPACITY - past.state.length)
            self.grow(past, few, self.real(past.batch, few, "none"), "nothing")
            self.grow(past, few, self.real(past.batch, few, hidden), "nothing")
            past = self.histories[-1]

    def grow(self, past: History, count: int, new: Tensor, poison: str) -> None:
        """Extend a state by tokens of which `new` says which are real, and compare with the plain formula."""
        size, value_size = self.sizes
        shapes = (H, size), (G, size), (G, value_size)
        q, k, v = (self.draw(past.batch, heads, count, length) for heads, length in shapes)
        q, k = q / 4, k / 4  # near a zero of a polynomial similarity sums lose their digits
        clean = torch.cat([past.keys, self.kept(k)], 2), torch.cat([past.values, self.kept(v)], 2)
        valid, bad = torch.cat([past.valid, new], 1), torch.zeros_like(new)
        if poison == "what is hidden":
            k, v = (t.masked_fill(~new[:, None, :, None], math.nan) for t in (k, v))
        elif poison == "a real token" and count:
            bad[0, count // 2] = True
            v = v.masked_fill(bad[:, None, :, None], math.nan)
        bad = torch.cat([past.bad, bad], 1)
        mask = rg.causal if bool(valid.all()) else rg.causal & rg.padding(valid=valid)
        out, state = self.mechanism.extend(q, k, v, past.state, mask=mask)
        expected = rg.attend(q, *clean, self.mechanism, rg.causal & rg.padding(valid=valid), path="reference")
        sees = ((bad & valid).cumsum(1) > 0)[:, valid.shape[1] - count :, None]
        sees = (sees & valid.any(1)[:, None, None])[:, None].expand_as(out)
        assert not out[sees].isfinite().any()
        largest = max([1.0, *expected.abs().flatten().tolist()])
        assert torch.allclose(out[~sees], expected[~sees], rtol=0, atol=self.error * largest)
        self.remember(History(state, *clean, valid, bad))

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        past = self.pick(data)
        index = torch.tensor(data.draw(st.lists(st.integers(0, past.batch - 1), min_size=1, max_size=3), label="rows"))
        chosen = (t[index] for t in (past.keys, past.values, past.valid, past.bad))
        self.remember(History(past.state.reorder(index), *chosen))

    @rule(data=st.data(), back=st.integers(1, 70))
    def crop(self, data: Any, back: int) -> None:
        past = self.pick(data)
        length = max(past.state.earliest, past.state.length - back)
        cut = past.keys[:, :, :length], past.values[:, :, :length], past.valid[:, :length], past.bad[:, :length]
        self.remember(History(past.state.crop(length), *cut))

    @rule(data=st.data())
    def save_and_load(self, data: Any) -> None:
        past = self.pick(data)
        plan, tensors = past.state.saved()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            like = self.start(1, 0)
            stored = _Stored(
                open_safetensors(path),
                torch.device("cpu"),
                "",
                past.batch,
                past.state.length,
                json.loads(json.dumps(plan)),
            )
            state = like.restored(stored)
        assert state.batch == past.batch
        state = state.with_room(CAPACITY - state.length, CAPACITY)
        self.remember(History(state, past.keys, past.values, past.valid, past.bad))

    def remember(self, history: History) -> None:
        self.histories = [*self.histories[-4:], history]

    @invariant()
    def lengths_agree(self) -> None:
        for past in getattr(self, "histories", ()):
            assert past.state.length == past.keys.shape[2]


BY_MACHINE_CODE = {"sizes": (16, 16), "dtype": torch.float32, "error": 1e-5}
"""Sizes that it is made for."""


@pytest.mark.parametrize(
    ("name", "shared", "options"),
    [(name, 256, {}) for name in STREAMING]
    + [(name, 8, {}) for name in ("softmax", "uniform", "argmax")]
    + [("softmax", 8, {"mechanism": rg.Softmax(softcap=2.0)})]
    + [
        ("softmax", shared, BY_MACHINE_CODE | {"storage": storage})
        for shared in (8, 256)
        for storage in (None, torch.int8)
    ],
)
def test_any_sequence_of_operations_is_its_history(
    name: str, shared: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where forks and repeated rows share prefixes at almost any length, and by machine code, of int8 too."""
    monkeypatch.setattr("regard.core.states.key_value_runs.SHARED", shared)
    monkeypatch.setattr("regard.core.states.buffer.FORKED", shared)
    kind = type("Sequences", (Sequences,), {"mechanism": STREAMING[name], **options})
    limits = settings(
        max_examples=15, stateful_step_count=8, phases=[Phase.generate], deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(kind, settings=limits)


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


@pytest.mark.parametrize(
    "name", [name for name in STREAMING if STREAMING[name].streams(K, Structure(before=9, after=0)) is None]
)
@pytest.mark.parametrize("hidden", [False, True], ids=["whole", "left padding"])
def test_a_window_streams_for_ever_in_the_room_it_needs(name: str, hidden: bool) -> None:
    """Keys that no window shows any more make room for new ones; what saw them is refused, and nothing changes."""
    mechanism, length, capacity = STREAMING[name], 150, 40
    window = rg.causal & rg.window(before=9)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, size, generator=generator, dtype=torch.float64)
        for heads, size in ((H, K), (G, K), (G, V))
    )
    valid = torch.arange(length) >= torch.tensor([[70 if hidden else 0], [0]])
    expected = rg.attend(q, k, v, mechanism, window & rg.padding(valid=valid), path="reference")
    state = mechanism.start(
        batch=2, num_kv_heads=G, qk_length=K, value_length=V, capacity=capacity, dtype=torch.float64
    )
    size, at = state.nbytes, 0
    for count in [1] * 60 + [7, 30, 1, 1, 20, 1, 29, 1]:
        here, end = slice(at, at + count), at + count
        mask = window & rg.padding(valid=valid[:, :end]) if hidden else window
        out, longer = mechanism.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, mask=mask)
        again, _ = mechanism.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, mask=mask)  # a value, as ever
        assert torch.allclose(out, expected[:, :, here], atol=1e-12)
        assert torch.equal(out, again)
        assert longer.nbytes <= size + 4 * 2 * 64 * (K + V) * 8  # a copy has room for twice as much
        state, at = longer, end
    assert state.length == length
    assert state.earliest > 0
    with pytest.raises(ValueError, match=r"^mask: expected a window that does not reach the first"):
        mechanism.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, mask=rg.causal)
    with pytest.raises(ValueError, match=r"^length: expected"):
        state.crop(state.earliest - 1)


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


def test_keys_alone_are_mapped_where_a_batch_has_several_runs() -> None:
    valid = torch.arange(200) >= torch.tensor([[150], [0]])
    mask = rg.causal & rg.padding(valid=valid)
    sizes = {"batch": 2, "num_kv_heads": G, "qk_length": K, "value_length": V, "dtype": torch.float64}
    q, k, v = (torch.randn(2, heads, 200, size, dtype=torch.float64) for heads, size in ((H, K), (G, K), (G, V)))
    start = rg.Softmax().start(capacity=200, **sizes)

    def output(k: Tensor) -> Tensor:
        return rg.Softmax().extend(q, k, v, start, mask)[0]

    many = torch.stack([k, k.flip(2)])
    assert torch.allclose(torch.vmap(output)(many), torch.stack([output(entry) for entry in many]), atol=1e-12)


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
        for kept in range(state.earliest, met):
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


@every_stream
def test_a_batch_of_no_rows_goes_on(name: str) -> None:
    mechanism = STREAMING[name]
    state = mechanism.start(batch=2, num_kv_heads=G, qk_length=K, value_length=V, capacity=20)
    tokens = torch.randn(2, H, 5, K), torch.randn(2, G, 5, K), torch.randn(2, G, 5, V)
    _, state = mechanism.extend(*tokens, state, mask=rg.causal)
    none = state.reorder(torch.zeros(0, dtype=torch.long))
    padding = rg.padding(valid=torch.ones(0, 10, dtype=torch.bool))
    for mask in (rg.causal, rg.causal & padding):
        out, longer = mechanism.extend(*(t[:0] for t in tokens), none, mask=mask)
        assert out.shape == (0, H, 5, V)
        assert longer.length == 10
    assert longer.reorder(torch.zeros(0, dtype=torch.long)).length == 10


@every_stream
def test_a_state_from_outside_goes_on_under_transforms(name: str) -> None:
    mechanism = STREAMING[name]
    q, k, v = torch.randn(3, 1, H, 6, K), torch.randn(3, 1, G, 6, K), torch.randn(3, 1, G, 6, V)
    state = mechanism.start(batch=1, num_kv_heads=G, qk_length=K, value_length=V, capacity=20)
    _, state = mechanism.extend(q[0, :, :, :5], k[0, :, :, :5], v[0, :, :, :5], state, mask=rg.causal)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mechanism.extend(q, k, v, state, mask=rg.causal)[0]

    new = tuple(t[:, :, :, 5:] for t in (q, k, v))
    one_by_one = torch.stack([step(*row) for row in zip(*new, strict=True)])
    assert torch.allclose(torch.vmap(step)(*new), one_by_one, atol=1e-5)


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
