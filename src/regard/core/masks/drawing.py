"""Masks, drawn: as text, as a figure, and as a notebook shows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from regard.core.display import Html, mask_image, table
from regard.core.files import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.core.masks.base import Mask

MOST_LINES = 64
"""Lines up to which a drawing's `repr` is its text."""


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """A mask at some lengths. `str()` is its text form, `plot` its figure, `save` a picture file.

    >>> import regard as rg
    >>> str(rg.causal.draw(2))
    '■ ·\\n■ ■'
    """

    visible: Tensor
    title: str

    def __str__(self) -> str:
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in self.visible.tolist())

    def __repr__(self) -> str:
        return str(self) if len(self.visible) <= MOST_LINES else f"{self.title}, {_sizes(self.visible)}"

    def _repr_html_(self) -> Html:
        notes = [f"{_sizes(self.visible)}, {_share(self.visible)}"]
        return Html(table([], title=self.title, notes=notes) + mask_image([self.visible]))

    def plot(self) -> "Figure":
        """A matplotlib figure: queries down, keys across, visible pairs filled."""
        return drawings_figure({self.title: self})

    def save(self, path: str | Path) -> Path:
        """Write the picture, in the format of the suffix, and return its path."""
        return save_figure(self.plot(), path)


def masks_figure(masks: "Mapping[str, Mask]", length: int, *, title: str = "") -> "Figure":
    """Masks side by side over `length` positions: queries down, keys across, visible pairs filled.

    >>> import regard as rg
    >>> len(masks_figure({"causal": rg.causal, "window": rg.window(before=2)}, 8).axes)
    2
    """
    return drawings_figure({name: mask.draw(length) for name, mask in masks.items()}, title=title)


def drawings_figure(drawings: Mapping[str, Drawing], *, title: str = "") -> "Figure":
    """Drawings side by side."""
    from regard.core.style import INK, MASK_MAP, QUIET, grid_shape, lattice, new_figure

    rows, columns = grid_shape(len(drawings))
    figure = new_figure(columns * 2.75 + 0.5, rows * 3.1 + (0.6 if title else 0.3), title=title)
    cells = figure.subplots(rows, columns, squeeze=False)
    for number, (name, drawing) in enumerate(drawings.items()):
        axes = cells.flat[number]
        queries, keys = drawing.visible.shape
        axes.imshow(drawing.visible.numpy(), cmap=MASK_MAP, vmin=0, vmax=1, interpolation="nearest")
        lattice(axes, queries, keys)
        across, down = (range(0, length, _step(length)) for length in (keys, queries))
        axes.set_xticks(across, across, fontsize=8)
        # Query i stands at the position of key S - T + i.
        axes.set_yticks(down, [place + keys - queries for place in down], fontsize=8)
        axes.set_xlabel("key (position)" if number + columns >= len(drawings) else "", fontsize=8.5, color=QUIET)
        axes.set_ylabel("query (position)" if number % columns == 0 else "", fontsize=8.5, color=QUIET)
        axes.set_title(f"{name}\n", fontsize=9.5, color=INK, loc="left", linespacing=1.3)
        axes.text(0, 1.03, _share(drawing.visible), transform=axes.transAxes, fontsize=8, color=QUIET)
    for spare in cells.flat[len(drawings) :]:
        spare.set_visible(False)
    return figure


def _step(length: int) -> int:
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, max(length, 1)) if length / step <= 6)


def _sizes(visible: Tensor) -> str:
    queries, keys = visible.shape
    return f"{queries:,} queries, {keys:,} keys"


def _share(visible: Tensor) -> str:
    return f"{100 * visible.float().mean().item() if visible.numel() else 0:.0f} % of pairs visible"
