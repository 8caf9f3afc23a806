"""Every picture in docs/, drawn from the code as it is and from committed results: `make pictures`.

A picture keeps what it shows as text inside its file, so that a test can say when it is older than the code.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import regard as rg
from regard.core.cost_figure import cost_figure
from regard.core.files import write
from regard.core.style import INK, QUIET, Axes, Figure, dress, line_styles, new_figure, ticker
from regard.core.weights_figure import weights_figure
from regard.training.curves import curves_figure
from regard.training.metrics import read_metrics
from regard.training.recipes.translate import Options

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results"
SHOWN = "shown"
"""The text chunk of a PNG that has what it shows."""
SENTENCE = ["the", "cat", "saw", "the", "dog", "and", "the", "dog", "saw", "the", "cat"]


def weights() -> Figure:
    """The weights of one head that looks for its own word, by six mechanisms. A word is 32 random signs, times 0.75."""
    generator = torch.Generator().manual_seed(0)
    signs = {word: torch.randint(0, 2, (32,), generator=generator) * 2 - 1 for word in dict.fromkeys(SENTENCE)}
    q = k = 0.75 * torch.stack([signs[word] for word in SENTENCE])[None, None]
    mechanisms: dict[str, rg.Mechanism] = {
        "uniform: softmax, beta = 0": rg.Uniform(),
        "softmax, beta = 0.02": rg.Softmax(beta=0.02),
        "softmax, beta = 0.06": rg.Softmax(beta=0.06),
        f"softmax, beta = 1/√K = {1 / math.sqrt(q.shape[-1]):.2f}": rg.Softmax(),
        "argmax: softmax, beta = ∞": rg.Argmax(),
        "quadratic, (q·k + 1)²": rg.Quadratic(),
    }
    panels = {name: rg.weights(q, k, mechanism, rg.causal)[0, 0] for name, mechanism in mechanisms.items()}
    return weights_figure(
        panels,
        SENTENCE,
        mask=rg.causal,
        title="Attention weights of a head that looks for its own word",
        note="No trained model: a word is 32 random signs, as query and as key. Mask causal; grey pairs are hidden.",
    )


def cost() -> Figure:
    """Softmax and quadratic attention over length, for MHA, GQA and MQA."""
    return cost_figure(
        {"softmax": rg.Softmax(), "quadratic": rg.Quadratic()},
        rg.Work(mask=rg.causal),
        kv_heads=(32, 8, 1),
        title="What attention costs over length",
    )


def positions() -> Figure:
    """Time and state of a decoder's token over its position, as `benchmarks/positions.py` has measured them."""
    measured = json.loads((RESULTS / "positions.json").read_text())
    points, crossing = measured["points"], measured["crossover"][0]
    figure = new_figure(
        13,
        4.7,
        title="A decoder's token over its position: measured (marks) and predicted (lines)",
        note=f"Decoders of 4 layers, width 512, 8 heads, float32, batch 1. {machine(measured['environment'])}. "
        + PREDICTION.format(*misses(points)),
    )
    left, middle, right = figure.subplots(1, 3)
    groups, mechanisms = ("MHA", "GQA", "MQA"), ("softmax", "quadratic")
    _over_position(left, points, groups, "milliseconds", "MHA, GQA, MQA: time", "time of a token (ms)")
    _over_position(middle, points, groups, "state_bytes", "MHA, GQA, MQA: state", "state")
    _over_position(right, points, mechanisms, "milliseconds", "Softmax, quadratic: time", "time of a token (ms)")
    if crossing is not None:
        right.axvline(crossing, color=QUIET, linestyle=":", linewidth=1)
        words = f"predicted crossing: {crossing:,}"
        right.annotate(words, (crossing, 0.03), xycoords=("data", "axes fraction"), xytext=(4, 0), color=INK,
                       textcoords="offset points", fontsize=8)  # fmt: skip
    return figure


PREDICTION = (
    "Predicted: the time at 1k, then the bytes since at the memory's rate plus the FLOPs since at the rate of a step "
    "whose keys 32 query heads share. At the last position tokens take {:.2f} to {:.2f} times as long as that."
)
"""What the lines of positions.png are, and how far they are off."""


def misses(points: list[dict[str, Any]]) -> tuple[float, float]:
    """How many times as long as predicted a token takes at the last position: the least and the most."""
    last = {point["kind"]: point for point in sorted(points, key=lambda point: point["position"])}.values()
    ratios = [point["milliseconds"] / point["predicted_milliseconds"] for point in last]
    return min(ratios), max(ratios)


def _over_position(
    axes: Axes, points: list[dict[str, Any]], kinds: tuple[str, ...], what: str, title: str, y: str
) -> None:
    dashes = ("-", "--", ":")
    for kind, (colour, marker), dash in zip(kinds, line_styles(len(kinds)), dashes, strict=False):
        chosen = [point for point in points if point["kind"] == kind]
        places = [point["position"] for point in chosen]
        axes.plot(places, [point[f"predicted_{what}"] for point in chosen], color=colour, linewidth=1.4, linestyle=dash)
        axes.plot(places, [point[what] for point in chosen], marker, color=colour, markersize=5.5, label=kind)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / 1024:g}k"))
    axes.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.EngFormatter(unit="B" if "bytes" in what else "", sep=" "))
    dress(axes, title=title, x="position (tokens)", y=y)
    axes.legend(frameon=False, fontsize=8)


