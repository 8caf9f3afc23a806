"""Softmax within a window, causality and padding on a GPU, in Triton: only visible keys are read, no mask is made."""

import torch
from torch import Tensor

from regard.call import Call, Path
from regard.eager import untouched
from regard.paths import gpu


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    return gpu.missing(call) or unfit(call)


def unfit(call: Call) -> str | None:
    """Why the kernels cannot compute a call, wherever it is; None if they can."""
    return gpu.unfit(call)


def run(call: Call) -> Tensor:
    """tiles of queries with the keys that they see, in Triton: windows, causality and padding without a mask."""
    # Triton is imported only where it is used.
    from regard.kernels import band_attention

    q, scale = gpu.scaled(call)
    k, v = call.k, call.v
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    before, after, bounds = call.structure.before, call.structure.after, gpu.bounds(call)
    if untouched() and not torch.is_grad_enabled():
        return band_attention.forward(band_attention.Work(q, k, v, bounds, scale, before, after))[0]
    return band_attention.band(q, k, v, bounds, scale, before, after)[0]


PATH = Path("band", cannot, run, guards_itself=True)
