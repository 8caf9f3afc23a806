"""States remember which of their tokens were padding, and nothing bad in those reaches a later token."""

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from streams_and_histories import (
    CACHED,
    LONG,
    STREAMS,
    SUMMED,
    B,
    G,
    H,
    close,
    every_stream,
    left,
    piece,
    plain,
    start,
    stream,
    tokens,
    triangle,
)


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


@pytest.mark.parametrize("name", CACHED | SUMMED)
def test_cropping_keeps_the_padding_of_what_is_left(name: str) -> None:
    mechanism, tensors, starts = STREAMS[name], tokens(20), torch.tensor([0, 6, 12])
    _, late = stream(mechanism, tensors, [0, 20], start(mechanism), lambda n: rg.causal & left(starts, n))
    out, _ = stream(mechanism, tensors, [8, 20], late.crop(8))
    place = torch.arange(20)
    # Row 2 is padding as far as the crop goes; the tokens that come after it are real now.
    visible = triangle(20) & ((place >= starts[:, None]) | (place >= 8))[:, None, None]
    assert close(out, plain(mechanism, *tensors, visible)[:, :, 8:])


@every_stream
def test_nbytes_counts_what_is_remembered_of_padding(name: str) -> None:
    """Padding with holes is kept as a table, and a table has bytes; a NaN is kept where it came, and has none."""
    mechanism, tensors = STREAMS[name], tokens(6)
    tensors[1][0, 0, 3] = math.nan
    holes = torch.tensor([[True, False, True, True, True, True]] * B)
    fresh = start(mechanism)
    _, state = mechanism.extend(*tensors, fresh, mask=rg.causal & rg.padding(valid=holes))
    assert state.nbytes == fresh.nbytes + B * 6


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
