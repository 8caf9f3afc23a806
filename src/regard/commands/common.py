"""What more than one command needs: tables, JSON, progress, options."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


def output() -> Console:
    """Standard output; as wide as a table needs where nobody's window is the limit."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)


@contextmanager
def progress(total: int, title: str, *, ticking: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call what it gives with the name of each piece of work as that begins.

    Without `ticking` it moves only then: the thread that moves it would take time from what is being timed.
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


def one_of(name: str, given: str, known: dict[str, Any]) -> Any:
    """What `known` has by the name that an option gives; ValueError if it has nothing."""
    if given not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {given!r}")
    return known[given]


@contextmanager
def named(**options: str) -> Iterator[None]:
    """Errors about an argument of the library's as errors about the option that it comes from: `path="plot"`."""
    try:
        yield
    except ValueError as error:
        argument, colon, rest = str(error).partition(": ")
        if argument not in options:
            raise
        raise ValueError(f"{options[argument]}{colon}{rest}") from error


def print_table(
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
    output().print(table)


def print_json(found: Any) -> None:
    """One JSON value on standard output, for programs and people alike."""
    print(json.dumps(found, indent=1, ensure_ascii=False))


def digits(value: float) -> str:
    """Three digits, or all before the point: 0.999, 31.9, 1,043."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """A spinner on standard error, where that is somebody's window, for what takes seconds and has no steps."""
    with Console(stderr=True).status(Text(words)):
        yield


def read_text(name: str, file: Path) -> str:
    """A file's text, or standard input's, for -; ValueError about `name` if it is none."""
    standard = str(file) == "-"
    try:
        return (sys.stdin.buffer.read() if standard else file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        place = "standard input" if standard else str(file)
        raise ValueError(f"{name}: expected UTF-8 text, got {place} with {error}") from None
