"""States: a state is a value, appending does not copy, and what streams equals what computes whole."""

import math
from typing import Any

import pytest
import torch

import regard as rg
from regard.core.families.features import RECENT
from regard.core.states.kernel_state import KernelState
from regard.core.states.key_values import KeyValueState
from streams_and_histories import (
    CACHED,
    FADING,
    LONG,
    STREAMS,
    SUMMED,
    B,
    G,
    H,
    K,
    V,
    close,
    every_cache,
    every_stream,
    every_sum,
    piece,
    plain,
    start,
    stream,
    tokens,
    triangle,
)


@every_stream
@pytest.mark.parametrize("cuts", [[0, LONG], [0, 1, 2, 3, 130, LONG], [0, 64, 128, 192, 256, LONG]], ids=str)
def test_streamed_is_whole(name: str, cuts: list[int]) -> None:
    mechanism, tensors = STREAMS[name], tokens(LONG)
    out, state = stream(mechanism, tensors, cuts, start(mechanism))
    assert close(out, plain(mechanism, *tensors, triangle(LONG)))
    assert state.length == LONG


@every_stream
def test_token_by_token_is_whole(name: str) -> None:
    mechanism, tensors, length = STREAMS[name], tokens(RECENT + 70), RECENT + 70
    out, _ = stream(mechanism, tensors, list(range(length + 1)), start(mechanism))
    assert close(out, plain(mechanism, *tensors, triangle(length)))


@pytest.mark.parametrize("name", FADING)
def test_what_is_causal_by_itself_streams_so_without_a_mask(name: str) -> None:
    mechanism, tensors = FADING[name], tokens(LONG)
    out, _ = stream(mechanism, tensors, [0, 3, 150, LONG], start(mechanism), lambda length: None)
    assert close(out, plain(mechanism, *tensors, triangle(LONG)))


@pytest.mark.parametrize("name", CACHED | SUMMED)
def test_a_stream_without_a_mask_sees_its_whole_chunk(name: str) -> None:
    """No mask is no causality: each piece sees all of itself and of the past."""
    mechanism, tensors, cuts = STREAMS[name], tokens(LONG), [0, 3, 150, LONG]
    out, _ = stream(mechanism, tensors, cuts, start(mechanism), lambda length: None)
    ends = torch.tensor([next(cut for cut in cuts if cut > i) for i in range(LONG)])
    assert close(out, plain(mechanism, *tensors, torch.arange(LONG) < ends[:, None]))


@every_cache
def test_appending_does_not_copy(name: str) -> None:
    mechanism, tensors = CACHED[name], tokens(40)
    state = first = start(mechanism, capacity=40)
    with torch.no_grad():
        for at in range(40):
            _, state = mechanism.extend(*piece(tensors, at, at + 1), state, mask=rg.causal)
            assert state.keys.data_ptr() == first.buffer.keys.data_ptr()
            assert state.values.data_ptr() == first.buffer.values.data_ptr()
    assert torch.equal(state.keys, tensors[1])
    assert torch.equal(state.values, tensors[2])


@every_sum
def test_a_kernel_appends_its_recent_tokens_without_copying(name: str) -> None:
    mechanism, tensors = SUMMED[name], tokens(RECENT)
    state = first = start(mechanism)
    for at in range(RECENT):
        _, state = mechanism.extend(*piece(tensors, at, at + 1), state, mask=rg.causal)
        assert state.recent.keys.data_ptr() == first.recent.buffer.keys.data_ptr()
    assert state.folded == 0


@every_cache
def test_a_fork_copies_once_and_leaves_its_origin(name: str) -> None:
    mechanism, tensors, other = CACHED[name], tokens(12), tokens(12, seed=1)
    _, early = stream(mechanism, tensors, [0, 5], start(mechanism, capacity=12))
    _, first = stream(mechanism, tensors, [5, 12], early)
    _, second = stream(mechanism, other, [5, 12], early)
    assert first.keys.data_ptr() == early.keys.data_ptr()
    assert second.keys.data_ptr() != early.keys.data_ptr()
    assert torch.equal(first.keys, tensors[1])
    assert torch.equal(second.keys, torch.cat([tensors[1][:, :, :5], other[1][:, :, 5:]], dim=2))


