"""The exact weights of chosen query rows and heads; no others are computed."""

import torch
from torch import Tensor

from regard.core.calls.call import Call, in_own_dtype
from regard.core.masks.guard import bad_keys, cleaned
from regard.core.masks.structure import EVERYTHING
from regard.core.user_code import weigh


def weights(call: Call, rows: list[int] | None, heads: list[int] | None) -> Tensor:
    """Weights (B, heads, rows, S) between queries and keys, by the mechanism's plain formula."""
    if call.mechanism.ordered and (
        rows is not None or heads is not None
    ):  # its weights depend on the index of a token and head
        return choose_scores(weights(call, None, None), rows, heads)
    bad = None if call.structure is EVERYTHING else bad_keys(call.k, call.k)
    q, k, bias, repeats = call.q, cleaned(call.k, bad), call.bias, call.heads // call.groups
    every_row = range(call.queries) if rows is None else rows
    every_head = list(range(call.heads)) if heads is None else heads
    size = (call.batch, len(every_head), len(every_row), call.keys)
    if 0 in size:
        return q.new_zeros(size) + q[..., :0].sum() + k[..., :0].sum()
    visible = _visible(call, every_row)
    if visible is not None and visible.shape[1] > 1:
        visible = visible[:, every_head]
    if bias is not None:
        bias = choose_scores(bias.expand(call.batch, call.heads, call.queries, call.keys), rows, heads)
    # For chosen heads, take the key head of each query head; without a choice, groups stay whole.
    if heads is not None:
        q, k = q[:, heads], k[:, [head // repeats for head in heads]]
    q = q if rows is None else q[:, :, rows]
    with in_own_dtype(q):
        result = weigh(call.mechanism, q, k, visible, bias).to(q.dtype)
    if bad is None:
        return result
    flags = bad.repeat_interleave(repeats, dim=1)[:, every_head, None]
    spoiled = flags if visible is None else flags & visible
    return result.masked_fill(spoiled.any(-1, keepdim=True), torch.nan)


def choose_scores(table: Tensor, rows: list[int] | None, heads: list[int] | None) -> Tensor:
    """Chosen rows and heads of a table (B, H, T, S); None is all of them."""
    table = table if heads is None else table[:, heads]
    return table if rows is None else table[:, :, rows]


def _visible(call: Call, rows: range | list[int]) -> Tensor | None:
    if call.mask is None:
        return None
    place = torch.tensor(rows, dtype=torch.long) + call.keys - call.queries
    return call.mask.at(call.batch, call.heads, place, torch.arange(call.keys), call.q.device)
