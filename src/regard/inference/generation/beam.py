"""Beam search: keep the k most likely beginnings at each step, and return the best finished sequences.

    score = sum of log-probabilities / length ** length_penalty

A penalty of 0 compares sums, which favours short texts; 1 compares means. With as many beams as there are sequences
the search is exhaustive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inference.generation.engine import Generated, Limits, not_finite
from regard.inference.generation.prompt import Prompt, with_room
from regard.inference.generation.text import Writer
from regard.models.base import GenerativeModel


class Beam(NamedTuple):
    """One of the most likely sequences, unfinished or finished."""

    total: float
    """The sum of its log-probabilities."""
    tokens: list[int]
    log_probabilities: list[float]
    writer: Writer | None
    """Its text, to search for stop strings; None if there are no stop strings."""
    reason: str | None = None
    """Why it ended; None while it is unfinished."""


Candidate = tuple[float, int, int, float]
"""A beam with one more token: its sum, the index of the beam, the token, the token's log-probability."""


@torch.inference_mode()
def search(
    model: GenerativeModel,
    prompt: Prompt,
    limits: Limits,
    *,
    beams: int,
    length_penalty: float,
    rooms: Sequence[int],
    places: Sequence[int],
    results: int,
) -> list[list[Generated]]:
    """The best `results` continuations of each prompt, best first.

    `rooms` are the numbers of new tokens that fit each prompt's context, `places` the prompts' numbers in errors.

    The beams of all prompts are one batch; a prompt whose search is over is dropped from it.
    """
    searches = [
        _Search(model, limits, place, min(limits.max_new_tokens, room), room, beams, length_penalty, results)
        for place, room in zip(places, rooms, strict=True)
    ]
    active, state, logits = list(searches), prompt.state, prompt.logits
    while True:
        rows: list[int] = []
        start = 0
        for prompt_search, grown in zip(
            active, _candidates([prompt_search.alive for prompt_search in active], logits, 2 * beams), strict=True
        ):
            count = len(prompt_search.alive)
            rows += [start + row for row in prompt_search.grow(grown)]
            start += count
        active = [prompt_search for prompt_search in active if prompt_search.alive]
        if not active:
            return [prompt_search.results() for prompt_search in searches]
        left = max(prompt_search.most - len(prompt_search.alive[0].tokens) for prompt_search in active)
        state = with_room(state.reorder(torch.tensor(rows, device=logits.device)), 1, left)
        newest = torch.tensor(
            [[beam.tokens[-1]] for prompt_search in active for beam in prompt_search.alive], device=logits.device
        )
        hidden, state = model.advance(newest, state)
        logits = model.predict(hidden)[:, 0]


@dataclass(eq=False)
class _Search:
    """The beam search of one prompt."""

    model: GenerativeModel
    limits: Limits
    place: int
    most: int
    """The most new tokens that a sequence may have."""
    room: int
    """The number of new tokens that fit the context."""
    beams: int
    length_penalty: float
    wanted: int
    """The number of texts to return."""
    alive: list[Beam] = field(init=False)
    """The unfinished beams; empty once the search is over."""
    ended: list[Beam] = field(default_factory=list)
    """The best finished beams, best first."""

    def __post_init__(self) -> None:
        stop = self.limits.stop_strings
        self.alive = [Beam(0.0, [], [], Writer(self.model.tokenizer, stop) if stop else None)]

    def grow(self, grown: Sequence[Candidate]) -> list[int]:
        """Continue with the best candidates; returns the index of the previous beam for each of the new ones."""
        step, most = len(self.alive[0].tokens) + 1, self.most
        if math.isnan(grown[0][0]):  # the largest sum is NaN if any logit is NaN or the largest logit is infinite
            raise not_finite(math.nan, step - 1, self.place)
        rows: list[int] = []
        following: list[Beam] = []
        for total, row, token, log_probability in grown:
            beam = self._longer(self.alive[row], total, token, log_probability)
            if beam.reason is not None:
                self.ended.append(beam)
            elif len(following) < self.beams:
                following.append(beam)
                rows.append(row)
        kept = max(self.beams, self.wanted)
        self.ended = sorted(self.ended, key=lambda beam: -self._score(beam.total, len(beam.tokens)))[:kept]
        # The best score an unfinished beam can reach: its sum can only fall, so it is this sum over some length.
        ahead = (max(self._score(beam.total, step + 1), self._score(beam.total, most)) for beam in following)
        reach = max(ahead, default=None)
        least = self._score(self.ended[-1].total, len(self.ended[-1].tokens)) if len(self.ended) >= kept else -math.inf
        over = reach is None or least >= reach
        self.alive = [] if over else following
        return [] if over else rows

    def results(self) -> list[Generated]:
        """The best texts."""
        return [self._generated(beam) for beam in self.ended[: self.wanted]]

    def _longer(self, beam: Beam, total: float, token: int, log_probability: float) -> Beam:
        """A beam with one more token."""
        writer = None if beam.writer is None else beam.writer.fork()
        reason = self.limits.ending(token) if writer is None else self.limits.taken(token, writer)[1]
        tokens = [*beam.tokens, token]
        if reason is None and len(tokens) == self.most:
            reason = "length" if self.limits.max_new_tokens <= self.room else "context"
        return Beam(total, tokens, [*beam.log_probabilities, log_probability], writer, reason)

    def _generated(self, beam: Beam) -> Generated:
        """The result of a finished beam; without stop strings its text is decoded only here."""
        writer = beam.writer
        if writer is None:
            writer = Writer(self.model.tokenizer)
            for token in beam.tokens:
                self.limits.taken(token, writer)
        writer.finish()
        assert beam.reason is not None
        return Generated(
            writer.text,
            tokens=beam.tokens,
            reason=beam.reason,
            log_probabilities=beam.log_probabilities,
            score=self._score(beam.total, len(beam.tokens)),
        )

    def _score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty


def _candidates(searches: Sequence[Sequence[Beam]], logits: Tensor, most: int) -> list[list[Candidate]]:
    """The most likely candidates of each search, best first; the beams of a search are adjacent in `logits`."""
    size, widest = logits.shape[-1], max(map(len, searches))
    owner = [(which, place) for which, alive in enumerate(searches) for place in range(len(alive))]
    which, place = torch.tensor(owner, device=logits.device).unbind(-1)
    log_probabilities = logits.new_zeros(len(searches), widest, size, dtype=torch.float64)
    log_probabilities[which, place] = logits.double().log_softmax(-1)
    sums = log_probabilities.new_full((len(searches), widest, 1), -torch.inf)
    totals = [[beam.total] for alive in searches for beam in alive]
    sums[which, place] = torch.tensor(totals, dtype=torch.float64, device=logits.device)
    best, index = (sums + log_probabilities).flatten(1).topk(min(most, widest * size))
    chosen = log_probabilities.flatten(1).gather(1, index)
    return [
        [
            (total, at // size, at % size, log_probability)
            for total, at, log_probability in zip(totals, places, chosen_values, strict=True)
            if at // size < len(alive)
        ]
        for alive, totals, places, chosen_values in zip(
            searches, best.tolist(), index.tolist(), chosen.tolist(), strict=True
        )
    ]
