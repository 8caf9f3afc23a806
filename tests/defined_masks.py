"""Every kind of mask with its definition in plain Python, and random expressions of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import regard as rg
import regard.core.masks
from regard.core.masks import Mask, as_mask

B, H = 3, 2
Rule = Callable[[int, int, int, int], bool]
SLOWLY = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Defined:
    """A mask and what it means, as a Python function of one batch row, head, query position and key position."""

    mask: Mask
    rule: Rule


def brute(rule: Rule, queries: int, keys: int, batch: int = B, heads: int = H) -> torch.Tensor:
    """The rule at every pair; query i stands at keys - queries + i."""
    table = [
        [[[rule(b, h, keys - queries + i, j) for j in range(keys)] for i in range(queries)] for h in range(heads)]
        for b in range(batch)
    ]
    return torch.tensor(table, dtype=torch.bool).reshape(batch, heads, queries, keys)


def seen(mask: Mask, queries: int, keys: int, batch: int = B, heads: int = H) -> torch.Tensor:
    visible = mask.visible(batch, heads, queries, keys)
    assert visible.dtype == torch.bool
    return visible.expand(batch, heads, queries, keys)


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def defined_masks(queries: int, keys: int) -> dict[str, Defined]:
    """Every kind of mask at one shape, with its definition."""
    lengths, starts = [keys, keys // 2, 0], [0, keys // 2, keys]
    holes, ids = seeded(B, keys), seeded(B, keys, seed=1).long()
    left = torch.arange(keys) >= torch.tensor(starts)[:, None]
    height, width = (2, keys // 2) if keys % 2 == 0 else (keys, 1)
    table, wide = seeded(queries, keys, seed=2), seeded(B, H, queries, keys, seed=3)
    first = keys - queries
    return {
        "causal": Defined(rg.causal, lambda b, h, q, k: k <= q),
        "itself": Defined(rg.window(), lambda b, h, q, k: k == q),
        "before": Defined(rg.window(before=2), lambda b, h, q, k: q - 2 <= k <= q),
        "after": Defined(rg.window(after=3), lambda b, h, q, k: q <= k <= q + 3),
        "around": Defined(rg.window(before=1, after=2), lambda b, h, q, k: q - 1 <= k <= q + 2),
        "far": Defined(rg.window(before=99, after=99), lambda b, h, q, k: q - 99 <= k <= q + 99),
        "window2d": Defined(
            rg.window2d(grid=(height, width), radius=1),
            lambda b, h, q, k: q >= 0 and abs(q // width - k // width) <= 1 and abs(q % width - k % width) <= 1,
        ),
        "global": Defined(rg.global_tokens(2), lambda b, h, q, k: 0 <= q < 2 or k < 2),
        "no global": Defined(rg.global_tokens(0), lambda b, h, q, k: False),
        "right padding": Defined(rg.padding(lengths), lambda b, h, q, k: k < lengths[b]),
        "left padding": Defined(rg.padding(valid=left), lambda b, h, q, k: k >= starts[b]),
        "holes": Defined(rg.padding(valid=holes), lambda b, h, q, k: bool(holes[b, k])),
        "segments": Defined(rg.segments(ids), lambda b, h, q, k: q >= 0 and bool(ids[b, q] == ids[b, k])),
        "shared segments": Defined(rg.segments(ids[0]), lambda b, h, q, k: q >= 0 and bool(ids[0, q] == ids[0, k])),
        "dense": Defined(rg.dense(table), lambda b, h, q, k: bool(table[q - first, k])),
        "dense by head": Defined(rg.dense(wide), lambda b, h, q, k: bool(wide[b, h, q - first, k])),
        "dense by row": Defined(rg.dense(wide[:, :1]), lambda b, h, q, k: bool(wide[b, 0, q - first, k])),
        "dense keys": Defined(rg.dense(holes[:1]), lambda b, h, q, k: bool(holes[0, k])),
        "function": Defined(as_mask(lambda b, h, q, k: (q + h - k) % 3 != b), lambda b, h, q, k: (q + h - k) % 3 != b),
        "function of keys": Defined(as_mask(lambda b, h, q, k: k % 2 == 0), lambda b, h, q, k: k % 2 == 0),
        "function of queries": Defined(as_mask(lambda b, h, q, k: q % 2 == 0), lambda b, h, q, k: q % 2 == 0),
    }


KINDS = list(defined_masks(2, 2))
STRUCTURED = [name for name in KINDS if not name.startswith(("dense", "function"))]
NAMED = [name for name in STRUCTURED if name not in ("left padding", "holes", "segments", "shared segments")]
"""Masks whose text says all there is; the others abbreviate their table."""


@dataclass(frozen=True)
class Tree:
    """A random expression at a random shape, as names; built in the test, since drawing must not touch torch."""

    expression: object
    queries: int
    keys: int

    def build(self) -> Defined:
        leaves = defined_masks(self.queries, self.keys)

        def built(part: object) -> Defined:
            if isinstance(part, str):
                return leaves[part]
            how, left, right = part[0], built(part[1]), built(part[2])
            if how == "&":
                return Defined(
                    left.mask & right.mask, lambda b, h, q, k: left.rule(b, h, q, k) and right.rule(b, h, q, k)
                )
            if how == "|":
                return Defined(
                    left.mask | right.mask, lambda b, h, q, k: left.rule(b, h, q, k) or right.rule(b, h, q, k)
                )
            return Defined(~left.mask, lambda b, h, q, k: not left.rule(b, h, q, k))

        return built(self.expression)


def trees(names: list[str] = KINDS) -> st.SearchStrategy[Tree]:
    expressions = st.recursive(
        st.sampled_from(names), lambda inner: st.tuples(st.sampled_from("&&||~"), inner, inner), max_leaves=5
    )
    return st.builds(Tree, expressions, st.integers(0, 9), st.integers(1, 8))