@every_stream
@pytest.mark.parametrize("past", [5, RECENT - 1, RECENT, RECENT + 90])
def test_an_old_state_stays_valid(name: str, past: int) -> None:
    """Extending a state again, after others have extended it, gives the same as the first time."""
    mechanism, tensors, other = STREAMS[name], tokens(past + 80), tokens(past + 80, seed=1)
    _, early = stream(mechanism, tensors, [0, past], start(mechanism))
    size = early.nbytes
    first, _ = stream(mechanism, tensors, [past, past + 80], early)
    stream(mechanism, other, [past, past + 1, past + 80], early)
    again, _ = stream(mechanism, tensors, [past, past + 80], early)
    assert torch.equal(first, again)
    assert (early.length, early.nbytes) == (past, size)


@every_stream
def test_a_fork_is_its_own_history(name: str) -> None:
    mechanism, tensors, other = STREAMS[name], tokens(LONG), tokens(LONG, seed=1)
    past = RECENT + 30
    _, early = stream(mechanism, tensors, [0, past], start(mechanism))
    stream(mechanism, tensors, [past, LONG], early)
    forked, _ = stream(mechanism, other, [past, past + 1, LONG], early)
    story = tuple(torch.cat([t[:, :, :past], o[:, :, past:]], dim=2) for t, o in zip(tensors, other, strict=True))
    assert close(forked, plain(mechanism, *story, triangle(LONG))[:, :, past:])


@every_stream
@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 1], [0, 2], [2, 2, 0, 1, 0]], ids=str)
def test_a_reordered_state_is_the_other_rows_history(name: str, index: list[int]) -> None:
    """Also with fewer rows or more than before, as beam search does."""
    mechanism, past, length = STREAMS[name], RECENT + 30, RECENT + 60
    tensors = tokens(length)
    _, state = stream(mechanism, tensors, [0, past], start(mechanism))
    moved = state.reorder(torch.tensor(index))
    rows = tuple(t[index] for t in tensors)
    out, _ = stream(mechanism, rows, [past, length], moved)
    assert close(out, plain(mechanism, *rows, triangle(length))[:, :, past:])
    unmoved, _ = stream(mechanism, tensors, [past, length], state)
    assert close(unmoved, plain(mechanism, *tensors, triangle(length))[:, :, past:])


@pytest.mark.parametrize("index", [[3, 0, 0], [-1, 0, 0], [[0, 1, 2]], [0.0, 1.0, 2.0], [True, False, True]], ids=str)
@pytest.mark.parametrize("name", ["softmax", "quadratic"])
def test_a_bad_order_is_refused(name: str, index: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"^index: expected .* got "):
        start(STREAMS[name]).reorder(torch.tensor(index))


@pytest.mark.parametrize("name", CACHED | SUMMED)
def test_a_cropped_state_is_the_earlier_state(name: str) -> None:
    mechanism, tensors, other = STREAMS[name], tokens(100), tokens(100, seed=1)
    _, late = stream(mechanism, tensors, [0, 100], start(mechanism))
    out, longer = stream(mechanism, other, [60, 100], late.crop(60))
    story = tuple(torch.cat([t[:, :, :60], o[:, :, 60:]], dim=2) for t, o in zip(tensors, other, strict=True))
    assert close(out, plain(mechanism, *story, triangle(100))[:, :, 60:])
    assert longer.length == 100
    again, _ = stream(mechanism, tensors, [60, 100], late.crop(60))
    assert close(again, plain(mechanism, *tensors, triangle(100))[:, :, 60:]), "the crop's fork wrote over its origin"


@pytest.mark.parametrize("length", [-1, 8, 2.5])
@pytest.mark.parametrize("name", ["softmax", "quadratic"])
def test_a_bad_crop_is_refused(name: str, length: float) -> None:
    _, state = stream(STREAMS[name], tokens(7), [0, 7], start(STREAMS[name]))
    with pytest.raises(ValueError, match=r"^length: expected .* got "):
        state.crop(length)


