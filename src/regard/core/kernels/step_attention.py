"""One token of a kernel mechanism's stream on a GPU: what is launched. The kernels are in step.py."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core.kernels.launch import Launches, Layout, ceil_divide, launch, layout, limits, power_of_2, strides
from regard.core.kernels.step import combine_kernel, fold_kernel, token_kernel

TILE = 8192
"""Numbers of a program's tile of the sums, in registers."""
MOST_FEATURES = 128
"""Features of a tile, at most."""
NEAR = 32
"""Newest keys of a program."""
KEYS = 64
"""Keys that `fold` takes at a time, in half precision; of float32 it takes half as many."""
LINES = 32
"""Lines of the square's normaliser that a program of `fold` takes."""


class Form(NamedTuple):
    """phi, as the kernels compute it."""

    name: str
    """"square", "elu" or "given"."""
    beta: float = 0.0
    d: float = 1.0
    rest: float = 0.0
    """"square": its similarity is d·((q·k + beta)² + rest)."""


Tables = tuple[Tensor, Tensor, Tensor] | None
"""For the form "square": the coordinates of each feature, and its scale."""


@dataclass(frozen=True, eq=False)
class Work:
    """Tokens of one set of sizes and strides, and the tiles they are cut into."""

    sizes: tuple[int, int, int, int]
    """Batch, heads, 1 and value_length: the output's."""
    groups: int
    qk_length: int
    features: int
    form: Form
    block: int
    """Features of a tile."""
    rows: int
    d: int
    v: int
    """Queries of a key/value head, qk_length and value_length, rounded up to a power of 2."""
    tiles: int
    near: int
    """Programs of a key/value head that take the sums, and that take the newest keys."""
    lines: int
    width: int
    """Lines of the square's normaliser that each of the first takes, and their length, rounded up."""
    launches: Launches = field(default_factory=dict)

    @property
    def shared(self) -> int:
        """Query heads of a key/value head."""
        return self.sizes[1] // self.groups


def work_of(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, form: Form, new: tuple[Tensor, Tensor] | None = None
) -> Work:
    """The sizes of queries (B, H, 1, K), of the newest keys and values, with room for more, and of a state's sums."""
    return _work(layout(q), layout(k), layout(v), sums.shape[2], form, *([] if new is None else map(layout, new)))


