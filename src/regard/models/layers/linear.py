"""Projections, x W^T + b, with the fastest matrix product that a CPU has.

Torch computes float32 linear layers with BLAS, which is optimised for many rows. There are two alternatives. For few
rows without gradients, our JIT-compiled code (linear_code.py) reads the weights once: 1.1 to 2 times as fast as the
better of torch's two products, 1.7 times for a decoder's head (AMD EPYC, AVX-512 and AVX2). oneDNN, which torch uses
for half precision, is 1.2 to 1.7 times as fast as BLAS for up to 256 rows and large weights. Where torch's BLAS is
Intel's and the CPU is not (`SLOW_BLAS`), oneDNN is 1.4 to 2.4 times as fast for all but small products, and computes
those of the backward pass, too.
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
from regard.core.eager import TENSORS, batched, readable, transformed
from regard.core.paths import decode

LEAST_WEIGHTS, LEAST_WEIGHTS_BY_ONEDNN = 100_000, 4_000_000
"""BLAS multiplies smaller weights, since it has less overhead per call."""
LEAST_MULTIPLICATIONS = 2**21
"""Products of fewer multiplications are BLAS's also where it is slow: oneDNN has more overhead per call."""
MULTIPLE = 16
"""Machine code needs a width that is a multiple of this, the number of lanes of the widest registers."""
MOST_NUMBERS = 4096
"""For machine code, more than two rows may have at most this many numbers: they must fit into the L1 cache."""
MOST_TOKENS_WIDE = 98_304
"""At most this many numbers of tokens are multiplied at a time, so that they stay in the CPU core's cache."""

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
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not weight.dtype):
        return F.linear(x, weight, bias)
    if by_onednn(x, weight):
        return _by_onednn(x, weight, bias)
    if recorded_by_onednn(x, weight):
        recorded: Tensor = _ByOneDNN.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return recorded
    return F.linear(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """It reads a bias as if it were contiguous. The weight must be dense, or transposed; if not, it takes seconds."""
    out: Tensor = _onednn(x, weight, None if bias is None else bias.contiguous(), "none", [], "")
    return out


class _ByOneDNN(torch.autograd.Function):
    """x W^T + b with gradients, all products by oneDNN. It is not told which gradients somebody asks for:
    `torch.autograd.grad(out, x)` computes the weight's, too, if the weight requires one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_x, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        return _by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        # oneDNN's product has no gradients, no tangents and no vmap.
        plain = torch.is_grad_enabled() or batched(grad) or transformed()
        grads, for_x, for_weight = grad.reshape(-1, grad.shape[-1]), None, None
        if weight is not None:
            for_x = grad @ weight if plain else _by_onednn(grad, weight.t())
        if x is not None:
            tokens = x.reshape(-1, x.shape[-1])
            for_weight = grads.t() @ tokens if plain else _weight_gradient(grads.contiguous(), tokens.contiguous())
        return for_x, for_weight, grads.sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(grads: Float[Tensor, "N E"], tokens: Float[Tensor, "N D"]) -> Float[Tensor, "E D"]:
    """The product over tokens. oneDNN copies its first matrix: the narrower one is the first."""
    if grads.shape[1] > tokens.shape[1]:
        return _by_onednn(tokens.t(), grads.t()).t()
    return _by_onednn(grads.t(), tokens.t())


def by_machine_code(x: Tensor, weight: Tensor) -> bool:
    """Whether our JIT-compiled product can be used and is faster than torch's."""
    rows, width = _rows(x), x.shape[-1]
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
    """Whether oneDNN's product can be used without gradients and is clearly faster than BLAS. Where BLAS is not slow,
    oneDNN gains 10 or 20 % on other shapes and, except for one row, has two to three times the rounding error."""
    return _faster_by_onednn(x, weight) and _plainly(x, weight)


def recorded_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes a product whose gradients are recorded, and them."""
    return cpu.SLOW_BLAS and torch.is_grad_enabled() and _faster_by_onednn(x, weight) and _plain_product(x, weight)


def _faster_by_onednn(x: Tensor, weight: Tensor) -> bool:
    rows, size = _rows(x), weight.numel()
    enough = 0 < rows <= 256 and size >= (LEAST_WEIGHTS if rows == 1 else LEAST_WEIGHTS_BY_ONEDNN)
    return (
        (enough or (cpu.SLOW_BLAS and rows * size >= LEAST_MULTIPLICATIONS))
        and _onednn is not None
        and cpu.MAY_COMPILE
        and torch._C._get_mkldnn_enabled()
        and (weight.is_contiguous() or weight.t().is_contiguous())
    )


def _rows(x: Tensor) -> int:
    """The number of rows to multiply; 0 under torch.compile, where it may be symbolic and torch's product is used."""
    return 0 if torch.compiler.is_compiling() else x.numel() // max(1, x.shape[-1])


def _plainly(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a plain float32 product on the CPU, and no gradients are recorded."""
    return not torch.is_grad_enabled() and _plain_product(x, weight)


def _plain_product(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a float32 product on the CPU of tensors as they are: no subclasses, no tracing, no autocast."""
    return (
        x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and weight.is_cpu
        and type(x) in TENSORS
        and type(weight) in TENSORS
        and weight.layout is torch.strided
        and weight.ndim == 2
        and x.ndim > 0
        and x.shape[-1] == weight.shape[1]
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_tracing_state() is None
        and readable(x, weight)
    )


class Linear(nn.Linear):
    """`nn.Linear`, with the fastest product."""

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        return linear(x, self.weight, self.bias)


def projections(x: Float[Tensor, "*b D"], *layers: nn.Module) -> Sequence[Float[Tensor, "*b E"]]:
    """The outputs of several layers for one input, by a single product where that is faster: in training on a GPU, and
    where machine code is used and `lay_together` has joined the weights.

    >>> import torch
    >>> from regard.models.layers.linear import Linear, lay_together, projections
    >>> layers = [Linear(512, size, bias=False) for size in (512, 128, 128)]
    >>> lay_together(*layers)
    >>> x = torch.randn(1, 512)
    >>> with torch.no_grad():
    ...     [torch.allclose(out, layer(x), atol=1e-5) for out, layer in zip(projections(x, *layers), layers)]
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
    """The product with the concatenated weights of all layers; None if one of them is not a plain layer."""
    if not all(_plain(layer) for layer in layers) or len({layer.bias is None for layer in layers}) > 1:
        return None
    weight = torch.cat([cast(Tensor, layer.weight) for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([cast(Tensor, layer.bias) for layer in layers])
    return F.linear(x, weight, bias)


def _plain(layer: nn.Module) -> bool:
    """Whether a layer is exactly its weight and bias: a `Linear`, not a subclass, without hooks."""
    return type(layer) is Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def lay_together(*layers: nn.Linear) -> None:
    """Place the weights of several projections one after another in memory. Their values do not change."""
    parts = torch.cat([layer.weight.detach() for layer in layers]).split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part


def _one_weight(x: Tensor, layers: Sequence[nn.Module]) -> Tensor | None:
    """The weights of layers as one tensor, if they are plain, have no bias and lie one after another in memory."""
    if not all(_plain(layer) and layer.bias is None for layer in layers):
        return None
    weights = [cast(Tensor, layer.weight) for layer in layers]
    if not _plainly(x, weights[0]):  # checked first: tensors of a trace or a transform have no address
        return None
    end, rows = None, 0
    for weight in weights:
        if end not in (None, weight.data_ptr()) or not weight.is_contiguous():
            return None
        end, rows = weight.data_ptr() + weight.nbytes, rows + len(weight)
    first = weights[0]
    numbers = first.storage_offset() + rows * first.shape[1]
    if first.untyped_storage().nbytes() < numbers * first.element_size():  # separate tensors, adjacent by chance
        return None
    return first.as_strided((rows, first.shape[1]), first.stride())


_LIBRARY = torch.library.Library("regard", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? scale) -> Tensor")


def _multiply(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """x (…, D) in float32 times weights (E, D) in float32, or in int8 with a float32 scale for each row."""
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
    tokens, most = _rows(x), max(24, MOST_TOKENS_WIDE // width)
    for first in range(0, tokens, most):
        count, read, written = min(most, tokens - first), x.data_ptr() + 4 * first * width, 4 * first * rows
        arguments = fields(0, tasks, count, width, rows, step, block, read, *places, out.data_ptr() + written)
        cpu.in_parallel(code, ctypes.addressof(arguments), threads if tasks > 1 else 1)
    return out


_KINDS = {"float32": torch.float32, "int8": torch.int8}


@cache
def _program(kind: str, rows: int, width: int, threads: int, lanes: int) -> tuple[int, Any, int, int, int]:
    """The code, the type of its arguments, and how the weights are split: tasks, rows per task, and columns."""
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
for operation in (torch.ops.regard.linear, _onednn):  # torch's FLOP counter does not know these two
    if operation is not None and operation not in flop_registry:
        register_flop_formula(operation)(_count_flops)
