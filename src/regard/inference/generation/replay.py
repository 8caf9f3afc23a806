"""Decode steps on a GPU, captured once as a CUDA graph and replayed for every token.

A step of a small model runs about a thousand kernels of a few microseconds each, and launching one from Python takes
longer than running it. A graph launches all of them at once. The first step runs without a graph, as a warm-up for the
capture; the second is captured. Both produce tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module

from regard.core.eager import untouched
from regard.core.masks import Padding
from regard.core.masks.guard import all_finite
from regard.core.paths import gpu, split
from regard.core.paths.slots import Clock
from regard.core.states.key_values import first_room
from regard.core.user_code import runs_user_code
from regard.inference.generation.prompt import Prompt, with_room
from regard.models.base import GenerativeModel
from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.streaming import ModelState, recalled

LEAST = 8
"""The fewest new tokens for which a capture pays off; it takes about as long as two steps."""


def unfit(model: GenerativeModel, state: ModelState, most: int) -> str | None:
    """Why a model's step is not captured; None if it is. `most` is the largest number of tokens still to come."""
    if model.device.type != "cuda":
        return "made for GPUs"
    return uncapturable(model, state, most)


def uncapturable(model: GenerativeModel, state: ModelState, most: int) -> str | None:
    """Why a model's step cannot be captured, on any device; None if it can."""
    stack = model.decoder_stack
    if most < LEAST:
        return f"fewer than {LEAST} tokens to come"
    if model.training:
        return "a model in training draws random numbers"
    if not untouched() or _hooked(model):
        return "hooks and modes must run at every step"
    if stack.bias is not None:
        return "a bias by distance is computed for each length"
    if stack.rotary is not None and stack.rotary.scaling is not None and stack.rotary.scaling.kind == "dynamic":
        return "dynamic rotary scaling follows each sequence's length"
    if state.padding is not None and _starts(state.padding, state.length) is None:
        return "padding that is not on the left"
    for block, layer in zip(stack.layers, state.layers, strict=True):
        mechanism = block.attention.mechanism
        if block.cross is not None and (reason := _uncrossed(block.cross)) is not None:
            return reason
        if runs_user_code(mechanism):
            return f"{type(mechanism).__name__} runs user code, which may read values from the GPU"
        if layer.forgotten:
            return "its state has forgotten what a mask's window left behind"
        if not mechanism.slotted:
            return f"no slot for a {type(layer).__name__}"
    return None


class Reading:
    """What a model has read, and how it reads on: `how` is "replayed", or says why steps are not replayed.

    >>> import regard as rg
    >>> from regard.inference.generation.replay import Reading
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2))
    >>> reading = Reading(model, rg.prefill(model, [[1, 2]], room=3))
    >>> reading.read([5], most=3)
    >>> reading.prompt.tokens, reading.how
    (((1, 2, 5),), 'eager: made for GPUs')
    """

    def __init__(self, model: GenerativeModel, prompt: Prompt) -> None:
        self.model, self._prompt = model, prompt
        self._replay: Replay | None = None
        self._newer: list[list[int]] = []
        self.how = "eager: nothing was read yet"

    @property
    def replayed(self) -> bool:
        """Whether steps are replayed."""
        return self._replay is not None

    @property
    def logits(self) -> Tensor:
        """The logits (B, D) of the next token."""
        return self._prompt.logits if self._replay is None else self._replay.logits

    @property
    def prompt(self) -> Prompt:
        """All that was read, as a value. It takes over the memory of the replay; the next step starts a new one."""
        if self._replay is not None:
            state, logits = self._replay.state(), self._replay.logits.clone()
            more = zip(*self._newer, strict=True)
            tokens = tuple((*row, *new) for row, new in zip(self._prompt.tokens, more, strict=True))
            self._prompt = replace(self._prompt, state=state, tokens=tokens, logits=logits)
            self._replay, self._newer = None, []
        return self._prompt

    def choose(self, rows: Sequence[int]) -> None:
        """Continue with some rows of the batch."""
        self._prompt = self.prompt.chosen(rows)

    def read(self, newest: list[int], most: int) -> None:
        """Read one token of each row. `most` is the largest number of tokens still to come, this one included."""
        if self._replay is not None and self._replay.full:
            self._prompt = self.prompt
        if self._replay is None:
            why = unfit(self.model, self._prompt.state, most)
            self.how = "replayed" if why is None else f"eager: {why}"
            if why is None:
                self._replay = Replay(self.model, self._prompt.state, most)
        if self._replay is not None:
            self._replay.read(newest)
            self._newer.append(newest)
            return
        prompt = self._prompt
        state = with_room(prompt.state, 1, most)
        hidden, state = self.model.advance(_tensor(newest).to(prompt.logits.device), state)
        tokens = tuple((*row, token) for row, token in zip(prompt.tokens, newest, strict=True))
        self._prompt = replace(prompt, state=state, tokens=tokens, logits=self.model.predict(hidden)[:, 0])