@lru_cache(maxsize=64)
def _work(q: Layout, k: Layout, v: Layout, features: int, form: Form, *new: Layout) -> Work:
    (batch, heads, _, qk_length), (_, groups, room, value_length) = q[0], v[0]
    rows = power_of_2(heads // groups)
    d, wide = (max(16, power_of_2(length)) for length in (qk_length, value_length))
    most = MOST_FEATURES if rows < 16 else 32  # matrix products of float32 numbers take many registers
    block = max(16, min(most, TILE // wide, power_of_2(features)))
    tiles = ceil_divide(features, block)
    return Work(
        sizes=(batch, heads, 1, value_length),
        groups=groups,
        qk_length=qk_length,
        features=features,
        form=form,
        block=block,
        rows=rows,
        d=d,
        v=wide,
        tiles=tiles,
        near=ceil_divide(room, NEAR),
        lines=max(16 if rows >= 16 else 1, power_of_2(ceil_divide(qk_length + 1, tiles))),  # matrix products take 16
        width=max(16, power_of_2(qk_length + 1)),
    )


def token(
    work: Work, q: Tensor, k: Tensor, v: Tensor, new: tuple[Tensor, Tensor] | None, bounds: Tensor | None, sums: Tensor,
    normaliser: Tensor, tables: Tables, keys: int, counted: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The output (B, H, 1, V) of queries (B, H, 1, K) that see the sums and the first `keys` of k (B, G, S, K) and v.

    `bounds` (2, B) are the first real key of each batch row and the one after the last. `new` are the last of these
    keys and values, (B, G, 1, ·), which are yet to be stored in k and v. `counted` are numbers on the GPU: tokens in
    all, and how many of them are in the sums; then `bounds` (1, B) are the first real tokens in all.
    """
    (batch, heads, _, value_length), groups, count = work.sizes, work.groups, work.near + work.tiles
    # Numerators, and behind each a denominator.
    parts = q.new_empty(batch * heads * count * (work.v + 16), dtype=torch.float32)
    out = v.new_empty(work.sizes)
    low, high = (None, None) if bounds is None else (bounds[0], bounds[-1])
    new_k, new_v = (None, None) if new is None else new
    length, gone = (None, None) if counted is None else counted
    left, right, scale = (None, None, None) if tables is None else tables
    launch(
        work.launches, "token", token_kernel, (count, batch * groups, 1),
        (q, k, v, new_k, new_v, sums, normaliser, left, right, scale, parts, low, high, length, gone),
        lambda: ((*strides(q)[:2], *strides(k), *strides(v), *strides(new_k)[:2], *strides(new_v)[:2],
                 groups, work.features, work.near, work.form.beta, work.form.d, work.form.rest), dict(
            D=work.qk_length, V=value_length, DB=work.d, VB=work.v, SHARED=work.shared, ROWS=work.rows,
            BLOCK=work.block, N=NEAR, LINES=work.lines, WIDTH=work.width, FORM=work.form.name,
            BOUNDED=low is not None, COUNTED=length is not None, APPENDED=new_k is not None, num_warps=4,
        )), (keys,),
    )  # fmt: skip
    most = min(power_of_2(count), 64, max(16, TILE // work.v))
    launch(
        work.launches, "combine", combine_kernel, (batch * heads, 1, 1), (parts, out), lambda: ((count,), dict(
            V=value_length, VB=work.v, SHARED=work.shared, COUNT=most, num_warps=4 if most * work.v >= 2048 else 1,
        )),
    )  # fmt: skip
    return out


@dataclass(frozen=True, eq=False)
class Folding:
    """Folds of one set of sizes and strides."""

    block: int
    tiles: int
    launches: Launches = field(default_factory=dict)


@lru_cache(maxsize=64)
def _folding(k: Layout, v: Layout, features: int, form: str) -> Folding:
    block = max(16, min(64, power_of_2(features)))
    lines = ceil_divide(k[0][3] + 1, LINES) if form == "square" else 0
    return Folding(block, ceil_divide(features, block) + lines)


def fold(
    k: Tensor, v: Tensor, bounds: Tensor | None, sums: Tensor, normaliser: Tensor, tables: Tables, form: str,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums and the normaliser with a few more keys (B, G, S, K) in them."""
    assert not in_place or (sums.is_contiguous() and normaliser.is_contiguous())
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    sums, normaliser = sums.contiguous(), normaliser.contiguous()
    (batch, groups, keys, qk_length), value_length, features = k.shape, v.shape[3], sums.shape[2]
    work = _folding(layout(k), layout(v), features, form)
    new_sums, new_normaliser = (t if in_place else torch.empty_like(t) for t in (sums, normaliser))
    low, high = limits(bounds)
    left, right, scale = (None, None, None) if tables is None else tables
    launch(
        work.launches, "fold", fold_kernel, (work.tiles, batch * groups, 1),
        (k, v, sums, normaliser, new_sums, new_normaliser, left, right, scale, low, high),
        lambda: ((*strides(k), *strides(v), keys, groups, features), dict(
            D=qk_length, V=value_length, DB=max(16, power_of_2(qk_length)), VB=max(16, power_of_2(value_length)),
            BLOCK=work.block, N=KEYS if k.dtype.itemsize == 2 else KEYS // 2, LINES=LINES,
            WIDTH=max(16, power_of_2(qk_length + 1)), FORM=form,
            BOUNDED=low is not None, num_warps=4, num_stages=1,
        )),
    )  # fmt: skip
    return new_sums, new_normaliser
