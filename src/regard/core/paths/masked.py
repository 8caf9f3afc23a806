"""Many sequence lengths in one fused call under a mask, instead of a call for each length.

Slicing padding off costs one call for each length. On a GPU a call is a kernel launch, and a batch of many lengths
needs hundreds; a decode step on a CPU is so short that a second call takes longer than reading masked keys. Padding
alone is a mask (B, 1, 1, S); with causality it is (B, 1, T, S).
"""

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Path
from regard.core.masks import Span
from regard.core.paths import sdpa, torch_softmax

FEW = 4
"""Up to this many different lengths, slices are faster on a GPU."""
MOST = 1 << 28
"""The most entries a mask may have."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    rows = call.structure.rows
    if rows is None:
        return "made for several lengths of real keys"
    if (reason := sdpa.cannot(call)) is not None:
        return reason
    if call.q.is_cpu and (
        call.structure.positional or not torch_softmax.few(call.q, call.k) or _different(rows, 1) == 1
    ):
        return f"on a CPU made for at most {torch_softmax.MOST_ROWS} query rows per key/value head, and several lengths"
    if not call.q.is_cpu and _different(rows, FEW) <= FEW:
        return f"at most {FEW} different lengths: slices are faster"
    if call.structure.causal and call.batch * call.queries * call.keys > MOST:
        return f"a mask of more than {MOST:,} entries"
    return None


def _different(rows: tuple[Span, ...], most: int) -> int:
    """How many different intervals there are; where there are more than `most`, one more than that."""
    kinds: list[Span] = []
    for span in rows:
        if span not in kinds:  # compared, not hashed, which would specialise dynamic lengths
            kinds.append(span)
        if len(kinds) > most:
            break
    return len(kinds)


def run(call: Call) -> Tensor:
    """one fused scaled_dot_product_attention for all lengths, padding as a mask."""
    valid = call.structure.valid(call.keys, call.q.device)
    assert valid is not None
    shown, scale = valid[:, None, None], sdpa.scale(call)
    rows = call.structure.rows
    if rows is not None and not call.structure.causal and all(low < high for low, high in rows):
        return torch_softmax.plain(call.q, call.k, call.v, scale=scale, attn_mask=shown)
    if call.structure.causal:
        shown = shown & torch.ones(call.queries, call.keys, dtype=torch.bool, device=call.q.device).tril()
    blind = ~shown.any(-1, keepdim=True)  # queries that see no key attend to all keys here, and get 0 below
    return torch_softmax.plain(call.q, call.k, call.v, scale=scale, attn_mask=shown | blind).masked_fill(blind, 0)


PATH = Path("masked", cannot, run)
