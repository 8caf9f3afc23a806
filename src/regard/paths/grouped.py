"""A few queries over a long cache, as two matrix products with all query heads of a group in one tile.

A decode step is bound by reading the keys and values. Each key/value head is read once for all its query heads, as
rows of one matrix product, instead of once per query head.
"""

import torch
from torch import Tensor

from regard.call import Call, Path
from regard.paths import sdpa

MOST_ROWS = 64
"""Query rows per key/value head up to which two plain products beat the fused kernel on a CPU."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := sdpa.unfit(call)) is not None:
        return reason
    if call.bias is not None:
        return "a bias needs the score form"
    if call.q.dtype not in (torch.float32, torch.float64):
        return f"scores in {call.q.dtype} would lose precision"
    if call.q.device.type != "cpu":
        return "made for the CPU"
    rows = call.queries * call.heads // call.groups
    if call.queries > 1 and rows > MOST_ROWS:
        return f"{rows} query rows a group: more than {MOST_ROWS} pay for the fused kernel"
    known = call.structure
    if known.rest is not None or known.before is not None or known.after is not None or known.paddings:
        return f"{call.mask!r} hides keys from some queries"
    return None


def run(call: Call) -> Tensor:
    """two matrix products, all query heads of a group in one tile."""
    rows = call.queries * call.heads // call.groups
    q = call.q.reshape(-1, rows, call.qk_length) * sdpa.scale(call)
    weights = torch.softmax(torch.bmm(q, call.k.flatten(0, 1).transpose(1, 2)), dim=-1)
    return torch.bmm(weights, call.v.flatten(0, 1)).view(call.batch, call.heads, call.queries, call.value_length)


PATH = Path("grouped", cannot, run)
