"""The main job in about two minutes: two small translators, one with softmax attention and one with quadratic, trained
side by side on the phrase-book; what they learned, where they look, what they cost, and a proof.

Each step is a function that gives back what it has to say, its numbers and its pictures. `run` prints them and leaves a
page of them in a folder, beside the two runs.
"""

import html
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.figure import Figure

import regard as rg
from regard.core.cost import human, mode_crossover, mode_work
from regard.core.files import save_figure, write_text
from regard.core.laws import LAWS
from regard.core.laws.case import HEADS
from regard.core.plots import cost_figure, curves_figure, masks_figure, weights_figure
from regard.training.data.phrasebook import phrasebook, swaps
from regard.training.metrics import read_metrics
from regard.training.recipes.translate import alignment, looks, quality, translate

SOFTMAX, QUADRATIC = rg.Softmax(), rg.Quadratic()
MECHANISMS: dict[str, rg.Mechanism] = {"softmax": SOFTMAX, "quadratic": QUADRATIC}
STEPS = 900
SIZES = {
    "count": 40000, "held-out": 300, "vocabulary": 3072, "width": 96, "hidden": 192, "layers": 1, "heads": 2,
    "batch-tokens": 1024, "learning-rate": 5e-3, "warmup": 100, "keep": 1,
}  # fmt: skip
"""A translator of 0.5 million parameters, and how it learns in less than a minute."""
TESTED, ALIGNED = 300, 60
"""Held-out sentences that are translated, and those whose words change places that are looked into."""
SENTENCE = "La voiture rouge est rapide.", "The red car is fast."
PROOF_MASKS, PROOF_DTYPES = ("causal", "padding right"), ("float64", "float32")


@dataclass(frozen=True)
class Picture:
    """A figure, the name of its file and what a reader should see in it."""

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Step:
    """One stop of the tour: what it is about, its numbers as text, its pictures."""

    title: str
    words: str
    numbers: str
    pictures: tuple[Picture, ...] = ()


Watch: TypeAlias = Callable[[int, str], AbstractContextManager[Callable[[str], object] | None]]
"""Given how many pieces of work there are and their title, a context that gives what to call as each begins."""


def unwatched(pieces: int, title: str) -> AbstractContextManager[None]:
    """No progress shown."""
    return nullcontext()


