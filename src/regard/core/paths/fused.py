"""Kernel attention on a GPU by kernels of our own, in Triton: features and scores never reach memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Again, Path, never
from regard.core.eager import recorded
from regard.core.paths import chunked, gpu

LONGEST = 128
"""qk_length, value_length and features, at most."""


ALIGNED = 16
"""Lengths of which multiples are read 16 bytes at a time; others are padded."""


FEW = 256
"""Keys of a sequence up to which all are seen by their scores: similarities that nearly vanish for all of few keys lose
their digits in sums. Those of `Elu` do not vanish, and with causality the keys of a query's own chunk are scores."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := gpu.missing(call)) is not None:
        return reason
    if call.q.dtype == torch.float32 and recorded(call.q, call.k, call.v):
        return "its float32 gradients lose digits where few keys are seen"
    return unfit(call)


def unfit(call: Call) -> str | None:
    """Why the kernels cannot compute a call, wherever it is; None if they can."""
    mechanism: Any = call.mechanism
    if (why := chunked.cannot(call)) is not None:
        return why
    if call.structure.paddings and call.structure.rows is None:
        return "padding with holes"
    form, structure = mechanism.fused_form, call.structure
    if form != "elu" and not structure.causal:
        rows = structure.rows or ((0, call.keys),)
        if any(0 < min(high, call.keys) - low <= FEW for low, high in rows):
            return f"sums over {FEW} keys or fewer lose digits that scores keep"
    length, kind = call.qk_length, call.q.dtype
    if form == "given":
        length = mechanism.feature_length(length)
        derived = recorded(call.q, call.k, call.v) or mechanism.learns(call.qk_length)
        kind = torch.promote_types(kind, torch.float32) if derived else kind
    return too_long(form, kind, length, call.value_length)


def too_long(form: str, dtype: torch.dtype, length: int, value_length: int) -> str | None:
    """Why the kernels cannot compute with features, or for a polynomial with coordinates, of a length; None if they
    can."""
    if dtype == torch.float64:
        return "made for float32 and shorter"
    # Sums of more than 64 features do not fit shared memory in float32, which float16 is computed in too.
    most = LONGEST if form == "square" or dtype == torch.bfloat16 else LONGEST // 2
    return f"more than {most} features, or a longer value" if max(length, value_length) > most else None


def run(call: Call) -> Tensor:
    """fused kernels in Triton: time and memory linear in the length, features in registers alone."""
    from regard.core.kernels import operators

    mechanism: Any = call.mechanism
    limits = gpu.bounds(call)
    q, k, v, form = call.q, call.k, call.v, mechanism.fused_form
    if form == "elu" and call.qk_length % ALIGNED:
        form = "given"  # padding before the map would not be 0 after it
    if form == "given":
        wide = torch.float32 if q.dtype.itemsize < 4 else q.dtype
        bad = ~k.isfinite().all(-1, keepdim=True)  # its features are NaN, and its gradient 0 where nobody sees it
        q, k = (mechanism.summed_features(x.to(wide)) for x in (q, k.masked_fill(bad, 0)))
        if mechanism.fused_form == "given" and recorded(q, k):
            v = v.to(wide)  # similarities that are nearly 0 lose digits in half precision, which gradients need
        q, k = q.to(v.dtype), k.to(v.dtype).masked_fill(bad, torch.nan)
    q, k, v = (aligned(x) for x in (q, k, v))
    if form == "square":
        numbers = *mechanism.coefficients(call.qk_length), call.structure.causal, recorded(q, k, v)
        out = operators.run(operators.square, q, k, v, limits, *numbers)[0]
    else:
        out = operators.run(operators.feature, q, k, v, limits, form, call.structure.causal)[0].to(call.q.dtype)
    return out if v.shape[3] == call.value_length else out[..., : call.value_length]


def aligned(x: Tensor) -> Tensor:
    """Rows of a length and a stride that are read in whole pieces."""
    if (rest := x.shape[3] % ALIGNED) > 0:
        return F.pad(x, (0, ALIGNED - rest))
    return x if x.stride(3) == 1 else x.contiguous()


def again(call: Call) -> Again | None:
    """What runs calls like this one."""
    from regard.core.kernels import feature_attention, square_attention, square_sizes
    from regard.core.kernels.launch import Chain

    mechanism: Any = call.mechanism
    limits, causal, form = gpu.bounds(call), call.structure.causal, mechanism.fused_form
    if call.qk_length % ALIGNED or call.value_length % ALIGNED or not gpu.dense(call) or form == "given":
        return None

    def chained(run: Again) -> Again:
        # Without causality some sums are PyTorch's; long sequences have kernels that run beside others.
        alone = causal and call.q.shape[:3].numel() < square_attention.BESIDE
        return Chain(run, limits) if alone else run

    if form == "square":
        a, b, d = mechanism.coefficients(call.qk_length)
        square = square_sizes.work_of(call.q, call.k, call.v, a, b, d, causal)
        return chained(lambda q, k, v: square_attention.forward(square, q, k, v, limits)[0])
    feature = feature_attention.work_of(call.q, call.k, call.v, form, causal)
    return chained(lambda q, k, v: feature_attention.forward(feature, q, k, v, limits)[0])


PATH = Path("fused", cannot, run, never, again=again)
