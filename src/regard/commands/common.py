"""Shared by commands: tables, JSON, progress, options."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Device = Annotated[str, typer.Option(metavar="NAME", help="Where the model runs: cpu, cuda, cuda:1, …")]


def output() -> Console:
    """Standard output, as wide as the terminal or $COLUMNS; for a file or a pipe, wide enough for tables."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=140)


@contextmanager
def progress(total: int, title: str, *, ticking: bool = True) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error. It yields a function to call with the name of each piece of work as it begins.

    Without `ticking` the bar is updated only by these calls: its thread would disturb what is being timed.
    """
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    begun = 0
    console = Console(stderr=True)
    # Leave standard output alone: rich would redirect what is printed meanwhile to standard error.
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
        auto_refresh=ticking,
    ) as bar:
        task = bar.add_task(title, total=total, name="")

        def advance(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, name=name, refresh=not ticking)
            begun += 1

        yield advance


@contextmanager
def one_thread() -> Iterator[None]:
    """Run with one thread, for many small tensors: on a busy machine, threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_of(name: str, key: str, choices: dict[str, Any]) -> Any:
    """The choice with this key; ValueError about the option `name` if there is none."""
    if key not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {key!r}")
    return choices[key]


@contextmanager
def named(**options: str) -> Iterator[None]:
    """Rename the argument in a library's error to the command's option: `path="plot"`."""
    try:
        yield
    except ValueError as error:
        argument, colon, rest = str(error).partition(": ")
        if argument not in options:
            raise
        raise ValueError(f"{options[argument]}{colon}{rest}") from error


NARROWEST = 24
"""The least width of a text column in characters: longer text is wrapped."""
Row: TypeAlias = dict[str, str]


def print_table(
    rows: Sequence[dict[str, Any]],
    *,
    right: Sequence[str] = (),
    section: Sequence[str] = (),
    keys: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """Print rows with the same keys as a table, with a line wherever one of the `section` columns changes.

    If the terminal is too narrow, print a heading for each section, and below it several tables, each of which begins
    with the columns `keys` (by default the first); or, for long texts, a few lines for each row.
    """
    console = output()
    names = [name for name in rows[0] if name not in drop]
    cells = [{name: str(row[name]) for name in names} for row in rows]
    sizes = {name: max(cell_len(text) for text in (name, *(row[name] for row in cells))) for name in names}
    needed = sum(size if name in right else min(size, NARROWEST) for name, size in sizes.items()) + 3 * len(names)
    if needed <= console.width:
        console.print(_table(cells, names, right, section))
        return
    inner = [name for name in names if name not in section]
    parts = _parts(inner, keys or inner[:1], sizes, console.width)
    for heading, group in groupby(cells, key=lambda row: ", ".join(f"{name} {row[name]}" for name in section)):
        below = list(group)
        if heading:
            print(heading)
        if parts:
            for part in parts:
                console.print(_table(below, part, right))
        else:
            print("\n".join(line for row in below for line in _record(row, inner, console.width)))


def _table(rows: Sequence[Row], names: Sequence[str], right: Sequence[str], section: Sequence[str] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in names:
        is_number = name in right
        table.add_column(Text(name), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for number, row in enumerate(rows):
        if number and any(row[name] != rows[number - 1][name] for name in section):
            table.add_section()
        table.add_row(*(Text(row[name]) for name in names))
    return table


def _parts(names: Sequence[str], keys: Sequence[str], sizes: dict[str, int], width: int) -> list[list[str]]:
    """The columns of the narrow tables that replace a wide table, each with the columns `keys`; none for long texts.

    >>> _parts(["name", "FLOPs", "bytes", "form"], ["name"], {"name": 9, "FLOPs": 6, "bytes": 7, "form": 6}, 32)
    [['name', 'FLOPs', 'bytes'], ['name', 'form']]
    """
    parts: list[list[str]] = []
    for name in names:
        if sizes[name] > NARROWEST or sum(sizes[key] + 3 for key in (*keys, name)) > width:
            return []
        if name in keys:
            continue
        if not parts or sum(sizes[column] + 3 for column in (*parts[-1], name)) > width:
            parts.append(list(keys))
        parts[-1].append(name)
    return parts


def _record(row: Row, names: Sequence[str], width: int) -> Iterator[str]:
    """A row that does not fit, as lines: its first column and, indented, the names and values of the others.

    >>> row = {"name": "softmax", "FLOPs": "1.5 G", "note": "", "peer": "SDPA"}
    >>> print("\\n".join(_record(row, list(row), 16)))
    softmax
      FLOPs 1.5 G
      peer SDPA
    """
    first, *others = names
    yield row[first]
    line = ""
    for pair in (f"{name} {row[name]}".strip() for name in others if row[name]):
        if line and len(line) + len(pair) + 2 > width:
            yield line
            line = ""
        line += f"  {pair}"
        if len(line) > width:  # a long text: over several lines
            yield from textwrap.wrap(pair, width, initial_indent="  ", subsequent_indent="    ")
            line = ""
    if line:
        yield line


def result_rows(columns: Mapping[str, Mapping[str, float]], title: str) -> list[dict[str, str]]:
    """Rows of a table of results by name, with a column for each kind of examples.

    >>> result_rows({"validation": {"loss": 0.25, "accuracy": 0.5}, "test": {"loss": 0.3}}, "model")[1]
    {'model': 'accuracy', 'validation': '0.5', 'test': ''}
    """
    names = dict.fromkeys(name for results in columns.values() for name in results)
    cells = {column: {name: f"{value:.4g}" for name, value in results.items()} for column, results in columns.items()}
    return [{title: name, **{column: cells[column].get(name, "") for column in columns}} for name in names]


def print_json(value: Any) -> None:
    """Print a JSON value on standard output, indented."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def digits(value: float) -> str:
    """A number with three significant digits, or all before the decimal point: 0.999, 31.9, 1,043."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """A spinner on standard error, if it is a terminal, for work of some seconds without steps."""
    with Console(stderr=True).status(Text(words)):
        yield


def read_text(name: str, file: Path) -> str:
    """The text of a file, or of standard input for -; ValueError about the option `name` unless it is UTF-8."""
    standard = str(file) == "-"
    try:
        return (sys.stdin.buffer.read() if standard else file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        place = "standard input" if standard else str(file)
        raise ValueError(f"{name}: expected UTF-8 text, got {place} with {error}") from None
