"""Projections: x W^T + b, by the fastest product there is on a CPU.

In float32 torch sends linear layers to its BLAS, which is made for many rows. Where no gradient is recorded there are
two others. For few rows machine code of our own (linear_code.py) reads the weights once: 1.1 to 2 times as fast as the
better of torch's, 1.7 times for a decoder's head (AMD EPYC, AVX-512 and AVX2). oneDNN, which torch sends half precision
to, is 1.2 to 1.7 times as fast as BLAS for up to 256 rows of large weights.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from regard.core import cpu
from regard.core.eager import readable
from regard.core.paths import decode

LEAST_WEIGHTS, LEAST_WEIGHTS_BY_ONEDNN = 100_000, 4_000_000
"""Smaller weights are BLAS's: it starts sooner."""
MULTIPLE = 16
"""Machine code is made for rows whose width is a multiple of this, the lanes of the widest registers."""
MOST_NUMBERS = 4096
"""Of several rows, for machine code: they must stay in the core's smallest cache."""
MOST_TOKENS_WIDE = 98_304
"""Numbers of tokens that meet a weight at a time, so that they stay in the core's own cache."""

_onednn: Any = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None


def linear(x: Float[Tensor, "*b D"], weight: Float[Tensor, "E D"], bias: Float[Tensor, "E"] | None = None) -> Tensor:
    """x W^T + b.

    >>> import torch
    >>> from regard.models.layers.linear import linear
    >>> x, weight = torch.randn(3, 512), torch.randn(8192, 512)
    >>> with torch.no_grad():
    ...     fast = linear(x, weight)
    >>> torch.allclose(fast, x @ weight.T, atol=1e-3)
    True
    """
    if by_machine_code(x, weight):
        out = torch.ops.regard.linear(x, weight, None)
        return out if bias is None else out.add_(bias)
    return _onednn(x, weight, bias, "none", [], "") if by_onednn(x, weight) else F.linear(x, weight, bias)


def by_machine_code(x: Tensor, weight: Tensor) -> bool:
    """Whether our own product serves and is faster than torch's."""
    rows, width = _rows(x, weight), weight.shape[1]
    return (
        rows > 0
        and (rows <= 2 or rows * width <= MOST_NUMBERS)
        and weight.numel() >= LEAST_WEIGHTS
        and width % MULTIPLE == 0
        and weight.is_contiguous()
        and _plainly(x, weight)
        and decode.missing() is None
    )


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product serves and is faster than the BLAS's. Elsewhere it gains a tenth or two, and has two to
    three times the rounding error, which a model of many layers would see in its logits; not so for one row."""
    rows = _rows(x, weight)
    return (
        0 < rows <= 256
        and weight.numel() >= (LEAST_WEIGHTS if rows == 1 else LEAST_WEIGHTS_BY_ONEDNN)
        and _plainly(x, weight)
        and _onednn is not None
        and cpu.MAY_COMPILE
    )


def _rows(x: Tensor, weight: Tensor) -> int:
    """How many rows there are to multiply; 0 in a trace, which may hold their number open and takes torch's product."""
    return 0 if torch.compiler.is_compiling() else x.numel() // max(1, weight.shape[1])


def _plainly(x: Tensor, weight: Tensor) -> bool:
    """Whether nobody wants derivatives, a trace, or another dtype than float32."""
    return (
        not torch.is_grad_enabled()
        and x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and weight.is_cpu
        and not torch.is_autocast_enabled("cpu")
        and readable(x, weight)
    )


class Linear(nn.Linear):
    """`nn.Linear`, with the faster product where no gradient is recorded."""

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        return linear(x, self.weight, self.bias)


def projections(x: Float[Tensor, "*b D"], *layers: nn.Module) -> Sequence[Float[Tensor, "*b E"]]:
    """What each layer makes of one input, by one product where that is faster: in training on a GPU, and where machine
    code serves and `lay_together` made their weights one.

    >>> import torch
    >>> from regard.models.layers.linear import Linear, lay_together, projections
    >>> layers = [Linear(512, size, bias=False) for size in (512, 128, 128)]
    >>> lay_together(*layers)
    >>> x = torch.randn(1, 512)
    >>> with torch.no_grad():
    ...     [torch.allclose(one, layer(x), atol=1e-5) for one, layer in zip(projections(x, *layers), layers)]
    [True, True, True]
    """
    if torch.is_grad_enabled():
        together = _joined(x, layers) if x.is_cuda else None
    else:
        weight = _one_weight(x, layers)
        together = linear(x, weight) if weight is not None and by_machine_code(x, weight) else None
    if together is None:
        return [layer(x) for layer in layers]
    return together.split([cast(int, layer.out_features) for layer in layers], -1)


