"""A model in numbers: layers, heads, parameters, state and FLOPs per token.

FLOPs are those of matrix products and convolutions, 2 for each multiply-add, as in `regard.core.cost`. For a model that
streams they are those of one token after `length` tokens, itself included; for an encoder those of one token in a text
of `length`; for vision models those of one image. Each model lists its parts (`Model.parts`) with these functions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from regard.core.cost import Work, human
from regard.core.display import Html, table
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, causal
from regard.models.layers.attention import MultiHeadAttention, without_mechanisms
from regard.models.layers.block import Stack


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a model."""

    name: str
    parameters: int
    flops: int
    layers: int = 0
    heads: str = ""
    mechanism: str = ""


@dataclass(frozen=True, kw_only=True)
class StateSize:
    """Bytes of a decoding state; both are 0 for a model that does not generate."""

    per_token: int = 0
    """What each token adds."""
    fixed: int = 0
    """What does not grow: the sums of linear attention, an encoder-decoder's source."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Summary:
    """A model in numbers; `print` it, or read `to_json()`.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=100, embedding_dim=32, num_layers=2, num_heads=4))
    >>> summary = model.summary(length=64)
    >>> summary.parameters, summary.state_per_token
    (36128, 512)
    """

    model: str
    parts: tuple[Part, ...]
    parameters: int
    unit: str
    """The FLOPs are those of one token, or of one image."""
    length: int | tuple[int, int]
    """The length of the text; the side of an image, both sides if they differ."""
    flops: int
    state_per_token: int
    """Bytes that each token adds to the decoding state; 0 for a model that does not generate."""
    state_fixed: int
    """Bytes of the state that do not grow: the sums of linear attention, an encoder-decoder's source."""
    dtype: str

    def __str__(self) -> str:
        rows = self.rows()
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        wide = [max(len(line[column]) for line in lines) for column in range(len(rows[0]))]
        left = 4
        texts = [
            "  ".join(
                cell.ljust(size) if column < left else cell.rjust(size)
                for column, (cell, size) in enumerate(zip(line, wide, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*texts, "", *self.notes()])

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        rows = self.rows()
        return table(rows, right=list(rows[0])[4:], notes=self.notes())

    def rows(self) -> list[dict[str, str]]:
        """One table row per part, and one for the total."""
        total = Part(name="total", parameters=self.parameters, flops=self.flops)
        return [
            {
                "part": part.name,
                "layers": str(part.layers or ""),
                "heads": part.heads,
                "mechanism": part.mechanism,
                "parameters": f"{part.parameters:,}",
                f"FLOPs / {self.unit}": human(part.flops),
            }
            for part in (*self.parts, total)
        ]

    def notes(self) -> list[str]:
        """The length that the numbers are for, and the size of the decoding state."""
        down, across = self.length if isinstance(self.length, tuple) else (self.length, self.length)
        at = f"{down}×{across} pixels" if self.unit == "image" else f"{down:,} tokens"
        notes = [f"{self.model}, {self.dtype}; FLOPs at {at}"]
        if self.state_per_token or self.state_fixed:
            fixed = f" and {human(self.state_fixed, 'B')} at any length" if self.state_fixed else ""
            total = human(self.state_fixed + down * self.state_per_token, "B")
            notes.append(f"state {human(self.state_per_token, 'B')} per token{fixed}: {total} at {at}")
        return notes

    def to_json(self) -> dict[str, Any]:
        """The numbers as a dict that can be written as JSON."""
        return asdict(self)


def children(model: nn.Module, counted: Mapping[str, Part]) -> Iterator[Part]:
    """One part per child module with parameters: the part in `counted`, or one with the FLOPs of its products."""
    for name, child in model.named_children():
        if name in counted:
            yield counted[name]
        elif any(True for _ in child.parameters()):
            yield Part(name=name, parameters=size(child), flops=products(child))


def stack_part(
    name: str,
    stack: Stack,
    length: int,
    dtype: torch.dtype,
    *,
    stream: bool = False,
    mask: Mask | None = None,
) -> Part:
    """A stack on `length` tokens. FLOPs are those of the last token for `stream`, otherwise the average per token."""
    flops, queries = 0, 1 if stream else length
    for block, window in zip(stack.layers, stack.windows, strict=True):
        rule = window if window is not None else causal if mask is None and stack.causal else mask
        flops += products(block) + attention_flops(block.attention, queries, length, dtype, rule) // queries
        if block.cross is not None:
            # Cross-attention computes its keys and values once per source, not once per token.
            flops -= products(block.cross.W_k) + products(block.cross.W_v)
            flops += attention_flops(block.cross, 1, length, dtype, cached=False)
    first = stack.layers[0].attention if stack.layers else None
    return Part(
        name=name,
        parameters=size(stack),
        flops=flops,
        layers=stack.num_layers,
        heads="" if first is None else _heads(first),
        mechanism="" if first is None else brief(first.mechanism),
    )


def stack_state(stack: Stack, length: int, dtype: torch.dtype) -> StateSize:
    """The state of a stack after `length` tokens, over a source of as many if it has cross-attention."""

    def total(tokens: int) -> int:
        layers = zip(stack.layers, stack.windows, strict=True)
        rooms = (
            (block.attention, tokens if window is None else min(tokens, 2 * window.width)) for block, window in layers
        )
        return sum(layer.mechanism.cost(_work(layer, 1, room, dtype)).state_bytes for layer, room in rooms)

    per_token = total(length + 1) - total(length)
    crosses = [block.cross for block in stack.layers if block.cross is not None]
    source = sum(
        length * layer.num_kv_heads * (layer.qk_length + layer.value_length) * dtype.itemsize for layer in crosses
    )
    return StateSize(per_token=per_token, fixed=total(length) - length * per_token + source)


def attention_flops(
    layer: MultiHeadAttention,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    mask: Mask | None = None,
    *,
    cached: bool = True,
) -> int:
    """FLOPs of a layer's attention without its projections."""
    return layer.mechanism.cost(_work(layer, queries, keys, dtype, mask, cached)).flops


def _work(
    layer: MultiHeadAttention,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    mask: Mask | None = None,
    cached: bool = True,
) -> Work:
    return Work(
        query_length=queries,
        key_length=keys,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        qk_length=layer.qk_length,
        value_length=layer.value_length,
        dtype=dtype,
        mask=mask,
        cached=cached,
    )


def _heads(layer: MultiHeadAttention) -> str:
    same = layer.num_heads == layer.num_kv_heads
    return f"{layer.num_heads}" if same else f"{layer.num_heads} on {layer.num_kv_heads} kv"


def brief(mechanism: Mechanism) -> str:
    """A mechanism's repr without the fields that have their default."""
    tensors = {name: type(value).__name__ for name, value in mechanism.tensors().items()}
    shown = [
        f"{entry.name}={tensors.get(entry.name, getattr(mechanism, entry.name))}"
        for entry in fields(mechanism)
        if entry.name in tensors or getattr(mechanism, entry.name) != entry.default
    ]
    return f"{type(mechanism).__name__}({', '.join(shown)})"


def size(module: nn.Module) -> int:
    """How many parameters a module has."""
    return sum(parameter.numel() for parameter in module.parameters())


def products(module: nn.Module) -> int:
    """FLOPs of a module's projections and convolutions for one token, or one position of a feature map."""
    layers = (layer for layer in without_mechanisms(module) if isinstance(layer, nn.Linear | nn.Conv2d))
    return sum(2 * layer.weight.numel() for layer in layers)
