"""Text generation: `generate`, `stream`, `prefill`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from regard.core.states.key_values import first_room
from regard.inference.generation.beam import search
from regard.inference.generation.engine import Generated, Growth, Row
from regard.inference.generation.prompt import CHUNK, Prompt, fingerprint
from regard.inference.generation.request import (
    as_generative,
    begin,
    check_counts,
    check_reading,
    check_single,
    checked_prompts,
    limits_of,
    read_prompts,
    seeds_of,
)
from regard.inference.generation.sampling import Sampling
from regard.models.base import Model

__all__ = ["Generated", "Prompt", "Stream", "generate", "prefill", "stream"]

TOGETHER = 256
"""The largest number of beams that are computed as one batch."""

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
    alternatives: int = 0,
    chunk: int = CHUNK,
    storage: torch.dtype | None = None,
) -> list[Generated]:
    """Continue prompts: texts, lists of tokens, or prompts that were read before (`state`, from `prefill`).

    Returns one text per prompt, or `n` consecutive ones. A text is a `str` with its `tokens` and the `reason` why it
    ended. Decoding is greedy unless `temperature` is above 0. Prompts of different lengths are one batch, and each
    gives the same result as alone: `seed` seeds every sequence separately (and its n-th sample by the n-th seed). A
    prompt is read once for all its samples. `beams` above 1 is beam search. For an encoder-decoder the prompts are the
    source.

    A sequence ends at an end token of the model's config or tokenizer, at a token or text in `stop`, after
    `max_new_tokens`, or when the context is full. A stop text is cut off. It may contain special tokens, also the end
    token; the reason is then `stop`. Returned texts have no special tokens. Logits that are not finite raise
    ValueError. `log_probabilities` keeps that of every token, and `alternatives` so many of the likeliest tokens of
    every step with their probabilities, both by the model's logits before temperature, top-k and so on. `storage` is
    the dtype of the prompts' KV cache (torch.int8 or None); a `state` has its storage already.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> both = rg.generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
    >>> both[1] == rg.generate(model, [[4]], max_new_tokens=5)[0], len(both[0].tokens)
    (True, 5)
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    generative = as_generative(model)
    limits = limits_of(generative, max_new_tokens, stop)
    check_counts(n, beams, length_penalty, sampling, alternatives)
    check_reading(chunk)
    token_lists = checked_prompts(generative, prompts, state, storage)
    seeds = seeds_of(seed, len(token_lists), n)
    if beams > 1:
        rooms = [generative.room_after(len(tokens)) for tokens in token_lists]
        room = first_room(map(len, token_lists), min(max_new_tokens, max(rooms)))
        prompt = state if state is not None else read_prompts(generative, token_lists, room, chunk, storage)
        size = max(1, TOGETHER // beams)
        beam_results = []
        for start in range(0, len(token_lists), size):
            part = range(start, min(start + size, len(token_lists)))
            options = {"beams": beams, "length_penalty": length_penalty, "results": n, "places": part}
            some = prompt.chosen(part)
            beam_results += search(generative, some, limits, rooms=[rooms[at] for at in part], **options)  # type: ignore[arg-type]
        return [text for texts in beam_results for text in texts]
    growth, rows = begin(
        generative,
        token_lists,
        sampling=sampling,
        limits=limits,
        seeds=seeds,
        state=state,
        log_probabilities=log_probabilities,
        alternatives=alternatives,
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
    """Continue one prompt as `generate` does, and give the text piece by piece; pieces never split a character.

    The arguments are checked now; the model runs while the pieces are iterated over. `text` is the text so far, so an
    interrupted stream loses nothing.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> "".join(rg.stream(model, [1, 2], max_new_tokens=3)) == rg.generate(model, [[1, 2]], max_new_tokens=3)[0]
    True
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    generative = as_generative(model)
    limits = limits_of(generative, max_new_tokens, stop)
    check_single(prompt)
    token_lists = checked_prompts(generative, None if prompt is None else cast(Any, [prompt]), state, storage)
    if len(token_lists) != 1:
        raise ValueError(f"state: expected one prompt to stream from, got {len(token_lists)}")
    generative.room_after(len(token_lists[0]))
    check_reading(chunk)
    seeds = seeds_of(seed, 1, 1)

    def ready() -> tuple[Growth, list[Row]]:
        options = {"state": state, "chunk": chunk, "storage": storage}
        return begin(generative, token_lists, sampling=sampling, limits=limits, seeds=seeds, **options)  # type: ignore[arg-type]

    return Stream(ready)


class Stream:
    """An iterator over the pieces of one text; `text` and `result` are what was generated so far.

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
        """What the model has read: the prompt and all new tokens except the last; None before the first piece."""
        if self._growth is None:
            return None
        reached = self._growth.reached
        return reached if reached.reader else replace(reached, reader=fingerprint(self._growth.model))


def prefill(
    model: Model, prompts: Texts, *, room: int = 0, chunk: int = CHUNK, storage: torch.dtype | None = None
) -> Prompt:
    """Read prompts and keep the model's state (a prompt cache): `generate(model, state=…)` can use it many times.

    `room` is the number of new tokens to allocate room for, up to the context length. For more tokens the state is
    copied when they come.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> prompt = rg.prefill(model, [[1, 2, 3], [4]])
    >>> [len(text.tokens) for text in rg.generate(model, state=prompt, max_new_tokens=4, n=2)]
    [4, 4, 4, 4]
    """
    generative = as_generative(model)
    token_lists = checked_prompts(generative, prompts, None)
    check_reading(chunk, room)
    most = max(generative.room_after(len(tokens)) for tokens in token_lists)
    return replace(
        read_prompts(generative, token_lists, min(room, most), chunk, storage), reader=fingerprint(generative)
    )
