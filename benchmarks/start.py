"""How a training begins: initialisations, rates and warm-ups on every model, beside a plain loop as nanoGPT's.

    python benchmarks/start.py
    python benchmarks/start.py --only lm --seeds 1
    python benchmarks/start.py --table

A start is how matrices are drawn (with the deviation 0.02, 1/√fan-in, a third of that variance, or as Glorot) and what
becomes of those that write into the residual stream (W_o and the network's second matrix): as the others, divided by
the root of how many there are in their stack (√(2·layers) in a decoder, as in GPT-2), or 0. All starts of a seed draw
the same numbers and train on the same batches. The plain loop (src/regard/commands/suite/plain_decoder.py) trains a
decoder of equal size on the same tokens, and is evaluated by the same code.

Runs go to results/start.json one by one; what is there is not trained again. `make pictures` draws docs/start.png.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.commands.suite.harness import environment
from regard.commands.suite.plain_decoder import PlainDecoder, plain_steps
from regard.core.files import write_text
from regard.models.layers.attention import without_mechanisms
from regard.training import Settings, train
from regard.training.metrics import read_metrics
from regard.training.parallel import Place
from regard.training.recipes import bert, lm, translate, vision

OUT = Path(__file__).parent / "results/start.json"
PLAIN = "plain loop"
WRITERS = ("attention.W_o", "cross.W_o", "network.down")
"""The matrices whose output is added to the residual stream."""
SEEDS = 3
RATES = (0.5, 2.0, 4.0)
"""Rates that the chosen start is tried with, as multiples of the recipe's."""
PLAIN_RATE = 1.5e-3
"""The plain loop's best rate, of 0.75, 1.5, 3 and 6 thousandths."""
MECHANISMS = ("quadratic", "elu", "retention", "gated", "delta")
LONGER, LONGER_WARMUP = 1000, 100
"""Steps that the language model's default size is trained for, at its recipe's rate and warm-up."""
POINTS = 50
"""Points of a run's curve, about."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained with every seed."""

    task: str
    size: str
    start: str
    rate: float
    warmup: int
    steps: int
    mechanism: str = "softmax"


@dataclass(frozen=True)
class Recipe:
    """A recipe, the sizes it is tried in, smallest first, and its default rate."""

    module: Any
    sizes: dict[str, dict[str, Any]]
    before: str
    starts: tuple[str, ...]
    """Others than `before`, which is how it began until now; the first is what was chosen."""
    rate: float
    batch: dict[str, Any]
    once: tuple[str, ...] = ()
    """Starts that are tried with one seed, in the smallest size."""
    steps: int = 300
    warmup: int = 50


