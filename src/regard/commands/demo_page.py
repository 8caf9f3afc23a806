"""The steps of `regard demo`: two small translators, one with softmax and one with quadratic attention, are trained on
the phrase-book; then it shows what they learned, where they attend, what they cost, and whether the laws hold.

Each step is a function that returns its text, its table and its figures. `run` passes them on as they are computed and
writes a page of all steps (demo_html.py) into a folder, next to the two runs.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

import regard as rg
from regard.commands.demo_html import page
from regard.core.cost import human, mode_crossover, mode_work
from regard.core.cost_figure import cost_figure
from regard.core.files import save_figure, write_text
from regard.core.laws import LAWS
from regard.core.laws.case import HEADS
from regard.core.masks.drawing import masks_figure
from regard.core.style import Figure
from regard.core.weights_figure import weights_figure
from regard.training.curves import curves_figure
from regard.training.data.phrasebook import phrasebook, swaps
from regard.training.metrics import read_metrics
from regard.training.recipes.translate import Options, alignment, looks, quality, translate

SOFTMAX, QUADRATIC = rg.Softmax(), rg.Quadratic()
MECHANISMS: dict[str, rg.Mechanism] = {"softmax": SOFTMAX, "quadratic": QUADRATIC}
STEPS = 900
SIZES = {
    "count": 40000, "held-out": 300, "vocabulary-size": 3072, "embedding-dim": 96, "hidden-dim": 192, "num-layers": 1,
    "num-heads": 2,
    "batch-tokens": 1024, "learning-rate": 5e-3, "warmup": 100, "keep": 1,
}  # fmt: skip
"""A translator of 0.5 million parameters that trains in less than a minute."""
DESCRIBED = (
    f"Encoder-decoder of 1 + 1 layers, width {SIZES['embedding-dim']}, {SIZES['num-heads']} heads, float32; "
    "CPU, one core."
)
ATTACHED = """
import os, threading

def end_with_the_parent():
    os.read(0, 1)  # nothing is written: it ends when the parent ends, however it does
    os._exit(1)

