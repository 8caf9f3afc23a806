"""Worksheets: run as notebooks, with solutions and with wrong answers; nbgrader's metadata; nothing leaks."""

import ast
import inspect
import json
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

import lab_mistakes
from regard.commands import main
from regard.lab.documents import DOCUMENTS
from regard.lab.question import BLANK, questions
from regard.lab.sheet import answer_code, chosen, write_sheet
from regard.lab.tasks import TASKS

SHEETS = [name for name in DOCUMENTS if name != "real"]
SPOIL = "import itertools, math, torch\n" + inspect.getsource(lab_mistakes.spoilt)
"""What the wrong notebooks define first; their answers are spoilt solutions."""


def executed(notebook):
    """A notebook's check cells by label, after all of its cells ran in a fresh kernel, whatever they raised."""
    NotebookClient(notebook, timeout=120, allow_errors=True, kernel_name="python3").execute()
    return checks_of(notebook)


def checks_of(notebook):
    return {cell.metadata.nbgrader.grade_id: cell for cell in notebook.cells if cell.metadata.nbgrader.get("grade")}


@pytest.fixture(scope="module")
def sheets(tmp_path_factory):
    """All documents' sheets as one notebook for each kind: a kernel takes seconds to start."""
    folder = tmp_path_factory.mktemp("sheets")
    kinds = {False: [], True: []}
    for solutions, notebooks in kinds.items():
        for name in SHEETS:
            path, _ = write_sheet(name, folder, solutions=solutions)
            notebooks.append(nbformat.read(path, as_version=4))
            nbformat.validate(notebooks[-1])
    return {solutions: dict(zip(SHEETS, notebooks, strict=True)) for solutions, notebooks in kinds.items()}


def joined(notebooks):
    """Sheets as one notebook; what one defined is forgotten before the next. Long tracebacks would take most time."""
    cells = []
    for name, notebook in notebooks.items():
        cells.append(nbformat.v4.new_code_cell("%reset -f\n%xmode Minimal", metadata={"nbgrader": {}}))
        for cell in notebook.cells:
            cell = cell.copy()
            cell.id = f"{name}-{cell.id}"
            cell.metadata.nbgrader.grade_id = f"{name}_{cell.metadata.nbgrader.grade_id}"
            cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells, metadata=next(iter(notebooks.values())).metadata)


def test_with_the_solutions_every_check_of_every_document_is_right(sheets):
    notebook = joined(sheets[True])
    checks = executed(notebook)
    assert len(checks) == sum(len(chosen(name)) for name in SHEETS)
    for cell in checks.values():
        name = re.search(r'check\("(.*?)"', cell.source)[1]
        assert "".join(output.text for output in cell.outputs) == f"{name}: right\n"
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and "error" in str(cell.outputs)]


def test_without_answers_and_with_wrong_ones_every_check_fails_and_says_why(sheets):
    """A sheet with spoilt solutions, after one as students get it. tests/test_lab_questions.py spoils every answer."""
    wrong = joined({"003": sheets[True]["003"]})
    for cell in wrong.cells:
        label = cell.metadata.nbgrader.get("grade_id", "")
        if label.endswith("setup"):
            cell.source += f"\n\n{SPOIL}"
        if label.endswith("_answer"):
            (name,) = re.findall(
                r"lab\.check\(.*, (\w+)\)", checks_of(wrong)[label.replace("_answer", "_check")].source
            )
            # A feature map with another sign is right, too.
            cell.source += f"\n{name} = spoilt({name})[{1 if name == 'phi' else 0}]"
    blank = joined({"blank": sheets[False]["003"]})
    checks = executed(nbformat.v4.new_notebook(cells=[*blank.cells, *wrong.cells], metadata=wrong.metadata))
    assert len(checks) == 2 * len(chosen("003"))
    for label, cell in checks.items():
        (error,) = cell.outputs
        assert error.ename == "AssertionError", label
        assert (error.evalue == BLANK) == label.startswith("blank"), (label, error.evalue)


