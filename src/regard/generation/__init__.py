"""Text from models: `generate`, `stream`, `prefill`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from regard.generation.beam import search
from regard.generation.engine import Generated, Growth, Limits, Row
from regard.generation.prompt import CHUNK, Prompt, read, with_room
from regard.generation.sampling import Sampling
from regard.generation.text import Writer
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.transformer import Transformer

__all__ = ["Generated", "Prompt", "generate", "prefill", "stream"]

Texts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


def generate(
    model: Model,
    prompts: Texts | None = None,
    *,
    state: Prompt | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | int | Sequence[str | int] = (),
    seed: int | Sequence[int] | None = None,
    n: int = 1,
    beams: int = 1,
    length_penalty: float = 1.0,
    log_probabilities: bool = False,
    chunk: int = CHUNK,
    storage: torch.dtype | None = None,
) -> list[Generated]:
    """Continue prompts: texts, or lists of tokens, or the state of some that were read before (`prefill`).

    Gives a text for each prompt, `n` in a row for each if more are wanted; every text is a `str` that also knows its
    `tokens` and why it ended. Greedy unless `temperature` is above 0. Prompts of unequal length go together, and each
    gives what it gives alone: `seed` is every sequence's own (its n-th sample has its n-th seed). A prompt that is
    read once serves all its samples. With `beams` the likeliest sequences are searched for. An encoder-decoder reads
    the prompts as its source. `stop` has texts, or tokens, that end a sequence besides those of the model.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> both = rg.generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
    >>> both[1] == rg.generate(model, [[4]], max_new_tokens=5)[0], len(both[0].tokens)
    (True, 5)
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    own = _model(model)
    limits = _limits(own, max_new_tokens, stop)
    _check_counts(n, beams, length_penalty, sampling)
    given = _given(own, prompts, state)
    seeds = _seeds(seed, len(given), n)
    rooms = [_room(own, tokens) for tokens in given]
    room = min(max_new_tokens, max(rooms))
    prompt = state if state is not None else _read(own, given, room, chunk, storage)
    if beams > 1:
        found = []
        for at in range(len(given)):
            one = with_room(prompt.chosen([at]), room)
            options = {"beams": beams, "length_penalty": length_penalty, "room": rooms[at], "results": n}
            found += search(own, one, limits, **options)  # type: ignore[arg-type]
        return found
    rows = [
        _row(own, tokens, rooms[at], seeds[at][sample], limits, log_probabilities)
        for at, tokens in enumerate(given)
        for sample in range(n)
    ]
    if n > 1:
        prompt = prompt.chosen([at for at in range(len(given)) for _ in range(n)])
    for _ in Growth(own, with_room(prompt, room), rows, sampling, limits):
        pass
    return [row.result() for row in rows]


def stream(
    model: Model,
    prompt: str | Sequence[int] | None = None,
    *,
    state: Prompt | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | int | Sequence[str | int] = (),
    seed: int | None = None,
    chunk: int = CHUNK,
    storage: torch.dtype | None = None,
) -> "Stream":
    """Continue one prompt, piece by piece, as `generate` would: no character comes in two halves.

    Everything is checked at once; the model runs as the pieces are asked for. `text` is what has come so far, so that
    an interrupted stream loses nothing.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> "".join(rg.stream(model, [1, 2], max_new_tokens=3)) == rg.generate(model, [[1, 2]], max_new_tokens=3)[0]
    True
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    own = _model(model)
    limits = _limits(own, max_new_tokens, stop)
    given = _given(own, None if prompt is None else cast(Any, [prompt]), state)
    if len(given) != 1:
        raise ValueError(f"state: expected one prompt to stream from, got {len(given)}")
    room = _room(own, given[0])
    row = _row(own, given[0], room, _seeds(seed, 1, 1)[0][0], limits, False)
    more = min(max_new_tokens, room)

    def begin() -> Growth:
        prompt = with_room(state or _read(own, given, more, chunk, storage), more)
        return Growth(own, prompt, [row], sampling, limits)

    return Stream(row, begin)


class Stream:
    """The pieces of one text, to be iterated over; `text` and `result` are what has come so far.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2))
    >>> pieces = rg.stream(model, [1, 2], max_new_tokens=3)
    >>> len(list(pieces)), len(pieces.result.tokens)
    (3, 3)
    """

    def __init__(self, row: Row, begin: Callable[[], Growth]) -> None:
        self._row, self._begin = row, begin
        self._growth: Growth | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        if self._growth is None:
            self._growth = self._begin()
        while True:
            next(self._growth)
            if self._row.piece:
                return self._row.piece

    @property
    def text(self) -> str:
        return self._row.writer.text

    @property
    def result(self) -> Generated:
        return self._row.result()

    def prompt_so_far(self) -> Prompt | None:
        """What the model has read: the prompt and all that came, but the newest token; None if it has not begun."""
        return None if self._growth is None else self._growth.reached


def prefill(
    model: Model, prompts: Texts, *, room: int = 0, chunk: int = CHUNK, storage: torch.dtype | None = None
) -> Prompt:
    """Let a model read prompts and keep its state: `generate(model, state=…)` goes on from it as often as wanted.

    `room` is how many more tokens it should have room for; more are made room for when needed, which copies once.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> prompt = rg.prefill(model, [[1, 2, 3], [4]])
    >>> [len(text.tokens) for text in rg.generate(model, state=prompt, max_new_tokens=4, n=2)]
    [4, 4, 4, 4]
    """
    own = _model(model)
    given = _given(own, prompts, None)
    for tokens in given:
        _room(own, tokens)
    return _read(own, given, room, chunk, storage)


@torch.inference_mode()
def _read(model: Decoder | Transformer, given: Any, room: int, chunk: int, storage: torch.dtype | None) -> Prompt:
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk: expected a whole number of at least 1, got {chunk!r}")
    return read(model, given, room=room, chunk=chunk, storage=storage)


def _model(model: Model) -> Decoder | Transformer:
    if not isinstance(model, Decoder | Transformer):
        raise ValueError(f"model: expected a decoder or an encoder-decoder, got {type(model).__name__}")
    if model.training:
        raise ValueError("model: expected one in eval mode, got one in training: call model.eval()")
    return model


def _given(model: Decoder | Transformer, prompts: Any, state: Prompt | None) -> list[tuple[int, ...]]:
    """The prompts' tokens, checked."""
    if (prompts is None) == (state is None):
        raise ValueError(f"prompts: expected either prompts or a state, got {'none' if prompts is None else 'both'}")
    if state is not None:
        if not isinstance(state, Prompt):
            raise ValueError(f"state: expected what prefill gives, got {type(state).__name__}")
        return list(state.tokens)
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not len(prompts):
        raise ValueError("prompts: expected at least one, got none")
    return [_tokens(model, one, at) for at, one in enumerate(prompts)]