def _decoder(width: int, layers: int) -> dict[str, Any]:
    return {"embedding_dim": width, "num_layers": layers, "num_heads": width // 32}


PHRASES = {"count": 20000, "held_out": 500}
RECIPES = {
    "lm": Recipe(
        lm,
        {"64 × 4": _decoder(64, 4), "96 × 6": _decoder(96, 6), "192 × 4": _decoder(192, 4)},
        "0.02",
        ("third, residual", "fan-in, residual", "0.02, residual"),
        3e-3,
        {"batch_tokens": 1024, "weight_decay": 0.1},
        ("fan-in", "0.02, zero"),
        steps=250,
    ),
    "bert": Recipe(
        bert,
        {"64 × 2": _decoder(64, 2), "64 × 6": _decoder(64, 6), "128 × 2": _decoder(128, 2)},
        "0.02",
        ("0.02, residual", "fan-in"),
        1e-3,
        {"batch_tokens": 1024},
    ),
    "translate": Recipe(
        translate,
        {"64 × 2": {**_decoder(64, 2), **PHRASES}, "64 × 4": {**_decoder(64, 4), **PHRASES},
         "128 × 2": {**_decoder(128, 2), **PHRASES}},
        "fan-in",
        ("fan-in, residual", "0.02, residual"),
        2e-3,
        {"batch_tokens": 1024},
    ),
    "vit": Recipe(
        vision,
        {f"{width} × {layers}": {"embedding_dim": width, "num_layers": (layers,), "num_heads": width // 24}
         for width, layers in ((48, 4), (48, 8), (96, 4))},
        "glorot",
        ("glorot, residual", "0.02, residual"),
        1e-3,
        {"batch_size": 32, "weight_decay": 0.05},
    ),
    "davit": Recipe(
        vision,
        {f"{width} × {layers}": {"model": "davit", "embedding_dim": width, "num_layers": (layers, layers)}
         for width, layers in ((16, 1), (16, 2), (32, 1))},
        "0.02",
        ("0.02, residual", "glorot, residual"),
        1e-3,
        {"batch_size": 32, "weight_decay": 0.05},
    ),
}  # fmt: skip


def cells() -> Iterator[tuple[Cell, int]]:
    """What is trained, with how many seeds; the quick and telling cells first."""
    for task, recipe in RECIPES.items():
        smallest, *larger = recipe.sizes
        before = Cell(task=task, size=smallest, start=recipe.before, rate=recipe.rate, warmup=recipe.warmup,
                      steps=recipe.steps)  # fmt: skip
        chosen = replace(before, start=recipe.starts[0])
        yield from ((replace(before, start=start), SEEDS) for start in (recipe.before, *recipe.starts))
        yield from ((replace(before, start=start), 1) for start in recipe.once)
        yield from ((replace(chosen, warmup=warmup), 1) for warmup in (10, 2 * recipe.warmup))
        yield from ((replace(chosen, rate=factor * recipe.rate), SEEDS if factor == 2 else 1) for factor in RATES)
        if task == "lm":
            plain = replace(before, start=PLAIN, rate=PLAIN_RATE)
            yield plain, SEEDS
            yield from ((replace(plain, rate=factor * PLAIN_RATE), 1) for factor in (0.5, 2.0, 4.0))
            for mechanism in MECHANISMS:
                other = replace(chosen, mechanism=mechanism, steps=150)
                yield from ((replace(other, start=start), SEEDS) for start in (recipe.before, chosen.start))
        for size in larger:
            yield from ((replace(before, size=size, start=start), SEEDS) for start in (recipe.before, chosen.start))
            if task == "lm":
                yield replace(plain, size=size), SEEDS
                yield replace(chosen, size=size, rate=2 * recipe.rate), SEEDS
        if task == "lm":
            longer = {"size": size, "steps": LONGER, "warmup": LONGER_WARMUP}
            yield from ((replace(cell, **longer), SEEDS) for cell in (chosen, plain, before))
            yield replace(plain, **longer, rate=2 * PLAIN_RATE), 1


def begin(model: nn.Module, start: str, seed: int) -> None:
    """Draw a model's matrices anew."""
    matrices, _, residual = start.partition(", ")
    torch.manual_seed(seed)
    writers: dict[str, list[nn.Linear]] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for module in without_mechanisms(model):
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            name = names[id(module)]
            _draw(module, matrices)
            if name.endswith(WRITERS):
                assert isinstance(module, nn.Linear)
                stack = name.partition(".")[0]
                writers.setdefault("all" if stack == "stages" else stack, []).append(module)
    for stack in writers.values():
        for writer in stack:
            writer.weight.data.mul_({"": 1.0, "zero": 0.0, "residual": len(stack) ** -0.5}[residual])


def _draw(module: nn.Linear | nn.Embedding | nn.Conv2d, matrices: str) -> None:
    weight = module.weight
    width = weight[0].numel()
    if matrices == "0.02":
        nn.init.normal_(weight, std=0.02)
    elif matrices in ("fan-in", "third"):
        nn.init.normal_(weight, std=(width if matrices == "fan-in" else 3 * width) ** -0.5)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(weight)
    else:
        nn.init.normal_(weight, std=width**-0.5 if isinstance(module, nn.Conv2d) else 0.02)


@cache
def _folder(task: str) -> Path:
    """Where a recipe keeps its tokens, the same for all runs."""
    folder = Path(tempfile.gettempdir()) / f"regard-start-{task}"
    folder.mkdir(exist_ok=True)
    return folder


def measure(cell: Cell, seed: int) -> dict[str, Any]:
    """Train a cell with one seed: its held-out results and its curve."""
    recipe = RECIPES[cell.task]
    sizes = dict(recipe.sizes[cell.size])
    if cell.mechanism != "softmax":
        sizes["mechanism"] = cell.mechanism
    task = recipe.module.build(recipe.module.Options(**sizes), _folder(cell.task), seed)
    began = time.process_time()
    if cell.start == PLAIN:
        losses, evaluations, parameters = _plain(cell, task, sizes, seed)
    else:
        begin(task.model, cell.start, seed)
        settings = Settings(steps=cell.steps, learning_rate=cell.rate, warmup=cell.warmup, seed=seed,
                            evaluate_every=max(1, cell.steps // 4), keep=1, **recipe.batch)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            train(task, settings, folder, place=Place(0, 1, torch.device("cpu")), watch=lambda report: None)
            lines = read_metrics(folder)
        losses = [line["loss"] for line in lines if "loss" in line]
        evaluations = [{"step": line["step"], **line["evaluation"]} for line in lines if "evaluation" in line]
        parameters = sum(parameter.numel() for parameter in task.model.parameters())
    return {**asdict(cell), "seed": seed, "parameters": parameters, **_last(evaluations), "curve": _curve(losses),
            "evaluations": [(row["step"], row["loss"]) for row in evaluations],
            "cpu_seconds": time.process_time() - began}  # fmt: skip


def _plain(cell: Cell, task: Any, sizes: dict[str, Any], seed: int) -> tuple[list[float], list[dict[str, Any]], int]:
    config = task.model.config
    torch.manual_seed(seed)
    model = PlainDecoder(
        vocabulary_size=config.vocabulary_size, width=sizes["embedding_dim"], layers=sizes["num_layers"],
        heads=sizes["num_heads"], context=config.context_length,
    )  # fmt: skip
    losses, evaluations = [], []
    rows = RECIPES["lm"].batch["batch_tokens"] // config.context_length
    loop = plain_steps(
        model, task.tokens.ids, steps=cell.steps, rows=rows, rate=cell.rate, warmup=cell.warmup, seed=seed
    )
    for step, loss in enumerate(loop, start=1):
        losses.append(loss)
        if step % max(1, cell.steps // 4) == 0:
            decoder = model.as_decoder().eval()
            decoder.tokenizer = task.model.tokenizer
            with torch.no_grad():
                evaluations.append({"step": step, **task.evaluate(decoder)})
    return losses, evaluations, sum(parameter.numel() for parameter in model.parameters())


def _last(evaluations: list[dict[str, Any]]) -> dict[str, float]:
    return {name: value for name, value in evaluations[-1].items() if name in ("loss", "bits_per_byte", "accuracy")}


def _curve(losses: list[float]) -> list[tuple[int, float]]:
    size = max(1, len(losses) // POINTS)
    parts = [losses[low : low + size] for low in range(0, len(losses), size)]
    return [(min(len(losses), size * (at + 1)), statistics.fmean(part)) for at, part in enumerate(parts)]


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each cell: means and standard deviations over its seeds."""
    fields = tuple(asdict(Cell(task="", size="", start="", rate=0, warmup=0, steps=0)))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in fields), []).append(run)
    rows = []
    for key, same in groups.items():
        row: dict[str, Any] = {**dict(zip(fields, key, strict=True)), "seeds": len(same)}
        for name in ("loss", "bits_per_byte", "accuracy"):
            values = [run[name] for run in same if name in run]
            if values:
                row[name] = statistics.fmean(values)
                row[f"{name} deviation"] = statistics.stdev(values) if len(values) > 1 else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as lines."""
    lines = []
    for row in rows:
        deviation = row["loss deviation"]
        spread = "        " if deviation is None else f" ± {deviation:.3f}"
        what = f"{row['task']:9} {row['size']:8} {row['mechanism']:10} {row['start']:17}"
        how = f"rate {row['rate']:g}, warm-up {row['warmup']}, {row['steps']} steps"
        lines.append(f"{what} {row['loss']:.3f}{spread} ({row['seeds']})  {how}")
    return "\n".join(lines)


def written(content: dict[str, Any]) -> str:
    """The results as JSON, a line for each run."""
    head = {name: value for name, value in content.items() if name != "runs"}
    runs = ",\n  ".join(json.dumps(_rounded(run)) for run in content["runs"])
    return json.dumps(_rounded(head), indent=1)[:-2] + f',\n "runs": [\n  {runs}\n ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=RECIPES, help="A recipe; several times for several.")
    parser.add_argument("--size", help="Of one size only, such as '64 × 4'.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="Runs of each cell, with seeds from 0 on.")
    parser.add_argument("--table", action="store_true", help="Train nothing: print the table.")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {"runs": []}
    if options.out.exists():
        content = json.loads(options.out.read_text(encoding="utf-8"))
    names = (*asdict(next(cells())[0]), "seed")
    done = {tuple(run[name] for name in names) for run in content["runs"]}
    missing = [
        (cell, seed)
        for seed in range(options.seeds)
        for cell, seeds in cells()
        if seed < seeds and (options.only is None or cell.task in options.only)
        and (options.size is None or cell.size == options.size) and (*asdict(cell).values(), seed) not in done
    ]  # fmt: skip
    if not options.table:
        from rich.progress import track

        for cell, seed in track(missing, "runs"):
            run = measure(cell, seed)
            content["runs"].append(_rounded(run))
            content |= {"environment": environment(), "summary": summary(content["runs"])}
            write_text(options.out, written(content))
            print(table(summary([run])), f" {run['cpu_seconds']:.0f} s", file=sys.stderr, flush=True)
    print(table(summary(content["runs"])))


if __name__ == "__main__":
    main()
