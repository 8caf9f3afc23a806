"""What an attention keeps of its past: values recalled by their keys, and strings copied, at growing length.

    python benchmarks/recall.py --jobs 2
    python benchmarks/recall.py --task copying
    python benchmarks/recall.py --jobs 14 --device cuda
    python benchmarks/recall.py --times

    recall    x_t = key_t + value_t  for a pair,  x_t = key_t  for a query
    copying   x_t = Σ over i = 0 … 3 of  E_i[token_(t-i)]    the last four tokens, as a short convolution gives them
    both      logits_t = W norm(x_t + attention(x)_t)

One layer with two causal heads, no positions, so that nothing but the attention can carry a value from a pair to its
query, or what followed a token in a string to its copy. Keys of a sequence are all different, values are drawn, chance
is 1 in 64; a string is of 32 letters, and every letter of its copy but the first three is predicted, chance is 1 in 32.
A model is trained on sequences of every length at once and tested on fresh ones.

Results go to results/recall.json, run by run; runs that it has are not trained again. `--times` trains nothing: it adds
how long the same attentions take for whole sequences on this machine. `make pictures` draws docs/which.png from all.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import regard as rg
from regard.commands.suite.harness import environment
from regard.core.files import write_text

OUT = Path(__file__).parent / "results/recall.json"
PAIRS = (4, 8, 16, 32, 64, 128, 256)
NUM_KEYS, NUM_VALUES, QUERIES = 512, 64, 16
STRINGS = (8, 16, 32, 64, 128, 256)
NUM_LETTERS, SEEN = 32, 4
"""Letters of a string, and how many tokens the embedding of one sees."""
SIZES = {"embedding_dim": 64, "num_heads": 2}
WINDOW = 64
VARIANTS: dict[str, tuple[rg.Mechanism, rg.Mask]] = {
    "softmax": (rg.Softmax(), rg.causal),
    f"softmax, window of {WINDOW}": (rg.Softmax(), rg.causal & rg.window(before=WINDOW - 1)),
    "quadratic": (rg.Quadratic(), rg.causal),
    "elu": (rg.Elu(), rg.causal),
    "retention": (rg.Retention(), rg.causal),
    "gated": (rg.Gated(), rg.causal),
    "delta": (rg.Delta(), rg.causal),
}
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Of the sequences that are timed."""
KEPT = (16, 64, 256, 1024, 4096, 16384)
"""Lengths at which the state is counted."""
TESTED = 4096
"""Predictions of a test."""


class Layer(nn.Module):
    """Attention and its residual connection, then logits: all that the tasks' models have beyond their embeddings."""

    def __init__(self, mechanism: rg.Mechanism, mask: rg.Mask, answers: int) -> None:
        super().__init__()
        width = SIZES["embedding_dim"]
        self.attention = rg.MultiHeadAttention(**SIZES, mechanism=mechanism)
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, answers)
        self.mask = mask

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T answers"]:
        return self.logits(self.norm(x + self.attention(x, mask=self.mask)))


