"""A few queries over a cache in which every head has its own keys: two matrix products, with the softmax between them.

A fused kernel saves writing the scores. For a few queries the scores are small and its tiles nearly empty, and the
plain products read the keys and values faster.
"""

import torch
from torch import Tensor

from regard.call import Call, Path
from regard.paths import sdpa


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := sdpa.few(call)) is not None:
        return reason
    if call.q.dtype not in (torch.float32, torch.float64):
        return "made for float32 and float64"
    if call.structure.positional or call.structure.paddings:
        return "the mask hides keys"
    return None if call.heads == call.groups else "query heads share keys: they are rows of one tile"


def run(call: Call) -> Tensor:
    """two matrix products and a softmax."""
    q = call.q.reshape(call.batch * call.heads, call.queries, call.qk_length) * sdpa.scale(call)
    k, v = call.k.flatten(0, 1), call.v.flatten(0, 1)
    out = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)
    return out.view(call.batch, call.heads, call.queries, call.value_length)


PATH = Path("products", cannot, run)
