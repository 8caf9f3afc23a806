"""Many lengths on a GPU: one fused call under a mask, instead of a call for each length.

Slices cost nothing on a CPU; on a GPU each is a launch, and a batch of many lengths is hundreds of them. Padding alone
is a mask of one row a sequence, (B, 1, 1, S); with causality it is (B, 1, T, S).
"""

import torch
from torch import Tensor

from regard.call import Call, Path
from regard.paths import sdpa

FEW = 4
"""Different lengths up to which slices are the faster way."""
MOST = 1 << 28
"""Entries of a mask, at most."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if not call.q.is_cuda:
        return "made for GPUs"
    if (reason := sdpa.cannot(call)) is not None:
        return reason
    if call.structure.rows is None or len(set(call.structure.rows)) <= FEW:
        return f"at most {FEW} different lengths: slices are faster"
    if call.structure.causal and call.batch * call.queries * call.keys > MOST:
        return f"a mask of more than {MOST:,} entries"
    return None


def run(call: Call) -> Tensor:
    """one fused scaled_dot_product_attention for all lengths, padding as a mask."""
    valid = call.structure.valid(call.keys, call.q.device)
    assert valid is not None
    shown = valid[:, None, None]
    if call.structure.causal:
        shown = shown & torch.ones(call.queries, call.keys, dtype=torch.bool, device=call.q.device).tril()
    blind = ~shown.any(-1, keepdim=True)  # queries that see nothing look at everything, and give 0
    out = sdpa.plain(call.q, call.k, call.v, scale=sdpa.scale(call), attn_mask=shown | blind)
    return out.masked_fill(blind, 0)


PATH = Path("masked", cannot, run)