class Recall(nn.Module):
    """One attention between what pairs say and what queries ask."""

    lengths, tokens = PAIRS, 8192

    def __init__(self, mechanism: rg.Mechanism, mask: rg.Mask) -> None:
        super().__init__()
        width = SIZES["embedding_dim"]
        self.keys, self.values = nn.Embedding(NUM_KEYS, width), nn.Embedding(NUM_VALUES + 1, width)
        self.layer = Layer(mechanism, mask, NUM_VALUES)

    def forward(self, pairs: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Logits and answers of the queries of some sequences."""
        keys, values, answers = sequences(max(1, tokens // (pairs + QUERIES)), pairs, generator)
        return self.layer(self.keys(keys) + self.values(values))[:, -QUERIES:], answers

    @staticmethod
    def tested(pairs: int) -> int:
        """Tokens of a test."""
        return TESTED // QUERIES * (pairs + QUERIES)


class Copying(nn.Module):
    """One attention between a string and its copy."""

    lengths, tokens = STRINGS, 4096

    def __init__(self, mechanism: rg.Mechanism, mask: rg.Mask) -> None:
        super().__init__()
        width = SIZES["embedding_dim"]
        self.letters = nn.ModuleList(nn.Embedding(NUM_LETTERS + 1, width) for _ in range(SEEN))
        self.layer = Layer(mechanism, mask, NUM_LETTERS)

    def forward(self, length: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Logits and answers of the copies of some strings."""
        batch = max(1, tokens // (2 * length))
        string = torch.randint(NUM_LETTERS, (batch, length), generator=generator, device=generator.device)
        twice = torch.cat((string, string), 1)
        before = [F.pad(twice, (back, -back - 1), value=NUM_LETTERS) for back in range(SEEN)]
        x = torch.stack([table(letters) for table, letters in zip(self.letters, before, strict=True)]).sum(0)
        seen = length + SEEN - 1
        return self.layer(x)[:, seen - 1 :], twice[:, seen:]

    @staticmethod
    def tested(length: int) -> int:
        """Tokens of a test."""
        return 2 * TESTED


TASKS: dict[str, type[Recall] | type[Copying]] = {"recall": Recall, "copying": Copying}


def sequences(batch: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of some sequences, `NUM_VALUES` where a query has none, and the values that queries ask for."""
    device = generator.device
    keys = torch.rand(batch, NUM_KEYS, generator=generator, device=device).topk(pairs).indices
    values = torch.randint(NUM_VALUES, (batch, pairs), generator=generator, device=device)
    asked = torch.randint(pairs, (batch, QUERIES), generator=generator, device=device)
    nothing = torch.full_like(asked, NUM_VALUES)
    return torch.cat((keys, keys.gather(1, asked)), 1), torch.cat((values, nothing), 1), values.gather(1, asked)


def measure(task: str, name: str, seed: int, steps: int, device: str) -> dict[str, Any]:
    """Train one attention with one seed: the share of right answers for every length."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = TASKS[task](*VARIANTS[name]).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    rate = {"recall": 4e-3, "copying": 1e-2}[task]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        logits, answers = model(model.lengths[step % len(model.lengths)], model.tokens, generator)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {"name": name, "seed": seed, "right": {length: right(model, length, generator) for length in model.lengths}}


@torch.no_grad()
def right(model: Recall | Copying, length: int, generator: torch.Generator) -> float:
    """The share of right answers of a model."""
    logits, answers = model(length, model.tested(length), generator)
    return (logits.argmax(-1) == answers).float().mean().item()


def state_bytes(name: str, length: int) -> int:
    """Bytes that a layer keeps of so many tokens, float32."""
    mechanism, mask = VARIANTS[name]
    length = length if mask == rg.causal else min(length, WINDOW)
    head = SIZES["embedding_dim"] // SIZES["num_heads"]
    work = rg.Work(key_length=length, num_heads=SIZES["num_heads"], num_kv_heads=SIZES["num_heads"], qk_length=head,
                   value_length=head, dtype=torch.float32)  # fmt: skip
    return rg.cost(mechanism, work).state_bytes


@torch.inference_mode()
def times(rounds: int = 7) -> dict[str, dict[int, float]]:
    """Milliseconds of whole causal sequences by length, the attentions in turn: the median of some rounds."""
    samples: dict[str, dict[int, list[float]]] = {name: {length: [] for length in LENGTHS} for name in VARIANTS}
    for length in LENGTHS:
        q, k, v = torch.randn(3, 1, 4, length, 32).unbind()
        for _ in range(rounds + 1):  # the first warms up
            for name, (mechanism, mask) in VARIANTS.items():
                began = time.perf_counter()
                rg.attend(q, k, v, mechanism, mask)
                samples[name][length].append(1e3 * (time.perf_counter() - began))
        print(f"{length:,} tokens", file=sys.stderr)
    return {name: {length: median(ms[1:]) for length, ms in rows.items()} for name, rows in samples.items()}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each attention: means and standard deviations over its seeds, and its state's size."""
    rows = []
    for name in VARIANTS:
        seeds = [run["right"] for run in runs if run["name"] == name]
        if seeds:
            shares = {length: [answered[length] for answered in seeds] for length in seeds[0]}
            rows.append({
                "name": name,
                "seeds": len(seeds),
                "mean": {length: fmean(values) for length, values in shares.items()},
                "deviation": {length: stdev(values) for length, values in shares.items() if len(values) > 1},
                "state_bytes": {length: state_bytes(name, length) for length in KEPT},
            })  # fmt: skip
    return rows


def trained(options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Train what is missing of a task, a progress line and a write of the file for each run."""
    task = options.task
    settings = {"steps": options.steps, "device": options.device, "sizes": SIZES, "lengths": TASKS[task].lengths,
                "window": WINDOW}  # fmt: skip
    former = content.get(task, {})
    alike = json.loads(json.dumps(settings)) == {name: former.get(name) for name in settings}
    runs = former["runs"] if alike else []
    done = {(run["name"], run["seed"]) for run in runs}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(measure, task, name, seed, options.steps, options.device)
            for seed in range(options.seeds)
            for name in options.only or VARIANTS
            if (name, seed) not in done
        ]
        for number, job in enumerate(as_completed(jobs), start=1):
            run = json.loads(json.dumps(job.result()))  # lengths become text, as in the file
            runs.append(run)
            runs.sort(key=lambda run: (list(VARIANTS).index(run["name"]), run["seed"]))
            content[task] = {**settings, "environment": environment(), "summary": summary(runs), "runs": runs}
            write_text(options.out, json.dumps(content, indent=1) + "\n")
            shares = " ".join(f"{share:.0%}" for share in run["right"].values())
            print(f"{number} of {len(jobs)}: {run['name']}, seed {run['seed']}: {shares}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="recall")
    parser.add_argument("--steps", type=int, help="1,400 for recall and 500 for copying, if not given.")
    parser.add_argument("--seeds", type=int, default=5, help="Runs of each attention, with seeds from 0 on.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs side by side.")
    parser.add_argument("--times", action="store_true", help="Train nothing: time the attentions.")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="An attention; several times for several.")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.steps = options.steps or {"recall": 1400, "copying": 500}[options.task]
    content = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    if options.times:
        write_text(options.out, json.dumps(content | {"times": times(), "timed_on": environment()}, indent=1) + "\n")
    else:
        trained(options, content)


if __name__ == "__main__":
    main()
