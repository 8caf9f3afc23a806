"""Five attentions on one recipe: the phrase-book's translator with softmax, MQA, quadratic, elu and a sliding window.

    python benchmarks/mechanisms.py --jobs 2
    python benchmarks/mechanisms.py --jobs 12 --device cuda
    python benchmarks/mechanisms.py --score

Every attention is trained with every seed. The seed determines the weights, the order, the training sentences and the
held-out sentences, so that all attentions of a seed have the same sentences. After its last step a model translates
every held-out sentence greedily. Jobs run in parallel, each on one core.

Results go to one file: every run with its curve, and the mean and the standard deviation over the seeds. It is written
after each run, so that `--resume` trains only missing runs. Translations go to a second file next to it; `--score`
reads both, computes BLEU if sacrebleu is installed, and prints the table again.
"""

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from regard.core.files import write_text
from regard.core.masks import Window
from regard.training import Settings, train
from regard.training.metrics import read_metrics
from regard.training.parallel import Place
from regard.training.recipes import translate
from regard.training.records import environment

OUT = Path(__file__).parent / "results/mechanisms.json"
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, MQA": {"num_kv_heads": 1},
    "quadratic": {"mechanism": "quadratic"},
    "elu": {"mechanism": "elu"},
    "softmax, window of 8": {"encoder_window": Window(8, 8), "decoder_window": Window(7)},
}
OPTIONS = {
    "count": 40000,
    "vocabulary_size": 3072,
    "embedding_dim": 96,
    "hidden_dim": 192,
    "num_layers": 2,
    "num_heads": 4,
}
SETTINGS = {"batch_tokens": 1024, "learning_rate": 4e-3, "warmup": 100, "keep": 1}
MEASURED = ("loss", "accuracy", "exact", "bleu", "tokens_per_second")
"""Results with a mean and a standard deviation over the seeds; the other numbers do not depend on the seed."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Half of the 95 % confidence interval of a mean, in standard errors, by the number of runs (Student's t)."""
POINTS = 60
"""Points of a run's curve, about: each is the mean loss of the steps since the last point."""


def measure(name: str, seed: int, steps: int, sentences: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train one attention with one seed. Returns its row of the results, and its translations."""
    torch.set_num_threads(1)
    translate.TOGETHER = 64 if device == "cpu" else 500
    options = translate.Options(held_out=sentences, **OPTIONS, **VARIANTS[name])
    with tempfile.TemporaryDirectory() as folder:
        task = translate.build(options, Path(folder), seed)
        settings = Settings(steps=steps, seed=seed, **SETTINGS)
        train(task, settings, folder, place=Place(0, 1, torch.device(device)), watch=lambda report: None)
        lines = read_metrics(folder)
    model, pairs = task.model.eval(), task.validation.pairs
    translations = [str(text) for text in translate.translate(model, [source for source, _ in pairs], beams=1)]
    trained = [line for line in lines if "loss" in line]
    evaluations = [{"step": line["step"], **line["evaluation"]} for line in lines if "evaluation" in line]
    times = [after["seconds"] - before["seconds"] for before, after in pairwise(trained)]
    row = {
        "name": name,
        "seed": seed,
        "loss": evaluations[-1]["loss"],
        "accuracy": evaluations[-1]["accuracy"],
        "exact": sum(text == target for text, (_, target) in zip(translations, pairs, strict=True)) / len(pairs),
        # The median, because the time of a step after an evaluation includes the evaluation.
        "tokens_per_second": fmean(line["tokens"] for line in trained) / median(times),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{f"state_bytes_at_{length}": state_bytes(model.cpu(), length) for length in (64, 4096)},
        "curve": _curve(trained),
        "evaluations": evaluations,
    }
    return row, {"name": name, "seed": seed, "pairs": pairs, "translations": translations}


def state_bytes(model: Any, length: int) -> int:
    """Bytes of the decoder's self-attention state for `length` tokens."""
    state = model.start(torch.zeros(1, 1, dtype=torch.long), capacity=length)
    return sum(layer.nbytes for layer in state.layers)


def _curve(trained: list[dict[str, Any]]) -> list[tuple[int, float]]:
    size = max(1, len(trained) // POINTS)
    groups = [trained[start : start + size] for start in range(0, len(trained), size)]
    return [(group[-1]["step"], fmean(line["loss"] for line in group)) for group in groups]


def score(runs: list[dict[str, Any]], texts: list[dict[str, Any]]) -> None:
    """Add BLEU to every run that has translations, if sacrebleu is installed."""
    try:
        import sacrebleu
    except ImportError:
        print("sacrebleu is not installed: no BLEU; --score computes it later", file=sys.stderr)
        return
    translated = {(text["name"], text["seed"]): text for text in texts}
    for run in runs:
        text = translated.get((run["name"], run["seed"]))
        if text is not None:
            references = [target for _, target in text["pairs"]]
            run["bleu"] = sacrebleu.corpus_bleu(text["translations"], [references]).score


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each attention: means and standard deviations over its seeds."""
    rows = []
    for name in VARIANTS:
        seeds = [run for run in runs if run["name"] == name]
        if seeds:
            row: dict[str, Any] = {"name": name, "seeds": len(seeds)}
            for kind in MEASURED:
                values = [run[kind] for run in seeds if run.get(kind) is not None]
                if values:
                    deviation = stdev(values) if len(values) > 1 else None
                    row[kind] = {"mean": fmean(values), "deviation": deviation, "count": len(values)}
            kept = ("parameters", "state_bytes_at_64", "state_bytes_at_4096")
            rows.append(row | {kind: seeds[0][kind] for kind in kept})
    return rows


def table(content: dict[str, Any]) -> str:
    """The results as the README's table, in Markdown: means, and their 95 % confidence intervals over the seeds."""
    rows = content["summary"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "attention": lambda row: row["name"],
        "exact, %": lambda row: _spread(row, "exact", 100),
    }
    if all("bleu" in row for row in rows):
        columns["BLEU"] = lambda row: _spread(row, "bleu", 1)
    if content["device"] == "cpu":
        columns["tokens/s, one core"] = lambda row: f"{row['tokens_per_second']['mean']:,.0f}"
    columns["state at 64 tokens"] = lambda row: _bytes(row["state_bytes_at_64"])
    columns["at 4,096"] = lambda row: _bytes(row["state_bytes_at_4096"])
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows)])


