"""Cost over length, as lines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from regard.core.cost import MODES, Rate, Work, heads_label, mode_crossover, mode_price, mode_work, with_length
from regard.core.style import INK, QUIET, Axes, Figure, Line2D, dress, label_ends, line_styles, new_figure, ticker

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism

MODE_WORDS: dict[str, tuple[str, str, str]] = {
    "prefill": ("Prefill: FLOPs of a whole sequence", "FLOPs", "FLOP"),
    "decode": ("Decode: bytes moved for one new token", "bytes", "B"),
}
"""For each mode, its panel's title, its vertical axis and the axis's unit: the quantity that decides its speed."""


def cost_figure(
    mechanisms: Mapping[str, "Mechanism"],
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
    figure = new_figure(
        6.1 * len(modes), 4.8, title=title or "Cost over length", note=_described(work, len(mechanisms))
    )
    for axes, mode in zip(figure.subplots(1, len(modes), squeeze=False).flat, modes, strict=True):
        _cost_panel(axes, mechanisms, works, mode, shortest, longest)
    return figure


def _cost_panel(
    axes: Axes, mechanisms: Mapping[str, "Mechanism"], works: Mapping[int, Work], mode: str, shortest: int, longest: int
) -> None:
    heading, quantity, unit = MODE_WORDS[mode]
    price = mode_price(mode)
    lengths = _sampled(shortest, longest)
    ends: list[tuple[float, str, str]] = []
    drawn: dict[tuple[float, ...], Line2D] = {}
    for (colour, _), (name, mechanism) in zip(line_styles(len(mechanisms)), mechanisms.items(), strict=True):
        lines: dict[tuple[float, ...], list[int]] = {}
        for kv, work in works.items():
            at = mode_work(work, mode, 2)
            lines.setdefault(tuple(price(mechanism, with_length(at, length)) for length in lengths), []).append(kv)
        for line, grouped in lines.items():
            style = "-" if len(works) == 1 else _dashes(works[grouped[0]].num_heads, grouped[0])
            if line in drawn:  # another mechanism costs the same: its line shows on both sides of this one
                drawn[line].set_linewidth(drawn[line].get_linewidth() + 3)
            (drawn[line],) = axes.plot(lengths, line, color=colour, linewidth=1.9, linestyle=style)
            labels = "" if len(works) == 1 else ", " + _together([works[kv] for kv in grouped], len(works))
            ends.append((line[-1], name + labels, colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(shortest, longest)
    _mark_crossovers(axes, mechanisms, works, mode, price, shortest, longest)
    axes.xaxis.set_major_locator(ticker.FixedLocator(_round_lengths(shortest, longest)))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(ticker.LogLocator(base=10, numticks=12))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.EngFormatter(unit=unit))
    dress(axes, title=heading, x="length (tokens)", y=quantity)
    label_ends(axes, ends)


def _mark_crossovers(
    axes: Axes,
    mechanisms: Mapping[str, "Mechanism"],
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


def _described(work: Work, mechanisms: int) -> str:
    dtype = str(work.dtype).removeprefix("torch.")
    mask = "no mask" if work.rule is None else f"mask {work.rule!r}"
    dots = " Dots: the length where the first two mechanisms cross." if mechanisms > 1 else ""
    return (
        f"{work.num_heads} heads, qk_length {work.qk_length}, value_length {work.value_length}, batch {work.batch}, "
        f"{dtype}, {mask}. Computed by formulas, not measured.{dots}"
    )
