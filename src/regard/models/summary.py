"""What a model is, in a table: layers, heads, parameters, state and FLOPs a token.

FLOPs are those of matrix products and convolutions, 2 for each multiply-add, as in `regard.core.cost`. For a model that
streams they are one token's, after `length` tokens with it; for an encoder one token's of a text of `length`; for
vision models one image's.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from regard.core.cost import Work, human
from regard.core.display import Html, table
from regard.core.families.mechanism import Mechanism
from regard.core.masks import causal, window
from regard.models.base import Model
from regard.models.davit import DaViT, Half, Stage, check_sides
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.layers.attention import MultiHeadAttention, as_mechanism, without_mechanisms
from regard.models.layers.block import Stack
from regard.models.transformer import Transformer
from regard.models.vision import VisionTransformer, pair


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a model."""

    name: str
    parameters: int
    flops: int
    layers: int = 0
    heads: str = ""
    mechanism: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Summary:
    """A model in numbers; `print` it, or read `to_json()`.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=100, embedding_dim=32, num_layers=2, num_heads=4))
    >>> found = model.summary(length=64)
    >>> found.parameters, found.state_per_token
    (36128, 512)
    """

    model: str
    parts: tuple[Part, ...]
    parameters: int
    unit: str
    """What the FLOPs are of: a token, or an image."""
    length: int | tuple[int, int]
    """Of the text; of an image's sides, both if they differ."""
    flops: int
    state_per_token: int
    """Bytes that each token adds to a stream's state; 0 without a stream."""
    state_fixed: int
    """Bytes of a state that do not grow: a kernel's sums, and an encoder-decoder's source."""
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
        """A row of a table for each part, and one for all of them."""
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
        """What the numbers are counted at, and what a stream's state takes."""
        down, across = self.length if isinstance(self.length, tuple) else (self.length, self.length)
        at = f"{down}×{across} pixels" if self.unit == "image" else f"{down:,} tokens"
        notes = [f"{self.model}, {self.dtype}; FLOPs at {at}"]
        if self.state_per_token or self.state_fixed:
            fixed = f" and {human(self.state_fixed, 'B')} at any length" if self.state_fixed else ""
            total = human(self.state_fixed + down * self.state_per_token, "B")
            notes.append(f"state {human(self.state_per_token, 'B')} per token{fixed}: {total} at {at}")
        return notes

    def to_json(self) -> dict[str, Any]:
        """The numbers, as JSON has them."""
        return asdict(self)


def summarise(model: Model, length: int | None = None) -> Summary:
    """The summary of a model at some length, its context's if not given (at most 4,096)."""
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"length: expected a whole number of at least 1, got {length!r}")
    if isinstance(model, VisionTransformer | DaViT):
        return _vision(model, length)
    if not isinstance(model, Decoder | Encoder | Transformer):
        raise ValueError(f"model: expected one of ours, got {type(model).__name__}")
    size = min(model.config.context_length, 4096) if length is None else length
    streams = {Decoder: ["stack"], Transformer: ["decoder"], Encoder: []}[type(model)]
    parts = list(_parts(model, size, streams))
    states = [_state(getattr(model, name), size, model) for name in streams]
    return _finish(model, parts, "token", size, sum(one for one, _ in states), sum(fixed for _, fixed in states))


