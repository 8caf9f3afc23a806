"""Outcomes on disk: written as an experiment ends, and read where a report that was stopped goes on."""

import json
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from inspect import getfile
from pathlib import Path
from time import perf_counter
from typing import Any

from regard.core.files import write_text
from regard.lab.drawing import svg
from regard.lab.experiment import Check, Experiment, Measurements, Outcome
from regard.lab.registry import lookup, run
from regard.training.machine import environment

PACKAGE = Path(__file__).parents[2]
SHEETS = ("lab/question", "lab/answers", "lab/sheet", "lab/tasks")
OTHERS = ("lab/experiments/", "lab/reporting/", *SHEETS, "explorer/", "commands/")
"""What no outcome depends on; the file of its own experiment is hashed by itself."""
GROUPS = {"the statement": "statement", "under the condition": "within", "in its place": "instead"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An outcome with its picture, as a page has it."""

    outcome: Outcome
    picture: str
    """SVG; empty where the experiment did not run."""


def measured(name: str) -> Entry:
    """Run an experiment at its defaults, and draw its picture; one that raises is not run, and says why."""
    begin = perf_counter()
    try:
        outcome = run(name)
        return Entry(outcome=outcome, picture=svg(outcome.figure, name) if outcome.measurements else "")
    except Exception as error:  # the other experiments of a report are worth having
        experiment = lookup(name)
        reason = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Entry(
            outcome=Outcome(
                experiment=experiment,
                parameters=experiment.arguments(),
                measurements=None,
                missing=reason,
                seconds=perf_counter() - begin,
            ),
            picture="",
        )


def keep(folder: Path, entry: Entry) -> None:
    """Write an outcome to a folder; one without measurements is not kept, since weights can be installed."""
    experiment = entry.outcome.experiment
    if entry.outcome.measurements is None:
        return
    content = {"fingerprint": fingerprint(experiment), "outcome": entry.outcome.to_dict(), "picture": entry.picture}
    write_text(folder / f"{experiment.name}.json", json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def kept(folder: Path, experiment: Experiment) -> Entry | None:
    """The outcome that a folder has; None if there is none of this experiment as it is now, on this machine."""
    try:
        content = json.loads((folder / f"{experiment.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if content["fingerprint"] != fingerprint(experiment):
        return None
    return Entry(outcome=_outcome(experiment, content["outcome"]), picture=content["picture"])


def fingerprint(experiment: Experiment) -> str:
    """A hash of what an outcome follows from: the experiment's file, its parameters, the library, the machine.

    >>> from regard import lab
    >>> len(fingerprint(lab.experiments()["scaling"]))
    64
    """
    source = Path(getfile(experiment.measure)).read_text(encoding="utf-8")
    return sha256(json.dumps([source, experiment.arguments(), _library(), _machine()]).encode()).hexdigest()


@cache
def _library() -> str:
    """A hash of the library's source: the version alone stays the same while it is edited."""
    digest = sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.relative_to(PACKAGE).as_posix().startswith(OTHERS):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _machine() -> dict[str, Any]:
    return {name: value for name, value in environment().items() if name not in ("commit", "date")}


def _outcome(experiment: Experiment, content: dict[str, Any]) -> Outcome:
    """An outcome from its JSON; the verdict follows from its numbers again."""
    groups: dict[str, list[Check]] = {name: [] for name in GROUPS.values()}
    for check in content["checks"]:
        groups[GROUPS[check["of"]]].append(
            Check(
                name=check["name"],
                predicted=float(check["predicted"]),
                measured=float(check["measured"]),
                tolerance=float(check["tolerance"]),
                rule=check["rule"],
                interval=check["interval"] and tuple(map(float, check["interval"])),
                timed=check["timed"],
            )
        )
    return Outcome(
        experiment=experiment,
        parameters=experiment.arguments(),
        measurements=Measurements(
            **{name: tuple(checks) for name, checks in groups.items()},
            table=tuple(content["table"]),
            draw=lambda: run(experiment.name).figure,
        ),
        seconds=content["seconds"],
    )
