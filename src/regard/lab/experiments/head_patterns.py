"""What the heads of trained models look at, and that heads with random weights look at nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, RULE, Figure, Line2D, dress, new_figure
from regard.inference.tracing.patterns import LETTERS, PATTERNS
from regard.lab.experiment import Between, Check, Measurements, Rule
from regard.lab.registry import experiment
from regard.lab.statistics import DEVIATIONS, Estimate, generator, mean
from regard.lab.trained import initialise, trained, untrained
from regard.models.base import TextModel

MODELS = {"minilm": "MiniLM, an encoder as BERT", "smollm2": "SmolLM2, a decoder as GPT"}
TEXT = (
    "The old bridge crosses the river where the two roads meet. Every morning a farmer walks over the old bridge with "
    "her dog, and every evening they come back over the river. In winter the children skate under the bridge."
)
"""Words that come again, for heads that look for the last time."""
CHANCE = 0.01
"""The share of heads with random weights that are above their own 99th percentile."""
REDRAWN = 200
"""How often twins are drawn again from the twins, to see how far the count of heads depends on them."""
FEW = 0.05
"""The most of a twin's heads that are above the 99th percentile of the other twins: those of a twin are alike."""


class Best(NamedTuple):
    """Each head's pattern with the highest score, uniform attention aside."""

    scores: Tensor
    """(L, H): 0 for a head with uniform weights, 1 for a head with all of its weight on the pattern."""
    names: list[list[str]]


def percentile(scores: Tensor) -> Tensor:
    """The 99th percentile of each layer's heads, (L,), in all twins together; scores are (L, N, H)."""
    return scores.flatten(1).quantile(1 - CHANCE, dim=1)