def _finish(
    model: Model, parts: list[Part], unit: str, length: int | tuple[int, int], growing: int = 0, fixed: int = 0
) -> Summary:
    return Summary(
        model=type(model).__name__,
        parts=tuple(parts),
        parameters=sum(one.numel() for one in model.parameters()),
        unit=unit,
        length=length,
        flops=sum(one.flops for one in parts),
        state_per_token=growing,
        state_fixed=fixed,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _parts(model: Decoder | Encoder | Transformer, length: int, streams: list[str]) -> Iterator[Part]:
    """Children of a model, those that do nothing and hold nothing left out."""
    for name, child in model.named_children():
        if isinstance(child, Stack):
            yield _stack(name, child, length, model, stream=name in streams)
        elif any(True for _ in child.parameters()):
            # Heads of an encoder that stand on one token a sequence cost next to nothing a token.
            once = name in ("pooler", "order", "inversion", "classes")
            tied = 2 * model.embedding.weight.numel() if name == "words" and model.config.tied else 0
            yield Part(name=name, parameters=_size(child), flops=0 if once else _products(child) + tied)
    if not isinstance(model, Encoder) and model.config.tied:
        width, words = model.config.embedding_dim, model.config.vocabulary_size
        if isinstance(model, Transformer):
            words = model.config.target_size
        yield Part(name="head (tied)", parameters=0, flops=2 * width * words)


def _stack(name: str, stack: Stack, length: int, model: Model, *, stream: bool) -> Part:
    blocks = stack.layers
    flops = 0
    for block, size in zip(blocks, stack.windows, strict=True):
        mask = model.sight(length) if isinstance(model, Encoder) else causal if stack.causal else None
        if size is not None:
            mask = window(before=size - 1, after=0 if stack.causal else size - 1)
        queries = 1 if stream else length
        attention = block.attention
        flops += _products(block) + _attention(attention, queries, length, model, mask) // queries
        if hasattr(block, "cross"):
            # Its keys and values are made once a source, not once a token.
            flops -= _products(block.cross.W_k) + _products(block.cross.W_v)
            flops += _attention(block.cross, 1, length, model, None, cached=False)
    return Part(
        name=name,
        parameters=_size(stack),
        flops=flops,
        layers=stack.num_layers,
        heads=_heads(blocks[0].attention) if blocks else "",
        mechanism=_brief(blocks[0].attention.mechanism) if blocks else "",
    )


def _state(stack: Stack, length: int, model: Model) -> tuple[int, int]:
    """Bytes a token and bytes whatever the length, of a stream's state."""

    def held(tokens: int) -> int:
        total = 0
        for block, size in zip(stack.layers, stack.windows, strict=True):
            one, room = block.attention, tokens if size is None else min(tokens, 2 * size)
            total += one.mechanism.cost(_work(one, 1, room, model, None)).state_bytes
        return total

    growing = held(length + 1) - held(length)
    crosses = [block for block in stack.layers if hasattr(block, "cross")]
    source = sum(
        length * one.cross.num_kv_heads * (one.cross.qk_length + one.cross.value_length) * model.dtype.itemsize
        for one in crosses
    )
    return growing, held(length) - length * growing + source


def _vision(model: VisionTransformer | DaViT, length: int | None) -> Summary:
    if isinstance(model, VisionTransformer):
        if length is not None:
            raise ValueError(f"length: expected none, the model's images are {model.config.image_size}, got {length}")
        tokens = model.config.num_patches
        stack = _stack("stack", model.stack, tokens + 1, model, stream=False)
        whole = Part(**{**asdict(stack), "flops": stack.flops * (tokens + 1)})
        rest = [
            Part(name=name, parameters=_size(child), flops=_products(child) * (tokens if name == "patches" else 1))
            for name, child in model.named_children()
            if name != "stack" and _size(child)
        ]
        loose = sum(one.numel() for _, one in model.named_parameters(recurse=False))
        high, wide = pair("image_size", model.config.image_size)
        parts = [Part(name="class token, positions", parameters=loose, flops=0), whole, *rest]
        return _finish(model, parts, "image", high if high == wide else (high, wide))
    side = 224 if length is None else length
    check_sides((side, side), model.config)
    return _finish(model, list(_stages(model, side)), "image", side)


def _stages(model: DaViT, side: int) -> Iterator[Part]:
    config = model.config
    stages = [one for one in model.stages if isinstance(one, Stage)]
    for index, stage in enumerate(stages):
        side = (side + 2 * config.patch_padding[index] - config.patch_size[index]) // config.patch_stride[index] + 1
        flops = _products(stage.embed) * side**2
        for half in (one for one in stage.halves if isinstance(one, Half)):
            convolutions = _products(half.attention_conv) + _products(half.network_conv)
            flops += (convolutions + _products(half.network)) * side**2
            across = 1 if half.window_size is None else -(-side // half.window_size)
            tokens = side**2 if half.window_size is None else half.window_size**2
            each = _products(half.attention) * tokens + _attention(half.attention, tokens, tokens, model, None)
            flops += each * across**2
        yield Part(
            name=f"stage {index + 1}, {side}×{side}",
            parameters=_size(stage),
            flops=flops,
            layers=config.num_layers[index],
            heads=f"{config.num_heads[index]} · {config.num_groups[index]} groups",
            mechanism=f"{_brief(as_mechanism(config.mechanism))} · Channel",
        )
    for name in ("norm", "head"):
        if hasattr(model, name):
            yield Part(name=name, parameters=_size(getattr(model, name)), flops=_products(getattr(model, name)))


def _attention(one: MultiHeadAttention, queries: int, keys: int, model: Model, mask: Any, cached: bool = True) -> int:
    return one.mechanism.cost(_work(one, queries, keys, model, mask, cached)).flops


def _work(one: MultiHeadAttention, queries: int, keys: int, model: Model, mask: Any, cached: bool = True) -> Work:
    return Work(
        query_length=queries,
        key_length=keys,
        num_heads=one.num_heads,
        num_kv_heads=one.num_kv_heads,
        qk_length=one.qk_length,
        value_length=one.value_length,
        dtype=model.dtype,
        mask=mask,
        cached=cached,
    )


def _heads(one: MultiHeadAttention) -> str:
    same = one.num_heads == one.num_kv_heads
    return f"{one.num_heads}" if same else f"{one.num_heads} on {one.num_kv_heads} kv"


def _brief(mechanism: Mechanism) -> str:
    """A mechanism without the fields that are as they always are."""
    values = {one.name: getattr(mechanism, one.name) for one in fields(mechanism)}
    tensors = {name: type(value).__name__ for name, value in mechanism.tensors().items()}
    shown = {one.name: tensors.get(one.name, values[one.name]) for one in fields(mechanism)}
    own = (one.name for one in fields(mechanism) if one.name in tensors or values[one.name] != one.default)
    return f"{type(mechanism).__name__}({', '.join(f'{name}={shown[name]}' for name in own)})"


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _products(module: nn.Module) -> int:
    """FLOPs of one token, or one place of a map, in the projections and convolutions of a module."""
    layers = (one for one in without_mechanisms(module) if isinstance(one, nn.Linear | nn.Conv2d))
    return sum(2 * one.weight.numel() for one in layers)