@every_sum
def test_a_kernel_cannot_crop_into_its_sums(name: str) -> None:
    mechanism, tensors = SUMMED[name], tokens(LONG)
    _, state = stream(mechanism, tensors, [0, LONG], start(mechanism))
    assert 0 < state.folded < LONG
    with pytest.raises(ValueError, match=rf"^length: expected {state.folded} to {LONG}, got {state.folded - 1}"):
        state.crop(state.folded - 1)
    cropped = state.crop(state.folded)
    assert cropped.length == state.folded
    out, _ = stream(mechanism, tensors, [state.folded, LONG], cropped)
    assert close(out, plain(mechanism, *tensors, triangle(LONG))[:, :, state.folded :])


@every_cache
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nbytes_of_a_cache(name: str, dtype: torch.dtype) -> None:
    state = start(CACHED[name], capacity=32, dtype=dtype)
    assert state.nbytes == B * G * 32 * (K + V) * dtype.itemsize
    nbytes = state.buffer.keys.untyped_storage().nbytes() + state.buffer.values.untyped_storage().nbytes()
    assert state.nbytes == nbytes
    _, longer = stream(CACHED[name], tokens(20, dtype), [0, 20], state)
    assert longer.nbytes == state.nbytes, "the room was there from the start"


@every_sum
def test_a_kernel_state_does_not_grow(name: str) -> None:
    mechanism, tensors = SUMMED[name], tokens(4 * RECENT)
    state = start(mechanism)
    size = state.nbytes
    for low, high in [(0, 1), (1, 100), (100, 129), (129, 400), (400, 4 * RECENT)]:
        _, state = mechanism.extend(*piece(tensors, low, high), state, mask=rg.causal)
        assert state.nbytes == size
        assert state.length == high
        kept = (state.sums, state.normaliser, state.recent.buffer.keys, state.recent.buffer.values)
        assert sum(t.numel() * t.element_size() for t in kept) == size


@every_cache
def test_overflow_names_the_capacity_and_changes_nothing(name: str) -> None:
    mechanism, tensors = CACHED[name], tokens(9)
    _, state = stream(mechanism, tensors, [0, 6], start(mechanism, capacity=8))
    with pytest.raises(ValueError, match=r"^state: expected at most 8 tokens .* got 6 \+ 3"):
        mechanism.extend(*piece(tensors, 6, 9), state, mask=rg.causal)
    out, longer = stream(mechanism, tensors, [6, 8], state)
    assert longer.length == 8
    assert close(out, plain(mechanism, *piece(tensors, 0, 8), triangle(8))[:, :, 6:])


@every_stream
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_streams_within_budget(name: str, dtype: torch.dtype) -> None:
    """No further from the float64 truth than twice what the plain half formula is, plus 1e-5."""
    mechanism, tensors = STREAMS[name], tokens(LONG, dtype)
    out, state = stream(mechanism, tensors, [0, 100, 101, 102, 200, LONG], start(mechanism, dtype=dtype))
    exact = plain(mechanism, *(t.double() for t in tensors), triangle(LONG))
    # The plain half formula: exact weights rounded to half, times half values.
    values = tensors[2].repeat_interleave(H // G, dim=1)
    eye = torch.eye(LONG, dtype=torch.float64).expand(B, G, LONG, LONG)
    weights = plain(mechanism, tensors[0].double(), tensors[1].double(), eye, triangle(LONG)).to(dtype)
    rough = weights @ values
    allowed = 2 * max((rough.double() - exact).abs().max().item(), torch.finfo(dtype).eps / 2) + 1e-5
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= allowed
    if name in FADING:
        assert state.sums.dtype == torch.float32
        return
    keys = state.recent.keys if isinstance(state, KernelState) else state.keys
    assert keys.dtype == dtype


@every_sum
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_accumulate_in_float32(name: str, dtype: torch.dtype) -> None:
    _, state = stream(SUMMED[name], tokens(LONG, dtype), [0, LONG], start(SUMMED[name], dtype=dtype))
    assert (state.sums.dtype, state.normaliser.dtype) == (torch.float32, torch.float32)


@every_stream
@pytest.mark.parametrize("tainted", [False, True])
@pytest.mark.parametrize("ruled", [False, True], ids=["causal", "rest"])
def test_extending_by_nothing_changes_nothing(name: str, tainted: bool, ruled: bool) -> None:
    mechanism, tensors = STREAMS[name], tokens(7)
    mask = rg.causal & rg.dense(torch.ones(1, 7, dtype=torch.bool)) if ruled and name in CACHED else rg.causal
    if tainted:
        tensors[1][0, 0, 2, 0] = math.nan
    _, state = mechanism.extend(*tensors, start(mechanism), mask=mask)
    out, same = mechanism.extend(*piece(tensors, 7, 7), state, mask=mask)
    assert out.shape == (B, H, 0, V)
    assert same.length == state.length == 7


@every_stream
def test_an_empty_batch_streams(name: str) -> None:
    mechanism, tensors = STREAMS[name], tokens(LONG, batch=0)
    out, state = stream(mechanism, tensors, [0, 5, 6, LONG], start(mechanism, batch=0))
    assert out.shape == (0, H, LONG, V)
    assert state.length == LONG


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["softmax", "quadratic", *FADING])
def test_a_prompt_met_in_inference_mode_can_be_continued(name: str, recorded: bool) -> None:
    mechanism, tensors, prompt = STREAMS[name], tuple(t.requires_grad_(recorded) for t in tokens(LONG)), RECENT + 30
    state = start(mechanism)
    with torch.inference_mode():
        first, state = stream(mechanism, tensors, [0, prompt], state)
    rest, _ = stream(mechanism, tensors, [prompt, prompt + 1, LONG], state)
    assert close(torch.cat([first, rest], dim=2), plain(mechanism, *tensors, triangle(LONG)))


