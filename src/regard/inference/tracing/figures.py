"""Heat maps: a trace's weights, and what every head's absence does."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from regard.core.style import QUIET, WEIGHT_MAP, Figure, lattice, new_figure
from regard.core.weights_figure import weights_figure
from regard.inference.tracing.record import Trace, TracedLayer

if TYPE_CHECKING:
    from regard.inference.effects import Effects


def heads_figure(trace: Trace, layer: int, head: int | None = None, sequence: int = 0, window: int = 0) -> Figure:
    """The weights of a layer's recorded heads, or of one of them, with their tokens."""
    traced = trace.layers[layer]
    if head is not None and head not in traced.heads:
        raise ValueError(f"head: expected a recorded head, one of {list(traced.heads)}, got {head!r}")
    weights = _weights(traced, sequence, window)
    panels = {
        f"head {number}": weights[place] for place, number in enumerate(traced.heads) if head is None or number == head
    }
    queries, keys = weights.shape[1:]
    words = f"{trace.model or 'model'}, layer {layer} ({traced.kind}), {traced.mechanism}".rstrip(", ")
    if not traced.by_pairs:
        names = [str(channel) for channel in range(queries)]
        return weights_figure(panels, names, axes_names=("channel", "channel"), title=words)
    rows_named, keys_named = trace.labels(traced)
    down = _names(rows_named, sequence, traced.rows)
    across = _names(keys_named, sequence, range(keys))
    return weights_figure(panels, down, keys=across, title=words)


def overview_figure(trace: Trace, sequence: int = 0, window: int = 0) -> Figure:
    """The weights of all recorded layers and heads, as small maps."""
    layers = [(layer, _weights(layer, sequence, window)) for layer in trace.layers]
    columns = max((len(weights) for _, weights in layers), default=1)
    size = min(14.0, max(3.0, 0.95 * columns + 0.9)), min(18.0, max(1.6, 0.95 * len(layers) + 0.7))
    note = "In each map queries down, keys across; weights from 0 (white) to 1 (dark), hidden pairs grey."
    figure = new_figure(*size, title=f"Weights of {trace.model or 'a model'}", note=note)
    cells = figure.subplots(max(1, len(layers)), columns, squeeze=False)
    for axes in cells.flat:
        axes.set_visible(False)
    for down, (layer, weights) in enumerate(layers):
        for across, head in enumerate(weights):
            axes = cells[down][across]
            axes.set_visible(True)
            axes.imshow(head.numpy(), cmap=WEIGHT_MAP, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            lattice(axes, 0, 0)
            axes.set_xticks([])
            axes.set_yticks([])
            if across == 0:
                axes.set_ylabel(f"layer {layer.index}", fontsize=8, color=QUIET, rotation=0, ha="right", va="center")
            if down == 0:
                axes.set_title(f"head {layer.heads[across]}", fontsize=8, color=QUIET)
    return figure


def effects_figure(effects: "Effects") -> Figure:
    """How far every head's absence moves the output: layers down, heads across."""
    grid, layers = effects.grid(), list(dict.fromkeys(effect.layer for effect in effects.heads))
    measured = "KL divergence (nats)" if effects.heads[0].divergence is not None else "relative distance"
    size = max(4.6, 0.42 * grid.shape[1] + 2.0), max(2.2, 0.32 * grid.shape[0] + 1.3)
    figure = new_figure(*size, title=f"Every head of {effects.model} silenced once")
    axes = figure.subplots()
    image = axes.imshow(grid.numpy(), cmap=WEIGHT_MAP, vmin=0, aspect="auto")
    lattice(axes, *grid.shape)
    axes.set_xticks(range(grid.shape[1]), [str(head) for head in range(grid.shape[1])], fontsize=8)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=8)
    axes.set_xlabel("head", fontsize=8.5, color=QUIET)
    axes.set_ylabel("layer", fontsize=8.5, color=QUIET)
    figure.colorbar(image, ax=axes).set_label(measured, fontsize=8.5, color=QUIET)
    return figure


def _weights(layer: TracedLayer, sequence: int, window: int) -> Tensor:
    """The weights (H, T, S) of one sequence, NaN for hidden pairs, which get a separate colour."""
    weights = layer.need("weights")
    if type(sequence) is not int or not 0 <= sequence < len(weights):
        raise ValueError(f"sequence: expected 0 to {len(weights) - 1}, got {sequence!r}")
    if layer.windows is not None:
        count = weights.shape[1]
        if type(window) is not int or not 0 <= window < count:
            raise ValueError(f"window: expected 0 to {count - 1} in layer {layer.index}, got {window!r}")
        return _weights(layer.flat(), sequence * count + window, 0)
    shown = weights[sequence].detach().float().cpu()
    if layer.visible is None:
        return shown
    visible = layer.visible.cpu().expand(len(weights), *(-1,) * 3)[sequence]
    return shown.masked_fill(~visible, math.nan)


def _names(tokens: Sequence[Sequence[str]] | None, sequence: int, places: Sequence[int]) -> list[str]:
    """The tokens at some positions, or the positions if there are no tokens."""
    if tokens is None:
        return [str(place) for place in places]
    return [tokens[sequence][place] for place in places]
