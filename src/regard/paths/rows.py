"""Padding as slices: batch rows that share an interval of real keys are computed together, over those keys only."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.call import Call, nothing
from regard.mask import Span


def by_interval(call: Call, compute: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]) -> Tensor:
    """`compute(q, k, v, low, high)` for each group of rows whose real keys are [low, high); 0 for rows with none."""
    together: dict[Span, list[int]] = defaultdict(list)
    for row, span in enumerate(call.structure.rows or ()):
        together[span].append(row)
    out = nothing(call, call.queries)
    for (low, high), members in together.items():
        pick: Any = members if len(members) > 1 else slice(members[0], members[0] + 1)
        if low < high:
            k, v = (t[pick][:, :, low:high] for t in (call.k, call.v))
            out[pick] = compute(call.q[pick], k, v, low, high)
    return out
