"""The laws every mechanism keeps, run on random shapes: a public proof that compute, stream, see and count agree.

`check(mechanism)` runs each law for each mask, grouping of heads and dtype: a cell. A cell is held, broken (with the
smallest counter-example found) or does not apply, for a stated reason. Our own mechanisms and a user's are checked
alike.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from regard.call import Call
from regard.laws.case import DTYPES, HEADS, MASKS, Broken, Case
from regard.laws.statements import LAWS, Law
from regard.mechanism import Mechanism


@dataclass(frozen=True)
class Cell:
    """A law under one mask, grouping of heads and dtype, with its outcome: held, broken or not applicable."""

    law: str
    mask: str
    heads: str
    dtype: str
    outcome: str
    reason: str = ""
    counterexample: dict[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """What `check` found. Print it, or take `cells` and `to_dict()`.

    >>> import regard as rg
    >>> report = rg.check(rg.Softmax(), laws=["weights"], masks=["causal"], dtypes=["float32"])
    >>> report.ok, len(report.cells)
    (True, 3)
    """

    mechanism: str
    cells: tuple[Cell, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.outcome == "broken"]

    def to_dict(self) -> dict[str, Any]:
        return {"mechanism": self.mechanism, "ok": self.ok, "cells": [asdict(cell) for cell in self.cells]}

    def __str__(self) -> str:
        lines = [f"{self.mechanism}: {'every law holds' if self.ok else 'BROKEN'}"]
        for law in dict.fromkeys(cell.law for cell in self.cells):
            mine = [cell for cell in self.cells if cell.law == law]
            held, not_applicable = (sum(c.outcome == o for c in mine) for o in ("held", "not applicable"))
            state = "broken" if held + not_applicable < len(mine) else "held" if held else "-"
            lines.append(
                f"  {law:<12} {state:<7} {held:>4} of {len(mine) - not_applicable} cells   {LAWS[law].statement}"
            )
        for reason in dict.fromkeys(c.reason for c in self.cells if c.outcome == "not applicable"):
            lines.append(f"  not applicable: {reason}")
        for cell in self.broken:
            lines.append(f"  {cell.law} under {cell.mask}, {cell.heads}, {cell.dtype}: {cell.reason}")
            if cell.counterexample:
                lines.append(
                    "    smallest: " + ", ".join(f"{name}={value}" for name, value in cell.counterexample.items())
                )
        return "\n".join(lines)


def check(
    mechanism: Mechanism,
    *,
    laws: Iterable[str] | None = None,
    masks: Iterable[str] | None = None,
    heads: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    examples: int = 3,
    progress: Callable[[str], object] | None = None,
) -> Report:
    """Run every law on a mechanism, or the chosen ones, on random shapes; `examples` for each cell.

    `progress` is called with the name of each cell before it runs.

    >>> import regard as rg
    >>> print(rg.check(rg.Elu(), laws=["groups"], masks=["causal"], dtypes=["float64"]))
    Elu(): every law holds
      groups       held       2 of 2 cells   query head h reads key/value head h // (H // G)
      not applicable: every query head has keys of its own
    """
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism: expected a mechanism like rg.Softmax(), got {mechanism!r}")
    if not isinstance(examples, int) or examples < 1:
        raise ValueError(f"examples: expected a whole number of at least 1, got {examples!r}")
    cells = []
    for law in _picked("laws", laws, LAWS):
        for mask in _picked("masks", masks, MASKS):
            for grouping in _picked("heads", heads, HEADS):
                for dtype in _picked("dtypes", dtypes, DTYPES):
                    if progress is not None:
                        progress(f"{law}, {mask}, {grouping}, {dtype}")
                    cells.append(_run(LAWS[law], mechanism, mask, grouping, dtype, examples))
    return Report(repr(mechanism), tuple(cells))


def count_cells() -> int:
    """How many cells a full check of one mechanism has."""
    return len(LAWS) * len(MASKS) * len(HEADS) * len(DTYPES)


def _picked(name: str, wanted: Iterable[str] | None, known: dict[str, Any]) -> Sequence[str]:
    chosen = list(known) if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    for one in chosen:
        if one not in known:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {one!r}")
    return chosen


def _run(law: Law, mechanism: Mechanism, mask: str, heads: str, dtype: str, examples: int) -> Cell:
    probe = Case(mask, heads, dtype, batch=2, queries=8, keys=8, qk_length=4, value_length=4, seed=0)
    reason = _refused(mechanism, probe) or law.excuse(mechanism, probe)
    if reason is not None:
        return Cell(law.name, mask, heads, dtype, "not applicable", reason)
    failing: list[Case] = []
    number = zlib.crc32(f"{law.name} {mask} {heads} {dtype}".encode())
    edge = _edge(law, mechanism, probe, number)
    early: Exception | None = None
    try:
        law.test(mechanism, edge)
    except Exception as error:  # as below
        early = error

    @seed(number)
    @settings(
        max_examples=examples if early is None else 20 * examples,  # broken: look for something smaller
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(_cases(law, mechanism, mask, heads, dtype))
    def hold(case: Case) -> None:
        try:
            law.test(mechanism, case)
        except Exception:
            failing.append(case)
            raise

    try:
        hold()
    except Exception as error:  # whatever a user's mechanism raises is the counter-example we are looking for
        if not failing:
            raise
        return _broken(error, failing[-1], law)
    return Cell(law.name, mask, heads, dtype, "held") if early is None else _broken(early, edge, law)


def _broken(error: Exception, case: Case, law: Law) -> Cell:
    message = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
    smallest = {name: value for name, value in asdict(case).items() if name not in ("mask", "heads", "dtype")}
    return Cell(law.name, case.mask, case.heads, case.dtype, "broken", message.split("\n")[0], smallest)


def _edge(law: Law, mechanism: Mechanism, probe: Case, number: int) -> Case:
    """A case at one of the law's lengths, by turns over the cells, so that every edge is met and not left to chance."""
    length = law.lengths[number % len(law.lengths)]
    more = 0 if law.square or not mechanism.by_pairs else number % 4
    value_length = 3 if mechanism.by_pairs else 4
    return replace(probe, queries=length, keys=length + more, value_length=value_length, seed=number % 10**6)


def _cases(law: Law, mechanism: Mechanism, mask: str, heads: str, dtype: str) -> st.SearchStrategy[Case]:
    def build(batch: int, queries: int, more: int, lengths: tuple[int, int], number: int) -> Case:
        square = law.square or not mechanism.by_pairs
        keys = queries if square else max(0, queries + more)
        value_length = lengths[1] if mechanism.by_pairs else lengths[0]
        return Case(mask, heads, dtype, batch, queries, keys, lengths[0], value_length, number)

    return st.builds(
        build,
        batch=st.sampled_from((1, 2, 3, 0)),
        queries=st.sampled_from(law.lengths),
        more=st.sampled_from((0, 3, 40, -2)),
        lengths=st.sampled_from(((4, 3), (1, 1), (8, 8), (5, 17))),
        number=st.integers(0, 10**6),
    )


def _refused(mechanism: Mechanism, case: Case) -> str | None:
    q, k, v = case.tensors()
    return mechanism.refuses(Call(mechanism, q, k, v, case.rule()))


__all__ = ["LAWS", "Cell", "Report", "check", "count_cells"]
