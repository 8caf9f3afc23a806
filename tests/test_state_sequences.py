"""Any sequence of state operations gives what the plain formula gives over the same history."""

import json
import math
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