def _tokens(model: Decoder | Transformer, prompt: Any, at: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("prompts: expected lists of tokens, the model has no tokenizer, got text")
        found = tuple(model.tokenizer.encode(prompt))
    else:
        found = tuple(prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt)
    if not found:
        raise ValueError(f"prompts: expected at least one token, got an empty prompt at place {at}")
    most = model.config.vocabulary_size
    if not all(type(token) is int and 0 <= token < most for token in found):
        raise ValueError(f"prompts: expected tokens from 0 to {most - 1}, got others at place {at}")
    return found


def _room(model: Decoder | Transformer, tokens: Sequence[int]) -> int:
    """How many new tokens the context has room for."""
    limit = model.config.context_length
    if isinstance(model, Transformer):
        if model.config.positions == "learned" and len(tokens) > limit:
            raise ValueError(f"prompts: expected at most {limit} tokens (the model's context), got {len(tokens)}")
        return limit - 1
    if len(tokens) >= limit:
        raise ValueError(f"prompts: expected fewer than {limit} tokens (the model's context), got {len(tokens)}")
    return limit - len(tokens)


def _limits(model: Decoder | Transformer, max_new_tokens: int, stop: Any) -> Limits:
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected a whole number of at least 1, got {max_new_tokens!r}")
    given = (stop,) if isinstance(stop, str | int) else tuple(stop)
    most = model.config.target_size if isinstance(model, Transformer) else model.config.vocabulary_size
    for one in given:
        if isinstance(one, bool) or not isinstance(one, str | int) or one == "":
            raise ValueError(f"stop: expected texts and tokens, got {one!r}")
        if isinstance(one, int) and not 0 <= one < most:
            raise ValueError(f"stop: expected tokens from 0 to {most - 1}, got {one}")
    ends = set(model.config.end_tokens)
    if model.tokenizer is not None and model.tokenizer.eos is not None:
        ends.add(model.tokenizer.eos)
    return Limits(
        max_new_tokens=max_new_tokens,
        ends=frozenset(ends),
        stop_tokens=frozenset(one for one in given if isinstance(one, int)),
        stop_strings=tuple(one for one in given if isinstance(one, str)),
    )


def _check_counts(n: int, beams: int, length_penalty: float, sampling: Sampling) -> None:
    for name, value in (("n", n), ("beams", beams)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if not isinstance(length_penalty, int | float) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty: expected a finite number, got {length_penalty!r}")
    if beams > 1 and not sampling.greedy:
        raise ValueError(f"beams: expected 1 with a temperature, which draws and does not search, got {beams}")
    if beams > 1 and sampling.repetition_penalty != 1:
        raise ValueError(f"beams: expected 1 with a repetition penalty, got {beams}")
    if beams > 1 and n > beams:
        raise ValueError(f"n: expected at most {beams} (beams), got {n}")


def _seeds(seed: Any, count: int, n: int) -> list[list[int]]:
    """A seed for each sample of each prompt."""
    if seed is None:
        bases = [int(torch.randint(2**62, ())) for _ in range(count)]
    elif isinstance(seed, int) and not isinstance(seed, bool):
        bases = [seed] * count
    else:
        bases = list(seed)
        if len(bases) != count or not all(type(one) is int for one in bases):
            raise ValueError(f"seed: expected a whole number, or one for each of {count} prompts, got {seed!r}")
    if any(not 0 <= one < 2**63 for one in bases):
        raise ValueError(f"seed: expected whole numbers from 0 to 2**63 - 1, got {seed!r}")
    return [[(base + sample * 0x9E3779B97F4A7C15) % 2**63 for sample in range(n)] for base in bases]


def _row(
    model: Decoder | Transformer, tokens: tuple[int, ...], room: int, seed: int, limits: Limits, scored: bool
) -> Row:
    # A source is another text than the target, so its tokens are no repetitions.
    before = () if isinstance(model, Transformer) else tokens
    generator = torch.Generator().manual_seed(seed)
    writer = Writer(model.tokenizer, limits.stop_strings)
    return Row(before, room, generator, writer, [] if scored else None)
