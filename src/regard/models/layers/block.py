"""Blocks of attention and position-wise networks, and stacks of them.

    pre-norm    x + f(norm(x))        GPT-2, Llama, T5, ViT
    post-norm   norm(x + f(x))        the original Transformer, BERT

A stack applies its blocks one after another; with `num_shared` below the number of layers it applies the same block
several times (ALBERT). For token-by-token decoding it keeps one state per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.calls.choice import refusal
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Band, Mask, Window, as_mask
from regard.core.masks import causal as causal_mask
from regard.core.masks.structure import padding_between, structure_of
from regard.models.layers.attention import AnyMask, MultiHeadAttention, as_mechanism, own_copy
from regard.models.layers.network import PositionWise, norm
from regard.models.layers.positions import Rotary, Tables
from regard.models.layers.ragged import Ragged
from regard.models.layers.streaming import ModelState, recalled


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The config of one block; each model's config builds it from its fields."""

    embedding_dim: int
    num_heads: int
    hidden_dim: int
    mechanism: Mechanism | str
    num_kv_heads: int | None = None
    qk_length: int | None = None
    value_length: int | None = None
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    pre_norm: bool = True
    activation: str = "gelu"
    attention_bias: bool = True
    output_bias: bool = True
    network_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    rotary: Rotary | None = None
    cross: bool = False
    """Whether there is cross-attention between self-attention and the network."""


