"""Softmax attention within a band of positions on a GPU: what is launched, and the operators. Kernels are in band.py.

`mend` and `mend_backward` go over what another kernel, PyTorch's, has written: heads whose last query gave a number
that is not finite are computed again. It sees every key of a causal call, so that is where a NaN or infinity shows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.kernels.band import band_kernel, band_keys_kernel, band_queries_kernel, mend_backward_kernel, mend_kernel
from regard.kernels.launch import Launches, ceil_divide, launch, layout

MOST_READY = 1024
"""Sizes and strides to keep compiled kernels for."""


class Launch(NamedTuple):
    """Queries and keys of a tile, warps, and stages of the pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"ROWS": self.queries, "STEP": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    """Of the forward pass, and of the gradients of queries and of keys."""

    forward: Launch
    queries: Launch
    keys: Launch


@lru_cache(maxsize=256)
def tiles(longest: int, bytes_per_number: int, rows: int) -> Tiles:
    """What was fastest on an H200, for heads of a length and so many queries over all heads and batch rows."""
    if bytes_per_number == 4:
        small = Launch(64, 32, 4, 2) if longest <= 64 else Launch(32, 32, 4, 1)
        return Tiles(small, small, small._replace(queries=32))
    if longest <= 64:  # long tiles where there are enough of them to fill the chip
        forward = Launch(128, 64, 4, 2) if rows >= 1 << 17 else Launch(64, 64, 4, 3)
        return Tiles(forward, Launch(64, 64, 4, 3), Launch(64, 64, 4, 2))
    return Tiles(Launch(64, 64, 4, 2 if rows >= 1 << 15 else 3), Launch(64, 64, 4, 2), Launch(64, 64, 8, 2))


@dataclass(frozen=True)
class Work:
    """One call: its sizes and what is visible."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor | None
    """The first real key of each batch row and the one after the last, (2, B)."""
    scale: float
    before: int | None
    after: int | None
    parts: Tensor | None = None
    """Of packed sequences: the batch row, the first token and the number of tokens of each, (3, M) int32. A token sees
    those of its own sequence alone."""
    longest: int = 0
    """Of packed sequences: the tokens of the longest."""

    @property
    def lines(self) -> tuple[int, int]:
        """Sequences, and the longest of them."""
        return (self.q.shape[0], self.q.shape[2]) if self.parts is None else (self.parts.shape[1], self.longest)

    @property
    def tiles(self) -> Tiles:
        longest = max(self.q.shape[3], self.v.shape[3])
        return tiles(longest, self.q.element_size(), self.q.shape[:3].numel())

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        low, high = (None, None) if self.bounds is None else (self.bounds[0], self.bounds[1])
        return self.q, self.k, self.v, low, high, self.parts

    @property
    def sizes(self) -> tuple[Any, ...]:
        queries, keys, heads, groups = self.q.shape[2], self.k.shape[2], self.q.shape[1], self.k.shape[1]
        return queries, keys, heads, groups, self.before or 0, self.after or 0, self.scale * math.log2(math.e)

    @property
    def lengths(self) -> dict[str, Any]:
        """Of heads, as they are and as powers of 2."""
        lengths = self.q.shape[3], self.v.shape[3]
        c, v = (max(16, triton.next_power_of_2(length)) for length in lengths)
        return dict(C=lengths[0], V=lengths[1], CB=c, VB=v, PRECISION="tf32x3")

    def options(self, tile: Launch) -> dict[str, Any]:
        """What a kernel is told of the mask, and of its tiles."""
        bounded, before, after = self.bounds is not None, self.before, self.after
        narrow = bounded or (before or 0) + (after or 0) < tile.queries + tile.keys
        return dict(
            BOUNDED=bounded, BEFORE=before is not None, AFTER=after is not None, NARROW=narrow,
            SIMPLE=not bounded and after == 0, PACKED=self.parts is not None, **self.lengths, **tile.options,
        )  # fmt: skip


_ready: dict[Any, tuple[Launches, dict[str, Any]]] = {}
"""Compiled kernels and what they are told, by the sizes and strides of a call."""


def _run(
    work: Work,
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    sizes: tuple[Any, ...],
    options: Callable[[], dict[str, Any]],
) -> None:
    """Launch a kernel on tensors, then the strides of some of them, then sizes."""
    flags = work.before, work.after, work.bounds is None, work.parts is None
    key = kernel, sizes, flags, *[layout(tensor) for tensor in strided]
    if key not in _ready:
        if len(_ready) > MOST_READY:
            _ready.clear()
        _ready[key] = {}, options()
    launches, told = _ready[key]

    def numbers() -> tuple[Any, ...]:
        return (*(stride for tensor in strided for stride in tensor.stride()[:3]), *sizes)

    launch(launches, None, kernel, (*grid, 1), tensors, numbers, **told)


def forward(work: Work) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) and its log-sum-exp (B, H, T)."""
    q, k, v, tile = work.q, work.k, work.v, work.tiles.forward
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    sequences, longest = work.lines
    grid = ceil_divide(longest, tile.queries), sequences * q.shape[1]
    tensors = *work.tensors, out, lse
    _run(work, band_kernel, grid, tensors, (q, k, v, out), (*work.sizes, sequences), lambda: work.options(tile))
    return out, lse


