"""The KV cache: the state of mechanisms that attend to every key again.

Appending does not copy: states of one history share buffers with room to spare (buffer.py), and each state has its
length.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.masks import Padding, Window, padding_of
from regard.core.masks.padded import join_padding, reorder_padding
from regard.core.states.buffer import FORKED, Buffer, roomy
from regard.core.states.key_value_runs import Arrival, Run
from regard.core.states.state import Sizes, State, Stored, check_tokens, row_index

PARTS = ("keys", "values", "key_scales", "value_scales")
"""The names of a buffer's tensors in a file; scales exist for int8."""
LEAST_MORE = 256
"""The least number of new tokens a state gets room for, unless it may not have so many."""


@dataclass(frozen=True, eq=False)
class KeyValueState(State):
    """A KV cache: all keys and values so far.

    >>> import regard as rg, torch
    >>> state = rg.Softmax().start(batch=1, num_kv_heads=2, qk_length=4, value_length=4, capacity=8)
    >>> q = k = v = torch.randn(1, 2, 3, 4)
    >>> out, longer = rg.Softmax().extend(q, k, v, state, mask=rg.causal)
    >>> state.length, longer.length, longer.nbytes
    (0, 3, 512)
    """

    keeps_keys: ClassVar[bool] = True

    runs: tuple[Run, ...]
    """Every batch row belongs to exactly one run."""
    capacity: int
    """The most tokens it may hold. The buffer of `start` has this room from the beginning; buffers of forks, and of
    long states that got more room, grow up to it."""
    length: int = 0
    padding: Padding | None = None
    """Which of the keys are real; None while all are."""
    mechanism: None = None
    """None: keys and values are the same for every mechanism that keeps them."""
    may_share: bool = False
    """Whether forks and repeated batch rows share their first tokens: for mechanisms that can attend to parts and merge
    them."""
    forgotten: int = 0
    """How many of the first tokens were dropped: they had left the sliding window, and room was needed."""
    dropped: int = 0

    @classmethod
    def empty(
        cls, sizes: Sizes, capacity: int, storage: torch.dtype | None = None, *, may_share: bool = False
    ) -> "KeyValueState":
        """No tokens, and room for `capacity`; `storage=torch.int8` keeps numbers and scales."""

        def room(length: int, dtype: torch.dtype) -> Tensor:
            shape = sizes.batch, sizes.num_kv_heads, capacity, length
            return torch.empty(shape, dtype=dtype, device=sizes.device)

        kind = storage or sizes.dtype
        keys, values = room(sizes.qk_length, kind), room(sizes.value_length, kind)
        if storage is None:
            buffer = Buffer(keys, values)
        else:
            fine = torch.promote_types(sizes.dtype, torch.float32)
            buffer = Buffer(keys, values, scales=(room(1, fine), room(1, fine)), rounded=sizes.dtype)
        return cls((Run(tuple(range(sizes.batch)), buffer),), capacity, may_share=may_share)

    @property
    def whole(self) -> bool:
        """Whether all rows are in one run from the first position on."""
        run = self.runs[0]
        return len(self.runs) == 1 and run.begin == 0 and not run.prefixes and run.gap is None

    @property
    def in_parts(self) -> bool:
        """Whether some rows share their first tokens, with each other or with other states, or have a gap."""
        return any([run.prefixes or run.gap is not None for run in self.runs])

    def apart(self) -> "KeyValueState":
        """The state without shared prefixes, with every position from the beginning of a run on."""
        return replace(self, runs=tuple(run.apart(self.length) for run in self.runs), may_share=False)

    @property
    def buffer(self) -> Buffer:
        """The buffer of the first run: of all rows, if the state is whole."""
        return self.runs[0].buffer

    @property
    def batch(self) -> int:
        return len(self.runs[0].rows) if len(self.runs) == 1 else sum(len(run.rows) for run in self.runs)

    @property
    def earliest(self) -> int:
        return self.forgotten

    @property
    def layout(self) -> Any:
        run = self.runs[0]
        if len(self.runs) > 1 or self.padding is not None or run.begin or run.waiting or run.prefixes:
            return None
        return run.buffer.layout

    def longer(self) -> "KeyValueState | None":
        """A state like this one, of one buffer without padding, with room for one more token at its end, claimed and
        yet to be written; None if there is none."""
        length, buffer = self.length, self.runs[0].buffer
        if length - self.forgotten >= self.capacity or not buffer.claim(length, length + 1):
            return None
        longer = object.__new__(KeyValueState)  # past the constructor, which takes twice as long
        longer.__dict__.update(self.__dict__, length=length + 1)
        return longer

    def check(self, k: Tensor, v: Tensor) -> None:
        buffer, batch = self.buffer, self.batch
        _, groups, _, qk_length = buffer.keys.shape
        device, dtype = buffer.keys.device, buffer.dtype
        check_tokens("k", k, (batch, groups, qk_length), dtype, device)
        check_tokens("v", v, (batch, groups, buffer.values.shape[3]), dtype, device)

    @property
    def keys(self) -> Tensor:
        """The keys so far, (B, G, length, K): a view, unless they are int8 or in several runs (then padding is 0)."""
        return self._read(0)

    @property
    def values(self) -> Tensor:
        """The values so far, (B, G, length, V): a view, unless they are int8 or in several runs (then padding is 0)."""
        return self._read(1)

    def _read(self, which: int) -> Tensor:
        if self.whole:
            return self.buffer.read(which, self.length)
        parts = [run.read(which, self.length) for run in self.runs]
        padded = torch.cat([F.pad(part, (0, 0, self.length - part.shape[2], 0)) for part in parts])
        rows = [row for run in self.runs for row in run.rows]
        return padded[torch.tensor(rows, device=padded.device).argsort()]

    @property
    def nbytes(self) -> int:
        tensors = [tensor for run in self.runs for buffer in run.buffers for tensor in buffer.tensors]
        table = None if self.padding is None else self.padding.table
        tensors += [] if table is None else [table]
        return sum(t.numel() * t.element_size() for t in tensors)

    def append(
        self,
        k: Tensor,
        v: Tensor,
        padding: Padding | None = None,
        *,
        recorded: bool = False,
    ) -> "KeyValueState":
        """The state with T more keys and values. `padding` says which of the T are real, in positions 0…T.

        `recorded` says that autograd will save views of the longer state for the gradients of other tensors.
        """
        new = k.shape[2]
        end = self.length + new
        if end - self.forgotten > self.capacity:
            raise ValueError(
                f"state: expected at most {self.capacity} tokens (its capacity), got {self.length - self.forgotten} + "
                f"{new}; start it with capacity={end - self.forgotten} or more"
            )
        joined = None
        if self.padding is not None or padding is not None:
            joined = join_padding(self.padding, self.length, padding, new, k.shape[0], k.device)
        runs: Iterable[Run] = self.runs
        if new and any([run.waiting for run in runs]):
            spans = None if joined is None else joined.rows
            begun = [run.begun(spans, self.length, end) if run.waiting else [run] for run in runs]
            runs = [run for parts in begun for run in parts]
        if new and (padding is not None or any([run.gap is not None for run in runs])):
            tokens, room = Arrival(padding, self.padding, self.length, end), self.capacity + self.forgotten
            received = [[run] if run.waiting else run.received(tokens, room) for run in runs]
            runs = [run for parts in received for run in parts]
        longer = tuple([self._extended(run, k, v, recorded) for run in runs])
        return KeyValueState(longer, self.capacity, end, joined, None, self.may_share, self.forgotten, self.dropped)

    def _extended(self, run: Run, k: Tensor, v: Tensor, recorded: bool) -> Run:
        """A run with its rows of T more keys and values appended, but for those before it begins and in its gap."""
        new = k.shape[2]
        first, last = max(0, run.begin - self.length), new - run.in_gap(new, self.length + new)
        if first >= last:
            same = run.buffer.recordable(run.count(self.length) - run.prefix_length, recorded)
            return run if same is run.buffer else replace(run, buffer=same)
        keys, values = run.of(k), run.of(v)
        if first or last < new:
            keys, values = keys[:, :, first:last], values[:, :, first:last]
        room = run.count(self.capacity + self.forgotten) - run.prefix_length
        start = run.count(self.length) - run.prefix_length
        if not start and not run.buffer.room:
            # Not all that `room` allows: the gap is not at its end yet, if the prompts come in chunks.
            least = room if run.gap is None else roomy(keys.shape[2], room)
            run = replace(run, buffer=run.buffer.blank(len(run.rows), least))
        buffer = run.buffer.extended(start, keys, values, room, recorded, self.may_share)
        if buffer is None:
            run = run.forked(self.length, roomy(keys.shape[2], room - start))
            buffer = run.buffer.extended(0, keys, values, room - start, recorded, False)
            assert buffer is not None
        return run if buffer is run.buffer else replace(run, buffer=buffer)

    def forget(self, first: int) -> "KeyValueState":
        """The state without the keys before position `first`, which no later token sees."""
        if first <= self.forgotten:
            return self

        def later(run: Run) -> Run:
            if run.begin >= first:
                return run
            run = run.apart(self.length)
            buffer = run.buffer.moved(first - run.begin, self.length - run.begin, self.capacity, recorded=run.derived)
            return replace(run, buffer=buffer, begin=first)

        return replace(self, runs=tuple(later(run) for run in self.runs), forgotten=first)

    def reorder(self, index: Tensor) -> "KeyValueState":
        index = row_index(index, self.batch, self.buffer.keys.device)
        order = index.tolist()
        room = self.capacity + self.forgotten
        chosen = (run.chosen(order, self.length, room, self.may_share) for run in self.runs)
        runs = tuple(run for run in chosen if run is not None)
        return replace(
            self,
            runs=runs or (Run((), self.buffer.blank(0, self.capacity), waiting=False),),
            padding=reorder_padding(self.padding, index, self.length),
        )

    def crop(self, length: int) -> "KeyValueState":
        if not isinstance(length, int) or not self.forgotten <= length <= self.length:
            raise ValueError(f"length: expected {self.forgotten} to {self.length} (the state's length), got {length}")
        padding = self.padding
        if padding is not None:
            padding = padding.between(0, length, self.length)
        return replace(
            self,
            # Rows that began after this length wait again: until then they had only padding.
            runs=tuple(
                run.cropped(length)
                if run.begin < length or (len(self.runs) == 1 and run.begin == 0)
                else replace(run, begin=length, waiting=True, prefixes=(), gap=None, real=None)
                for run in self.runs
            ),
            length=length,
            padding=padding,
        )

    def __repr__(self) -> str:
        shared = max(run.prefix_length for run in self.runs)
        text = f", shared={shared}" if shared else ""
        return f"KeyValueState(length={self.length}, capacity={self.capacity}, nbytes={self.nbytes}{text})"

    def windowed(self, window: Window, new: int) -> "KeyValueState":
        if self.length + new <= self.capacity:
            return self
        kept = min(self.length, window.before)
        return self.resized(max(kept + new, 2 * window.width), self.length - kept)

    def with_room(self, more: int, most: int) -> "KeyValueState":
        kept = self.length - self.forgotten
        if kept + more <= self.capacity:
            return self
        capacity = kept + max(more, first_room([kept], most))
        if not self.may_share or kept < FORKED:
            return self.resized(capacity)
        # The memory comes with the next tokens (`Buffer.extended`): for all but the first it is that of a fork, which
        # copies nothing.
        return replace(self, capacity=capacity)

    def history(self) -> tuple[Tensor, Tensor, Padding | None]:
        return self.keys, self.values, self.padding

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        for index, run in enumerate(self.runs):
            for part, tensor in zip(PARTS, run.joined(self.length).buffer.tensors, strict=False):
                tensors[f"{index}.{part}"] = tensor.narrow(2, 0, run.count(self.length))
        if self.padding is not None:
            # A clone: layers share their tables, and a safetensors file cannot hold a tensor twice.
            tensors["padding"] = self.padding.valid(self.length).clone()
        runs = [{"rows": run.rows, "begin": run.begin, "waiting": run.waiting, "gap": run.gap} for run in self.runs]
        return {"kind": "keys", "length": self.length, "forgotten": self.forgotten, "runs": runs}, tensors

    def restored(self, stored: Stored) -> "KeyValueState":
        count = stored.plan["length"]
        least = stored.length if stored.window is None else min(stored.length, stored.window.before)
        if type(count) is not int or not least <= count <= stored.length:
            raise ValueError(f"{count!r} tokens of {stored.length}")
        forgotten = stored.plan["forgotten"]
        filled = self.filled(stored, count, count - forgotten if type(forgotten) is int else count)
        return replace(filled, dropped=stored.length - count)

    def filled(self, stored: Stored, count: int, capacity: int) -> "KeyValueState":
        """A state of `count` tokens from a file, given an empty one like it."""
        padding, forgotten = stored.padding("padding", count), stored.plan["forgotten"]
        if type(forgotten) is not int or not 0 <= forgotten <= count:
            raise ValueError(f"{forgotten!r} forgotten tokens of {count}")
        runs = [_restored_run(stored, index, self.buffer, count, padding) for index in range(len(stored.plan["runs"]))]
        if sorted(row for run in runs for row in run.rows) != list(range(stored.batch)):
            raise ValueError(f"runs that are not of {stored.batch} rows, each once")
        return KeyValueState(tuple(runs), capacity, count, padding, may_share=self.may_share, forgotten=forgotten)

    def resized(self, capacity: int, drop: int = 0) -> "KeyValueState":
        """A copy of the state with another capacity, without its first `drop` tokens."""
        kept, forgotten = self.length - drop, max(0, self.forgotten - drop)
        assert kept - forgotten <= capacity

        def moved(run: Run) -> Run:
            run = run.apart(self.length) if drop else run
            begin = max(0, run.begin - drop)
            low, high = max(0, drop - run.begin), run.count(self.length) - run.prefix_length
            room = 0
            if high > low or run.prefix_length or not self.length:
                room = replace(run, begin=begin).count(capacity + forgotten) - run.prefix_length
            return replace(run, begin=begin, buffer=run.buffer.moved(low, high, room, recorded=run.derived))

        padding = self.padding
        if padding is not None:
            padding = padding.between(drop, self.length, self.length)
        runs = tuple(moved(run) for run in self.runs)
        return KeyValueState(
            runs, capacity, kept, padding, may_share=self.may_share, forgotten=forgotten, dropped=self.dropped + drop
        )