threading.Thread(target=end_with_the_parent, daemon=True).start()
from regard.commands import main
main()
"""
"""The command of a child."""
TESTED, ALIGNED = 300, 60
"""How many held-out sentences are translated, and how many sentences with swapped words are used for the alignment."""
OPENING = "cross-attention.png"
"""The figure that the page begins with."""
SENTENCE = "La voiture rouge est rapide.", "The red car is fast."
CHECKED_MASKS, CHECKED_DTYPES = ("causal", "padding right"), ("float64", "float32")


@dataclass(frozen=True)
class Picture:
    """A figure, its file name and its caption."""

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Step:
    """A step of the demo: its text, a table, notes, and figures."""

    title: str
    words: str
    rows: Sequence[dict[str, str]] = ()
    right: Sequence[str] = ()
    """The columns of numbers."""
    notes: Sequence[str] = ()
    folded: str = ""
    """The title under which the page folds the table; if empty, the table is shown."""
    pictures: tuple[Picture, ...] = ()


Watch: TypeAlias = Callable[[int, str], AbstractContextManager[Callable[[str], object] | None]]
"""Takes the number of pieces of work and a title; returns a context whose function is called as each piece begins."""


def unwatched(pieces: int, title: str) -> AbstractContextManager[None]:
    """Show no progress."""
    return nullcontext()


def learn(folder: Path, *, steps: int = STEPS, seed: int = 0, watch: Watch = unwatched) -> Step:
    """Train both translators with `regard train`, each on one core."""
    options = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    options += ["--steps", str(steps), "--evaluate-every", str(max(1, steps // 5)), "--seed", str(seed)]
    options += ["--device", "cpu"]
    children = {}
    for name in MECHANISMS:
        command = [sys.executable, "-c", ATTACHED, "train", "translate", "--mechanism", name, *options]
        with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
            children[name] = subprocess.Popen(
                [*command, "--out", str(folder / name)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
    try:
        _follow(folder, children, steps, watch)
    finally:
        for child in children.values():
            child.kill()  # it has finished, or its run is of no use
            child.communicate()
    runs = {name: read_metrics(folder / name) for name in MECHANISMS}
    results = {
        name: {line["step"]: line["evaluation"]["exact"] for line in lines if "evaluation" in line}
        for name, lines in runs.items()
    }
    rows = [
        {"training step": f"{step:,}", **{f"{name}, exact": f"{results[name][step]:.1%}" for name in runs}}
        for step in next(iter(results.values()))
    ]
    note = DESCRIBED
    return Step(
        title="Train",
        words=(
            "Two encoder-decoders of half a million parameters learn French to English from a phrase-book, each on one "
            "core: the same model, the same sentences, another attention. Exact is the share of held-out sentences "
            "that they translate word for word; each of these has a combination of words that is not in the training "
            "sentences."
        ),
        rows=rows,
        right=list(rows[0]),
        pictures=(
            Picture(
                "curves.png",
                curves_figure(
                    runs,
                    title="Training of both translators",
                    note=note,
                    label_smoothing=Options().label_smoothing,
                ),
                "Loss over the steps, and results on held-out sentences.",
            ),
        ),
    )


def _follow(folder: Path, children: "Mapping[str, subprocess.Popen[bytes]]", steps: int, watch: Watch) -> None:
    """Wait for both runs, and show their progress."""
    with watch(len(children) * steps, "training") as progress:
        reported = 0
        while any(child.poll() is None for child in children.values()):
            time.sleep(0.2)
            if any(child.poll() for child in children.values()):
                break
            lines = {name: [line for line in read_metrics(folder / name) if "loss" in line] for name in children}
            done = sum(map(len, lines.values()))
            losses = "  ".join(
                f"{name} {steps_done[-1]['loss']:.2f}" for name, steps_done in lines.items() if steps_done
            )
            for _ in range(done - reported if progress is not None else 0):
                progress(f"loss: {losses}")  # type: ignore[misc]
            reported = done
    for name, child in children.items():
        if child.poll():
            words = (folder / f"{name}.log").read_text(encoding="utf-8").strip().splitlines()
            raise ValueError(f"training with {name}: expected it to finish, got: {words[-1] if words else 'nothing'}")


def speak(models: Mapping[str, rg.Transformer]) -> Step:
    """Translate held-out sentences."""
    pairs = [SENTENCE, *phrasebook("held_out", 5)]
    texts = {name: translate(model, [source for source, _ in pairs]) for name, model in models.items()}
    rows = [
        {
            "French": source,
            "reference": target,
            **{name: f"{'✓' if lines[at] == target else '·'} {lines[at]}" for name, lines in texts.items()},
        }
        for at, (source, target) in enumerate(pairs)
    ]
    return Step(
        title="Translate",
        words="Held-out sentences, translated by beam search with four beams; ✓ marks those that equal the reference.",
        rows=rows,
    )


def see(models: Mapping[str, rg.Transformer]) -> Step:
    """Show the cross-attention of a translation in which words change places."""
    panels: dict[str, Any] = {}
    table = []
    for name, model in models.items():
        aligned = alignment(model, swaps("held_out", ALIGNED))
        table.append(
            {
                "mechanism": name,
                "sentences": f"{aligned.share:.0%}",
                "weight on the right words": f"{aligned.weight:.0%}",
                "decoder layer": str(aligned.layer + 1),
                "head": "mean of all" if aligned.head is None else str(aligned.head + 1),
            }
        )
        rows, columns, weights = looks(model, *SENTENCE)
        layer = weights[aligned.layer]
        panels[name] = layer.mean(0) if aligned.head is None else layer[aligned.head]
    figure = weights_figure(
        panels,
        rows,
        keys=columns,
        axes_names=("English word, as it is written", "French word"),
        title="Where each word looks as it is written",
        note=f"Cross-attention. {DESCRIBED}",
    )
    caption = (
        "Two translators write “The red car is fast.” Each row is an English word and shows where it looks in the "
        "French. French puts the adjective after the noun (“voiture rouge”), so the rows of “red” and “car” cross."
    )
    return Step(
        title="See",
        words=(
            f"Of {ALIGNED} held-out sentences in which noun and adjective change places: the share in which the noun "
            "looks at the noun and the adjective at the adjective, in the layer and head that do it best. rg.trace "
            "gives the exact weights of every attention in a model, quadratic's as well as softmax's."
        ),
        rows=table,
        right=("sentences", "weight on the right words", "decoder layer"),
        pictures=(Picture(OPENING, figure, caption),),
    )


def hide() -> Step:
    """Draw a gallery of masks."""
    masks, length = gallery()
    figure = masks_figure(masks, length, title="Masks: who may attend to whom")
    return Step(
        title="Hide",
        words="A mask says which keys a query may see at all. Masks are values that compose with &, | and ~.",
        pictures=(Picture("masks.png", figure, "Filled: the query may attend to the key."),),
    )


def gallery(side: int = 6) -> tuple[Mapping[str, rg.Mask], int]:
    """Some masks by name, for a sequence that is also a grid of `side` × `side`.

    >>> masks, length = gallery()
    >>> len(masks), length
    (6, 36)
    """
    length = side * side
    third = length // 3
    documents = [0] * (third + 2) + [1] * (third - 4) + [2] * (length - 2 * third + 2)
    return {
        "causal": rg.causal,
        "causal & window(before=8)": rg.causal & rg.window(before=8),
        "global_tokens(3) | window(4, 4)": rg.global_tokens(3) | rg.window(4, 4),
        f"window2d(grid=({side}, {side}), radius=1)": rg.window2d(grid=(side, side), radius=1),
        f"padding([{length - 10}])": rg.padding([length - 10]),
        "segments(ids), 3 documents": rg.segments([documents]),
    }, length


def compare(models: Mapping[str, rg.Transformer], folder: Path) -> Step:
    """Compare the quality and the measured cost of both."""
    rows = []
    for name, model in models.items():
        results = quality(model, phrasebook("held_out", TESTED))
        steps = [line for line in read_metrics(folder / name) if "loss" in line]
        speed = sum(step["tokens"] for step in steps) / steps[-1]["seconds"]
        rows.append(
            {
                "mechanism": name,
                "exact": f"{results['exact']:.1%}",
                "BLEU": f"{results['bleu']:.1f}" if "bleu" in results else "-",
                "tokens/s": f"{speed:,.0f}",
                "state at 64": human(state_bytes(model, 64), "B"),
                "state at 4,096": human(state_bytes(model, 4096), "B"),
            }
        )
    return Step(
        title="Compare",
        words=(
            f"{TESTED} held-out sentences; tokens per second in training, each on one core; bytes that the decoder's "
            "self-attention keeps of 64 and of 4,096 tokens. The state of softmax (its KV cache) grows with the text, "
            "that of the quadratic kernel does not."
        ),
        rows=rows,
        right=list(rows[0])[1:],
    )


def state_bytes(model: rg.Transformer, length: int) -> int:
    """Bytes that a decoder's self-attention keeps of `length` tokens."""
    state = model.start(torch.zeros(1, 1, dtype=torch.long), capacity=length)
    return sum(layer.nbytes for layer in state.layers)


