"""Masks against brute-force definitions over positions: pair by pair, in plain Python."""

import copy
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from itertools import pairwise

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import regard as rg
import regard.core.masks
from regard.core.calls.call import Call
from regard.core.masks import Band, Mask, Packed, Padding, as_mask
from regard.core.masks.structure import blocks, count_pairs, positions, reached, structure_of
from regard.core.paths import masked

B, H = 3, 2
NAMES = {name: getattr(rg, name) for name in rg.__all__}
"""What a user has after `from regard import *`."""
SHAPES = [(4, 4), (2, 6), (6, 2), (1, 6), (6, 4), (8, 8), (0, 4), (1, 1)]
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_its_definition(kind: str, shape: tuple[int, int]) -> None:
    case = defined_masks(*shape)[kind]
    assert torch.equal(seen(case.mask, *shape), brute(case.rule, *shape))


def test_the_last_query_stands_at_the_last_key() -> None:
    assert str(rg.causal.draw(2, 4)) == "■ ■ ■ ·\n■ ■ ■ ■"
    assert str(rg.causal.draw(4, 2)) == "· ·\n· ·\n■ ·\n■ ■"
    assert str(rg.window(before=1).draw(1, 3)) == "· ■ ■"


def test_a_dense_table_of_all_positions_serves_a_later_chunk() -> None:
    table = seeded(6, 6)
    assert torch.equal(seen(rg.dense(table), 2, 6)[0, 0], table[4:])


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


@SLOWLY
@given(trees())
def test_an_expression_is_its_definition(tree: Tree) -> None:
    case, queries, keys = tree.build(), tree.queries, tree.keys
    assert torch.equal(seen(case.mask, queries, keys), brute(case.rule, queries, keys))


@SLOWLY
@given(trees(), st.data())
def test_spans_cover_every_visible_key(tree: Tree, data: st.DataObject) -> None:
    case, queries, keys = tree.build(), tree.queries, tree.keys
    start = data.draw(st.integers(0, queries))
    stop = data.draw(st.integers(start, queries))
    first = keys - queries
    spans = case.mask.spans(start + first, stop + first, keys)
    assert all(0 <= low <= high <= keys for low, high in spans)
    assert all(former[1] <= latter[0] for former, latter in pairwise(spans)), "spans overlap or are unsorted"
    covered = torch.zeros(keys, dtype=torch.bool)
    covered[positions(spans)] = True
    visible = brute(case.rule, queries, keys)[:, :, start:stop].any(0).any(0).any(0)
    assert not (visible & ~covered).any()


@SLOWLY
@given(trees())
def test_structure_loses_nothing(tree: Tree) -> None:
    """Band and padding and rest, put together again, are the mask."""
    case, queries, keys = tree.build(), tree.queries, tree.keys
    parts = structure_of(case.mask, queries, keys)
    again = seen(Band(parts.before, parts.after), queries, keys)
    valid = parts.valid(keys)
    if valid is not None:
        again = again & valid[:, None, None]
    if parts.rest is not None:
        again = again & seen(parts.rest, queries, keys)
    assert torch.equal(again, brute(case.rule, queries, keys))


@SLOWLY
@given(trees(), st.lists(st.integers(0, B - 1), min_size=1, max_size=B), st.integers(0, 7))
def test_a_part_is_that_part_of_the_table(tree: Tree, rows: list[int], begin: int) -> None:
    case, keys = tree.build(), tree.keys
    begin = min(begin, keys)
    queries = min(tree.queries, keys - begin)
    part = case.mask.part(tuple(rows), begin, keys)
    expected = brute(case.rule, queries, keys)[rows][..., begin:]
    again = torch.ones_like(expected) if part is None else seen(part, queries, keys - begin, batch=len(rows))
    assert torch.equal(again, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("function")])
