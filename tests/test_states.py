"""States: a state is a value, appending does not copy, and what streams equals what computes whole."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.core.families.features import RECENT
from regard.core.states.kernel_state import KernelState
from regard.core.states.key_values import KeyValueState

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


@every_stream
def test_reordering_moves_the_padding_with_the_rows(name: str) -> None:
    mechanism, past, length = STREAMS[name], 9, 20
    tensors, starts = tokens(length), torch.tensor([4, 0, 7])
    _, state = stream(mechanism, tensors, [0, past], start(mechanism), lambda n: rg.causal & left(starts, n))
    index = torch.tensor([2, 0, 0])
    rows = tuple(t[index] for t in tensors)
    out, _ = stream(mechanism, rows, [past, length], state.reorder(index))
    visible = triangle(length) & (torch.arange(length) >= starts[index][:, None, None, None])
    assert close(out, plain(mechanism, *rows, visible)[:, :, past:])


@every_stream
def test_reordering_moves_holes_and_taint_with_the_rows(name: str) -> None:
    mechanism, past, length = STREAMS[name], 6, 8
    tensors = tokens(length)
    tensors[1][1, :, 2] = math.nan
    holes = torch.ones(B, past, dtype=torch.bool)
    holes[0, 3] = holes[2, 1] = False
    _, state = stream(mechanism, tensors, [0, past], start(mechanism), lambda n: rg.causal & rg.padding(valid=holes))
    index = torch.tensor([1, 2, 2])
    rows = tuple(t[index] for t in tensors)
    out, _ = stream(mechanism, rows, [past, length], state.reorder(index))
    assert out[0].isnan().all(), "the row of the NaN has moved to place 0"
    visible = triangle(length).expand(B, 1, length, length).clone()
    visible[1:, :, :, 1] = False
    rows = tuple(t[1:] for t in rows)
    assert close(out[1:], plain(mechanism, *rows, visible[1:])[:, :, past:])


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


@pytest.mark.parametrize("name", CACHED | SUMMED)
def test_cropping_keeps_the_padding_of_what_is_left(name: str) -> None:
    mechanism, tensors, starts = STREAMS[name], tokens(20), torch.tensor([0, 6, 12])
    _, late = stream(mechanism, tensors, [0, 20], start(mechanism), lambda n: rg.causal & left(starts, n))
    out, _ = stream(mechanism, tensors, [8, 20], late.crop(8))
    place = torch.arange(20)
    # Row 2 is padding as far as the crop goes; the tokens that come after it are real now.
    visible = triangle(20) & ((place >= starts[:, None]) | (place >= 8))[:, None, None]
    assert close(out, plain(mechanism, *tensors, visible)[:, :, 8:])


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


@every_stream
def test_nbytes_counts_what_is_remembered_of_padding(name: str) -> None:
    """Padding with holes is kept as a table, and a table has bytes; a NaN is kept where it came, and has none."""
    mechanism, tensors = STREAMS[name], tokens(6)
    tensors[1][0, 0, 3] = math.nan
    holes = torch.tensor([[True, False, True, True, True, True]] * B)
    fresh = start(mechanism)
    _, state = mechanism.extend(*tensors, fresh, mask=rg.causal & rg.padding(valid=holes))
    assert state.nbytes == fresh.nbytes + B * 6


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


def left(starts: Tensor, length: int) -> rg.Mask:
    return rg.padding(valid=torch.arange(length) >= starts[:, None])


@every_stream
@pytest.mark.parametrize("remembered", [False, True], ids=["padding every time", "padding once"])
def test_a_left_padded_batch_streams_as_it_computes_whole(name: str, remembered: bool) -> None:
    """Later steps may pass the padding again, or only causal: a state remembers which keys were real."""
    mechanism, tensors = STREAMS[name], tokens(LONG)
    starts, prompt = torch.tensor([0, 40, 150]), 160

    def mask(length: int) -> rg.Mask:
        return rg.causal if remembered and length > prompt else rg.causal & left(starts, length)

    out, _ = stream(mechanism, tensors, [0, prompt, prompt + 1, prompt + 2, LONG], start(mechanism), mask)
    visible = triangle(LONG) & (torch.arange(LONG) >= starts[:, None, None, None])
    assert close(out, plain(mechanism, *tensors, visible))


@every_stream
def test_padding_with_holes_is_remembered(name: str) -> None:
    mechanism, tensors, prompt = STREAMS[name], tokens(LONG), 140
    holes = torch.rand(B, prompt, generator=torch.Generator().manual_seed(3)) < 0.6

    def mask(length: int) -> rg.Mask:
        return rg.causal if length > prompt else rg.causal & rg.padding(valid=holes[:, :length])

    out, _ = stream(mechanism, tensors, [0, 3, prompt, prompt + 1, LONG], start(mechanism), mask)
    real = torch.cat([holes, torch.ones(B, LONG - prompt, dtype=torch.bool)], dim=1)
    assert close(out, plain(mechanism, *tensors, triangle(LONG) & real[:, None, None]))


@every_stream
def test_padding_between_prompt_and_answer_is_remembered(name: str) -> None:
    """Right-padded prompts of unequal length, then common steps: the gap stays hidden."""
    mechanism, tensors, lengths = STREAMS[name], tokens(30), torch.tensor([10, 3, 0])

    def mask(length: int) -> rg.Mask:
        return rg.causal & rg.padding(lengths) if length == 10 else rg.causal

    out, _ = stream(mechanism, tensors, [0, 10, 11, 30], start(mechanism), mask)
    place = torch.arange(30)
    real = (place < lengths[:, None]) | (place >= 10)
    assert close(out, plain(mechanism, *tensors, triangle(30) & real[:, None, None]))


@every_stream
@pytest.mark.parametrize("past", [5, LONG - 1], ids=["recent", "folded"])
def test_a_later_mask_that_hides_an_old_key_is_obeyed_or_refused(name: str, past: int) -> None:
    """A mask speaks of the whole history: it may not be ignored where the key is already in."""
    mechanism, tensors = STREAMS[name], tokens(past + 1)
    _, state = stream(mechanism, tensors, [0, past], start(mechanism))
    late = torch.ones(B, past + 1, dtype=torch.bool)
    late[:, 2] = False
    try:
        out, _ = mechanism.extend(*piece(tensors, past, past + 1), state, mask=rg.causal & rg.padding(valid=late))
    except ValueError as refused:
        message = str(refused)
    else:
        message = ""
        assert close(out, plain(mechanism, *tensors, triangle(past + 1) & late[:, None, None])[:, :, past:])
    assert message == "" or message.startswith("mask: expected")


@every_stream
def test_gradients_of_a_stream_are_those_of_the_whole(name: str) -> None:
    mechanism, length = STREAMS[name], RECENT + 40
    cuts = [0, 3, 4, 100, RECENT + 5, length]
    streamed = tuple(t.requires_grad_() for t in tokens(length))
    whole = tuple(t.requires_grad_() for t in tokens(length))
    to = torch.randn(B, H, length, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    out, _ = stream(mechanism, streamed, cuts, start(mechanism))
    actual = torch.autograd.grad(out, streamed, to, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(
        plain(mechanism, *whole, triangle(length)), whole, to, allow_unused=True, materialize_grads=True
    )
    for gradient, wanted in zip(actual, expected, strict=True):
        assert close(gradient, wanted)


@every_stream
def test_gradients_of_the_queries_alone(name: str) -> None:
    """Frozen keys and values, trained queries: later steps must not write into what backward needs."""
    mechanism, length = STREAMS[name], 20
    if name in ("argmax", "uniform"):
        pytest.skip("no gradient reaches these queries")
    q, k, v = tokens(length)
    q.requires_grad_()
    out, _ = stream(mechanism, (q, k, v), [0, 5, 6, 7, length], start(mechanism))
    (actual,) = torch.autograd.grad(out.sum(), q)
    other = q.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(mechanism, other, k, v, triangle(length)).sum(), other)
    assert close(actual, expected)


@every_stream
def test_gradients_of_the_first_values_alone(name: str) -> None:
    """A trained prefix of values (prefix tuning), then frozen tokens: these must not be written into the prefix."""
    mechanism, length = STREAMS[name], 20
    q, k, v = tokens(length)
    prefix = v[:, :, :5].clone().requires_grad_()
    first, state = mechanism.extend(q[:, :, :5], k[:, :, :5], prefix, start(mechanism), mask=rg.causal)
    rest, _ = stream(mechanism, (q, k, v), [5, 6, 7, length], state)
    (actual,) = torch.autograd.grad(torch.cat([first, rest], dim=2).sum(), prefix)
    other = prefix.detach().clone().requires_grad_()
    whole = plain(mechanism, q, k, torch.cat([other, v[:, :, 5:]], dim=2), triangle(length))
    (expected,) = torch.autograd.grad(whole.sum(), other)
    assert close(actual, expected)


@every_stream
def test_looking_ahead_without_gradients_spoils_no_backward(name: str) -> None:
    """A no_grad continuation from a state in a graph leaves the graph as it was."""
    mechanism, length = STREAMS[name], 12
    tensors = tuple(t.requires_grad_() for t in tokens(length))
    out, state = stream(mechanism, tensors, [0, 4, 8], start(mechanism))
    with torch.no_grad():
        stream(mechanism, tensors, [8, 9, 12], state)
    actual = torch.autograd.grad(out.sum(), tensors, allow_unused=True, materialize_grads=True)
    again = tuple(t.detach().clone().requires_grad_() for t in tensors)
    whole = plain(mechanism, *again, triangle(length))[:, :, :8]
    expected = torch.autograd.grad(whole.sum(), again, allow_unused=True, materialize_grads=True)
    for gradient, wanted in zip(actual, expected, strict=True):
        assert close(gradient, wanted)


POISONS = pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
WHERE = pytest.mark.parametrize("where", ["k", "v"])
MASKING = pytest.mark.parametrize("again", [False, True], ids=["padding once", "padding every time"])


def poisoned_stream(
    mechanism: rg.Mechanism, row: int, at: int, poison: float, where: str, again: bool, length: int
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """A left-padded prompt with one bad number, then steps. Row 1 has 20 padding tokens, row 2 has 3."""
    tensors, starts, prompt = tokens(length), torch.tensor([0, 20, 3]), 30
    tensors["qkv".index(where)][row, 0, at, 1] = poison

    def mask(total: int) -> rg.Mask:
        return rg.causal & left(starts, total) if again or total <= prompt else rg.causal

    cuts = [0, prompt, prompt + 1, prompt + 2, *(cut for cut in (100, 250, 251) if cut < length), length]
    out, _ = stream(mechanism, tensors, cuts, start(mechanism), mask)
    return out, tensors, triangle(length) & (torch.arange(length) >= starts[:, None, None, None])


@every_stream
@POISONS
@WHERE
@MASKING
def test_a_bad_number_in_padding_reaches_no_step(name: str, poison: float, where: str, again: bool) -> None:
    mechanism = STREAMS[name]
    for length in (60, LONG):
        out, tensors, visible = poisoned_stream(mechanism, 1, 7, poison, where, again, length)
        clean = tuple(t.nan_to_num(0, 0, 0) for t in tensors)
        assert close(out, plain(mechanism, *clean, visible))


@every_stream
@POISONS
@WHERE
@MASKING
def test_a_bad_number_in_a_real_token_reaches_exactly_who_sees_it(
    name: str, poison: float, where: str, again: bool
) -> None:
    mechanism, at = STREAMS[name], 25
    for length in (60, LONG):
        out, tensors, visible = poisoned_stream(mechanism, 1, at, poison, where, again, length)
        if where == "v" or math.isnan(poison):  # an infinite key may rightly weigh nothing
            assert not out[1, : H // G, at:].isfinite().all(-1).any(), "a visible bad number is hidden"
        clean = plain(mechanism, *(t.nan_to_num(0, 0, 0) for t in tensors), visible)
        assert close(out[1, :, :at], clean[1, :, :at])
        assert close(out[1, H // G :], clean[1, H // G :]), "it reached the other head group"
        assert close(out[[0, 2]], clean[[0, 2]])


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


@every_stream
def test_a_state_keeps_nothing_of_the_padding_that_a_user_may_write_to(name: str) -> None:
    mechanism, tensors = STREAMS[name], tokens(9)
    outs = []
    for overwritten in (False, True):
        valid = torch.tensor([True, False, True, False, True, True]).repeat(B, 1)
        parts = [t[:, :, :6] for t in tensors], [t[:, :, 6:] for t in tensors]
        mask = rg.causal & rg.padding(valid=valid)
        _, state = mechanism.extend(*parts[0], start(mechanism), mask=mask)
        if overwritten:
            valid.fill_(True)
        out, _ = mechanism.extend(*parts[1], state, mask=rg.causal)
        outs.append(out)
    assert torch.equal(*outs)


def test_which_state_a_mechanism_keeps() -> None:
    """A kernel whose sums would be larger than any history keeps keys and values instead."""
    assert isinstance(start(rg.Softmax()), KeyValueState)
    assert isinstance(start(rg.Quadratic()), KernelState)
    large = rg.Polynomial(degree=8)
    state = large.start(batch=1, num_kv_heads=G, qk_length=12, value_length=V, capacity=8, dtype=torch.float64)
    assert isinstance(state, KeyValueState)


def test_a_later_padding_of_equal_count_elsewhere_is_refused() -> None:
    tensors = tokens(LONG)
    mechanism = STREAMS["quadratic"]
    first, second = torch.ones(B, LONG - 1, dtype=torch.bool), torch.ones(B, LONG, dtype=torch.bool)
    first[:, :10] = False
    second[:, 50:60] = False
    _, state = mechanism.extend(
        *piece(tensors, 0, LONG - 1), start(mechanism), mask=rg.causal & rg.padding(valid=first)
    )
    with pytest.raises(ValueError, match=r"^mask: expected padding that leaves .* got one that hides a token of"):
        mechanism.extend(*piece(tensors, LONG - 1, LONG), state, mask=rg.causal & rg.padding(valid=second))


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


@every_stream
@pytest.mark.parametrize("cuts", [[0, 150, 199, 200, 201, 202, LONG], [0, 201, LONG], [0, LONG]], ids=str)
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_a_bad_token_spoils_no_gradient_of_queries_before_it(name: str, cuts: list[int], which: int) -> None:
    """Also where later queries, which see it, are part of the graph and get a gradient of 0."""
    many, place = tokens(LONG), 200
    many[which][:, :, place, 0] = math.nan
    leaves = tuple(t.requires_grad_() for t in many)
    out, _ = stream(STREAMS[name], leaves, cuts, start(STREAMS[name]))
    assert out[:, :, :place].isfinite().all()
    assert out[:, :, place:].isnan().any(-1).all()
    gradients = torch.autograd.grad(out[:, :, :place].sum(), leaves, allow_unused=True)  # a choice has none for queries
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


@every_stream
def test_a_bad_history_spoils_no_gradient(name: str) -> None:
    mechanism, many, past = STREAMS[name], tokens(LONG), RECENT + 20
    many[2][:, :, 10, 0] = math.nan
    with torch.no_grad():
        _, state = mechanism.extend(*piece(many, 0, past), start(mechanism), mask=rg.causal)
    leaves = tuple(t.clone().requires_grad_() for t in piece(many, past, LONG))
    out, _ = stream(mechanism, leaves, [0, 1, 2, LONG - past], state)
    assert out.isnan().any(-1).all()
    gradients = torch.autograd.grad(out, leaves, torch.zeros_like(out), allow_unused=True)
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("index", [None, "01", [0, None], [[0]], [0.5], [True], [-1], [7], 2.5], ids=str)
@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Elu(), rg.Retention()], ids=repr)
def test_what_is_no_index_of_rows_is_refused_by_every_state(mechanism: rg.Mechanism, index: Any) -> None:
    state = mechanism.start(batch=2, num_kv_heads=1, qk_length=4, value_length=4, capacity=4)
    with pytest.raises(ValueError, match=r"^index: expected"):
        state.reorder(index)


def test_a_copy_of_recorded_prefixes_is_not_written_to(monkeypatch):
    """A fork of what autograd recorded, gone on with gradients: what comes later goes to another buffer."""
    monkeypatch.setattr("regard.core.states.buffer.FORKED", 8)
    softmax = rg.Softmax()

    def tokens(count):
        return [torch.randn(1, 2, count, 16) for _ in range(3)]

    state = softmax.start(batch=1, num_kv_heads=2, qk_length=16, value_length=16, capacity=64)
    learned = [x.requires_grad_() for x in tokens(20)]
    _, state = softmax.extend(*learned, state, mask=rg.causal)
    with torch.no_grad():
        _, fork = [softmax.extend(*tokens(1), state, mask=rg.causal)[1] for _ in range(2)]
    assert fork.in_parts
    out, longer = softmax.extend(*tokens(1), fork, mask=rg.causal)
    version = longer.buffer.keys._version
    with torch.no_grad():
        softmax.extend(*tokens(1), longer, mask=rg.causal)
    assert longer.buffer.keys._version == version
    out.sum().backward()
    assert all(x.grad is not None for x in learned[1:])


@pytest.mark.parametrize("mask", [rg.causal, rg.causal & rg.window(before=9)], ids=["prefix", "gap"])
def test_a_copy_that_autograd_reads_keys_from_is_marked(mask: rg.Mask) -> None:
    """Queries with a gradient over a shared prefix, or over a gap that a window fills: both are copied first."""
    softmax, pads = rg.Softmax(), rg.padding([256, 90])
    state = softmax.start(batch=2, num_kv_heads=1, qk_length=4, value_length=4, capacity=300)
    _, state = softmax.extend(*torch.randn(3, 2, 1, 256, 4), state, mask=rg.causal & pads)
    if mask is rg.causal:
        state = state.reorder(torch.tensor([0, 0]))
    q, k, v = torch.randn(3, 2, 1, 1, 4)
    _, longer = softmax.extend(q.requires_grad_(), k, v, state, mask=mask)
    assert all(run.buffer.recorded for run in longer.runs)
