"""A mask, drawn: as text and as a picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Drawing:
    """A mask, drawn. `str()` is the text form, `save` and `figure` the picture.

    >>> import regard as rg
    >>> str(rg.causal.draw(2))
    '■ ·\\n■ ■'
    """

    visible: Tensor
    title: str

    def __str__(self) -> str:
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in self.visible.tolist())

    def figure(self) -> "Figure":
        """A matplotlib figure: queries down, keys across, visible pairs filled."""
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure

        rows, columns = self.visible.shape
        figure = Figure(figsize=(max(2.5, min(8, 0.22 * columns + 1)), max(2.5, min(8, 0.22 * rows + 1))), dpi=120)
        axes = figure.subplots()
        axes.imshow(self.visible.numpy(), cmap=ListedColormap(["#eef1f5", "#2b5c8a"]), vmin=0, vmax=1)
        if max(rows, columns) <= 40:
            axes.set_xticks([x - 0.5 for x in range(columns)], minor=True)
            axes.set_yticks([y - 0.5 for y in range(rows)], minor=True)
            axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)
        axes.set_xlabel("key position")
        axes.set_ylabel("query")
        axes.set_title(self.title, fontsize=9)
        figure.tight_layout()
        return figure

    def save(self, path: str | Path) -> Path:
        """Write the picture (format by suffix) and give back its path."""
        from regard.core.files import save_figure

        return save_figure(self.figure(), path)
