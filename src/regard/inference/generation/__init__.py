"""Text from models: `generate`, `stream`, `prefill`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from regard.core.states.key_values import first_room
from regard.inference.generation.beam import search
from regard.inference.generation.engine import Generated, Growth, Row
from regard.inference.generation.prompt import CHUNK, Prompt, fingerprint
from regard.inference.generation.request import (
    begin,
    check_counts,
    check_reading,
    check_single,
    given_tokens,
    limits_of,
    read_prompts,
    seeds_of,
    speaking,
)
from regard.inference.generation.sampling import Sampling
from regard.models.base import Model

__all__ = ["Generated", "Prompt", "Stream", "generate", "prefill", "stream"]

TOGETHER = 256
"""Beams that grow as one batch."""

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
    stop: str | int | Sequence[str | int] | None = None,
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
    the prompts as its source.

    A sequence ends with a token that the model's config or tokenizer names as an end, a token or text of `stop` (None:
    no more), after `max_new_tokens`, or where the context ends. A text of `stop` is cut off, and may have special
    tokens in it, the one that ends the sequence too: its reason is then `stop`. The texts given back have no special
    tokens. Logits that are not finite are a ValueError. `storage` is that of the prompts' state, and a `state` has one.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> both = rg.generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
    >>> both[1] == rg.generate(model, [[4]], max_new_tokens=5)[0], len(both[0].tokens)
    (True, 5)
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    own = speaking(model)
    limits = limits_of(own, max_new_tokens, stop)
    check_counts(n, beams, length_penalty, sampling)
    check_reading(chunk)
    given = given_tokens(own, prompts, state, storage)
    seeds = seeds_of(seed, len(given), n)
    if beams > 1:
        rooms = [own.room_after(len(tokens)) for tokens in given]
        room = first_room(map(len, given), min(max_new_tokens, max(rooms)))
        prompt = state if state is not None else read_prompts(own, given, room, chunk, storage)
        size = max(1, TOGETHER // beams)
        found = []
        for start in range(0, len(given), size):
            part = range(start, min(start + size, len(given)))
            options = {"beams": beams, "length_penalty": length_penalty, "results": n, "places": part}
            some = prompt.chosen(part)
            found += search(own, some, limits, rooms=[rooms[at] for at in part], **options)  # type: ignore[arg-type]
        return [text for texts in found for text in texts]
    growth, rows = begin(
        own,
        given,
        sampling=sampling,
        limits=limits,
        seeds=seeds,
        state=state,
        log_probabilities=log_probabilities,
        chunk=chunk,
        storage=storage,
    )
    for _ in growth:
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
    stop: str | int | Sequence[str | int] | None = None,
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
    own = speaking(model)
    limits = limits_of(own, max_new_tokens, stop)
    check_single(prompt)
    given = given_tokens(own, None if prompt is None else cast(Any, [prompt]), state, storage)
    if len(given) != 1:
        raise ValueError(f"state: expected one prompt to stream from, got {len(given)}")
    own.room_after(len(given[0]))
    check_reading(chunk)
    seeds = seeds_of(seed, 1, 1)

    def ready() -> tuple[Growth, list[Row]]:
        options = {"state": state, "chunk": chunk, "storage": storage}
        return begin(own, given, sampling=sampling, limits=limits, seeds=seeds, **options)  # type: ignore[arg-type]

    return Stream(ready)


class Stream:
    """The pieces of one text, to be iterated over; `text` and `result` are what has come so far.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2))
    >>> pieces = rg.stream(model, [1, 2], max_new_tokens=3)
    >>> len(list(pieces)), len(pieces.result.tokens)
    (3, 3)
    """

    def __init__(self, ready: Callable[[], tuple[Growth, list[Row]]]) -> None:
        self._ready = ready
        self._growth: Growth | None = None
        self._row: Row | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        if self._growth is None or self._row is None:
            self._growth, [self._row] = self._ready()
        while True:
            next(self._growth)
            if self._row.piece:
                return self._row.piece

    def __repr__(self) -> str:
        return f"Stream({self.text!r})"

    @property
    def text(self) -> str:
        return "" if self._row is None else self._row.writer.text

    @property
    def result(self) -> Generated:
        return Generated("", tokens=[], reason="interrupted") if self._row is None else self._row.result()

    def prompt_so_far(self) -> Prompt | None:
        """What the model has read: the prompt and all that came, but the newest token; None if it has not begun."""
        if self._growth is None:
            return None
        reached = self._growth.reached
        return reached if reached.reader else replace(reached, reader=fingerprint(self._growth.model))


def prefill(
    model: Model, prompts: Texts, *, room: int = 0, chunk: int = CHUNK, storage: torch.dtype | None = None
) -> Prompt:
    """Let a model read prompts and keep its state: `generate(model, state=…)` goes on from it as often as wanted.

    `room` is how many more tokens it should have room for, as far as the context allows; more are made room for when
    needed, which copies the state.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> prompt = rg.prefill(model, [[1, 2, 3], [4]])
    >>> [len(text.tokens) for text in rg.generate(model, state=prompt, max_new_tokens=4, n=2)]
    [4, 4, 4, 4]
    """
    own = speaking(model)
    given = given_tokens(own, prompts, None)
    check_reading(chunk, room)
    most = max(own.room_after(len(tokens)) for tokens in given)
    return replace(read_prompts(own, given, min(room, most), chunk, storage), reader=fingerprint(own))
