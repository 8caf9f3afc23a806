"""What a head attends to, scored against a head with uniform weights.

A pattern defines, for each query, some target keys:

    previous     the token before                     next       the token after
    self         the token itself                     first      the first real token (a ViT's class token)
    separator    [SEP], </s>, <|endoftext|>, …        same word  the other tokens of the query's word
    induction    the tokens that followed earlier occurrences of the query's token

In cross-attention, positions of queries and keys are not comparable: previous, next, self and induction have no meaning
there, and "same word" means source tokens with the same string; special tokens are no words. A ViT's patches are
numbered row by row.

    mass      mean over rows of the weight on the targets
    baseline  mean over rows of targets / keys, counting only keys that the row's mask leaves visible
    score     (mass - baseline) / (1 - baseline): 1 if all weight is on the targets, 0 for a uniform head

Rows at padding, rows that see no target, and rows that see only targets carry no information and are left out. For the
eighth pattern, uniform, the mass is the overlap with uniform weights, the sum over keys of min(w, 1/n), and the
baseline is the overlap of a one-hot head, 1/n: its score is 1 for a uniform head, 0 for a one-hot one. A head that
mixes a one-key pattern and uniform weights as a : 1 - a scores a and 1 - a.

A head is labelled with its strongest pattern if that scores at least 0.4 on at least 2 rows, "diffuse" if none does and
its weights are nearly uniform, and not at all otherwise: the heads of a random model have no pattern.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.core.display import Html, table
from regard.inference.tracing.record import Trace, TracedLayer
from regard.inference.tracing.statistics import heads_at_once
from regard.inference.tracing.targets import Targets, spoken, targets_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATTERNS = ("previous", "next", "first", "separator", "same word", "self", "induction", "uniform")
COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#999999")
"""A colour for each pattern, from Okabe and Ito's palette."""
LETTERS = ("P", "N", "F", "/", "W", "S", "I", "D")
"""A letter for each pattern in the cells of a figure, for readers who cannot distinguish the colours."""
LABELLED = 0.4
"""The score from which a pattern labels a head."""
LEAST_ROWS = 2
"""A pattern labels a head if at least this many rows could show it: a single repeated word is no induction head."""
DIFFUSE = "diffuse"
NEARLY_UNIFORM = 0.5
"""The score of uniform from which a head without a pattern is diffuse."""


@dataclass(frozen=True, repr=False)
class HeadPatterns:
    """Mass, baseline and score of each pattern for one head; None where a pattern has no meaning or no rows."""

    layer: int
    name: str
    kind: str
    head: int
    mass: dict[str, float | None]
    baseline: dict[str, float | None]
    score: dict[str, float | None]
    rows: dict[str, int]
    """How many rows, over the batch, each pattern was scored on."""

    @property
    def top(self) -> str | None:
        """The pattern with the highest score."""
        scored = {name: score for name, score in self.score.items() if score is not None}
        return max(scored, key=scored.__getitem__) if scored else None

    @property
    def label(self) -> str | None:
        """What the head does, if it clearly does something: a pattern, or "diffuse"; None otherwise."""
        shares = {name: (self.score[name] or 0.0) if self.rows[name] >= LEAST_ROWS else 0.0 for name in PATTERNS[:-1]}
        strongest = max(shares, key=lambda name: (round(shares[name], 6), self.rows[name]))
        if shares[strongest] >= LABELLED:
            return strongest
        return DIFFUSE if (self.score["uniform"] or 0.0) >= NEARLY_UNIFORM else None

    @property
    def strength(self) -> float:
        """The score of the label's pattern; 0 without a label."""
        if (label := self.label) is None:
            return 0.0
        return self.score["uniform" if label == DIFFUSE else label] or 0.0

    def __repr__(self) -> str:
        label = self.label
        described = "no label" if label is None else f"{label} {self.strength:.2f}"
        return f"HeadPatterns(layer {self.layer}, head {self.head}, {self.kind}: {described})"

    def _repr_html_(self) -> Html:
        columns = {"score": self.score, "mass": self.mass, "baseline": self.baseline}
        rows = [
            {"pattern": name, **{title: _number(values[name]) for title, values in columns.items()}}
            for name in PATTERNS
        ]
        return table(rows, title=f"layer {self.layer}, head {self.head}, {self.kind}", right=columns)


