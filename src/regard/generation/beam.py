"""Beam search: the k likeliest beginnings grow together; the best ending wins.

    score = sum of log-probabilities / length ** length_penalty

A penalty of 0 favours short texts, as plain sums do; 1 compares means. With as many beams as there are sequences the
search is exhaustive.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.generation.engine import Generated, Limits
from regard.generation.prompt import Prompt
from regard.generation.text import Writer
from regard.models.decoder import Decoder
from regard.models.transformer import Transformer


@torch.inference_mode()
def search(
    model: Decoder | Transformer,
    prompt: Prompt,
    limits: Limits,
    *,
    beams: int,
    length_penalty: float,
    room: int,
    results: int,
) -> list[Generated]:
    """The best `results` continuations of one prompt, best first."""
    most = min(limits.max_new_tokens, room)
    state, logits = prompt.state, prompt.logits
    alive: list[tuple[float, list[int], list[float]]] = [(0.0, [], [])]
    ended: list[Generated] = []

    def score(total: float, length: int) -> float:
        return total / length**length_penalty

    for step in range(1, most + 1):
        grown = _candidates(alive, logits, 2 * beams)
        rows: list[int] = []
        following: list[tuple[float, list[int], list[float]]] = []
        for total, row, token, one in grown:
            tokens, each = [*alive[row][1], token], [*alive[row][2], one]
            reason = _reason(model, tokens, limits)
            if reason is None and step == most:
                reason = "length" if limits.max_new_tokens <= room else "context"
            if reason is not None:
                text = _text(model, tokens, reason, limits)
                ended.append(
                    Generated(text, tokens=tokens, reason=reason, log_probabilities=each, score=score(total, step))
                )
            elif len(following) < beams:
                following.append((total, tokens, each))
                rows.append(row)
        ended = sorted(ended, key=lambda one: -(one.score or 0.0))[: max(beams, results)]
        # The best any living beam can still become: log-probabilities only fall, so it is its sum over some length.
        reach = max((max(score(total, step + 1), score(total, most)) for total, _, _ in following), default=None)
        if reach is None or (len(ended) >= max(beams, results) and (ended[-1].score or 0.0) >= reach):
            break
        alive = following
        state = state.reorder(torch.tensor(rows, device=logits.device))
        newest = torch.tensor([[tokens[-1]] for _, tokens, _ in alive], device=logits.device)
        hidden, state = model.advance(newest, state)
        logits = model.predict(hidden)[:, 0]
    return ended[:results]


def _candidates(
    alive: Sequence[tuple[float, list[int], list[float]]], logits: Tensor, most: int
) -> list[tuple[float, int, int, float]]:
    """The likeliest (sum, beam, token, its log-probability), best first."""
    each = logits.double().log_softmax(-1)
    totals = each + torch.tensor([total for total, _, _ in alive], dtype=torch.float64, device=logits.device)[:, None]
    best, index = totals.flatten().topk(min(most, totals.numel()))
    size = logits.shape[-1]
    return [
        (total, at // size, at % size, float(each[at // size, at % size]))
        for total, at in zip(best.tolist(), index.tolist(), strict=True)
    ]


def _reason(model: Decoder | Transformer, tokens: list[int], limits: Limits) -> str | None:
    if tokens[-1] in limits.ends:
        return "end"
    if tokens[-1] in limits.stop_tokens or (limits.stop_strings and _written(model, tokens, limits).stopped):
        return "stop"
    return None


def _text(model: Decoder | Transformer, tokens: list[int], reason: str, limits: Limits) -> str:
    last = tokens[-1] in limits.ends or tokens[-1] in limits.stop_tokens
    return _written(model, tokens[:-1] if last else tokens, limits).text


def _written(model: Decoder | Transformer, tokens: list[int], limits: Limits) -> Writer:
    writer = Writer(model.tokenizer, limits.stop_strings)
    for token in tokens:
        writer.add(token)
    writer.finish()
    return writer
