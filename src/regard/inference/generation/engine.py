"""Sequences that grow together, one token each at a step, and leave when they are done.

What a sequence becomes depends on its prompt, its options and its seed alone: it is padded by masks, drawn for by its
own generator, and neither a neighbour that ends early nor one that goes on changes it.
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
"""The share of a batch that must be left for it to stay as it is; below, the rest is taken out, which copies the state
once. Rows whose context is full are taken out in any case: there may be no position for another token."""
FEW_REPLAYED = 0.5
"""The same where steps are replayed: another batch is another capture, which takes about as long as two steps."""


class Generated(str):
    """Generated text, with what it is made of.

    >>> from regard.inference.generation.engine import Generated
    >>> found = Generated("Paris.", tokens=[7, 8], reason="end")
    >>> found, found.tokens, found.reason
    ('Paris.', [7, 8], 'end')
    """

    tokens: list[int]
    """The new tokens, the one that ended it included."""
    reason: str
    """Why it ended: `stop` (a stop string, also one that has the end token in it, or a stop token), `end` (a token that
    ends), `length`, or `context`."""
    log_probabilities: list[float] | None
    """Of each token, as the model gave it, before any cut or temperature; None if they were not asked for."""
    score: float | None
    """Of a beam: the sum of its log-probabilities over its length to the power of the penalty."""

    def __new__(
        cls,
        text: str,
        *,
        tokens: Sequence[int],
        reason: str,
        log_probabilities: Sequence[float] | None = None,
        score: float | None = None,
    ) -> "Generated":
        found = super().__new__(cls, text)
        found.tokens, found.reason, found.score = list(tokens), reason, score
        found.log_probabilities = None if log_probabilities is None else list(log_probabilities)
        return found

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        """What `pickle` and `copy` make it of again: a plain str would be made of its text alone."""
        return (str(self),), dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When sequences end."""

    max_new_tokens: int
    ends: frozenset[int] = frozenset()
    """Tokens of the model's that end a sequence."""
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def ending(self, token: int) -> str | None:
        """Why a sequence ends with this token, whatever its text; None if it may go on."""
        return "end" if token in self.ends else "stop" if token in self.stop_tokens else None

    def taken(self, token: int, writer: Writer) -> tuple[str, str | None]:
        """Give a sequence's next token to its writer: the text that is certain now, and why the sequence ends.

        A stop string that the token completes counts before the token: only the string says where the text ends.
        """
        ending = self.ending(token)
        piece = writer.add(token) if ending is None else writer.end(token)
        return piece, "stop" if writer.stopped else ending


@dataclass(eq=False)
class Row:
    """One sequence on its way."""

    place: int
    """Of its result among all."""
    prompt: tuple[int, ...]
    room: int
    """New tokens it may have, by the model's context."""
    generator: torch.Generator
    writer: Writer
    log_probabilities: list[float] | None = None
    reason: str | None = None
    piece: str = field(default="", init=False)
    """Text that the last step made certain."""

    def take(self, token: int, limits: Limits) -> None:
        """Append a token, and see whether it was the last."""
        self.piece, self.reason = limits.taken(token, self.writer)
        if self.reason is None and not self.left(limits):
            self.reason = "length" if limits.max_new_tokens <= self.room else "context"
            self.piece += self.writer.finish()

    def left(self, limits: Limits) -> int:
        """New tokens it may still have."""
        return min(limits.max_new_tokens, self.room) - len(self.writer.tokens)

    def result(self) -> Generated:
        """What it has become so far."""
        return Generated(
            self.writer.text,
            tokens=self.writer.tokens,
            reason=self.reason or "interrupted",
            log_probabilities=self.log_probabilities,
        )


class Growth:
    """Rows growing from prompts until all have ended. Each step of the iteration is one token for every row left.

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
        """What the model has read: the prompts and all new tokens but those of the last step."""
        return self.reading.prompt

    def __iter__(self) -> "Growth":
        return self

    @torch.inference_mode()
    def __next__(self) -> None:
        """Choose a token for every row, first letting the model read those of the step before."""
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
    """The next token of each row. Raises ValueError for logits that are not finite: there is no likeliest token."""
    scores = logits
    if sampling.repetition_penalty != 1:
        seen = [(*row.prompt, *row.writer.tokens) for row in rows]
        scores = torch.stack([sampling.penalised(own, tokens) for own, tokens in zip(logits, seen, strict=True)])
    chosen = scores.argmax(-1) if sampling.greedy else sampling.draw(scores, [row.generator for row in rows])
    # The largest logit is NaN if any is. It comes with the tokens: one wait for the device, not two.
    tokens, largest = torch.stack([chosen.double(), logits.amax(-1).double()]).tolist()
    for row, value in zip(rows, largest, strict=True):
        if not math.isfinite(value):
            raise not_finite(value, len(row.writer.tokens), row.place)
    if any(row.log_probabilities is not None for row in rows):
        found = logits.double().log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
        for row, value in zip(rows, found, strict=True):
            if row.log_probabilities is not None:
                row.log_probabilities.append(value)
    return [int(token) for token in tokens]


def not_finite(value: float, count: int, row: int) -> ValueError:
    """The error for logits with a NaN or an infinity, `count` new tokens into a row."""
    return ValueError(
        f"logits: expected finite numbers, got {value} after {count} new tokens of row {row}; "
        "the model's weights are not finite, or its numbers exceed its dtype"
    )
