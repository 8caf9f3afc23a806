"""Sequences that grow together, one token each at a step, and leave when they are done.

What a sequence becomes depends on its prompt, its options and its seed alone: it is padded by masks, drawn for by its
own generator, and neither a neighbour that ends early nor one that goes on changes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.generation.prompt import Prompt
from regard.generation.sampling import Sampling
from regard.generation.text import Writer
from regard.models.decoder import Decoder
from regard.models.transformer import Transformer

FEW = 0.75
"""The share of a batch that must be left for it to stay as it is; below, the rest is taken out, which copies the state
once."""


class Generated(str):
    """Generated text, with what it is made of.

    >>> from regard.generation.engine import Generated
    >>> found = Generated("Paris.", tokens=[7, 8], reason="end")
    >>> found, found.tokens, found.reason
    ('Paris.', [7, 8], 'end')
    """

    tokens: list[int]
    """The new tokens, the one that ended it included."""
    reason: str
    """Why it ended: `end` (a token that ends), `stop` (a stop string or token), `length`, or `context`."""
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


@dataclass(eq=False)
class Row:
    """One sequence on its way."""

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
        ends = "end" if token in limits.ends else "stop" if token in limits.stop_tokens else None
        if ends is not None:
            self.writer.tokens.append(token)  # it ends the text and is no part of it
            self.reason = ends
            self.piece = self._rest(without=1)
            return
        self.piece = self.writer.add(token)
        if self.writer.stopped:
            self.reason = "stop"
        elif len(self.writer.tokens) >= min(limits.max_new_tokens, self.room):
            self.reason = "length" if limits.max_new_tokens <= self.room else "context"
            self.piece += self.writer.finish()

    def _rest(self, without: int) -> str:
        kept = self.writer.tokens[len(self.writer.tokens) - without :]
        del self.writer.tokens[len(self.writer.tokens) - without :]
        piece = self.writer.finish()
        self.writer.tokens += kept
        return piece

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
    >>> from regard.generation.engine import Growth, Limits
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2))
    >>> growth = Growth(model, rg.prefill(model, [[1, 2]], room=3), [], Sampling(), Limits(max_new_tokens=3))
    >>> growth.reached.length
    2
    """

    def __init__(
        self,
        model: Decoder | Transformer,
        prompt: Prompt,
        rows: Sequence[Row],
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self.model, self.sampling, self.limits = model, sampling, limits
        self.active = list(rows)
        self.reached = prompt
        """What the model has read: the prompts and all new tokens but those of the last step."""

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
        chosen = _choose(self.reached.logits, self.active, self.sampling)
        for row, token in zip(self.active, chosen, strict=True):
            if row.reason is None:
                row.take(token, self.limits)

    def _read(self, left: list[int]) -> None:
        if len(left) <= FEW * len(self.active):
            self.active, self.reached = [self.active[at] for at in left], self.reached.chosen(left)
        newest = [row.writer.tokens[-1] for row in self.active]
        tokens = torch.tensor(newest, device=self.reached.logits.device)[:, None]
        hidden, state = self.model.advance(tokens, self.reached.state)
        met = tuple((*one, token) for one, token in zip(self.reached.tokens, newest, strict=True))
        self.reached = Prompt(state, met, self.model.predict(hidden)[:, 0])


def _choose(logits: Tensor, rows: Sequence[Row], sampling: Sampling) -> list[int]:
    """The next token of each row; what rows that have ended get does not matter."""
    if sampling.greedy and sampling.repetition_penalty == 1:
        chosen = logits.argmax(-1).tolist()
    else:
        chosen = [0] * len(rows)
        for at, row in enumerate(rows):
            if row.reason is None:
                own = sampling.penalised(logits[at], (*row.prompt, *row.writer.tokens))
                chosen[at] = int(own.argmax()) if sampling.greedy else sampling.draw(own, row.generator)
    if any(row.log_probabilities is not None for row in rows):
        scores = logits.double().log_softmax(-1)
        for at, row in enumerate(rows):
            if row.log_probabilities is not None and row.reason is None:
                row.log_probabilities.append(float(scores[at, chosen[at]]))
    return chosen
