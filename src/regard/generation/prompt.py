"""A prompt that a model has read: a value to hold, to generate from as often as wanted, and to keep in a file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.buffer import Buffer
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import Source, open_safetensors, parse_json, refuse
from regard.files import write
from regard.layers.streaming import ModelState
from regard.mask import Padding, padding, padding_of
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.transformer import Transformer
from regard.state import KernelState, KeyValueState, Run

KEY = "regard.prompt"
VERSION = 2
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
        return Prompt(self.state.reorder(index), tuple(self.tokens[row] for row in rows), self.logits[index])

    def save(self, path: str | Path) -> Path:
        """Write the prompt to one file, whole or not at all."""
        from safetensors.torch import save_file

        tensors, plan = _flatten(self)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return write(path, lambda beside: save_file(plain, beside, metadata={KEY: json.dumps(plan)}))

    @staticmethod
    def load(path: str | Path, model: Model) -> "Prompt":
        """The prompt of a file, for the model that read it."""
        source = open_safetensors(path)
        text = source.metadata.get(KEY)
        if not isinstance(text, str):
            refuse(source.path, "a file that Prompt.save wrote", "a safetensors file of something else")
        try:
            return _unflatten(source, parse_json(text, source.path), model)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: expected a saved prompt of this model, got {error!r:.100}") from None


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
        return _read_source(model, prompts, room)
    assert isinstance(model, Decoder)
    longest = max(len(one) for one in prompts)
    tokens = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts], device=model.device)
    valid = torch.tensor([[at >= longest - len(one) for at in range(longest)] for one in prompts])
    more = {} if storage is None else {"storage": storage}
    state = model.start(batch=len(prompts), capacity=longest + room, **more)
    hidden = tokens.new_zeros(0)
    for begin in range(0, longest, chunk):
        end = min(begin + chunk, longest)
        part = valid[:, :end]
        mask = None if bool(part.all()) else padding(valid=part)
        hidden, state = model.advance(tokens[:, begin:end], state, mask)
    return Prompt(state, tuple(tuple(one) for one in prompts), model.predict(hidden[:, -1:])[:, 0])


def _read_source(model: Transformer, sources: Sequence[Sequence[int]], room: int) -> Prompt:
    longest = max(len(one) for one in sources)
    tokens = torch.tensor([list(one) + [0] * (longest - len(one)) for one in sources], device=model.device)
    lengths = [len(one) for one in sources]
    state = model.start(tokens, padding(lengths) if min(lengths) < longest else None, capacity=1 + room)
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
    layers = [_put(f"layer.{index}", one, tensors) for index, one in enumerate(state.layers)]
    if state.padding is not None:
        tensors["padding"] = state.padding.valid(state.length)
    for index, (k, v) in enumerate(state.memory or ()):
        tensors[f"memory.{index}.keys"], tensors[f"memory.{index}.values"] = k, v
    if isinstance(state.memory_mask, Padding) and state.memory:
        tensors["memory.padding"] = state.memory_mask.valid(state.memory[0][0].shape[2])
    plan = {
        "version": VERSION,
        "tokens": prompt.tokens,
        "length": state.length,
        "layers": layers,
        "windows": state.windows,
        "memory": len(state.memory or ()),
    }
    return tensors, plan


def _put(name: str, state: KeyValueState | KernelState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One layer's tensors into `tensors`; what else it takes to make it again."""
    if isinstance(state, KernelState):
        tensors[f"{name}.sums"], tensors[f"{name}.normaliser"] = state.sums, state.normaliser
        if state.padding is not None:
            tensors[f"{name}.folded"] = state.padding.valid(state.folded)
        if state.tainted is not None:
            tensors[f"{name}.bad"] = state.tainted
        return {"kind": "sums", "folded": state.folded, "recent": _put(f"{name}.recent", state.recent, tensors)}
    for index, run in enumerate(state.runs):
        tensors[f"{name}.{index}.keys"], tensors[f"{name}.{index}.values"] = (
            run.keys(state.length),
            run.values(state.length),
        )
    if state.padding is not None:
        tensors[f"{name}.padding"] = state.padding.valid(state.length)
    if state.tainted is not None:
        tensors[f"{name}.tainted"] = state.tainted
    runs = [{"rows": run.rows, "begin": run.begin, "waiting": run.waiting} for run in state.runs]
    return {"kind": "keys", "capacity": state.capacity, "length": state.length, "runs": runs}


def _unflatten(source: Source, plan: dict[str, Any], model: Model) -> Prompt:
    def needed(name: str) -> Tensor:
        return source.read(name).clone().to(model.device)

    def tensor(name: str) -> Tensor | None:
        return needed(name) if name in source.shapes else None

    def table(name: str) -> Padding | None:
        found = tensor(name)
        return None if found is None else padding_of(found.cpu())

    def layer(name: str, made: dict[str, Any], empty: Any) -> Any:
        if made["kind"] == "sums":
            if not isinstance(empty, KernelState):
                raise TypeError("sums of a kernel where keys and values are expected")
            return replace(
                empty,
                sums=_alike(needed(f"{name}.sums"), empty.sums),
                normaliser=_alike(needed(f"{name}.normaliser"), empty.normaliser),
                folded=made["folded"],
                recent=layer(f"{name}.recent", made["recent"], empty.recent),
                tainted=tensor(f"{name}.bad"),
                padding=table(f"{name}.folded"),
            )
        if not isinstance(empty, KeyValueState):
            raise TypeError("keys and values where sums of a kernel are expected")
        runs = [
            Run(
                tuple(run["rows"]),
                Buffer(needed(f"{name}.{index}.keys"), needed(f"{name}.{index}.values")),
                run["begin"],
                run["waiting"],
            )
            for index, run in enumerate(made["runs"])
        ]
        return empty.restored(runs, made["length"], table(f"{name}.padding"), tensor(f"{name}.tainted"))

    if plan["version"] != VERSION:
        raise TypeError(f"a prompt of version {plan['version']!r}, where {VERSION} is read")
    logits = needed("logits")
    if not isinstance(model, Decoder | Transformer):
        raise TypeError(f"a {type(model).__name__}, which reads no prompts")
    start = (model.stack if isinstance(model, Decoder) else model.decoder).start(batch=len(logits), capacity=0)
    memory = tuple((needed(f"memory.{i}.keys"), needed(f"memory.{i}.values")) for i in range(plan["memory"]))
    state = replace(
        start,
        layers=tuple(
            layer(f"layer.{index}", made, one)
            for index, (made, one) in enumerate(zip(plan["layers"], start.layers, strict=True))
        ),
        length=plan["length"],
        padding=table("padding"),
        memory=memory or None,
        memory_mask=table("memory.padding"),
    )
    return Prompt(state, tuple(tuple(one) for one in plan["tokens"]), logits)


def _alike(found: Tensor, expected: Tensor) -> Tensor:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise TypeError("sums of another model")
    return found
