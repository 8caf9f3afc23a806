"""The report: every experiment run, as one HTML page, a PDF and a JSON file."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from regard.core.files import write, write_text
from regard.lab.registry import experiments, lookup
from regard.lab.reporting.content import Content
from regard.lab.reporting.page import page
from regard.lab.reporting.paper import paper
from regard.lab.reporting.store import keep, kept, measured
from regard.training.machine import environment


def report(
    names: Sequence[str] = (),
    *,
    folder: str | Path,
    pdf: bool = True,
    restart: bool = False,
    begin: Callable[[str], None] = lambda name: None,
) -> Content:
    """Run experiments at their defaults, all unless named, and write the report to a folder.

    Outcomes that the folder has from before are used again if nothing that they follow from has changed; with
    `restart`, all experiments run. `begin` is called with each name as its turn comes.
    """
    chosen = [lookup(name) for name in names] or list(experiments().values())
    target, outcomes = Path(folder), Path(folder) / "outcomes"
    outcomes.mkdir(parents=True, exist_ok=True)
    machine = environment()
    entries = []
    for experiment in chosen:
        begin(experiment.name)
        entry = None if restart else kept(outcomes, experiment)
        if entry is None:
            entry = measured(experiment.name)
            keep(outcomes, entry)
        entries.append(entry)
    content = Content(entries=entries, environment=machine)
    if pdf:
        write(target / "report.pdf", lambda beside: beside.write_bytes(paper(content)))
    write_text(target / "index.html", page(content, pdf=pdf))
    write_text(target / "report.json", json.dumps(content.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")
    return content
