"""The laws of every mechanism, as property tests on random shapes: output, KV cache, weights and cost must agree.

`check(mechanism)` runs each law for each mask, grouping of heads and dtype: a cell. In a cell the law holds, is broken
(with the smallest counter-example that was found) or does not apply, with a reason. Our mechanisms and a user's are
checked in the same way.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from regard.core.extras import needed_for
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import DTYPES, HEADS, LENGTH_PAIRS, MASKS, plain_output
from regard.core.laws.report import Cell, Report
from regard.core.laws.statements import LAWS
from regard.core.tensors import probe

Progress = Callable[[str], object]


def check(
    mechanism: Mechanism,
    *,
    laws: Iterable[str] | None = None,
    masks: Iterable[str] | None = None,
    heads: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    qk_length: int | None = None,
    device: str = "cpu",
    examples: int = 3,
    progress: Progress | None = None,
) -> Report:
    """Run every law on a mechanism, or the chosen ones, on random shapes; `examples` for each cell.

    `qk_length` is for a mechanism that accepts a single head dimension, such as a learned feature map; its tensors are
    converted to each dtype. `device` is where the laws run: a GPU has other paths. `progress` is called with the name
    of each cell before it runs; by default there is a progress bar if standard error is a terminal, and a line with a
    counter in a notebook. Every law runs once before any runs a second time, so that a broken law shows within seconds.

    >>> import regard as rg
    >>> print(rg.check(rg.Elu(), laws=["groups"], masks=["causal"], dtypes=["float64"]))
    Elu(): every law holds
      groups       held        2 of 2 cells   query head h reads key/value head h // (H // G)
      not applicable: groups: every query head has keys of its own
    """
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism: expected a mechanism like rg.Softmax(), got {mechanism!r}")
    for name, number in (("examples", examples), ("qk_length", qk_length)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}: expected a whole number of at least 1, got {number!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # how torch reports a missing device
        raise ValueError(f"device: expected one that torch has here, got {device!r}") from error
    chosen = _picked("laws", laws, LAWS)
    places = list(
        product(_picked("masks", masks, MASKS), _picked("heads", heads, HEADS), _picked("dtypes", dtypes, DTYPES))
    )
    lengths = LENGTH_PAIRS if qk_length is None else tuple((qk_length, value) for _, value in LENGTH_PAIRS)
    _check_lengths(mechanism, lengths)

    from regard.core.laws.search import nothing_kept, search  # hypothesis takes a while to load

    cells: dict[tuple[str, ...], Cell] = {}
    with (
        nothing_kept(),
        _shown(len(chosen) * len(places), cells) if progress is None else _reported_to(progress) as begin,
    ):
        for place in places:
            for law in chosen:
                begin(", ".join((law, *place)))
                cells[law, *place] = search(LAWS[law], mechanism, *place, examples, lengths, device)
    return Report(repr(mechanism), tuple(cells[law, *place] for law in chosen for place in places))


def count_cells() -> int:
    """The number of cells in a full check of one mechanism."""
    return len(LAWS) * len(MASKS) * len(HEADS) * len(DTYPES)


def _picked(name: str, names: Iterable[str] | None, table: dict[str, Any]) -> Sequence[str]:
    chosen = list(table) if names is None else [names] if isinstance(names, str) else list(names)
    for choice in chosen:
        if choice not in table:
            raise ValueError(f"{name}: expected some of {', '.join(table)}, got {choice!r}")
    return chosen


def _check_lengths(mechanism: Mechanism, lengths: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError for a mechanism that does not accept the head dimensions of the check."""
    for length in dict.fromkeys(qk_length for qk_length, _ in lengths):
        x = probe(mechanism, (1, 1, 2, length))
        try:
            plain_output(mechanism, x, x, x, None)
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(
                f"qk_length: expected one that {type(mechanism).__name__} takes, got {length}, with which it raises "
                f"{type(error).__name__}: {str(error).splitlines()[0]}; mend its formula or, if it is for heads of one "
                "length, name that length"
            ) from error


@contextmanager
def _reported_to(progress: Progress) -> Iterator[Progress]:
    yield progress


@contextmanager
def _shown(total: int, cells: dict[tuple[str, ...], Cell]) -> Iterator[Progress]:
    """A progress bar on standard error if that is a terminal, or a line in a notebook, with the outcomes so far."""

    def outcomes(name: str) -> str:
        broken = [cell for cell in cells.values() if cell.outcome == "broken"]
        first = f"BROKEN: {broken[0].law}, {broken[0].reason}" if broken else "nothing broken"
        return f"{first}  ({name})"

    if type(sys.stderr).__module__.startswith("ipykernel."):
        # A notebook understands a carriage return, but cannot move up a line, as the bar does at its end.
        shown, known_broken = -math.inf, False

        def show(name: str) -> None:
            nonlocal shown, known_broken
            broken = any(cell.outcome == "broken" for cell in cells.values())
            # Twice a second, and what is broken at once: a notebook that is saved keeps every line.
            if time.monotonic() - shown > 0.5 or broken != known_broken:
                print(f"\r{len(cells)}/{total} {outcomes(name):<100.100}", end="", file=sys.stderr, flush=True)
                shown, known_broken = time.monotonic(), broken

        yield show
        print(f"\r{'':<120}\r", end="", file=sys.stderr, flush=True)
        return
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    with needed_for("a progress bar"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)

        yield lambda name: bar.update(task, completed=len(cells), description=outcomes(name))


__all__ = ["LAWS", "Cell", "Report", "check", "count_cells"]
