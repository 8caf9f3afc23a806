"""Loss and results over the steps of training runs, as lines."""

from typing import Any

from regard.core.style import Axes, Figure, dress, grid_shape, line_styles, new_figure, ticker

UNITS = {
    "accuracy": "accuracy (share)",
    "exact": "exact (share of sentences)",
    "bleu": "BLEU (of 100)",
    "loss": "loss (nats)",
}
"""Axis labels of results, whose first word is their title; a result that is not listed is labelled with its name."""


def curves_figure(
    runs: dict[str, list[dict[str, Any]]], *, title: str = "", note: str = "", label_smoothing: float = 0.0
) -> Figure:
    """Loss over steps, and a panel for each held-out result, for one run or several.

    Training losses with `label_smoothing` cannot be compared with held-out losses, which have none: the title says so.
    The `deviation` of an evaluation, over several seeds, is drawn as a band.

    >>> from regard.training.curves import curves_figure
    >>> lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "evaluation": {"loss": 2.1}}]
    >>> len(curves_figure({"softmax": lines}).axes)
    1
    """
    results: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    for name, lines in runs.items():
        for line in lines:
            for kind, value in line.get("evaluation", {}).items():
                point = (line["step"], value, line.get("deviation", {}).get(kind, 0.0))
                results.setdefault(kind, {}).setdefault(name, []).append(point)
    panels = ["loss", *(kind for kind in results if kind != "loss")]
    rows, columns = grid_shape(len(panels), most=2 if len(panels) == 4 else 3)
    figure = new_figure(4.6 * columns, 3.3 * rows + 0.4 * bool(title), title=title, note=note)
    cells = figure.subplots(rows, columns, squeeze=False).flat
    for panel, axes in zip(panels, cells, strict=False):
        for (colour, marker), (name, lines) in zip(line_styles(len(runs)), runs.items(), strict=True):
            steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
            if panel == "loss" and steps:
                axes.plot(*zip(*_smooth(steps), strict=True), color=colour, alpha=0.45, linewidth=1)
            points = results.get(panel, {}).get(name, [])
            label = name if panel != "loss" or len(runs) > 1 else "held out"
            if points:
                places, means, deviations = zip(*points, strict=True)
                axes.plot(places, means, color=colour, marker=marker, markersize=3.5, label=label)
                if any(deviations):
                    low, high = ([mean + sign * spread for _, mean, spread in points] for sign in (-1, 1))
                    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        smoothed = f"\n(training with label smoothing {label_smoothing:g}, held out without)" if label_smoothing else ""
        heading = (
            f"loss: training (pale), held out (marked){smoothed}" if panel == "loss" else f"{_title(panel)}, held out"
        )
        dress(axes, title=heading, x="training step", y=UNITS.get(panel, panel))
        axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True))
        if panel == "loss":
            _logarithmic(axes)
        if axes.get_legend_handles_labels()[0] and (len(runs) > 1 or panel == "loss"):
            axes.legend(frameon=False, fontsize=8)
    for spare in list(cells):
        spare.remove()
    return figure


def _title(result: str) -> str:
    return UNITS.get(result, result).split(" (")[0]


def _logarithmic(axes: Axes) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5, and plain numbers at them: 0.5 and not 5 × 10⁻¹."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def _smooth(points: list[tuple[int, float]], most: int = 400) -> list[tuple[int, float]]:
    """About `most` points at most, each the mean of a group of neighbours."""
    size = max(1, len(points) // most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
