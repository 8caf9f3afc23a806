"""A few queries over a long cache on a GPU: what is launched. The kernels are in decode.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.core.kernels.decode import decode_kernel, merge_kernel
from regard.core.kernels.launch import Launches, Layout, ceil_divide, launch, layout, limits, power_of_2, strides

MULTIPROCESSORS = 132
"""Multiprocessors of an H200. On other GPUs the keys are split a little finer or coarser than is best."""


MOST_ROWS = 64
"""Query rows of a tile, at most."""
DEEP_ROWS = 32
"""Query rows up to which four steps of 128 keys fit a multiprocessor's shared memory beside them."""
MOST_SPLITS = 512
FOREVER = 2**31 - 1
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
def launches(longest: int, bytes_per_number: int, deep: bool) -> tuple[Launch, ...]:
    """What was fastest on an H200, for heads of a length: three programs of a multiprocessor, or one with a deep
    pipeline, where shared memory has room for it (`Work.deep`)."""
    if bytes_per_number == 4:
        return (Launch(32 if longest > 64 else 64, 4, 3, THREE, AFTER_THREE),)
    if longest <= 64:
        return (Launch(128, 4, 3, THREE, AFTER_THREE),)
    three = Launch(64, 4, 3, THREE, AFTER_THREE)
    return (three, Launch(128, 8, 4, (1.05,), (1.05,))) if deep else (three,)


