"""Rows of tokens of many lengths as one table, padded on one side: the one place where batches are padded."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.core.masks import Mask, padding

Integers = NDArray[np.integer[Any]]
Side = Literal["left", "right"]


class PaddedRows(NamedTuple):
    """A table of tokens (B, T) and which of them are real."""

    tokens: Tensor
    mask: Mask
    ragged: bool
    """Whether the rows differ in length; if not, the mask hides nothing."""


def pad_rows(rows: Sequence[Sequence[int]], *, filling: int = 0, side: Side = "right") -> PaddedRows:
    """Lists of tokens as one table, with `filling` on one side of the shorter ones.

    >>> from regard.models.padded_rows import pad_rows
    >>> padded = pad_rows([[5, 6, 7], [8]], side="left")
    >>> padded.tokens.tolist(), padded.ragged
    ([[5, 6, 7], [0, 0, 8]], True)
    >>> print(padded.mask.draw(3, batch=1))
    · · ■
    · · ■
    · · ■
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    values = np.fromiter(chain.from_iterable(rows), np.int64, count=int(lengths.sum()))
    table = torch.from_numpy(pad_ranges(values, lengths.cumsum() - lengths, lengths, filling=filling, side=side))
    longest = table.shape[1]
    if side == "right":
        mask = padding(lengths.tolist())
    else:
        mask = padding(valid=torch.arange(longest) >= longest - torch.from_numpy(lengths)[:, None])
    return PaddedRows(table, mask, ragged=bool((lengths < longest).any()))


def pad_ranges(
    values: Integers, starts: Integers, lengths: Integers, *, filling: int = 0, side: Side = "right"
) -> NDArray[np.int64]:
    """`values[start : start + length]` for each start and length, as one table (B, T).

    >>> import numpy as np
    >>> from regard.models.padded_rows import pad_ranges
    >>> pad_ranges(np.arange(10), np.array([2, 7]), np.array([3, 1]), filling=-1).tolist()
    [[2, 3, 4], [7, -1, -1]]
    """
    if side not in ("left", "right"):
        raise ValueError(f"side: expected 'left' or 'right', got {side!r}")
    column = np.arange(lengths.max(initial=0))
    place = column - (len(column) - lengths[:, None] if side == "left" else 0)
    real = (place >= 0) & (place < lengths[:, None])
    table = np.full(real.shape, filling, np.int64)
    table[real] = values[(starts[:, None] + place)[real]]
    return table
