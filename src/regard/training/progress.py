"""The progress of a run: a bar in a terminal, a line that is updated in a notebook."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.training.loop import Report

PAUSE = 0.2
"""Seconds between two updates of a notebook's line."""
LOGGED = 30.0
"""Seconds between two lines about steps in a log."""


@contextmanager
def progress(name: str, steps: int, *, log: bool = False) -> Iterator[Callable[["Report"], None]]:
    """Show reports on standard error; pass the function it yields to `train` as `watch`.

    Evaluations are printed as lines. Where standard error is neither a terminal nor a notebook, nothing is shown, or
    with `log` these lines, and one about the first step and then about steps twice a minute.

    >>> from regard.training import Report
    >>> from regard.training.progress import progress
    >>> with progress("translate", steps=10) as watch:
    ...     watch(Report(step=1, steps=10, loss=2.5))
    """
    if type(sys.stderr).__module__.startswith("ipykernel."):
        yield _Line(name, steps).show
    elif sys.stderr.isatty():
        with _bar(name, steps) as watch:
            yield watch
    elif log:
        yield _Log().show
    else:
        yield lambda report: None


def status(report: "Report") -> str:
    """The newest loss and the speed, once there is a loss.

    >>> from regard.training import Report
    >>> from regard.training.progress import status
    >>> status(Report(step=0, steps=10)), status(Report(step=1, steps=10, loss=2.5, tokens_per_second=1200))
    ('', 'loss 2.500  1,200 tokens/s')
    """
    return "" if math.isnan(report.loss) else f"loss {report.loss:.3f}  {report.tokens_per_second:,.0f} tokens/s"


def lines(report: "Report") -> list[str]:
    """The lines to print for a report: a message, or an evaluation and its samples.

    >>> from regard.training import Report
    >>> from regard.training.progress import lines
    >>> lines(Report(step=5, steps=10, kind="evaluated", results={"loss": 2.25}, samples=("un → one",)))
    ['step 5: loss 2.25; 0 tokens/s', '    un → one']
    """
    words = [report.message] if report.message else []
    if report.kind == "evaluated":
        results = ", ".join(f"{name} {value:.4g}" for name, value in report.results.items())
        words.append(f"step {report.step:,}: {results}; {report.tokens_per_second:,.0f} tokens/s")
        words += [f"    {sample}" for sample in report.samples]
    return words


def _print(words: list[str]) -> None:
    for line in words:
        print(line, file=sys.stderr, flush=True)


class _Log:
    """Lines of a log: of the first step, and then twice a minute."""

    def __init__(self) -> None:
        self.last = -math.inf

    def show(self, report: "Report") -> None:
        words, now = lines(report), time.monotonic()
        if report.kind == "step" and status(report) and now - self.last >= LOGGED:
            self.last = now
            words.append(f"step {report.step:,} of {report.steps:,}: {status(report)}{_left(report)}")
        _print(words)


def _left(report: "Report") -> str:
    """The time that is left, if it is a minute or more."""
    minutes = report.seconds / max(1, report.step) * (report.steps - report.step) / 60
    return f"  {minutes:,.0f} min left" if minutes >= 1 else ""


class _Line:
    """A line that is overwritten: a notebook supports a carriage return, but not moving up a line."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.last = name, steps, -math.inf

    def show(self, report: "Report") -> None:
        words, now = lines(report), time.monotonic()
        if words or report.kind == "end" or report.step == self.steps or now - self.last >= PAUSE:
            self.last = now
            _print([f"\r{line:<100}" for line in words])
            line = f"{self.name}: {report.step:,} of {self.steps:,} steps  {status(report)}"
            print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)


@contextmanager
def _bar(name: str, steps: int) -> Iterator[Callable[["Report"], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    # Leave standard output alone: rich would redirect what is printed meanwhile to standard error.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=steps)

        def watch(report: "Report") -> None:
            bar.update(task, completed=report.step, description=status(report))
            for line in lines(report):
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield watch
