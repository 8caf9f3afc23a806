"""Beam search: the k likeliest beginnings grow together; the best ending wins.

    score = sum of log-probabilities / length ** length_penalty

A penalty of 0 favours short texts, as plain sums do; 1 compares means. With as many beams as there are sequences the
search is exhaustive.
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
    """A sequence among the likeliest, or one that has ended."""

    total: float
    """The sum of its log-probabilities."""
    tokens: list[int]
    log_probabilities: list[float]
    writer: Writer | None
    """Its text, in which stop strings are looked for; None if there are none."""
    reason: str | None = None
    """Why it has ended."""


Candidate = tuple[float, int, int, float]
"""A beam with one more token: the sum, which beam, the token, its log-probability."""


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

    `rooms` are the new tokens each has room for, `places` what errors call it.

    The beams of all prompts are one batch; a prompt whose search is over leaves it.
    """
    searches = [
        _Search(model, limits, place, min(limits.max_new_tokens, room), room, beams, length_penalty, results)
        for place, room in zip(places, rooms, strict=True)
    ]
    active, state, logits = list(searches), prompt.state, prompt.logits
    while True:
        rows: list[int] = []
        start = 0
        for one, grown in zip(active, _candidates([one.alive for one in active], logits, 2 * beams), strict=True):
            count = len(one.alive)
            rows += [start + row for row in one.grow(grown)]
            start += count
        active = [one for one in active if one.alive]
        if not active:
            return [one.results() for one in searches]
        left = max(one.most - len(one.alive[0].tokens) for one in active)
        state = with_room(state.reorder(torch.tensor(rows, device=logits.device)), 1, left)
        newest = torch.tensor([[beam.tokens[-1]] for one in active for beam in one.alive], device=logits.device)
        hidden, state = model.advance(newest, state)
        logits = model.predict(hidden)[:, 0]


@dataclass(eq=False)
class _Search:
    """The search of one prompt."""

    model: GenerativeModel
    limits: Limits
    place: int
    most: int
    """New tokens it may have."""
    room: int
    """New tokens the context has room for."""
    beams: int
    length_penalty: float
    wanted: int
    """Texts to give back."""
    alive: list[Beam] = field(init=False)
    """Beams that go on; none once the search is over."""
    ended: list[Beam] = field(default_factory=list)
    """The best of those that do not, best first."""

    def __post_init__(self) -> None:
        stop = self.limits.stop_strings
        self.alive = [Beam(0.0, [], [], Writer(self.model.tokenizer, stop) if stop else None)]

    def grow(self, grown: Sequence[Candidate]) -> list[int]:
        """Go on with the best candidates; gives which beam each of those that now live was."""
        step, most = len(self.alive[0].tokens) + 1, self.most
        if math.isnan(grown[0][0]):  # the largest sum: NaN if any logit is NaN, or the largest one is infinite
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
        # The best any living beam can still become: log-probabilities only fall, so it is its sum over some length.
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
        """What an ended beam has become; without stop strings nobody has written its text yet."""
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
    """The likeliest candidates of each search, best first; its beams are neighbours in `logits`."""
    size, widest = logits.shape[-1], max(map(len, searches))
    owner = [(which, place) for which, alive in enumerate(searches) for place in range(len(alive))]
    which, place = torch.tensor(owner, device=logits.device).unbind(-1)
    each = logits.new_zeros(len(searches), widest, size, dtype=torch.float64)
    each[which, place] = logits.double().log_softmax(-1)
    sums = each.new_full((len(searches), widest, 1), -torch.inf)
    totals = [[beam.total] for alive in searches for beam in alive]
    sums[which, place] = torch.tensor(totals, dtype=torch.float64, device=logits.device)
    best, index = (sums + each).flatten(1).topk(min(most, widest * size))
    own = each.flatten(1).gather(1, index)
    return [
        [
            (total, at // size, at % size, one)
            for total, at, one in zip(totals, places, ones, strict=True)
            if at // size < len(alive)
        ]
        for alive, totals, places, ones in zip(searches, best.tolist(), index.tolist(), own.tolist(), strict=True)
    ]