def count(lengths: Sequence[int] = (1024, 4096, 16384, 65536)) -> Step:
    """Count the cost of both mechanisms over length, and where they cross."""
    work = rg.Work(num_heads=32, num_kv_heads=8, mask=rg.causal)
    rows = []
    for length in lengths:
        for name, mechanism in MECHANISMS.items():
            prefill, decode = (rg.cost(mechanism, mode_work(work, mode, length)) for mode in ("prefill", "decode"))
            rows.append(
                {
                    "length": f"{length:,}",
                    "mechanism": name,
                    "prefill": human(prefill.flops, "FLOP"),
                    "one new token": human(decode.bytes, "B"),
                    "state": human(decode.state_bytes, "B"),
                }
            )
    crossings = [
        f"{mode}: quadratic is cheaper from {crossing:,} tokens on, by {by}"
        for mode, by in (("prefill", "FLOPs"), ("decode", "bytes moved"))
        if (crossing := mode_crossover(SOFTMAX, QUADRATIC, work, mode)) is not None
    ]
    figure = cost_figure(MECHANISMS, work, kv_heads=(32, 8, 1), title="What attention costs over length")
    caption = (
        "Cost over length for 32 heads with keys and values of their own (MHA), of 8 groups (GQA) and of one (MQA)."
    )
    return Step(
        title="Count",
        words=(
            "FLOPs decide how fast a prompt is read (prefill), bytes moved how fast a token is written (decode). Both "
            "are formulas that a law compares with counters. Here: 32 heads over 8, 64 long, bfloat16, causal."
        ),
        rows=rows,
        right=("length", "prefill", "one new token", "state"),
        notes=crossings,
        pictures=(Picture("cost.png", figure, caption),),
    )


