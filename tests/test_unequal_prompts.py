"""Prompts of unequal length in one batch, padded on either side: what they store, and that nothing else changes."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import regard as rg
from learned_mechanisms import Bilinear
from regard.checkpoints.sources import open_safetensors
from regard.core.masks import as_mask
from regard.core.masks.guard import all_finite
from regard.core.states.key_value_runs import PAGE
from regard.inference.generation.prompt import _Stored
from test_state_sequences import STREAMING, G, H, K, V

LENGTHS = [300, 3, 290, 80, 5, 1]
"""Of prompts padded on the left to one length: two long ones, one between, and three that are nearly all padding."""
MASKS = {
    "causal": rg.causal,
    "none": None,
    "window": rg.causal & rg.window(before=70),
    "global": rg.causal & (rg.global_tokens(240) | rg.window(before=9)),
    "function": lambda b, h, q, k: (q + k + b) % 3 != 1,
}


def ragged(side: str = "left", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and which are real, for prompts of unequal lengths, padded on one side, and five tokens
    more."""
    generator, longest = torch.Generator().manual_seed(seed), max(LENGTHS)
    place, lengths = torch.arange(longest + 5), torch.tensor(LENGTHS)[:, None]
    valid = place >= longest - lengths if side == "left" else (place < lengths) | (place >= longest)
    shapes = ((H, K), (G, K), (G, V))
    tensors = (
        torch.randn(len(LENGTHS), heads, longest + 5, size, generator=generator, dtype=torch.float64)
        for heads, size in shapes
    )
    return *tensors, valid


def cut(tensors: tuple[Tensor, ...], low: int, high: int) -> tuple[Tensor, ...]:
    return tuple(t[:, :, low:high] for t in tensors)


@pytest.mark.parametrize("name", [name for name in STREAMING if hasattr(STREAMING[name].start(
    batch=1, num_kv_heads=1, qk_length=K, value_length=V), "runs")])  # fmt: skip
@pytest.mark.parametrize("rule", MASKS)
@pytest.mark.parametrize("chunk", [300, 64])
@pytest.mark.parametrize("side", ["left", "right"])
def test_unequal_prompts_share_a_batch_and_store_no_padding(name: str, rule: str, chunk: int, side: str) -> None:
    mechanism, (*tensors, valid), longest = STREAMING[name], ragged(side), max(LENGTHS)
    state = mechanism.start(
        batch=len(LENGTHS), num_kv_heads=G, qk_length=K, value_length=V, capacity=longest + 5, dtype=torch.float64
    )
    cuts = [*range(0, longest, chunk), *range(longest, longest + 6)]
    outputs = []
    for low, high in pairwise(cuts):
        padding = rg.padding(valid=valid[:, :high])
        mask = padding if MASKS[rule] is None else as_mask(MASKS[rule]) & padding
        out, state = mechanism.extend(*cut(tensors, low, high), state, mask=mask)
        here = rg.attend(*cut(tensors, low, high)[:1], *cut(tensors, 0, high)[1:], mechanism, mask, path="reference")
        outputs.append((out - here).masked_fill(~valid[:, None, low:high, None], 0))
    assert torch.cat(outputs, 2).abs().max() < 1e-12
    assert torch.equal(state.keys.masked_fill(~valid[:, None, :, None], 0), tensors[1] * valid[:, None, :, None])
    token = G * (K + V) * 8
    needed, padded = sum(length + 5 for length in LENGTHS) * token, len(LENGTHS) * (longest + 5) * token
    if side == "left" or rule in ("causal", "none"):  # others count positions: gaps are filled
        assert state.nbytes < needed + 70 * len(LENGTHS) * token + valid.numel() < 0.8 * padded
    else:
        assert state.nbytes <= padded + valid.numel()


@dataclass(frozen=True, kw_only=True)
class Near(rg.Mechanism):
    """Weights that fall with the distance: positions count."""

    ordered: ClassVar[bool] = True

    def weigh(self, q: Tensor, k: Tensor, visible: Tensor | None, bias: Tensor | None = None) -> Tensor:
        count, size = q.shape[2], k.shape[2]
        distance = (torch.arange(size - count, size)[:, None] - torch.arange(size)).abs().to(q.dtype)
        similar = torch.exp((q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT - distance) / 8)
        return self.normalise(similar if visible is None else similar.masked_fill(~visible, 0))


