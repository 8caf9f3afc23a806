"""Letters and digits, rendered from the typefaces that matplotlib ships: images without a download.

A glyph is rendered once, large. An image of it is scaled, rotated, slanted, shifted, faded and gets noise, by random
numbers that depend on the split, the seed and the image's index. Both splits are transformed alike. Typefaces are held
out, not images: memorised training images do not help with a new typeface.
"""

import math
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.training.data.draws import draws
from regard.training.data.images import Split

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FACES = {
    "train": (
        *(f"DejaVuSans{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
        *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
        *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-BoldItalic", "-Italic")),
        *("cmr10", "cmb10", "cmti10"),
    ),
    "validation": ("cmss10", "cmtt10"),
    "test": ("STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta", "STIXGeneralItalic"),
}
"""Typefaces of each split: to test with, a family; to validate with, Computer Modern's sans-serif and typewriter."""
CANVAS = 96
"""Side of a rendered glyph's square, in pixels."""
EM = 76
"""Font size on this square: the widest letters just fit."""
TOGETHER = 250
"""How many images are made at a time."""
CHANGES = 8
"""Random numbers per image, before its noise: typeface, scale, rotation, slant, 2 shifts, strength, noise."""


def glyphs(split: Literal["train", "validation", "test"], count: int, *, size: int = 28, seed: int = 0) -> Split:
    """Images (count, 1, size, size) of characters, white on black, every character equally often, and their labels: the
    indices of the characters in `CHARACTERS`. The first images do not depend on the count.

    >>> from regard.training.data.glyphs import CHARACTERS, glyphs
    >>> images, labels = glyphs("train", 72, size=32, seed=1)
    >>> tuple(images.shape), "".join(CHARACTERS[label] for label in labels[34:39])
    ((72, 1, 32, 32), 'YZ012')
    """
    if split not in FACES:
        raise ValueError(f"split: expected {', '.join(FACES)}, got {split!r}")
    for name, value, least in (("count", count, 1), ("size", size, 8)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    faces = _rendered(FACES[split])
    parts = [
        _made(faces, np.arange(low, min(low + TOGETHER, count)), size, seed, part=list(FACES).index(split))
        for low in range(0, count, TOGETHER)
    ]
    return Split(torch.cat(parts), torch.arange(count) % len(CHARACTERS))


def _made(
    faces: Float[Tensor, "F D Y X"],
    indices: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    size: int,
    seed: int,
    part: int,
) -> UInt8[Tensor, "B 1 Y X"]:
    numbers = torch.from_numpy(draws(seed, part, indices, CHANGES + size * size)).float()
    face, scale, turn, slant, down, across, strength, noise = numbers[:, :CHANGES].unbind(1)
    glyph = faces[(face * len(faces)).long(), torch.from_numpy(indices) % faces.shape[1]][:, None]
    scale, turn, slant = 0.8 + 0.4 * scale, (turn - 0.5) * math.radians(24), (slant - 0.5) * 0.3
    # The inverse transformation, from a pixel's coordinates to the glyph's: shift, rotation, slant and scale undone.
    cosine, sine = turn.cos() / scale, turn.sin() / scale
    back = torch.stack([cosine + slant * sine, sine - slant * cosine, -sine, cosine], 1).view(-1, 2, 2)
    shift = torch.stack([across - 0.5, down - 0.5], 1) * 0.2
    # Four samples per pixel: the glyph is larger than the image, and single samples would miss thin strokes.
    line = (torch.arange(2 * size) + 0.5) / size - 1
    x, y = (line - shift[:, :, None])[:, None].unbind(2)
    place = (back[:, :, 1, None] * y)[:, :, :, None] + (back[:, :, 0, None] * x)[:, :, None, :]
    ink = F.avg_pool2d(F.grid_sample(glyph, rearrange(place, "b c y x -> b y x c"), align_corners=False), 2)
    ink = ink * (0.5 + 0.5 * strength)[:, None, None, None]
    speckle = (numbers[:, CHANGES:].view_as(ink) - 0.5) * (0.4 * noise)[:, None, None, None]
    return ((ink + speckle).clamp(0, 1) * 255).round().to(torch.uint8)


@cache
def _rendered(names: tuple[str, ...]) -> Float[Tensor, "F D Y X"]:
    """Every character of every typeface, with values from 0 to 1, centred in its square."""
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    canvases = np.zeros((len(names), len(CHARACTERS), CANVAS, CANVAS), dtype=np.float32)
    for at, name in enumerate(names):
        if not (path := folder / f"{name}.ttf").is_file():
            raise ValueError(f"matplotlib: expected its typeface {name}.ttf, got nothing at {path}")
        font = ImageFont.truetype(str(path), EM)
        for number, character in enumerate(CHARACTERS):
            mask = font.getmask(character, mode="L")
            wide, high = mask.size
            ink = np.asarray(mask, dtype=np.float32).reshape(high, wide)[:CANVAS, :CANVAS] / 255
            top, left = (CANVAS - ink.shape[0]) // 2, (CANVAS - ink.shape[1]) // 2
            canvases[at, number, top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return torch.from_numpy(canvases)
