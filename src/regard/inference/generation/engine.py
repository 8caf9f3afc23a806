"""Batched decoding: each step adds one token to every sequence; finished sequences are dropped from the batch.

A sequence depends only on its prompt, its options and its seed: masks hide the padding, each sequence has its own
random generator, and the other sequences in the batch do not change it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.inference.generation.prompt import Prompt
from regard.inference.generation.replay import Reading
from regard.inference.generation.sampling import Sampling
from regard.inference.generation.text import Writer
from regard.models.base import GenerativeModel

FEW = 0.75
"""If at most this share of the batch is unfinished, the finished sequences are dropped, which copies the state once. A
sequence whose context is full is dropped in any case, since there may be no position for another token."""
FEW_REPLAYED = 0.5
"""The same for replayed steps: a new batch needs a new capture, which takes about as long as two steps."""


class Generated(str):
    """Generated text, with its tokens and the reason why it ended.

    >>> from regard.inference.generation.engine import Generated
    >>> text = Generated("Paris.", tokens=[7, 8], reason="end")
    >>> text, text.tokens, text.reason
    ('Paris.', [7, 8], 'end')
    """

    tokens: list[int]
    """The new tokens, including the one that ended the text."""
    reason: str
    """Why it ended: `stop` (a stop token, or a stop string, also one that contains the end token), `end` (an end
    token), `length` (max_new_tokens), `context` (the context is full) or `interrupted`."""
    log_probabilities: list[float] | None
    """The log-probability of each token, by the model's logits before temperature, top-k and so on; None unless
    requested."""
    alternatives: list[list[tuple[int, float]]] | None
    """The likeliest tokens of each step and their probabilities, likeliest first; None unless requested."""
    score: float | None
    """The score of a beam: the sum of its log-probabilities, divided by length ** length_penalty."""

    def __new__(
        cls,
        text: str,
        *,
        tokens: Sequence[int],
        reason: str,
        log_probabilities: Sequence[float] | None = None,
        alternatives: Sequence[Sequence[tuple[int, float]]] | None = None,
        score: float | None = None,
    ) -> "Generated":
        generated = super().__new__(cls, text)
        generated.tokens, generated.reason, generated.score = list(tokens), reason, score
        generated.log_probabilities = None if log_probabilities is None else list(log_probabilities)
        generated.alternatives = None if alternatives is None else [list(step) for step in alternatives]
        return generated

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        """The arguments with which `pickle` and `copy` create it again."""
        return (str(self),), dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When sequences end."""

    max_new_tokens: int
    ends: frozenset[int] = frozenset()
    """The model's end tokens."""
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def ending(self, token: int) -> str | None:
        """Why a sequence ends with this token, regardless of its text; None if it goes on."""
        return "end" if token in self.ends else "stop" if token in self.stop_tokens else None

    def taken(self, token: int, writer: Writer) -> tuple[str, str | None]:
        """Pass a sequence's next token to its writer; returns the new text, and why the sequence ends, if it does.

        A stop string that the token completes takes precedence over the token, since it says where the text ends.
        """
        ending = self.ending(token)
        piece = writer.add(token) if ending is None else writer.end(token)
        return piece, "stop" if writer.stopped else ending


@dataclass(eq=False)
class Row:
    """One sequence that is being generated."""

    place: int
    """The index of its result."""
    prompt: tuple[int, ...]
    room: int
    """The number of new tokens that fit the model's context."""
    generator: torch.Generator
    writer: Writer
    log_probabilities: list[float] | None = None
    alternatives: list[list[tuple[int, float]]] | None = None
    most: int = 0
    """How many alternatives of a step are kept."""
    reason: str | None = None
    piece: str = field(default="", init=False)
    """The text that the last step added."""

    def take(self, token: int, limits: Limits) -> None:
        """Append a token and check whether the sequence ends with it."""
        self.piece, self.reason = limits.taken(token, self.writer)
        if self.reason is None and not self.left(limits):
            self.reason = "length" if limits.max_new_tokens <= self.room else "context"
            self.piece += self.writer.finish()

    def left(self, limits: Limits) -> int:
        """How many more tokens it may get."""
        return min(limits.max_new_tokens, self.room) - len(self.writer.tokens)

    def result(self) -> Generated:
        """The text generated so far."""
        return Generated(
            self.writer.text,
            tokens=self.writer.tokens,
            reason=self.reason or "interrupted",
            log_probabilities=self.log_probabilities,
            alternatives=self.alternatives,
        )


