"""Prompt caches: prompts that a model has read, to generate from many times, and to save in a file."""

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import Source, open_safetensors, parse_json, refuse
from regard.core.extras import needed_for
from regard.core.families.mechanism import Mechanism
from regard.core.files import write
from regard.core.masks import Padding, Window, padding_of
from regard.core.states.buffer import Buffer
from regard.core.states.key_values import PARTS, KeyValueState, stored_buffer
from regard.core.states.state import Sizes
from regard.models.base import GenerativeModel, Model, expect
from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.streaming import ModelState

KEY, VERSION = "regard.prompt", 5
UNREAD = ("dropout", "attention_dropout", "end_tokens", "padding_token")
"""Fields of a config that a model's state does not depend on."""
SAMPLE = 1024
"""The fingerprint of a model reads about this many numbers of each weight."""
CHUNK = 512
"""Prompts are read in chunks of this many tokens, which limits the memory that a long prompt needs."""


@dataclass(frozen=True, eq=False, repr=False)
class Prompt:
    """Prompts that a model has read: its state, their tokens, and the logits (B, D) of the next token.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> prompt = rg.prefill(model, [[1, 2, 3]])
    >>> again = rg.generate(model, state=prompt, max_new_tokens=2)
    >>> prompt.length, again == rg.generate(model, [[1, 2, 3]], max_new_tokens=2)
    (3, True)
    """

    state: ModelState
    tokens: tuple[tuple[int, ...], ...]
    logits: Tensor
    reader: str = ""
    """The `fingerprint` of the model that read it; no other model can use its state."""

    @property
    def length(self) -> int:
        """The length of the longest prompt."""
        return self.state.length

    @property
    def nbytes(self) -> int:
        return self.state.nbytes

    def __repr__(self) -> str:
        lengths = ", ".join(str(len(tokens)) for tokens in self.tokens[:6])
        more = ", …" if len(self.tokens) > 6 else ""
        return f"Prompt(batch={len(self.tokens)}, tokens=[{lengths}{more}], nbytes={self.nbytes})"

    def chosen(self, rows: Sequence[int]) -> "Prompt":
        """The prompt with other rows of the batch; rows may repeat."""
        index = torch.tensor(rows, dtype=torch.long, device=self.logits.device)
        tokens = tuple(self.tokens[row] for row in rows)
        return replace(self, state=self.state.reorder(index), tokens=tokens, logits=self.logits[index])

    def save(self, path: str | Path) -> Path:
        """Write the prompt to one file, atomically."""
        with needed_for("saving a prompt"):
            from safetensors.torch import save_file

        tensors, plan = _flatten(self)
        plain = _unshared({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        return write(path, lambda beside: save_file(plain, beside, metadata={KEY: json.dumps(plan)}))

    @staticmethod
    def load(path: str | Path, model: Model) -> "Prompt":
        """Load a prompt for the model that read it; a model with another config or other weights is refused."""
        model = expect(GenerativeModel, model)
        source = open_safetensors(path)
        text = source.metadata.get(KEY)
        if not isinstance(text, str):
            refuse(source.path, "a file that Prompt.save wrote", "another safetensors file")
        plan = parse_json(text, source.path)
        if plan.get("version") != VERSION or not isinstance(plan.get("reader"), str):
            refuse(source.path, f"a prompt of version {VERSION}", f"version {plan.get('version')!r:.40}")
        if reason := unlike(plan["reader"], model):
            refuse(source.path, "a prompt that this model read", reason)
        try:
            return _unflatten(source, plan, model)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path}: expected a saved prompt of this model, got {error!r:.100}") from None


def fingerprint(model: GenerativeModel) -> str:
    """Identifies a model: its class, and checksums of its config and of a sample of each weight.

    The sample has fewer than 2,048 numbers. Reading all weights would take longer than generating some tokens.

    >>> import regard as rg
    >>> from regard.inference.generation.prompt import fingerprint
    >>> config = rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2)
    >>> fingerprint(rg.Decoder(config)) == fingerprint(rg.Decoder(config))  # random weights
    False
    """
    config, weights = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    for entry in fields(model.config):
        if entry.name not in UNREAD:
            value = getattr(model.config, entry.name)
            # A user's mechanism may contain functions, whose repr differs between processes.
            config.update(f"{entry.name}={type(value).__name__ if isinstance(value, Mechanism) else value}\n".encode())
            config.update(_plain_fields(value).encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLE) | 1]  # an odd step reaches all columns of most matrices
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sample = sample.contiguous().cpu()
        weights.update(ctypes.string_at(sample.data_ptr(), sample.nbytes))  # the bytes of the tensor, without NumPy
    kind = f"{'quantized ' if model.quantized else ''}{type(model).__name__}"
    return f"{kind}, {config.hexdigest()}, {weights.hexdigest()}"


