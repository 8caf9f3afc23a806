"""A tour: one softmax and one quadratic mechanism side by side, computed, streamed, seen, counted and proved.

Each step is a function that does one of the five and gives back what it has to say, its numbers and its pictures.
`run` prints them and leaves a page of them in a folder.
"""

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from matplotlib.figure import Figure
from torch import Tensor

import regard as rg
from regard.cost import human
from regard.files import save_figure, write_text
from regard.laws import LAWS
from regard.laws.case import HEADS
from regard.plots import cost_figure, masks_figure, mode_crossover, mode_work, weights_figure

SENTENCE = ["the", "cat", "saw", "the", "dog", "and", "the", "dog", "saw", "the", "cat"]
SOFTMAX, QUADRATIC = rg.Softmax(), rg.Quadratic()
MECHANISMS: dict[str, rg.Mechanism] = {"softmax": SOFTMAX, "quadratic": QUADRATIC}
HEAD_NAMES = ("same word", "previous word")
WORD_LENGTH, POSITION_LENGTH = 24, 8
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


Watch: TypeAlias = Callable[[int], AbstractContextManager[Callable[[str], object] | None]]
"""Given how many cells there are, a context that gives what to call with the name of each as it begins."""


def unwatched(cells: int) -> AbstractContextManager[None]:
    """No progress shown."""
    return nullcontext()


