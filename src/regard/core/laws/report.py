"""The result of a check: an outcome for each cell, and all of them as a report."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from regard.core.display import Html, folded, table
from regard.core.laws.case import Case
from regard.core.laws.statements import LAWS

Outcome = Literal["held", "broken", "not applicable"]
MOST_BROKEN = 3
"""Broken cells that a report's `repr` shows."""
MOST_ROWS = 20
"""Broken cells that a notebook shows."""


@dataclass(frozen=True)
class Cell:
    """A law under one mask, grouping of heads and dtype, with its outcome: held, broken or not applicable."""

    law: str
    mask: str
    heads: str
    dtype: str
    outcome: Outcome
    reason: str = ""
    counterexample: Case | None = None
    """The smallest case that breaks the law."""

    @property
    def smallest(self) -> str:
        """The counter-example as text; empty if there is none."""
        drawn = {} if self.counterexample is None else self.counterexample.drawn()
        return ", ".join(f"{name}={value}" for name, value in drawn.items())

    def to_dict(self) -> dict[str, Any]:
        """The cell as JSON has it; of the counter-example what the cell does not say already."""
        drawn = None if self.counterexample is None else self.counterexample.drawn()
        return {**asdict(self), "counterexample": drawn}


@dataclass(frozen=True, repr=False)
class Report:
    """The outcome of `check`. Its `repr` is a few lines; `print` it for every law, or take `cells` and `to_dict()`.

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
        return {"mechanism": self.mechanism, "ok": self.ok, "cells": [cell.to_dict() for cell in self.cells]}

    @property
    def heading(self) -> str:
        """The mechanism, and whether it keeps every law."""
        return f"{self.mechanism}: {'every law holds' if self.ok else 'BROKEN'}"

    def rows(self) -> list[dict[str, str]]:
        """A row of a table for each law: its outcome, in how many of the cells it holds, and what it says."""
        rows = []
        for law in dict.fromkeys(cell.law for cell in self.cells):
            outcome, cells = _state([cell for cell in self.cells if cell.law == law])
            rows.append({"law": law, "outcome": outcome, "cells": cells, "statement": LAWS[law].statement})
        return rows

    def notes(self) -> list[str]:
        """Why laws do not apply, and where they are broken."""
        laws: dict[str, dict[str, None]] = {}  # ordered, without repetition
        for cell in self.cells:
            if cell.outcome == "not applicable":
                laws.setdefault(cell.reason, {})[cell.law] = None
        reasons = (f"not applicable: {', '.join(names)}: {reason}" for reason, names in laws.items())
        return [*reasons, *map(_broken, self.broken)]

    def __str__(self) -> str:
        laws = [
            f"  {row['law']:<12} {row['outcome']:<7} {row['cells']:>10} cells   {row['statement']}"
            for row in self.rows()
        ]
        return "\n".join([self.heading, *laws, *(f"  {note}" for note in self.notes())])

    def __repr__(self) -> str:
        lines = [self._counts(), *map(_broken, self.broken[:MOST_BROKEN])]
        if len(self.broken) > MOST_BROKEN:
            lines.append(f"… and {len(self.broken) - MOST_BROKEN:,} more: print the report")
        return "\n  ".join([self.heading, *lines])

    def _repr_html_(self) -> Html:
        broken = [
            {
                "law": cell.law,
                "mask": cell.mask,
                "heads": cell.heads,
                "dtype": cell.dtype,
                "reason": cell.reason,
                "smallest counter-example": cell.smallest,
            }
            for cell in self.broken[:MOST_ROWS]
        ]
        more = [f"and {len(self.broken) - MOST_ROWS:,} more broken cells"] if len(self.broken) > MOST_ROWS else []
        reasons = [note for note in self.notes() if note.startswith("not applicable")]
        return Html(
            table(broken, title=self.heading, notes=[self._counts(), *more])
            + folded("Law by law", table(self.rows(), right=("cells",), notes=reasons))
        )

    def _counts(self) -> str:
        outcomes = Counter(cell.outcome for cell in self.cells)
        counts = ", ".join(f"{outcomes[name]:,} {name}" for name in ("held", "broken", "not applicable"))
        return f"{len(self.rows())} laws in {len(self.cells):,} cells: {counts}"


def _state(cells: list[Cell]) -> tuple[str, str]:
    """The outcome of a law over its cells, and how many of those that apply it holds in."""
    holding, excused = (sum(cell.outcome == outcome for cell in cells) for outcome in ("held", "not applicable"))
    state = "broken" if holding + excused < len(cells) else "held" if holding else "-"
    return state, f"{holding} of {len(cells) - excused}"


def _broken(cell: Cell) -> str:
    where = f"{cell.law} under {cell.mask}, {cell.heads}, {cell.dtype}: {cell.reason}"
    return f"{where}\n    smallest: {cell.smallest}" if cell.counterexample else where
