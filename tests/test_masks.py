"""Masks against brute-force definitions over positions: pair by pair, in plain Python."""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given

import regard as rg
import regard.core.masks
from defined_masks import KINDS, NAMED, SLOWLY, Rule, Tree, brute, defined_masks, seeded, seen, trees
from regard.core.masks import Mask
from regard.core.masks.structure import structure_of

NAMES = {name: getattr(rg, name) for name in rg.__all__}
"""What a user has after `from regard import *`."""
SHAPES = [(4, 4), (2, 6), (6, 2), (1, 6), (6, 4), (8, 8), (0, 4), (1, 1)]


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


@SLOWLY
@given(trees())
def test_an_expression_is_its_definition(tree: Tree) -> None:
    case, queries, keys = tree.build(), tree.queries, tree.keys
    assert torch.equal(seen(case.mask, queries, keys), brute(case.rule, queries, keys))


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
@given(trees(NAMED))
def test_repr_reads_back_as_the_same_mask(tree: Tree) -> None:
    """Precedence: Python itself, reading the text, must build the same mask."""
    case, queries, keys = tree.build(), tree.queries, tree.keys
    assert torch.equal(seen(eval(repr(case.mask), NAMES), queries, keys), brute(case.rule, queries, keys))


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
