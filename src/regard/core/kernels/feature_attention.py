"""Attention with few features on a GPU: what is launched, forward and backward. The kernels are in linear.py."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from regard.core.kernels.common import prefix_kernel
from regard.core.kernels.launch import Launches, Layout, ceil_divide, launch, layout, limits, power_of_2, strides
from regard.core.kernels.linear import sum_segments_kernel, walk_kernel, walk_keys_kernel, walk_queries_kernel


class Launch(NamedTuple):
    """Tokens of a program's tile, its warps and the stages of its pipeline."""

    tokens: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"L": self.tokens, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles for one set of lengths and one dtype."""

    c: int
    v: int
    """Features and value_length, rounded up to a power of 2."""
    segment: int
    sums: Launch
    walk: Launch
    walk_back: Launch
    compute: Any

    @property
    def size(self) -> int:
        """Numbers in the sums of a segment."""
        return self.c * self.v + self.c


@lru_cache(maxsize=64)
def tiles(features: int, value_length: int, dtype: torch.dtype) -> Tiles:
    """What fits registers and shared memory, and was fastest on an H200."""
    c, v = (max(16, power_of_2(length)) for length in (features, value_length))
    half = dtype == torch.bfloat16
    if not half:  # float16 too: its range is too small for sums
        sums = walk = walk_back = Launch(32, 4, 2) if max(c, v) <= 64 else Launch(16, 8, 1)
    elif max(c, v) > 64:
        sums, walk, walk_back = Launch(64, 8, 1), Launch(64, 8, 2), Launch(64, 8, 1)
    else:
        sums, walk, walk_back = Launch(32, 4, 3), Launch(64, 4, 3), Launch(64, 4, 2)
    return Tiles(
        c=c,
        v=v,
        segment=1024,
        sums=sums,
        walk=walk,
        walk_back=walk_back,
        compute=tl.bfloat16 if half else tl.float32,
    )


@dataclass(frozen=True, eq=False)
class Work:
    """Calls of one set of sizes and strides, and the tiles they are cut into."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    features: int
    value_length: int
    causal: bool
    feature_map: str
    tiles: Tiles
    launches: Launches = field(default_factory=dict)

    @property
    def shift(self) -> int:
        """The position of the first query."""
        return self.keys - self.queries if self.causal else 0

    @cached_property
    def options(self) -> dict[str, Any]:
        """What every kernel is told."""
        t = self.tiles
        return dict(
            C=self.features, V=self.value_length, CB=t.c, VB=t.v, SEGMENT=t.segment, MAP=self.feature_map,
            COMPUTE=t.compute, PRECISION="tf32x3",
        )  # fmt: skip


def work_of(q: Tensor, k: Tensor, v: Tensor, feature_map: str, causal: bool) -> Work:
    """The sizes of a call."""
    return _work(layout(q), layout(k), layout(v), feature_map, causal)


@lru_cache(maxsize=256)
def _work(q: Layout, k: Layout, v: Layout, feature_map: str, causal: bool) -> Work:
    batch, heads, queries, features = q[0]
    groups, keys, value_length = k[0][1], k[0][2], v[0][3]
    chosen = tiles(features, value_length, q[2])
    return Work(batch, heads, groups, queries, keys, features, value_length, causal, feature_map, chosen)


def no_sums(work: Work, like: Tensor) -> Tensor:
    """Room for the sums of a call's keys, (lines, size) with lines = B · G: sum phi(k) vᵀ and sum phi(k)."""
    return like.new_empty(work.batch * work.groups, work.tiles.size, dtype=torch.float32)


