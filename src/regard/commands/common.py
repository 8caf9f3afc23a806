"""What more than one command needs: tables, JSON, progress, options."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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
    """Standard output: as wide as the terminal or $COLUMNS says; into a file or a pipe, as wide as a table needs."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=140)


@contextmanager
def progress(total: int, title: str, *, ticking: bool = True) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error. It gives a function to call with the name of each piece of work as that begins.

    Without `ticking` the bar moves only then: the thread that moves it would take time from what is being timed.
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
    # Standard output is left alone: what is printed meanwhile would go to standard error with the bar.
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
    """One thread for many small tensors: on a busy machine, threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_of(name: str, key: str, choices: dict[str, Any]) -> Any:
    """The choice that the option `name` asks for by its key; ValueError if there is none."""
    if key not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {key!r}")
    return choices[key]


@contextmanager
def named(**options: str) -> Iterator[None]:
    """Turn errors about a library's argument into errors about the command's option: `path="plot"`."""
    try:
        yield
    except ValueError as error:
        argument, colon, rest = str(error).partition(": ")
        if argument not in options:
            raise
        raise ValueError(f"{options[argument]}{colon}{rest}") from error


NARROWEST = 24
"""Characters that a column of text needs: longer text is wrapped down to them."""


def print_table(
    rows: Sequence[dict[str, Any]], *, right: Sequence[str] = (), section: Sequence[str] = (), drop: Sequence[str] = ()
) -> None:
    """Rows with the same keys as a table, with a line wherever one of the `section` columns changes.

    Where the window is too narrow for it, every row becomes a few lines of names and values.
    """
    console = output()
    names = [name for name in rows[0] if name not in drop]
    cells = [{name: str(row[name]) for name in names} for row in rows]
    sizes = {name: max(cell_len(text) for text in (name, *(row[name] for row in cells))) for name in names}
    needed = sum(size if name in right else min(size, NARROWEST) for name, size in sizes.items()) + 2 * len(names)
    if needed > console.width:
        print("\n".join(_records(cells, section, console.width)))
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in names:
        table.add_column(Text(name), justify="right" if name in right else "left", no_wrap=name in right)
    for number, row in enumerate(cells):
        if number and any(row[name] != cells[number - 1][name] for name in section):
            table.add_section()
        table.add_row(*(Text(text) for text in row.values()))
    console.print(table)


def _records(rows: Sequence[dict[str, str]], section: Sequence[str], width: int) -> Iterator[str]:
    """The lines of rows that do not fit side by side: a heading for each section, then the first column of each row
    and, indented, the names and values of the others.

    >>> rows = [{"mode": "decode", "name": "softmax", "FLOPs": "1.5 G", "state": "8 MB", "note": ""}]
    >>> print("\\n".join(_records(rows, ["mode"], 20)))
    mode decode
      softmax
        FLOPs 1.5 G
        state 8 MB
    """
    heading = None
    for row in rows:
        here = ", ".join(f"{name} {row[name]}" for name in section)
        if section and here != heading:
            yield here if heading is None else f"\n{here}"
            heading = here
        (_, first), *others = ((name, text) for name, text in row.items() if name not in section)
        margin = "  " if section else ""
        yield margin + first
        pairs = [f"{name} {text}".strip() for name, text in others if text]
        line = ""
        for pair in pairs:
            if line and len(margin) + len(line) + len(pair) + 4 > width:
                yield margin + line
                line = ""
            line += f"  {pair}"
            if len(margin) + len(line) > width:  # a long text: over several lines
                yield from textwrap.wrap(pair, width, initial_indent=f"{margin}  ", subsequent_indent=f"{margin}    ")
                line = ""
        if line:
            yield margin + line


def print_json(value: Any) -> None:
    """One JSON value on standard output, for programs and people alike."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def digits(value: float) -> str:
    """Three digits, or all before the point: 0.999, 31.9, 1,043."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """A spinner on standard error, where that is somebody's window, for what takes seconds and has no steps."""
    with Console(stderr=True).status(Text(words)):
        yield


def read_text(name: str, file: Path) -> str:
    """The text of a file, or of standard input for -; ValueError that names `name` unless it is UTF-8."""
    standard = str(file) == "-"
    try:
        return (sys.stdin.buffer.read() if standard else file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        place = "standard input" if standard else str(file)
        raise ValueError(f"{name}: expected UTF-8 text, got {place} with {error}") from None