def first_room(lengths: Iterable[int], most: int) -> int:
    """How many new tokens to make room for at first: by the prompt's length, not by the maximum that is allowed."""
    return min(most, max(LEAST_MORE, *lengths))


def _restored_run(stored: Stored, index: int, like: Buffer, count: int, padding: Padding | None) -> Run:
    plan = stored.plan["runs"][index]
    rows, begin, waiting = tuple(plan["rows"]), plan["begin"], plan["waiting"]
    if not all(type(row) is int for row in rows) or (not rows and stored.batch):
        raise ValueError(f"a run of rows {rows!r:.40}")
    if type(begin) is not int or not 0 <= begin <= count or type(waiting) is not bool or list(rows) != sorted(rows):
        raise ValueError(f"a run that begins at {begin!r} of {count} tokens")
    first = stored.plan["forgotten"]
    hides = begin <= first or _hides(padding, rows, first, begin, count)
    if not hides or begin < first or (waiting and begin < count):
        raise ValueError(f"a run without the first {begin} tokens, which are real")
    run = Run(rows, like, begin, waiting)
    if (gap := plan.get("gap")) is not None:
        run = _with_gap(run, gap, count, padding)
    return replace(run, buffer=stored_buffer(stored, f"{index}.", like, len(rows), run.count(count)))


