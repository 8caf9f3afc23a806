"""The command line: parse, call, print.

Results go to standard output, progress and errors to standard error. Exit codes: 0 all is well, 1 a law is broken or a
goal is missed, 2 something the user can put right, 130 interrupted.
"""

import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import regard as rg
from regard.cost import human
from regard.laws import LAWS
from regard.laws.case import DTYPES, HEADS, MASKS
from regard.mechanisms import REGISTRY, named

if TYPE_CHECKING:
    from regard.bench import Result
    from regard.demo import Step

MODE_NAMES = ("prefill", "decode", "both")
LENGTHS = (1024, 8192, 65536)
# What typer has no public name for in all of its versions: the parent of everything wrong with a command line.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _examples(*commands: str) -> str:
    """The last section of a command's help; an empty line is how typer ends a line."""
    return "\n\n".join(["Example:" if len(commands) == 1 else "Examples:", *(f"  {command}" for command in commands)])


app = typer.Typer(
    name="regard",
    help="State an attention mechanism once; compute, stream, see, count and prove it.",
    epilog=_examples("regard demo", "regard cost --plot cost.png", "regard check quadratic"),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Run the command line: `regard`, or `python -m regard.cli`."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="regard", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: `regard cost | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except UsageError as error:
        code = _fail(error.format_message())  # type: ignore[attr-defined]
    except ValueError as error:
        code = _fail(str(error))
    except OSError as error:
        code = _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        print("regard: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    print(f"regard: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"regard {version('regard')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """State an attention mechanism once; compute, stream, see, count and prove it."""


@app.command(epilog=_examples("regard demo --out tour"))
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the pictures and the page.")] = Path(
        "regard-demo"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the words' vectors.")] = 0,
) -> None:
    """A tour of a minute: a softmax and a quadratic mechanism computed, streamed, seen, counted and proved."""
    out.mkdir(parents=True, exist_ok=True)  # before the seconds that drawing takes to load
    from regard.demo import run

    console = _console()
    number = 0

    def show(step: "Step") -> None:
        nonlocal number
        number += 1
        console.print(f"\n[bold]{number}. {step.title}[/bold]")
        console.print(step.words, markup=False, highlight=False)
        print(f"\n{step.numbers}")
        for picture in step.pictures:
            print(f"-> {out / picture.name}")

    with _one_thread():
        page = run(out, seed=seed, show=show, watch=lambda cells: _progress(cells, "proving"))
    print(f"\nAll of it on one page: {page}")


@app.command(
    epilog=_examples("regard check quadratic --law streamed --mask causal", "regard check --own mine.py:Cauchy --json")
)
def check(
    mechanisms: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MECHANISM]…", help=f"Of {', '.join(REGISTRY)}. Default: all.", show_default=False),
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="A mechanism of your own, as module:name or file.py:Name. May repeat.",
            show_default=False,
        ),
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(LAWS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(MASKS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(HEADS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(DTYPES)}. May repeat. Default: all.", show_default=False),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, metavar="N", help="Random shapes for each cell.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every cell.")] = False,
) -> None:
    """Run the laws on mechanisms: every law, mask, grouping of heads and dtype is a cell. Exit 1 if one is broken."""
    chosen = [named(name) for name in mechanisms or ([] if own else REGISTRY)] + [_own(place) for place in own or []]
    picked = {
        "laws": law or list(LAWS),
        "masks": mask or list(MASKS),
        "heads": heads or list(HEADS),
        "dtypes": dtype or list(DTYPES),
    }
    cells = math.prod(len(names) for names in picked.values())
    reports = []
    for number, mechanism in enumerate(chosen, start=1):
        with _one_thread(), _progress(cells, f"checking {number} of {len(chosen)}") as advance:
            reports.append(rg.check(mechanism, **picked, examples=examples, progress=advance))
        if not as_json:
            print(reports[-1], end="\n\n", flush=True)
    outcomes = [cell.outcome for report in reports for cell in report.cells]
    counts = {name: outcomes.count(name.replace("_", " ")) for name in ("held", "broken", "not_applicable")}
    if as_json:
        _print_json({"mechanisms": [report.to_dict() for report in reports], "cells": len(outcomes), **counts})
    else:
        spelled = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        print(f"{len(outcomes):,} cells: {spelled}")
    if counts["broken"]:
        raise typer.Exit(1)


@app.command(epilog=_examples("regard cost --length 1024,16384 --kv-heads 8 --plot cost.png", "regard cost --measure"))
def cost(
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Of {', '.join(REGISTRY)}. May repeat. Default: softmax, quadratic.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N", help=f"Tokens; may repeat or list with commas. Default: {','.join(map(str, LENGTHS))}."
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Query heads. Default: 32, 4 with --measure.")
    ] = None,
    kv_heads: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Key/value heads. May repeat. Default: one each of MHA, GQA, MQA."),
    ] = None,
    qk_length: Annotated[int, typer.Option(min=1, metavar="N", help="Length of queries and keys.")] = 64,
    value_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Length of values. Default: qk-length.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences at once.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(DTYPES)}. Default: bfloat16, float32 with --measure."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(metavar="MODE", help="prefill: a whole sequence. decode: one new token over a cache. Or both."),
    ] = "both",
    window: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="See only the last N keys, itself among them.")
    ] = None,
    is_causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Hide the future in prefill.")] = True,
    embedding_dim: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Count the layer too: its projections, and the bottleneck.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw cost over length into this picture file.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine: predicted and measured prefill crossover.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with raw numbers.")] = False,
) -> None:
    """What attention costs: FLOPs, bytes, state and activation memory over length, and where mechanisms cross."""
    chosen = {name: named(name) for name in mechanism or ["softmax", "quadratic"]}
    num_heads = heads or (4 if measure else 32)
    mask = rg.causal if is_causal else None
    if window is not None:
        if mask is None:
            raise ValueError("window: expected --causal, whose last N keys it keeps, got --no-causal")
        mask = mask & rg.window(before=window - 1)
    work = rg.Work(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        qk_length=qk_length,
        value_length=value_length or qk_length,
        dtype=_one_of("dtype", dtype or ("float32" if measure else "bfloat16"), DTYPES),
        mask=mask,
    )
    lengths = _whole_numbers("length", length) or list(LENGTHS)
    _one_of("mode", mode, {name: name for name in MODE_NAMES})
    modes = ["prefill", "decode"] if mode == "both" else [mode]
    groupings = kv_heads or ([num_heads] if measure else _three_groupings(num_heads))
    with _one_thread():
        rows = _cost_rows(chosen, work, groupings, modes, lengths, embedding_dim)
        crossovers = _crossovers(chosen, work, groupings, modes)
        if plot is not None:
            _draw_cost(plot, chosen, work, groupings, modes, lengths)
    found: dict[str, Any] = {"rows": rows, "crossovers": crossovers}
    if measure:
        with Console(stderr=True).status("measuring this machine"):
            found["measured"] = _measured(chosen, work, groupings[0])
    if as_json:
        _print_json(found)
        return
    _print_cost(rows)
    for one in crossovers:
        print(_crossover_line(one))
    if measure:
        _print_measured(found["measured"])
    if plot is not None:
        print(f"-> {plot}")


@app.command(epilog=_examples("regard bench --list", "regard bench --only padded --only append --json"))
def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A benchmark of the suite (see --list). May repeat.", show_default=False),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the suite and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder to save the results in.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few rounds only: a look, not a result, and no goal is missed.")
    ] = False,
) -> None:
    """Speed against named peers, as ratios measured in one run; above 1, ours is faster. Exit 1 if a goal is missed."""
    from regard.bench import SUITE, environment, run, save

    names = list(dict.fromkeys(only or SUITE))
    for name in names:
        _one_of("only", name, SUITE)
    if listed:
        suite = [SUITE[name] for name in names]
        rows = [{"name": one.name, "title": one.title, "peer": one.peer, "goal": one.goal} for one in suite]
        _print_table([{**row, "goal": _goal(one.goal)} for row, one in zip(rows, suite, strict=True)], right=("goal",))
        if as_json:
            print(json.dumps({"suite": rows}))
        return
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    results = []
    with _progress(len(names), "timing") as advance:
        for name in names:
            advance(name)
            results.append(run(name, quick))
    _print_table([_bench_row(result) for result in results], right=("ours", "peer's", "ratio", "goal"))
    if out is not None:
        print(f"-> {save(results, out)}")
    if as_json:
        print(json.dumps({"environment": environment(), "results": [result.to_dict() for result in results]}))
    if not quick and any(result.passed is False for result in results):
        raise typer.Exit(1)


def _console() -> Console:
    """Standard output; as wide as a table needs where nobody's window is the limit."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)


@contextmanager
def _progress(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call what it gives with the name of each piece of work as that begins."""
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    begun = 0
    console = Console(stderr=True)
    # Standard output is left alone: what is printed meanwhile would go to standard error with the bar.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=total, name="")

        def advance(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, name=name)
            begun += 1

        yield advance


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for many small tensors: on a busy machine, threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _own(place: str) -> rg.Mechanism:
    """The mechanism at `module:name` or `file.py:Name`; a class or function is called for one."""
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(f"own: expected module:name or file.py:Name, got {place!r}")
    module = _module(where)
    if not hasattr(module, name):
        raise ValueError(f"own: expected {where} to have {name!r}, got nothing of that name")
    found = getattr(module, name)
    if callable(found) and not isinstance(found, rg.Mechanism):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(f"own: expected {name} to need no arguments, got {error}") from error
    if not isinstance(found, rg.Mechanism):
        raise ValueError(f"own: expected {name} to be a regard.Mechanism, got {type(found).__name__}")
    return found


def _module(where: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` finds modules
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        if not Path(where).is_file():
            raise ValueError(f"own: expected a file, got {where!r}, which is none")
        name = Path(where).stem
        spec = importlib.util.spec_from_file_location(name, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except ValueError:
        raise
    except Exception as error:  # whatever a user's file raises is theirs to put right
        raise ValueError(f"own: {where} cannot be imported: {type(error).__name__}: {error}") from error


def _one_of(name: str, given: str, known: dict[str, Any]) -> Any:
    if given not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {given!r}")
    return known[given]


def _whole_numbers(name: str, given: Sequence[str] | None) -> list[int]:
    """Numbers from options that may repeat and may list with commas."""
    parts = [part.strip() for text in given or [] for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"{name}: expected whole numbers of at least 1, got {part!r}")
    return list(dict.fromkeys(int(part) for part in parts))


def _three_groupings(num_heads: int) -> list[int]:
    """Key/value heads for MHA, GQA and MQA: 8 groups as most models have, or as near to 8 as divides the heads."""
    between = [groups for groups in range(2, num_heads) if num_heads % groups == 0]
    nearest = min(between, key=lambda groups: abs(groups - 8), default=1)
    return list(dict.fromkeys([num_heads, nearest, 1]))


def _cost_rows(
    mechanisms: dict[str, rg.Mechanism],
    work: rg.Work,
    groupings: Sequence[int],
    modes: Sequence[str],
    lengths: Sequence[int],
    embedding_dim: int | None,
) -> list[dict[str, Any]]:
    from regard.plots import heads_label, mode_work

    rows = []
    for mode in modes:
        for kv in groupings:
            for length in lengths:
                at = mode_work(replace(work, num_kv_heads=kv), mode, length)
                for name, mechanism in mechanisms.items():
                    found = rg.cost(mechanism, at)
                    row: dict[str, Any] = {
                        "mechanism": name,
                        "heads": heads_label(work.num_heads, kv),
                        "num_heads": work.num_heads,
                        "num_kv_heads": kv,
                        "mode": mode,
                        "length": length,
                        "flops": found.flops,
                        "bytes": found.bytes,
                        "intensity": found.intensity,
                        "state_bytes": found.state_bytes,
                        "activation_bytes": found.activation_bytes,
                        "form": found.form,
                        "note": found.note,
                    }
                    if embedding_dim is not None:
                        layer = rg.layer_cost(at, embedding_dim, mechanism)
                        row["layer"] = {
                            "projection_flops": layer.projections.flops,
                            "projection_bytes": layer.projections.bytes,
                            "flops": layer.flops,
                            "bytes": layer.bytes,
                            "parameters": layer.parameters,
                            "bottleneck": layer.bottleneck,
                        }
                    rows.append(row)
    return rows


def _crossovers(
    mechanisms: dict[str, rg.Mechanism], work: rg.Work, groupings: Sequence[int], modes: Sequence[str]
) -> list[dict[str, Any]]:
    """From which length one of the first two mechanisms is cheaper than the other, for good."""
    from regard.plots import PRICES, heads_label, mode_crossover

    if len(mechanisms) < 2:
        return []
    (first, one), (second, two) = list(mechanisms.items())[:2]
    found = []
    for mode in modes:
        for kv in groupings:
            for by in ("flops",) if mode == "prefill" else ("bytes", "flops"):
                at = replace(work, num_kv_heads=kv)
                second_from = mode_crossover(one, two, at, mode, PRICES[by])
                first_from = mode_crossover(two, one, at, mode, PRICES[by]) if second_from is None else None
                found.append(
                    {
                        "first": first,
                        "second": second,
                        "heads": heads_label(work.num_heads, kv),
                        "num_heads": work.num_heads,
                        "num_kv_heads": kv,
                        "mode": mode,
                        "by": by,
                        "cheaper": second if second_from else first if first_from else None,
                        "from": second_from or first_from,
                    }
                )
    return found


def _crossover_line(found: dict[str, Any]) -> str:
    start = f"{_heads(found):<9} {found['mode']:<8} "
    pair = (found["first"], found["second"])
    things, by = ("FLOPs", "takes fewer FLOPs") if found["by"] == "flops" else ("bytes", "moves fewer bytes")
    if found["cheaper"] is None:
        return start + f"{' and '.join(pair)} are alike in {things}"
    dearer = pair[0] if found["cheaper"] == pair[1] else pair[1]
    where = "at every length" if found["from"] == 1 else f"from {found['from']:,} tokens on"
    return start + f"{found['cheaper']} {by} than {dearer} {where}"


def _draw_cost(
    path: Path,
    mechanisms: dict[str, rg.Mechanism],
    work: rg.Work,
    groupings: Sequence[int],
    modes: Sequence[str],
    lengths: Sequence[int],
) -> None:
    from regard.files import save_figure
    from regard.plots import cost_figure

    shortest = min(lengths)
    # One length is no line: two octaves from it then.
    longest = max(max(lengths), 4 * shortest)
    figure = cost_figure(mechanisms, work, kv_heads=groupings, modes=modes, shortest=shortest, longest=longest)
    save_figure(figure, path)


def _measured(mechanisms: dict[str, rg.Mechanism], work: rg.Work, num_kv_heads: int) -> dict[str, Any]:
    """The prefill crossover of the first two mechanisms as this machine's rates predict it, and as it is."""
    from regard.bench import measure, measured_crossover
    from regard.plots import mode_work

    if len(mechanisms) < 2:
        raise ValueError("measure: expected two mechanisms to compare, got one")
    (first, one), (second, two) = list(mechanisms.items())[:2]
    at = mode_work(replace(work, num_kv_heads=num_kv_heads), "prefill", 4096)
    rates = measure([one, two], at)
    predicted = rg.crossover(one, two, at, seconds=rates.seconds)
    measured = None if predicted is None else measured_crossover(one, two, at, near=predicted)
    off = None if predicted is None or measured is None else 100 * (predicted - measured) / measured
    return {
        "first": first,
        "second": second,
        "num_heads": work.num_heads,
        "num_kv_heads": num_kv_heads,
        "dtype": str(work.dtype).removeprefix("torch."),
        "rates": rates.table,
        "predicted": predicted,
        "measured": measured,
        "difference_percent": off,
    }


def _print_measured(found: dict[str, Any]) -> None:
    shape = f"{found['num_heads']} heads over {found['num_kv_heads']}, {found['dtype']}"
    print(f"\nThis machine, prefill, {shape}:")
    for name, rate in found["rates"].items():
        print(f"  {name} reaches {human(rate['flops_per_second'], 'FLOP/s')}")
    if found["predicted"] is None:
        print(f"  {found['second']} is not predicted to become faster than {found['first']}")
    elif found["measured"] is None:
        print(f"  predicted crossover {found['predicted']:,} tokens; none measured around it")
    else:
        print(
            f"  predicted crossover {found['predicted']:,} tokens, measured {found['measured']:,}: "
            f"{found['difference_percent']:+.0f} %"
        )


def _print_cost(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table, a section for each mode and grouping; notes are numbered and follow below."""
    notes = list(dict.fromkeys(row["note"] for row in rows if row["note"]))
    shown = []
    for row in rows:
        cells = {
            "mechanism": row["mechanism"],
            "heads": _heads(row),
            "mode": row["mode"],
            "length": f"{row['length']:,}",
            "FLOPs": human(row["flops"]),
            "bytes": human(row["bytes"], "B"),
            "FLOPs/byte": _number(row["intensity"]),
            "state": human(row["state_bytes"], "B"),
            "activation": human(row["activation_bytes"], "B"),
            "form": row["form"],
            "note": f"({notes.index(row['note']) + 1})" if row["note"] else "",
        }
        if "layer" in row:
            cells |= {"layer FLOPs": human(row["layer"]["flops"]), "bottleneck": row["layer"]["bottleneck"]}
        shown.append(cells)
    numbers = ("length", "FLOPs", "bytes", "FLOPs/byte", "state", "activation", "layer FLOPs")
    _print_table(shown, right=numbers, section=("heads", "mode"), drop=() if notes else ("note",))
    for number, note in enumerate(notes, start=1):
        print(f"({number}) {note}")
    if notes:
        print()


def _print_table(
    rows: Sequence[dict[str, Any]], *, right: Sequence[str] = (), section: Sequence[str] = (), drop: Sequence[str] = ()
) -> None:
    """Rows of equal keys as a table, a line wherever one of the `section` columns changes."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    names = [name for name in rows[0] if name not in drop]
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for number, row in enumerate(rows):
        if number and any(row[name] != rows[number - 1][name] for name in section):
            table.add_section()
        table.add_row(*(str(row[name]) for name in names))
    _console().print(table)


def _heads(row: dict[str, Any]) -> str:
    return f"{row['heads']} {row['num_heads']}/{row['num_kv_heads']}"


def _number(value: float) -> str:
    """Three digits, or all before the point: 0.999, 31.9, 1,043."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _goal(goal: float | None) -> str:
    return "" if goal is None else f"{goal:g}×"


def _bench_row(result: "Result") -> dict[str, str]:
    return {
        "benchmark": result.title,
        "peer": result.peer,
        "ours": f"{_number(result.ours_ms)} ms" if result.ours_ms else "",
        "peer's": f"{_number(result.peer_ms)} ms" if result.peer_ms else "",
        "ratio": f"{result.ratio:.2f}×",
        "goal": _goal(result.goal),
        "": {True: "reached", False: "missed", None: ""}[result.passed],
        "note": result.note,
    }


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
