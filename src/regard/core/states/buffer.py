"""Memory of a KV cache: every position is written once, and all states of one history share it.

The first to append at the end claims the next positions and writes in place. The second (a fork, another thread) keeps
a long history by reference, as a prefix, and writes to a buffer of its own (key_value_runs.py); a short one it copies,
at its length.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.core import eager

LEAST_ROOM = 64
"""The least number of positions of a copy, if its capacity allows."""
FORKED = 2048
"""A fork shares its history from this many tokens on: a decode step over a prefix and a tail takes 0.1 ms longer than
over a copy, 40 % of it at 2,048 tokens of 8 heads, and twice as long as a step over fewer tokens."""
_claiming = threading.Lock()
"""Taken while positions are claimed, for some hundred nanoseconds: one lock serves all buffers."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers and a scale for each row (…, 1), float32 or better: x rounded to multiples of 1/127 of the largest
    in its row.

    >>> import torch
    >>> from regard.core.states.buffer import quantize
    >>> numbers, scale = quantize(torch.tensor([[1.0, -2.0, 0.5]]))
    >>> numbers.tolist(), round(scale.item() * 127, 6)
    ([[64, -127, 32]], 2.0)
    """
    fine = torch.promote_types(x.dtype, torch.float32)
    # Above 0 for a row of zeros, which is divided by it; a scale that underflows would be inexact.
    scale = x.abs().amax(-1, keepdim=True).to(fine).div_(127).clamp_min_(torch.finfo(fine).tiny)
    return (x / scale).round_().to(torch.int8), scale


def spread(tensor: Tensor, place: int, size: int) -> Tensor:
    """A copy of a tensor (B, G, positions, ·) with `size` positions of zeros inserted at `place`."""
    blank = tensor.new_zeros(*tensor.shape[:2], size, tensor.shape[3])
    return torch.cat([tensor[:, :, :place], blank, tensor[:, :, place:]], dim=2)


def roomy(length: int, capacity: int) -> int:
    """Positions for a buffer that copies `length` tokens: twice as many, so that growth copies each token once on
    average."""
    return min(capacity, max(2 * length, LEAST_ROOM))


@dataclass(eq=False)
class Buffer:
    """Memory for keys (B, G, capacity, K) and values (B, G, capacity, V); `used` positions are written.

    With `scales` (B, G, capacity, 1), keys and values are int8, with a scale for each.
    """

    keys: Tensor
    values: Tensor
    used: int = 0
    recorded: bool = False
    """Whether autograd has saved views of it, which writing would invalidate."""
    scales: tuple[Tensor, Tensor] | None = None
    """The scales of keys and of values."""
    rounded: torch.dtype | None = None
    """With scales: the dtype in which keys and values are read."""
    closed: bool = field(default_factory=lambda: _in_inference_mode())
    """Whether it was made in inference mode: outside of it, it must not be written to."""
    outgrown: bool = False
    """Whether a state that filled it has gone on in a larger copy."""

    _layout: Any = field(default=None, init=False, repr=False)

    @property
    def layout(self) -> Any:
        """Its sizes, strides and dtype, by which a token's step is kept (repeats.py); None for int8, which has none."""
        if self._layout is None and self.scales is None:  # once: every step asks
            keys, values = self.keys, self.values
            self._layout = keys.shape, keys.stride(), keys.dtype, values.shape, values.stride()
        return self._layout

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values as they are appended and read."""
        return self.rounded or self.keys.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values, *(self.scales or ()))

    @property
    def room(self) -> int:
        """The number of positions, written or not."""
        return self.keys.shape[2]

    def claim(self, start: int, end: int) -> bool:
        """Claim the positions [start, end): True for the first caller, who alone may write them."""
        if self.recorded or end > self.room or _closed(self):
            return False
        if torch.compiler.is_compiling():  # one thread; torch.compile cannot trace a lock
            return self._take(start, end)
        with _claiming:
            return self._take(start, end)

    def _take(self, start: int, end: int) -> bool:
        if self.used != start:
            return False
        self.used = end
        return True

    def outgrow(self, start: int) -> bool:
        """True for the first caller that cannot go on in place after the last position: it alone is no fork."""
        with _claiming:
            if self.outgrown or self.used != start:
                return False
            self.outgrown = True
            return True

    def moved(self, low: int, high: int, room: int, rows: Tensor | None = None, recorded: bool = False) -> "Buffer":
        """A copy of the positions [low, high), with room for more; `rows` selects and repeats rows."""

        def copied(tensor: Tensor) -> Tensor:
            part = tensor.narrow(2, low, high - low)
            part = part if rows is None else part.index_select(0, rows)
            space = part.new_empty(*part.shape[:2], room, part.shape[3])
            space.narrow(2, 0, high - low).copy_(part)
            return space

        return self.changed(copied, high - low, recorded)

    def spread(self, place: int, size: int, count: int) -> "Buffer":
        """A copy of the first `count` positions with `size` positions of zeros inserted at `place`."""
        return self.changed(lambda tensor: spread(tensor.narrow(2, 0, count), place, size), count + size)

    def blank(self, rows: int, room: int) -> "Buffer":
        """An unwritten buffer of the same kind."""
        return self.changed(lambda tensor: tensor.new_empty(rows, tensor.shape[1], room, tensor.shape[3]), 0)

    def changed(self, change: Callable[[Tensor], Tensor], used: int, recorded: bool = False) -> "Buffer":
        """A buffer with `change` applied to its tensors."""
        scales = None if self.scales is None else (change(self.scales[0]), change(self.scales[1]))
        return Buffer(change(self.keys), change(self.values), used, recorded, scales, self.rounded)

    def read(self, which: int, length: int) -> Tensor:
        """The first `length` keys (0) or values (1): a view, unless they are int8."""
        tensor = (self.values if which else self.keys).narrow(2, 0, length)
        return tensor if self.scales is None else (tensor * self.scales[which][:, :, :length]).to(self.dtype)

    def stored(self, length: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The first `length` keys and values as they are stored, and the scales if they are int8: views."""
        keys, values = self.keys.narrow(2, 0, length), self.values.narrow(2, 0, length)
        if self.scales is None:
            return keys, values, None
        return keys, values, (self.scales[0].narrow(2, 0, length), self.scales[1].narrow(2, 0, length))

    def extended(
        self, start: int, k: Tensor, v: Tensor, capacity: int, recorded: bool, may_share: bool
    ) -> "Buffer | None":
        """The first `start` tokens and new ones: written in place if the next positions can be claimed, else in a copy;
        None for a fork that `may_share` the first tokens and has enough of them.

        `recorded` says that autograd will save views for the gradients of other tensors.
        """
        end = start + k.shape[2]
        derived = eager.recorded(k, v, self.keys, self.values) or (recorded and torch.is_grad_enabled())
        if derived or eager.transformed():
            # A transform cannot write into tensors that were made outside of it.
            if self.scales is not None:
                raise ValueError(
                    "state: expected no gradients with int8 storage, which rounds, got some; use torch.no_grad()"
                )
            keys, values = torch.cat([self.read(0, start), k], dim=2), torch.cat([self.read(1, start), v], dim=2)
            return Buffer(keys, values, end, recorded=True)
        buffer = self
        if not self.claim(start, end):
            if may_share and start >= FORKED and not torch.compiler.is_compiling() and not self.outgrow(start):
                return None
            buffer = self.moved(0, start, roomy(end, capacity))
            buffer.used = end
        buffer._write(start, k, v)
        return buffer

    def recordable(self, count: int, recorded: bool) -> "Buffer":
        """The buffer of the first `count` tokens, to which none are appended, in a form that autograd can record: a
        copy if it was made in inference mode, or if views are saved, which later tokens would invalidate. `recorded`
        says that they are saved for the gradients of other tensors."""
        derived = eager.recorded(*self.tensors) or (recorded and torch.is_grad_enabled())
        saves = derived and not self.recorded
        if not count or not (saves or _closed(self)):
            return self
        return self.moved(0, count, count, recorded=self.recorded or saves)

    def _write(self, start: int, k: Tensor, v: Tensor) -> None:
        count = k.shape[2]
        if self.scales is not None:
            (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
            self.scales[0].narrow(2, start, count).copy_(k_scale)
            self.scales[1].narrow(2, start, count).copy_(v_scale)
        self.keys.narrow(2, start, count).copy_(k)
        self.values.narrow(2, start, count).copy_(v)


def _in_inference_mode() -> bool:
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _closed(buffer: Buffer) -> bool:
    """Whether a buffer must not be written to here. A trace cannot ask its tensors."""
    if torch.compiler.is_compiling():
        return buffer.closed
    return buffer.keys.is_inference() and not torch.is_inference_mode_enabled()
