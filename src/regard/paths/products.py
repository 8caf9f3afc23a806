"""A few queries over a long cache: two matrix products, with the softmax between them.

A fused kernel saves writing the scores. For a few queries the scores are small and its tiles nearly empty, and the
plain products read the keys and values faster: where every head has its own, and where a cache is too large for the
processor's own memory.
"""

import torch
from torch import Tensor

from regard.call import Call, Path
from regard.paths import sdpa

MOST_ROWS, FEW_ROWS = 64, 4
"""Query rows of a key/value head up to which products pay on a CPU: with a head each, and with a group of them."""
LARGE = 24 << 20
"""Bytes of keys and values that no processor keeps close by: there, a group's products are 1.2 to 1.4 times as fast as
its tile on 2 cores."""


def few(call: Call) -> str | None:
    """Why a call is not a few queries of plain softmax on a CPU; None if it is."""
    if call.queries > 1 and call.queries * (call.heads // call.groups) > MOST_ROWS:
        return f"more than {MOST_ROWS} query rows a key/value head: a tile for each query head is faster"
    if (reason := sdpa.unfit(call)) is not None:
        return reason
    if call.bias is not None:
        return "a bias needs the score form"
    return None if call.q.is_cpu else "made for the CPU"


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := few(call)) is not None:
        return reason
    if call.q.dtype not in (torch.float32, torch.float64):
        return "made for float32 and float64"
    if call.structure.positional or call.structure.paddings:
        return "the mask hides keys"
    repeats = call.heads // call.groups
    if repeats > 1 and (call.queries * repeats > FEW_ROWS or call.groups % 2 or not _large(call)):
        return f"a group is one tile, except up to {FEW_ROWS} rows over an even number of large float32 caches"
    return None


def run(call: Call) -> Tensor:
    """two matrix products and a softmax, for a few queries over a long cache."""
    rows = call.queries * call.heads // call.groups
    q = call.q.reshape(call.batch * call.groups, rows, call.qk_length) * sdpa.scale(call)
    k, v = call.k.flatten(0, 1), call.v.flatten(0, 1)
    if call.heads == call.groups:
        scores = torch.bmm(q, k.transpose(1, 2))
    else:
        scores = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2).contiguous()  # keys first: read as they lie
    out = torch.bmm(torch.softmax(scores, dim=-1), v)
    return out.view(call.batch, call.heads, call.queries, call.value_length)


def _large(call: Call) -> bool:
    return call.q.dtype is torch.float32 and 4 * (call.k.numel() + call.v.numel()) >= LARGE


PATH = Path("products", cannot, run)
