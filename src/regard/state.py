"""States: what a mechanism keeps of the tokens it has met, so that the next one costs one step.

A state is a value. Extending it gives a new state and leaves the old one as it was, so a prompt's state can be forked,
kept and used again. Appending does not copy: states of one history share one buffer with room to spare, each with its
own length. Whoever appends at the buffer's end claims the next positions and writes in place; whoever comes second (a
fork, another thread) copies the history once, by its length.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.mask import Padding, Span, padding_of

_claiming = threading.Lock()
"""Held while a buffer's next positions are claimed, for some hundred nanoseconds: one lock serves all buffers."""


def quantize(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 numbers and a scale for each row (…, 1), float32 or better: x rounded to 127 parts of its row's largest.

    >>> import torch
    >>> from regard.state import quantize
    >>> numbers, scale = quantize(torch.tensor([[1.0, -2.0, 0.5]]))
    >>> numbers.tolist(), round(scale.item() * 127, 6)
    ([[64, -127, 32]], 2.0)
    """
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True).to(torch.promote_types(x.dtype, torch.float32)).div_(127)
    # A row of zeros has scale 0: any divisor will do. Where a scale is nearly too small for its dtype, it is inexact.
    numbers = (x / scale.masked_fill(scale == 0, 1)).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scale


LEAST_ROOM = 64
"""Tokens that a fork's buffer has room for at least; beyond, it has room for twice its length."""


@dataclass(eq=False)
class _Buffer:
    """Room for keys (B, G, capacity, K) and values (B, G, capacity, V); `used` positions are written.

    With `scales` (B, G, capacity, 1), keys and values are int8, each rounded by itself.
    """

    keys: Tensor
    values: Tensor
    used: int = 0
    recorded: bool = False
    """Whether autograd holds views of it, which writing would spoil."""
    scales: tuple[Tensor, Tensor] | None = None
    """Of keys and of values."""
    rounded: torch.dtype | None = None
    """With scales: what keys and values are read as."""
    closed: bool = field(default_factory=lambda: _in_inference_mode())
    """Whether it was made in inference mode, outside of which nobody may write to it."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values that come and go."""
        return self.rounded or self.keys.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values, *(self.scales or ()))

    @property
    def room(self) -> int:
        """How many positions it has, written or not."""
        return self.keys.shape[2]

    def claim(self, start: int, end: int) -> bool:
        """Whether the positions [start, end) are the caller's alone to write, which they are once."""
        if self.recorded or end > self.room or _closed(self):
            return False
        if torch.compiler.is_compiling():  # one thread, and a lock is not traced
            return self._take(start, end)
        with _claiming:
            return self._take(start, end)

    def _take(self, start: int, end: int) -> bool:
        if self.used != start:
            return False
        self.used = end
        return True

    def moved(self, low: int, high: int, room: int, rows: Tensor | None = None, recorded: bool = False) -> "_Buffer":
        """The positions [low, high) in a buffer of their own, with room for more; `rows` chooses and repeats rows."""

        def copied(tensor: Tensor) -> Tensor:
            part = tensor.narrow(2, low, high - low)
            part = part if rows is None else part.index_select(0, rows)
            space = part.new_empty(*part.shape[:2], room, part.shape[3])
            space.narrow(2, 0, high - low).copy_(part)
            return space

        return self.changed(copied, high - low, recorded)

    def changed(self, change: Callable[[Tensor], Tensor], used: int, recorded: bool = False) -> "_Buffer":
        """A buffer of changed tensors."""
        scales = None if self.scales is None else (change(self.scales[0]), change(self.scales[1]))
        return _Buffer(change(self.keys), change(self.values), used, recorded, scales, self.rounded)

    def read(self, which: int, length: int) -> Tensor:
        """The first keys (0) or values (1): a view, unless they have scales."""
        found = (self.values if which else self.keys).narrow(2, 0, length)
        return found if self.scales is None else (found * self.scales[which][:, :, :length]).to(self.dtype)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Put keys and values at claimed positions."""
        count = k.shape[2]
        if self.scales is not None:
            (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
            self.scales[0].narrow(2, start, count).copy_(k_scale)
            self.scales[1].narrow(2, start, count).copy_(v_scale)
        self.keys.narrow(2, start, count).copy_(k)
        self.values.narrow(2, start, count).copy_(v)


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

    buffer: _Buffer
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
            return cls(_Buffer(room(qk_length, dtype), room(value_length, dtype)), capacity)
        fine = torch.promote_types(dtype, torch.float32)
        scales = room(1, fine), room(1, fine)
        small = _Buffer(room(qk_length, storage), room(value_length, storage), scales=scales, rounded=dtype)
        return cls(small, capacity)

    @property
    def keys(self) -> Tensor:
        """The keys met so far, (B, G, length, K): a view, unless they are stored as int8."""
        return self.buffer.read(0, self.length)

    @property
    def values(self) -> Tensor:
        """The values met so far, (B, G, length, V): a view, unless they are stored as int8."""
        return self.buffer.read(1, self.length)

    @property
    def nbytes(self) -> int:
        """Bytes this state really holds, its room to spare included."""
        held = [*self.buffer.tensors]
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
        buffer = self.buffer
        if torch.is_grad_enabled() and (recorded or any(t.requires_grad for t in (k, v, buffer.keys, buffer.values))):
            if buffer.scales is not None:
                raise ValueError("state: expected no gradients, int8 states round, got some; use torch.no_grad()")
            buffer = self._joined(k, v)
        else:
            if not buffer.claim(self.length, end):
                buffer = buffer.moved(0, self.length, min(self.capacity, max(2 * end, LEAST_ROOM)))
                buffer.used = end
            buffer.write(self.length, k, v)
        return KeyValueState(buffer, self.capacity, end, padding, tainted)

    def _joined(self, k: Tensor, v: Tensor) -> _Buffer:
        """A buffer of its own without room to spare: autograd holds views of it, so that nobody may write there."""
        keys, values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        return _Buffer(keys, values, keys.shape[2], recorded=True)

    def reorder(self, index: Tensor) -> "KeyValueState":
        """The state of other batch rows: row i becomes row `index[i]`. Rows may repeat (beam search)."""
        index = _row_index(index, self.buffer.keys.shape[0], self.buffer.keys.device)
        return replace(
            self,
            buffer=self.buffer.moved(0, self.length, min(self.capacity, max(2 * self.length, LEAST_ROOM)), index),
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
        """The state in a buffer of its own with another capacity, without its first `drop` tokens."""
        kept = self.length - drop
        assert kept <= capacity

        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in self.buffer.tensors)
        padding, tainted = self.padding, self.tainted
        if padding is not None:
            padding = padding.between(drop, self.length, self.length)
        if tainted is not None:
            left = tainted[..., drop:]
            tainted = left if torch.compiler.is_compiling() or bool(left.any()) else None
        buffer = self.buffer.moved(drop, self.length, capacity, recorded=recorded)
        return KeyValueState(buffer, capacity, kept, padding, tainted)


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


def _in_inference_mode() -> bool:
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _closed(buffer: _Buffer) -> bool:
    """Whether nobody may write to a buffer here. Tracing cannot ask its tensors."""
    if torch.compiler.is_compiling():
        return buffer.closed
    return buffer.keys.is_inference() and not torch.is_inference_mode_enabled()


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
        spans = _join_spans(old_rows, length, new_rows, count)
        if spans is not None:
            return Padding(spans, label=f"padding(valid={(batch, length + count)})")
    parts = [
        torch.ones(batch, n, dtype=torch.bool, device=device) if one is None else one.valid(n, device)
        for one, n in ((old, length), (new, count))
    ]
    return padding_of(torch.cat(parts, dim=1))


def _join_spans(old: tuple[Span, ...], length: int, new: tuple[Span, ...], count: int) -> tuple[Span, ...] | None:
    """Intervals of [old | new] where each row stays one interval, without touching a tensor; None otherwise."""
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
    return tuple(spans)


def _join_tainted(old: Tensor | None, length: int, new: Tensor | None, k: Tensor) -> Tensor:
    batch, groups, count = k.shape[:3]
    clean = torch.zeros(batch, groups, max(length, count), dtype=torch.bool, device=k.device)
    return torch.cat([clean[..., :length] if old is None else old, clean[..., :count] if new is None else new], dim=-1)