@lru_cache(maxsize=4096)
def plan(keys: int, pairs: int, rows: int, longest: int, bytes_per_number: int, deep: bool) -> tuple[Launch, int]:
    """How to attend to `keys` keys of each of `pairs` tiles, of `rows` query rows in all, and in how many parts.

    Time is counted in keys that a multiprocessor reads: programs come in waves, the last of which may leave
    multiprocessors half idle; pipelines take a while to fill, and each part is written and read again.
    """

    def cost(choice: tuple[Launch, int]) -> float:
        launch, splits = choice
        slots = MULTIPROCESSORS * len(launch.shares)
        waves, rest = divmod(pairs * splits, slots)
        part = ceil_divide(ceil_divide(keys, splits), launch.keys) * launch.keys
        last = (launch.tails if waves else launch.shares)[ceil_divide(rest, MULTIPROCESSORS) - 1] if rest else 0.0
        work = part * (len(launch.shares) * waves + last) + FILLING + WAVE * (waves - (rest == 0))
        return work if splits == 1 else work + MERGING + rows * splits * 2 / MULTIPROCESSORS

    def splits(launch: Launch) -> range:
        return range(1, max(2, min(MOST_SPLITS, keys // launch.keys) + 1))

    choices = ((launch, count) for launch in launches(longest, bytes_per_number, deep) for count in splits(launch))
    return min(choices, key=cost)


def planned(keys: int) -> int:
    """For how many keys a cache of so many is planned: a growing one now and then."""
    return ceil_divide(keys, 256) * 256


@dataclass(frozen=True, eq=False)
class Work:
    """Calls of one set of sizes and strides and one mask, over caches of any length."""

    rows: int
    """Query rows of a tile."""
    grid: tuple[int, int]
    """Tiles of a key/value head, and key/value heads of all batch rows of the cache."""
    members: int
    """The most batch rows of queries that have one row of the cache."""
    count: int
    """Query rows in all."""
    sizes: tuple[int, int, int, int]
    """Batch, heads, queries and value_length."""
    groups: int
    qk_length: int
    c: int
    width: int
    """qk_length and value_length, rounded up to a power of 2."""
    bytes_per_number: int
    """Bytes of a number of the queries."""
    scale: float
    causal: bool
    before: int | None
    launches: Launches = field(default_factory=dict)

    @property
    def positional(self) -> bool:
        """Whether queries of one tile see different keys."""
        return self.sizes[2] > 1 and (self.causal or self.before is not None)

    @property
    def deep(self) -> bool:
        """Whether shared memory has room for a deep pipeline."""
        return self.rows <= DEEP_ROWS and not self.positional


def work_of(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, before: int | None, scales: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None, members: int = 1,
) -> Work:  # fmt: skip
    """The sizes of a call but for the length of its cache."""
    kinds = (
        k.stride(),
        v.stride(),
        k.dtype,
        strides(scales),
        None if new is None else (new[0].stride(), new[1].stride()),
    )
    return _work(layout(q), k.shape[0], k.shape[1], members, v.shape[3], scale, causal, before, *kinds)


@lru_cache(maxsize=256)
def _work(
    q: Layout, parents: int, groups: int, members: int, value_length: int, scale: float, causal: bool,
    before: int | None, *kinds: object,
) -> Work:  # fmt: skip
    batch, heads, queries, qk_length = q[0]
    queries_per_group = members * (heads // groups) * queries
    rows = min(MOST_ROWS, max(16, power_of_2(queries_per_group)))
    c, width = (max(16, power_of_2(size)) for size in (qk_length, value_length))
    return Work(
        rows=rows,
        grid=(ceil_divide(queries_per_group, rows), parents * groups),
        members=members,
        count=batch * heads * queries,
        sizes=(batch, heads, queries, value_length),
        groups=groups,
        qk_length=qk_length,
        c=c,
        width=width,
        bytes_per_number=q[2].itemsize,
        scale=scale,
        causal=causal,
        before=before,
    )


class Part(NamedTuple):
    """Some keys and values of a cache, (parents, G, S, ·), at the positions from `first` on."""

    k: Tensor
    v: Tensor
    first: int = 0
    stop: int = FOREVER
    """The position after the last."""
    scales: tuple[Tensor, Tensor] | None = None
    """The scales of int8 keys and values."""
    members: Tensor | None = None
    """The batch rows of queries that have each row of keys, (parents, most) and -1 where there are fewer; None if each
    has its own. Rows with the same keys must have the same bounds."""


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
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax attention (B, H, T, V) of a few queries (B, H, T, K) to keys (B, G, S, K) and values.

    `bounds` (2, B) are the first real key of each batch row and the one after the last. `scales` are those of int8 keys
    and values. `length`, one number on the GPU, says how many of the S keys there are: the queries are the last ones.
    `new` are the last key and value, (B, G, 1, ·), of the only query: they are stored in k and v on the way.
    """
    if q.stride(3) != 1:
        q = q.contiguous()
    if k.stride(3) != 1 or v.stride(3) != 1:
        assert new is None
        k, v = k.contiguous(), v.contiguous()
    assert scales is None or scales[0].stride() == scales[1].stride()
    work = work_of(q, k, v, scale, causal, before, None if scales is None else scales[0], new)
    return attend(work, q, k, v, k.shape[2], bounds, scales, length, new)


def attend(
    work: Work, q: Tensor, k: Tensor, v: Tensor, keys: int, bounds: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None, length: Tensor | None = None, new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """`forward` of a call whose sizes are known, over the first `keys` keys."""
    return _launch_parts([(work, Part(k, v, scales=scales), keys)], q, keys, bounds, length, new)


def forward_parts(
    q: Tensor,
    parts: Sequence[Part],
    keys: int,
    scale: float,
    bounds: Tensor | None = None,
    *,
    causal: bool = False,
    before: int | None = None,
    length: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`forward` over a cache in several parts, one after another, with `keys` keys in all, or at most: of each part as
    many as are before its `stop`. `new` belongs to the last part."""
    if q.stride(3) != 1:
        q = q.contiguous()
    pieces = []
    for part in parts:
        stored = new if part is parts[-1] else None
        members = 1 if part.members is None else part.members.shape[1]
        scales = None if part.scales is None else part.scales[0]
        work = work_of(q, part.k, part.v, scale, causal, before, scales, stored, members)
        pieces.append((work, part, min(part.stop, keys) - part.first))
    return _launch_parts(pieces, q, keys, bounds, length, new)


def _launch_parts(
    pieces: list[tuple[Work, Part, int]], q: Tensor, keys: int, bounds: Tensor | None, length: Tensor | None,
    new: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Attention over parts, each with how many keys it has; then their sums as one."""
    whole = pieces[0][0]
    value_length = whole.sizes[3]
    choices = [
        plan(
            planned(count),
            work.grid[0] * work.grid[1],
            work.count,
            max(work.c, work.width),
            work.bytes_per_number,
            work.deep,
        )
        for work, _, count in pieces
    ]
    slots, slot = sum([splits for _, splits in choices]), 0
    out, sums = q.new_empty(whole.sizes), None
    if slots > 1:
        sums = q.new_empty(whole.count * slots * (value_length + 2), dtype=torch.float32)
    for (work, part, _), (chosen, splits) in zip(pieces, choices, strict=True):
        tiles, lines = work.grid
        new_k, new_v = (None, None) if new is None or part is not pieces[-1][1] else new
        k_scale, v_scale = (None, None) if part.scales is None else part.scales
        launch(
            work.launches, chosen, decode_kernel, (splits, tiles, lines),
            (q, part.k, part.v, new_k, new_v, k_scale, v_scale, *limits(bounds), length, part.members, out, sums),
            partial(_arguments, work, part, chosen, q, (new_k, new_v), bounds, length, sums is not None),
            (keys, splits, part.first, part.stop, slot, slots),
        )  # fmt: skip
        slot += splits
    if sums is not None:
        power = power_of_2(slots)
        # Few rows of many parts: many programs for a row. Many rows of few parts: one.
        slice_width = whole.width if whole.count >= 1024 else 16
        step = min(power, 4096 // slice_width)
        launch(
            whole.launches, power, merge_kernel, (whole.count, ceil_divide(value_length, slice_width), 1), (sums, out),
            lambda: ((), dict(
                V=value_length, WIDTH=slice_width, SPLITS=power, STEP=step,
                num_warps=4 if step * slice_width >= 2048 else 1,
            )), (slots,),
        )  # fmt: skip
    return out


def _arguments(
    work: Work, part: Part, chosen: Launch, q: Tensor, new: tuple[Tensor | None, Tensor | None], bounds: Tensor | None,
    length: Tensor | None, merged: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What the kernel is given besides tensors and fresh numbers."""
    _, heads, queries, value_length = work.sizes
    scales = None if part.scales is None else part.scales[0]
    numbers = (
        *strides(q), *strides(part.k), *strides(part.v), *strides(new[0])[:2], *strides(new[1])[:2], *strides(scales),
        queries, work.groups, heads // work.groups, work.before or 0, work.scale * math.log2(math.e), work.count,
        work.members,
    )  # fmt: skip
    return numbers, dict(
        C=work.qk_length, V=value_length, CB=work.c, VB=work.width, ROWS=work.rows, STEP=chosen.keys,
        BOUNDED=bounds is not None, COUNTED=length is not None, WINDOWED=work.before is not None,
        CAUSAL=work.causal, POSITIONAL=work.positional,
        SCALED=scales is not None, SPLIT=merged, APPENDED=new[0] is not None, PRECISION="tf32x3",
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip


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
