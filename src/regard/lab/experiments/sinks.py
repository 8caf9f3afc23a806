"""Attention sinks: how much of a trained decoder's attention goes to the first token."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import DEVIATIONS, mean
from regard.lab.trained import initialise, trained, untrained
from regard.models.base import expect

TEXT = (
    "The old bridge crosses the river where the two roads meet. Every morning a farmer walks over it with her dog, "
    "and every evening they come back. In winter the water freezes near the banks, so children skate under the "
    "arches. Once a storm broke one of the pillars; it took three years to mend, because nobody could agree who "
    "should pay for the stones. Now there is a small sign that tells the story."
)


def score_variance(embedding_dim: int, weight_variance: float) -> float:
    """The variance of scores q·k/sqrt(K) of tokens with mean square 1, for random projections."""
    return (embedding_dim * weight_variance) ** 2


def even_share(tokens: int) -> float:
    """The mean weight on the first token if every query sees all tokens up to its own alike: H_T / T."""
    return sum(1 / seen for seen in range(1, tokens + 1)) / tokens


@experiment(
    claims=("real.sinks",),
    title="The first token as an attention sink",
    statement=(
        "In most layers of a trained decoder (SmolLM2) the first token gets more attention than in any layer of the "
        "same model with random weights, and it gets it whichever token comes first. With random weights its share is "
        "that of even attention, $\\frac{1}{T}\\sum_{t=1}^{T} \\frac{1}{t}$, up to the variance of the scores."
    ),
    formula=r"\frac{1}{T} \sum_{t=1}^{T} a_{t1} = \frac{1}{T} \sum_{t=1}^{T} \frac{1}{t} \quad \text{(even attention)}",
    needs=("smollm2",),
)
def sinks(
    *,
    tokens: Annotated[int, Between(8, 48)] = 24,
    texts: Annotated[int, Between(1, 16)] = 6,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Trace pieces of a text that begin with different tokens, in the trained model and with random weights.

    >>> from regard import lab
    >>> lab.experiments()["sinks"].needs
    ('smollm2',)
    """
    model = expect(rg.Decoder, trained("smollm2"))
    assert model.tokenizer is not None
    spelled = model.tokenizer.encode(TEXT)
    starts = [piece * (len(spelled) - tokens) // max(1, texts - 1) for piece in range(texts)]
    ids = torch.tensor([spelled[start : start + tokens] for start in starts])
    twin, small = untrained(model, ids)
    on_first = _masses(model, ids)
    random = _masses(initialise(twin, seed), small)
    even = even_share(tokens)
    # Small scores make weights uneven to the first order, their mean over heads only to the second.
    uneven = score_variance(model.config.embedding_dim, twin.stack.layers[0].attention.W_q.weight.var().item())
    layers, random_layers = on_first.mean((0, 2)), random.mean((0, 2))
    apart = mean(random_layers / even - 1)
    wide = apart.interval[1] - apart.value
    spread = DEVIATIONS * random_layers.std().item()
    bars = (random_layers.mean().item() + spread, random_layers.max().item(), random_layers.mean().item() - spread)
    least, above, most = ((layers > bar).sum().item() for bar in bars)
    checks = (
        Check(
            name="random weights: share of the first token, relative to even attention − 1",
            predicted=uneven,
            measured=abs(apart.value),
            rule="at most",
            interval=(max(0.0, abs(apart.value) - wide), abs(apart.value) + wide),
        ),
        Check(
            name="trained: layers above every layer with random weights",
            predicted=len(layers) // 2 + 1,
            measured=above,
            rule="at least",
            interval=(least, most),
        ),
        Check(
            name="trained, least of all texts, against the most with random weights",
            predicted=random.mean((1, 2)).max().item(),
            measured=on_first.mean((1, 2)).min().item(),
            rule="at least",
        ),
    )
    rows = tuple(
        {
            "layer": layer,
            "trained": layers[layer].item(),
            "trained, least of all texts": on_first[:, layer].mean(-1).min().item(),
            "random": random_layers[layer].item(),
            "even": even,
        }
        for layer in range(len(layers))
    )
    words = [model.tokenizer.tokens(row[:1])[0].strip() for row in ids.tolist()]
    return Measurements(statement=checks, table=rows, draw=lambda: _figure(on_first, random, even, words))


@torch.no_grad()
def _masses(model: rg.Decoder, ids: Tensor) -> Tensor:
    """The mean weight on the first token, (texts, L, H)."""
    with rg.trace(model, keep=("weights",)) as trace:
        model(ids)
    return torch.stack([layer.need("weights")[..., 0].mean(-1) for layer in trace.layers], dim=1)


def _figure(trained_masses: Tensor, random: Tensor, even: float, words: Sequence[str]) -> Figure:
    figure = new_figure(
        8,
        4.0,
        title="A trained decoder attends to the first token, whichever it is",
        note="SmolLM2, mean over heads and queries. Lines: pieces of a text, by first token. Band: the middle half "
        "of the heads.",
    )
    axes = figure.subplots()
    depths = list(range(trained_masses.shape[1]))
    spread = trained_masses.mean(0).quantile(torch.tensor([0.25, 0.75]), dim=-1)
    axes.fill_between(depths, *spread, color=COLOURS[0], alpha=0.12, linewidth=0)
    for place, (masses, word) in enumerate(zip(trained_masses, words, strict=True)):
        axes.plot(depths, masses.mean(-1), color=COLOURS[place % 6], linewidth=1.2, label=f"trained, “{word}”")
    axes.plot(depths, random.mean((0, 2)), "o", color=COLOURS[6], markersize=3, label="random weights")
    axes.axhline(even, color=COLOURS[6], linestyle=":", label="even attention")
    axes.set_ylim(bottom=0)
    dress(axes, x="layer", y="attention on the first token")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right center")
    return figure