@experiment(
    claims=("003.5",),
    title="What trained heads look at",
    statement=(
        "Heads of trained models look at something: at the first token, the token before or after, separators, the "
        "same word, or what followed it earlier. A pattern's score is the weight on such keys beyond that of uniform "
        "attention. In an encoder (MiniLM) and in a decoder (SmolLM2) the best score of most heads exceeds the 99th "
        "percentile of those of the heads with random weights: the heads of the same layer in twins of the model that "
        "nobody trained. Of a twin's own heads hardly any (5 % at most) exceed that of the other twins."
    ),
    formula=r"\text{score} = \frac{m - b}{1 - b}, \quad m = \text{weight on the pattern's keys}, \; b = "
    r"\text{their share of all keys}",
    needs=tuple(MODELS),
)
def head_patterns(
    *,
    twins: Annotated[int, Between(20, 100)] = 20,
    layers: Annotated[int, Between(1, 30)] = 30,
    words: Annotated[int, Between(12, 39)] = 39,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Score the patterns of all heads in the first layers of both models, and of their twins.

    >>> from regard import lab
    >>> lab.experiments()["head_patterns"].needs
    ('minilm', 'smollm2')
    """
    text, random = " ".join(TEXT.split()[:words]), generator(seed)
    checks: list[Check] = []
    rows: list[dict[str, Any]] = []
    shown: dict[str, tuple[Best, Tensor, Tensor]] = {}
    for name in MODELS:
        model = trained(name)
        assert model.tokenizer is not None
        ids = torch.tensor([model.tokenizer.encode(text)])
        strings = model.tokenizer.tokens(ids[0].tolist())
        depth = min(layers, len(model.blocks))
        best = _best(model, ids, strings, depth)
        twin, small = untrained(model, ids, depth)
        seeds = torch.randint(2**31, (twins,), generator=random).tolist()
        untrained_scores = torch.stack(
            [_best(initialise(twin, number), small, strings, depth).scores for number in seeds], 1
        )
        bar = percentile(untrained_scores)
        above = best.scores > bar[:, None]
        checks += [
            _check(
                f"{name}: heads above the 99th percentile, of {above.numel()}",
                "at least",
                above.numel() // 2 + 1,
                _counted(best.scores, untrained_scores, random),
            ),
            _check(
                f"{name}: share of a twin's heads above that of the other twins",
                "at most",
                FEW,
                mean(_above_the_others(untrained_scores)),
            ),
        ]
        rows += [
            {
                "model": name,
                "layer": layer,
                "heads": above.shape[1],
                "heads above": int(above[layer].sum()),
                "99th percentile, random": bar[layer].item(),
                "median best score": best.scores[layer].median().item(),
                "highest": best.scores[layer].max().item(),
                "commonest pattern": Counter(best.names[layer]).most_common(1)[0][0],
            }
            for layer in range(depth)
        ]
        shown[name] = best, untrained_scores.flatten(1), bar
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(shown, twins))


@torch.no_grad()
def _best(model: TextModel, ids: Tensor, strings: Sequence[str], layers: int) -> Best:
    with rg.trace(model, layers=range(layers), keep=("weights",), tokens=list(strings)) as trace:
        model(ids)
    names: list[list[str]] = [[] for _ in range(layers)]
    scores: list[list[float]] = [[] for _ in range(layers)]
    for head in trace.patterns().heads:
        score, pattern = max(
            (score, pattern) for pattern, score in head.score.items() if score is not None and pattern != "uniform"
        )
        names[head.layer].append(pattern)
        scores[head.layer].append(score)
    return Best(torch.tensor(scores), names)


def _counted(scores: Tensor, untrained_scores: Tensor, random: torch.Generator) -> Estimate:
    """How many trained heads (L, H) are above the percentile of the twins' heads (L, N, H). The interval comes from the
    bootstrap: the standard deviation of that count over twins that are drawn from the twins."""
    twins = untrained_scores.shape[1]
    drawn = torch.randint(twins, (REDRAWN, twins), generator=random)
    counts = [int((scores > percentile(untrained_scores[:, some])[:, None]).sum()) for some in drawn]
    count = int((scores > percentile(untrained_scores)[:, None]).sum())
    wide = DEVIATIONS * torch.tensor(counts).double().std().item()
    return Estimate(count, (count - wide, count + wide))


def _above_the_others(scores: Tensor) -> Tensor:
    """Of each twin (L, N, H), the share of its heads that are above the percentile of the other twins, (N,)."""
    twins = range(scores.shape[1])
    bars = [percentile(scores[:, [other for other in twins if other != twin]]) for twin in twins]
    return (scores > torch.stack(bars, 1)[..., None]).double().mean((0, 2))


def _check(name: str, rule: Rule, predicted: float, estimate: Estimate) -> Check:
    return Check(name=name, predicted=predicted, measured=estimate.value, rule=rule, interval=estimate.interval)


def _figure(shown: Mapping[str, tuple[Best, Tensor, Tensor]], twins: int) -> Figure:
    figure = new_figure(
        8.5,
        4.3,
        title="Trained heads look at something, heads with random weights at nothing",
        note="Letters: heads of the trained model, by their best pattern. Grey: from the lowest to the highest head "
        f"of {twins} twins with random weights; line: their 99th percentile.",
    )
    panels = figure.subplots(1, len(shown), sharey=True)
    styles = dict(zip(PATTERNS[:-1], zip(COLOURS, LETTERS, strict=False), strict=True))
    present: set[str] = set()
    for axes, (name, (best, random, bar)) in zip(panels, shown.items(), strict=True):
        axes.bar(
            range(len(bar)), random.amax(1) - random.amin(1), bottom=random.amin(1), width=0.8, color=RULE, zorder=1
        )
        for layer, (scores, patterns) in enumerate(zip(best.scores.tolist(), best.names, strict=True)):
            for pattern in dict.fromkeys(patterns):
                mine = [score for score, other in zip(scores, patterns, strict=True) if other == pattern]
                colour, letter = styles[pattern]
                axes.plot([layer] * len(mine), mine, linestyle="", marker=f"${letter}$", color=colour, markersize=5)
        present.update(pattern for patterns in best.names for pattern in patterns)
        steps = range(len(bar))
        axes.plot(steps, bar, color="black", linewidth=1, drawstyle="steps-mid")
        above = int((best.scores > bar[:, None]).sum())
        title = f"{MODELS[name]}:\n{above} of {best.scores.numel()} heads above the line"
        dress(axes, title=title, x="layer", y="best score" if axes is panels[0] else "")
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_yticks([0, 0.01, 0.1, 1], ["0", "0.01", "0.1", "1"])
    handles = [
        Line2D([], [], linestyle="", marker=f"${letter}$", color=colour, label=pattern)
        for pattern, (colour, letter) in styles.items()
        if pattern in present
    ]
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside right center", title="looks at")
    return figure