@pytest.mark.parametrize("side", ["left", "right"])
def test_distances_over_padding_are_those_of_positions(side: str) -> None:
    *tensors, valid = ragged(side)
    mechanism, prompt = Near(), max(LENGTHS)
    state = mechanism.start(
        batch=len(LENGTHS), num_kv_heads=G, qk_length=K, value_length=V, capacity=400, dtype=torch.float64
    )
    for low, high in ((0, prompt), (prompt, prompt + 1), (prompt + 1, prompt + 5)):
        mask = rg.causal & rg.padding(valid=valid[:, :high])
        out, state = mechanism.extend(*cut(tensors, low, high), state, mask=mask)
        _, k, v = cut(tensors, 0, high)
        expected = rg.attend(tensors[0][:, :, low:high], k, v, mechanism, mask, path="reference")
        assert torch.allclose(out, expected, atol=1e-12)


def two_prompts(lengths: tuple[int, ...], generator: torch.Generator, rule: rg.Mask = rg.causal) -> tuple[Any, Tensor]:
    """The state of prompts padded on the right, and which tokens are real."""
    tensors = tokens(len(lengths), max(lengths), generator)
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    state = rg.Softmax().start(
        batch=len(lengths), num_kv_heads=G, qk_length=16, value_length=16, capacity=max(lengths) + 300,
        dtype=torch.float64,
    )  # fmt: skip
    return rg.Softmax().extend(*tensors, state, mask=rule & rg.padding(valid=valid))[1], valid


def tokens(batch: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, heads, count, 16, generator=generator, dtype=torch.float64) for heads in (H, G, G))
    return q, k, v


@pytest.mark.parametrize("count", [1, 64])
def test_repeated_rows_take_padding_alone(count: int) -> None:
    """What they share is all that they store: nothing comes after it."""
    generator = torch.Generator().manual_seed(0)
    state, valid = two_prompts((400, 300), generator)
    state = state.reorder(torch.tensor([0, 1, 1]))
    real = torch.tensor([[True], [False], [False]]).expand(3, count)
    mask = rg.causal & rg.padding(valid=torch.cat([valid[[0, 1, 1]], real], 1))
    q, k, v = tokens(3, count, generator)
    out, longer = rg.Softmax().extend(q, k, v, state, mask=mask)
    whole = [torch.cat([old, new], 2) for old, new in ((state.keys, k), (state.values, v))]
    assert torch.allclose(out, rg.attend(q, *whole, mask=mask, path="reference"), atol=1e-12)
    assert longer.runs[1].count(longer.length) == 300


def test_a_finished_row_under_a_window_is_not_copied_at_every_step() -> None:
    generator = torch.Generator().manual_seed(0)
    rule = rg.window(before=150)
    state, valid = two_prompts((300, 200), generator, rule)
    buffers = set()
    for _ in range(40):
        valid = torch.cat([valid, torch.tensor([[True], [False]])], 1)
        _, state = rg.Softmax().extend(*tokens(2, 1, generator), state, mask=rule & rg.padding(valid=valid))
        buffers |= {run.buffer for run in state.runs}
    assert len(buffers) <= 4


