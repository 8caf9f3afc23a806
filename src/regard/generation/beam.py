"""Beam search: the k likeliest beginnings grow together; the best ending wins.

    score = sum of log-probabilities / length ** length_penalty

A penalty of 0 favours short texts, as plain sums do; 1 compares means. With as many beams as there are sequences the
search is exhaustive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.generation.engine import Generated, Limits, not_finite
from regard.generation.prompt import Prompt, with_room
from regard.generation.text import Writer
from regard.models.decoder import Decoder
from regard.models.transformer import Transformer

Beam = tuple[float, list[int], list[float]]
"""The sum of its log-probabilities, its tokens, and the log-probability of each."""
Candidate = tuple[float, int, int, float]
"""A beam with one more token: the sum, which beam, the token, its log-probability."""


@torch.inference_mode()
def search(
    model: Decoder | Transformer,
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
            return [one.ended[:results] for one in searches]
        left = max(one.most - len(one.alive[0][1]) for one in active)
        state = with_room(state.reorder(torch.tensor(rows, device=logits.device)), 1, left)
        newest = torch.tensor([[tokens[-1]] for one in active for _, tokens, _ in one.alive], device=logits.device)
        hidden, state = model.advance(newest, state)
        logits = model.predict(hidden)[:, 0]


@dataclass(eq=False)
class _Search:
    """The search of one prompt."""

    model: Decoder | Transformer
    limits: Limits
    place: int
    most: int
    """New tokens it may have."""
    room: int
    """New tokens the context has room for."""
    beams: int
    length_penalty: float
    results: int
    alive: list[Beam] = field(default_factory=lambda: [(0.0, [], [])])
    """Beams that go on; none once the search is over."""
    ended: list[Generated] = field(default_factory=list)

    def grow(self, grown: Sequence[Candidate]) -> list[int]:
        """Go on with the best candidates; gives which beam each of those that now live was."""
        step, most = len(self.alive[0][1]) + 1, self.most
        if math.isnan(grown[0][0]):  # the largest sum: NaN if any logit is NaN, or the largest one is infinite
            raise not_finite(math.nan, step - 1, self.place)
        rows: list[int] = []
        following: list[Beam] = []
        for total, row, token, one in grown:
            tokens, each = [*self.alive[row][1], token], [*self.alive[row][2], one]
            reason = _reason(self.model, tokens, self.limits)
            if reason is None and step == most:
                reason = "length" if self.limits.max_new_tokens <= self.room else "context"
            if reason is not None:
                text = _text(self.model, tokens, self.limits)
                score = self._score(total, step)
                self.ended.append(Generated(text, tokens=tokens, reason=reason, log_probabilities=each, score=score))
            elif len(following) < self.beams:
                following.append((total, tokens, each))
                rows.append(row)
        wanted = max(self.beams, self.results)
        self.ended = sorted(self.ended, key=lambda one: -(one.score or 0.0))[:wanted]
        # The best any living beam can still become: log-probabilities only fall, so it is its sum over some length.
        ahead = (max(self._score(total, step + 1), self._score(total, most)) for total, _, _ in following)
        reach = max(ahead, default=None)
        over = reach is None or (len(self.ended) >= wanted and (self.ended[-1].score or 0.0) >= reach)
        self.alive = [] if over else following
        return [] if over else rows

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
    totals = [[total] for alive in searches for total, _, _ in alive]
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


def _reason(model: Decoder | Transformer, tokens: list[int], limits: Limits) -> str | None:
    if tokens[-1] in limits.ends:
        return "end"
    if tokens[-1] in limits.stop_tokens or (limits.stop_strings and _written(model, tokens, limits).stopped):
        return "stop"
    return None


def _text(model: Decoder | Transformer, tokens: list[int], limits: Limits) -> str:
    last = tokens[-1] in limits.ends or tokens[-1] in limits.stop_tokens
    return _written(model, tokens[:-1] if last else tokens, limits).text


def _written(model: Decoder | Transformer, tokens: list[int], limits: Limits) -> Writer:
    writer = Writer(model.tokenizer, limits.stop_strings)
    for token in tokens:
        writer.add(token)
    writer.finish()
    return writer
