"""Softmax within windows, causality, padding and packed sequences on a GPU, in Triton: hidden keys are not read."""

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
    return gpu.unfit(call, packed=True)


def run(call: Call) -> Tensor:
    """tiles of queries with the keys that they see, in Triton: windows, causality, padding, packed sequences."""
    # Triton is imported only where it is used.
    from regard.kernels import band_attention

    q, scale = gpu.scaled(call)
    k, v = call.k, call.v
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    before, after, bounds = call.structure.before, call.structure.after, gpu.bounds(call)
    sequences = None if call.structure.rest is None else gpu.parts(call)
    parts = None if sequences is None else gpu.table(sequences, q.device)
    longest = max((length for _, _, length in sequences or ()), default=0)
    if untouched() and not torch.is_grad_enabled():
        return band_attention.forward(band_attention.Work(q, k, v, bounds, scale, before, after, parts, longest))[0]
    return band_attention.band(q, k, v, bounds, parts, scale, before, after, longest)[0]


PATH = Path("band", cannot, run, guards_itself=True)