def test_which_state_a_mechanism_keeps() -> None:
    """A kernel whose sums would be larger than any history keeps keys and values instead."""
    assert isinstance(start(rg.Softmax()), KeyValueState)
    assert isinstance(start(rg.Quadratic()), KernelState)
    large = rg.Polynomial(degree=8)
    state = large.start(batch=1, num_kv_heads=G, qk_length=12, value_length=V, capacity=8, dtype=torch.float64)
    assert isinstance(state, KeyValueState)


def test_a_kernel_refuses_a_state_of_keys_and_values() -> None:
    tensors = tokens(5)
    with pytest.raises(ValueError, match=r"^state: expected one from Quadratic\(c=1.0\).start\(…\), got KeyValueState"):
        STREAMS["quadratic"].extend(*tensors, start(STREAMS["softmax"]), mask=rg.causal)


def test_a_state_prints_on_one_line() -> None:
    assert repr(start(STREAMS["softmax"])).startswith("KeyValueState(length=0, capacity=")
    assert repr(start(STREAMS["quadratic"])).startswith("KernelState(Quadratic(c=1.0), length=0, nbytes=")


@pytest.mark.parametrize(("name", "most"), [("elu", 40), ("quadratic", 44), ("taylor", 51), ("random", 52)])
def test_a_step_of_a_kernel_calls_few_operators(name: str, most: int) -> None:
    """One token over sums and recent tokens: each operator takes longer to call than its handful of numbers."""
    mechanism = STREAMS[name]
    many = tokens(LONG + 2, torch.float32)
    last = piece(many, LONG + 1, LONG + 2)
    with torch.no_grad():
        _, state = mechanism.extend(*piece(many, 0, LONG), start(mechanism, dtype=torch.float32), mask=rg.causal)
        _, state = mechanism.extend(*piece(many, LONG, LONG + 1), state, mask=rg.causal)  # which makes tables
        with torch.autograd.profiler.profile() as profile:
            mechanism.extend(*last, state, mask=rg.causal)
    called = [event.name for event in profile.function_events if event.cpu_parent is None]
    assert 20 < len(called) <= most, called


@pytest.mark.parametrize("index", [None, "01", [0, None], [[0]], [0.5], [True], [-1], [7], 2.5], ids=str)
@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Elu(), rg.Retention()], ids=repr)
def test_what_is_no_index_of_rows_is_refused_by_every_state(mechanism: rg.Mechanism, index: Any) -> None:
    state = mechanism.start(batch=2, num_kv_heads=1, qk_length=4, value_length=4, capacity=4)
    with pytest.raises(ValueError, match=r"^index: expected"):
        state.reorder(index)
