"""The README's tables, made from the committed results: `python benchmarks/table.py` updates them.

The table of benchmarks has a row for each benchmark of `regard bench`, and a column for each instruction set; a result
that is not committed is "–". The table of attentions is that of mechanisms.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mechanisms
from regard.commands.suite import SUITE
from regard.core.files import write_text

ROOT = Path(__file__).parents[1]
COLUMNS = {"AVX-512": ("",), "AVX2, imitated": ("avx2",)}
"""Folders of results by column; the first folder that has a benchmark counts."""


def benchmarks() -> str:
    """The table of benchmarks, in Markdown."""
    columns = [_results(folders) for folders in COLUMNS.values()]
    lines = [f"| work | peer | {' | '.join(COLUMNS)} | goal |", f"|---|---|{'---|' * len(COLUMNS)}---|"]
    for name, bench in SUITE.items():
        cells = [_cell(results.get(name)) for results in columns]
        goal = "" if bench.goal is None else f"{bench.goal:g}×"
        lines.append(f"| {bench.title} | {bench.peer} | {' | '.join(cells)} | {goal} |")
    return "\n".join(lines)


def attentions() -> str:
    """The table of attentions, in Markdown."""
    return mechanisms.table(json.loads(mechanisms.OUT.read_text()))


TABLES = {
    ("<!-- benchmark table -->", "<!-- end of the table -->"): benchmarks,
    ("<!-- attention table -->", "<!-- end of the attention table -->"): attentions,
}
"""The comments around a table in the README, and the function that makes it."""


def with_tables(readme: str) -> str:
    """The README with its tables replaced by current ones."""
    for (begin, end), table in TABLES.items():
        if begin in readme:
            before, rest = readme.split(begin)
            readme = f"{before}{begin}\n{table()}\n{end}{rest.split(end, 1)[1]}"
    return readme


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
    write_text(readme, with_tables(readme.read_text()))
