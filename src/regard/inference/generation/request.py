"""Checks of the arguments of `generate` and `stream` (model, prompts, limits, seeds), and the start of generation."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from regard.core.states.key_values import first_room
from regard.inference.generation.engine import Growth, Limits, Row
from regard.inference.generation.prompt import CHUNK, Prompt, read, unlike
from regard.inference.generation.sampling import Sampling
from regard.inference.generation.text import Writer
from regard.models.base import GenerativeModel, Model, expect


def begin(
    model: GenerativeModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    sampling: Sampling,
    limits: Limits,
    seeds: Sequence[Sequence[int]],
    state: Prompt | None = None,
    log_probabilities: bool = False,
    alternatives: int = 0,
    chunk: int = CHUNK,
    storage: torch.dtype | None = None,
) -> tuple[Growth, list[Row]]:
    """Read the prompts, unless `state` has them, and prepare one row per prompt and seed."""
    rooms = [model.room_after(len(tokens)) for tokens in prompts]
    room = min(limits.max_new_tokens, max(rooms))
    room = first_room(map(len, prompts), room)
    prompt = state if state is not None else read_prompts(model, prompts, room, chunk, storage)
    samples = [(at, seed) for at, prompt_seeds in enumerate(seeds) for seed in prompt_seeds]
    rows = [
        new_row(model, place, prompts[at], rooms[at], seed, limits, log_probabilities, alternatives)
        for place, (at, seed) in enumerate(samples)
    ]
    if len(rows) > len(prompts):
        prompt = prompt.chosen([at for at, _ in samples])
    return Growth(model, prompt, rows, sampling, limits), rows


@torch.inference_mode()
def read_prompts(model: GenerativeModel, prompts: Any, room: int, chunk: int, storage: torch.dtype | None) -> Prompt:
    """The prompts, read by the model, with room for `room` new tokens."""
    return read(model, prompts, room=room, chunk=chunk, storage=storage)


def as_generative(model: Model) -> GenerativeModel:
    """The model, if it can generate."""
    generative = expect(GenerativeModel, model)
    if model.training and (model.config.dropout or model.config.attention_dropout):
        raise ValueError("model: expected a model in eval mode, got one in training mode; call model.eval()")
    return generative


def checked_prompts(
    model: GenerativeModel, prompts: Any, state: Prompt | None, storage: torch.dtype | None = None
) -> list[tuple[int, ...]]:
    """The prompts' tokens, checked."""
    if (prompts is None) == (state is None):
        raise ValueError(f"prompts: expected either prompts or a state, got {'none' if prompts is None else 'both'}")
    if state is not None:
        if not isinstance(state, Prompt):
            raise ValueError(f"state: expected a Prompt from prefill, got {type(state).__name__}")
        if reason := unlike(state.reader, model):
            raise ValueError(f"state: expected a prompt that this model read, got {reason}")
        if storage is not None:
            raise ValueError(f"storage: expected None with a state, which has its storage from prefill, got {storage}")
        return list(state.tokens)
    prompts = _plain(prompts)
    if isinstance(prompts, str) or (isinstance(prompts, list | tuple) and prompts and type(prompts[0]) is int):
        prompts = [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts: expected a text, a list of texts, or lists of tokens, got {type(prompts).__name__}")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    return [prompt_tokens(model, prompt, at) for at, prompt in enumerate(prompts)]


def prompt_tokens(model: GenerativeModel, prompt: Any, at: int) -> tuple[int, ...]:
    """The tokens of one prompt, after checks."""
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("prompts: expected lists of tokens, since the model has no tokenizer, got text")
        prompt = model.tokenizer.encode(prompt)
    if not isinstance(prompt, list | tuple):
        raise ValueError(f"prompts: expected a text or a list of tokens at index {at}, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError(f"prompts: expected at least one token, got an empty prompt at index {at}")
    most = model.config.vocabulary_size
    if not all(type(token) is int and 0 <= token < most for token in prompt):
        raise ValueError(f"prompts: expected tokens from 0 to {most - 1}, got others at index {at}")
    return tuple(prompt)


def check_single(prompt: Any) -> None:
    """Raise ValueError for several prompts where only one is allowed."""
    listed = _plain(prompt)
    if isinstance(listed, list | tuple) and any(isinstance(_plain(part), str | list | tuple) for part in listed):
        raise ValueError(
            f"prompt: expected one text or one list of tokens, got a list of {len(listed)} prompts; "
            "generate takes several"
        )


def _plain(values: Any) -> Any:
    """Tensors and arrays as lists; everything else unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values


def limits_of(model: GenerativeModel, max_new_tokens: int, stop: Any) -> Limits:
    """The limits of sequences: their length, the model's end tokens, and `stop`."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected a whole number of at least 1, got {max_new_tokens!r}")
    if stop is not None and not isinstance(stop, str | int | list | tuple | set | frozenset):
        raise ValueError(f"stop: expected texts and tokens, or None, got {type(stop).__name__}")
    stops = () if stop is None else (stop,) if isinstance(stop, str | int) else tuple(stop)
    most = model.config.target_size
    for entry in stops:
        if isinstance(entry, bool) or not isinstance(entry, str | int) or entry == "":
            raise ValueError(f"stop: expected texts and tokens, got {entry!r}")
        if isinstance(entry, int) and not 0 <= entry < most:
            raise ValueError(f"stop: expected tokens from 0 to {most - 1}, got {entry}")
    ends = set(model.config.end_tokens)
    if model.tokenizer is not None and model.tokenizer.eos is not None:
        ends.add(model.tokenizer.eos)
    return Limits(
        max_new_tokens=max_new_tokens,
        ends=frozenset(ends),
        stop_tokens=frozenset(entry for entry in stops if isinstance(entry, int)),
        stop_strings=tuple(entry for entry in stops if isinstance(entry, str)),
    )


def check_reading(chunk: int, room: int = 0) -> None:
    """Raise ValueError unless `chunk` and `room` are valid sizes."""
    for name, value, least in (("chunk", chunk, 1), ("room", room, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")


def check_counts(n: int, beams: int, length_penalty: float, sampling: Sampling, alternatives: int = 0) -> None:
    """Raise ValueError for invalid numbers of samples and beams, or options that do not go together."""
    for name, value in (("n", n), ("beams", beams)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if not isinstance(length_penalty, int | float) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty: expected a finite number, got {length_penalty!r}")
    if beams > 1 and not sampling.greedy:
        raise ValueError(f"beams: expected 1 with a temperature, since beam search does not sample, got {beams}")
    if beams > 1 and sampling.repetition_penalty != 1:
        raise ValueError(f"beams: expected 1 with a repetition penalty, got {beams}")
    if type(alternatives) is not int or alternatives < 0:
        raise ValueError(f"alternatives: expected a whole number of at least 0, got {alternatives!r}")
    if beams > 1 and alternatives:
        raise ValueError(
            f"alternatives: expected 0 with beams, whose steps belong to several texts, got {alternatives}"
        )
    if beams > 1 and n > beams:
        raise ValueError(f"n: expected at most {beams} (beams), got {n}")


def seeds_of(seed: Any, count: int, n: int) -> list[list[int]]:
    """A seed for each sample of each prompt."""
    if seed is None:
        bases = [int(torch.randint(2**62, ())) for _ in range(count)]
    elif isinstance(seed, int) and not isinstance(seed, bool):
        bases = [seed] * count
    else:
        bases = list(seed) if isinstance(seed, list | tuple | range) else []
        if len(bases) != count or not all(type(base) is int for base in bases):
            raise ValueError(f"seed: expected a whole number, or one for each of {count} prompts, got {seed!r:.80}")
    if any(not 0 <= base < 2**63 for base in bases):
        raise ValueError(f"seed: expected whole numbers from 0 to 2**63 - 1, got {seed!r}")
    return [[(base + sample * 0x9E3779B97F4A7C15) % 2**63 for sample in range(n)] for base in bases]


def new_row(
    model: GenerativeModel,
    place: int,
    tokens: tuple[int, ...],
    room: int,
    seed: int,
    limits: Limits,
    scored: bool,
    alternatives: int = 0,
) -> Row:
    """A row without new tokens."""
    # The source of an encoder-decoder is another text, so the repetition penalty does not apply to it.
    before = () if model.reads_source else tokens
    generator = torch.Generator().manual_seed(seed)
    writer = Writer(model.tokenizer, limits.stop_strings)
    listed: list[list[tuple[int, float]]] | None = [] if alternatives else None
    return Row(place, before, room, generator, writer, [] if scored else None, listed, alternatives)
