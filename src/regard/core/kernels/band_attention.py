"""Softmax attention within a band of positions on a GPU: what is launched, and the operators. The kernels are
in band.py and band_gradients.py.

`mend` and `mend_backward` go over what another kernel, PyTorch's, has written: heads whose last query gave a number
that is not finite are computed again. It sees every key of a causal call, so that is where a NaN or infinity shows.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.core.kernels.band import band_kernel, mend_kernel
from regard.core.kernels.band_gradients import band_keys_kernel, band_queries_kernel, mend_backward_kernel
from regard.core.kernels.launch import Launches, Layout, ceil_divide, launch, layout, limits, power_of_2, strides


class Launch(NamedTuple):
    """Queries and keys of a tile, warps, and stages of the pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """The most registers of a thread. The loop for tiles that are not finite, which hardly ever runs, would take all
    there are, and leave room for fewer programs on a multiprocessor."""

    @property
    def options(self) -> dict[str, int | None]:
        sizes = {"ROWS": self.queries, "STEP": self.keys, "num_warps": self.warps, "num_stages": self.stages}
        return {**sizes, "maxnreg": self.registers}


class Tiles(NamedTuple):
    """Tiles of the forward pass, and of the gradients of queries and of keys."""

    forward: Launch
    queries: Launch
    keys: Launch


@lru_cache(maxsize=256)
def tiles(longest: int, bytes_per_number: int, rows: int) -> Tiles:
    """What was fastest on an H200, for heads of a length and a number of queries over all heads and batch rows."""
    if bytes_per_number == 4:
        small = Launch(64, 32, 4, 2) if longest <= 64 else Launch(32, 32, 4, 1)
        return Tiles(small, small, small._replace(queries=32))
    few = rows < 1 << 17  # not enough programs to fill the chip twice: a deeper pipeline instead
    if longest <= 64:
        forward = Launch(64, 64, 4, 3, 168) if few else Launch(64, 64, 4, 2, 128)
        return Tiles(forward, Launch(64, 32, 4, 3, 128), Launch(32, 64, 4, 2, 168))
    forward = Launch(64, 64, 4, 3) if few else Launch(64, 32, 4, 3, 168)
    return Tiles(forward, Launch(64, 64, 4, 2), Launch(32, 64, 4, 3))


@dataclass(frozen=True, eq=False)
class Work:
    """Calls of one set of sizes and strides and one mask, and the tiles they are cut into."""

    sizes: tuple[Any, ...]
    """What every kernel is told: lengths, heads, the band, and the factor of scores."""
    rows: tuple[int, int, int]
    """Batch, heads and queries."""
    keys: int
    groups: int
    value_length: int
    sequences: int
    longest: int
    """How many sequences there are, and tokens of the longest: of packed ones, or of batch rows."""
    scale: float
    flags: dict[str, Any]
    """What every kernel is compiled for."""
    lengths: dict[str, Any]
    """Head dimensions, as they are and as powers of 2."""
    tiles: Tiles
    launches: Launches = field(default_factory=dict)

    def options(self, tile: Launch) -> dict[str, Any]:
        """What a kernel is compiled for: the mask, and its tiles."""
        return dict(**self.flags, **self.lengths, **tile.options)


def work_of(
    q: Tensor, k: Tensor, v: Tensor, scale: float, before: int | None, after: int | None,
    bounds: Tensor | None = None, parts: Tensor | None = None, longest: int = 0,
) -> Work:  # fmt: skip
    """The sizes of a call.

    `bounds` are the first real key of each batch row and the one after the last, (2, B). `parts` are packed sequences:
    the batch row, the first token and the number of tokens of each, (3, M) int32, `longest` tokens at most; a token
    sees those of its own sequence alone.
    """
    packed = 0 if parts is None else parts.shape[1]
    return _work(layout(q), layout(k), layout(v), scale, before, after, bounds is not None, packed, longest)


