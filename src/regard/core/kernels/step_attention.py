"""One token of a kernel mechanism's stream on a GPU: what is launched. The kernels are in step.py."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core.kernels.launch import Launches, ceil_divide, launch, limits, power_of_2, strides
from regard.core.kernels.step import combine_kernel, fold_kernel, token_kernel

PROGRAMS = 264
"""Programs that read sums side by side: two for each multiprocessor of an H200."""
TILE = 8192
"""Numbers of a tile in registers."""
KEYS = 64
"""Keys that `fold` takes at a time."""


class Form(NamedTuple):
    """phi, as the kernels compute it."""

    name: str
    """"square", "elu" or "given"."""
    beta: float = 0.0
    d: float = 1.0
    rest: float = 0.0
    """"square": its similarity is d·((q·k + beta)² + rest)."""


@dataclass(frozen=True, eq=False)
class Work:
    """Calls of one set of sizes, and the tiles they are cut into."""

    block: int
    """Features of a tile."""
    keys: int
    """Keys of a tile."""
    rows: int
    d: int
    v: int
    """Queries of a key/value head, qk_length and value_length, rounded up to a power of 2."""
    parts: int
    """Programs of a key/value head: the last one takes the newest keys."""
    span: int
    norm_span: int
    """Features of the sums and numbers of the normaliser that each of the others takes."""
    launches: Launches = field(default_factory=dict)


@lru_cache(maxsize=64)
def _work(
    batch: int, groups: int, shared: int, qk_length: int, value_length: int, features: int, norms: int, *kind: object
) -> Work:
    lines, rows = batch * groups, power_of_2(shared)
    d, v = (max(16, power_of_2(length)) for length in (qk_length, value_length))
    # `added` multiplies few rows in registers.
    block, keys = (max(16, min(64, TILE // ((rows if rows < 16 else 1) * wide))) for wide in (v, max(d, v)))
    parts = max(1, min(ceil_divide(features, block), PROGRAMS // lines))
    span, norm_span = (ceil_divide(ceil_divide(total, parts), block) * block for total in (features, norms))
    return Work(block, keys, rows, d, v, parts + 1, span, norm_span)


def token(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, sums: Tensor, normaliser: Tensor,
    tables: tuple[Tensor, Tensor, Tensor] | None, form: Form,
) -> Tensor:  # fmt: skip
    """The output (B, H, 1, V) of queries (B, H, 1, K) that see the sums and the newest keys (B, G, S, K)."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    sums, normaliser = sums.contiguous(), normaliser.contiguous()
    (batch, heads, _, qk_length), (_, groups, keys, value_length) = q.shape, v.shape
    shared, lines = heads // groups, batch * groups
    features, norms = sums.shape[2], normaliser.shape[2]
    kinds = q.dtype, k.dtype, v.dtype, form, strides(q), strides(k), strides(v), q.device
    work = _work(batch, groups, shared, qk_length, value_length, features, norms, *kinds)
    parts = q.new_empty(lines, work.parts, shared, work.v + 16, dtype=torch.float32)  # numerators, then a denominator
    out = v.new_empty(batch, heads, 1, value_length)
    low, high = limits(bounds)
    left, right, scale = (None, None, None) if tables is None else tables
    launch(
        work.launches, ("token", keys), token_kernel, (work.parts, lines, 1),
        (q, k, v, sums, normaliser, left, right, scale, parts, low, high),
        lambda: ((*strides(q)[:2], *strides(k), *strides(v),
                 keys, groups, features, work.span, norms, work.norm_span, form.beta, form.d, form.rest), dict(
            D=qk_length, V=value_length, DB=work.d, VB=work.v, SHARED=shared, ROWS=work.rows, BLOCK=work.block,
            N=work.keys, FORM=form.name, BOUNDED=low is not None, num_warps=4,
        )),
    )  # fmt: skip
    launch(
        work.launches, "combine", combine_kernel, (batch * heads, 1, 1), (parts, out), lambda: ((work.parts,), dict(
            V=value_length, VB=work.v, SHARED=shared, COUNT=16, num_warps=1,
        )),
    )  # fmt: skip
    return out


def fold(
    k: Tensor, v: Tensor, bounds: Tensor | None, sums: Tensor, normaliser: Tensor,
    tables: tuple[Tensor, Tensor, Tensor] | None, form: str, in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums and the normaliser with a few more keys (B, G, S, K) in them."""
    assert not in_place or (sums.is_contiguous() and normaliser.is_contiguous())
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    sums, normaliser = sums.contiguous(), normaliser.contiguous()
    (batch, groups, keys, qk_length), value_length = k.shape, v.shape[3]
    features, norms = sums.shape[2], normaliser.shape[2]
    kinds = k.dtype, v.dtype, form, strides(k), strides(v), k.device
    work = _work(batch, groups, 1, qk_length, value_length, features, norms, *kinds)
    new_sums, new_normaliser = (t if in_place else torch.empty_like(t) for t in (sums, normaliser))
    low, high = limits(bounds)
    left, right, scale = (None, None, None) if tables is None else tables
    tiles = ceil_divide(features, work.block) + (ceil_divide(norms, work.block) if form == "square" else 0)
    launch(
        work.launches, ("fold", keys), fold_kernel, (tiles, batch * groups, 1),
        (k, v, sums, normaliser, new_sums, new_normaliser, left, right, scale, low, high),
        lambda: ((*strides(k), *strides(v), keys, groups, features, norms), dict(
            D=qk_length, V=value_length, VB=work.v, BLOCK=work.block, N=KEYS, FORM=form, BOUNDED=low is not None,
            num_warps=4, num_stages=1,
        )),
    )  # fmt: skip
    return new_sums, new_normaliser
