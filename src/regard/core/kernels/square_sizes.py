"""Sizes of attention with a second-order polynomial kernel on a GPU: a call, the tiles it is cut into, its sums."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from regard.core.kernels.launch import Launches, Layout, layout, power_of_2

UNIT = 128
"""Features of a unit, as quadratic.py cuts the square."""


class Launch(NamedTuple):
    """Sizes of a program's tile, its warps and the stages of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles for one set of lengths and one dtype."""

    d: int
    v: int
    """qk_length and value_length, rounded up to a power of 2."""
    units: int
    chunk: int
    size: int
    """Numbers in the small sums of a chunk."""
    left: int
    right: int
    """Coordinates i and j of the features that a program of `square` holds."""
    sums: Launch
    square: Launch
    near: Launch
    far: Launch
    pull: Launch
    near_keys: Launch
    compute: Any
    precision: str


@lru_cache(maxsize=64)
def tiles(qk_length: int, value_length: int, dtype: torch.dtype) -> Tiles:
    """What fits registers and shared memory, and was fastest on an H200."""
    d, v = (max(16, power_of_2(length)) for length in (qk_length, value_length))
    blocks = -(-qk_length // 16)
    half = dtype == torch.bfloat16
    wide = max(d, v) > 64
    taken = 128 // v  # coordinates of x that a step of `pull` takes
    if not half:  # float16 too: its range is too small for sums
        left, right = 4, 16 if d == 16 else 32
        sums, square, near, far, pull = (Launch(32, 0, 4, 2), Launch(32, 0, 4, 2), Launch(64, 32, 4, 2),
                                         Launch(64, 0, 4, 2), Launch(64, taken, 4, 2))  # fmt: skip
    elif wide:
        left, right = 8, 32
        sums, square, near, far, pull = (Launch(64, 0, 8, 1), Launch(64, 0, 8, 3), Launch(128, 64, 8, 2),
                                         Launch(128, 0, 8, 3), Launch(128, max(2, taken), 8, 2))  # fmt: skip
    elif max(d, v) <= 32:
        left, right = 8, 16
        # Without a pipeline: with one, tiles lie in shared memory so that reading them crosswise takes turns.
        sums, square, near, far, pull = (Launch(32, 0, 2, 2), Launch(64, 0, 4, 4), Launch(128, 32, 4, 3),
                                         Launch(64, 0, 4, 3), Launch(128, taken, 4, 3))  # fmt: skip
    else:
        left, right = 8, 16
        sums = Launch(32, 0, 4, 3)
        square, near, far, pull = (Launch(64, 0, 4, 3), Launch(128, 64, 4, 3), Launch(128, 0, 4, 3),
                                   Launch(128, taken, 4, 3))  # fmt: skip
    return Tiles(
        d=d,
        v=v,
        units=blocks * (blocks + 1),
        chunk=512,
        size=-(-(d * v + d * d + d + v + 1) // 16) * 16,
        left=left,
        right=right,
        sums=sums,
        square=square,
        near=near,
        far=far,
        pull=pull,
        compute=tl.bfloat16 if half else tl.float32,
        precision="tf32x3",
        near_keys=Launch(64, 64 if d > 32 else 32, 4, 3) if half and not wide else near,
    )


Sums = tuple[Tensor, Tensor]
"""Sums over keys, float32: the square (lines, features, V) and the small sums (lines, size), lines being B · G."""


@dataclass(frozen=True, eq=False)
class Work:
    """Calls of one set of sizes and strides, and the tiles they are cut into."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    qk_length: int
    value_length: int
    causal: bool
    tiles: Tiles
    a: float
    b: float
    d: float
    launches: Launches = field(default_factory=dict)

    @property
    def shift(self) -> int:
        """The position of the first query."""
        return self.keys - self.queries if self.causal else 0

    @property
    def chunks(self) -> int:
        return -(-self.keys // self.tiles.chunk)

    @property
    def kind(self) -> torch.dtype:
        """The dtype that matrix products take."""
        return torch.bfloat16 if self.tiles.compute == tl.bfloat16 else torch.float32

    @property
    def shared(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.groups

    @property
    def rest(self) -> float:
        """The rest of the kernel besides d·(q·k + b/2d)², over d."""
        rest = self.a - self.b * self.b / (4 * self.d)
        return rest / self.d if abs(rest) > 1e-12 else 0.0


def work_of(q: Tensor, k: Tensor, v: Tensor, a: float, b: float, d: float, causal: bool) -> Work:
    """The sizes of a call."""
    return _work(layout(q), layout(k), layout(v), a, b, d, causal)


@lru_cache(maxsize=256)
def _work(q: Layout, k: Layout, v: Layout, a: float, b: float, d: float, causal: bool) -> Work:
    batch, heads, queries, qk_length = q[0]
    groups, keys, value_length = k[0][1], k[0][2], v[0][3]
    chosen = tiles(qk_length, value_length, q[2])
    return Work(batch, heads, groups, queries, keys, qk_length, value_length, causal, chosen, a, b, d)


def no_sums(work: Work, like: Tensor) -> Sums:
    """Room for the sums of a call's keys."""
    t, lines = work.tiles, work.batch * work.groups
    square = like.new_empty(lines, t.units * UNIT, t.v, dtype=torch.float32)
    return square, like.new_empty(lines, t.size, dtype=torch.float32)
