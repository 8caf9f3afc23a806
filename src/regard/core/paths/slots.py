"""States of one size whose length is a number on the GPU, for a step that is captured once and replayed.

A CUDA graph runs the same kernels on the same memory each time. So a slot holds room for all tokens to come, writes
each new one at a place that it reads on the GPU, and attends to as many keys as there are by then. A slot is made of a
state and gives one back; between the two it is written over with every token, and nothing else may keep it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.core.masks import Padding
from regard.core.paths import fused_stream, gpu, shared_gpu, split
from regard.core.paths.stream import folded
from regard.core.paths.sums import Step, Walk, fold, sweep, tiled, untiled
from regard.core.states.buffer import Buffer, quantize
from regard.core.states.kernel_state import KernelState
from regard.core.states.key_value_runs import Run
from regard.core.states.key_values import KeyValueState


@dataclass(eq=False)
class Clock:
    """The positions of a batch of sequences, on its device; all slots of a model read the same clock."""

    length: Tensor
    """Tokens met, the newest included, (1,) int32."""
    newest: Tensor
    """The newest token's place, (1,) int64."""
    low: Tensor | None
    """The first real token of each batch row, (B,) int32; None if all are real."""
    capacity: int

    @classmethod
    def at(cls, length: int, starts: tuple[int, ...] | None, capacity: int, device: torch.device) -> "Clock":
        """A clock that stands at `length`, the real tokens of each row from `starts` on (None: from the first)."""
        low = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
        now = torch.tensor([length], device=device)
        return cls(now.int(), now - 1, low, capacity)

    def tick(self) -> None:
        """One token more."""
        self.length.add_(1)
        self.newest.add_(1)

    def places(self, batch: int) -> Tensor:
        """The position of the newest token in each sequence: how many real tokens come before it, (B, 1)."""
        if self.low is None:
            return self.newest.expand(batch, 1)
        return (self.newest - self.low)[:, None]

    def bounds(self) -> Tensor | None:
        """The first real key of each row and the one after the last, (2, B); None if all are real."""
        if self.low is None:
            return None
        return torch.stack([self.low, torch.full_like(self.low, self.capacity)])

    def visible(self, count: int, offset: Tensor | int = 0, before: int | None = None) -> Tensor:
        """Which of `count` places from `offset` on the newest token sees, (B or 1, count)."""
        place = torch.arange(count, device=self.newest.device) + offset
        seen = (place <= self.newest)[None]
        if before is not None:
            seen = seen & (place >= self.newest - before)
        return seen if self.low is None else seen & (place >= self.low[:, None])