def test_a_pickled_mask_is_the_same_mask(kind: str) -> None:
    mask = defined_masks(4, 4)[kind].mask
    for original in (mask, mask & rg.causal, mask | rg.causal, ~mask):
        again = pickle.loads(pickle.dumps(original))
        assert repr(again) == repr(original)
        assert torch.equal(seen(again, 4, 4), seen(original, 4, 4))
        # Where pickles of earlier versions look for it.
        assert getattr(regard.core.masks, type(original).__name__) is type(original)


class Slotted(Mask):
    """A user's mask without a `__dict__`."""

    __slots__ = ("step",)

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query - key) % self.step == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_mask_with_slots_is_copied_without_what_is_remembered_of_it(copied: Callable[[Mask], Mask]) -> None:
    mask = Slotted(2)
    structure_of(mask, 4, 4)
    again = copied(mask)
    assert torch.equal(seen(again, 4, 4), seen(mask, 4, 4))
    assert not any(hasattr(again, name) for name in Mask.__slots__)
    assert type(copied(Mask())) is Mask


@pytest.mark.parametrize("far", [2**62, 2**63 - 1, 2**63, 2**70], ids=["2^62", "2^63 - 1", "2^63", "2^70"])
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (5, 5)], ids=str)
def test_a_distance_beyond_all_keys_is_no_limit(far: int, sizes: tuple[int, int]) -> None:
    queries, keys = sizes
    q, k = torch.randn(1, 1, queries, 16), torch.randn(1, 1, keys, 16)
    for mask, rule in (
        (rg.window(after=far), rg.window(after=9)),
        (rg.window(before=far), rg.window(before=9)),
        (rg.window(before=far, after=far), None),
        (rg.global_tokens(far), rg.global_tokens(9)),
        (rg.window2d((1, keys), far), rg.window2d((1, keys), 9)),
    ):
        for path in (None, "reference"):
            assert torch.equal(rg.attend(q, k, k, mask=mask, path=path), rg.attend(q, k, k, mask=rule, path=path))


@SLOWLY
@given(trees())
def test_count_pairs_is_the_number_of_visible_pairs(tree: Tree) -> None:
    case, queries, keys = tree.build(), tree.queries, tree.keys
    visible = brute(case.rule, queries, keys)
    expected = int(visible.sum()) if case.mask.structured else visible.numel()
    assert count_pairs(case.mask, B, H, queries, keys) == expected


@SLOWLY
@given(trees(), st.integers(0, 2**16))
def test_reached_says_who_sees_a_flagged_key(tree: Tree, seed: int) -> None:
    case, queries, keys = tree.build(), tree.queries, tree.keys
    flags = seeded(B, 1, keys, seed=seed) & seeded(B, 1, keys, seed=seed + 1)
    expected = (brute(case.rule, queries, keys) & flags[:, :, None]).any(-1)
    assert torch.equal(reached(case.mask, flags, H, queries), expected)


@SLOWLY
@given(trees(NAMED))
def test_repr_reads_back_as_the_same_mask(tree: Tree) -> None:
    """Precedence: Python itself, reading the text, must build the same mask."""
    case, queries, keys = tree.build(), tree.queries, tree.keys
    assert torch.equal(seen(eval(repr(case.mask), NAMES), queries, keys), brute(case.rule, queries, keys))


@pytest.mark.parametrize("kind", STRUCTURED)
def test_counts_and_reach_agree_beyond_one_block(kind: str) -> None:
    """Longer than the blocks in which masks are walked, T ≠ S both ways."""
    for queries, keys in ((300, 300), (150, 400), (400, 150)):
        mask = defined_masks(queries, keys)[kind].mask & ~rg.window(before=3)
        visible = seen(mask, queries, keys)
        assert count_pairs(mask, B, H, queries, keys) == int(visible.sum())
        flags = seeded(B, 1, keys, seed=5)
        assert torch.equal(reached(mask, flags, H, queries), (visible & flags[:, :, None]).any(-1))


