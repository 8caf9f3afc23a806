"""Every picture in docs/, drawn from the code as it is and from committed results: `make pictures`.

A picture keeps what it shows as text inside its file, so that a test can say when it is older than the code.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import regard as rg
from regard.commands.suite.positions import Point
from regard.core.files import write
from regard.core.plots import cost_figure, curves_figure, positions_figure, weights_figure
from regard.training.metrics import read_metrics

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results"
SHOWN = "shown"
"""The text chunk of a PNG that has what it shows."""
SENTENCE = ["the", "cat", "saw", "the", "dog", "and", "the", "dog", "saw", "the", "cat"]


def weights() -> Figure:
    """One head that looks for its own word, by six mechanisms. A word is 32 random signs, times 0.75."""
    generator = torch.Generator().manual_seed(0)
    signs = {word: torch.randint(0, 2, (32,), generator=generator) * 2 - 1 for word in dict.fromkeys(SENTENCE)}
    q = k = 0.75 * torch.stack([signs[word] for word in SENTENCE])[None, None]
    mechanisms: dict[str, rg.Mechanism] = {
        "uniform (beta = 0)": rg.Uniform(),
        "softmax, beta = 0.05": rg.Softmax(beta=0.05),
        f"softmax, beta = 1/√K = {1 / math.sqrt(q.shape[-1]):.2f}": rg.Softmax(),
        "softmax, beta = 0.5": rg.Softmax(beta=0.5),
        "argmax (beta = ∞)": rg.Argmax(),
        "quadratic, (q·k + 1)²": rg.Quadratic(),
    }
    panels = {name: rg.weights(q, k, mechanism, rg.causal)[0, 0] for name, mechanism in mechanisms.items()}
    return weights_figure(panels, SENTENCE, mask=rg.causal, title="Exact weights of a head that looks for its own word")


def cost() -> Figure:
    """Softmax and quadratic attention over length, for MHA, GQA and MQA."""
    return cost_figure(
        {"softmax": rg.Softmax(), "quadratic": rg.Quadratic()}, rg.Work(mask=rg.causal), kv_heads=(32, 8, 1)
    )


def positions() -> Figure:
    """What `benchmarks/positions.py` has measured."""
    measured = json.loads((RESULTS / "positions.json").read_text())
    return positions_figure([Point(**point) for point in measured["points"]], measured["crossover"][0])


def mechanisms() -> Figure:
    """What `benchmarks/mechanisms.py` has trained."""
    return curves_figure(json.loads((RESULTS / "mechanisms_curves.json").read_text()))


def translator() -> Figure:
    """The training of the translator that ships."""
    return curves_figure({"translator": read_metrics(DOCS / "translator")})


PICTURES: dict[str, Callable[[], Figure]] = {
    "weights.png": weights,
    "cost.png": cost,
    "positions.png": positions,
    "mechanisms.png": mechanisms,
    "translator/curves.png": translator,
}
"""Every PNG below docs/, and what draws it."""


def shown(figure: Figure) -> dict[str, Any]:
    """What a figure shows: its words, where its lines begin and end, and how much each of its heat maps holds."""
    return {
        "words": [
            words
            for axes in figure.axes
            for words in (axes.get_title(), axes.get_title("left"), *(text.get_text() for text in axes.texts))
            if words
        ],
        "lines": [
            [len(line.get_ydata()), float(line.get_ydata()[0]), float(line.get_ydata()[-1])]
            for axes in figure.axes
            for line in axes.lines
        ],
        "maps": [
            [float(value) for value in (image.get_array().filled(0) ** 2).sum(-1)]
            for axes in figure.axes
            for image in axes.images
        ],
    }


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; all if none is given")
    for name in parser.parse_args().names or PICTURES:
        figure = PICTURES[name]()
        metadata = {SHOWN: json.dumps(shown(figure)), "Software": "regard"}
        write(DOCS / name, lambda beside: figure.savefig(beside, metadata=metadata))  # noqa: B023 (called at once)
        print(f"-> docs/{name}")


if __name__ == "__main__":
    main()