def _plain_fields(mechanism: object) -> str:
    plain = (bool, int, float, str, tuple, type(None))
    items = vars(mechanism).items() if isinstance(mechanism, Mechanism) else ()
    named = {
        name: f"{value.__module__}.{value.__qualname__}" for name, value in items if hasattr(value, "__qualname__")
    }
    return ", ".join(
        f"{name}={named.get(name, value)}" for name, value in items if isinstance(value, plain) or name in named
    )


def unlike(reader: str, model: GenerativeModel) -> str | None:
    """How a model differs from the one that read a prompt; None if it does not."""
    theirs, ours = reader.split(", "), fingerprint(model).split(", ")
    if len(theirs) != len(ours):
        return "a prompt of an unknown model"
    names = (
        f"a prompt of a {theirs[0]}",
        "a prompt of a model with another config",
        "a prompt of a model with other weights",
    )
    return next(
        (name for name, their_part, our_part in zip(names, theirs, ours, strict=True) if their_part != our_part), None
    )


def read(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    *,
    room: int = 0,
    chunk: int = CHUNK,
    storage: torch.dtype | None = None,
) -> Prompt:
    """Let a model read prompts, `chunk` tokens at a time, with room for `room` new tokens."""
    logits, state = model.read_prompts(prompts, room=room, chunk=chunk, storage=storage)
    return Prompt(state, tuple(tuple(prompt) for prompt in prompts), logits)


def with_room(state: ModelState, more: int, most: int) -> ModelState:
    """The state with room for `more` tokens; a full layer doubles its room, by at most `most` tokens."""
    pairs = zip(state.layers, state.windows, strict=True)
    # A layer with a sliding window makes room by dropping old tokens.
    layers = (layer.with_room(more, most) if window is None else layer for layer, window in pairs)
    return replace(state, layers=tuple(layers))


def _flatten(prompt: Prompt) -> tuple[dict[str, Tensor], dict[str, Any]]:
    state = prompt.state
    tensors = {"logits": prompt.logits}
    layers = []
    for index, layer in enumerate(state.layers):
        plan, parts = layer.saved()
        layers.append(plan)
        tensors |= {f"layer.{index}.{name}": tensor for name, tensor in parts.items()}
    if state.padding is not None:
        tensors["padding"] = state.padding.valid(state.length)
    for index, layer in enumerate(state.memory or ()):
        tensors |= {f"memory.{index}.{name}": tensor for name, tensor in zip(PARTS, layer, strict=False)}
    if isinstance(state.memory_mask, Padding) and state.memory:
        tensors["memory.padding"] = state.memory_mask.valid(state.memory[0][0].shape[2])
    plan = {
        "version": VERSION,
        "reader": prompt.reader,
        "tokens": prompt.tokens,
        "length": state.length,
        "layers": layers,
    }
    return tensors, plan


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without shared memory, as safetensors needs them: layers may share a table or a state."""
    memories: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if memory in memories else tensor
        memories.add(memory)
    return result


@dataclass(frozen=True, eq=False)
class _Stored:
    """A layer's state in a file; implements `regard.core.states.state.Stored`."""

    source: Source
    device: torch.device
    prefix: str
    """The prefix of its tensors' names."""
    batch: int
    length: int
    plan: dict[str, Any] = field(default_factory=dict)
    window: Window | None = None

    def holds(self, name: str) -> bool:
        return self.prefix + name in self.source.shapes

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        name = self.prefix + name
        _expect(name, self.source.shapes[name], shape)
        tensor = self.source.read(name)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} in {tensor.dtype}, not {dtype}")
        return tensor.clone().to(self.device)

    def padding(self, name: str, count: int) -> Padding | None:
        return padding_of(self.tensor(name, torch.bool, self.batch, count).cpu()) if self.holds(name) else None

    def part(self, name: str, plan: dict[str, Any]) -> "_Stored":
        return replace(self, prefix=f"{self.prefix}{name}.", plan=plan)