@dataclass(frozen=True, repr=False)
class Patterns:
    """The patterns of every head. Print it, draw it with `plot()`, or read `to_dict()`."""

    heads: tuple[HeadPatterns, ...]

    def of(self, layer: int, head: int) -> HeadPatterns:
        """One head's patterns."""
        for candidate in self.heads:
            if (candidate.layer, candidate.head) == (layer, head):
                return candidate
        raise ValueError(f"head: expected a recorded layer and head, got layer {layer} head {head}")

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as a dict that can be written as JSON."""
        return {"patterns": list(PATTERNS), "heads": [asdict(head) for head in self.heads]}

    def __str__(self) -> str:
        lines = ["layer  head  kind   label       score   mass  baseline"]
        for head in self.heads:
            line = f"{head.layer:>5} {head.head:>5}  {head.kind:<5}  "
            if (label := head.label) is not None:
                name = PATTERNS[_number_of(label)]
                line += f"{label:<10} {head.strength:>6.2f} {head.mass[name]:>6.2f}    {head.baseline[name]:>6.2f}"
            lines.append(line + ("" if label else "-"))
        return "\n".join(lines)

    def __repr__(self) -> str:
        labels = Counter(head.label or "none" for head in self.heads)
        counts = ", ".join(f"{name} {count}" for name, count in labels.most_common())
        return f"Patterns of {len(self.heads)} heads, by label: {counts or 'none'}"

    def _repr_html_(self) -> Html:
        layers, columns, places = self._grid()
        rows = []
        for layer in layers:
            row: dict[str, object] = {"layer": _layer_name(layer)}
            for column in columns:
                row[f"head {column}"] = _html_cell(places.get((*layer, column)))
            rows.append(row)
        return table(rows, title="The label of each head, and its score (1: all weight, 0: as uniform)")

    def plot(self) -> "Figure":
        """A matplotlib figure: layers down, heads across, each head's label by colour and letter; a low score
        makes the colour pale, and heads without a label are empty."""
        from regard.core.style import INK, QUIET, Patch, lattice, new_figure, to_rgba

        layers, columns, places = self._grid()
        size = (max(3.0, 0.34 * len(columns)) + 2.3, max(2.6, 0.34 * len(layers) + 1.2))
        figure = new_figure(*size, title="What each head does")
        axes = figure.subplots()
        cells = [[(1.0, 1.0, 1.0, 0.0)] * max(1, len(columns)) for _ in range(max(1, len(layers)))]
        for down, layer in enumerate(layers):
            for across, column in enumerate(columns):
                head = places.get((*layer, column))
                if head is None or (label := head.label) is None:
                    continue
                number = _number_of(label)
                cells[down][across] = to_rgba(COLOURS[number], min(1.0, head.strength))
                axes.text(across, down, LETTERS[number], ha="center", va="center", fontsize=7, color=INK)
        axes.imshow(cells, aspect="auto")
        lattice(axes, len(layers), len(columns))
        axes.set_xticks(range(len(columns)), [str(column) for column in columns], fontsize=8)
        axes.set_yticks(range(len(layers)), [_layer_name(layer) for layer in layers], fontsize=8)
        axes.set_xlabel("head", fontsize=8.5, color=QUIET)
        axes.set_ylabel("layer", fontsize=8.5, color=QUIET)
        marks = [
            Patch(color=colour, label=f"{letter}  {name}")
            for name, colour, letter in zip((*PATTERNS[:-1], DIFFUSE), COLOURS, LETTERS, strict=True)
        ]
        figure.legend(handles=marks, loc="outside right center", fontsize=8, frameon=False, title="pale: low score",
                      title_fontsize=8)  # fmt: skip
        return figure

    def _grid(self) -> "tuple[list[tuple[int, str]], list[int], dict[tuple[int, str, int], HeadPatterns]]":
        """The layers, the head numbers that any of them has, and the patterns of each layer and head."""
        layers = list(dict.fromkeys((head.layer, head.kind) for head in self.heads))
        columns = sorted({head.head for head in self.heads})
        return layers, columns, {(head.layer, head.kind, head.head): head for head in self.heads}


def _layer_name(layer: tuple[int, str]) -> str:
    return f"{layer[0]} cross" if layer[1] == "cross" else str(layer[0])


def _number(value: float | None) -> str:
    return "" if value is None else f"{round(value, 2) + 0.0:.2f}"  # no -0.00


def _html_cell(head: HeadPatterns | None) -> Html:
    if head is None or (label := head.label) is None:
        return Html("")
    colour = COLOURS[_number_of(label)]
    return Html(
        f'<span style="border-left:.4em solid {colour};padding-left:.3em">{label}<br>{head.strength:.2f}</span>'
    )


def _number_of(label: str) -> int:
    return PATTERNS.index("uniform" if label == DIFFUSE else label)


def patterns(trace: Trace, separators: Sequence[str] | Sequence[int] | None = None) -> Patterns:
    """Score every recorded head for the patterns of this module, relative to the baseline of its sequence and mask.

    Separator, same word and induction need the trace's tokens. `separators` are other token strings, or positions among
    the keys. Layers of channel attention have no patterns and are left out.

    >>> import torch
    >>> from regard.inference.trace import Trace, TracedLayer, patterns
    >>> weights = torch.eye(4).roll(-1, dims=1)[None, None]  # each token looks at the one before it
    >>> layer = TracedLayer(
    ...     index=0, name="", kind="self", mechanism="", heads=(0,), rows=(0, 1, 2, 3), weights=weights)
    >>> print(patterns(Trace([layer])))
    layer  head  kind   label       score   mass  baseline
        0     0  self   previous     1.00   1.00      0.25
    """
    scoring = Scoring(trace, separators)
    return Patterns(tuple(head for layer in trace.layers for head in scoring.heads(layer)))


class Scoring:
    """Scores the layers of a trace one by one. Layers with the same positions, mask and tokens share their targets."""

    def __init__(self, trace: Trace, separators: Sequence[str] | Sequence[int] | None = None) -> None:
        self.trace, self.separators = trace, separators
        self._targets: list[Targets] = []

    def heads(self, layer: TracedLayer) -> list[HeadPatterns]:
        """The patterns of each head of a layer; none of attention between channels."""
        if not layer.by_pairs:
            return []
        layer = layer.flat()
        weights = layer.need("weights").float()
        targets = self._targets_of(layer, weights)
        # Only uniform needs tables as large as the weights; the other sums are products of matrices.
        even = targets.even.expand(-1, weights.shape[1], -1, -1)
        parts = zip(*(table.split(heads_at_once(weights), 1) for table in (weights, even)), strict=True)
        overlap = torch.cat([torch.minimum(part, share).sum(-1) for part, share in parts], 1)
        masses = torch.cat([_on(weights, targets.wanted), overlap[None]])
        rows = targets.rows & weights.sum(-1).isfinite()
        counts, means = rows.sum((1, 3)), [_mean(masses, rows), _mean(targets.shares.expand(rows.shape), rows)]
        mass, baseline = (mean.T.tolist() for mean in means)
        return [
            _head(layer, place, targets.names, numbers)
            for place, numbers in enumerate(zip(mass, baseline, counts.T.tolist(), strict=True))
        ]

    def _targets_of(self, layer: TracedLayer, weights: Tensor) -> Targets:
        strings = spoken(self.trace, layer, weights.shape[0], weights.shape[3])
        for targets in self._targets:
            if targets.fit(layer, weights, strings):
                return targets
        self._targets.append(targets_of(layer, weights, strings, self.separators))
        return self._targets[-1]


def _on(weights: Tensor, wanted: Tensor) -> Tensor:
    """The sums (P, B, H, T) of the weights on the keys of each pattern, (P, B or 1, H or 1, T, S)."""
    if wanted.shape[2] == 1:
        tables = wanted[:, :, 0].expand(-1, len(weights), -1, -1)
        return torch.einsum("bhts,pbts->pbht", weights, tables)
    return torch.stack([torch.einsum("bhts,bhts->bht", weights, table.to(weights.dtype)) for table in wanted])


def _mean(numbers: Tensor, rows: Tensor) -> Tensor:
    """The mean (P, H) over the batch and the rows that count; NaN without rows."""
    return numbers.masked_fill(~rows, 0).sum((1, 3)) / rows.sum((1, 3))


def _head(
    layer: TracedLayer,
    place: int,
    names: Sequence[str],
    numbers: tuple[list[float], list[float], list[int]],
) -> HeadPatterns:
    mass: dict[str, float | None] = dict.fromkeys(PATTERNS)
    baseline: dict[str, float | None] = dict.fromkeys(PATTERNS)
    score: dict[str, float | None] = dict.fromkeys(PATTERNS)
    rows = dict.fromkeys(PATTERNS, 0)
    for name, m, b, count in zip(names, *numbers, strict=True):
        rows[name] = count
        if m == m and b < 1:  # NaN means no rows
            mass[name], baseline[name], score[name] = m, b, (m - b) / (1 - b)
    return HeadPatterns(layer.index, layer.name, layer.kind, layer.heads[place], mass, baseline, score, rows)
