"""Runs: keys and values of some batch rows in one buffer. A KV cache consists of one or more runs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.eager import recorded
from regard.core.masks import Span
from regard.core.states.buffer import Buffer, roomy

PAGE = 64
"""Tokens of padding that a batch row may store in order to share a run with others."""
SHARED = 256
"""Rows share a common prefix from this many tokens on: below, a copy costs less than a second pass."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of some histories, stored once for all batch rows that share them."""

    buffer: Buffer
    length: int
    places: tuple[int, ...]
    """The row in the buffer, for each row of the run."""

    @property
    def in_order(self) -> bool:
        """Whether each row of the run has its row of the buffer: the prefix of a fork."""
        return self.places == tuple(range(len(self.buffer.keys)))

    def of(self, chosen: list[int]) -> "Prefix":
        """The prefix for selected rows of the run, without histories that none of them uses."""
        places = [self.places[row] for row in chosen]
        parents = sorted(set(places))
        if len(parents) == len(self.buffer.keys):
            return replace(self, places=tuple(places))
        kept = torch.tensor(parents, device=self.buffer.keys.device)
        buffer = self.buffer.moved(0, self.length, self.length, kept)
        return Prefix(buffer, self.length, tuple(parents.index(place) for place in places))


@dataclass(frozen=True, eq=False)
class Run:
    """Keys and values of some batch rows from one position on, in one buffer.

    A batch of prompts of unequal length, padded on the left, is kept in a few runs, so that padding takes no memory.
    What histories have in common (forks, repeated rows) is stored once, in prefixes.
    """

    rows: tuple[int, ...]
    buffer: Buffer
    begin: int = 0
    """The position of its first key."""
    waiting: bool = True
    """Whether none of its rows has had a real token: it has no keys yet, and may still begin later."""
    prefixes: tuple[Prefix, ...] = ()
    """Its first tokens, if they are shared, in order; the buffer has the tokens after them."""

    @property
    def prefix_length(self) -> int:
        """The number of tokens in the prefixes."""
        return sum([prefix.length for prefix in self.prefixes])

    def read(self, which: int, length: int) -> Tensor:
        """The keys (0) or values (1) of a history of `length` tokens, (rows, G, length - begin, ·)."""
        count = max(0, length - self.begin)
        if not self.prefixes:
            return self.buffer.read(which, count)
        shared = [prefix.buffer.read(which, prefix.length)[list(prefix.places)] for prefix in self.prefixes]
        return torch.cat([*shared, self.buffer.read(which, count - self.prefix_length)], dim=2)

    def apart(self, length: int) -> "Run":
        """The run with all its tokens in one buffer, without shared prefixes."""
        if not self.prefixes:
            return self
        rest = length - self.begin - self.prefix_length
        buffer = self.buffer.blank(len(self.rows), self.prefix_length + max(rest, self.buffer.room))
        for part in (*self.prefixes, Prefix(self.buffer, rest, tuple(range(len(self.rows))))):
            for whole, tensor in zip(buffer.tensors, part.buffer.tensors, strict=True):
                tokens = tensor.narrow(2, 0, part.length)
                whole.narrow(2, buffer.used, part.length).copy_(tokens if part.in_order else tokens[list(part.places)])
            buffer.used += part.length
        buffer.recorded = self.derived
        return replace(self, buffer=buffer, prefixes=())

    def forked(self, length: int, room: int) -> "Run":
        """The run of another continuation: the history stays where it is, new tokens get a buffer with this room."""
        shared = length - self.begin - self.prefix_length
        prefix = Prefix(self.buffer, shared, tuple(range(len(self.rows))))
        buffer = self.buffer.blank(len(self.rows), room)
        return replace(self, buffer=buffer, prefixes=(*self.prefixes, prefix))

    def cropped(self, length: int) -> "Run":
        """The run of a shorter history."""
        left, prefixes = max(0, length - self.begin), []
        if left >= self.prefix_length:
            return self
        for prefix in self.prefixes:
            if left > 0:
                prefixes.append(replace(prefix, length=min(left, prefix.length)))
            left -= prefix.length
        return replace(self, prefixes=tuple(prefixes))

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of this run from a tensor (B, …): a view if they are adjacent."""
        if len(self.rows) == len(tensor):
            return tensor
        low, high = self.rows[0], self.rows[-1] + 1
        return tensor[low:high] if high - low == len(self.rows) else tensor[list(self.rows)]

    def split(self, spans: tuple[Span, ...] | None, start: int, end: int, capacity: int) -> "list[Run]":
        """The runs of rows that had no real token up to `start`, when tokens up to `end` come, real at `spans` (None:
        all)."""
        begins = {row: start if spans is None else max(start, spans[row][0]) for row in self.rows}
        later = tuple(row for row in self.rows if spans is not None and spans[row][0] >= min(spans[row][1], end))
        groups = _together({row: begin for row, begin in begins.items() if row not in later}, start, end)
        if not self.rows or (not later and [begin for _, begin in groups] == [self.begin] and self.buffer.room):
            return [replace(self, waiting=False)]

        runs = [Run(rows, self.buffer.blank(len(rows), capacity - begin), begin, False) for rows, begin in groups]
        return [*runs, Run(later, self.buffer.blank(len(later), 0), end)] if later else runs

    def chosen(self, index: list[int], length: int, capacity: int, may_share: bool) -> "Run | None":
        """The run after reordering: batch row i becomes row `index[i]`; None if no row is left.

        Repeated rows share their common tokens if `may_share`, that is, if attention can use a shared prefix.
        """
        rows = tuple(new for new, old in enumerate(index) if old in self.rows)
        if not rows:
            return None
        places = [self.rows.index(index[new]) for new in rows]
        kept = max(0, length - self.begin - self.prefix_length)
        room = capacity - self.begin - self.prefix_length
        prefixes = tuple(prefix.of(places) for prefix in self.prefixes)
        if may_share and kept >= SHARED and len(set(places)) < len(places) and not self.derived:
            prefix = Prefix(self.buffer, kept, tuple(range(len(self.rows)))).of(places)
            buffer = self.buffer.blank(len(rows), roomy(0, room - kept))
            return replace(self, rows=rows, buffer=buffer, prefixes=(*prefixes, prefix))
        room = roomy(kept, room) if kept else min(room, self.buffer.room)
        place = torch.tensor(places, device=self.buffer.keys.device)
        return replace(self, rows=rows, buffer=self.buffer.moved(0, kept, room, place), prefixes=prefixes)

    @property
    def derived(self) -> bool:
        """Whether autograd records what it holds."""
        return any([recorded(*buffer.tensors) for buffer in self.buffers])

    @property
    def buffers(self) -> list[Buffer]:
        """All its memory: of the prefixes, and of the tokens after them."""
        return [*(prefix.buffer for prefix in self.prefixes), self.buffer]


def _together(begins: dict[int, int], start: int, end: int) -> list[tuple[tuple[int, ...], int]]:
    """A grouping of rows into runs, with the start of each, so that there is little padding and there are few runs."""
    groups: list[tuple[list[int], int]] = []
    for begin, row in sorted((begin, row) for row, begin in begins.items()):
        if groups and begin - groups[-1][1] <= max(PAGE, (end - begin) // 4):
            groups[-1][0].append(row)
        else:
            groups.append(([row], max(start, begin - begin % PAGE)))
    return [(tuple(sorted(rows)), begin) for rows, begin in groups]
