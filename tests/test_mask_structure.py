"""What paths ask a mask: spans, structure, parts, counts and packed sequences, against brute force."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
import regard.core.masks
from defined_masks import SLOWLY, STRUCTURED, B, H, Tree, brute, defined_masks, seeded, seen, trees
from regard.core.calls.call import Call
from regard.core.masks import Band, Mask, Packed, Padding
from regard.core.masks.structure import blocks, count_pairs, positions, reached, structure_of
from regard.core.paths import masked


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
