"""What a check gives: an outcome for each cell, and all of them as a report."""

from dataclasses import asdict, dataclass, field
from typing import Any

from regard.core.laws.statements import LAWS


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
