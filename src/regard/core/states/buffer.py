"""Room for keys and values: written once at each position, shared by all states of one history.

Whoever appends at the end claims the next positions and writes in place; whoever comes second (a fork, another thread)
copies the history once, by its length.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.core import eager

LEAST_ROOM = 64
"""Positions that a copy has at least, as far as its capacity allows."""
_claiming = threading.Lock()
"""Held while positions are claimed, for some hundred nanoseconds: one lock serves all buffers."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers and a scale for each row (…, 1), float32 or better: x rounded to 127 parts of its row's largest.

    >>> import torch
    >>> from regard.core.states.buffer import quantize
    >>> numbers, scale = quantize(torch.tensor([[1.0, -2.0, 0.5]]))
    >>> numbers.tolist(), round(scale.item() * 127, 6)
    ([[64, -127, 32]], 2.0)
    """
    scale = x.abs().amax(-1, keepdim=True).to(torch.promote_types(x.dtype, torch.float32)).div_(127)
    # A row of zeros has scale 0: any divisor will do. Where a scale is nearly too small for its dtype, it is inexact.
    numbers = (x / scale.masked_fill(scale == 0, 1)).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scale


def roomy(length: int, capacity: int) -> int:
    """Positions for a buffer that copies `length` tokens: twice as many, so that growing copies each token once."""
    return min(capacity, max(2 * length, LEAST_ROOM))


@dataclass(eq=False)
class Buffer:
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

    def moved(self, low: int, high: int, room: int, rows: Tensor | None = None, recorded: bool = False) -> "Buffer":
        """The positions [low, high) in a buffer of their own, with room for more; `rows` chooses and repeats rows."""

        def copied(tensor: Tensor) -> Tensor:
            part = tensor.narrow(2, low, high - low)
            part = part if rows is None else part.index_select(0, rows)
            space = part.new_empty(*part.shape[:2], room, part.shape[3])
            space.narrow(2, 0, high - low).copy_(part)
            return space

        return self.changed(copied, high - low, recorded)

    def blank(self, rows: int, room: int) -> "Buffer":
        """An unwritten buffer of the same kind."""
        return self.changed(lambda tensor: tensor.new_empty(rows, tensor.shape[1], room, tensor.shape[3]), 0)

    def changed(self, change: Callable[[Tensor], Tensor], used: int, recorded: bool = False) -> "Buffer":
        """A buffer of changed tensors."""
        scales = None if self.scales is None else (change(self.scales[0]), change(self.scales[1]))
        return Buffer(change(self.keys), change(self.values), used, recorded, scales, self.rounded)

    def read(self, which: int, length: int) -> Tensor:
        """The first keys (0) or values (1): a view, unless they have scales."""
        tensor = (self.values if which else self.keys).narrow(2, 0, length)
        return tensor if self.scales is None else (tensor * self.scales[which][:, :, :length]).to(self.dtype)

    def stored(self, length: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The first keys and values as they lie there, and the scales of int8 ones: views."""
        keys, values = self.keys.narrow(2, 0, length), self.values.narrow(2, 0, length)
        if self.scales is None:
            return keys, values, None
        return keys, values, (self.scales[0].narrow(2, 0, length), self.scales[1].narrow(2, 0, length))

    def extended(self, start: int, k: Tensor, v: Tensor, capacity: int, recorded: bool) -> "Buffer":
        """The first `start` tokens and more: in place where the next positions can be claimed, else in a copy.

        `recorded` says that autograd will hold views for gradients of something else.
        """
        end = start + k.shape[2]
        derived = eager.recorded(k, v, self.keys, self.values) or (recorded and torch.is_grad_enabled())
        if derived or eager.transformed():
            # A transform cannot write into what was made outside of it.
            if self.scales is not None:
                raise ValueError("state: expected no gradients, int8 states round, got some; use torch.no_grad()")
            keys, values = torch.cat([self.read(0, start), k], dim=2), torch.cat([self.read(1, start), v], dim=2)
            return Buffer(keys, values, end, recorded=True)
        buffer = self
        if not self.claim(start, end):
            buffer = self.moved(0, start, roomy(end, capacity))
            buffer.used = end
        buffer._write(start, k, v)
        return buffer

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
    """Whether nobody may write to a buffer here. Tracing cannot ask its tensors."""
    if torch.compiler.is_compiling():
        return buffer.closed
    return buffer.keys.is_inference() and not torch.is_inference_mode_enabled()
