"""Masks as text and as pictures, cell by cell."""

import pytest
import torch
from PIL import Image

import regard as rg
import regard.core.masks
from defined_masks import KINDS, brute, defined_masks, seen


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