class Slot:
    """What a captured step asks of its memory."""

    length: int
    """Tokens it held when it was made."""
    tensors: tuple[Tensor, ...]

    def attend(self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep one more token's key and value, and attend from it to all there are."""
        raise NotImplementedError

    def extended(
        self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Tensor | None = None
    ) -> tuple[Tensor, "Slot"]:
        """The output of one more token, and the slot: what a layer asks of a state. The slot has its own window."""
        return self.attend(mechanism, q, k, v), self

    def make_room(self, mechanism: Any, length: int) -> None:
        """What has to be done before token `length`, outside of the captured step."""

    def state(self, like: Any, length: int, padding: Padding | None) -> Any:
        """A state of the first `length` tokens, which takes the slot's memory; `like` is the one it was made of."""
        raise NotImplementedError


class CacheSlot(Slot):
    """Room for the keys and values of a mechanism that looks at each of them again."""

    def __init__(self, state: KeyValueState, clock: Clock, before: int | None) -> None:
        self.clock, self.before, self.length = clock, before, state.length
        self.dtype, self.rounded = state.buffer.dtype, state.buffer.rounded
        self.tensors = tuple(_placed(state, which, clock.capacity) for which in range(len(state.buffer.tensors)))
        self.bounds = clock.bounds()

    def attend(self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, *scales = self.tensors
        fused = split.scale(mechanism, q.shape[3]) is not None and gpu.serves(q, values)
        stored = fused and not scales and k.stride(3) == v.stride(3) == 1  # by the kernel itself
        if not stored:
            _store(self.tensors, self.clock.newest, k, v)
        if fused:
            # Triton is imported only where it is used.
            from regard.core.kernels import decode_attention

            q, scale = shared_gpu.scaled(mechanism, q)
            return decode_attention.forward(
                q, keys, values, scale, self.bounds, before=self.before, scales=_pair(scales), length=self.clock.length,
                new=(k, v) if stored else None,
            )  # fmt: skip
        if scales:
            keys, values = ((t * s).to(self.dtype) for t, s in zip((keys, values), scales, strict=True))
        visible = self.clock.visible(keys.shape[2], before=self.before)[:, None, None]
        return mechanism.mix(mechanism.weigh(q, keys, visible), values).to(q.dtype)

    def state(self, like: KeyValueState, length: int, padding: Padding | None) -> KeyValueState:
        batch = self.tensors[0].shape[0]
        buffer = Buffer(self.tensors[0], self.tensors[1], length, False, _pair(self.tensors[2:]), self.rounded)
        run = Run(tuple(range(batch)), buffer, waiting=False)
        return KeyValueState((run,), max(like.capacity, self.clock.capacity), length, padding, dropped=like.dropped)


class SharedSlot(Slot):
    """Room for the keys and values that come after tokens which rows share."""

    def __init__(self, state: KeyValueState, clock: Clock, before: int | None) -> None:
        [run] = state.runs
        self.clock, self.before, self.length = clock, before, state.length
        rest = state.length - run.prefix_length
        self.run = replace(run, buffer=run.buffer.moved(0, rest, clock.capacity - run.prefix_length))
        self.tensors = self.run.buffer.tensors
        self.bounds, self.parts = clock.bounds(), shared_gpu.parts(self.run)

    def attend(self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Triton is imported only where it is used.
        from regard.core.kernels import decode_attention

        q, scale = shared_gpu.scaled(mechanism, q)
        stored = len(self.tensors) == 2 and k.stride(3) == v.stride(3) == 1  # by the kernel itself
        if not stored:
            _store(self.tensors, self.clock.newest - self.run.prefix_length, k, v)
        return decode_attention.forward_parts(
            q, self.parts, self.clock.capacity, scale, self.bounds, before=self.before, length=self.clock.length,
            new=(k, v) if stored else None,
        )  # fmt: skip

    def state(self, like: KeyValueState, length: int, padding: Padding | None) -> KeyValueState:
        buffer = replace(self.run.buffer, used=length - self.run.prefix_length)
        run = replace(self.run, buffer=buffer)
        return KeyValueState((run,), max(like.capacity, self.clock.capacity), length, padding, may_share=like.may_share)


class SumSlot(Slot):
    """The running sums of a kernel mechanism, and room for its newest tokens as they are."""

    def __init__(self, state: KernelState, clock: Clock) -> None:
        self.clock, self.length, self.half = clock, state.length, state.recent.capacity // 2
        self.sums, self.normaliser = (t.flatten(0, 1).clone() for t in (state.sums, state.normaliser))
        self.heads = state.sums.shape[1]
        recent = state.recent
        self.tensors = tuple(_placed(recent, which, 2 * self.half) for which in range(2))
        self.folded, self.gone = state.folded, clock.newest.new_full((1,), state.folded)

    def attend(self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sums, normaliser = self._by_head()
        fused = fused_stream.cannot(mechanism, q, k, v, sums, True, False) is None
        stored = fused and fused_stream.stores(mechanism, k, v)
        if not stored:
            for room, tensor in zip(self.tensors, (k, v), strict=True):
                room.index_copy_(2, self.clock.newest - self.gone, tensor)
        if fused:
            low, new = self.clock.low, (k, v) if stored else None
            limits, counted = None if low is None else low[None], (self.clock.length, self.gone)
            keys, values = self.tensors
            return fused_stream.token(mechanism, q, keys, values, limits, sums, normaliser, new, counted)
        visible = self.clock.visible(2 * self.half, self.gone).expand(q.shape[0], -1)
        rows, keys, values, real = tiled(q, self.tensors[0], self.tensors[1], visible)
        walk = Walk([Step(0, 1, 0, 2 * self.half)], None, real)
        out, *_ = sweep(mechanism, walk, rows, keys, values, self.sums, self.normaliser, history=True)
        return untiled(out, k)

    def make_room(self, mechanism: Any, length: int) -> None:
        """Take the older half of the newest tokens into the sums where a stream would, which makes room for as many."""
        half = self.half
        if folded(length, 2 * half) <= self.folded:
            return
        keys, values = (t[:, :, :half] for t in self.tensors)
        sums, normaliser = self._by_head()
        if fused_stream.cannot(mechanism, keys, keys, values, sums, True, False) is None:
            low = self.clock.low
            limits = None if low is None else torch.stack([(low - self.gone).int(), torch.full_like(low, half)])
            fused_stream.fold(mechanism, keys, values, limits, sums, normaliser, in_place=True)
        else:
            real = None if self.clock.low is None else self.clock.visible(half, self.gone)
            _, keys, values, real = tiled(keys, keys, values, real)
            kind = self.sums.dtype
            phi, shown, count = fold(mechanism, keys.to(kind), values.to(kind), real)
            self.sums.baddbmm_(phi.transpose(-1, -2), shown)
            self.normaliser.add_(count)
        for room in self.tensors:
            room[:, :, :half] = room[:, :, half:]
        self.gone.add_(half)
        self.folded += half

    def _by_head(self) -> tuple[Tensor, Tensor]:
        """The sums (B, G, C, V) and the normaliser (B, G, N)."""
        return self.sums.unflatten(0, (-1, self.heads)), self.normaliser.unflatten(0, (-1, self.heads))

    def state(self, like: KernelState, length: int, padding: Padding | None) -> KernelState:
        batch, shape, count = self.tensors[0].shape[0], (-1, self.heads), length - self.folded
        old = None if padding is None else padding.between(0, self.folded, length)
        new = None if padding is None else padding.between(self.folded, length, length)
        run = Run(tuple(range(batch)), Buffer(self.tensors[0], self.tensors[1], count), waiting=False)
        return replace(
            like,
            sums=self.sums.unflatten(0, shape),
            normaliser=self.normaliser.unflatten(0, shape),
            folded=self.folded,
            recent=KeyValueState((run,), 2 * self.half, count, new),
            padding=old,
        )


def cache_slot(mechanism: Any, qk_length: int, state: KeyValueState, clock: Clock, before: int | None) -> Slot:
    """The slot of a KV cache: what rows share stays where it is, if a kernel can read it there."""
    [run, *others] = state.runs
    like = run.buffer.keys.new_empty(0, 1, 0, qk_length, dtype=run.buffer.dtype)
    in_place = run.prefixes and not run.begin and run.gap is None and not others
    shares = in_place and shared_gpu.unfit(mechanism, like, run) is None
    return (SharedSlot if shares else CacheSlot)(state, clock, before)


def _pair(scales: Any) -> tuple[Tensor, Tensor] | None:
    return (scales[0], scales[1]) if scales else None


def _store(tensors: tuple[Tensor, ...], place: Tensor, k: Tensor, v: Tensor) -> None:
    """Write a token's key and value at a place, as int8 numbers and scales if there are four tensors."""
    new: tuple[Tensor, ...] = (k, v)
    if len(tensors) == 4:
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        new = k, v, k_scale, v_scale
    for room, tensor in zip(tensors, new, strict=True):
        room.index_copy_(2, place, tensor)


def _placed(state: KeyValueState, which: int, capacity: int) -> Tensor:
    """One tensor of a state's buffers in room for `capacity` tokens, each at its place; 0 where there is none."""
    like = state.buffer.tensors[which]
    room = like.new_zeros(state.batch, like.shape[1], capacity, like.shape[3])
    for run in state.runs:
        if (count := state.length - run.begin) > 0:
            whole = len(run.rows) == state.batch
            rows: Any = slice(None) if whole else torch.tensor(run.rows, device=room.device)
            room[rows, :, run.begin : state.length] = run.apart(state.length).buffer.tensors[which][:, :, :count]
    return room
