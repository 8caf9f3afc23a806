"""Mechanisms side by side on one recipe: the phrase-book's translator with softmax, MQA, quadratic, elu and a window.

    python benchmarks/mechanisms.py && make pictures

Every run is `regard train translate` with one option changed, on one core, two at a time; then its loss and results
over the steps, tokens a second and the bytes that the decoder's self-attention keeps at 64 and at 4,096 tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import regard as rg
from regard.commands.demo_page import state_bytes
from regard.commands.suite import environment
from regard.core.files import write_text
from regard.training.metrics import read_metrics

VARIANTS = {
    "softmax": [],
    "softmax, MQA": ["--kv-heads", "1"],
    "quadratic": ["--mechanism", "quadratic"],
    "elu": ["--mechanism", "elu"],
    "softmax, window of 8": ["--window", "8"],
}
SIZES = [
    "--count",
    "40000",
    "--held-out",
    "500",
    "--vocabulary",
    "3072",
    "--width",
    "96",
    "--hidden",
    "192",
    "--layers",
    "2",
]
SIZES += ["--heads", "4", "--batch-tokens", "1024", "--learning-rate", "4e-3", "--warmup", "100", "--keep", "1"]


def curves(runs: dict[str, list[dict]]) -> str:
    """What docs/mechanisms.png is drawn from, a line of JSON a run: mean losses of four steps, and evaluations."""
    rows = []
    for name, lines in runs.items():
        steps = [line for line in lines if "loss" in line]
        groups = [steps[start : start + 4] for start in range(0, len(steps), 4)]
        kept = [{"step": one[-1]["step"], "loss": round(fmean(step["loss"] for step in one), 4)} for one in groups]
        kept += [line for line in lines if "evaluation" in line]
        rows.append(f"{json.dumps(name)}: {json.dumps(kept)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mechanisms.json"))
    given = parser.parse_args()
    waiting, running, runs, rows = list(VARIANTS), {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < 2:
                name = waiting.pop(0)
                command = [
                    sys.executable,
                    "-m",
                    "regard",
                    "train",
                    "translate",
                    *SIZES,
                    *VARIANTS[name],
                    "--device",
                    "cpu",
                ]
                command += ["--steps", str(given.steps), "--out", f"{folder}/{name}"]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                running[name] = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
            time.sleep(0.5)
            for name in [one for one, child in running.items() if child.poll() is not None]:
                assert running.pop(name).returncode == 0, name
                print(f"{name}: done", file=sys.stderr)
        for name in VARIANTS:
            runs[name] = read_metrics(f"{folder}/{name}")
            steps = [one for one in runs[name] if "loss" in one]
            last = [one["evaluation"] for one in runs[name] if "evaluation" in one][-1]
            model = rg.load(f"{folder}/{name}")
            rows.append(
                {
                    "name": name,
                    **{kind: round(value, 4) for kind, value in last.items()},
                    "tokens_per_second": round(sum(one["tokens"] for one in steps) / steps[-1]["seconds"]),
                    "state_bytes_at_64": state_bytes(model, 64),
                    "state_bytes_at_4096": state_bytes(model, 4096),
                    "parameters": sum(one.numel() for one in model.parameters()),
                }
            )
    write_text(given.out.with_name("mechanisms_curves.json"), curves(runs))
    content = {"environment": environment(), "steps": given.steps, "sizes": SIZES, "results": rows}
    write_text(given.out, json.dumps(content, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
