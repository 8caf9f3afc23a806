"""What a head attends to, scored against a head with uniform weights.

A pattern defines, for each query, some target keys:

    previous     the token before                     next       the token after
    self         the token itself                     first      the first real token (a ViT's class token)
    separator    [SEP], </s>, <|endoftext|>, …        same word  the other tokens of the query's word
    induction    the tokens that followed earlier occurrences of the query's token

In cross-attention, positions of queries and keys are not comparable: previous, next, self and induction have no meaning
there, and "same word" means source tokens with the same string. A ViT's patches are numbered row by row.

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
"""A pattern labels a head if at least so many rows could show it: a single repeated word is no induction head."""
DIFFUSE = "diffuse"
NEARLY_UNIFORM = 0.5
"""The score of uniform from which a head without a pattern is diffuse."""
SEPARATORS = frozenset(
    ("[SEP]", "</s>", "<sep>", "<eos>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|end|>")
)
PADS = frozenset(("[PAD]", "<pad>", "<|pad|>"))
STARTS = ("Ġ", "▁", " ")
"""How byte-level and SentencePiece tokens mark the beginning of a word."""


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
    heads: list[HeadPatterns] = []
    for layer in trace.layers:
        if layer.by_pairs:
            heads += _heads(trace, layer.flat(), separators)
    return Patterns(tuple(heads))


def _heads(trace: Trace, layer: TracedLayer, separators: Sequence[str] | Sequence[int] | None) -> list[HeadPatterns]:
    weights = layer.need("weights").float()
    batch, heads, _, keys = weights.shape
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if layer.visible is None else layer.visible
    visible = visible.to(weights.device).expand(batch, -1, weights.shape[2], keys)
    spoken = _spoken(trace, layer, batch, keys)
    counted = _counted_rows(layer, spoken[0], batch, weights.device)[:, None] & weights.sum(-1).isfinite()
    everyone = visible.sum(-1)
    results: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, targets in _targets(layer, *spoken, separators, batch, keys).items():
        wanted = visible & targets.to(weights.device)[:, None]
        among = wanted.sum(-1)
        rows = counted & (among > 0) & (among < everyone)
        mass, baseline = _on(weights, wanted), (among / everyone.clamp(min=1)).expand(batch, heads, -1)
        results[name] = _mean(mass, rows), _mean(baseline, rows), rows.sum((0, 2)).expand(heads)
    even = 1 / everyone.clamp(min=1)
    overlap = _on(torch.minimum(weights, even[..., None]), visible)
    rows = counted & (everyone > 1)
    shares = _mean(even.expand(batch, heads, -1), rows)
    results["uniform"] = _mean(overlap, rows), shares, rows.sum((0, 2)).expand(heads)
    return [_head(layer, place, results) for place in range(heads)]


def _on(weights: Tensor, keys: Tensor) -> Tensor:
    """The sum (B, H, T) of the weights on some keys, (B or 1, H or 1, T, S): without a table of products."""
    chosen = keys.to(weights.dtype).expand(len(weights), *keys.shape[1:])
    if chosen.shape[1] == 1:
        return torch.einsum("bhts,bts->bht", weights, chosen[:, 0])
    return torch.einsum("bhts,bhts->bht", weights, chosen)


def _mean(numbers: Tensor, rows: Tensor) -> Tensor:
    """The mean over the batch and the chosen rows, for each head; NaN without rows."""
    return numbers.masked_fill(~rows, 0).sum((0, 2)) / rows.sum((0, 2))


def _head(layer: TracedLayer, place: int, results: dict[str, tuple[Tensor, Tensor, Tensor]]) -> HeadPatterns:
    mass: dict[str, float | None] = dict.fromkeys(PATTERNS)
    baseline: dict[str, float | None] = dict.fromkeys(PATTERNS)
    score: dict[str, float | None] = dict.fromkeys(PATTERNS)
    rows = dict.fromkeys(PATTERNS, 0)
    for name, (masses, baselines, counts) in results.items():
        rows[name] = int(counts[place])
        m, b = float(masses[place]), float(baselines[place])
        if m == m and b < 1:  # NaN means no rows
            mass[name], baseline[name], score[name] = m, b, (m - b) / (1 - b)
    return HeadPatterns(layer.index, layer.name, layer.kind, layer.heads[place], mass, baseline, score, rows)


Spoken = list[list[str]] | None


def _spoken(trace: Trace, layer: TracedLayer, batch: int, keys: int) -> tuple[Spoken, Spoken]:
    """The token strings of queries (by position) and of keys, if the trace has tokens."""
    asked, answered = trace.labels(layer)
    for name, tokens, least in (
        ("tokens" if layer.kind == "self" else "source_tokens", answered, keys),
        ("tokens", asked, max(layer.rows, default=-1) + 1),
    ):
        # The last generated token has not run yet, so there may be one string more.
        if tokens is not None and (len(tokens) != batch or any(len(t) not in (least, least + 1) for t in tokens)):
            lengths = [len(sequence) for sequence in tokens]
            raise ValueError(f"{name}: expected {batch} sequences of {least} strings, got lengths {lengths}")
    return asked, None if answered is None else [sequence[:keys] for sequence in answered]


def _counted_rows(layer: TracedLayer, asked: Spoken, batch: int, device: torch.device) -> Tensor:
    """Which rows (B, T) are not at padding."""
    places = torch.tensor(layer.rows, dtype=torch.long, device=device)
    counted = torch.ones(batch, len(places), dtype=torch.bool, device=device)
    if layer.kind == "self" and layer.real is not None:
        counted &= layer.real.to(device)[:, places]
    if asked is not None:
        counted &= torch.tensor([[s[place] not in PADS for place in layer.rows] for s in asked], device=device)
    return counted


def _targets(
    layer: TracedLayer,
    asked: Spoken,
    answered: Spoken,
    separators: Sequence[str] | Sequence[int] | None,
    batch: int,
    keys: int,
) -> dict[str, Tensor]:
    """For each pattern that is defined here, which keys are targets, broadcastable to (B, T, S)."""
    query, key = torch.tensor(layer.rows, dtype=torch.long)[:, None], torch.arange(keys)
    start = torch.zeros(1, 1) if layer.real is None else layer.real.cpu().int().argmax(-1)[:, None]
    targets = {"first": (key == start)[:, None]}
    if (marked := _separated(answered, separators, keys)) is not None:
        targets["separator"] = marked[:, None]
    if layer.kind == "cross":
        if asked is not None and answered is not None:
            mine, theirs = _numbered([[bare(t) for t in s] for s in asked], [[bare(t) for t in s] for s in answered])
            targets["same word"] = mine[:, layer.rows, None] == theirs[:, None]
        return targets
    targets |= {"previous": (key == query - 1)[None], "next": (key == query + 1)[None], "self": (key == query)[None]}
    if answered is not None:
        words = torch.tensor([[-1 if word is None else word for word in word_ids(s)] for s in answered])
        mine = words[:, layer.rows, None]
        targets["same word"] = (mine == words[:, None]) & (mine >= 0) & (key != query)
        tokens, _ = _numbered(answered, answered)
        before = torch.cat([torch.full((batch, 1), -1), tokens[:, :-1]], dim=1)
        targets["induction"] = (tokens[:, layer.rows, None] == before[:, None]) & (key <= query)
    return targets


def _separated(answered: Spoken, separators: Sequence[str] | Sequence[int] | None, keys: int) -> Tensor | None:
    """Which keys (B, S) are separators; None without tokens."""
    if separators is not None and all(type(place) is int for place in separators):
        if wrong := [place for place in separators if not -keys <= place < keys]:  # type: ignore[operator]
            raise ValueError(f"separators: expected positions below {keys}, got {wrong[0]}")
        marked = torch.zeros(1, keys, dtype=torch.bool)
        marked[:, list(separators)] = True
        return marked
    if answered is None:
        return None
    marks = SEPARATORS if separators is None else set(separators)
    return torch.tensor([[token in marks for token in sequence] for sequence in answered])


def _numbered(*groups: list[list[str]]) -> list[Tensor]:
    """Strings as integers, equal for equal strings."""
    numbers: dict[str, int] = {}
    width = [max(len(sequence) for sequence in group) for group in groups]
    return [
        torch.tensor([[numbers.setdefault(t, len(numbers)) for t in s] + [-2] * (wide - len(s)) for s in group])
        for group, wide in zip(groups, width, strict=True)
    ]


def bare(token: str) -> str:
    """A token without the marks for the beginning and end of words.

    >>> [bare(token) for token in ("Ġcat", "▁cat", "##cat", "cat</w>")]
    ['cat', 'cat', 'cat', 'cat']
    """
    return token.lstrip("".join(STARTS)).removeprefix("##").removesuffix("</w>")


def word_ids(tokens: Sequence[str]) -> list[int | None]:
    """Which word each token belongs to, by the marks of its tokenizer; None for special tokens.

    WordPiece marks tokens that continue a word (##), byte-level BPE and SentencePiece those that begin one (Ġ, ▁),
    CLIP's BPE those that end one (</w>). Without marks each token is a word. A token without letters and digits is a
    word.

    >>> word_ids(["[CLS]", "re", "##gard", "this", "[SEP]"])
    [None, 0, 0, 1, None]
    >>> word_ids(["<s>", "▁re", "gard", ",", "▁this"])
    [None, 0, 0, 1, 2]
    """
    pieces = any(token.startswith("##") for token in tokens)
    begins = any(token.startswith(STARTS) for token in tokens)
    ends = any(token.endswith("</w>") for token in tokens)
    words: list[int | None] = []
    word, goes_on = -1, False
    for token in tokens:
        special = len(token) > 2 and (token[0], token[-1]) in (("[", "]"), ("<", ">")) and token[:2] != "</w"
        signs = not any(letter.isalnum() and letter not in "ĠĊĉ" for letter in bare(token))
        if pieces:
            joined = token.startswith("##")
        else:
            joined = (begins or ends) and goes_on and not token.startswith(STARTS) and not signs
        if not special and not (joined and words and words[-1] is not None):
            word += 1
        words.append(None if special else word)
        goes_on = not special and not signs and not token.endswith("</w>")
    return words
