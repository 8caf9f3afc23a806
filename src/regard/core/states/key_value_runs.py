"""Runs: keys and values of some batch rows in one buffer. A KV cache consists of one or more runs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.eager import recorded
from regard.core.masks import Padding, Span
from regard.core.masks.padded import join_padding, reorder_padding
from regard.core.states.buffer import Buffer, roomy, spread

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
class Arrival:
    """Tokens from `start` to `end` that come. `new` says which of them are real, `old` which before them (None:
    all)."""

    new: Padding | None
    old: Padding | None
    start: int
    end: int

    @property
    def count(self) -> int:
        """How many they are."""
        return self.end - self.start

    def end_of(self, row: int) -> int:
        """Where the last real token of a batch row ends."""
        assert self.new is not None
        assert self.new.rows is not None
        low, high = _within(self.new.rows[row], 0, self.count)
        if low < high:
            return self.start + high
        return self.start if self.old is None or self.old.rows is None else min(self.old.rows[row][1], self.start)


@dataclass(frozen=True, eq=False)
class Run:
    """Keys and values of some batch rows from one position on, in one buffer.

    A batch of prompts of unequal length is kept in a few runs, so that padding takes no memory: padded on the left,
    they begin at different positions; padded on the right, they have different gaps between prompt and continuation.
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
    gap: Span | None = None
    """Positions that are padding in all its rows and are not stored: from the end of a right-padded prompt on."""
    real: Padding | None = None
    """With a gap: which of the tokens that it stores are real; None if all are. It follows from the state's padding,
    and is kept so that no step has to read its table."""

    @property
    def prefix_length(self) -> int:
        """The number of tokens in the prefixes."""
        return sum([prefix.length for prefix in self.prefixes])

    def count(self, length: int) -> int:
        """How many tokens of a history of `length` tokens it stores."""
        if self.gap is not None:
            length -= max(0, min(length, self.gap[1]) - self.gap[0])
        return max(0, length - self.begin)

    def in_gap(self, queries: int, length: int) -> int:
        """How many of the newest tokens are in the gap: none if a token came after it."""
        return 0 if self.gap is None or self.gap[1] < length else min(queries, length - self.gap[0])

    def read(self, which: int, length: int) -> Tensor:
        """The keys (0) or values (1) of a history of `length` tokens, (rows, G, length - begin, ·); 0 in the gap."""
        tokens = self.buffer.read(which, self.count(length) - self.prefix_length)
        if self.prefixes:
            shared = [prefix.buffer.read(which, prefix.length)[list(prefix.places)] for prefix in self.prefixes]
            tokens = torch.cat([*shared, tokens], dim=2)
        return tokens if self.gap is None else spread(tokens, self.gap[0] - self.begin, self.gap[1] - self.gap[0])

    def columns_of(self, table: Tensor) -> Tensor:
        """The columns of a table (…, length) at the positions that it stores."""
        if self.gap is None:
            return table[..., self.begin :]
        low, high = self.gap
        return torch.cat([table[..., self.begin : low], table[..., high:]], dim=-1)

    def apart(self, length: int) -> "Run":
        """The run with all its positions in one buffer: without shared prefixes, with zeros in a gap."""
        run = self.joined(length)
        if run.gap is None:
            return run
        low, high = run.gap
        buffer = run.buffer.spread(low - run.begin, high - low, run.count(length))
        buffer.recorded = run.buffer.recorded or self.derived
        return replace(run, buffer=buffer, gap=None, real=None)

    def joined(self, length: int) -> "Run":
        """The run with all its tokens in one buffer, without shared prefixes."""
        if not self.prefixes:
            return self
        rest = self.count(length) - self.prefix_length
        buffer = self.buffer.blank(len(self.rows), self.prefix_length + max(rest, self.buffer.room))
        for part in (*self.prefixes, Prefix(self.buffer, rest, tuple(range(len(self.rows))))):
            for whole, tensor in zip(buffer.tensors, part.buffer.tensors, strict=True):
                tokens = tensor.narrow(2, 0, part.length)
                whole.narrow(2, buffer.used, part.length).copy_(tokens if part.in_order else tokens[list(part.places)])
            buffer.used += part.length
        buffer.recorded = self.buffer.recorded or self.derived  # attention to the newest tokens saves views of the copy
        return replace(self, buffer=buffer, prefixes=())

    def forked(self, length: int, room: int) -> "Run":
        """The run of another continuation: the history stays where it is, new tokens get a buffer with this room."""
        shared = self.count(length) - self.prefix_length
        prefix = Prefix(self.buffer, shared, tuple(range(len(self.rows))))
        buffer = self.buffer.blank(len(self.rows), room)
        return replace(self, buffer=buffer, prefixes=(*self.prefixes, prefix))

    def cropped(self, length: int) -> "Run":
        """The run of a shorter history."""
        gap, real, left = self.gap, self.real, self.count(length)
        if gap is not None and length < gap[1]:
            gap = (gap[0], length) if length > gap[0] else None
        if real is not None:
            real = None if gap is None else real.between(0, left, left)
        prefixes, first = [], 0
        for prefix in self.prefixes:
            if first < left:
                prefixes.append(replace(prefix, length=min(left - first, prefix.length)))
            first += prefix.length
        return replace(self, prefixes=tuple(prefixes), gap=gap, real=real)

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of this run from a tensor (B, …): a view if they are adjacent."""
        if len(self.rows) == len(tensor):
            return tensor
        low, high = self.rows[0], self.rows[-1] + 1
        return tensor[low:high] if high - low == len(self.rows) else tensor[list(self.rows)]

    def begun(self, spans: tuple[Span, ...] | None, start: int, end: int) -> "list[Run]":
        """The runs of rows that had no real token up to `start`, when tokens up to `end` come, real at `spans` (None:
        all). They get memory with their first tokens."""
        real = {row: (start, end) if spans is None else _within(spans[row], start, end) for row in self.rows}
        later = tuple(row for row, (low, high) in real.items() if low >= high)
        groups = _begin_together({row: low for row, (low, _) in real.items() if row not in later}, start, end)
        if not self.rows or (not later and [begin for _, begin in groups] == [self.begin]):
            return [replace(self, waiting=False)]
        runs = [Run(rows, self.buffer.blank(len(rows), 0), begin, False) for rows, begin in groups]
        return [*runs, Run(later, self.buffer.blank(len(later), 0), end)] if later else runs

    def received(self, tokens: Arrival, capacity: int) -> "list[Run]":
        """The runs of these rows when tokens come. In a prompt, rows that end get a gap, and a run of their own if
        others go on: at once while nothing is stored, in later chunks when so much padding has come that a copy of the
        rows is worth it."""
        start, has_tokens = tokens.start, self.count(tokens.start) > 0
        if self.gap is not None:
            part = None if tokens.new is None else tokens.new.part(self.rows, 0, tokens.count)
            if self.gap[1] == start and _nothing(part):
                return [replace(self, gap=(self.gap[0], tokens.end))]
            return [replace(self, real=self._real(self.real, self.count(start), part, tokens.count))]
        if not self.rows or tokens.new is None or tokens.new.rows is None or torch.compiler.is_compiling():
            return [self]
        if has_tokens and tokens.count < PAGE:  # a decode step: a gap would be filled and begun again under a window
            return [self]
        ends = {row: tokens.end_of(row) for row in self.rows}
        groups = _end_together(ends, self.begin, tokens.end, copies=has_tokens)
        return [self._until(rows, stop, tokens, capacity) for rows, stop in groups]

    def _until(self, rows: tuple[int, ...], stop: int, tokens: Arrival, capacity: int) -> "Run":
        """The run of some of its rows when tokens come, of which none is real from `stop` on."""
        first = max(tokens.start, self.begin)
        if rows == self.rows:
            run, stop = self, max(stop, first)  # what is stored stays
        else:
            stop = max(stop, self.begin)
            kept = min(stop, first)
            run = self.cropped(kept)._copy([self.rows.index(row) for row in rows], rows, kept, capacity)
        if stop == tokens.end:
            return run
        # Which tokens are real: those that are stored, and those of the new ones that come before the gap.
        stored, more = run.count(min(stop, tokens.start)), max(0, stop - first)
        before = after = None
        if tokens.old is not None and stored:
            before = tokens.old.part(rows, self.begin, self.begin + stored)
        if tokens.new is not None and more:
            low = first - tokens.start
            part = tokens.new.between(low, low + more, tokens.count)
            after = None if part is None else part.part(rows, 0, more)
        return replace(run, gap=(stop, tokens.end), real=run._real(before, stored, after, more))

    def _real(self, old: Padding | None, stored: int, new: Padding | None, count: int) -> Padding | None:
        return join_padding(old, stored, new, count, len(self.rows), self.buffer.keys.device)

    def chosen(self, index: list[int], length: int, capacity: int, may_share: bool) -> "Run | None":
        """The run after reordering: batch row i becomes row `index[i]`; None if no row is left.

        Repeated rows share their common tokens if `may_share`, that is, if attention can use a shared prefix.
        """
        rows = tuple(new for new, old in enumerate(index) if old in self.rows)
        if not rows:
            return None
        places = [self.rows.index(index[new]) for new in rows]
        kept = self.count(length) - self.prefix_length
        if not may_share or kept < SHARED or len(set(places)) == len(places) or self.derived:
            return self._copy(places, rows, length, capacity)
        prefix = Prefix(self.buffer, kept, tuple(range(len(self.rows)))).of(places)
        run = self._named(places, rows, length)
        buffer = self.buffer.blank(len(rows), roomy(0, self.count(capacity) - self.prefix_length - kept))
        return replace(run, buffer=buffer, prefixes=(*run.prefixes, prefix))

    def _copy(self, places: list[int], rows: tuple[int, ...], length: int, capacity: int) -> "Run":
        """The run of its rows at these places, as batch rows of other numbers."""
        kept, room = (self.count(size) - self.prefix_length for size in (length, capacity))
        place = torch.tensor(places, device=self.buffer.keys.device)
        buffer = self.buffer.moved(0, kept, roomy(kept, room) if kept else 0, place)
        return replace(self._named(places, rows, length), buffer=buffer)

    def _named(self, places: list[int], rows: tuple[int, ...], length: int) -> "Run":
        """The run of its rows at these places, without their buffer."""
        real = None if self.real is None else reorder_padding(self.real, torch.tensor(places), self.count(length))
        return replace(self, rows=rows, prefixes=tuple(prefix.of(places) for prefix in self.prefixes), real=real)

    @property
    def derived(self) -> bool:
        """Whether autograd records what it holds."""
        return any([recorded(*buffer.tensors) for buffer in self.buffers])

    @property
    def buffers(self) -> list[Buffer]:
        """All its memory: of the prefixes, and of the tokens after them."""
        return [*(prefix.buffer for prefix in self.prefixes), self.buffer]


def _within(span: Span, start: int, end: int) -> Span:
    return max(start, span[0]), min(span[1], end)


def _nothing(padding: Padding | None) -> bool:
    """Whether no token is real."""
    return padding is not None and padding.rows is not None and all([low >= high for low, high in padding.rows])


def _near(padding: int, tokens: int) -> bool:
    """Whether a row of so many tokens may store so much padding in order to share a run with others."""
    return padding <= max(PAGE, tokens // 4)


def _begin_together(begins: dict[int, int], start: int, end: int) -> list[tuple[tuple[int, ...], int]]:
    """A grouping of rows into runs, with the start of each, so that there is little padding and there are few runs."""
    groups: list[tuple[list[int], int]] = []
    for begin, row in sorted((begin, row) for row, begin in begins.items()):
        if groups and _near(begin - groups[-1][1], end - begin):
            groups[-1][0].append(row)
        else:
            groups.append(([row], max(start, begin - begin % PAGE)))
    return [(tuple(sorted(rows)), begin) for rows, begin in groups]


def _end_together(ends: dict[int, int], begin: int, last: int, copies: bool) -> list[tuple[tuple[int, ...], int]]:
    """A grouping of rows that begin at one position, by where each ends, up to `last`: rows that end there first.
    Others are alone with those that end at the same token, or, if to part them takes copies, near to it."""
    groups: list[tuple[list[int], int]] = [([], last)]
    for end, row in sorted(((end, row) for row, end in ends.items()), reverse=True):
        padding = groups[-1][1] - end
        if padding == 0 or (copies and _near(padding, end - begin)):
            groups[-1][0].append(row)
        else:
            groups.append(([row], end))
    return [(tuple(sorted(rows)), end) for rows, end in groups if rows]
