"""A few queries over a long cache on a GPU, in Triton: all query heads of a group in one tile, the keys split."""

from typing import Any

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Again, Path, Stepped, never
from regard.core.eager import recorded, untouched
from regard.core.masks.structure import Structure
from regard.core.paths import gpu, sdpa, torch_softmax


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if (reason := gpu.missing(call) or unfit(call)) is not None:
        return reason
    if recorded(call.q, call.k, call.v):
        return "it has no derivative"
    return "a trace with gradients enabled may have to derive it" if _traced() else None


def unfit(call: Call) -> str | None:
    """Why the kernel cannot compute a call, wherever it is; None if it can."""
    return beyond(call.structure, call.queries, call.heads // call.groups) or gpu.unfit(call)


def beyond(structure: Structure, queries: int, shared_by: int) -> str | None:
    """Why the kernel cannot take so many queries under a mask of this structure, with each key/value head `shared_by`
    query heads; None if it can."""
    if queries > 1 and queries * shared_by > torch_softmax.MOST_ROWS:
        return f"more than {torch_softmax.MOST_ROWS} query rows a key/value head"
    return None if structure.after in (None, 0) else "made for keys up to each query's own"


def _traced() -> bool:
    return torch.compiler.is_compiling() and torch.is_grad_enabled()


def run(call: Call) -> Tensor:
    """keys split over the whole GPU, each read once for all query heads of its group, in Triton."""
    # Triton is imported only where it is used.
    from regard.core.kernels import decode_attention

    call = call if untouched() else call.widened()  # the operator takes no scales
    q, scale = gpu.scaled(call)
    causal, before = call.structure.causal, call.structure.before
    if untouched():
        return decode_attention.forward(
            q, call.k, call.v, scale, gpu.bounds(call), causal=causal, before=before, scales=call.scales
        )
    return decode_attention.split(q, call.k, call.v, gpu.bounds(call), scale, causal, before)


def again(call: Call) -> Again | None:
    """What runs calls like this one."""
    from regard.core.kernels import decode_attention
    from regard.core.kernels.launch import Chain

    structure, scale = call.structure, sdpa.scale(call)
    if scale == 0 or not gpu.dense(call):
        return None
    bounds = gpu.bounds(call)
    work = decode_attention.work_of(call.q, call.k, call.v, scale, structure.causal, structure.before)
    keys = call.keys
    return Chain(lambda q, k, v: decode_attention.attend(work, q, k, v, keys, bounds), bounds)


def step(call: Call, k: Tensor, v: Tensor, before: int | None) -> Stepped | None:
    """What computes calls like this one over a growing state, and stores the key and value of each."""
    from regard.core.kernels import decode_attention
    from regard.core.kernels.launch import Chain

    scale = sdpa.scale(call)
    if scale == 0 or not (gpu.dense(call) and k.stride(3) == v.stride(3) == 1):
        return None
    work = decode_attention.work_of(call.q, call.k, call.v, scale, False, before, None, (k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        return decode_attention.attend(work, q, keys, values, length, new=(k, v))

    chains: dict[int, Chain] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        planned = decode_attention.planned(length)
        if (chain := chains.get(planned)) is None:
            chain = chains.setdefault(planned, Chain(attend))
        return chain(q, k, v, keys, values, number=length)

    return run


PATH = Path("split", cannot, run, never, reads_int8=True, step=step, again=again)


def scale(mechanism: Any, qk_length: int) -> float | None:
    """The scale with which softmax kernels of ours compute a mechanism; None if they do not."""
    return mechanism.sdpa_scale(qk_length) if PATH in mechanism.paths() else None
