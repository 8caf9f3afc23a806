"""The figures: weights as heat maps, masks as a gallery, cost over length, training curves.

Each function gives a matplotlib `Figure` of its own, no global state; `files.save_figure` writes it. Colours are
Okabe and Ito's, told apart by colour-blind readers; heat maps run over one hue, so they read in grey as well.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator
from torch import Tensor

from regard.core.cost import MODES, Rate, Work, heads_label, mode_crossover, mode_price, mode_work, with_length
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask

if TYPE_CHECKING:
    from regard.commands.suite.positions import Point

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, QUIET, RULE = "#1f2933", "#66727f", "#d5dbe1"
HIDDEN = "#e4e7eb"
WEIGHT_MAP = LinearSegmentedColormap.from_list("weight", ["#ffffff", "#c6dcef", "#6aaed6", "#2171b5", "#08306b"])
DPI = 120

MODE_WORDS: dict[str, tuple[str, str, str]] = {
    "prefill": ("Prefill: FLOPs of a whole sequence", "FLOPs", ""),
    "decode": ("Decode: bytes moved for one new token", "bytes moved", "B"),
}
"""For each mode, its panel's title, its vertical axis and the axis's unit: the quantity that decides its speed."""


def weights_figure(
    panels: Mapping[str, Tensor],
    tokens: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    mask: Mask | None = None,
    title: str = "",
) -> Figure:
    """Weights (T, S) side by side as heat maps, a token for each row (query) and column (key).

    `keys` are the columns' tokens, those of the rows if not given. Pairs that `mask` hides are grey, so that they are
    not taken for weights of 0.

    >>> import regard as rg, torch
    >>> q = k = torch.randn(1, 1, 3, 8)
    >>> panels = {"softmax": rg.weights(q, k)[0, 0], "uniform": rg.weights(q, k, rg.Uniform())[0, 0]}
    >>> len(weights_figure(panels, ["a", "b", "c"]).axes)  # and the colour bar
    3
    """
    across = tokens if keys is None else keys
    shape = len(tokens), len(across)
    for name, panel in panels.items():
        if tuple(panel.shape) != shape:
            raise ValueError(f"panels: expected weights of shape {shape}, got {tuple(panel.shape)} for {name!r}")
    rows, columns = _grid(len(panels))
    high, wide = (max(2.1, 0.235 * count) for count in shape)
    figure = Figure(figsize=(columns * (wide + 0.35) + 1.3, rows * (high + 0.55) + 1.0), dpi=DPI, layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False)
    hidden = None if mask is None else ~mask.draw(*shape).visible
    image = None
    for number, (name, panel) in enumerate(panels.items()):
        axes = cells.flat[number]
        shown = panel.detach().float().cpu()
        if hidden is not None:
            shown = shown.masked_fill(hidden, math.nan)  # which is drawn as nothing, over the background
        axes.set_facecolor(HIDDEN)
        image = axes.imshow(shown.numpy(), cmap=WEIGHT_MAP, vmin=0, vmax=1)
        _lattice(axes, *shape)
        first_column, last_row = number % columns == 0, number + columns >= len(panels)
        axes.set_xticks(range(len(across)), across if last_row else [], rotation=90, fontsize=8)
        axes.set_yticks(range(len(tokens)), tokens if first_column else [], fontsize=8)
        axes.set_xlabel("key" if last_row else "", fontsize=8, color=QUIET)
        axes.set_ylabel("query" if first_column else "", fontsize=8, color=QUIET)
        axes.set_title(name, fontsize=9, color=INK, loc="left")
    for spare in cells.flat[len(panels) :]:
        spare.set_visible(False)
    if image is not None:
        bar = figure.colorbar(image, ax=cells, fraction=0.025, pad=0.02, aspect=30)
        bar.set_label("weight (each row sums to 1)", fontsize=8, color=INK)
        bar.ax.tick_params(labelsize=8, color=RULE)
        bar.outline.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", fontweight="bold")
    return figure


def masks_figure(masks: Mapping[str, Mask], length: int, *, title: str = "") -> Figure:
    """Masks side by side over `length` positions: queries down, keys across, visible pairs filled.

    >>> import regard as rg
    >>> len(masks_figure({"causal": rg.causal, "window": rg.window(before=2)}, 8).axes)
    2
    """
    rows, columns = _grid(len(masks))
    figure = Figure(
        figsize=(columns * 2.75 + 0.5, rows * 3.1 + 0.6), dpi=DPI, layout=ConstrainedLayoutEngine(hspace=0.06)
    )
    cells = figure.subplots(rows, columns, squeeze=False)
    colours = ListedColormap(["#eef1f5", "#2b5c8a"])
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, length) if length / step <= 6)
    places = list(range(0, length, step))
    for number, (name, mask) in enumerate(masks.items()):
        axes = cells.flat[number]
        visible = mask.draw(length).visible
        axes.imshow(visible.numpy(), cmap=colours, vmin=0, vmax=1)
        _lattice(axes, length, length)
        axes.set_xticks(places, places, fontsize=8)
        axes.set_yticks(places, places, fontsize=8)
        axes.set_xlabel("key position" if number + columns >= len(masks) else "", fontsize=8, color=QUIET)
        axes.set_ylabel("query position" if number % columns == 0 else "", fontsize=8, color=QUIET)
        share = f"{100 * visible.float().mean().item():.0f} % of pairs visible"
        axes.set_title(f"{name}\n", fontsize=9.5, color=INK, loc="left", linespacing=1.3)
        axes.text(0, 1.03, share, transform=axes.transAxes, fontsize=8, color=QUIET)
    for spare in cells.flat[len(masks) :]:
        spare.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", fontweight="bold")
    return figure


def cost_figure(
    mechanisms: Mapping[str, Mechanism],
    work: Work,
    *,
    kv_heads: Sequence[int] | None = None,
    modes: Sequence[str] = MODES,
    shortest: int = 512,
    longest: int = 131072,
    title: str = "",
) -> Figure:
    """Cost over length, log-log, a panel for each mode and a line for each mechanism and grouping of heads.

    Dots mark where the first two mechanisms cross, with that length. Lines that coincide are drawn
    once and named together.

    >>> import regard as rg
    >>> figure = cost_figure({"softmax": rg.Softmax(), "quadratic": rg.Quadratic()}, rg.Work(mask=rg.causal))
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['length (tokens)', 'length (tokens)']
    """
    if not 1 <= shortest < longest:
        raise ValueError(f"shortest: expected at least 1 and less than longest={longest}, got {shortest}")
    groupings = [work.num_kv_heads] if kv_heads is None else list(dict.fromkeys(kv_heads))
    works = {kv: replace(work, num_kv_heads=kv) for kv in groupings}
    figure = Figure(figsize=(6.1 * len(modes), 4.7), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    for axes, mode in zip(figure.subplots(1, len(modes), squeeze=False).flat, modes, strict=True):
        _cost_panel(axes, mechanisms, works, mode, shortest, longest)
    heading = "\n".join(textwrap.wrap(title or _described(work), 85 * len(modes)))
    figure.suptitle(heading, fontsize=9, color=QUIET, x=0.01, ha="left")
    return figure


def _cost_panel(
    axes: Axes, mechanisms: Mapping[str, Mechanism], works: Mapping[int, Work], mode: str, shortest: int, longest: int
) -> None:
    heading, quantity, unit = MODE_WORDS[mode]
    price = mode_price(mode)
    lengths = _sampled(shortest, longest)
    ends: list[tuple[float, str, str]] = []
    drawn: dict[tuple[float, ...], Line2D] = {}
    for colour, (name, mechanism) in zip(_cycle(COLOURS, len(mechanisms)), mechanisms.items(), strict=True):
        lines: dict[tuple[float, ...], list[int]] = {}
        for kv, work in works.items():
            at = mode_work(work, mode, 2)
            lines.setdefault(tuple(price(mechanism, with_length(at, length)) for length in lengths), []).append(kv)
        for line, grouped in lines.items():
            style = _dashes(works[grouped[0]].num_heads, grouped[0])
            if line in drawn:  # another mechanism costs the same: its line shows on both sides of this one
                drawn[line].set_linewidth(drawn[line].get_linewidth() + 3)
            (drawn[line],) = axes.plot(lengths, line, color=colour, linewidth=1.9, linestyle=style)
            labels = "" if len(works) == 1 else ", " + _together([works[kv] for kv in grouped], len(works))
            ends.append((line[-1], name + labels, colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(shortest, longest)
    _mark_crossovers(axes, mechanisms, works, mode, price, shortest, longest)
    axes.xaxis.set_major_locator(FixedLocator(_round_lengths(shortest, longest)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(unit=unit))
    axes.grid(color=RULE, linewidth=0.6)
    axes.tick_params(labelsize=8, color=RULE, labelcolor=INK)
    for side in axes.spines:
        axes.spines[side].set_visible(side in ("left", "bottom"))
        axes.spines[side].set_color(RULE)
    axes.set_xlabel("length (tokens)", fontsize=9, color=INK)
    axes.set_ylabel(quantity, fontsize=9, color=INK)
    axes.set_title(heading, fontsize=10.5, color=INK, loc="left", fontweight="bold")
    _label_ends(axes, ends)


def _mark_crossovers(
    axes: Axes,
    mechanisms: Mapping[str, Mechanism],
    works: Mapping[int, Work],
    mode: str,
    price: Rate,
    shortest: int,
    longest: int,
) -> None:
    """A dot at each crossover of the first two mechanisms, and a line down to its length."""
    if len(mechanisms) < 2:
        return
    first, second = list(mechanisms.values())[:2]
    dots: dict[int, list[int]] = {}
    for kv, work in works.items():
        length = mode_crossover(first, second, work, mode) or mode_crossover(second, first, work, mode)
        if length is not None and shortest <= length <= longest:
            dots.setdefault(length, []).append(kv)
    low, high = axes.get_ylim()
    axes.set_ylim(low / (high / low) ** 0.05, high)  # room for the lengths below the lines
    for number, (length, grouped) in enumerate(sorted(dots.items())):
        heights = [price(second, with_length(mode_work(works[kv], mode, 2), length)) for kv in grouped]
        # The longer, the higher: no line then runs through the name of a shorter one, which stands to its left.
        foot = 0.03 + 0.055 * number
        bottom, top = (math.log(limit) for limit in axes.get_ylim())
        reach = (math.log(max(heights)) - bottom) / (top - bottom)
        axes.axvline(length, foot, max(foot, reach), color=QUIET, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        axes.plot([length] * len(heights), heights, "o", color=INK, markersize=6.5, markeredgecolor="white", zorder=5)
        names = "" if len(works) == 1 else "  " + _together([works[kv] for kv in grouped], len(works))
        axes.annotate(
            f"{length:,}{names}",
            (length, foot),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name each line at its right end, in its colour; names that would touch are moved apart."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ordered = sorted(ends)
    places = _apart([(math.log(max(value, 1)) - low) / (high - low) for value, _, _ in ordered], gap=0.045)
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


def _lattice(axes: Axes, rows: int, columns: int) -> None:
    """White lines between the cells, no frame, no tick marks."""
    axes.set_xticks([x - 0.5 for x in range(1, columns)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, rows)], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_color(RULE)


def _grid(count: int) -> tuple[int, int]:
    columns = min(3, max(1, count))
    return max(1, math.ceil(count / columns)), columns


def _cycle(items: Sequence[str], count: int) -> list[str]:
    return [items[number % len(items)] for number in range(count)]


def _dashes(num_heads: int, num_kv_heads: int) -> str:
    return {"MHA": "-", "GQA": "--", "MQA": ":"}[heads_label(num_heads, num_kv_heads)]


def _grouping(work: Work) -> str:
    label = heads_label(work.num_heads, work.num_kv_heads)
    return f"{label}-{work.num_kv_heads}" if label == "GQA" else label


def _together(same: Sequence[Work], total: int) -> str:
    return "any heads" if len(same) == total else " = ".join(_grouping(work) for work in same)


def _sampled(shortest: int, longest: int) -> list[int]:
    """Lengths to draw a line through: dense while a mechanism that works in chunks shows its steps, then sparse."""
    lengths, at = [], float(shortest)
    while at < longest:
        lengths.append(round(at))
        at *= 2 ** (1 / 32 if at < 8192 else 1 / 2)
    return sorted({*lengths, longest})


def _round_lengths(shortest: int, longest: int) -> list[int]:
    """Powers of two in the range, every second one where there are many."""
    powers = [1 << power for power in range(longest.bit_length()) if shortest <= 1 << power <= longest]
    return powers[:: 1 if len(powers) <= 6 else 2]


def _described(work: Work) -> str:
    dtype = str(work.dtype).removeprefix("torch.")
    mask = "no mask" if work.rule is None else f"mask {work.rule!r}"
    return (
        f"{work.num_heads} heads, qk_length {work.qk_length}, value_length {work.value_length}, batch {work.batch}, "
        f"{dtype}, {mask}; dots: where the first two mechanisms cross"
    )


def positions_figure(points: "Sequence[Point]", crossing: int | None = None) -> Figure:
    """Time and state of a token over its position, measured (dots) and predicted (lines); `crossing` is marked.

    >>> from regard.commands.suite.positions import Point
    >>> points = [Point("MHA", n, n / 1e3, n / 1e3, n, n, n) for n in (1024, 2048)]
    >>> len(positions_figure(points).axes)
    3
    """
    figure = Figure(figsize=(13, 4.4), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.15))
    left, middle, right = figure.subplots(1, 3)
    groups = ("MHA", "GQA", "MQA"), ("softmax", "quadratic")
    _over_position(left, points, groups[0], "milliseconds", "Heads: time of a token", "ms")
    _over_position(middle, points, groups[0], "state_bytes", "Heads: state", "bytes")
    _over_position(right, points, groups[1], "milliseconds", "Mechanism: time of a token", "ms")
    if crossing is not None:
        right.axvline(crossing, color=QUIET, linestyle=":", linewidth=1)
        right.annotate(f"predicted crossing {crossing:,}", (crossing, right.get_ylim()[1]), color=QUIET, fontsize=8,
                       xytext=(4, -10), textcoords="offset points")  # fmt: skip
    return figure


def _over_position(
    axes: Axes, points: "Sequence[Point]", kinds: Sequence[str], what: str, title: str, unit: str
) -> None:
    for kind, colour in zip(kinds, COLOURS, strict=False):
        own = [point for point in points if point.kind == kind]
        places = [point.position for point in own]
        axes.plot(places, [getattr(point, f"predicted_{what}") for point in own], color=colour, linewidth=1.2)
        axes.plot(places, [getattr(point, what) for point in own], "o", color=colour, markersize=5, label=kind)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}k"))
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(unit="B" if unit == "bytes" else "", sep=" "))
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel("position (dots measured, lines predicted)", color=QUIET, fontsize=8)
    axes.set_ylabel(unit, color=QUIET, fontsize=8)
    axes.grid(True, which="major", color=RULE, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)


def curves_figure(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Loss over steps, and every held-out result in a panel of its own, for one run or several.

    >>> from regard.core.plots import curves_figure
    >>> lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "evaluation": {"loss": 2.1}}]
    >>> len(curves_figure({"softmax": lines}).axes)
    1
    """
    results: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, lines in runs.items():
        for line in lines:
            for kind, value in line.get("evaluation", {}).items():
                results.setdefault(kind, {}).setdefault(name, []).append((line["step"], value))
    panels = ["loss", *(kind for kind in results if kind != "loss")]
    across = 2 if len(panels) == 4 else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.6 * across, 3.4 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flat
    for panel, axis in zip(panels, axes, strict=False):
        for number, (name, lines) in enumerate(runs.items()):
            color = COLOURS[number % len(COLOURS)]
            if panel == "loss":
                steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
                axis.plot(*zip(*_smooth(steps), strict=True), color=color, alpha=0.45, linewidth=1) if steps else None
            points = results.get(panel, {}).get(name, [])
            label = name if panel != "loss" or len(runs) > 1 else "held out"
            if points:
                axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=label)
        axis.set_title(panel if panel != "loss" else "loss: training (pale), held out")
        if panel == "loss":
            axis.set_yscale("log")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0] and (len(runs) > 1 or panel == "loss"):
            axis.legend(frameon=False)
    for axis in list(axes):
        axis.remove()
    return figure


def _smooth(points: list[tuple[int, float]], most: int = 400) -> list[tuple[int, float]]:
    """At most so many points, each the mean of its neighbours."""
    size = max(1, len(points) // most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