def learn(folder: Path, *, steps: int = STEPS, seed: int = 0, watch: Watch = unwatched) -> Step:
    """Both translators, trained by the command that anybody would type, each on one core."""
    options = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    options += ["--steps", str(steps), "--evaluate-every", str(max(1, steps // 5)), "--seed", str(seed)]
    options += ["--device", "cpu"]
    children = {}
    for name in MECHANISMS:
        command = [sys.executable, "-m", "regard", "train", "translate", "--mechanism", name, *options]
        with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
            children[name] = subprocess.Popen(
                [*command, "--out", str(folder / name)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
    try:
        _follow(folder, children, steps, watch)
    finally:
        for child in children.values():
            child.terminate()
            child.wait()
    runs = {name: read_metrics(folder / name) for name in MECHANISMS}
    rows = [f"{'step':>6}" + "".join(f"{name + ', exact':>20}" for name in runs)]
    found = {
        name: {one["step"]: one["evaluation"] for one in lines if "evaluation" in one} for name, lines in runs.items()
    }
    for step in next(iter(found.values())):
        rows.append(f"{step:>6,}" + "".join(f"{found[name][step]['exact']:>20.1%}" for name in runs))
    return Step(
        title="Train",
        words=(
            "Two encoder-decoders of half a million parameters learn French to English from a phrase-book, each on one "
            "core: the same model, the same sentences, another attention. Exact is the share of held-out sentences "
            "that they translate word for word; each of those has words together that never met in training."
        ),
        numbers="\n".join(rows),
        pictures=(
            Picture("curves.png", curves_figure(runs), "Loss over the steps, and results on held-out sentences."),
        ),
    )


def _follow(folder: Path, children: "Mapping[str, subprocess.Popen[bytes]]", steps: int, watch: Watch) -> None:
    """Wait for trainings, and say how far they are."""
    with watch(len(children) * steps, "training") as progress:
        told = 0
        while any(child.poll() is None for child in children.values()):
            time.sleep(0.2)
            lines = {name: [one for one in read_metrics(folder / name) if "loss" in one] for name in children}
            done = sum(map(len, lines.values()))
            losses = "  ".join(f"{name} {one[-1]['loss']:.2f}" for name, one in lines.items() if one)
            for _ in range(done - told if progress is not None else 0):
                progress(f"loss: {losses}")  # type: ignore[misc]
            told = done
    for name, child in children.items():
        if child.returncode != 0:
            words = (folder / f"{name}.log").read_text(encoding="utf-8").strip().splitlines()
            raise ValueError(f"training with {name}: expected it to finish, got: {words[-1] if words else 'nothing'}")


def speak(models: Mapping[str, rg.Transformer]) -> Step:
    """Held-out sentences, translated."""
    pairs = [SENTENCE, *phrasebook("held_out", 5)]
    lines = []
    found = {name: translate(model, [source for source, _ in pairs]) for name, model in models.items()}
    for at, (source, target) in enumerate(pairs):
        lines += [source, f"    {'reference':<12}{target}"]
        lines += [f"  {'✓' if texts[at] == target else '·'} {name:<12}{texts[at]}" for name, texts in found.items()]
    return Step(
        title="Translate",
        words="Held-out sentences, by the likeliest of four beams. regard translate does it with a model that ships.",
        numbers="\n".join(lines),
    )


def see(models: Mapping[str, rg.Transformer]) -> Step:
    """Cross-attention of a translation whose words change their order; and a gallery of masks."""
    pictures, lines = [], []
    panels: dict[str, Any] = {}
    for name, model in models.items():
        found = alignment(model, swaps("held_out", ALIGNED))
        head = "the mean of all heads" if found.head is None else f"head {found.head + 1}"
        lines.append(
            f"{name:<12}{found.share:>5.0%} of {ALIGNED} sentences: noun looks at noun, adjective at adjective (layer "
            f"{found.layer + 1}, {head}, with {found.weight:.0%} of the weight)"
        )
        rows, columns, weights = looks(model, *SENTENCE)
        layer = weights[found.layer]
        panels[name] = layer.mean(0) if found.head is None else layer[found.head]
    figure = weights_figure(panels, rows, keys=columns, title="Where each word looks as it is written")
    caption = "Exact weights of cross-attention. French puts the adjective after the noun; the two rows cross there."
    pictures.append(Picture("cross-attention.png", figure, caption))
    masks, length = gallery()
    figure = masks_figure(masks, length, title="Masks: who may attend to whom")
    pictures.append(Picture("masks.png", figure, "Masks are values that compose with &, | and ~. Filled: may attend."))
    return Step(
        title="See",
        words="rg.trace gives the exact weights of every attention in a model, quadratic's as well as softmax's.",
        numbers="\n".join(lines),
        pictures=tuple(pictures),
    )


def gallery(side: int = 6) -> tuple[Mapping[str, rg.Mask], int]:
    """Masks worth a look, by name, over a sequence that is also a grid of `side` × `side`.

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
    """Quality and cost of both, measured."""
    rows = [f"{'':<12}{'exact':>8}{'BLEU':>8}{'tokens/s':>11}{'state at 64':>14}{'state at 4,096':>16}"]
    for name, model in models.items():
        found = quality(model, phrasebook("held_out", TESTED))
        lines = [one for one in read_metrics(folder / name) if "loss" in one]
        speed = sum(one["tokens"] for one in lines) / lines[-1]["seconds"]
        held = [state_bytes(model, length) for length in (64, 4096)]
        bleu = f"{found['bleu']:.1f}" if "bleu" in found else "-"
        rows.append(
            f"{name:<12}{found['exact']:>8.1%}{bleu:>8}{speed:>11,.0f}"
            f"{human(held[0], 'B'):>14}{human(held[1], 'B'):>16}"
        )
    return Step(
        title="Compare",
        words=(
            f"{TESTED} held-out sentences; tokens a second in training, each on one core; bytes that the decoder's "
            "self-attention keeps of what it has written. Softmax's state grows with the text, quadratic's stays as it "
            "is."
        ),
        numbers="\n".join(rows),
    )


def state_bytes(model: rg.Transformer, length: int) -> int:
    """What a decoder's self-attention keeps of so many tokens."""
    state = model.start(torch.zeros(1, 1, dtype=torch.long), capacity=length)
    return sum(layer.nbytes for layer in state.layers)


def count(lengths: Sequence[int] = (1024, 4096, 16384, 65536)) -> Step:
    """What both cost over the length, and where they cross."""
    work = rg.Work(num_heads=32, num_kv_heads=8, mask=rg.causal)
    header = f"{'length':>8}  {'mechanism':<10}{'prefill':>14}{'one new token':>16}{'state':>10}"
    rows = []
    for length in lengths:
        for name, mechanism in MECHANISMS.items():
            prefill, decode = (rg.cost(mechanism, mode_work(work, mode, length)) for mode in ("prefill", "decode"))
            rows.append(
                f"{length:>8,}  {name:<10}{human(prefill.flops, 'FLOP'):>14}{human(decode.bytes, 'B'):>16}"
                f"{human(decode.state_bytes, 'B'):>10}"
            )
    crossings = [
        f"{mode}: quadratic is cheaper from {found:,} tokens on, by {by}"
        for mode, by in (("prefill", "FLOPs"), ("decode", "bytes moved"))
        if (found := mode_crossover(SOFTMAX, QUADRATIC, work, mode)) is not None
    ]
    figure = cost_figure(MECHANISMS, work, kv_heads=(32, 8, 1))
    caption = (
        "Cost over length for 32 heads with keys and values of their own (MHA), of 8 groups (GQA) and of one (MQA)."
    )
    return Step(
        title="Count",
        words=(
            "FLOPs decide the speed of reading a prompt (prefill), bytes moved that of writing a token (decode). Both "
            "are formulas, held to counters by a law. 32 heads over 8, 64 long, bfloat16, causal."
        ),
        numbers="\n".join([header, *rows, "", *crossings]),
        pictures=(Picture("cost.png", figure, caption),),
    )


def prove(watch: Watch = unwatched) -> Step:
    """Every law on both mechanisms, under a few masks."""
    cells = len(LAWS) * len(PROOF_MASKS) * len(HEADS) * len(PROOF_DTYPES)
    with watch(len(MECHANISMS) * cells, "proving") as progress:
        reports = [
            rg.check(mechanism, masks=PROOF_MASKS, dtypes=PROOF_DTYPES, progress=progress)
            for mechanism in MECHANISMS.values()
        ]
    return Step(
        title="Prove",
        words=(
            f"rg.check runs every law on random shapes: here under the masks {' and '.join(PROOF_MASKS)}, in "
            f"{', '.join(PROOF_DTYPES)}, for {', '.join(HEADS)}. A broken law would come with its smallest "
            "counter-example. `regard check` runs all masks and dtypes, for a mechanism of your own as well."
        ),
        numbers="\n\n".join(str(report) for report in reports),
    )


def tour(folder: Path, *, steps: int = STEPS, seed: int = 0, watch: Watch = unwatched) -> Iterator[Step]:
    """The steps, each computed when it is asked for."""
    yield learn(folder, steps=steps, seed=seed, watch=watch)
    models = {name: rg.load(folder / name) for name in MECHANISMS}
    yield speak(models)  # type: ignore[arg-type]
    yield see(models)  # type: ignore[arg-type]
    yield compare(models, folder)  # type: ignore[arg-type]
    yield count()
    yield prove(watch)


def run(
    folder: str | Path,
    *,
    steps: int = STEPS,
    seed: int = 0,
    show: Callable[[Step], object] = lambda step: None,
    watch: Watch = unwatched,
) -> Path:
    """Do the job, hand each step to `show`, leave the pictures and a page of all in `folder`; the page's path."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    taken = [name for name in MECHANISMS if (target / name).exists()]
    if taken:
        raise ValueError(f"out: expected a folder without runs, got {target}, which has {taken[0]}")
    found = []
    for step in tour(target, steps=steps, seed=seed, watch=watch):
        for picture in step.pictures:
            save_figure(picture.figure, target / picture.name)
        show(step)
        found.append(step)
    return write_text(target / "index.html", page(found))


STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2933; background: #f6f7f9; margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0 1rem; }
pre { background: #fff; border: 1px solid #d5dbe1; border-radius: 6px; padding: .9rem 1.1rem; overflow-x: auto;
      font: 13px/1.5 ui-monospace, monospace; }
figure { background: #fff; border: 1px solid #d5dbe1; border-radius: 6px; margin: 1rem 0; padding: 1rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { color: #55616d; font-size: .9rem; margin-top: .75rem; }
"""


def page(steps: Sequence[Step]) -> str:
    """The steps as one HTML page that needs nothing but the pictures beside it.

    >>> "<h2>1. Train</h2>" in page([Step(title="Train", words="…", numbers="1 < 2")])
    True
    """
    parts = []
    for number, step in enumerate(steps, start=1):
        parts.append(f"<h2>{number}. {html.escape(step.title)}</h2>\n<p>{html.escape(step.words)}</p>")
        parts.append(f"<pre>{html.escape(step.numbers)}</pre>")
        for picture in step.pictures:
            caption = html.escape(picture.caption)
            parts.append(
                f'<figure><img src="{picture.name}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
            )
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Regard: two translators</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        "<h1>Regard</h1>\n<p>State an attention mechanism once; compute, stream, see, count and prove it.</p>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )
