"""What masks are made of: arguments that are refused, and arrays of any kind that are taken."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

import regard as rg
import regard.core.masks
from defined_masks import seeded, seen
from regard.core.masks import Mask, as_mask


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