def test_blocks_walk_all_queries_once() -> None:
    walked = list(blocks(rg.causal & rg.window(before=10), 300, 500))
    assert [pair[:2] for pair in walked] == [(0, 128), (128, 256), (256, 300)]
    assert walked[1][2] == [(128 + 200 - 10, 256 + 200)]


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (rg.causal, "causal"),
        (rg.window(before=2, after=1), "Window(before=2, after=1)"),
        (rg.causal & rg.window(2) | rg.global_tokens(1), "(causal & Window(before=2)) | global_tokens(1)"),
        (rg.causal & (rg.window(2) | rg.global_tokens(1)), "causal & (Window(before=2) | global_tokens(1))"),
        (~(rg.causal | rg.global_tokens(1)), "~(causal | global_tokens(1))"),
        (~rg.causal & rg.padding([1, 2]), "~causal & padding([1, 2])"),
        (~~rg.causal, "~~causal"),
        (rg.causal & rg.causal & rg.causal, "causal & causal & causal"),
        (rg.window2d(grid=(2, 3), radius=1), "window2d(grid=(2, 3), radius=1)"),
        (rg.padding([1] * 9), "padding([1, 1, 1, 1, … 9 rows])"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_repr(mask: Mask, text: str) -> None:
    assert repr(mask) == text


def test_a_window_is_a_value() -> None:
    near = rg.Window(before=15)
    assert near == rg.window(before=15) == rg.Window(15, 0) == pickle.loads(pickle.dumps(near))
    assert near != rg.Window(15, 1)
    assert len({near, rg.Window(15), rg.Window(8, 8)}) == 2
    assert (near.width, rg.Window(8, 8).width) == (16, 17)
    with pytest.raises(FrozenInstanceError):
        near.before = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"^after: expected a whole number of at least 0, got -1"):
        rg.Window(3, -1)


def even_keys(batch: torch.Tensor, head: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return kv_idx % 2 == 0


@pytest.mark.parametrize("joined", [rg.causal & even_keys, even_keys & rg.causal], ids=["mask first", "function first"])
def test_a_mask_mod_composes_from_either_side(joined: Mask) -> None:
    expected = brute(lambda b, h, q, k: k <= q and k % 2 == 0, 3, 5)
    assert torch.equal(seen(joined, 3, 5), expected)
    assert not joined.structured
    assert "function(even_keys)" in repr(joined)


def test_a_mask_mod_composes_by_or() -> None:
    expected = brute(lambda b, h, q, k: k == q or k % 2 == 0, 3, 5)
    assert torch.equal(seen(rg.window() | even_keys, 3, 5), expected)
    assert torch.equal(seen(even_keys | rg.window(), 3, 5), expected)


def test_a_mask_mod_serves_attention() -> None:
    """A bare function is as good as the mask it stands for, in attend and in weights."""
    q, k, v = (
        torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)
    )
    by_name, by_rule = rg.attend(q, k, v, mask=rg.causal), rg.attend(q, k, v, mask=lambda b, h, q, k: q >= k)
    assert (by_name - by_rule).abs().max() <= 1e-12
    assert torch.equal(rg.weights(q, k, mask=lambda b, h, q, k: q >= k) > 0, seen(rg.causal, 5, 5, 2, 2))