def backward(work: Work, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    q, k, v, tiles = work.q, work.k, work.v, work.tiles
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (q, k, v))
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    delta, (sequences, longest) = torch.empty_like(lse), work.lines
    sizes, shared = (*work.sizes, sequences, work.scale), (*work.tensors, out, lse, grad, delta)
    grid = ceil_divide(longest, tiles.queries.queries), sequences * q.shape[1]
    strided = q, k, v, out, grad
    told = lambda: work.options(tiles.queries)  # noqa: E731 - one line for each kernel
    _run(work, band_queries_kernel, grid, (*shared, q_grad), (*strided, q_grad), sizes, told)
    grid = ceil_divide(k.shape[2] if work.parts is None else longest, tiles.keys.keys), sequences * k.shape[1]
    told = lambda: work.options(tiles.keys)  # noqa: E731
    _run(work, band_keys_kernel, grid, (*shared, k_grad, v_grad), (*strided, k_grad, v_grad), sizes, told)
    return q_grad, k_grad, v_grad


MENDING = Launch(32, 32, 4, 1)
"""Small tiles: most programs of a mending kernel have nothing to do, and should start soon."""
MENDERS = 4
"""Programs that share the tiles of a head."""


def mend(work: Work, out: Tensor, lse: Tensor) -> None:
    """Compute heads again whose last query gave NaN or infinity: their output and log-sum-exp (B, H, T)."""
    q, k, v = work.q, work.k, work.v
    queries, _, heads, groups, _, _, factor = work.sizes
    sizes, grid = (queries, heads, groups, factor), (MENDERS, q.shape[0] * heads)
    _run(work, mend_kernel, grid, (q, k, v, out, lse), (q, k, v, out), sizes, lambda: work.lengths | MENDING.options)


def mend_backward(work: Work, grad: Tensor, out: Tensor, lse: Tensor, grads: tuple[Tensor, Tensor, Tensor]) -> None:
    """Compute the gradients of such heads again."""
    q, k, v = work.q, work.k, work.v
    queries, _, heads, groups, _, _, factor = work.sizes
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    sizes, grid = (queries, heads, groups, factor, work.scale), (MENDERS, q.shape[0] * groups)
    tensors, strided = (q, k, v, out, lse, grad, *grads), (q, k, v, out, grad, *grads)
    _run(work, mend_backward_kernel, grid, tensors, strided, sizes, lambda: work.lengths | MENDING.options)


@torch.library.custom_op("regard::band_attention", mutates_args=())
def band(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, parts: Tensor | None, scale: float, before: int | None,
    after: int | None, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention of queries at the last positions to keys at most `before` back and `after` ahead of each."""
    return forward(Work(q, k, v, bounds, scale, before, after, parts, longest))


@band.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, parts: Tensor | None, scale: float, before: int | None,
    after: int | None, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("regard::band_attention_backward", mutates_args=())
def band_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor | None,
    parts: Tensor | None, scale: float, before: int | None, after: int | None, longest: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    return backward(Work(q, k, v, bounds, scale, before, after, parts, longest), grad, out, lse)


@band_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor | None,
    parts: Tensor | None, scale: float, before: int | None, after: int | None, longest: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, parts, *options = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, parts)
    ctx.options = options
    ctx.mark_non_differentiable(output[1])


def _pull_back(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*band_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None, None)


band.register_autograd(_pull_back, setup_context=_keep)


def _pairs(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


@register_flop_formula(torch.ops.regard.band_attention, get_raw=True)
def _flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Every pair counted, as torch's own formulas for its GPU kernels do."""
    return 2 * _pairs(q, k) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.regard.band_attention_backward, get_raw=True)
def _backward_flops(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _pairs(q, k) * (3 * q.shape[3] + 2 * v.shape[3])