def _spread(row: dict[str, Any], kind: str, scale: float) -> str:
    mean, deviation, count = row[kind]["mean"], row[kind]["deviation"], row[kind]["count"]
    interval = "" if deviation is None else f" ± {scale * STUDENT[count] * deviation / math.sqrt(count):.1f}"
    return f"{scale * mean:.1f}{interval}"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def written(content: dict[str, Any]) -> str:
    """The results as JSON, with a line for each run, so that a diff shows which runs changed."""
    head = {name: value for name, value in content.items() if name != "runs"}
    runs = ",\n  ".join(json.dumps(_rounded(run)) for run in content["runs"])
    return json.dumps(_rounded(head), indent=1)[:-2] + f',\n "runs": [\n  {runs}\n ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def translations_file(out: Path) -> Path:
    return out.with_name(f"{out.stem}_translations.json")


def read(path: Path, fallback: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else fallback


def save(out: Path, content: dict[str, Any], texts: list[dict[str, Any]]) -> None:
    order = list(VARIANTS)
    content["runs"].sort(key=lambda run: (order.index(run["name"]), run["seed"]))
    content["summary"] = summary(content["runs"])
    write_text(translations_file(out), json.dumps(texts, ensure_ascii=False) + "\n")
    write_text(out, written(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument(
        "--seeds", type=int, default=5, choices=(1, *STUDENT), help="Runs of each attention, with seeds from 0 on."
    )
    parser.add_argument("--sentences", type=int, default=2000, help="Held-out sentences that a run translates.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs side by side.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--resume", action="store_true", help="Keep the runs that --out has.")
    parser.add_argument(
        "--score", action="store_true", help="Train nothing: BLEU of saved translations, and the table."
    )
    options = parser.parse_args()
    settings = {
        "steps": options.steps,
        "sentences": options.sentences,
        "device": options.device,
        "options": OPTIONS,
        "settings": SETTINGS,
    }
    content, texts = {**settings, "jobs": options.jobs, "runs": []}, []
    if options.resume or options.score:
        content, texts = read(options.out, content), read(translations_file(options.out), texts)
    if not options.score:
        changed = [name for name, value in settings.items() if content[name] != value]
        if changed:
            raise SystemExit(f"--resume: expected runs with the same {', '.join(changed)}, got others in {options.out}")
        content["environment"] = environment(Place(0, 1, torch.device(options.device)))
        content["environment"]["command"] = " ".join(["python", *sys.argv])
        _train_missing(options, content, texts)
    score(content["runs"], texts)
    save(options.out, content, texts)
    print(table(content))


def _train_missing(options: argparse.Namespace, content: dict[str, Any], texts: list[dict[str, Any]]) -> None:
    done = {(run["name"], run["seed"]) for run in content["runs"]}
    missing = [(name, seed) for seed in range(options.seeds) for name in VARIANTS if (name, seed) not in done]
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(measure, name, seed, options.steps, options.sentences, options.device) for name, seed in missing
        ]
        try:
            for number, job in enumerate(as_completed(jobs), start=1):
                row, text = job.result()
                content["runs"].append(row)
                texts.append(text)
                save(options.out, content, texts)
                summary = f"{row['name']}, seed {row['seed']}: {row['exact']:.1%} exact"
                print(f"{number} of {len(jobs)}: {summary}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # if a run fails, do not start the waiting ones


if __name__ == "__main__":
    main()