@lru_cache(maxsize=1024)
def _work(
    q: Layout, k: Layout, v: Layout, scale: float, before: int | None, after: int | None, bounded: bool, packed: int,
    longest: int,
) -> Work:  # fmt: skip
    (batch, heads, queries, qk_length), (_, groups, keys, _), value_length = q[0], k[0], v[0][3]
    c, width = (max(16, power_of_2(length)) for length in (qk_length, value_length))
    return Work(
        sizes=(queries, keys, heads, groups, before or 0, after or 0, scale * math.log2(math.e)),
        rows=(batch, heads, queries),
        keys=keys,
        groups=groups,
        value_length=value_length,
        sequences=packed or batch,
        longest=longest if packed else queries,
        scale=scale,
        flags=dict(
            BOUNDED=bounded, BEFORE=before is not None, AFTER=after is not None, PACKED=packed > 0,
        ),
        lengths=dict(C=qk_length, V=value_length, CB=c, VB=width, PRECISION="tf32x3"),
        tiles=tiles(max(qk_length, value_length), q[2].itemsize, batch * heads * queries),
    )  # fmt: skip


def forward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None = None, parts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) and its log-sum-exp (B, H, T)."""
    tile = work.tiles.forward
    (_, _, _, _, before, after, _), bounded = work.sizes, work.flags["BOUNDED"]
    narrow = bounded or before + after < tile.queries + tile.keys
    simple = work.flags["AFTER"] and after == 0 and not bounded
    out = q.new_empty(*work.rows, work.value_length)
    lse = q.new_empty(work.rows, dtype=torch.float32)
    launch(
        work.launches, "forward", band_kernel, _grid(work.longest, tile.queries, work.sequences * work.rows[1]),
        (q, k, v, *limits(bounds), parts, out, lse),
        lambda: ((*_strides(q, k, v, out), *work.sizes, work.sequences),
                 dict(NARROW=narrow, SIMPLE=simple, **work.options(tile))),
    )  # fmt: skip
    return out, lse


def backward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, parts: Tensor | None, grad: Tensor, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    queries, keys = work.tiles.queries, work.tiles.keys
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (q, k, v))
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    tensors = q, k, v, *limits(bounds), parts, out, lse, grad, torch.empty_like(lse)
    sizes = *work.sizes, work.sequences, work.scale
    launch(
        work.launches, ("queries", strides(grad), strides(out)), band_queries_kernel,
        _grid(work.longest, queries.queries, work.sequences * work.rows[1]), (*tensors, q_grad),
        lambda: ((*_strides(q, k, v, out, grad, q_grad), *sizes), work.options(queries)),
    )  # fmt: skip
    launch(
        work.launches, ("keys", strides(grad), strides(out)), band_keys_kernel,
        _grid(work.keys if parts is None else work.longest, keys.keys, work.sequences * work.groups),
        (*tensors, k_grad, v_grad),
        lambda: ((*_strides(q, k, v, out, grad, k_grad, v_grad), *sizes), work.options(keys)),
    )  # fmt: skip
    return q_grad, k_grad, v_grad


def _grid(length: int, tile: int, lines: int) -> tuple[int, int, int]:
    return ceil_divide(length, tile), lines, 1


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


MENDING = Launch(32, 32, 4, 1)
"""Small tiles: most programs of a mending kernel have nothing to do, and should start soon."""
MENDERS = 4
"""Programs that share the tiles of a head."""


def mend(work: Work, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Compute heads again whose last query gave NaN or infinity: their output and log-sum-exp (B, H, T)."""
    (batch, heads, queries), factor = work.rows, work.sizes[-1]
    launch(
        work.launches, ("mend", out.stride()), mend_kernel, (MENDERS, batch * heads, 1), (q, k, v, out, lse),
        lambda: ((*_strides(q, k, v, out), queries, heads, work.groups, factor), work.lengths | MENDING.options),
    )  # fmt: skip


def mend_backward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Compute the gradients of such heads again."""
    (batch, heads, queries), factor = work.rows, work.sizes[-1]
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    strided = out, grad, *grads
    launch(
        work.launches, ("mend backward", *[x.stride() for x in strided]), mend_backward_kernel,
        (MENDERS, batch * work.groups, 1), (q, k, v, out, lse, grad, *grads),
        lambda: ((*_strides(q, k, v, *strided), queries, heads, work.groups, factor, work.scale),
                 work.lengths | MENDING.options),
    )  # fmt: skip


@torch.library.custom_op("regard::band_attention", mutates_args=())
def band(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, parts: Tensor | None, scale: float, before: int | None,
    after: int | None, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention of queries at the last positions to keys at most `before` back and `after` ahead of each."""
    return forward(work_of(q, k, v, scale, before, after, bounds, parts, longest), q, k, v, bounds, parts)


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
    work = work_of(q, k, v, scale, before, after, bounds, parts, longest)
    return backward(work, q, k, v, bounds, parts, grad, out, lse)


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
