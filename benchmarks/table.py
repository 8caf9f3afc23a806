"""The README's table of benchmarks, from the committed results: `python benchmarks/table.py` writes it anew.

A row for each benchmark of `regard bench`, a column for each instruction set. A result that is not committed is "–".
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.commands.suite import SUITE
from regard.core.files import write_text

ROOT = Path(__file__).parents[1]
COLUMNS = {"AVX-512": ("", "models", "generation", "training"), "AVX2, imitated": ("avx2",)}
"""Folders of results, the first that has a benchmark counts."""
BEGIN, END = "<!-- benchmark table -->\n", "\n<!-- end of the table -->"


def table() -> str:
    """The table, in Markdown."""
    columns = [_results(folders) for folders in COLUMNS.values()]
    lines = [f"| work | peer | {' | '.join(COLUMNS)} | goal |", f"|---|---|{'---|' * len(COLUMNS)}---|"]
    for name, bench in SUITE.items():
        cells = [_cell(results.get(name)) for results in columns]
        goal = "" if bench.goal is None else f"{bench.goal:g}×"
        lines.append(f"| {bench.title} | {bench.peer} | {' | '.join(cells)} | {goal} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """The README with the table as it should be."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def _results(folders: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for folder in reversed(folders) for result in _read(folder)}


def _read(folder: str) -> Iterator[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / folder / "cpu.json"
    if path.is_file():
        yield from json.loads(path.read_text())["results"]


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "–"
    note = f" ({result['note']})" if result["note"] else ""
    return f"{result['ratio']:.2f}×{note}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    write_text(readme, with_table(readme.read_text()))
