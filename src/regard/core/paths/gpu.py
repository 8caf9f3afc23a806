"""Where kernels of ours on a GPU serve: what softmax they compute, and intervals of real keys on the device."""

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.eager import kept, symbolic, untouched
from regard.core.masks.structure import Structure
from regard.core.paths import sdpa
from regard.core.states.state import Sizes

LONGEST = 128
"""qk_length and value_length, at most."""
TRITON = find_spec("triton") is not None


def unfit(call: Call, packed: bool = False) -> str | None:
    """Why no kernel of ours computes this call, wherever it is: not softmax within a band and intervals of keys, or of
    `packed` sequences."""
    if (reason := sdpa.unfit(call)) is not None:
        return reason
    if call.bias is not None:
        return "a bias needs the score form"
    if not (packed and parts(call) is not None) and (reason := no_band(call.structure)) is not None:
        return reason
    if symbolic(call.queries, call.keys):
        return "a trace that holds a length open takes one form for all of them"
    if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "made for float32, bfloat16 and float16"
    if max(call.qk_length, call.value_length) > LONGEST:
        return f"made for heads of at most {LONGEST} numbers"
    return "an exported program holds PyTorch's operators alone" if torch.compiler.is_exporting() else None


def no_band(structure: Structure) -> str | None:
    """What a mask has besides a band of positions and an interval of keys for each batch row; None if nothing."""
    if structure.rest is not None:
        return "the mask is no band of positions"
    return "padding with holes" if structure.paddings and structure.rows is None else None


def launches(x: Tensor) -> bool:
    """Whether kernels of ours may take the place of plain operators on tokens in half precision."""
    return TRITON and x.is_cuda and x.dtype.itemsize == 2 and not torch.is_grad_enabled() and untouched()


def packs(x: Tensor) -> bool:
    """Whether kernels of ours attend to packed sequences where these tokens are."""
    return TRITON and x.is_cuda and x.dtype != torch.float64 and untouched()


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether kernels of ours compute plain softmax of these queries and values where they are."""
    return q.is_cuda and _computes(max(q.shape[3], v.shape[3]), q.dtype)


def fits(sizes: Sizes) -> bool:
    """Whether kernels of ours compute plain softmax over states of these sizes."""
    return torch.device(sizes.device).type == "cuda" and _computes(
        max(sizes.qk_length, sizes.value_length), sizes.dtype
    )


def _computes(longest: int, dtype: torch.dtype) -> bool:
    return TRITON and longest <= LONGEST and dtype in (torch.float32, torch.bfloat16, torch.float16)


def missing(call: Call) -> str | None:
    """Why there is nothing to run a kernel of ours with; None if there is."""
    if not call.q.is_cuda:
        return "made for GPUs"
    return None if TRITON else "Triton is not installed"


def scaled(call: Call) -> tuple[Tensor, float]:
    """Queries and a scale above 0: a key that is hidden by -inf times 0 would be NaN."""
    scale = sdpa.scale(call)
    return (call.q, scale) if scale > 0 else (call.q * 0, 1.0)


def dense(call: Call) -> bool:
    """Whether the numbers of each head lie one after another, as kernels read them."""
    return call.q.stride(3) == call.k.stride(3) == call.v.stride(3) == 1


def unit_strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors with the numbers of a head one after another, as kernels read them."""
    if q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return q, k, v
    return tuple(x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))  # type: ignore[return-value]


def parts(call: Call) -> tuple[tuple[int, int, int], ...] | None:
    """Packed sequences one after another, as `Mask.sequences` has them; None if the mask is not of those alone."""
    rest = call.structure.rest
    if rest is None or not call.square or call.structure.paddings:
        return None
    return rest.sequences(call.batch)


def bounds(call: Call) -> Tensor | None:
    """The first real key of each batch row and the one after the last, (2, B), on the device; None if all are real."""
    return None if call.structure.rows is None else table(call.structure.rows, call.q.device)


@kept(256)
def table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Columns of whole numbers on the device, copied without waiting for it."""
    columns = torch.tensor(rows, dtype=torch.int32, device="cpu").t().contiguous()
    if device.type != "cuda" or torch.compiler.is_compiling():
        return columns.to(device)
    return columns.pin_memory().to(device, non_blocking=True)