class Block(nn.Module):
    """Self-attention, cross-attention if there is any, and a position-wise network, each with norm and residual."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = self._attention(config, rotary=config.rotary)
        self.attention_norm = norm(config.norm, config.embedding_dim, config.norm_epsilon)
        self.cross = self._attention(config) if config.cross else None
        if config.cross:
            self.cross_norm = norm(config.norm, config.embedding_dim, config.norm_epsilon)
        self.network = PositionWise(
            config.embedding_dim,
            config.hidden_dim,
            activation=config.activation,
            bias=config.network_bias,
        )
        self.network_norm = norm(config.norm, config.embedding_dim, config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def writers(self) -> list[nn.Linear]:
        """The projections whose output is added to the residual stream."""
        attentions = [self.attention] if self.cross is None else [self.attention, self.cross]
        return [*(attention.W_o for attention in attentions), self.network.down]

    @staticmethod
    def _attention(config: BlockConfig, rotary: Rotary | None = None) -> MultiHeadAttention:
        return MultiHeadAttention(
            config.embedding_dim,
            config.num_heads,
            config.num_kv_heads,
            config.qk_length,
            config.value_length,
            own_copy(config.mechanism),
            config.attention_bias,
            config.attention_dropout,
            output_bias=config.output_bias,
            rotary=rotary,
        )

    def forward(
        self,
        x: Float[Tensor, "*b E"],
        mask: AnyMask = None,
        *,
        bias: Tensor | None = None,
        positions: Int[Tensor, "..."] | Tables | None = None,
        ragged: Ragged | None = None,
        state: Any = None,
        memory: tuple[Tensor, Tensor] | None = None,
        memory_mask: Mask | None = None,
    ) -> tuple[Float[Tensor, "*b E"], Any]:
        """The tokens after this block and, if a state was given, the longer state."""
        options: dict[str, Any] = {"bias": bias, "positions": positions, "ragged": ragged}
        inner = self.attention_norm(x) if self.pre_norm else x
        if state is None:
            out = self.attention(inner, mask=mask, **options)
        else:
            out, state = self.attention.extend(inner, state, mask, **options)
        x = self._add(x, out, self.attention_norm)
        if self.cross is not None and memory is not None:
            inner = self.cross_norm(x) if self.pre_norm else x
            inner = inner if ragged is None else ragged.pad(inner)
            out = self.cross.cross(inner, *memory, memory_mask)
            x = self._add(x, out if ragged is None else ragged.pack(out), self.cross_norm)
        inner = self.network_norm(x) if self.pre_norm else x
        return self._add(x, self.network(inner), self.network_norm), state

    def _add(self, x: Tensor, out: Tensor, normed: nn.Module) -> Tensor:
        x = x + (self.dropout(out) if self.training else out)
        return x if self.pre_norm else normed(x)


class Stack(nn.Module):
    """Blocks one after another, sharing masks, positions and states; then a norm, in pre-norm models."""

    def __init__(
        self,
        config: BlockConfig,
        num_layers: int,
        *,
        causal: bool = False,
        num_shared: int | None = None,
        windows: Sequence[Window | None] | None = None,
        bias: nn.Module | None = None,
    ) -> None:
        """`num_shared` is the number of different blocks; `windows` the sliding window of each layer, or None;
        `bias` a module that gives the scores' bias from (queries, keys)."""
        super().__init__()
        mechanism = as_mechanism(config.mechanism)
        if causal and refusal(mechanism, causal_mask) is not None:
            raise ValueError(f"mechanism: expected one that can be causal, got {mechanism!r}")
        if mechanism.ordered and (config.cross or not causal):
            task = "attention over another sequence" if config.cross else "tokens that see each other both ways"
            raise ValueError(f"mechanism: expected one for {task}, got {mechanism!r}, which is always causal")
        if bias is not None and refusal(mechanism, bias=True) is not None:
            raise ValueError(f"mechanism: expected one with additive scores, for a bias by distance, got {mechanism!r}")
        different = num_layers if num_shared is None else num_shared
        if num_shared is not None and not 1 <= num_shared <= num_layers:
            raise ValueError(f"num_shared: expected 1 to {num_layers} different blocks, got {num_shared}")
        self.num_layers, self.num_heads, self.causal = num_layers, config.num_heads, causal
        self.windows = tuple(windows) if windows is not None else (None,) * num_layers
        self.blocks = nn.ModuleList(Block(config) for _ in range(different))
        self.bias, self.rotary = bias, config.rotary
        self.norm = norm(config.norm, config.embedding_dim, config.norm_epsilon) if config.pre_norm else nn.Identity()

    @property
    def layers(self) -> list[Block]:
        """The block that each layer runs."""
        blocks: list[Any] = list(self.blocks)
        return [blocks[index * len(blocks) // self.num_layers] for index in range(self.num_layers)]

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        mask: AnyMask = None,
        *,
        positions: Int[Tensor, "..."] | None = None,
        state: ModelState | None = None,
        memory: tuple[tuple[Tensor, ...], ...] | None = None,
        memory_mask: Mask | None = None,
    ) -> tuple[Float[Tensor, "B T E"], ModelState | None]:
        """The tokens after all blocks, exactly 0 at padding, and the longer state, if any."""
        rule = as_mask(mask)
        tokens, past = x.shape[1], 0 if state is None else state.length
        if rule is not None:
            rule.fits(x.shape[0], self.num_heads, tokens, past + tokens)
        fresh = padding_between(rule, past, past + tokens, past + tokens)
        ragged = None if fresh is None else Ragged(fresh.valid(tokens, x.device))
        if ragged is not None:
            x = ragged.pack(x)
        if state is not None:
            memory, memory_mask = state.memory, state.memory_mask
        turns = positions if self.rotary is None or positions is None else self.rotary.tables(positions)
        masks: dict[tuple[Window | None, int], Mask | None] = {}
        bias = None if self.bias is None else self.bias(tokens, past + tokens, x)
        states = []
        for index, (block, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            layer_state, gone = (None, 0) if state is None else _layer_state(state, index, window, tokens)
            if (window, gone) not in masks:
                masks[window, gone] = self._masked(rule if gone == 0 else _recent(rule, gone, past + tokens), window)
            x, longer = block(
                x,
                masks[window, gone],
                bias=None if bias is None else bias[..., gone:],
                positions=turns,
                ragged=ragged,
                state=layer_state,
                memory=None if memory is None else recalled(memory[index], x.dtype),
                memory_mask=memory_mask,
            )
            states.append(longer)
        x = self.norm(x)
        x = x if ragged is None else ragged.pad(x)
        return x, None if state is None else state.longer(tuple(states), tokens, fresh)

    def _masked(self, rule: Mask | None, window: Window | None) -> Mask | None:
        for more in (causal_mask if self.causal else None, window):
            rule = more if rule is None else rule if more is None else more & rule
        return rule

    def scale_writers(self) -> None:
        """Divide what enters the residual stream by the root of how many sub-layers add to it (Radford et al. 2019), so
        that the stream is as large after many layers as after few."""
        additions = sum(len(layer.writers) for layer in self.layers)
        for block in self.blocks:
            for writer in block.writers:  # type: ignore[union-attr]
                if not writer.weight.is_meta:
                    writer.weight.data.mul_(additions**-0.5)

    def start(self, *, batch: int, capacity: int = 4096, storage: torch.dtype | None = None) -> ModelState:
        """An empty state, with room for `capacity` tokens; a layer with a window has room for two windows."""
        rooms = (capacity if window is None else min(capacity, 2 * window.width) for window in self.windows)
        states = (
            block.attention.start(batch=batch, capacity=room, storage=storage)
            for block, room in zip(self.layers, rooms, strict=True)
        )
        return ModelState(tuple(states), windows=self.windows)

    def remember(self, memory: Float[Tensor, "B S E"]) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of every layer's cross-attention over `memory`."""
        return tuple(block.cross.remember(memory) for block in self.layers if block.cross is not None)


def _layer_state(state: ModelState, index: int, window: Window | None, tokens: int) -> tuple[Any, int]:
    """A layer's state with room for more tokens if it has a window, and how many tokens have left it."""
    layer_state = state.layers[index]
    if window is not None:
        layer_state = layer_state.windowed(window, tokens)
    return layer_state, state.length - layer_state.length


def _recent(rule: Mask | None, gone: int, keys: int) -> Mask | None:
    """The mask of the keys that are left after the first `gone` were dropped."""
    structure = structure_of(rule, keys, keys)
    if structure.rest is not None:
        raise ValueError(f"mask: expected padding or a band, for a window that has left tokens behind, got {rule!r}")
    # A band is defined by distances, which dropping keys does not change.
    band = None if (structure.before, structure.after) == (None, None) else Band(structure.before, structure.after)
    padding = padding_between(rule, gone, keys, keys)
    return band if padding is None else padding if band is None else band & padding
