"""Rows of tokens as one padded table: nothing is lost, and the mask hides the padding alone."""

import numpy as np
import pytest
import torch

from regard.models.padded_rows import pad_ranges, pad_rows

ROWS = [[3, 1, 4], [], [1], [5, 9, 2, 6], [5]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_real_tokens_of_a_table_are_the_rows(side):
    tokens, mask, ragged = pad_rows(ROWS, filling=-7, side=side)
    valid = mask.valid(4)
    assert ragged
    assert tokens.dtype == torch.int64
    assert [row[real].tolist() for row, real in zip(tokens, valid, strict=True)] == ROWS
    assert set(tokens[~valid].tolist()) == {-7}
    assert [real[0 if side == "right" else -1].item() for real in valid] == [True, False, True, True, True]


def test_rows_of_one_length_are_not_ragged():
    tokens, mask, ragged = pad_rows([[1, 2], [3, 4]])
    assert not ragged
    assert mask.valid(2).all()
    assert tokens.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_ranges_of_one_array_are_padded_as_lists_are(side):
    values, starts, lengths = np.arange(30, dtype=np.int32), np.array([4, 29, 0]), np.array([5, 1, 0])
    rows = [values[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
    table = pad_ranges(values, starts, lengths, filling=9, side=side)
    assert table.dtype == np.int64
    assert table.tolist() == pad_rows(rows, filling=9, side=side).tokens.tolist()


def test_nothing_is_a_table_without_columns():
    assert pad_rows([[], []]).tokens.shape == (2, 0)
    with pytest.raises(ValueError, match="side: expected 'left' or 'right', got 'top'"):
        pad_rows([[1]], side="top")
