"""How every figure looks: colours, titles, axes, and the labels at the ends of lines.

The colours are Okabe and Ito's, which colour-blind readers can tell apart. Lines also differ by marker or dash, and
heat maps run over one hue, so that every figure reads in grey as well. A figure is a `matplotlib.figure.Figure` without
global state; `files.save_figure` writes it.
"""

import math
import textwrap
from collections.abc import Sequence
from io import BytesIO
from itertools import cycle, islice
from statistics import fmean

from regard.core.display import HIDDEN, MASK_COLOURS, WEIGHT_COLOURS
from regard.core.extras import needed_for

# Modules that draw take what they need of matplotlib from here, so that the error is the same for all.
with needed_for("a picture"):
    from matplotlib import ticker as ticker
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap
    from matplotlib.colors import to_rgba as to_rgba
    from matplotlib.figure import Figure as Figure
    from matplotlib.image import AxesImage
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import Patch as Patch

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, QUIET, RULE = "#1f2933", "#5b6773", "#d5dbe1"
WEIGHT_MAP = LinearSegmentedColormap.from_list("weight", WEIGHT_COLOURS).with_extremes(bad=HIDDEN)
MASK_MAP = ListedColormap(list(MASK_COLOURS))
DPI = 120


class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture, also where nobody has imported pyplot."""

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def new_figure(width: float, height: float, *, title: str = "", note: str = "") -> Figure:
    """An empty figure of this size in inches; `title` stands above it, `note` (what was drawn, on what) below it.

    >>> new_figure(4, 3, title="Cost").get_suptitle()
    'Cost'
    """
    spaced = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.07, wspace=0.03, hspace=0.04)
    figure = NotebookFigure(figsize=(width, height), dpi=DPI, layout=spaced, facecolor="white")
    title, note = textwrap.fill(title, int(9 * width)), textwrap.fill(note, int(15 * width))
    if title:
        figure.suptitle(title, fontsize=11.5, color=INK, x=0.012, ha="left", fontweight="bold")
    if note:
        figure.supxlabel(note, fontsize=8, color=QUIET, x=0.012, ha="left")
    return figure


def dress(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """The look of axes with lines: a title at the left, quiet labels, a thin grid, no box."""
    axes.grid(visible=True, which="major", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", labelsize=8, color=RULE, labelcolor=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(RULE)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=8.5, color=QUIET)
    axes.set_ylabel(y, fontsize=8.5, color=QUIET)


def lattice(axes: Axes, rows: int, columns: int) -> None:
    """The look of a heat map: white lines between its cells if they are large enough, no frame, no tick marks."""
    if max(rows, columns) <= 64:
        axes.set_xticks([x - 0.5 for x in range(1, columns)], minor=True)
        axes.set_yticks([y - 0.5 for y in range(1, rows)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_color(RULE)


def colour_bar(
    figure: Figure, image: AxesImage, axes: Axes | Sequence[Axes], label: str, *, extend: str = "neither"
) -> None:
    """What the colours of a heat map mean, beside it."""
    bar = figure.colorbar(image, ax=axes, shrink=0.85, extend=extend)
    bar.set_label(label, fontsize=8.5, color=QUIET)
    bar.ax.tick_params(labelsize=8, color=RULE, labelcolor=INK)
    bar.outline.set_visible(False)


def grid_shape(panels: int, most: int = 3) -> tuple[int, int]:
    """Rows and columns for so many panels.

    >>> grid_shape(5)
    (2, 3)
    """
    columns = min(most, max(1, panels))
    return max(1, math.ceil(panels / columns)), columns


def line_styles(count: int) -> list[tuple[str, str]]:
    """A colour and a marker for each of so many lines."""
    return list(islice(cycle(zip(COLOURS, MARKERS, strict=True)), count))


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], *, gap: float = 0.045) -> None:
    """Name each line (its last value, name and colour) at its right end; names that would touch are moved apart."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        low, high = math.log(low), math.log(high)
        ends = [(math.log(max(value, 1e-300)), name, colour) for value, name, colour in ends]
    ordered = sorted(ends)
    places = _apart([(value - low) / (high - low) for value, _, _ in ordered], gap)
    for place, (_, name, colour) in zip(places, ordered, strict=True):
        axes.text(1.015, place, name, transform=axes.transAxes, color=colour, fontsize=8, va="center")


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Rising places moved as little as it takes for neighbours to be `gap` apart.

    Less i gaps, the places need only not fall: those that do are pooled into their mean (isotonic regression).

    >>> [round(place, 2) for place in _apart([0.5, 0.5, 0.9], gap=0.1)]
    [0.45, 0.55, 0.9]
    """
    pools: list[list[float]] = []
    for i, place in enumerate(places):
        pools.append([place - i * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [fmean(pool) for pool in pools for _ in pool]
    return [place + i * gap for i, place in enumerate(level)]