class Replay:
    """A model's decode step over slots: states at fixed addresses. On a GPU it is captured and replayed."""

    def __init__(self, model: GenerativeModel, state: ModelState, most: int) -> None:
        self.model, self.like, self.length = model, state, state.length
        self.capacity = state.length + first_room([state.length], most)
        starts = None if state.padding is None else _starts(state.padding, state.length)
        device = model.device
        self.clocks: dict[int, Clock] = {}

        def clock(length: int) -> Clock:
            """The clock of layers that keep the last `length` tokens: their positions begin later."""
            gone = state.length - length
            if gone not in self.clocks:
                begins = None if starts is None else tuple(low - gone for low in starts)
                self.clocks[gone] = Clock.at(state.length - gone, begins, self.capacity - gone, device)
            return self.clocks[gone]

        layers = zip(model.decoder_stack.layers, state.layers, state.windows, strict=True)
        self.slots = [
            block.attention.mechanism.slot(block.attention.qk_length, layer, clock, window)
            for block, layer, window in layers
        ]
        self.tokens = torch.zeros(len(self.slots[0].tensors[0]), 1, dtype=torch.long, device=device)
        rotary = model.decoder_stack.rotary
        self.turns = None if rotary is None else rotary.tables(torch.arange(self.capacity, device=device))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False
        self.logits = torch.empty(0, device=device)

    @property
    def full(self) -> bool:
        """Whether there is no room for another token."""
        return self.length >= self.capacity

    def read(self, newest: list[int]) -> None:
        """Read one token of each row; `logits` are then those of the next."""
        tokens = _tensor(newest)
        self.tokens.copy_(tokens.pin_memory() if self.tokens.is_cuda else tokens, non_blocking=True)
        self.length += 1
        for slot, block in zip(self.slots, self.model.decoder_stack.layers, strict=True):
            slot.make_room(block.attention.mechanism, self.length)
        with all_finite():  # a NaN in a key becomes a NaN in the logits, which raises
            if not self.warm or not self.tokens.is_cuda:
                self.logits = self._step()
            else:
                if self.graph is None:
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):
                        self.logits = self._step()
                self.graph.replay()
        self.warm = True

    def _step(self) -> Tensor:
        """The logits (B, D) after `tokens`, computed entirely on the device."""
        for clock in self.clocks.values():
            clock.tick()
        gone, clock = next(iter(self.clocks.items()))
        stack, place = self.model.decoder_stack, clock.places(len(self.tokens)) + (gone if clock.low is None else 0)
        x = self.model.embed(self.tokens, place)
        positions: Any = place
        if self.turns is not None:
            positions = tuple(table[place][:, None] for table in self.turns)
        memory, mask = self.like.memory, self.like.memory_mask
        for index, (block, slot) in enumerate(zip(stack.layers, self.slots, strict=True)):
            sources = None if memory is None else recalled(memory[index], x.dtype)
            x, _ = block(x, positions=positions, state=slot, memory=sources, memory_mask=mask)
        return self.model.predict(stack.norm(x))[:, 0]

    def state(self) -> ModelState:
        """The state after the last step. It takes over the memory of the slots: this replay must not read any more."""
        padding, new = self.like.padding, self.length - self.like.length
        if padding is not None:
            padding = Padding(tuple((low, self.length) for low, _ in padding.rows or ()))

        def layer(slot: Any, like: Any) -> Any:
            length = slot.length + new
            real = None if padding is None else padding.between(self.length - length, self.length, self.length)
            return slot.state(like, length, real)

        layers = tuple(map(layer, self.slots, self.like.layers))
        return replace(self.like, layers=layers, length=self.length, padding=padding)


def _tensor(newest: list[int]) -> Tensor:
    return torch.tensor(newest, device="cpu")[:, None]


def _starts(padding: Padding, length: int) -> tuple[int, ...] | None:
    """The position of each row's first real token, if all rows are real from there to the end."""
    if padding.rows is None or any(high < length for _, high in padding.rows):
        return None
    return tuple(low for low, _ in padding.rows)


def _uncrossed(layer: MultiHeadAttention) -> str | None:
    """Why a layer's cross-attention cannot be captured; None if it can."""
    softmax = split.scale(layer.mechanism, layer.qk_length) is not None
    if softmax and layer.dtype != torch.float64 and max(layer.qk_length, layer.value_length) <= gpu.LONGEST:
        return None
    return "cross-attention that no kernel of ours computes"


def _hooked(model: torch.nn.Module) -> bool:
    everywhere = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)
    return any(everywhere) or any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
