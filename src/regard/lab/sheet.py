"""Worksheets: questions as a Jupyter notebook and as Markdown, with cells that check the answers.

A question is three cells: its text, the answer, and its check. Their metadata is nbgrader's (schema version 3, that of
nbgrader 0.6 to 0.9): text and check are locked, a check has points and fails by an AssertionError, and the teacher's
sheet has each solution between `### BEGIN SOLUTION` and `### END SOLUTION`, which `nbgrader generate_assignment`
removes. A check prints a line and returns nothing, because nbgrader takes a returned number for points, and a line on
stderr for a failure.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from regard.core.files import write_text
from regard.lab.documents import DOCUMENTS
from regard.lab.question import Question, questions
from regard.lab.registry import experiments
from regard.lab.tasks import TASKS, covers

Cell = dict[str, Any]
SETUP = "import math\n\nimport torch\n\nimport regard as rg"
HOW = (
    "Replace the dots `...` in the code below each question by your answer, and run the cell with the check. It "
    "compares your answer with what the library computes, and says what is wrong with it."
)
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"


def chosen(name: str) -> list[Question]:
    """The questions of a document ("003"), of a topic or an experiment ("scaling"), or a single one ("scaling.1").

    >>> [question.name for question in chosen("masks")]
    ['masks.1', 'masks.2', 'masks.3']
    """
    of_name = [question for question in questions().values() if name in (question.topic, question.name)]
    if of_name:
        return of_name
    claims = experiments()[name].claims if name in experiments() else ()
    tasks = [task for task in TASKS if task.partition(".")[0] == name or any(covers(claim, task) for claim in claims)]
    of_tasks = [question for task in tasks for question in questions().values() if task in question.tasks]
    if not of_tasks:
        names = [*DOCUMENTS, *dict.fromkeys(question.topic for question in questions().values())]
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
        raise ValueError(f"sheet: expected a document, a topic or an experiment with questions, got {name!r}; {hint}")
    return list(dict.fromkeys(of_tasks))


def write_sheet(name: str, folder: str | Path = ".", *, solutions: bool = False) -> tuple[Path, Path]:
    """Write the worksheet of a document, a topic or an experiment as a notebook and as Markdown; return their paths.

    >>> from tempfile import mkdtemp
    >>> [path.name for path in write_sheet("masks", mkdtemp(), solutions=True)]
    ['sheet-masks-solutions.ipynb', 'sheet-masks-solutions.md']
    """
    target = Path(folder)
    cells = list(_cells(name, solutions))
    target.mkdir(parents=True, exist_ok=True)
    stem = f"sheet-{name}-solutions" if solutions else f"sheet-{name}"
    text = json.dumps(_notebook(cells), indent=1, ensure_ascii=False) + "\n"
    return (
        write_text(target / f"{stem}.ipynb", text),
        write_text(target / f"{stem}.md", _markdown(cells)),
    )


def answer_code(question: Question, *, solution: bool) -> str:
    """The code of an answer's cell: as a student gets it, or with the solution in it.

    >>> print(answer_code(questions()["scaling.3"], solution=True))
    scaling_3 = ...
    ### BEGIN SOLUTION
    scaling_3 = 1 / math.sqrt(64)
    ### END SOLUTION
    """
    begin, last = question.begin, question.begin.rpartition("\n")[2]
    if not begin.startswith(("def ", "class ")):
        begin = begin or f"{question.variable} = ..."
        return _region(begin, f"{question.variable} = {question.solution}", "") if solution else begin
    indent = " " * (len(last) - len(last.lstrip()) + 4)
    if not solution:
        return f"{begin}\n{indent}..."
    if begin.startswith("class "):
        return _region(f"{begin}\n{indent}...\n", question.solution, "")
    return _region(begin, question.solution, indent)


def _region(begin: str, solution: str, indent: str) -> str:
    region = "\n".join([BEGIN, solution, END])
    return f"{begin}\n{textwrap.indent(region, indent)}"


def check_code(question: Question) -> str:
    """The code of a check's cell."""
    return (
        f'result = rg.lab.check("{question.name}", {question.variable})\nassert result, result.message\nprint(result)'
    )


def _cells(name: str, solutions: bool) -> Iterator[Cell]:
    title, sections = _sections(name)
    count = [question for _, members in sections for question in members]
    points = sum(question.points for question in count)
    yield _cell("markdown", "sheet", f"# {title}\n\n{HOW}\n\n{len(count)} questions, {points} points.", locked=True)
    yield _cell("code", "setup", SETUP, locked=True)
    number = 0
    for heading, members in sections:
        for place, question in enumerate(members):
            number += 1
            label = question.name.replace(".", "_")
            plural = "point" if question.points == 1 else "points"
            above = f"## {heading}\n\n" if place == 0 else ""
            text = f"{above}**{number}.** ({question.points} {plural}, `{question.name}`) {question.text}"
            yield _cell("markdown", f"{label}_text", text, locked=True)
            yield _cell("code", f"{label}_answer", answer_code(question, solution=solutions), solution=True)
            yield _cell("code", f"{label}_check", check_code(question), locked=True, points=question.points)


def _sections(name: str) -> tuple[str, list[tuple[str, Sequence[Question]]]]:
    """The title of a sheet, and its questions under the headings of the tasks that they follow."""
    members = chosen(name)
    document = name in DOCUMENTS
    groups: dict[str, list[Question]] = {}
    for question in members:
        task = next(task for task in TASKS if task in question.tasks and (not document or task.startswith(name)))
        groups.setdefault(f"{TASKS[task]} ({task})" if document else TASKS[task], []).append(question)
    title = (
        DOCUMENTS[name] if document else experiments()[name].title if name in experiments() else TASKS[_first(members)]
    )
    return title, list(groups.items())


def _first(members: Sequence[Question]) -> str:
    return next(task for task in TASKS if task in members[0].tasks)


def _cell(
    kind: str, label: str, source: str, *, locked: bool = False, solution: bool = False, points: int | None = None
) -> Cell:
    """A cell with nbgrader's metadata; one with points is a check."""
    grader: Mapping[str, object] = {
        "schema_version": 3,
        "grade": points is not None,
        "locked": locked,
        "solution": solution,
        "task": False,
        "grade_id": label,
        **({} if points is None else {"points": points}),
    }
    lines = source.splitlines(keepends=True)
    cell: Cell = {"cell_type": kind, "id": label.replace("_", "-"), "metadata": {"nbgrader": grader}, "source": lines}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


def _notebook(cells: Sequence[Cell]) -> dict[str, Any]:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _markdown(cells: Sequence[Cell]) -> str:
    texts = ("".join(cell["source"]) for cell in cells)
    blocks = (
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    )
    return "\n\n".join(blocks) + "\n"
