"""Softmax within windows, causality, padding and packed sequences on a GPU, in Triton: hidden keys are not read."""

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Again, Path, never
from regard.core.eager import kept, untouched
from regard.core.paths import gpu, sdpa


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    return gpu.missing(call) or unfit(call)


def unfit(call: Call) -> str | None:
    """Why the kernels cannot compute a call, wherever it is; None if they can."""
    return gpu.unfit(call, packed=True)


def run(call: Call) -> Tensor:
    """tiles of queries with the keys that they see, in Triton: windows, causality, padding, packed sequences."""
    # Triton is imported only where it is used.
    from regard.core.kernels import band_attention

    q, scale = gpu.scaled(call)
    q, k, v = gpu.unit_strides(q, call.k, call.v)
    structure, bounds = call.structure, gpu.bounds(call)
    parts, longest = None, 0
    if structure.rest is not None:
        parts, longest = _packed(gpu.parts(call) or (), q.device)
    if untouched() and not torch.is_grad_enabled():
        work = band_attention.work_of(q, k, v, scale, structure.before, structure.after, bounds, parts, longest)
        return band_attention.forward(work, q, k, v, bounds, parts)[0]
    return band_attention.band(q, k, v, bounds, parts, scale, structure.before, structure.after, longest)[0]


@kept(256)
def _packed(sequences: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, int]:
    """Packed sequences on the device, the longest first, so that none of them is begun when the others are done; and
    its length."""
    ordered = tuple(sorted(sequences, key=lambda part: -part[2]))
    return gpu.table(ordered, device), ordered[0][2] if ordered else 0


def again(call: Call) -> Again | None:
    """What runs calls like this one."""
    from regard.core.kernels import band_attention

    structure, scale = call.structure, sdpa.scale(call)
    if scale == 0 or structure.rest is not None or not gpu.dense(call):
        return None
    bounds = gpu.bounds(call)
    work = band_attention.work_of(call.q, call.k, call.v, scale, structure.before, structure.after, bounds)
    return lambda q, k, v: band_attention.forward(work, q, k, v, bounds)[0]


PATH = Path("band", cannot, run, never, again=again)