@pytest.mark.once
@pytest.mark.parametrize("again", [False, True], ids=["mask once", "mask at every step"])
def test_compiled_steps_after_right_padding_are_one_graph(again: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    state, valid = two_prompts((200, 50), generator)
    torch.compiler.reset()
    graphs = CompileCounter()

    @torch.compile(backend=graphs, fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, state: Any, mask: rg.Mask) -> tuple[Tensor, Any]:
        return rg.Softmax().extend(q, k, v, state, mask=mask)

    for _ in range(8):
        q, k, v = tokens(2, 1, generator)
        valid = torch.cat([valid, torch.ones(2, 1, dtype=torch.bool)], 1)
        mask = rg.causal & rg.padding(valid=valid)
        whole = [torch.cat([old, new], 2) for old, new in ((state.keys, k), (state.values, v))]
        out, state = step(q, k, v, state, mask if again else rg.causal)
        assert torch.allclose(out, rg.attend(q, *whole, mask=mask, path="reference"), atol=1e-12)
    assert graphs.frame_count <= 3


def test_a_bias_over_shared_prompts_leaves_gaps_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    state, _ = two_prompts((400, 300), generator)
    state = state.reorder(torch.tensor([0, 1, 1]))
    q, k, v = tokens(3, 1, generator)
    biases = torch.randn(2, 3, 1, 1, 401, generator=generator, dtype=torch.float64)

    def step(bias: Tensor) -> Tensor:
        return rg.Softmax().extend(q, k, v, state, mask=rg.causal, bias=bias)[0]

    longer = rg.Softmax().extend(q, k, v, state, mask=rg.causal, bias=biases[0])[1]
    assert [run.gap for run in longer.runs] == [None, (300, 400)]
    assert torch.allclose(torch.func.vmap(step)(biases), torch.stack([step(bias) for bias in biases]), atol=1e-12)


@pytest.mark.parametrize("change", ["gap over real tokens", "no gap", "gap beyond the end", "gap of words"])
def test_a_file_whose_gap_is_wrong_is_refused(change: str, tmp_path: Path) -> None:
    *tensors, valid = ragged("right")
    state = rg.Softmax().start(
        batch=len(LENGTHS), num_kv_heads=G, qk_length=K, value_length=V, capacity=400, dtype=torch.float64
    )
    _, state = rg.Softmax().extend(*cut(tensors, 0, 300), state, mask=rg.causal & rg.padding(valid=valid[:, :300]))
    plan, stored = state.saved()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "state.safetensors")

    def loaded(plan: dict[str, Any]) -> Any:
        reader = open_safetensors(tmp_path / "state.safetensors")
        empty = rg.Softmax().start(
            batch=1, num_kv_heads=G, qk_length=K, value_length=V, capacity=0, dtype=torch.float64
        )
        return empty.restored(_Stored(reader, torch.device("cpu"), "", len(LENGTHS), 300, plan))

    plan = json.loads(json.dumps(plan))
    again = loaded(plan)
    assert torch.equal(again.keys, state.keys)
    assert len(again.runs) == len(state.runs) > 1
    broken = next(run for run in plan["runs"] if run["gap"])
    low, high = broken["gap"]
    broken["gap"] = {
        "gap over real tokens": [low - 1, high],
        "no gap": None,
        "gap beyond the end": [low, high + 1],
        "gap of words": ["a", "b"],
    }[change]
    with pytest.raises(ValueError, match=r"a run w|shape|expected"):
        loaded(plan)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("learned", ["qkv", "q", "v"])