def _unflatten(source: Source, plan: dict[str, Any], model: GenerativeModel) -> Prompt:
    """The prompt in a file, after all its sizes were compared with the model and with the file.

    No size in the file's JSON allocates memory: tensors are as large as the bytes that the file has.
    """
    most = model.config.vocabulary_size
    [batch, _] = shape = source.shapes["logits"]
    _expect("logits", shape, (batch, model.config.target_size))
    tokens = tuple(tuple(row) for row in plan["tokens"])
    if len(tokens) != batch or not batch or not all(tokens):
        raise ValueError(f"tokens of {len(tokens)} prompts for {batch}")
    if not all(type(token) is int and 0 <= token < most for row in tokens for token in row):
        raise ValueError(f"tokens that are not from 0 to {most - 1}")
    length, longest = plan["length"], max(map(len, tokens))
    if type(length) is not int or (
        not 1 <= length <= model.context_length if model.reads_source else length != longest
    ):
        raise ValueError(f"a length of {length!r} for prompts of {longest} tokens")

    stack = model.decoder_stack
    empty = stack.start(batch=1, capacity=0)

    def stored(prefix: str, plan: dict[str, Any] | None = None, window: Window | None = None) -> _Stored:
        return _Stored(source, model.device, prefix, batch, length, plan or {}, window)

    def layer(index: int, plan: dict[str, Any], like: Any, window: Window | None) -> Any:
        if plan.get("kind") != (kind := like.saved()[0].get("kind")):
            raise TypeError(f"{plan.get('kind')} where {kind} is expected in layer {index}")
        return like.restored(stored(f"layer.{index}.", plan, window))

    parts = zip(plan["layers"], empty.layers, empty.windows, strict=True)
    memory, sources = None, 0
    if model.reads_source:
        sources = source.shapes[f"memory.0.{PARTS[0]}"][2]
        crosses = [_empty(block.cross) for block in stack.layers if block.cross is not None]
        buffers = (
            stored_buffer(stored(f"memory.{index}."), "", like, batch, sources) for index, like in enumerate(crosses)
        )
        memory = tuple(buffer.tensors for buffer in buffers)
    state = replace(
        empty,
        layers=tuple(layer(index, *part) for index, part in enumerate(parts)),
        length=length,
        padding=stored("").padding("padding", length),
        memory=memory,
        memory_mask=stored("memory.").padding("padding", sources),
    )
    logits = source.read("logits").clone().to(model.device)
    if not logits.is_floating_point():
        raise TypeError(f"logits in {logits.dtype}")
    return Prompt(state, tokens, logits, plan["reader"])


def _empty(layer: MultiHeadAttention) -> Buffer:
    """An empty KV cache like that of a layer's cross-attention."""
    sizes = layer.num_kv_heads, layer.qk_length, layer.value_length
    return KeyValueState.empty(Sizes(1, *sizes, layer.dtype, layer.W_k.weight.device), 0).buffer


def _expect(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"{name} of shape {shape}, not {expected}")
