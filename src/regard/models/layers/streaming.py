"""A model's decoding state, and the positions of new tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.core.masks import Mask, Padding, Window
from regard.core.masks.padded import join_padding, reorder_padding
from regard.core.masks.structure import padding_between
from regard.core.states.buffer import quantize


@dataclass(frozen=True, eq=False, repr=False)
class ModelState:
    """A model's decoding state: the states of its layers, which tokens are real, and the source of an encoder-decoder.

    It is a value, like the states in it: `extend` returns a new one.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> state = model.start(batch=1, capacity=16)
    >>> logits, longer = model.extend(torch.tensor([[1, 2, 3]]), state)
    >>> state.length, longer.length, longer.crop(2).length
    (0, 3, 2)
    """

    layers: tuple[Any, ...]
    length: int = 0
    padding: Padding | None = None
    """Which of the tokens are real; None while all are."""
    memory: tuple[tuple[Tensor, ...], ...] | None = None
    """Keys and values of each layer's cross-attention, and, if they are int8, the scales of both."""
    memory_mask: Mask | None = None
    windows: tuple[Window | None, ...] = ()
    """The sliding window of each layer, which forgets older tokens; None for a layer that keeps them all."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare room included."""
        tensors = [t for pair in self.memory or () for t in pair]
        return sum(state.nbytes for state in self.layers) + sum(t.numel() * t.element_size() for t in tensors)

    def __repr__(self) -> str:
        return f"ModelState(length={self.length}, layers={len(self.layers)}, nbytes={self.nbytes})"

    def reorder(self, index: Tensor) -> "ModelState":
        """The state with other batch rows: new row i is old row `index[i]`. Rows may repeat (beam search)."""
        index = torch.as_tensor(index)
        memory, mask = self.memory, self.memory_mask
        if memory is not None:
            memory = tuple(tuple(tensor[index.to(tensor.device)] for tensor in layer) for layer in memory)
            if isinstance(mask, Padding):
                mask = reorder_padding(mask, index, memory[0][0].shape[2])
        return replace(
            self,
            layers=tuple(state.reorder(index) for state in self.layers),
            padding=reorder_padding(self.padding, index, self.length),
            memory=memory,
            memory_mask=mask,
        )

    def crop(self, length: int) -> "ModelState":
        """The state as it was at an earlier length."""
        if type(length) is not int or not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length} (the state's length), got {length!r}")
        for window, state in zip(self.windows, self.layers, strict=True):
            dropped = self.length - state.length
            if window is not None and dropped and length < dropped + window.before:
                raise ValueError(
                    f"length: expected at least {dropped + window.before}, the window is past, got {length}"
                )
        layers = tuple(state.crop(length - (self.length - state.length)) for state in self.layers)
        padding = None if self.padding is None else self.padding.between(0, length, self.length)
        return replace(self, layers=layers, length=length, padding=padding)

    def longer(self, layers: tuple[Any, ...], tokens: int, fresh: Padding | None) -> "ModelState":
        """The state after `tokens` more tokens, with the longer states of its layers; `fresh` is the new padding."""
        padding = self.padding
        if fresh is not None or padding is not None:
            batch = next(part.batch for part in (fresh, padding) if part is not None)
            padding = join_padding(padding, self.length, fresh, tokens, batch, torch.device("cpu"))
        return replace(self, layers=layers, length=self.length + tokens, padding=padding)


def rounded(memory: tuple[tuple[Tensor, ...], ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Keys and values of cross-attention as int8, with the scales of both.

    >>> import torch
    >>> from regard.models.layers.streaming import recalled, rounded
    >>> k, v = torch.randn(2, 1, 2, 5, 4)
    >>> [small] = rounded(((k, v),))
    >>> small[0].dtype, torch.allclose(recalled(small, torch.float32)[0], k, atol=0.05)
    (torch.int8, True)
    """
    pairs = ((quantize(k), quantize(v)) for k, v in memory)
    return tuple((k, v, k_scale, v_scale) for (k, k_scale), (v, v_scale) in pairs)


def recalled(layer: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer's cross-attention, dequantized if they are int8."""
    k, v, *scales = layer
    return ((k * scales[0]).to(dtype), (v * scales[1]).to(dtype)) if scales else (k, v)


def places(tokens: Int[Tensor, "B T"], mask: Mask | None, state: ModelState | None = None) -> Int[Tensor, "..."]:
    """Positions of new tokens: how many real tokens come before each in its row. (T,) if no row is padded, else (B, T).

    In a row padded on the left the first real token has position 0, so that padding does not change the result.

    >>> import regard as rg, torch
    >>> from regard.models.layers.streaming import places
    >>> places(torch.tensor([[0, 0, 7]]), rg.padding(valid=torch.tensor([[False, False, True]])))
    tensor([[0, 0, 0]])
    """
    count, past = tokens.shape[1], 0 if state is None else state.length
    fresh = padding_between(mask, past, past + count, past + count)
    before = None if state is None else state.padding
    if fresh is None and before is None:
        return torch.arange(past, past + count, device=tokens.device)
    if fresh is not None and fresh.batch != tokens.shape[0]:
        raise ValueError(f"mask: expected padding for {tokens.shape[0]} sequences (the batch), got {fresh.batch}")
    everything = torch.ones_like(tokens, dtype=torch.bool)
    valid = everything if fresh is None else fresh.valid(count, tokens.device)
    start = past if before is None else torch.tensor(before.counts(), device=tokens.device)[:, None]
    return (start + valid.cumsum(-1) - 1).clamp(min=0)
