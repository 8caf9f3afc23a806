"""PyTorch's fused scaled_dot_product_attention (SDPA), one call for all queries, never with a dense mask.

No mask and causal are one call. Padding becomes slices: batch rows with the same interval of real keys are computed
together, over those keys only, so padding costs nothing and cannot leak.
"""

from typing import Any

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Path, between_queries
from regard.core.eager import transformed
from regard.core.paths.rows import by_interval
from regard.core.paths.torch_softmax import plain


def unfit(call: Call) -> str | None:
    """Why SDPA cannot compute this mechanism under any mask; None if it can."""
    if transformed():
        return "torch.func transforms and forward-mode differentiation need plain operators"
    return "SDPA does not compute this mechanism" if _scale(call) is None else None


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := not_intervals(call)) is not None:
        return reason
    if call.structure.causal and not call.square:
        return "SDPA aligns is_causal to the first key, not the last, when T and S differ"
    return None


def not_intervals(call: Call) -> str | None:
    """Why a call is not softmax over one interval of keys per batch row, causal or not; None if it is."""
    structure = call.structure
    if (reason := unfit(call)) is not None:
        return reason
    if call.bias is not None:
        return "a bias needs the score form"
    if structure.rest is not None:
        return "a mask that is not a band of positions would need a dense mask"
    if structure.windowed:
        return "a window would need a dense mask"
    if structure.paddings and structure.rows is None:
        return "padding with holes would need a dense mask"
    return None


def run(call: Call) -> Tensor:
    """one fused scaled_dot_product_attention, no dense mask."""
    if call.structure.rows is None:
        return plain(call.q, call.k, call.v, scale=scale(call), is_causal=call.structure.causal)

    def rows(q: Tensor, k: Tensor, v: Tensor, low: int, high: int) -> Tensor:
        if not call.structure.causal:
            return plain(q, k, v, scale=scale(call))
        # Causal here means T = S: queries before `low` see no key, those from `high` on see every real key.
        before = q.new_zeros(*q.shape[:2], low, v.shape[-1])
        inside = plain(q[:, :, low:high], k, v, scale=scale(call), is_causal=True)
        after = plain(q[:, :, high:], k, v, scale=scale(call))
        return torch.cat([before, inside, after], dim=2)

    return by_interval(call, rows)


def scale(call: Call) -> float:
    """What SDPA multiplies the scores by for this mechanism."""
    factor = _scale(call)
    assert factor is not None
    return factor


def _scale(call: Call) -> float | None:
    mechanism: Any = call.mechanism  # a mechanism that lists this path
    return mechanism.sdpa_scale(call.qk_length)


PATH = Path("sdpa", cannot, run, between_queries)