def test_gradients_of_unequal_prompts_are_those_of_the_whole(side: str, learned: str) -> None:
    """Also while others go on without gradients: where keys are trusted to be finite, views of buffers are saved. A
    prompt ends where a chunk does."""
    *tensors, valid = ragged(side)
    tensors = [t[..., :V].contiguous() for t in tensors]  # others are copied for PyTorch's kernel
    leaves = [tensor.requires_grad_() for tensor, name in zip(tensors, "qkv", strict=True) if name in learned]
    state = rg.Softmax().start(
        batch=len(LENGTHS), num_kv_heads=G, qk_length=V, value_length=V, capacity=400, dtype=torch.float64
    )
    parts = []
    with all_finite():
        for low, high in pairwise([0, LENGTHS[3], 200, max(LENGTHS), max(LENGTHS) + 5]):
            mask = rg.causal & rg.padding(valid=valid[:, :high])
            out, state = rg.Softmax().extend(*cut(tensors, low, high), state, mask=mask)
            parts.append(out)
            with torch.no_grad():
                rg.Softmax().extend(*cut(tensors, 0, 2), state, mask=rg.causal)
    streamed = torch.autograd.grad((torch.cat(parts, 2) * valid[:, None, :, None]).square().sum(), leaves)
    out = rg.attend(*tensors, mask=mask, path="reference")
    whole = torch.autograd.grad((out * valid[:, None, :, None]).square().sum(), leaves)
    for ours, theirs in zip(streamed, whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_gradients_over_a_shared_prompt_to_which_nothing_is_appended() -> None:
    generator = torch.Generator().manual_seed(0)
    state, _ = two_prompts((400, 300), generator)
    state = state.reorder(torch.tensor([1, 1]))
    q, k, v = tokens(2, 1, generator)
    q.requires_grad_()
    padding = rg.padding(valid=(torch.arange(401) < 300).expand(2, -1))
    with all_finite():
        out, longer = rg.Softmax().extend(q, k, v, state, mask=rg.causal & padding)
        with torch.no_grad():
            rg.Softmax().extend(q, k, v, longer, mask=rg.causal)
    whole = rg.attend(q, longer.keys, longer.values, mask=rg.causal & padding, path="reference")
    ours, theirs = (torch.autograd.grad(result.sum(), q)[0] for result in (out, whole))
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("prompted", [torch.inference_mode, torch.no_grad], ids=["in inference mode", "without"])
def test_a_row_that_has_ended_is_differentiated_and_goes_on_in_another_buffer(prompted: Any) -> None:
    """Nothing is appended to it, but its keys and values are saved for the gradients of what is learned."""
    *tensors, valid = ragged("right")
    mechanism = Bilinear(W=nn.Parameter(torch.randn(K, K, dtype=torch.float64)), shift=torch.zeros(()).double())
    longest = max(LENGTHS)
    more = torch.tensor([length == longest for length in LENGTHS])[:, None].expand(-1, PAGE)
    valid = torch.cat([valid[:, :longest], more], 1)
    sizes = {"batch": len(LENGTHS), "num_kv_heads": G, "qk_length": K, "value_length": V, "dtype": torch.float64}
    with prompted():
        rule = rg.causal & rg.padding(valid=valid[:, :longest])
        _, state = mechanism.extend(*cut(tensors, 0, longest), mechanism.start(capacity=500, **sizes), mask=rule)
    tokens = cut(tensors, 0, PAGE)
    out, longer = mechanism.extend(*tokens, state, mask=rg.causal & rg.padding(valid=valid))
    with torch.no_grad():
        mechanism.extend(*cut(tensors, 0, 1), longer, mask=rg.causal)
    (streamed,) = torch.autograd.grad(out.sum(), mechanism.W)
    keys, values = (torch.cat([t[:, :, :longest], t[:, :, :PAGE]], 2) for t in tensors[1:])
    whole = rg.attend(tokens[0], keys, values, mechanism, rg.causal & rg.padding(valid=valid), path="reference")
    assert torch.allclose(streamed, torch.autograd.grad(whole.sum(), mechanism.W)[0], atol=1e-10)


def test_prompts_of_unequal_length_hold_the_sum_of_their_tokens(tmp_path: Path) -> None:
    config = rg.DecoderConfig(vocabulary_size=31, embedding_dim=16, num_layers=2, num_heads=2, context_length=2048)
    model, lengths = rg.Decoder(config).eval(), [700, 3, 8, 90, 2, 650]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(31, (length,), generator=generator).tolist() for length in lengths]
    prompt = rg.prefill(model, prompts)
    token = 2 * 2 * 16 * 4  # bytes of a token's keys and values in two layers
    assert prompt.nbytes <= token * sum(length + PAGE for length in lengths)
    together = rg.generate(model, state=prompt, max_new_tokens=4)
    assert [row.tokens for row in together] == [rg.generate(model, [p], max_new_tokens=4)[0].tokens for p in prompts]
    prompt.save(tmp_path / "prompt.safetensors")
    again = rg.Prompt.load(tmp_path / "prompt.safetensors", model)
    assert again.nbytes <= prompt.nbytes
    assert [row.tokens for row in rg.generate(model, state=again, max_new_tokens=4)] == [row.tokens for row in together]


@pytest.mark.parametrize("rule", ["none", "global", "ahead"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_queries_in_padding_see_what_a_mask_shows_them(rule: str, side: str) -> None:
    """Without causality a query in the padding sees real keys, stored in a run that begins after it or not."""
    *tensors, valid = ragged(side)
    prompt = max(LENGTHS)
    rules = {"none": rg.window(), "global": rg.causal | rg.global_tokens(2), "ahead": rg.window(5, 300)}
    state = rg.Softmax().start(
        batch=len(LENGTHS), num_kv_heads=G, qk_length=K, value_length=V, capacity=400, dtype=torch.float64
    )
    for low, high in ((0, prompt), (prompt, prompt + 5)):
        q, (_, k, v) = tensors[0][:, :, low:high], cut(tensors, 0, high)
        mask = rules[rule] & rg.padding(valid=valid[:, :high])
        out, state = rg.Softmax().extend(*cut(tensors, low, high), state, mask=mask)
        assert len(state.runs) > 1
        assert torch.allclose(out, rg.attend(q, k, v, mask=mask, path="reference"), atol=1e-12)
