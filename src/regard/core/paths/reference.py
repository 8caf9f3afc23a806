"""The plain formula, over the dense (T, S) weights: the specification of every other path."""

from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Path
from regard.core.user_code import weigh


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    return None


def run(call: Call) -> Tensor:
    """the plain formula over dense weights: the specification, quadratic in time and memory."""
    visible = None
    if call.mask is not None:
        visible = call.mask.visible(call.batch, call.heads, call.queries, call.keys, call.q.device)
    weights = weigh(call.mechanism, call.q, call.k, visible, call.bias)
    return call.mechanism.mix(weights, call.v, visible).to(call.q.dtype)


PATH = Path("reference", cannot, run)