def embed(tokens: Sequence[str], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two heads made by hand, (1, H, T, ·): both read one key head, as in MQA.

    A key is a random vector of its word beside a wave of its position. The first head's queries ask for their own word,
    the second's for the position before their own. A value is the word's vector, so an output says which word was read.

    >>> q, k, v = embed(["a", "b", "a"])
    >>> q.shape, k.shape, v.shape
    (torch.Size([1, 2, 3, 32]), torch.Size([1, 1, 3, 32]), torch.Size([1, 1, 3, 24]))
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = {word: torch.randn(WORD_LENGTH, generator=generator) for word in dict.fromkeys(tokens)}
    words = torch.stack([vocabulary[word] / vocabulary[word].norm() for word in tokens])
    places, before = (_wave(torch.arange(len(tokens)) + shift) for shift in (0, -1))
    size = 4.0  # a match scores size² = 16: clear at the usual beta, not yet a hard choice
    q = torch.stack(
        [torch.cat([words, torch.zeros_like(places)], dim=-1), torch.cat([torch.zeros_like(words), before], dim=-1)]
    )
    k = torch.cat([words, places], dim=-1)
    return size * q[None], size * k[None, None], words[None, None]


def _wave(position: Tensor) -> Tensor:
    angle = position[:, None] * math.pi / 2 ** torch.arange(POSITION_LENGTH // 2)
    return torch.cat([angle.cos(), angle.sin()], dim=-1) / math.sqrt(POSITION_LENGTH / 2)


def compute(seed: int = 0) -> Step:
    """Attention over a sentence, and the path it took."""
    q, k, v = embed(SENTENCE, seed)
    lines = [f"{'':<25}" + " ".join(f"{word:<4}" for word in SENTENCE)]
    for name, mechanism in MECHANISMS.items():
        out = rg.attend(q, k, v, mechanism, mask=rg.causal)
        nearest = (out[0] @ v[0, 0].T).argmax(-1)
        for head, row in zip(HEAD_NAMES, nearest.tolist(), strict=True):
            lines.append(f"{name + ', ' + head:<25}" + " ".join(f"{SENTENCE[place]:<4}" for place in row))
    plans = [str(rg.explain(q, k, v, mechanism, rg.causal)) for mechanism in MECHANISMS.values()]
    return Step(
        title="Compute",
        words=(
            "One sentence, two heads: one asks for its own word, one for the word before. Both mechanisms get the same "
            "queries, keys and values; below each word stands the word that its output is nearest to. rg.explain says "
            "which path computed it, and why."
        ),
        numbers="\n\n".join(["\n".join(line.rstrip() for line in lines), *plans]),
    )


def stream_tokens(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
    """The output of a causal stream, one token at a time, and the bytes its state holds at the end.

    >>> q, k, v = embed(SENTENCE)
    >>> out, _ = stream_tokens(SOFTMAX, q, k, v)
    >>> torch.allclose(out, rg.attend(q, k, v, SOFTMAX, mask=rg.causal), atol=1e-6)
    True
    """
    length = k.shape[2]
    state = mechanism.start(
        batch=k.shape[0], num_kv_heads=k.shape[1], qk_length=k.shape[3], value_length=v.shape[3], capacity=length
    )
    outputs = []
    for place in range(length):
        now = slice(place, place + 1)
        out, state = mechanism.extend(q[:, :, now], k[:, :, now], v[:, :, now], state, mask=rg.causal)
        outputs.append(out)
    return torch.cat(outputs, dim=2), state.nbytes


def stream(seed: int = 0, lengths: Sequence[int] = (16, 64, 256, 1024)) -> Step:
    """The same output token by token, and how the state grows with the length."""
    header = f"{'tokens':>8}  {'mechanism':<10}{'state':>10}{'whole - streamed':>20}"
    rows = []
    for length in lengths:
        q, k, v = embed([SENTENCE[place % len(SENTENCE)] for place in range(length)], seed)
        for name, mechanism in MECHANISMS.items():
            streamed, held = stream_tokens(mechanism, q, k, v)
            apart = (rg.attend(q, k, v, mechanism, mask=rg.causal) - streamed).abs().max().item()
            rows.append(f"{length:>8,}  {name:<10}{human(held, 'B'):>10}{apart:>20.1e}")
    return Step(
        title="Stream",
        words=(
            "The sentence again and again, one token at a time. Softmax keeps every key and value, so its state grows "
            "with the length; quadratic attention keeps sums over them, so its state stays as it is. The output is "
            "that of the whole sequence, up to rounding: the last column is the largest difference."
        ),
        numbers="\n".join([header, *rows]),
    )


def see(seed: int = 0) -> Step:
    """The exact weights as pictures, and a gallery of masks."""
    q, k, _ = embed(SENTENCE, seed)
    usual = 1 / math.sqrt(q.shape[-1])
    shown: dict[str, rg.Mechanism] = {
        "softmax, beta = 0.05": rg.Softmax(beta=0.05),
        f"softmax, beta = 1/√K = {usual:.2f}": SOFTMAX,
        "softmax, beta = 0.5": rg.Softmax(beta=0.5),
        "uniform (beta = 0)": rg.Uniform(),
        "argmax (beta = ∞)": rg.Argmax(),
        "quadratic, (q·k + 1)²": QUADRATIC,
    }
    pictures, lines = [], []
    for number, head in enumerate(HEAD_NAMES):
        panels = {
            name: rg.weights(q, k, mechanism, rg.causal, heads=[number])[0, 0] for name, mechanism in shown.items()
        }
        lines += [f"{head:<14} {name:<28} {_on_target(panel, number):6.1%}" for name, panel in panels.items()]
        figure = weights_figure(panels, SENTENCE, mask=rg.causal, title=f"Exact weights of the head “{head}”")
        caption = f"Exact weights of the head that asks for the {head}. Grey pairs are hidden by the causal mask."
        pictures.append(Picture(f"weights-{head.replace(' ', '-')}.png", figure, caption))
    masks, length = gallery()
    figure = masks_figure(masks, length, title="Masks: who may attend to whom")
    pictures.append(Picture("masks.png", figure, "Masks are values that compose with &, | and ~. Filled: may attend."))
    return Step(
        title="See",
        words=(
            "rg.weights gives the exact weights of every mechanism. Softmax is one continuum in beta, from the uniform "
            "average to the hard choice, where ties share. Below: how much of the weight falls on what a head asks "
            "for, mean over the words."
        ),
        numbers="\n".join(lines),
        pictures=tuple(pictures),
    )


def _on_target(panel: Tensor, head: int) -> float:
    """The weight on the same word, or on the word before, mean over the queries."""
    if head == 0:
        target = torch.tensor([[key == query for key in SENTENCE] for query in SENTENCE])
        return (panel * target).sum(-1).mean().item()
    return panel.diagonal(-1).mean().item()


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
    with watch(len(MECHANISMS) * cells) as progress:
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


def tour(seed: int = 0, watch: Watch = unwatched) -> Iterator[Step]:
    """The five steps, each computed when it is asked for."""
    yield compute(seed)
    yield stream(seed)
    yield see(seed)
    yield count()
    yield prove(watch)


def run(
    folder: str | Path,
    *,
    seed: int = 0,
    show: Callable[[Step], object] = lambda step: None,
    watch: Watch = unwatched,
) -> Path:
    """Take the tour, hand each step to `show`, leave the pictures and a page of all in `folder`; the page's path."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    steps = []
    for step in tour(seed, watch):
        for picture in step.pictures:
            save_figure(picture.figure, target / picture.name)
        show(step)
        steps.append(step)
    return write_text(target / "index.html", page(steps))


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
    """The tour as one HTML page that needs nothing but the pictures beside it.

    >>> "<h2>1. Compute</h2>" in page([Step(title="Compute", words="…", numbers="1 < 2")])
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
        f"<title>Regard: a tour</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        "<h1>Regard</h1>\n<p>State an attention mechanism once; compute, stream, see, count and prove it.</p>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )
