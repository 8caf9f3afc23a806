"""States: what a mechanism keeps of the tokens it has met, so that the next one costs one step.

A state is a value. Extending it gives a new state and leaves the old one as it was, so a prompt's state can be forked,
kept and used again. Appending does not copy: states of one history share buffers with room to spare (buffer.py), each
with its own length.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.buffer import Buffer, roomy
from regard.eager import readable
from regard.mask import Padding, Span, padding_of

PAGE = 64
"""Tokens of padding that a batch row may store for the sake of sharing a run with others."""


@dataclass(frozen=True, eq=False)
class Run:
    """Keys and values of some batch rows from one position on, one after another in one buffer.

    A batch of unequal prompts, padded on the left, is kept in a few runs, so that its padding takes no memory.
    """

    rows: tuple[int, ...]
    buffer: Buffer
    begin: int = 0
    """The position of its first key."""
    waiting: bool = True
    """Whether none of its rows has met a real token: it has no keys yet, and may still begin later."""

    def keys(self, length: int) -> Tensor:
        """The keys of a history of `length` tokens, (rows, G, length - begin, K)."""
        return self.buffer.read(0, max(0, length - self.begin))

    def values(self, length: int) -> Tensor:
        """The values of a history of `length` tokens, (rows, G, length - begin, V)."""
        return self.buffer.read(1, max(0, length - self.begin))

    def of(self, tensor: Tensor) -> Tensor:
        """Its rows of a tensor (B, …): a view where they are neighbours."""
        if len(self.rows) == len(tensor):
            return tensor
        low, high = self.rows[0], self.rows[-1] + 1
        return tensor[low:high] if high - low == len(self.rows) else tensor[list(self.rows)]

    def split(self, spans: tuple[Span, ...] | None, start: int, end: int, capacity: int) -> "list[Run]":
        """The runs of rows that waited until `start`, once tokens up to `end` come, real at `spans` (None: all)."""
        begins = {row: start if spans is None else max(start, spans[row][0]) for row in self.rows}
        later = tuple(row for row in self.rows if spans is not None and spans[row][0] >= min(spans[row][1], end))
        groups = _together({row: begin for row, begin in begins.items() if row not in later}, start, end)
        if not self.rows or (not later and [begin for _, begin in groups] == [self.begin] and self.buffer.room):
            return [replace(self, waiting=False)]

        runs = [Run(rows, self.buffer.blank(len(rows), capacity - begin), begin, False) for rows, begin in groups]
        return [*runs, Run(later, self.buffer.blank(len(later), 0), end)] if later else runs

    def chosen(self, index: list[int], length: int, capacity: int) -> "Run | None":
        """What is left of it where batch row i becomes row `index[i]`; None if nothing is."""
        rows = tuple(new for new, old in enumerate(index) if old in self.rows)
        if not rows:
            return None
        kept = max(0, length - self.begin)
        place = torch.tensor([self.rows.index(index[new]) for new in rows], device=self.buffer.keys.device)
        room = roomy(kept, capacity - self.begin) if kept else self.buffer.room
        return replace(self, rows=rows, buffer=self.buffer.moved(0, kept, room, place))


@dataclass(frozen=True, eq=False)
class KeyValueState:
    """All keys and values met so far, for mechanisms that look at each of them again.

    >>> import regard as rg, torch
    >>> state = rg.Softmax().start(batch=1, num_kv_heads=2, qk_length=4, value_length=4, capacity=8)
    >>> q = k = v = torch.randn(1, 2, 3, 4)
    >>> out, longer = rg.Softmax().extend(q, k, v, state, mask=rg.causal)
    >>> state.length, longer.length, longer.nbytes
    (0, 3, 512)
    """

    mechanism: ClassVar[None] = None
    """Keys and values are alike for every mechanism that keeps them."""

    runs: tuple[Run, ...]
    """Every batch row is in one of them."""
    capacity: int
    """Tokens it may hold at most. A fork's buffer grows up to it; that of `start` has the room from the beginning."""
    length: int = 0
    padding: Padding | None = None
    """Which of the keys are real; None while all are."""
    tainted: Tensor | None = None
    """Which keys (B, G, length) came with a NaN or infinity in them; None while none did."""

    @classmethod
    def empty(
        cls,
        batch: int,
        num_kv_heads: int,
        qk_length: int,
        value_length: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: torch.dtype | None = None,
    ) -> "KeyValueState":
        def room(length: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(batch, num_kv_heads, capacity, length, dtype=dtype, device=device)

        if storage is None:
            buffer = Buffer(room(qk_length, dtype), room(value_length, dtype))
        else:
            fine = torch.promote_types(dtype, torch.float32)
            scales = room(1, fine), room(1, fine)
            buffer = Buffer(room(qk_length, storage), room(value_length, storage), scales=scales, rounded=dtype)
        return cls((Run(tuple(range(batch)), buffer),), capacity)

    @property
    def whole(self) -> bool:
        """Whether all rows are in one run from the first position on."""
        return len(self.runs) == 1 and self.runs[0].begin == 0

    @property
    def buffer(self) -> Buffer:
        """What holds the tokens of the first run: all of them, where the state is whole."""
        return self.runs[0].buffer

    @property
    def batch(self) -> int:
        return len(self.runs[0].rows) if len(self.runs) == 1 else sum(len(run.rows) for run in self.runs)

    @property
    def keys(self) -> Tensor:
        """The keys met so far, (B, G, length, K): a view, unless they are int8 or in several runs, 0 in between."""
        return self._read(0)

    @property
    def values(self) -> Tensor:
        """The values met so far, (B, G, length, V): a view, unless they are int8 or in several runs, 0 in between."""
        return self._read(1)

    def _read(self, which: int) -> Tensor:
        if self.whole:
            return self.buffer.read(which, self.length)
        parts = [run.values(self.length) if which else run.keys(self.length) for run in self.runs]
        padded = torch.cat([F.pad(part, (0, 0, self.length - part.shape[2], 0)) for part in parts])
        rows = [row for run in self.runs for row in run.rows]
        return padded[torch.tensor(rows, device=padded.device).argsort()]

    @property
    def nbytes(self) -> int:
        """Bytes this state really holds, its room to spare included."""
        held = [tensor for run in self.runs for tensor in run.buffer.tensors]
        table = None if self.padding is None else self.padding.table
        held += [t for t in (self.tainted, table) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)

    def append(
        self,
        k: Tensor,
        v: Tensor,
        padding: Padding | None = None,
        tainted: Tensor | None = None,
        *,
        recorded: bool = False,
    ) -> "KeyValueState":
        """The state with T more keys and values. `padding` says which of the T are real, in positions 0…T.

        `recorded` says that autograd will hold views of the longer state for gradients of something else.
        """
        new = k.shape[2]
        end = self.length + new
        if end > self.capacity:
            raise ValueError(
                f"state: expected at most {self.capacity} tokens (its capacity), got {self.length} + {new}; "
                f"start it with capacity={end} or more"
            )
        if self.padding is not None or padding is not None:
            padding = join_padding(self.padding, self.length, padding, new, k.shape[0], k.device)
        if self.tainted is not None or tainted is not None:
            tainted = _join_tainted(self.tainted, self.length, tainted, k)
        runs: list[Run] = []
        for run in self.runs:
            if run.waiting and new:
                runs += run.split(None if padding is None else padding.rows, self.length, end, self.capacity)
            else:
                runs.append(run)
        longer = []
        for run in runs:
            here = max(0, run.begin - self.length)
            if here < new:
                keys, values = run.of(k), run.of(v)
                if here:
                    keys, values = keys[:, :, here:], values[:, :, here:]
                start, room = max(0, self.length - run.begin), self.capacity - run.begin
                buffer = run.buffer.extended(start, keys, values, room, recorded)
                run = run if buffer is run.buffer else replace(run, buffer=buffer)
            longer.append(run)
        return KeyValueState(tuple(longer), self.capacity, end, padding, tainted)

    def reorder(self, index: Tensor) -> "KeyValueState":
        """The state of other batch rows: row i becomes row `index[i]`. Rows may repeat (beam search)."""
        index = _row_index(index, self.batch, self.buffer.keys.device)
        order = index.tolist()
        chosen = (run.chosen(order, self.length, self.capacity) for run in self.runs)
        runs = tuple(run for run in chosen if run is not None)
        return replace(
            self,
            runs=runs or (Run((), self.buffer.blank(0, self.capacity), waiting=False),),
            padding=reorder_padding(self.padding, index, self.length),
            tainted=None if self.tainted is None else self.tainted[index],
        )

    def crop(self, length: int) -> "KeyValueState":
        """The state as it was at an earlier length."""
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length} (the state's length), got {length}")
        padding = self.padding
        if padding is not None:
            padding = padding.between(0, length, self.length)
        return replace(
            self,
            # Rows that began later wait again: what they had before was padding.
            runs=tuple(
                run if run.begin < length or self.whole else replace(run, begin=length, waiting=True)
                for run in self.runs
            ),
            length=length,
            padding=padding,
            tainted=None if self.tainted is None else self.tainted[..., :length],
        )

    def __repr__(self) -> str:
        return f"KeyValueState(length={self.length}, capacity={self.capacity}, nbytes={self.nbytes})"

    def windowed(self, before: int, new: int) -> "KeyValueState":
        """The state with room for `new` tokens, and without those that none of them sees, `before` back at the most."""
        if self.length + new <= self.capacity:
            return self
        kept = min(self.length, before)
        return self.resized(max(kept + new, 2 * (before + 1)), self.length - kept)

    def resized(self, capacity: int, drop: int = 0) -> "KeyValueState":
        """The state in buffers of its own with another capacity, without its first `drop` tokens."""
        kept = self.length - drop
        assert kept <= capacity

        def moved(run: Run) -> Run:
            begin = max(0, run.begin - drop)
            low, high = max(0, drop - run.begin), max(0, self.length - run.begin)
            recorded = torch.is_grad_enabled() and any(t.requires_grad for t in run.buffer.tensors)
            room = capacity - begin if high > low or not self.length else 0
            return replace(run, begin=begin, buffer=run.buffer.moved(low, high, room, recorded=recorded))

        padding, tainted = self.padding, self.tainted
        if padding is not None:
            padding = padding.between(drop, self.length, self.length)
        if tainted is not None:
            left = tainted[..., drop:]
            tainted = None if readable(left) and not bool(left.any()) else left
        return KeyValueState(tuple(moved(run) for run in self.runs), capacity, kept, padding, tainted)


def _together(begins: dict[int, int], start: int, end: int) -> list[tuple[tuple[int, ...], int]]:
    """Rows that share a run, and where it begins, so that little of it is padding and the runs are few."""
    groups: list[tuple[list[int], int]] = []
    for begin, row in sorted((begin, row) for row, begin in begins.items()):
        if groups and begin - groups[-1][1] <= max(PAGE, (end - begin) // 4):
            groups[-1][0].append(row)
        else:
            groups.append(([row], max(start, begin - begin % PAGE)))
    return [(tuple(sorted(rows)), begin) for rows, begin in groups]


@dataclass(frozen=True, eq=False)
class KernelState:
    """The running sums of a kernel mechanism, and the newest tokens as they are.

    `sums` holds sum phi(k) v^T (B, G, C, V) and `normaliser` sum phi(k) (B, G, C) over the first `folded` tokens, in
    float32 or better. The newest tokens wait in `recent` until they fill it, then the oldest of them are folded in as
    one matrix product. That reads the sums once a token and writes them once in a while; and it keeps the score form,
    which is exact, for short histories. Its size does not grow with the length.
    """

    mechanism: object
    """What the sums are sums of: no other mechanism can go on with them."""
    sums: Tensor
    normaliser: Tensor
    folded: int
    recent: KeyValueState
    tainted: Tensor | None = None
    """Rows and heads (B, G) whose sums took in a NaN or infinity; None while none did."""
    padding: Padding | None = None
    """Which of the folded tokens are real; None while all are."""

    @property
    def length(self) -> int:
        return self.folded + self.recent.length

    @property
    def nbytes(self) -> int:
        table = None if self.padding is None else self.padding.table
        held = [t for t in (self.sums, self.normaliser, self.tainted, table) if t is not None]
        return self.recent.nbytes + sum(t.numel() * t.element_size() for t in held)

    def check_folded(self, padding: Padding | None) -> None:
        """Raise ValueError if a mask's padding hides a token that is already in the sums."""
        if padding is None:
            return
        hidden = self._hidden_again(padding)
        if hidden is not None:
            raise ValueError(
                f"mask: expected padding that leaves the first {self.folded} tokens, which are summed, as they came, "
                f"got one that hides a token of sequence {hidden}"
            )

    def _hidden_again(self, padding: Padding) -> int | None:
        """The first sequence of which a padding hides a folded token that was real."""
        held = Padding(((0, self.folded),) * self.sums.shape[0]) if self.padding is None else self.padding
        if padding.rows is not None and held.rows is not None:  # no tensors: a step must not cost by its history
            rows = zip(held.rows, padding.rows, strict=True)
            return next((row for row, ((a, b), (c, d)) in enumerate(rows) if a < b and not c <= a <= b <= d), None)
        hides = (held.valid(self.folded, "cpu") & ~padding.valid(self.folded, "cpu")).any(-1)
        return int(hides.nonzero()[0]) if bool(hides.any()) else None

    def padding_after(self, padding: Padding | None, fold_to: int, keys: int) -> Padding | None:
        """Which folded tokens are real once `fold_to` more are in."""
        more = None if padding is None else padding.between(0, fold_to, keys)
        return join_padding(self.padding, self.folded, more, fold_to, self.sums.shape[0], self.sums.device)

    def __repr__(self) -> str:
        return f"KernelState({self.mechanism!r}, length={self.length}, nbytes={self.nbytes})"

    def reorder(self, index: Tensor) -> "KernelState":
        """The state of other batch rows: row i becomes row `index[i]`. Rows may repeat (beam search)."""
        index = _row_index(index, self.sums.shape[0], self.sums.device)
        return replace(
            self,
            sums=self.sums[index],
            normaliser=self.normaliser[index],
            recent=self.recent.reorder(index),
            tainted=None if self.tainted is None else self.tainted[index],
            padding=reorder_padding(self.padding, index, self.folded),
        )

    def crop(self, length: int) -> "KernelState":
        """The state as it was at an earlier length, as long as that token has not been folded into the sums."""
        if not isinstance(length, int) or not self.folded <= length <= self.length:
            raise ValueError(
                f"length: expected {self.folded} to {self.length}, got {length}; "
                f"the first {self.folded} tokens are summed and cannot be taken out again"
            )
        return replace(self, recent=self.recent.crop(length - self.folded))


State = KeyValueState | KernelState


def reorder_padding(padding: Padding | None, index: Tensor, length: int) -> Padding | None:
    """The padding of other batch rows."""
    if padding is None or padding.rows is None:
        return None if padding is None else padding_of(padding.valid(length)[index.cpu()])
    return Padding(tuple(padding.rows[row] for row in index.tolist()), label=padding.label)


def _row_index(index: Tensor, rows: int, device: torch.device) -> Tensor:
    index = torch.as_tensor(index, device=device)
    if index.ndim != 1 or index.dtype.is_floating_point or index.dtype == torch.bool:
        raise ValueError(f"index: expected whole numbers of shape (B,), got {index.dtype} {tuple(index.shape)}")
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < rows):
        raise ValueError(f"index: expected batch rows 0 to {rows - 1}, got {index.tolist()}")
    return index


def join_padding(
    old: Padding | None, length: int, new: Padding | None, count: int, batch: int, device: torch.device
) -> Padding | None:
    """Which of `length` tokens and `count` more are real; None if all are."""
    if old is None and new is None:
        return None
    old_rows = ((0, length),) * batch if old is None else old.rows
    new_rows = ((0, count),) * batch if new is None else new.rows
    if old_rows is not None and new_rows is not None:
        joined = _join_spans(old_rows, length, new_rows, count)
        if joined is not None:
            return joined
    parts = [
        torch.ones(batch, n, dtype=torch.bool, device=device) if one is None else one.valid(n, device)
        for one, n in ((old, length), (new, count))
    ]
    return padding_of(torch.cat(parts, dim=1))


@lru_cache(maxsize=64)
def _join_spans(old: tuple[Span, ...], length: int, new: tuple[Span, ...], count: int) -> Padding | None:
    """The padding of [old | new] where each row stays one interval, without touching a tensor; None otherwise.

    Every layer of a model asks the same at a step, and gets the same answer.
    """
    spans: list[Span] = []
    for (a, b), (c, d) in zip(old, new, strict=True):
        b, d = min(b, length), min(d, count)
        if c >= d:
            spans.append((a, b))
        elif a >= b:
            spans.append((length + c, length + d))
        elif b == length and c == 0:
            spans.append((a, length + d))
        else:
            return None
    return Padding(tuple(spans), label=f"padding(valid={(len(old), length + count)})")


def _join_tainted(old: Tensor | None, length: int, new: Tensor | None, k: Tensor) -> Tensor:
    batch, groups, count = k.shape[:3]
    clean = torch.zeros(batch, groups, max(length, count), dtype=torch.bool, device=k.device)
    return torch.cat([clean[..., :length] if old is None else old, clean[..., :count] if new is None else new], dim=-1)