class Growth:
    """Generates from prompts until all rows have ended. Each iteration adds one token to every unfinished row.

    >>> import regard as rg
    >>> from regard.inference.generation.engine import Growth, Limits
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2))
    >>> growth = Growth(model, rg.prefill(model, [[1, 2]], room=3), [], Sampling(), Limits(max_new_tokens=3))
    >>> growth.reached.length
    2
    """

    def __init__(
        self,
        model: GenerativeModel,
        prompt: Prompt,
        rows: Sequence[Row],
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self.model, self.sampling, self.limits = model, sampling, limits
        self.active = list(rows)
        self.reading = Reading(model, prompt)

    @property
    def reached(self) -> Prompt:
        """What the model has read: the prompts and all new tokens except those of the last step."""
        return self.reading.prompt

    def __iter__(self) -> "Growth":
        return self

    @torch.inference_mode()
    def __next__(self) -> None:
        """Let the model read the tokens of the last step, then choose the next token of every row."""
        left = [at for at, row in enumerate(self.active) if row.reason is None]
        if not left:
            raise StopIteration
        if self.active[left[0]].writer.tokens:
            self._read(left)
        growing = [at for at, row in enumerate(self.active) if row.reason is None]
        logits = self.reading.logits if len(growing) == len(self.active) else self.reading.logits[growing]
        rows = [self.active[at] for at in growing]
        for row, token in zip(rows, _choose(logits, rows, self.sampling), strict=True):
            row.take(token, self.limits)

    def _read(self, left: list[int]) -> None:
        count = len(self.active[left[0]].writer.tokens)
        few = FEW_REPLAYED if self.reading.replayed else FEW
        if len(left) <= few * len(self.active) or any(row.room < count for row in self.active):
            self.active = [self.active[at] for at in left]
            self.reading.choose(left)
        newest = [row.writer.tokens[-1] for row in self.active]
        self.reading.read(newest, max(row.left(self.limits) for row in self.active))


def _choose(logits: Tensor, rows: Sequence[Row], sampling: Sampling) -> list[int]:
    """The next token of each row. Raises ValueError for logits that are not finite."""
    scores = logits
    if sampling.repetition_penalty != 1:
        seen = [(*row.prompt, *row.writer.tokens) for row in rows]
        scores = torch.stack(
            [sampling.penalised(row_logits, tokens) for row_logits, tokens in zip(logits, seen, strict=True)]
        )
    chosen = scores.argmax(-1) if sampling.greedy else sampling.draw(scores, [row.generator for row in rows])
    # The largest logit is NaN if any is. Reading it together with the tokens synchronises with the device only once.
    tokens, largest = torch.stack([chosen.double(), logits.amax(-1).double()]).tolist()
    for row, value in zip(rows, largest, strict=True):
        if not math.isfinite(value):
            raise not_finite(value, len(row.writer.tokens), row.place)
    if any(row.log_probabilities is not None or row.alternatives is not None for row in rows):
        _keep_probabilities(logits.double().log_softmax(-1), chosen, rows)
    return [int(token) for token in tokens]


def _keep_probabilities(log_probabilities: Tensor, chosen: Tensor, rows: Sequence[Row]) -> None:
    """Add to rows what was asked for of a step: the chosen token's log-probability, and the likeliest tokens."""
    values = log_probabilities.gather(-1, chosen[:, None])[:, 0].tolist()
    most = min(max(row.most for row in rows), log_probabilities.shape[-1])
    likeliest = log_probabilities.topk(most)
    tokens, probabilities = likeliest.indices.tolist(), likeliest.values.exp().tolist()
    for place, row in enumerate(rows):
        if row.log_probabilities is not None:
            row.log_probabilities.append(values[place])
        if row.alternatives is not None:
            row.alternatives.append(list(zip(tokens[place], probabilities[place], strict=True))[: row.most])


def not_finite(value: float, count: int, row: int) -> ValueError:
    """The error for logits with a NaN or an infinity, `count` new tokens into a row."""
    return ValueError(
        f"logits: expected finite numbers, got {value} after {count} new tokens of row {row}; "
        "the model's weights are not finite, or its activations overflow its dtype"
    )
