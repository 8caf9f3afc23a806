"""Attention weights as heat maps."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from regard.core.masks import Mask
from regard.core.style import INK, QUIET, RULE, WEIGHT_MAP, Figure, grid_shape, lattice, new_figure

MOST_NAMED = 48
"""Tokens up to which each has its name beside the heat map; of longer sequences some positions are named."""


def weights_figure(
    panels: Mapping[str, Tensor],
    tokens: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    mask: Mask | None = None,
    axes_names: tuple[str, str] = ("query (token)", "key (token)"),
    title: str = "",
    note: str = "",
) -> Figure:
    """Weights (T, S) side by side as heat maps, a token for each row (query) and column (key).

    `keys` are the columns' tokens, by default those of the rows. Pairs that `mask` hides are grey, so that they are
    not taken for weights of 0.

    >>> import regard as rg, torch
    >>> q = k = torch.randn(1, 1, 3, 8)
    >>> panels = {"softmax": rg.weights(q, k)[0, 0], "uniform": rg.weights(q, k, rg.Uniform())[0, 0]}
    >>> len(weights_figure(panels, ["a", "b", "c"]).axes)  # and the colour bar
    3
    """
    columns_named = tokens if keys is None else keys
    shape = len(tokens), len(columns_named)
    for name, panel in panels.items():
        if tuple(panel.shape) != shape:
            raise ValueError(f"panels: expected weights of shape {shape}, got {tuple(panel.shape)} for {name!r}")
    rows, columns = grid_shape(len(panels))
    high, wide = (min(max(2.1, 0.235 * count), 5.0 if count > MOST_NAMED else 12.0) for count in shape)
    size = columns * (wide + 0.35) + 1.3, rows * (high + 0.55) + 1.0
    figure = new_figure(*size, title=title, note=note)
    cells = figure.subplots(rows, columns, squeeze=False)
    hidden = None if mask is None else ~mask.draw(*shape).visible
    image = None
    for number, (name, panel) in enumerate(panels.items()):
        axes = cells.flat[number]
        shown = panel.detach().float().cpu()
        if hidden is not None:
            shown = shown.masked_fill(hidden, math.nan)  # which has a colour of its own
        image = axes.imshow(shown.numpy(), cmap=WEIGHT_MAP, vmin=0, vmax=1, aspect="auto" if _long(shape) else "equal")
        lattice(axes, *shape)
        first_column, last_row = number % columns == 0, number + columns >= len(panels)
        across, down = _ticks(columns_named), _ticks(tokens)
        axes.set_xticks(list(across), list(across.values()) if last_row else [], rotation=90, fontsize=8)
        axes.set_yticks(list(down), list(down.values()) if first_column else [], fontsize=8)
        axes.set_xlabel(axes_names[1] if last_row else "", fontsize=8.5, color=QUIET)
        axes.set_ylabel(axes_names[0] if first_column else "", fontsize=8.5, color=QUIET)
        axes.set_title(name, fontsize=9.5, color=INK, loc="left")
    for spare in cells.flat[len(panels) :]:
        spare.set_visible(False)
    if image is not None:
        bar = figure.colorbar(image, ax=cells, fraction=0.025, pad=0.02, aspect=30)
        bar.set_label("weight (each row sums to 1)", fontsize=8.5, color=QUIET)
        bar.ax.tick_params(labelsize=8, color=RULE, labelcolor=INK)
        bar.outline.set_visible(False)
    return figure


def _long(shape: tuple[int, int]) -> bool:
    return max(shape) > MOST_NAMED


def _ticks(names: Sequence[str]) -> dict[int, str]:
    """Every token's name by its place; of many tokens, some places by their number."""
    if len(names) <= MOST_NAMED:
        return dict(enumerate(names))
    step = next(step for step in (10, 20, 50, 100, 200, 500, 1000, len(names)) if len(names) / step <= 12)
    return {place: str(place) for place in range(0, len(names), step)}
