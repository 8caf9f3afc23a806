"""Sequences packed into one: `segments` by their ids, `Packed` by their lengths."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from regard.core.eager import readable
from regard.core.masks.arguments import from_numpy
from regard.core.masks.base import Mask, Span


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed sequences: a query sees the keys with the same id."""

    ids: Tensor
    reach: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None
    """For every sequence and position, the first position with the same id and one past the last; None in a trace,
    which cannot read ids."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return (None if self.ids.shape[0] == 1 else self.ids.shape[0]), None

    @property
    def length(self) -> int | None:
        return self.ids.shape[1]

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ids = self.ids.to(key.device)
        row = torch.zeros_like(batch) if ids.shape[0] == 1 else batch
        return (ids[row, query.clamp(min=0)] == ids[row, key]) & (query >= 0)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        if self.reach is None:
            return [(0, keys)]
        low, high = max(low, 0), min(high, keys)
        if low >= high or not self.reach:
            return []
        first = min(min(row[0][low:high]) for row in self.reach)
        last = max(max(row[1][low:high]) for row in self.reach)
        return [(first, last)]

    def sequences(self, batch: int) -> tuple[tuple[int, int, int], ...] | None:
        return _sequences(self, batch)

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if self.ids.shape[0] not in (1, batch) or self.ids.shape[1] != keys:
            raise ValueError(f"mask: expected segments(ids) of shape {(batch, keys)}, got {tuple(self.ids.shape)}")

    def __repr__(self) -> str:
        return f"segments({tuple(self.ids.shape)})"


def segments(ids: Tensor | Sequence[Sequence[int]]) -> Mask:
    """Packed sequences: a query sees the keys with the same id. `ids` is (B, S), or (S,) for one row shared by all.

    >>> import regard as rg
    >>> print(rg.segments([[0, 0, 1]]).draw(3))
    ■ ■ ·
    ■ ■ ·
    · · ■
    """
    ids = from_numpy("ids", ids)
    if not isinstance(ids, Tensor) and len({len(row) if hasattr(row, "__len__") else None for row in ids}) > 1:
        raise ValueError(f"ids: expected rows of one length, got {ids!r}")
    table = torch.as_tensor(ids)
    if table.ndim == 1:
        table = table[None]
    if table.ndim != 2 or table.dtype.is_floating_point:
        raise ValueError(f"ids: expected whole numbers of shape (B, S), got {table.dtype} {tuple(table.shape)}")
    # int64, since PyTorch does not index with every integer dtype.
    return Segments(table.long(), tuple(map(_reach, table.tolist())) if readable(table) else None)


@lru_cache(maxsize=64)
def _sequences(mask: Segments, batch: int) -> tuple[tuple[int, int, int], ...] | None:
    """Cached, so that all layers of a step share it."""
    if mask.reach is None:
        return None
    sequences = []
    for row, (first, last) in enumerate(mask.reach if len(mask.reach) == batch else mask.reach * batch):
        begin = 0
        while begin < len(first):
            end = last[begin]
            if first[begin] != begin or any(start != begin for start in first[begin:end]):
                return None  # a sequence with others in between: not contiguous
            sequences.append((row, begin, end - begin))
            begin = end
    return tuple(sequences)


def _reach(row: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, label in enumerate(row):
        first.setdefault(label, position)
        last[label] = position + 1
    return tuple(first[label] for label in row), tuple(last[label] for label in row)


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """Packed sequences by their lengths: the same mask as `segments`, without a table of ids."""

    lengths: tuple[int, ...]

    @property
    def length(self) -> int | None:
        return sum(self.lengths)

    @cached_property
    def ids(self) -> Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.long))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """One past the last position of each sequence."""
        return tuple(accumulate(self.lengths))

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ids = self.ids.to(key.device)
        return (ids[query.clamp(min=0)] == ids[key]) & (query >= 0)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        low, high = max(low, 0), min(high, keys)
        if low >= high:
            return []
        first, last = bisect_right(self.ends, low), bisect_right(self.ends, high - 1)
        return [(self.ends[first] - self.lengths[first], self.ends[last])]

    def sequences(self, batch: int) -> tuple[tuple[int, int, int], ...] | None:
        rows = zip(self.lengths, self.ends, strict=True)
        return tuple((0, end - length, length) for length, end in rows if length) if batch == 1 else None

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if sum(self.lengths) != keys:
            raise ValueError(f"mask: expected packed sequences of {keys} tokens in all, got {sum(self.lengths)}")

    def __repr__(self) -> str:
        return f"packed({len(self.lengths)} sequences)"
