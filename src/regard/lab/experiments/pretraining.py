"""BERT's pre-training tasks, and a third: what a small encoder learns of each, on sentences made here."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch

from regard.core.style import COLOURS, MARKERS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import DEVIATIONS, Estimate
from regard.training import Settings, train
from regard.training.metrics import read_metrics
from regard.training.recipes import bert
from regard.training.task import IGNORED

TASKS = {"masked words": "generative", "next sentence": "contrastive", "inverted sentence": "contrastive"}
TOPICS = (
    ("baker", "bread", "knife", "kitchen"),
    ("sailor", "rope", "hook", "harbour"),
    ("farmer", "corn", "plough", "field"),
    ("doctor", "patient", "needle", "ward"),
    ("miner", "coal", "lamp", "tunnel"),
    ("tailor", "cloth", "scissors", "shop"),
    ("gardener", "rose", "spade", "garden"),
    ("student", "book", "pencil", "library"),
)
"""Who does what with what, and where: a document keeps to one of them."""
ADJECTIVES, VERBS = ("old", "young", "small", "tall"), ("finds", "takes", "shows", "wants")
SENTENCES = 6
"""Sentences of a document."""


def proportion(share: float, count: int) -> Estimate:
    """A share of so many independent answers that were right, with Wilson's interval."""
    square = DEVIATIONS**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    wide = DEVIATIONS * math.sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return Estimate(share, (min(share, centre - wide), max(share, centre + wide)))


@experiment(
    claims=("004.12.6",),
    title="Pre-training: masked words, the next sentence, inverted sentences",
    statement=(
        "BERT is pre-trained by a generative task, to predict masked words, and a contrastive one, to tell whether a "
        "sentence follows another. Recognising a sentence with its phrases in reverse is another contrastive task. An "
        "encoder learns all three together: on documents it has not seen, its accuracy is above that of always giving "
        "the commonest answer."
    ),
    formula=(
        r"L = -\log p(\text{word} \mid \text{rest}) - \log p(\text{follows?} \mid A, B) "
        r"- \log p(\text{inverted?} \mid A, B)"
    ),
)
def pretraining(
    *,
    steps: Annotated[int, Between(1, 4000, log=True)] = 1000,
    documents: Annotated[int, Between(40, 4000, log=True)] = 800,
    embedding_dim: Annotated[int, Between(8, 256, log=True)] = 64,
    num_layers: Annotated[int, Between(1, 6)] = 2,
    learning_rate: Annotated[float, Between(1e-5, 0.1, log=True)] = 3e-3,
    evaluations: Annotated[int, Between(1, 50)] = 10,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Train the library's BERT recipe on documents about eight trades; its accuracy of each task on held-out documents.

    >>> pretraining(steps=2, documents=60, embedding_dim=8, num_layers=1, evaluations=1).checks[0].name
    'accuracy of masked words, above always the commonest'
    """
    dim = 4 * -(-embedding_dim // 4)  # of four heads
    with TemporaryDirectory() as name, torch.random.fork_rng(devices=()):
        folder = Path(name)
        (folder / "text").mkdir()
        (folder / "text" / "trades.txt").write_text(_text(documents, seed), encoding="utf-8")
        options = bert.Options(
            data=str(folder / "text"),
            vocabulary_size=512,
            embedding_dim=dim,
            num_layers=num_layers,
            context_length=32,
            dropout=0.0,
            inverted_sentence=True,
        )
        task = bert.build(options, folder, seed)
        counts = _judged(task)
        settings = Settings(
            steps=steps,
            learning_rate=learning_rate,
            warmup=min(steps, 50),
            batch_size=64,
            evaluate_every=max(1, steps // evaluations),
            save_every=steps,
            seed=seed,
        )
        with torch.no_grad():
            before = task.evaluate(task.model.eval())
        train(task, settings, folder, watch=lambda report: None)
        curve = [(0, before)] + [
            (record["step"], record["evaluation"]) for record in read_metrics(folder) if "evaluation" in record
        ]
    last, checks = curve[-1][1], []
    for name in TASKS:
        right = proportion(last[f"{name} accuracy"], counts[name])
        checks.append(
            Check(
                name=f"accuracy of {name}, above always the commonest",
                predicted=last[f"{name} baseline"],
                measured=right.value,
                interval=right.interval,
                rule="at least",
            )
        )
    rows = [
        {"step": step, **{f"{name} accuracy": results[f"{name} accuracy"] for name in TASKS}} for step, results in curve
    ]
    chance = {name: last[f"{name} baseline"] for name in TASKS}
    return Measurements(
        statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, chance, counts, documents)
    )


def _text(documents: int, seed: int) -> str:
    """Documents of sentences such as "The old baker takes the bread with the knife in the kitchen."."""
    draw = random.Random(seed)
    texts = []
    for _ in range(documents):
        who, what, tool, place = draw.choice(TOPICS)
        sentences = (
            f"The {draw.choice(ADJECTIVES)} {who} {draw.choice(VERBS)} the {what} with the {tool} in the {place}."
            for _ in range(SENTENCES)
        )
        texts.append(" ".join(sentences))
    return "\n\n".join(texts)


def _judged(task: bert.Bert) -> dict[str, int]:
    """How many held-out examples an evaluation has of each task; the words of a pair are not independent."""
    paired = sum(int((rows["next"] != IGNORED).sum()) for rows in task.judged)
    inverted = sum(int((rows["inverted"] != IGNORED).sum()) for rows in task.judged)
    return {"masked words": paired, "next sentence": paired, "inverted sentence": inverted}


def _figure(rows: Sequence[dict[str, Any]], chance: dict[str, float], counts: dict[str, int], documents: int) -> Figure:
    figure = new_figure(
        8,
        4.2,
        title="One encoder learns a generative and two contrastive tasks together",
        note=f"{documents} documents of {SENTENCES} sentences, a tenth of them held out; accuracy on those, with "
        "intervals of 99.999 %. Dashed: always the commonest answer.",
    )
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    for colour, marker, (name, kind) in zip(COLOURS, MARKERS, TASKS.items(), strict=False):
        estimates = [proportion(row[f"{name} accuracy"], counts[name]) for row in rows]
        low, high = zip(*(estimate.interval for estimate in estimates), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        label = f"{name} ({kind}), {counts[name]:,} examples"
        axes.plot(steps, [estimate.value for estimate in estimates], f"{marker}-", color=colour, label=label)
        axes.axhline(chance[name], color=colour, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.03)
    dress(axes, x="training steps", y="accuracy")
    axes.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.24))
    return figure