def _with_gap(run: Run, gap: Any, count: int, padding: Padding | None) -> Run:
    if not isinstance(gap, list) or len(gap) != 2 or not all(type(place) is int for place in gap):
        raise ValueError(f"a run with the gap {gap!r:.40}")
    low, high = gap
    if not run.begin <= low < high <= count or not _hides(padding, run.rows, low, high, count):
        raise ValueError(f"a run without the tokens {low} to {high}, which are real")
    assert padding is not None
    run = replace(run, gap=(low, high))
    return replace(run, real=padding_of(run.columns_of(padding.valid(count)[list(run.rows)])))


def _hides(padding: Padding | None, rows: tuple[int, ...], low: int, high: int, count: int) -> bool:
    """Whether all tokens from `low` to `high` are padding in these rows."""
    return padding is not None and not padding.valid(count)[list(rows), low:high].any()


def stored_buffer(stored: Stored, prefix: str, like: Buffer, rows: int, count: int) -> Buffer:
    """Keys and values from a file, as int8 numbers with their scales if the file has scales."""
    small = stored.holds(prefix + PARTS[2])

    def read(part: int, dtype: torch.dtype, length: int) -> Tensor:
        return stored.tensor(prefix + PARTS[part], dtype, rows, like.keys.shape[1], count, length)

    pairs = enumerate((like.keys, like.values))
    keys, values = (read(part, torch.int8 if small else like.dtype, like.shape[3]) for part, like in pairs)
    if not small:
        return Buffer(keys, values, count)
    fine = torch.promote_types(like.dtype, torch.float32)
    return Buffer(keys, values, count, scales=(read(2, fine, 1), read(3, fine, 1)), rounded=like.dtype)
