"""A few queries over a long cache, all query heads of a group as rows of one tile.

A decode step is bound by reading the keys and values. With the heads of a group as rows of one query, each key/value
head is read once for all of them, instead of once for each. Padding is a mask of one row a sequence, (B, 1, 1, S).
"""

import torch
from torch import Tensor

from regard.call import Call, Path
from regard.paths import sdpa


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := sdpa.few(call)) is not None:
        return reason
    if call.heads == call.groups and call.q.dtype not in (torch.float32, torch.float64):
        return "every head has keys of its own: nothing to group"
    if call.structure.positional:
        return "the mask hides keys from some queries"
    return None


def run(call: Call) -> Tensor:
    """all query heads of a group in one tile, keys and values read once."""
    valid = call.structure.valid(call.keys, call.q.device)
    if valid is None:
        return _tiles(call, None)
    if call.structure.rows is not None and all(low < high for low, high in call.structure.rows):
        return _tiles(call, valid[:, None, None])
    empty = ~valid.any(-1)[:, None, None, None]
    return _tiles(call, valid[:, None, None] | empty).masked_fill(empty, 0)


def _tiles(call: Call, shown: Tensor | None) -> Tensor:
    batch, groups = call.batch, call.groups
    rows = call.queries * call.heads // groups
    # One tile a group; a single group is halved, so that two cores have work.
    tiles = groups * (2 if batch * groups == 1 and rows % 2 == 0 else 1)
    q = call.q.reshape(batch, tiles, groups * rows // tiles, call.qk_length)
    out = sdpa.plain(q, call.k, call.v, scale=sdpa.scale(call), attn_mask=shown)
    return out.reshape(batch, call.heads, call.queries, call.value_length)


PATH = Path("grouped", cannot, run)
