"""A prompt that a model has read: a value to hold, to generate from as often as wanted, and to keep in a file."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.buffer import Buffer
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import Source, open_safetensors, parse_json, refuse
from regard.files import write
from regard.layers.attention import MultiHeadAttention
from regard.layers.streaming import ModelState
from regard.mask import Padding, padding, padding_of
from regard.mechanism import Mechanism
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.transformer import Transformer
from regard.state import KernelState, KeyValueState, Run

KEY, VERSION = "regard.prompt", 3
PARTS = ("keys", "values", "key_scales", "value_scales")
"""What a file calls the tensors of a cache; scales are those of int8 ones."""
UNREAD = ("dropout", "attention_dropout", "end_tokens", "padding_token")
"""Fields of a config that a model's state does not depend on."""
SAMPLE = 1024
"""About how many numbers of each weight tell a model from another."""
CHUNK = 512
"""Tokens of a prompt that are read at once: memory is bounded by it, not by the prompt."""
ROOM = 256
"""New tokens that a state has room for at the least, if it may have so many."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a model keeps of prompts it has read: its state, their tokens, and the logits of what comes next (B, D).

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
    """The model that read it, as `fingerprint` describes it: no other can go on with its state."""

    @property
    def length(self) -> int:
        """Of the longest prompt."""
        return self.state.length

    @property
    def nbytes(self) -> int:
        return self.state.nbytes

    def chosen(self, rows: Sequence[int]) -> "Prompt":
        """Other rows of the batch; rows may repeat."""
        index = torch.tensor(rows, dtype=torch.long, device=self.logits.device)
        tokens = tuple(self.tokens[row] for row in rows)
        return replace(self, state=self.state.reorder(index), tokens=tokens, logits=self.logits[index])

    def save(self, path: str | Path) -> Path:
        """Write the prompt to one file, whole or not at all."""
        from safetensors.torch import save_file

        tensors, plan = _flatten(self)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return write(path, lambda beside: save_file(plain, beside, metadata={KEY: json.dumps(plan)}))

    @staticmethod
    def load(path: str | Path, model: Model) -> "Prompt":
        """The prompt of a file, for the model that read it; another model, and other weights, are refused."""
        if not isinstance(model, Decoder | Transformer):
            raise ValueError(f"model: expected the decoder or encoder-decoder that read it, got {type(model).__name__}")
        source = open_safetensors(path)
        text = source.metadata.get(KEY)
        if not isinstance(text, str):
            refuse(source.path, "a file that Prompt.save wrote", "a safetensors file of something else")
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


def fingerprint(model: Decoder | Transformer) -> str:
    """What tells a model from others: its kind, and checksums of its config and of some numbers of each weight.

    A weight gives fewer than 2,048, all of them if it has no more. Reading every number of a model would take longer
    than some of the tokens.

    >>> import regard as rg
    >>> from regard.generation.prompt import fingerprint
    >>> config = rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2)
    >>> fingerprint(rg.Decoder(config)) == fingerprint(rg.Decoder(config))  # random weights
    False
    """
    config, weights = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    for field in fields(model.config):
        if field.name not in UNREAD:
            value = getattr(model.config, field.name)
            # A mechanism of the user's own may hold functions, which have another name in every process.
            config.update(f"{field.name}={type(value).__name__ if isinstance(value, Mechanism) else value}\n".encode())
            config.update(_plain_fields(value).encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLE) | 1]  # an odd step: over all columns of most matrices
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        weights.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    kind = f"{'quantized ' if model.quantized else ''}{type(model).__name__}"
    return f"{kind}, {config.hexdigest()}, {weights.hexdigest()}"


def _plain_fields(value: object) -> str:
    plain = (bool, int, float, str, type(None))
    held = vars(value).items() if isinstance(value, Mechanism) else ()
    return ", ".join(f"{name}={one}" for name, one in held if isinstance(one, plain))


def unlike(reader: str, model: Decoder | Transformer) -> str | None:
    """How the model that read a prompt differs from another one; None if it does not."""
    theirs, ours = reader.split(", "), fingerprint(model).split(", ")
    if len(theirs) != len(ours):
        return "one of an unknown model"
    names = (f"that of a {theirs[0]}", "that of a model with another config", "that of a model with other weights")
    return next((name for name, one, other in zip(names, theirs, ours, strict=True) if one != other), None)


def read(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    room: int = 0,
    chunk: int = CHUNK,
    storage: torch.dtype | None = None,
) -> Prompt:
    """Let a model read prompts, left-padded to one length, `chunk` tokens at a time, with room for more."""
    if isinstance(model, Transformer):
        return _read_source(model, prompts, room, storage)
    assert isinstance(model, Decoder)
    longest = max(len(one) for one in prompts)
    tokens = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts], device=model.device)
    valid = torch.tensor([[at >= longest - len(one) for at in range(longest)] for one in prompts])
    state = model.start(batch=len(prompts), capacity=longest + room, storage=storage)
    hidden = tokens.new_zeros(0)
    for begin in range(0, longest, chunk):
        end = min(begin + chunk, longest)
        part = valid[:, :end]
        mask = None if bool(part.all()) else padding(valid=part)
        hidden, state = model.advance(tokens[:, begin:end], state, mask)
    return Prompt(state, tuple(tuple(one) for one in prompts), model.predict(hidden[:, -1:])[:, 0])


def _read_source(
    model: Transformer, sources: Sequence[Sequence[int]], room: int, storage: torch.dtype | None
) -> Prompt:
    longest = max(len(one) for one in sources)
    tokens = torch.tensor([list(one) + [0] * (longest - len(one)) for one in sources], device=model.device)
    lengths = [len(one) for one in sources]
    mask = padding(lengths) if min(lengths) < longest else None
    state = model.start(tokens, mask, capacity=1 + room, storage=storage)
    first = torch.full((len(sources), 1), model.config.start_token or 0, device=model.device)
    hidden, state = model.advance(first, state)
    return Prompt(state, tuple(tuple(one) for one in sources), model.predict(hidden)[:, 0])


def first_room(lengths: Iterable[int], most: int) -> int:
    """New tokens to make room for before any has come: not by what is allowed, but by what is there."""
    return min(most, max(ROOM, *lengths))


def with_room(state: ModelState, more: int, most: int) -> ModelState:
    """The state with room for `more` tokens; a layer without gets room for as many as it holds, `most` at the most."""

    def roomy(layer: Any, size: int | None) -> Any:
        full = size is None and isinstance(layer, KeyValueState) and layer.length + more > layer.capacity
        return layer.resized(layer.length + max(more, first_room([layer.length], most))) if full else layer

    return replace(state, layers=tuple(map(roomy, state.layers, state.windows)))


def _flatten(prompt: Prompt) -> tuple[dict[str, Tensor], dict[str, Any]]:
    state = prompt.state
    tensors = {"logits": prompt.logits}
    layers = [_put(f"layer.{index}", layer, tensors) for index, layer in enumerate(state.layers)]
    if state.padding is not None:
        # Layers share their tables, and a file holds no tensor twice: clones.
        tensors["padding"] = state.padding.valid(state.length).clone()
    for index, layer in enumerate(state.memory or ()):
        tensors |= {f"memory.{index}.{name}": tensor for name, tensor in zip(PARTS, layer, strict=False)}
    if isinstance(state.memory_mask, Padding) and state.memory:
        tensors["memory.padding"] = state.memory_mask.valid(state.memory[0][0].shape[2]).clone()
    plan = {
        "version": VERSION,
        "reader": prompt.reader,
        "tokens": prompt.tokens,
        "length": state.length,
        "layers": layers,
    }
    return tensors, plan


def _put(name: str, state: KeyValueState | KernelState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One layer's tensors into `tensors`; what else it takes to make it again."""
    if isinstance(state, KernelState):
        tensors[f"{name}.sums"], tensors[f"{name}.normaliser"] = state.sums, state.normaliser
        if state.padding is not None:
            tensors[f"{name}.folded"] = state.padding.valid(state.folded).clone()
        if state.tainted is not None:
            tensors[f"{name}.bad"] = state.tainted
        return {"kind": "sums", "folded": state.folded, "recent": _put(f"{name}.recent", state.recent, tensors)}
    for index, run in enumerate(state.runs):
        for part, tensor in zip(PARTS, run.buffer.tensors, strict=False):
            tensors[f"{name}.{index}.{part}"] = tensor.narrow(2, 0, max(0, state.length - run.begin))
    if state.padding is not None:
        tensors[f"{name}.padding"] = state.padding.valid(state.length).clone()
    if state.tainted is not None:
        tensors[f"{name}.tainted"] = state.tainted
    runs = [{"rows": run.rows, "begin": run.begin, "waiting": run.waiting} for run in state.runs]
    return {"kind": "keys", "length": state.length, "runs": runs}