def check_laws(watch: Watch = unwatched) -> Step:
    """Check every law on both mechanisms, with a few masks."""
    cells = len(LAWS) * len(CHECKED_MASKS) * len(HEADS) * len(CHECKED_DTYPES)
    with watch(len(MECHANISMS) * cells, "checking") as progress:
        reports = {
            name: rg.check(mechanism, masks=CHECKED_MASKS, dtypes=CHECKED_DTYPES, progress=progress)
            for name, mechanism in MECHANISMS.items()
        }
    by_law: dict[str, dict[str, str]] = {}
    for name, report in reports.items():
        for row in report.rows():
            line = by_law.setdefault(row["law"], {"law": row["law"], "statement": row["statement"]})
            line[name] = f"{row['outcome']}, {row['cells']}"
    return Step(
        title="Check",
        words=(
            f"rg.check runs every law on random shapes: here under the masks {' and '.join(CHECKED_MASKS)}, in "
            f"{', '.join(CHECKED_DTYPES)}, for {', '.join(HEADS)}. A broken law would come with its smallest "
            "counter-example. regard check runs all masks and dtypes, for a mechanism of your own as well."
        ),
        rows=list(by_law.values()),
        folded=f"The {len(by_law)} laws, and in how many cells each holds",
        notes=[report.heading for report in reports.values()],
    )


def tour(folder: Path, *, steps: int = STEPS, seed: int = 0, watch: Watch = unwatched) -> Iterator[Step]:
    """The steps, each computed when it is needed."""
    yield learn(folder, steps=steps, seed=seed, watch=watch)
    models = {name: rg.load(folder / name) for name in MECHANISMS}
    yield speak(models)  # type: ignore[arg-type]
    yield see(models)  # type: ignore[arg-type]
    yield hide()
    yield compare(models, folder)  # type: ignore[arg-type]
    yield count()
    yield check_laws(watch)


def run(
    folder: str | Path,
    *,
    steps: int = STEPS,
    seed: int = 0,
    show: Callable[[Step], object] = lambda step: None,
    watch: Watch = unwatched,
) -> Path:
    """Run all steps and pass each to `show`; write the figures and a page into `folder`. Returns the page's path."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    taken = [name for name in MECHANISMS if (target / name).exists()]
    if taken:
        raise ValueError(f"out: expected a folder without runs, got {target}, which has {taken[0]}")
    done = []
    for step in tour(target, steps=steps, seed=seed, watch=watch):
        for picture in step.pictures:
            save_figure(picture.figure, target / picture.name)
        show(step)
        done.append(step)
    # The page begins with the figure of the third step and does not show it twice.
    opening = next(picture for step in done for picture in step.pictures if picture.name == OPENING)
    rest = [replace(step, pictures=tuple(p for p in step.pictures if p is not opening)) for step in done]
    return write_text(target / "index.html", page(rest, opening, str(folder)))