def _sums(
    work: Work,
    x: Tensor,
    y: Tensor,
    bounds: Tensor | None,
    backward: tuple[Tensor, ...] | None = None,
    initial: Tensor | None = None,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sums before each segment (after it, in the backward pass), and which segments hold a NaN or infinity."""
    t, heads, length = work.tiles, x.shape[1], x.shape[2]
    shared = heads // work.groups
    slots = ceil_divide(work.keys if work.causal else length, t.segment)
    sums = x.new_empty(work.batch * heads, slots, t.size, dtype=torch.float32)
    bad = x.new_empty(work.batch * heads, slots, dtype=torch.int32)
    grad, out, den, e = (None,) * 4 if backward is None else backward
    low, high = (None, None) if bounds is None or backward is not None else (bounds[0], bounds[1])
    launch(
        work.launches, ("sums", backward is None, strides(grad)), sum_segments_kernel, (slots, work.batch * heads, 1),
        (x, y, grad, out, den, e, sums, bad, low, high),
        lambda: ((*strides(x), *strides(y), *strides(grad), length, 0 if backward is None else work.shift, heads, slots,
                 t.size), dict(
            BOUNDED=low is not None, BACKWARD=backward is not None, **work.options, **t.sums.options,
        )),
    )  # fmt: skip
    if not work.causal:
        return sums.view(work.batch * work.groups, shared * slots, t.size).sum(1), bad
    before = sums.new_empty(work.batch * work.groups, slots, t.size)
    launch(
        work.launches, ("prefix", backward is None), prefix_kernel,
        (ceil_divide(t.size, 128), work.batch * work.groups, 1),
        (sums, before, initial, final), lambda: ((slots, t.size), dict(
            SHARED=shared, REVERSE=backward is not None, INCLUSIVE=False, STEPS=32, BLOCK=128, num_warps=4,
        )),
    )  # fmt: skip
    return before, bad


def _segments(work: Work) -> tuple[int, int]:
    """The first segment that has queries, by position, and how many there are."""
    first = work.shift // work.tiles.segment
    return first, ceil_divide(work.shift + work.queries, work.tiles.segment) - first


def forward(
    work: Work,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    initial: Tensor | None = None,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) and its denominators (B, H, T).

    Keys come after those in the sums `initial`; `final` is filled with the sums of all.
    """
    t = work.tiles
    low, high = limits(bounds)
    out = q.new_empty(work.batch, work.heads, work.queries, work.value_length)
    den = q.new_empty(work.batch, work.heads, work.queries, dtype=torch.float32)
    alone = work.causal and work.keys <= t.segment and initial is final is None
    before, bad = (None, None) if alone else _sums(work, k, v, bounds, None, initial, final)
    slots = ceil_divide(work.keys, t.segment) if work.causal else 1
    first, segments = _segments(work)
    launch(
        work.launches, ("walk", alone), walk_kernel, (segments, work.batch * work.heads, 1),
        (q, k, v, before, bad, out, den, low, high),
        lambda: ((*strides(q), *strides(k), *strides(v), work.queries, work.keys, work.shift, work.heads, work.groups,
                 slots, t.size, first), dict(
            CAUSAL=work.causal, BOUNDED=low is not None, ALONE=alone, **work.options, **t.walk.options,
        )),
    )  # fmt: skip
    return out, den


def fold(work: Work, k: Tensor, v: Tensor, bounds: Tensor | None, initial: Tensor, final: Tensor) -> None:
    """Fill `final` with the sums `initial` and those of more keys."""
    _sums(work, k, v, bounds, None, initial, final)


def backward(
    work: Work, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, out: Tensor, den: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    t = work.tiles
    low, high = limits(bounds)
    kind = torch.bfloat16 if t.compute == tl.bfloat16 else torch.float32
    # Queries before the first key are in no segment's sums, and nothing is written for them.
    new = torch.zeros_like if work.shift < 0 else torch.empty_like
    w, e = new(out, dtype=kind), new(den)
    before, bad = _sums(work, k, v, bounds)
    after, _ = _sums(work, q, w, bounds, (grad, out, den, e))
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (q, k, v))
    first, segments = _segments(work)
    slots = bad.shape[1] if work.causal else 1
    launch(
        work.launches, "walk queries", walk_queries_kernel, (segments, work.batch * work.heads, 1),
        (q, w, e, k, v, before, bad, q_grad, low, high),
        lambda: ((*strides(q), *strides(w), *strides(k), *strides(v), work.queries, work.keys, work.shift, work.heads,
                 work.groups, slots, t.size, first), dict(
            CAUSAL=work.causal, BOUNDED=low is not None, **work.options, **t.walk_back.options,
        )),
    )  # fmt: skip
    launch(
        work.launches, "walk keys", walk_keys_kernel, (ceil_divide(work.keys, t.segment), work.batch * work.groups, 1),
        (k, v, q, w, e, after, k_grad, v_grad, low, high),
        lambda: ((*strides(k), *strides(v), *strides(q), *strides(w), work.queries, work.keys, work.shift, work.groups,
                 slots, t.size), dict(
            SHARED=work.heads // work.groups, CAUSAL=work.causal, BOUNDED=low is not None,
            **work.options, **t.walk_back.options,
        )),
    )  # fmt: skip
    return q_grad, k_grad, v_grad
