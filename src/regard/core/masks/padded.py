"""Which tokens of a history are real, as the history grows and batch rows are reordered."""

from functools import lru_cache

import torch
from torch import Tensor

from regard.core.masks import Padding, Span, padding_of


def reorder_padding(padding: Padding | None, index: Tensor, length: int) -> Padding | None:
    """The padding of reordered batch rows."""
    if padding is None or padding.rows is None:
        return None if padding is None else padding_of(padding.valid(length)[index.cpu()])
    return Padding(tuple(padding.rows[row] for row in index.tolist()), label=padding.label)


def join_padding(
    old: Padding | None, length: int, new: Padding | None, count: int, batch: int, device: torch.device
) -> Padding | None:
    """Which of `length` tokens and `count` more are real; None if all are."""
    if old is None and new is None:
        return None
    old_rows = ((0, length),) * batch if old is None else old.rows
    new_rows = ((0, count),) * batch if new is None else new.rows
    if old_rows is not None and new_rows is not None:
        join = (
            _join_spans if torch.compiler.is_compiling() else _join_spans_once
        )  # torch.compile cannot trace through an lru_cache
        joined = join(old_rows, length, new_rows, count)
        if joined is not None:
            return joined
    parts = [
        torch.ones(batch, n, dtype=torch.bool, device=device) if part is None else part.valid(n, device)
        for part, n in ((old, length), (new, count))
    ]
    return padding_of(torch.cat(parts, dim=1))


def check_taken_in(real: Padding | None, length: int, batch: int, later: Padding | None) -> None:
    """Raise ValueError if the padding of a later mask hides one of the first `length` tokens that were real (`real`)
    when they were appended: they are in the state's sums and cannot be removed."""
    if later is None:
        return
    real = Padding(((0, length),) * batch) if real is None else real
    if (row := _hidden_again(real, length, later)) is not None:
        raise ValueError(
            f"mask: expected padding that leaves the first {length} tokens, which are summed, as they came, "
            f"got one that hides a token of sequence {row}"
        )


def _hidden_again(real: Padding, length: int, later: Padding) -> int | None:
    """The first sequence in which the padding hides a real token."""
    if (
        later.rows is not None and real.rows is not None
    ):  # no tensors: the cost of a step must not grow with its history
        rows = zip(real.rows, later.rows, strict=True)
        return next((row for row, ((a, b), (c, d)) in enumerate(rows) if a < b and not c <= a <= b <= d), None)
    hides = (real.valid(length, "cpu") & ~later.valid(length, "cpu")).any(-1)
    return int(hides.nonzero()[0]) if bool(hides.any()) else None


def _join_spans(old: tuple[Span, ...], length: int, new: tuple[Span, ...], count: int) -> Padding | None:
    """The padding of [old | new] if each row remains one interval, without touching a tensor; otherwise None."""
    spans: list[Span] = []
    for (a, b), (c, d) in zip(old, new, strict=True):
        b, d = min(b, length), min(d, count)
        if c >= d:
            spans.append((a, b))
        elif a >= b:
            spans.append((length + c, length + d))
        elif b == length and c == 0:
            spans.append((a, length + d))
        else:
            return None
    return Padding(tuple(spans), label=f"padding(valid={(len(old), length + count)})")


_join_spans_once = lru_cache(maxsize=64)(_join_spans)
"""Cached: every layer of a model asks the same at each step."""