@pytest.mark.parametrize("narrow", ["keys", "queries", "heads", "batch", "constant"])
def test_a_mask_mod_may_look_at_one_position_only(narrow: str) -> None:
    """A rule's answer broadcasts: it need not have all four dimensions, on any path."""
    rules: dict[str, tuple[Callable[..., torch.Tensor], Rule]] = {
        "keys": (lambda b, h, q, k: k > 1, lambda b, h, q, k: k > 1),
        "queries": (lambda b, h, q, k: q > 1, lambda b, h, q, k: q > 1),
        "heads": (lambda b, h, q, k: h > 0, lambda b, h, q, k: h > 0),
        "batch": (lambda b, h, q, k: b > 0, lambda b, h, q, k: b > 0),
        "constant": (lambda b, h, q, k: torch.tensor(True), lambda b, h, q, k: True),
    }
    mask, rule = rules[narrow]
    table = brute(rule, 5, 5, 2, 2)
    q, k, v = (
        torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)
    )
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~table, -math.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0) @ v
    for path in (None, "blocks", "reference"):
        assert (rg.attend(q, k, v, mask=mask, path=path) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("shape", [(4, 4), (2, 6), (6, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_text_is_the_definition(kind: str, shape: tuple[int, int]) -> None:
    case = defined_masks(*shape)[kind]
    table = brute(case.rule, *shape)[1, 1].tolist()
    expected = "\n".join(" ".join("■" if cell else "·" for cell in row) for row in table)
    assert str(case.mask.draw(*shape, batch=1, head=1)) == expected


def test_a_drawing_is_saved_as_a_real_picture(tmp_path) -> None:
    drawing = (rg.causal & rg.window(before=2)).draw(6, 9)
    path = drawing.save(tmp_path / "mask.png")
    assert path == tmp_path / "mask.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["mask.png"], "a temporary file is left"
    with Image.open(path) as picture:
        picture.load()
        colours = set(picture.convert("RGB").get_flattened_data())
    assert {(0x2B, 0x5C, 0x8A), (0xEE, 0xF1, 0xF5)} <= colours


def test_a_picture_shows_the_very_cells() -> None:
    drawing = rg.causal.draw(3, 5)
    (axes,) = drawing.plot().axes
    assert torch.equal(torch.as_tensor(axes.images[0].get_array().data.copy()).bool(), seen(rg.causal, 3, 5)[0, 0])
    assert axes.get_title("left").strip() == "causal"


@pytest.mark.parametrize(
    ("name", "argument"), [("mask.txt", "path"), ("mask", "path"), ("nowhere/mask.png", "path")], ids=str
)
def test_a_drawing_refuses_a_bad_file_name(tmp_path, name: str, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}: expected .* got "):
        rg.causal.draw(3).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "expected"),
    [
        (None, 4, 4, dict(before=None, after=None, causal=False, windowed=False)),
        (rg.causal, 4, 4, dict(before=None, after=0, causal=True, windowed=False)),
        (rg.causal, 1, 4, dict(before=None, after=None, causal=False, windowed=False)),
        (rg.causal, 6, 4, dict(before=None, after=0, causal=True, windowed=False)),
        (rg.causal & rg.window(before=2, after=3), 5, 5, dict(before=2, after=0, causal=True, windowed=True)),
        (rg.window(before=9, after=9), 5, 5, dict(before=None, after=None, causal=False, windowed=False)),
        (rg.window(before=4, after=3), 5, 5, dict(before=None, after=3, causal=False, windowed=True)),
    ],
)  # fmt: skip
def test_structure_of_bands(mask: Mask | None, queries: int, keys: int, expected: dict[str, object]) -> None:
    structure = structure_of(mask, queries, keys)
    assert {name: getattr(structure, name) for name in expected} == expected
    assert structure.rest is None
    assert structure.paddings == ()


def test_structure_of_padding() -> None:
    left = torch.arange(5) >= torch.tensor([[2], [0]])
    assert structure_of(rg.padding(valid=left) & rg.padding([4, 5]), 5, 5).rows == ((2, 4), (0, 5))
    assert structure_of(rg.padding([5, 5]), 5, 5).paddings == (), "padding that hides nothing is no padding"
    holes = torch.tensor([[True, False, True]])
    assert structure_of(rg.padding(valid=holes), 3, 3).rows is None
    assert structure_of(rg.padding(valid=holes), 3, 3).valid(3).tolist() == holes.tolist()
    assert structure_of(rg.causal | rg.padding([3]), 3, 3).rest is not None, "a union is not a conjunction"


@pytest.mark.parametrize("batch", [0, 1, 4])
@pytest.mark.parametrize("kind", ["causal", "padding", "segments", "global"])
def test_masks_of_an_empty_batch(kind: str, batch: int) -> None:
    mask = {
        "causal": rg.causal,
        "padding": rg.padding([2] * batch),
        "segments": rg.segments(torch.zeros(batch, 3, dtype=torch.long)),
        "global": rg.global_tokens(1) | rg.window(),
    }[kind]
    assert mask.visible(batch, 2, 3, 3).expand(batch, 2, 3, 3).shape == (batch, 2, 3, 3)
    assert count_pairs(mask, batch, 2, 3, 3) == int(seen(mask, 3, 3, batch, 2).sum())
    assert all(0 <= low <= high <= 3 for low, high in mask.spans(0, 3, 3))


@pytest.fixture
def own_errors() -> Iterator[None]:
    """The annotations' own checks off, as they are for users: the library's words are under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def fit(mask: Mask, batch: int = 2, heads: int = 2, queries: int = 4, keys: int = 4) -> None:
    mask.fits(batch, heads, queries, keys)


def table(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: rg.window(before=-1), "before"),
        (lambda: rg.window(after=-1), "after"),
        (lambda: rg.window(before=1.5), "before"),
        (lambda: rg.window(before=True), "before"),
        (lambda: rg.window(before=None), "before"),
        (lambda: rg.global_tokens(-1), "n"),
        (lambda: rg.window2d(grid=(0, 3), radius=1), "grid"),
        (lambda: rg.window2d(grid=(3,), radius=1), "grid"),
        (lambda: rg.window2d(grid=3, radius=1), "grid"),
        (lambda: rg.window2d(grid=(3, 3), radius=-1), "radius"),
        (lambda: rg.padding([1, -1]), "lengths"),
        (lambda: rg.padding([1.0]), "lengths"),
        (lambda: rg.padding([True]), "lengths"),
        (lambda: rg.padding(torch.tensor([1.0])), "lengths"),
        (lambda: rg.padding(torch.tensor([[1]])), "lengths"),
        (lambda: rg.padding(5), "lengths"),
        (lambda: rg.padding(valid=torch.ones(2, 3)), "valid"),
        (lambda: rg.padding(valid=table(3)), "valid"),
        (lambda: rg.padding(valid=[[True, False]]), "valid"),
        (lambda: rg.padding(), "padding"),
        (lambda: rg.padding([1], valid=table(1, 1)), "padding"),
        (lambda: rg.segments(torch.zeros(2, 3)), "ids"),
        (lambda: rg.segments(torch.zeros(1, 2, 3, dtype=torch.long)), "ids"),
        (lambda: rg.segments([[0], [0, 1]]), "ids"),
        (lambda: rg.dense(torch.zeros(3, 3)), "mask"),
        (lambda: rg.dense([[True]]), "mask"),
        (lambda: rg.dense(table(3)), "mask"),
        (lambda: rg.dense(table(3, 4, 4)), "mask"),
        (lambda: rg.causal & None, "mask"),
        (lambda: rg.causal | "causal", "mask"),
        (lambda: fit(rg.padding([1, 2, 3])), "mask"),
        (lambda: fit(rg.padding([1, 5])), "mask"),
        (lambda: fit(rg.padding(valid=seeded(2, 5))), "mask"),
        (lambda: fit(rg.segments(torch.zeros(2, 5, dtype=torch.long))), "mask"),
        (lambda: fit(rg.segments(torch.zeros(3, 4, dtype=torch.long))), "mask"),
        (lambda: fit(rg.window2d(grid=(2, 3), radius=1)), "mask"),
        (lambda: fit(rg.dense(table(3, 4))), "mask"),
        (lambda: fit(rg.dense(table(4, 3))), "mask"),
        (lambda: fit(rg.dense(table(3, 1, 4, 4))), "mask"),
        (lambda: fit(rg.dense(table(1, 3, 4, 4))), "mask"),
        (lambda: fit(rg.causal & ~rg.padding([1])), "mask"),
        (lambda: as_mask(lambda b, h, q, k: (q - k).float()).visible(1, 1, 2, 2), "mask"),
        (lambda: as_mask(lambda b, h, q, k: True).visible(1, 1, 2, 2), "mask"),
        (lambda: as_mask(lambda b, h, q, k: table(5)).visible(1, 1, 2, 2), "mask"),
        (lambda: rg.padding([1, 2]).draw(3, batch=2), "batch"),
        (lambda: rg.causal.draw(-1), "queries"),
        (lambda: rg.segments([[0, 1]]).draw(3), "mask"),
        (lambda: rg.dense(table(2, 2)).draw(3), "mask"),
    ],
)  # fmt: skip
def test_bad_arguments(own_errors: None, make: Callable[[], object], argument: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^{argument}: expected .*got "):
        make()


def test_a_dense_table_gives_nothing_to_queries_it_has_no_row_for() -> None:
    """S rows, T > S queries: the first queries stand before the table; they are refused or see nothing."""
    mask = rg.dense(table(2, 2))
    try:
        mask.fits(1, 1, 4, 2)
    except ValueError:
        return
    assert not mask.visible(1, 1, 4, 2).expand(1, 1, 4, 2)[:, :, :2].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_as_a_mask_gives_what_slices_give(side, causal):
    """What a GPU does with many lengths, and a CPU with few queries without causality."""
    lengths = torch.tensor([9, 0, 4, 7, 1, 8])[:, None]
    place = torch.arange(9)
    rule = rg.padding(valid=place < lengths if side == "right" else place >= 9 - lengths)
    rule = rg.causal & rule if causal else rule
    q, k, v = (torch.randn(6, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2))
    call = Call(rg.Softmax(), q, k, v, rule)
    assert (masked.cannot(call) is None) == (not causal)
    assert (masked.run(call) - rg.attend(q, k, v, mask=rule, path="reference")).abs().max() < 1e-12


@pytest.mark.parametrize(
    "spell",
    [
        lambda mask: rg.causal and mask,
        lambda mask: mask or rg.causal,
        lambda mask: not mask,
        lambda mask: 1 if mask & rg.causal else 0,
    ],
)
@pytest.mark.parametrize("mask", [rg.causal, rg.padding([2]), rg.window(1) | rg.causal, ~rg.causal], ids=repr)
def test_python_words_for_masks_are_refused(spell: Callable[[Mask], object], mask: Mask) -> None:
    """`causal and padding(…)` would be the padding alone."""
    with pytest.raises(ValueError, match=r"^mask: expected &, \| or ~"):
        spell(mask)


WHOLE = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_whole_numbers_of_any_kind_make_the_same_masks(kind: type) -> None:
    lengths, ids = np.array([3, 1, 5], dtype=kind), np.array([[0, 0, 1, 1, 1]], dtype=kind)
    pairs = {
        rg.padding([3, 1, 5]): [rg.padding(lengths), rg.padding(list(lengths)), rg.padding(torch.from_numpy(lengths))],
        rg.segments(ids.tolist()): [rg.segments(ids), rg.segments(torch.from_numpy(ids))],
        rg.window(2, 1): [rg.window(kind(2), kind(1)), rg.window(torch.from_numpy(lengths - 1)[0], after=kind(1))],
        rg.global_tokens(2): [rg.global_tokens(kind(2))],
        rg.window2d((1, 5), 1): [rg.window2d((kind(1), kind(5)), kind(1))],
    }
    for expected, masks in pairs.items():
        for mask in masks:
            assert repr(mask) == repr(expected)
            assert torch.equal(seen(mask, 5, 5), seen(expected, 5, 5))


def test_numpy_tables_are_masks() -> None:
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    table, valid = seeded(5, 5).numpy(), seeded(2, 5, seed=4).numpy()
    table.flags.writeable = False
    both = torch.tensor(table) & torch.tensor(valid)[:, None, None]
    expected = rg.attend(q, k, v, mask=both)
    for mask in (
        both.numpy(),
        rg.dense(table) & rg.padding(valid=valid),
        table & rg.padding(valid=valid),
        rg.padding(valid=valid) & table,
        both.flip(3).numpy()[..., ::-1],
        rg.dense(np.asfortranarray(table)) & rg.padding(valid=valid[::-1].copy()[::-1]),
    ):
        assert torch.equal(rg.attend(q, k, v, mask=mask), expected)
    lengths, ids = np.array([2, 5]), np.array([[0, 0, 1, 1, 1]])
    assert repr(rg.padding(lengths[::-1])) == repr(rg.padding([5, 2]))
    assert torch.equal(seen(rg.segments(ids[:, ::-1]), 5, 5), seen(rg.segments(ids[:, ::-1].tolist()), 5, 5))
    rows = np.array([4, -2])
    assert torch.equal(rg.weights(q, k, mask=table, rows=rows), rg.weights(q, k, mask=table)[:, :, rows])


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: rg.padding(np.array([1.5])), "lengths"),
        (lambda: rg.padding(np.array([True])), "lengths"),
        (lambda: rg.padding(np.array(["a"])), "lengths"),
        (lambda: rg.padding(np.array([[1]])), "lengths"),
        (lambda: rg.padding(np.array([-1])), "lengths"),
        (lambda: rg.padding([np.True_]), "lengths"),
        (lambda: rg.padding(valid=np.array([[1]])), "valid"),
        (lambda: as_mask(np.zeros((2, 2))), "mask"),
        (lambda: as_mask(np.array([[object()]])), "mask"),
        (lambda: rg.padding(np.array([1], dtype=">i8" if sys.byteorder == "little" else "<i8")), "lengths"),
        (lambda: rg.window(np.float32(1)), "before"),
        (lambda: rg.window(torch.tensor(True)), "before"),
        (lambda: rg.segments(np.array([0.5])), "ids"),
    ],
)
def test_bad_numpy_arguments(own_errors: None, make: Callable[[], object], argument: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^{argument}: expected .*got "):
        make()


@pytest.mark.parametrize("rows", [(0,), (2, 1), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("begin", [0, 3, 7])
@pytest.mark.parametrize("form", ["intervals", "a table", "lengths of a trace"])
def test_a_part_of_padding_is_that_part_of_its_table(form: str, begin: int, rows: tuple[int, ...]) -> None:
    lengths, keys = [7, 4, 0, 5], 7
    padding = {
        "intervals": Padding(tuple((0, length) for length in lengths)),
        "a table": Padding(None, torch.arange(keys) < torch.tensor(lengths)[:, None]),
        "lengths of a trace": Padding(None, ends=torch.tensor(lengths)),
    }[form]
    expected = padding.valid(keys)[list(rows), begin:]
    part = padding.part(rows, begin, keys)
    if part is None:
        assert expected.all()
        return
    assert part.batch == len(rows)
    assert torch.equal(part.valid(keys - begin), expected)


def test_packed_sequences_are_found_where_they_are_one_after_another() -> None:
    lengths = (3, 0, 1, 4)
    packed = Packed(lengths)
    assert packed.sequences(1) == ((0, 0, 3), (0, 3, 1), (0, 4, 4)) == rg.segments(packed.ids).sequences(1)
    assert rg.segments([[7, 7, 2], [1, 1, 1]]).sequences(2) == ((0, 0, 2), (0, 2, 1), (1, 0, 3))
    assert rg.segments([0, 1]).sequences(2) == ((0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)), "one row for all"
    others = [rg.segments([0, 1, 0]), rg.segments([0, 1]) & rg.window(), rg.causal, rg.padding([1]), ~rg.segments([0])]
    assert [mask.sequences(1) for mask in others] == [None] * len(others)
    assert packed.sequences(2) is None
