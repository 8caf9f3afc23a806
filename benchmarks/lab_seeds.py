"""The lab's experiments that draw random numbers, each with ten seeds: their verdicts, and how far estimates spread.

    python benchmarks/lab_seeds.py --out benchmarks/results/lab_seeds.json
    python benchmarks/lab_seeds.py noise saturation

With `--out` it goes on where it was stopped.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from regard import lab
from regard.core.files import write_text
from regard.training.machine import environment

SEEDS = 10


def measured(outcomes: Sequence[lab.Outcome]) -> dict[str, object]:
    """The verdict of each seed; of each estimate, how many of its intervals decide, and its least and most value."""
    rows = []
    for checks in zip(*(outcome.checks for outcome in outcomes), strict=True):
        if checks[0].interval is not None:
            values = [check.measured for check in checks]
            results = [check.result for check in checks]
            rows.append(
                {
                    "estimate": checks[0].name,
                    "predicted": checks[0].predicted,
                    "least": min(values),
                    "most": max(values),
                    "results": {result: results.count(result) for result in sorted(set(results))},
                }
            )
    verdicts = [outcome.verdict for outcome in outcomes]
    return {"verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}, "estimates": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="Experiments; all that take a seed if none is named.")
    parser.add_argument("--out", type=Path, help="Write the results to this JSON file.")
    options = parser.parse_args()
    names = options.names or [name for name, part in lab.experiments().items() if "seed" in part.parameters]
    results = json.loads(options.out.read_text()) if options.out and options.out.exists() else {"experiments": {}}
    for name in names:
        if name not in results["experiments"]:
            results["experiments"][name] = measured([lab.run(name, seed=seed) for seed in range(SEEDS)])
            results |= {"seeds": SEEDS, "environment": environment()}
            if options.out:
                write_text(options.out, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        part = results["experiments"][name]
        verdicts = ", ".join(f"{verdict} {count}×" for verdict, count in part["verdicts"].items())
        print(f"{name:20} {verdicts:30} {len(part['estimates'])} estimates", flush=True)


if __name__ == "__main__":
    main()
