"""Long sequences in half precision on a Hopper GPU: SDPA by way of cuDNN, 1.5 times as fast there as its other ways.

cuDNN makes a plan for each new shape, which costs more than many calls gain: only round lengths, as training has them,
are worth it. Where it refuses after all, SDPA takes the next of its ways.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from regard.call import Call, Path
from regard.paths import sdpa

LEAST, ROUND = 512, 128
"""Queries from which it pays, and what their number is a multiple of."""
WAYS = (SDPBackend.CUDNN_ATTENTION, *sdpa.UNPLANNED)


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if call.q.device.type != "cuda":
        return "made for GPUs"
    if (reason := sdpa.cannot(call)) is not None:
        return reason
    if call.structure.rows is not None:
        return "padding is slices, of many shapes"
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        return "half precision alone"
    if call.qk_length != call.value_length or call.qk_length % 8 or call.qk_length > 128:
        return "expects heads of one length, a multiple of 8 up to 128"
    if call.queries < LEAST or call.queries % ROUND or call.keys % ROUND:
        return f"pays for lengths from {LEAST} on that are multiples of {ROUND}"
    return None if _hopper(call.q.device) else "faster on Hopper and later GPUs alone"


def run(call: Call) -> Tensor:
    """one fused scaled_dot_product_attention by way of cuDNN, no dense mask."""
    return sdpa.plain(call.q, call.k, call.v, scale=sdpa.scale(call), ways=WAYS, is_causal=call.structure.causal)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


PATH = Path("cudnn", cannot, run, last_sees_all=True)