def test_cells_have_the_metadata_of_nbgrader(sheets):
    for solutions, notebooks in sheets.items():
        for name, notebook in notebooks.items():
            graded = [cell.metadata.nbgrader for cell in notebook.cells]
            labels = [metadata.grade_id for metadata in graded]
            assert len(set(labels)) == len(labels)
            assert all(re.fullmatch(r"[A-Za-z0-9_-]+", label) for label in labels)
            assert {metadata.schema_version for metadata in graded} == {3}
            points = 0
            for cell, metadata in zip(notebook.cells, graded, strict=True):
                kind = (metadata.grade, metadata.locked, metadata.solution, metadata.task)
                if metadata.grade_id.endswith("_answer"):
                    assert kind == (False, False, True, False)
                    assert ("### BEGIN SOLUTION" in cell.source) == solutions
                elif metadata.grade_id.endswith("_check"):
                    assert kind == (True, True, False, False)
                    points += metadata.points
                else:
                    assert kind == (False, True, False, False)
                    assert "points" not in metadata
            assert points == sum(question.points for question in chosen(name))


def test_the_students_sheet_has_no_solution_in_either_form(tmp_path):
    topics = dict.fromkeys(question.topic for question in questions().values())
    for name in [*SHEETS, *topics]:
        texts = [path.read_text(encoding="utf-8") for path in write_sheet(name, tmp_path)]
        cells = json.loads(texts[0])["cells"]
        answers = {cell["metadata"]["nbgrader"]["grade_id"]: "".join(cell["source"]) for cell in cells}
        for question in chosen(name):
            assert answers[f"{question.name.replace('.', '_')}_answer"] == answer_code(question, solution=False)
            lines = [line.strip() for line in question.solution.splitlines() if len(line.strip()) > 12]
            lines = [line for line in lines if line not in question.begin]
            plain = json.loads(texts[0])
            whole = "\n".join("".join(cell["source"]) for cell in plain["cells"])
            assert not [line for line in lines if line in whole or line in texts[1]], question.name
        assert "SOLUTION" not in "".join(texts)


def test_a_question_does_not_say_its_answer():
    for question in questions().values():
        solution = question.solution
        if len(solution) > 8 and not re.fullmatch(r"return \w+", solution):
            assert solution.removeprefix("return ") not in question.text, question.name
        if not question.begin and not solution.startswith('"'):
            # A number: it does not stand in the question.
            number = f"{lab_mistakes.value(question)}"
            assert not re.search(rf"(?<![\d.,(]){re.escape(number)}(?![\d.,)])", question.text) or len(number) == 1


def test_the_markdown_has_every_question_with_its_check(tmp_path):
    for solutions in (False, True):
        _, path = write_sheet("003", tmp_path, solutions=solutions)
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {DOCUMENTS['003']}\n")
        blocks = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
        for block in blocks:
            ast.parse(block)
        assert len(blocks) == 1 + 2 * len(chosen("003"))
        for question in chosen("003"):
            assert question.text in text
            assert f'rg.lab.check("{question.name}", {question.variable})' in text
            assert (question.solution.splitlines()[0] in text) or not solutions


def test_a_document_has_its_tasks_in_order_and_a_topic_its_questions():
    for name in SHEETS:
        tasks = [task for task in TASKS if task.startswith(name)]
        asked = [task for question in chosen(name) for task in question.tasks]
        assert [task for task in tasks if task not in asked] == []
    assert [question.name for question in chosen("masks")] == ["masks.1", "masks.2", "masks.3"]
    assert [question.name for question in chosen("masks.2")] == ["masks.2"]
    assert {question.topic for question in chosen("printed_decoding")} >= {"decoding"}
    with pytest.raises(ValueError, match=r"got 'mask'; did you mean masks\?"):
        chosen("mask")


def run(monkeypatch, *words):
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["regard", "lab", "sheet", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0


def test_the_command_writes_both_files_for_each_sheet_and_nothing_for_a_wrong_name(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "scaling", "004", "--solutions", "--out", tmp_path / "new") == 0
    names = [f"sheet-{name}-solutions.{form}" for name in ("scaling", "004") for form in ("ipynb", "md")]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)
    assert run(monkeypatch, "scaling", "nothing", "--out", tmp_path / "none") != 0
    assert "expected a document, a topic or an experiment with questions, got 'nothing'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
