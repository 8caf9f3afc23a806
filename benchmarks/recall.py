"""How many pairs each attention can recall: keys and values first, then a query with one of the keys.

    python benchmarks/recall.py --jobs 2
    python benchmarks/recall.py --jobs 14 --device cuda
    python benchmarks/recall.py --times

    x_t = key_t + value_t  for a pair,  x_t = key_t  for a query;   logits_t = W (x_t + attention(x)_t)

One layer with two causal heads, no positions, so that nothing but the attention can carry a value from a pair to its
query. Keys of a sequence are all different, values are drawn, chance is 1 in 64. A model is trained on sequences of
every number of pairs at once and tested on fresh ones. Jobs run side by side, each on one core.

Results go to results/recall.json: every run, the mean and the standard deviation over the seeds. `--times` trains
nothing: it adds how long the same attentions take for whole sequences on this machine. `make pictures` draws
docs/which.png from both.
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
from jaxtyping import Float, Int
from torch import Tensor, nn

import regard as rg
from regard.commands.suite.harness import environment
from regard.core.files import write_text

OUT = Path(__file__).parent / "results/recall.json"
PAIRS = (4, 8, 16, 32, 64, 128, 256)
NUM_KEYS, NUM_VALUES, QUERIES = 512, 64, 16
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
TOKENS = 8192
"""Of a batch, whatever its sequences' length."""
TESTED = 4096
"""Queries of a test."""


class Recall(nn.Module):
    """One attention between what pairs say and what queries ask."""

    def __init__(self, mechanism: rg.Mechanism, mask: rg.Mask) -> None:
        super().__init__()
        width = SIZES["embedding_dim"]
        self.keys, self.values = nn.Embedding(NUM_KEYS, width), nn.Embedding(NUM_VALUES + 1, width)
        self.attention = rg.MultiHeadAttention(**SIZES, mechanism=mechanism)
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, NUM_VALUES)
        self.mask = mask

    def forward(self, keys: Int[Tensor, "B T"], values: Int[Tensor, "B T"]) -> Float[Tensor, "B T values"]:
        x = self.keys(keys) + self.values(values)
        return self.logits(self.norm(x + self.attention(x, mask=self.mask)))


def sequences(batch: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of some sequences, `NUM_VALUES` where a query has none, and the values that queries ask for."""
    device = generator.device
    keys = torch.rand(batch, NUM_KEYS, generator=generator, device=device).topk(pairs).indices
    values = torch.randint(NUM_VALUES, (batch, pairs), generator=generator, device=device)
    asked = torch.randint(pairs, (batch, QUERIES), generator=generator, device=device)
    nothing = torch.full_like(asked, NUM_VALUES)
    return torch.cat((keys, keys.gather(1, asked)), 1), torch.cat((values, nothing), 1), values.gather(1, asked)


def measure(name: str, seed: int, steps: int, device: str) -> dict[str, Any]:
    """Train one attention with one seed: the share of right answers for every number of pairs."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Recall(*VARIANTS[name]).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pairs = PAIRS[step % len(PAIRS)]
        keys, values, answers = sequences(max(1, TOKENS // (pairs + QUERIES)), pairs, generator)
        loss = F.cross_entropy(model(keys, values)[:, -QUERIES:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {"name": name, "seed": seed, "recall": {pairs: recall(model, pairs, generator) for pairs in PAIRS}}


@torch.no_grad()
def recall(model: Recall, pairs: int, generator: torch.Generator) -> float:
    """The share of queries that a model answers with the right value."""
    keys, values, answers = sequences(TESTED // QUERIES, pairs, generator)
    return (model(keys, values)[:, -QUERIES:].argmax(-1) == answers).float().mean().item()


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
        seeds = [run["recall"] for run in runs if run["name"] == name]
        if seeds:
            shares = {pairs: [recalled[pairs] for recalled in seeds] for pairs in PAIRS}
            rows.append({
                "name": name,
                "seeds": len(seeds),
                "mean": {pairs: fmean(values) for pairs, values in shares.items()},
                "deviation": {pairs: stdev(values) for pairs, values in shares.items() if len(values) > 1},
                "state_bytes": {length: state_bytes(name, length) for length in KEPT},
            })  # fmt: skip
    return rows


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """Every attention with every seed, a progress line for each."""
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(measure, name, seed, options.steps, options.device)
            for seed in range(options.seeds)
            for name in options.only or VARIANTS
        ]
        for job in as_completed(jobs):
            run = job.result()
            runs.append(run)
            shares = " ".join(f"{share:.0%}" for share in run["recall"].values())
            print(f"{len(runs)} of {len(jobs)}: {run['name']}, seed {run['seed']}: {shares}", file=sys.stderr)
    runs.sort(key=lambda run: (list(VARIANTS).index(run["name"]), run["seed"]))
    return {"steps": options.steps, "device": options.device, "sizes": SIZES, "pairs": PAIRS, "window": WINDOW,
               "environment": environment(), "summary": summary(runs), "runs": runs}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--seeds", type=int, default=5, help="Runs of each attention, with seeds from 0 on.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs side by side.")
    parser.add_argument("--times", action="store_true", help="Train nothing: time the attentions.")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="An attention; several times for several.")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.times:
        content = json.loads(options.out.read_text()) | {"times": times(), "timed_on": environment()}
    else:
        content = trained(options)
    write_text(options.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