def _joined(x: Tensor, layers: Sequence[nn.Module]) -> Tensor | None:
    """The product with all weights, put together for this once; None if a layer is not a plain one."""
    if not all(_plain(layer) for layer in layers) or len({layer.bias is None for layer in layers}) > 1:
        return None
    weight = torch.cat([cast(Tensor, layer.weight) for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([cast(Tensor, layer.bias) for layer in layers])
    return F.linear(x, weight, bias)


def _plain(layer: nn.Module) -> bool:
    """Whether a layer is nothing but its weight and bias: no other class, nobody who watches."""
    return type(layer) is Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def lay_together(*layers: nn.Linear) -> None:
    """Let the weights of projections of one input lie one after another in memory. Their values stay as they are."""
    parts = torch.cat([layer.weight.detach() for layer in layers]).split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part


def _one_weight(x: Tensor, layers: Sequence[nn.Module]) -> Tensor | None:
    """The weights of layers as one, if they are plain ones without bias whose weights lie together."""
    if not all(_plain(layer) and layer.bias is None for layer in layers):
        return None
    weights = [cast(Tensor, layer.weight) for layer in layers]
    if not _plainly(x, weights[0]):  # asked first: the tensors of a trace or a transform have no address
        return None
    end, rows = None, 0
    for weight in weights:
        if end not in (None, weight.data_ptr()) or not weight.is_contiguous():
            return None
        end, rows = weight.data_ptr() + weight.nbytes, rows + len(weight)
    first = weights[0]
    numbers = first.storage_offset() + rows * first.shape[1]
    if first.untyped_storage().nbytes() < numbers * first.element_size():  # neighbours by chance
        return None
    return first.as_strided((rows, first.shape[1]), first.stride())


_LIBRARY = torch.library.Library("regard", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? scale) -> Tensor")


def _multiply(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """x (…, D) in float32 with weights (E, D) in float32, or in int8 with a float32 scale for each row."""
    if (reason := decode.missing()) is not None:
        raise ValueError(f"linear: expected a machine that can run it, got one that cannot: {reason}")
    (rows, width), kind, threads = weight.shape, "float32" if scale is None else "int8", torch.get_num_threads()
    if x.shape[-1] != width or width % MULTIPLE or x.dtype is not torch.float32 or weight.dtype is not _KINDS[kind]:
        raise ValueError(f"linear: expected a width that is a multiple of {MULTIPLE}, and float32 tokens")
    if scale is not None:
        if scale.shape != (rows,) or scale.dtype is not torch.float32:
            raise ValueError(f"scale: expected torch.float32 ({rows},), got {scale.dtype} {tuple(scale.shape)}")
        scale = scale.contiguous()
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(*x.shape[:-1], rows, dtype=torch.float32, device="cpu")
    code, fields, tasks, step, block = _program(kind, rows, width, threads, cpu.LANES)
    places = weight.data_ptr(), 0 if scale is None else scale.data_ptr()
    tokens, most = _rows(x, weight), max(24, MOST_TOKENS_WIDE // width)
    for first in range(0, tokens, most):
        count, read, written = min(most, tokens - first), x.data_ptr() + 4 * first * width, 4 * first * rows
        told = fields(0, tasks, count, width, rows, step, block, read, *places, out.data_ptr() + written)
        cpu.in_parallel(code, ctypes.addressof(told), threads if tasks > 1 else 1)
    return out


_KINDS = {"float32": torch.float32, "int8": torch.int8}


@cache
def _program(kind: str, rows: int, width: int, threads: int, lanes: int) -> tuple[int, Any, int, int, int]:
    """The code, the type of what it is told, and how the weights are split: tasks, rows of each, and columns."""
    # llvmlite is imported only when a product needs it.
    from regard.core.paths.compiler import compiled
    from regard.models.layers.linear_code import COLUMNS, FIELDS, ROWS, source

    step, blocks = min(ROWS, -(-rows // (8 * threads)) * 4), -(-width // COLUMNS)
    block = -(-width // (blocks * MULTIPLE)) * MULTIPLE
    return compiled(source, kind, lanes), ctypes.c_int64 * len(FIELDS), -(-rows // step), step, block


def _shape(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _count_flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(x) * weight[0])


_LIBRARY.impl("linear", _multiply, "CPU")
torch.library.register_fake("regard::linear", _shape)
for operation in (torch.ops.regard.linear, _onednn):  # torch's counter knows its own product only
    if operation is not None and operation not in flop_registry:
        register_flop_formula(operation)(_count_flops)
