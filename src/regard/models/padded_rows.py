"""Token sequences of different lengths as one padded batch; all padding of batches happens here."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.core.masks import Mask, padding

if TYPE_CHECKING:  # models run without NumPy
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.integer[Any]]

Side = Literal["left", "right"]


class PaddedRows(NamedTuple):
    """A batch of tokens (B, T) and which of them are real."""

    tokens: Tensor
    mask: Mask
    ragged: bool
    """Whether the rows differ in length; if not, the mask hides nothing."""


def pad_rows(rows: Sequence[Sequence[int]], *, filling: int = 0, side: Side = "right") -> PaddedRows:
    """Lists of tokens as one batch, the shorter ones filled up with `filling` on one side.

    >>> from regard.models.padded_rows import pad_rows
    >>> padded = pad_rows([[5, 6, 7], [8]], side="left")
    >>> padded.tokens.tolist(), padded.ragged
    ([[5, 6, 7], [0, 0, 8]], True)
    >>> print(padded.mask.draw(3, batch=1))
    · · ■
    · · ■
    · · ■
    """
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    values = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.long)
    place, real = _places(lengths, side)
    tokens = torch.full(real.shape, filling)
    tokens[real] = values[((lengths.cumsum(0) - lengths)[:, None] + place)[real]]
    mask = padding(lengths.tolist()) if side == "right" else padding(valid=real)
    return PaddedRows(tokens, mask, ragged=not bool(real.all()))


def pad_ranges(
    values: "Integers", starts: "Integers", lengths: "Integers", *, filling: int = 0, side: Side = "right"
) -> "NDArray[np.int64]":
    """`values[start : start + length]` for each start and length, as one padded array (B, T).

    >>> import numpy as np
    >>> from regard.models.padded_rows import pad_ranges
    >>> pad_ranges(np.arange(10), np.array([2, 7]), np.array([3, 1]), filling=-1).tolist()
    [[2, 3, 4], [7, -1, -1]]
    """
    place, real = (table.numpy() for table in _places(torch.from_numpy(lengths.astype("int64")), side))
    table = torch.full(real.shape, filling).numpy()
    table[real] = values[(starts[:, None] + place)[real]]
    return table


def _places(lengths: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """For each cell of the batch, the index of its token in its row, and whether there is such a token."""
    if side not in ("left", "right"):
        raise ValueError(f"side: expected 'left' or 'right', got {side!r}")
    longest = int(lengths.max()) if len(lengths) else 0
    column = torch.arange(longest)
    place = column - (longest - lengths[:, None]) if side == "left" else column.expand(len(lengths), longest)
    return place, (place >= 0) & (place < lengths[:, None])
