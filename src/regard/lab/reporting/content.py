"""What a report says, as one value for all of its formats: the board, and a section for each experiment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import getfile
from itertools import groupby
from pathlib import Path
from typing import Any

from regard.lab.documents import DOCUMENTS, place
from regard.lab.experiment import Check, Experiment, Outcome, Verdict, number
from regard.lab.reporting.store import PACKAGE, Entry

MEANING: dict[Verdict, tuple[str, str]] = {
    "holds": ("holds", "Every number that follows from the statement was measured."),
    "holds under a condition": ("condition", "The statement as it stands fails; under its condition it holds."),
    "does not hold": (
        "fails",
        "A number that follows from the statement is another, and what holds instead was measured.",
    ),
    "undecided": ("undecided", "The measurements are too few or too coarse to say."),
    "measured here": ("measured", "Times on this machine, which decide nothing about another."),
    "not run": ("missing", "Needs weights that are not installed, or raised an error."),
}
"""The verdicts, each with its name in style sheets and what it means."""
FIRST_WORDS = {
    "holds under a condition": "The condition",
    "does not hold": "What holds instead",
    "not run": "Why",
}

LISTS = {
    "the statement": "What follows from the statement",
    "under the condition": "What follows from it under the condition",
    "in its place": "What is true in its place",
}
"""What each group of checks is of."""
TERMS = {
    "predicted": "The number that follows from the statement. “≥” and “≤” stand before a bound.",
    "measured": "The number that the library gave: its outputs, weights, gradients, counted operations or times.",
    "tolerance": "How far the two may be apart: rounding, or how wide an interval may be on either side.",
    "interval": "Of an estimate from random samples, at a confidence of 99.999 %: the prediction has to be inside.",
    "of the statement": "Checks of the statement as it stands. If they pass, it holds.",
    "under the condition": "Checks of the statement under its condition, if it fails without.",
    "in its place": "Checks of what is true instead, where the statement is wrong.",
    "measured here": "A time. It decides nothing: a busy machine turns no verdict.",
}
"""How to read the checks."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """An experiment as a report shows it."""

    entry: Entry

    @property
    def outcome(self) -> Outcome:
        return self.entry.outcome

    @property
    def experiment(self) -> Experiment:
        return self.entry.outcome.experiment

    @property
    def style(self) -> str:
        """The verdict as style sheets name it."""
        return MEANING[self.outcome.verdict][0]

    @property
    def first_words(self) -> str:
        """What the verdict's reading is."""
        return FIRST_WORDS.get(self.outcome.verdict, "")

    @property
    def file(self) -> str:
        """The experiment's file, from the folder that the package is in."""
        return Path(getfile(self.experiment.measure)).relative_to(PACKAGE.parent).as_posix()

    @property
    def source(self) -> str:
        """The text of that file."""
        return Path(getfile(self.experiment.measure)).read_text(encoding="utf-8")

    @property
    def command(self) -> str:
        """How to run it in a terminal."""
        words = [f"--{name} {' '.join(map(str, _values(value)))}" for name, value in self.outcome.parameters.items()]
        return " ".join([f"regard lab run {self.experiment.name}", *words])

    @property
    def call(self) -> str:
        """How to run it in a notebook."""
        words = [f"{name}={value!r}" for name, value in self.outcome.parameters.items()]
        return f"rg.lab.run({', '.join([repr(self.experiment.name), *words])})".replace("'", '"')

    @property
    def parameters(self) -> list[dict[str, str]]:
        """The parameters as rows: their value in this report, and what they take."""
        return [
            {"parameter": name, "here": " ".join(map(str, _values(value))), "takes": self._takes(name)}
            for name, value in self.outcome.parameters.items()
        ]

    def _takes(self, name: str) -> str:
        return self.experiment.parameters[name].expected()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The checks by what they follow from, each group with its rows and how many passed, of those that decide."""
        rows = groupby(self.outcome.check_rows(), key=lambda row: row["of"])
        return [{"of": of, **_group(list(group))} for of, group in rows]

    @property
    def table(self) -> list[dict[str, str]]:
        """The measured table, as people read numbers."""
        return [{name: cell(value) for name, value in row.items()} for row in self.outcome.table]

    @property
    def numeric(self) -> list[str]:
        """The columns of that table that have numbers alone."""
        rows = self.outcome.table
        return [name for name in (rows[0] if rows else ()) if all(_is_number(row[name]) for row in rows)]

    @property
    def headlines(self) -> list[dict[str, str]]:
        """For each group of checks that the verdict rests on, the check that says most."""
        return [{"of": of, **_words(headline(checks))} for of, checks in self.outcome.groups()]


@dataclass(frozen=True, kw_only=True)
class Content:
    """A whole report."""

    entries: Sequence[Entry]
    environment: Mapping[str, Any]
    title = "Statements about attention, measured"
    board_note = "Of each group of checks the board has the first that failed, or else the one closest to failing."

    @property
    def lead(self) -> str:
        """What the report is, in three sentences."""
        documents = sum(document["number"] != "real" for document in self.documents)
        sources = {0: "trained models show", 1: "a course document says"}
        source = sources.get(documents, f"{documents} course documents say")
        experiments = f"{len(self.entries)} experiments" if len(self.entries) > 1 else "An experiment"
        return (
            f"{experiments} on what {source} about attention. Each measures its statement with the "
            f"library itself. No verdict was written by hand: it follows from {self.checks:,} predicted numbers, "
            "compared with measured ones."
        )

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many statements have each verdict, of those that occur."""
        verdicts = [entry.outcome.verdict for entry in self.entries]
        return {verdict: verdicts.count(verdict) for verdict in MEANING if verdict in verdicts}

    @property
    def seconds(self) -> float:
        """How long the experiments took."""
        return sum(entry.outcome.seconds for entry in self.entries)

    @property
    def checks(self) -> int:
        """How many numbers were compared."""
        return sum(len(entry.outcome.checks) for entry in self.entries)

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The documents with their sections; and their statements that a section of an earlier document measures."""
        sections = [Section(entry=entry) for entry in self.entries]
        return [
            {
                "number": number_,
                "title": title,
                "sections": [s for s in sections if _document(s.experiment.claims[0]) == number_],
                "elsewhere": sorted(
                    (
                        (claim, s)
                        for s in sections
                        for claim in s.experiment.claims[1:]
                        if _document(claim) == number_ != _document(s.experiment.claims[0])
                    ),
                    key=lambda pair: place(pair[0]),
                ),
            }
            for number_, title in DOCUMENTS.items()
            if any(_document(claim) == number_ for s in sections for claim in s.experiment.claims)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {
            "environment": dict(self.environment),
            "counts": self.counts,
            "seconds": round(self.seconds, 3),
            "outcomes": [
                {**entry.outcome.to_dict(), "title": section.experiment.title, "file": section.file}
                for entry, section in ((entry, Section(entry=entry)) for entry in self.entries)
            ],
        }


def _document(claim: str) -> str:
    return claim.partition(".")[0]


def headline(checks: Sequence[Check]) -> Check:
    """The check that says most about a group: the first that failed, else the one that came closest to failing.

    A prediction of 0 says less than another number, and a time says nothing where there are numbers beside it.

    >>> right = [Check(name="a", predicted=1, measured=1.1, tolerance=1), Check(name="b", predicted=9, measured=9)]
    >>> headline(right).name
    'a'
    """
    timeless = [check for check in checks if not check.timed] or list(checks)
    failed = [check for check in timeless if check.result == "failed"]
    return failed[0] if failed else max(timeless, key=lambda check: (check.predicted != 0, _closeness(check)))


def _closeness(check: Check) -> float:
    """How much of what it may be off a check is off, from 0 to 1."""
    low, high = check.interval or (check.measured - check.tolerance, check.measured + check.tolerance)
    room = max(high - low, check.tolerance) / 2
    return min(1.0, abs(check.measured - check.predicted) / room) if 0 < room < float("inf") else 0.0


def _group(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Checks as a table, without a column for intervals if none has one; and how many passed, in words."""
    results = [row["result"] for row in rows if row["result"] != "measured here"]
    dropped = {"of"} if any(row["interval"] for row in rows) else {"of", "interval"}
    words = f"{results.count('passed')} of {len(results)} check{'s' * (len(results) != 1)} passed"
    return {
        "rows": [{name: text for name, text in row.items() if name not in dropped} for row in rows],
        "all passed": results.count("passed") == len(results),
        "words": words if results else "times, measured here",
    }


def _words(check: Check) -> dict[str, str]:
    sign = {"close": "", "at least": "≥ ", "at most": "≤ "}[check.rule]
    return {
        "what": check.name,
        "predicted": sign + number(check.predicted),
        "measured": number(check.measured),
        "result": "measured here" if check.timed else check.result,
    }


def cell(value: object) -> str:
    """A value of a table as people read it.

    >>> cell(4096), cell(0.27971), cell("softmax"), cell(True), cell(None)
    ('4,096', '0.2797', 'softmax', 'yes', '')
    """
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return number(value) if isinstance(value, int | float) else str(value)


def _is_number(value: object) -> bool:
    # Infinities are text in what was read from JSON.
    return isinstance(value, int | float) or value in (None, "inf", "-inf", "nan")


def _values(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple) else (value,)
