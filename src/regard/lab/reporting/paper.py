"""The report as a PDF, by Typst: no network, and no fonts but those of typst and matplotlib."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from regard.core.extras import needed_for
from regard.lab.reporting.content import LISTS, MEANING, TERMS, Content, Section
from regard.lab.reporting.formula import typst as formula
from regard.lab.reporting.markup import nodes
from regard.lab.reporting.page import TEMPLATES, seconds, symbol

with needed_for("the lab's report", "lab"):
    import typst
    from matplotlib import get_data_path

COLOURS = {
    "holds": "#00704e",
    "condition": "#8a5600",
    "fails": "#b0361a",
    "measured": "#0b5f9c",
    "undecided": "#566270",
    "missing": "#566270",
}
MOST_CHECKS, MOST_ROWS = 10, 16
"""Rows of a table on paper; the page has all."""
ORDER = {"failed": 0, "undecided": 1, "measured here": 2, "passed": 3}
"""Which checks come first on paper."""


def paper(content: Content) -> bytes:
    """The PDF of a report."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "page.typ").write_bytes((TEMPLATES / "page.typ").read_bytes())
        (folder / "data.json").write_text(json.dumps(_data(content), ensure_ascii=False), encoding="utf-8")
        for part in ("symbols", "pictures"):
            (folder / part).mkdir()
        for style, colour in COLOURS.items():
            (folder / "symbols" / f"{style}.svg").write_text(symbol(style, colour), encoding="utf-8")
        for entry in content.entries:
            if entry.picture:
                (folder / _picture(entry.outcome.experiment.name)).write_text(entry.picture, encoding="utf-8")
        return typst.compile(
            folder / "page.typ",
            root=folder,
            font_paths=[Path(get_data_path()) / "fonts" / "ttf"],
            ignore_system_fonts=True,
            format="pdf",
        )


def _picture(name: str) -> str:
    return f"pictures/{name}.svg"


def _data(content: Content) -> dict[str, Any]:
    """Everything that the template shows."""
    total = len(content.entries)
    machine = {name: str(value) for name, value in content.environment.items() if value is not None}
    return {
        "title": content.title,
        "lead": content.lead,
        "stamp": " · ".join(filter(None, [machine["date"], f"PyTorch {machine['torch']}", machine.get("commit")])),
        "board_note": content.board_note,
        "counts": [
            {"verdict": verdict, "style": MEANING[verdict][0], "meaning": MEANING[verdict][1]}
            | {"count": count, "share": count / total}
            for verdict, count in content.counts.items()
        ],
        "documents": [
            {
                "number": document["number"],
                "title": document["title"],
                "sections": [_section(section) for section in document["sections"]],
                "elsewhere": [
                    {"claim": claim, "name": section.experiment.name, "title": section.experiment.title}
                    | {"style": section.style, "first": section.experiment.claims[0]}
                    for claim, section in document["elsewhere"]
                ],
            }
            for document in content.documents
        ],
        "terms": TERMS,
        "environment": machine | {"all experiments": seconds(content.seconds)},
    }


def _section(section: Section) -> dict[str, Any]:
    experiment, outcome = section.experiment, section.outcome
    several = len(section.headlines) > 1
    return {
        "name": experiment.name,
        "title": experiment.title,
        "claims": list(experiment.claims),
        "verdict": outcome.verdict,
        "style": section.style,
        "statement": nodes(experiment.statement),
        "formula": formula(experiment.formula),
        "first_words": section.first_words,
        "reading": nodes(outcome.reading),
        "picture": _picture(experiment.name) if section.entry.picture else "",
        "headlines": [{**row, "of": row["of"] if several else ""} for row in section.headlines],
        "groups": [{"title": _heading(group), "grid": _checks(group["rows"])} for group in section.groups],
        "table": _grid(section.table, section.numeric, MOST_ROWS) if section.table else None,
        "command": section.command,
        "file": section.file,
        "seconds": seconds(outcome.seconds) if outcome.measurements else "not run",
    }


def _heading(group: Mapping[str, Any]) -> str:
    return f"{LISTS[group['of']]}: {group['words']}"


def _checks(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Checks as a table: as many as there is room for, those that did not pass first."""
    kept = sorted(rows, key=lambda row: ORDER[row["result"]])[:MOST_CHECKS]
    grid = _grid(kept, ("predicted", "measured", "tolerance", "interval"), len(kept))
    marks = {"failed": "fails", "undecided": "undecided"}
    more = f"and {len(rows) - len(kept)} more on the HTML page." if len(kept) < len(rows) else ""
    return grid | {"marks": [marks.get(row["result"], "") for row in kept], "more": more}


def _grid(rows: Sequence[Mapping[str, str]], right: Sequence[str], most: int) -> dict[str, Any]:
    columns = list(rows[0])
    return {
        "columns": columns,
        "rows": [[row[name] for name in columns] for row in rows[:most]],
        "right": [name in right for name in columns],
        "marks": [""] * len(rows[:most]),
        "more": f"and {len(rows) - most} more rows on the HTML page." if len(rows) > most else "",
    }
