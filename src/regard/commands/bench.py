"""`regard bench`: speed against named peers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.commands.common import digits, print_table, progress
from regard.core.mechanisms.text import CHOICES, from_text

if TYPE_CHECKING:
    from regard.commands.suite import Result


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A benchmark of the suite (see --list). May repeat.", show_default=False),
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Time this mechanism instead, against SDPA and against its plain formula: one of {CHOICES}.",
            show_default=False,
        ),
    ] = None,
    qk_length: Annotated[int, typer.Option(min=1, metavar="N", help="With --mechanism: the head dimension.")] = 64,
    listed: Annotated[bool, typer.Option("--list", help="List the suite and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder to save the results in.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few rounds only, for a rough look: goals are not enforced.")
    ] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Time attention and generation on a CUDA device instead.")] = False,
) -> None:
    """Speed ratios against named peers, measured in one run; above 1, ours is faster. Exit 1 if a goal is missed."""
    if gpu:
        for name, value in {"mechanism": mechanism, "only": only, "list": listed, "quick": quick}.items():
            if value:
                raise ValueError(f"{name}: expected none with --gpu, got {value!r}")
        _gpu(as_json, out)
        return
    from regard.commands.suite import SUITE, environment, of_mechanism, run, save

    benches = SUITE
    if mechanism is not None:
        timed = of_mechanism(mechanism.rpartition(":")[2], from_text(mechanism), qk_length)
        benches = {bench.name: bench for bench in timed}
    names = list(dict.fromkeys(only or benches))
    for name in names:
        if name not in benches:
            raise ValueError(f"only: expected a benchmark of `regard bench --list`, got {name!r}")
    suite = [benches[name] for name in names]
    if listed:
        rows = [{"name": entry.name, "title": entry.title, "peer": entry.peer, "goal": entry.goal} for entry in suite]
        print_table(
            [{**row, "goal": _goal(entry.goal)} for row, entry in zip(rows, suite, strict=True)], right=("goal",)
        )
        if as_json:
            print(json.dumps({"suite": rows}))
        return
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    results = []
    with progress(len(suite), "timing", ticking=False) as advance:
        for bench in suite:
            advance(bench.name)
            results.append(run(bench, quick))
    print_table([_bench_row(result) for result in results], right=("ours", "peer's", "ratio", "goal"))
    if out is not None:
        print(f"-> {save(results, out)}")
    if as_json:
        print(json.dumps({"environment": environment(), "results": [result.to_dict() for result in results]}))
    if not quick and any(result.passed is False for result in results):
        raise typer.Exit(1)


def _goal(goal: float | None) -> str:
    return "" if goal is None else f"{goal:.3g}×"


def _bench_row(result: "Result") -> dict[str, str]:
    return {
        "benchmark": result.title,
        "peer": result.peer,
        "ours": f"{digits(result.ours_ms)} ms" if result.ours_ms else "",
        "peer's": f"{digits(result.peer_ms)} ms" if result.peer_ms else "",
        "ratio": f"{result.ratio:.2f}×",
        "goal": _goal(result.goal),
        "": {True: "reached", False: "missed", None: ""}[result.passed],
        "note": result.note,
    }


def _gpu(as_json: bool, out: Path | None) -> None:
    from regard.commands.suite import gpu_softmax, gpu_streams
    from regard.commands.suite.gpu import run, save

    results = run()
    results["softmax"] = gpu_softmax.run()
    results["streams"] = gpu_streams.run()
    rows = [
        {
            "benchmark": row["name"],
            "ours": f"{row['ours_ms']:.3f} ms",
            **{name: f"{ms:.3f} ms ({row['ratios'][name]:.2f}×)" for name, ms in row["peers_ms"].items()},
            "floor": f"{row['floor_ms']:.3f} ms ({row['fraction_of_the_ceiling']:.0%})",
            "memory": f"{row['memory_gb']:.2f} GB",
        }
        for row in results["rows"]
    ]
    rows += [
        {
            "benchmark": row["name"],
            "ours": f"{row['ours_ms']:.3f} ms",
            **{name: f"{ms:.3f} ms ({row['ratios'][name]:.2f}×)" for name, ms in row["peers_ms"].items()},
        }
        for row in (*results["softmax"], *results["streams"]["tokens"], *results["streams"]["histories"])
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    print_table([{name: row.get(name, "") for name in names} for row in rows], right=("ours",))
    calls = results["streams"]["python"]
    numbers = ("ours_us", "sdpa_us", "beyond_us")
    shown = [{"the CPU's part of a call": row["name"], **{n: f"{row[n]:.1f}" for n in numbers}} for row in calls]
    print_table(shown, right=numbers)
    if out is not None:
        print(f"-> {save(results, out)}")
    if as_json:
        print(json.dumps(results))