def mechanisms() -> Figure:
    """What `benchmarks/mechanisms.py` has trained: means over the seeds, and bands of one standard deviation."""
    measured = json.loads((RESULTS / "mechanisms.json").read_text())
    runs, sizes = measured["runs"], measured["options"]
    names = dict.fromkeys(run["name"] for run in runs)
    curves = {name: _mean_curve([run for run in runs if run["name"] == name]) for name in names}
    seeds = len({run["seed"] for run in runs})
    spread = f"Means of {seeds} seeds, bands of one standard deviation. " if seeds > 1 else ""
    return curves_figure(
        curves,
        title="The phrase-book's translator with other attention",
        note=f"{translator_of(sizes)}. {spread}{machine(measured['environment'])}.",
        label_smoothing=Options().label_smoothing,
    )


def _mean_curve(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that the mean of some runs would have."""
    lines = []
    for points in zip(*(run["curve"] for run in runs), strict=True):
        lines.append({"step": points[0][0], "loss": fmean(loss for _, loss in points)})
    for rows in zip(*(run["evaluations"] for run in runs), strict=True):
        results = {kind: [row[kind] for row in rows] for kind in rows[0] if kind != "step"}
        lines.append(
            {
                "step": rows[0]["step"],
                "evaluation": {kind: fmean(values) for kind, values in results.items()},
                "deviation": {kind: stdev(values) for kind, values in results.items() if len(values) > 1},
            }
        )
    return lines


def which() -> Figure:
    """What attentions recall, copy, keep and take, as `benchmarks/recall.py` has measured them."""
    measured = json.loads((RESULTS / "recall.json").read_text())
    recall, copying, sizes = measured["recall"], measured["copying"], measured["recall"]["sizes"]
    head = sizes["embedding_dim"] // sizes["num_heads"]
    seeds = " and ".join(str(task["summary"][0]["seeds"]) for task in (recall, copying))
    figure = new_figure(
        11,
        9,
        title="Which attention when: what it recalls, what it copies, what it keeps, what it takes",
        note=f"Recall, copying: one layer, {sizes['num_heads']} heads of {head}, {seeds} seeds, bands of one "
        f"standard deviation; chance is 1.6 and 3.1 %. State: of that layer, float32. Time: whole causal sequences, "
        f"4 heads of 32, float32, {machine(measured['timed_on'])}.",
    )
    (recalled, copied), (kept, taken) = figure.subplots(2, 2)
    rows = recall["summary"]
    styles = {
        row["name"]: {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.4, "label": row["name"]}
        for row, (colour, marker) in zip(rows, line_styles(len(rows)), strict=True)
    }
    for axes, task in ((recalled, recall), (copied, copying)):
        for row in task["summary"]:
            _shares(axes, row, styles[row["name"]])
        _by_length(axes, task["lengths"])
    for row in rows:
        lengths = [int(length) for length in row["state_bytes"]]
        kept.plot(lengths, list(row["state_bytes"].values()), **styles[row["name"]])
        times = measured["times"][row["name"]]
        taken.plot([int(length) for length in times], [ms / 1e3 for ms in times.values()], **styles[row["name"]])
    _by_length(kept, lengths)
    _by_length(taken, [int(length) for length in times])
    for axes, unit in ((kept, "B"), (taken, "s")):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ticker.EngFormatter(unit=unit, sep=" "))
    dress(recalled, title="What it recalls", x="pairs of key and value before the query", y="right answers (%)")
    dress(copied, title="What it copies", x="letters of the string", y="right letters (%)")
    dress(kept, title="What it keeps (retention, gated, delta: alike)", x="tokens so far", y="state of a layer")
    dress(taken, title="What it takes", x="length (tokens)", y="time of a sequence")
    recalled.legend(frameon=False, fontsize=8)
    return figure


def _shares(axes: Axes, row: dict[str, Any], style: dict[str, Any]) -> None:
    lengths, spread = [int(length) for length in row["mean"]], row["deviation"].values()
    shares = [100 * share for share in row["mean"].values()]
    axes.plot(lengths, shares, **style)
    low, high = (
        [share + sign * 100 * deviation for share, deviation in zip(shares, spread, strict=True)] for sign in (-1, 1)
    )
    axes.fill_between(lengths, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _by_length(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])


STARTS = {
    "lm": ("0.02", "third, residual"),
    "bert": ("0.02", "0.02, residual"),
    "translate": ("fan-in", "fan-in, residual"),
    "vit": ("glorot", "glorot, residual"),
    "davit": ("0.02", "0.02, residual"),
}
"""How each model began before, and the start that start.png compares with it."""


def start() -> Figure:
    """How trainings begin, as `benchmarks/start.py` has measured it."""
    measured = json.loads((RESULTS / "start.json").read_text())
    every = [run for run in measured["runs"] if run["mechanism"] == "softmax"]
    runs = [run for run in every if run["warmup"] == 50]
    trained = dict.fromkeys((run["size"], run["steps"]) for run in every if run["task"] == "lm")
    trained = sorted(trained, key=lambda cell: (cell[1], int(cell[0].split()[0])))
    figure = new_figure(
        15,
        4.8,
        title="How a training begins: initialisations, and a plain loop as nanoGPT's",
        note="Decoders on the standard library's source, 1,024 tokens a step; marks are runs, lines means. Right: "
        "the change of the last held-out loss where W_o and the network's second matrix are divided (lm: and others "
        f"drawn by their width), a mark for each seed. {machine(measured['environment'])}.",
    )
    *panels, models = figure.subplots(1, len(trained) + 1)
    lines = {"deviation 0.02": ("0.02", 3e-3), "1/√(3·fan-in), divided": ("third, residual", 3e-3),
             "plain loop": ("plain loop", 1.5e-3)}  # fmt: skip
    for axes, (size, length) in zip(panels, trained, strict=True):
        for (name, (kind, rate)), (colour, marker) in zip(lines.items(), line_styles(len(lines)), strict=True):
            same = [
                run for run in (runs if length < 1000 else every)
                if (run["task"], run["size"], run["steps"]) == ("lm", size, length)
                and (run["start"], run["rate"]) == (kind, rate)
            ]  # fmt: skip
            if not same:
                continue
            steps = [step for step, _ in same[0]["evaluations"]]
            losses = [[loss for _, loss in run["evaluations"]] for run in same]
            axes.plot(steps, [fmean(column) for column in zip(*losses, strict=True)], color=colour, label=name)
            for values in losses:
                axes.plot(steps, values, marker, color=colour, markersize=3.5)
        dress(
            axes,
            title=f"lm, width {size.replace(' × ', ', layers ')}, {length:,} steps",
            x="steps",
            y="held-out loss (nats)",
        )
    panels[0].legend(frameon=False, fontsize=8)
    names = []
    for (task, (before, after)), (colour, marker) in zip(STARTS.items(), line_styles(len(STARTS)), strict=True):
        for size in dict.fromkeys(run["size"] for run in runs if run["task"] == task):
            last = {
                (run["start"], run["seed"]): run["loss"]
                for run in sorted(runs, key=lambda run: -run["rate"])
                if (run["task"], run["size"]) == (task, size) and run["rate"] == RATES_OF_STARTS[task]
            }
            changes = [last[after, seed] - loss for (kind, seed), loss in last.items()
                       if kind == before and (after, seed) in last]  # fmt: skip
            if changes:
                models.plot(changes, [-len(names)] * len(changes), marker, color=colour, markersize=4.5)
                names.append(f"{task} {size}")
    models.axvline(0, color=QUIET, linewidth=1)
    models.set_yticks([-place for place in range(len(names))], names)
    dress(models, title="Other models", x="change of the held-out loss")
    return figure


RATES_OF_STARTS = {"lm": 3e-3, "bert": 1e-3, "translate": 2e-3, "vit": 1e-3, "davit": 1e-3}
"""The recipes' rates, with which start.png compares."""


def translator() -> Figure:
    """The training of the translator that ships."""
    run = json.loads((DOCS / "translator/run.json").read_text())["options"]
    environment = json.loads((DOCS / "translator/environment.json").read_text())
    return curves_figure(
        {"translator": read_metrics(DOCS / "translator")},
        title="The training of the translator that ships",
        note=f"{translator_of(run)}. {environment['device'].upper()} ({environment['machine']}), "
        f"{environment['threads']} thread, torch {environment['packages']['torch']}.",
        label_smoothing=run["label_smoothing"],
    )


def translator_of(options: dict[str, Any]) -> str:
    """A translator's sizes, in words."""
    layers, width, heads = options["num_layers"], options["embedding_dim"], options["num_heads"]
    return f"Encoder-decoder of {layers} + {layers} layers, width {width}, {heads} heads, float32"


def machine(environment: dict[str, Any]) -> str:
    """The machine of a committed result, in words."""
    torch_version = environment.get("torch") or environment["packages"]["torch"]
    if "cpu" in environment:
        threads = environment["threads"]
        name = f"{environment['cpu']}, {threads} thread{'s' if threads > 1 else ''}"
    else:
        name = f"{environment['device']} ({environment['machine']})"
    return f"{name}, torch {torch_version}, {environment['date'][:10]}"


PICTURES: dict[str, Callable[[], Figure]] = {
    "weights.png": weights,
    "cost.png": cost,
    "positions.png": positions,
    "mechanisms.png": mechanisms,
    "which.png": which,
    "start.png": start,
    "translator/curves.png": translator,
}
"""Every PNG below docs/, and what draws it."""


def shown(figure: Figure) -> dict[str, Any]:
    """What a figure shows: its words, where its lines begin and end, and how much each of its heat maps holds."""
    return {
        "words": [
            figure.get_suptitle(),
            figure.get_supxlabel(),
            *(
                words
                for axes in figure.axes
                for words in (axes.get_title("left"), *(text.get_text() for text in axes.texts))
                if words
            ),
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