def _unflatten(source: Source, plan: dict[str, Any], model: Decoder | Transformer) -> Prompt:
    """The prompt of a file whose every size agrees with its model and with the bytes that are there.

    Nothing is made by a number in the file: tensors are as large as the file holds them.
    """
    decoder = isinstance(model, Decoder)
    most = model.config.vocabulary_size
    [batch, _] = shape = source.shapes["logits"]
    _expect("logits", shape, (batch, most if decoder else model.config.target_size))  # type: ignore[union-attr]
    tokens = tuple(tuple(row) for row in plan["tokens"])
    if len(tokens) != batch or not batch or not all(tokens):
        raise ValueError(f"tokens of {len(tokens)} prompts for {batch}")
    if not all(type(token) is int and 0 <= token < most for row in tokens for token in row):
        raise ValueError(f"tokens that are not from 0 to {most - 1}")
    length, longest = plan["length"], max(map(len, tokens))
    if type(length) is not int or (length != longest if decoder else not 1 <= length <= model.config.context_length):
        raise ValueError(f"a length of {length!r} for prompts of {longest} tokens")

    def tensor(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        _expect(name, source.shapes[name], shape)
        found = source.read(name)
        if found.dtype != dtype:
            raise TypeError(f"{name} in {found.dtype}, not {dtype}")
        return found.clone().to(model.device)

    def flags(name: str, *shape: int) -> Tensor | None:
        return tensor(name, torch.bool, *shape) if name in source.shapes else None

    def table(name: str, count: int) -> Padding | None:
        found = flags(name, batch, count)
        return None if found is None else padding_of(found.cpu())

    def pair(name: str, like: Buffer, rows: int, count: int) -> tuple[Tensor, ...]:
        """Keys and values; if they are int8, and their scales."""
        heads, small = like.keys.shape[1], f"{name}.{PARTS[2]}" in source.shapes
        found = [
            tensor(f"{name}.{part}", torch.int8 if small else one.dtype, rows, heads, count, one.shape[3])
            for part, one in zip(PARTS, (like.keys, like.values), strict=False)
        ]
        fine = torch.promote_types(like.keys.dtype, torch.float32)
        scales = PARTS[2:] if small else ()
        return *found, *(tensor(f"{name}.{part}", fine, rows, heads, count, 1) for part in scales)

    def run(name: str, made: dict[str, Any], like: Buffer, count: int, real: Padding | None) -> Run:
        rows, begin, waiting = tuple(made["rows"]), made["begin"], made["waiting"]
        if not all(type(row) is int for row in rows):
            raise ValueError(f"a run of rows {rows!r:.40}")
        if type(begin) is not int or not 0 <= begin <= count or type(waiting) is not bool or list(rows) != sorted(rows):
            raise ValueError(f"a run that begins at {begin!r} of {count} tokens")
        if (begin and (real is None or real.valid(count)[list(rows), :begin].any())) or (waiting and begin < count):
            raise ValueError(f"a run without the first {begin} tokens, which are real")
        keys, values, *scales = pair(name, like, len(rows), count - begin)
        small = {"scales": (scales[0], scales[1]), "rounded": like.keys.dtype} if scales else {}
        return Run(rows, Buffer(keys, values, count - begin, **small), begin, waiting)  # type: ignore[arg-type]

    def cached(name: str, made: dict[str, Any], like: KeyValueState, count: int, capacity: int) -> KeyValueState:
        real = table(f"{name}.padding", count)
        runs = [run(f"{name}.{at}", one, like.buffer, count, real) for at, one in enumerate(made["runs"])]
        if sorted(row for one in runs for row in one.rows) != list(range(batch)):
            raise ValueError(f"runs that are not of {batch} rows, each once, in {name}")
        tainted = flags(f"{name}.tainted", batch, like.buffer.keys.shape[1], count)
        return KeyValueState(tuple(runs), capacity, count, real, tainted)

    def layer(name: str, made: dict[str, Any], like: Any, size: int | None) -> Any:
        if isinstance(like, KernelState) != (made["kind"] == "sums"):
            raise TypeError(f"{made['kind']} where {type(like).__name__} is expected")
        if isinstance(like, KeyValueState):
            count = made["length"]
            least = length if size is None else min(length, size - 1)
            if type(count) is not int or not least <= count <= length:
                raise ValueError(f"{count!r} tokens of {length} in {name}")
            return cached(name, made, like, count, count)
        folded = made["folded"]
        if type(folded) is not int or not 0 <= length - folded <= like.recent.capacity or folded < 0:
            raise ValueError(f"{folded!r} summed tokens of {length} in {name}")
        return replace(
            like,
            sums=tensor(f"{name}.sums", like.sums.dtype, batch, *like.sums.shape[1:]),
            normaliser=tensor(f"{name}.normaliser", like.normaliser.dtype, batch, *like.normaliser.shape[1:]),
            folded=folded,
            recent=cached(f"{name}.recent", made["recent"], like.recent, length - folded, like.recent.capacity),
            tainted=flags(f"{name}.bad", batch, like.sums.shape[1]),
            padding=table(f"{name}.folded", folded),
        )

    stack = model.stack if isinstance(model, Decoder) else model.decoder
    empty = stack.start(batch=1, capacity=0)
    layers = zip(plan["layers"], empty.layers, empty.windows, strict=True)
    memory, sources = None, 0
    if not decoder:
        sources = source.shapes[f"memory.0.{PARTS[0]}"][2]
        crosses = [_empty(block.cross) for block in stack.layers]
        memory = tuple(pair(f"memory.{index}", like, batch, sources) for index, like in enumerate(crosses))
    state = replace(
        empty,
        layers=tuple(layer(f"layer.{index}", made, *like) for index, (made, *like) in enumerate(layers)),
        length=length,
        padding=table("padding", length),
        memory=memory,
        memory_mask=table("memory.padding", sources),
    )
    logits = source.read("logits").clone().to(model.device)
    if not logits.is_floating_point():
        raise TypeError(f"logits in {logits.dtype}")
    return Prompt(state, tokens, logits, plan["reader"])


def _empty(layer: MultiHeadAttention) -> Buffer:
    """Keys and values like those a layer's cross-attention remembers, of no tokens."""
    sizes = layer.num_kv_heads, layer.qk_length, layer.value_length
    return KeyValueState.empty(1, *sizes, 0, layer.dtype, layer.W_k.weight.device).buffer


def _expect(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"{name} of shape {shape}, not {expected}")
