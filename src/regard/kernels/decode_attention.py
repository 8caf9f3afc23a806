"""A few queries over a long cache on a GPU: what is launched. The kernels are in decode.py."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.kernels.decode import decode_kernel, merge_kernel

MULTIPROCESSORS = 132
"""Of an H200. On others the keys are split a little finer or coarser than is best."""


MOST_ROWS = 64
"""Query rows of a tile, at most."""
MOST_SPLITS = 512
FILLING, WAVE, MERGING = 100, 30, 200
"""Keys that a multiprocessor could read while its pipelines fill, while programs follow others, and while the merging
kernel runs."""

THREE, AFTER_THREE = (1.3, 2.0, 3.0), (1.7, 2.4, 3.0)


class Launch(NamedTuple):
    """Keys of a step, warps, stages of the pipeline, and how the programs of a multiprocessor get on."""

    keys: int
    warps: int
    stages: int
    shares: tuple[float, ...]
    """How long 1, 2, … programs of a multiprocessor take for a key each, up to as many as it has room for: fewer leave
    it waiting for memory."""
    tails: tuple[float, ...]
    """The same where others ran before them, some of which end late."""


@lru_cache(maxsize=256)
def launches(longest: int, bytes_per_number: int) -> tuple[Launch, ...]:
    """What was fastest on an H200, for heads of a length: three programs of a multiprocessor, or one with a deep
    pipeline."""
    if bytes_per_number == 4:
        return (Launch(32 if longest > 64 else 64, 4, 3, THREE, AFTER_THREE),)
    if longest <= 64:
        return (Launch(128, 4, 3, THREE, AFTER_THREE),)
    return Launch(64, 4, 3, THREE, AFTER_THREE), Launch(128, 8, 4, (1.05,), (1.05,))


@lru_cache(maxsize=4096)
def plan(keys: int, pairs: int, rows: int, longest: int, bytes_per_number: int) -> tuple[Launch, int]:
    """How to attend to `keys` keys of each of `pairs` tiles, of `rows` query rows in all, and in how many parts.

    Time is counted in keys that a multiprocessor reads: programs come in waves, the last of which may leave
    multiprocessors half idle; pipelines take a while to fill, and each part is written and read again.
    """

    def cost(choice: tuple[Launch, int]) -> float:
        launch, splits = choice
        slots = MULTIPROCESSORS * len(launch.shares)
        waves, rest = divmod(pairs * splits, slots)
        part = triton.cdiv(triton.cdiv(keys, splits), launch.keys) * launch.keys
        last = (launch.tails if waves else launch.shares)[triton.cdiv(rest, MULTIPROCESSORS) - 1] if rest else 0.0
        work = part * (len(launch.shares) * waves + last) + FILLING + WAVE * (waves - (rest == 0))
        return work if splits == 1 else work + MERGING + rows * splits * 2 / MULTIPROCESSORS

    def splits(launch: Launch) -> range:
        return range(1, max(2, min(MOST_SPLITS, keys // launch.keys) + 1))

    choices = ((launch, count) for launch in launches(longest, bytes_per_number) for count in splits(launch))
    return min(choices, key=cost)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bounds: Tensor | None = None,
    *,
    causal: bool = False,
    before: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """Softmax attention (B, H, T, V) of a few queries (B, H, T, K) to keys (B, G, S, K) and values.

    `bounds` (2, B) are the first real key of each batch row and the one after the last. `scales` are those of int8 keys
    and values. `length`, one number on the GPU, says how many of the S keys there are: the queries are the last ones.
    """
    batch, heads, queries, qk_length = q.shape
    groups, keys, value_length = k.shape[1], k.shape[2], v.shape[3]
    shared = heads // groups
    if q.stride(3) != 1:
        q = q.contiguous()
    if k.stride(3) != 1 or v.stride(3) != 1:
        k, v = k.contiguous(), v.contiguous()
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(shared * queries)))
    tiles = triton.cdiv(shared * queries, rows)
    pairs = batch * groups * tiles
    c, width = (max(16, triton.next_power_of_2(size)) for size in (qk_length, value_length))
    rounded = triton.cdiv(keys, 256) * 256  # so that a growing cache is planned for now and then
    chosen, splits = plan(rounded, pairs, batch * heads * queries, max(c, width), q.element_size())
    out = q.new_empty(batch, heads, queries, value_length)
    sums = tops = totals = None
    if splits > 1:
        sums = q.new_empty(batch * heads * queries, splits, value_length, dtype=torch.float32)
        tops, totals = (q.new_empty(batch * heads * queries, splits, dtype=torch.float32) for _ in range(2))
    low, high = (None, None) if bounds is None else (bounds[0], bounds[1])
    k_scale, v_scale = (None, None) if scales is None else scales
    scale_strides = (0, 0, 0) if k_scale is None else k_scale.stride()[:3]
    assert v_scale is None or v_scale.stride()[:3] == scale_strides
    decode_kernel[(splits, tiles, batch * groups)](
        q, k, v, k_scale, v_scale, low, high, length, out, sums, tops, totals,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *scale_strides,
        queries, keys, groups, shared, splits, before or 0, scale * math.log2(math.e),
        C=qk_length, V=value_length, CB=c, VB=width, ROWS=rows, STEP=chosen.keys, BOUNDED=bounds is not None,
        COUNTED=length is not None, WINDOWED=before is not None, CAUSAL=causal,
        POSITIONAL=queries > 1 and (causal or before is not None), SCALED=scales is not None, SPLIT=splits > 1,
        PRECISION="tf32x3", num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if splits > 1:
        count = batch * heads * queries
        # Few rows of many parts: many programs for a row. Many rows of few parts: one.
        slice_width = width if count >= 1024 else 16
        step = min(triton.next_power_of_2(splits), 4096 // slice_width)
        merge_kernel[(count, triton.cdiv(value_length, slice_width))](
            sums, tops, totals, out, splits, V=value_length, WIDTH=slice_width,
            SPLITS=triton.next_power_of_2(splits), STEP=step, num_warps=4 if step * slice_width >= 2048 else 1,
        )  # fmt: skip
    return out


@torch.library.custom_op("regard::split_attention", mutates_args=())
def split(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, scale: float, causal: bool, before: int | None
) -> Tensor:
    """`forward` as an operator, for traces and counters; it has no derivative and raises if asked for one."""
    return forward(q, k, v, scale, bounds, causal=causal, before=before)


@split.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, scale: float, causal: bool, before: int | None) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@register_flop_formula(torch.ops.regard.split_attention, get_raw=True)
def _flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Every pair counted."""
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
