"""Padding as slices: batch rows that share an interval of real keys are computed together, over those keys only."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from regard.core.calls.call import Call, nothing
from regard.core.masks import Span


def by_interval(call: Call, compute: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]) -> Tensor:
    """`compute(q, k, v, low, high)` for each group of rows whose real keys are [low, high); 0 for rows with none."""
    out = nothing(call, call.queries)
    for (low, high), members in _together(call.structure.rows or ()):
        pick: Any = members if len(members) > 1 else slice(members[0], members[0] + 1)
        if low < high:
            k, v = (t[pick][:, :, low:high] for t in (call.k, call.v))
            out[pick] = compute(call.q[pick], k, v, low, high)
    return out


def _together(rows: tuple[Span, ...]) -> Iterable[tuple[Span, list[int]]]:
    """The intervals, each with its batch rows."""
    if not torch.compiler.is_compiling():
        together: dict[Span, list[int]] = defaultdict(list)
        for row, span in enumerate(rows):
            together[span].append(row)
        return together.items()
    spans: list[Span] = []
    for span in rows:
        if span not in spans:  # compared, not hashed, which would specialise dynamic lengths
            spans.append(span)
    return [(span, [row for row, other in enumerate(rows) if other == span]) for span in spans]
