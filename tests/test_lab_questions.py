"""Questions of worksheets: right answers are right, known mistakes get their sentence, nonsense is never accepted."""

import itertools

import pytest

from lab_mistakes import MODULE, NONSENSE, WRITTEN, mistakes, spoilt, value
from regard import lab
from regard.lab.question import BLANK, questions
from regard.lab.sheet import answer_code
from regard.lab.tasks import TASKS

NAMES = list(questions())
SIGNLESS = ("kernel.3",)
"""Questions whose right answers stay right with another sign: a feature map."""


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_right_and_the_blank_is_not_answered(name):
    question = questions()[name]
    mark = lab.check(name, value(question))
    assert mark, mark
    assert mark.message == "right"
    blank = lab.check(name, value(question, f"from math import *\n{answer_code(question, solution=False)}"))
    assert not blank
    assert blank.message == BLANK


@pytest.mark.parametrize("name", NAMES)
def test_each_known_mistake_gets_its_sentence(name, monkeypatch):
    for answer, sentence in mistakes(questions()[name], monkeypatch):
        mark = lab.check(name, answer)
        assert not mark, sentence
        assert sentence in mark.message


@pytest.mark.parametrize(("name", "code", "words"), WRITTEN, ids=range(len(WRITTEN)))
def test_written_mistakes_get_their_sentence(name, code, words):
    mark = lab.check(name, value(questions()[name], f"import torch\n{code}"))
    assert not mark
    assert words in mark.message


@pytest.mark.parametrize(("part", "other", "words"), MODULE, ids=range(len(MODULE)))
def test_a_layer_is_told_which_part_of_it_is_wrong(part, other, words):
    question = questions()["heads.6"]
    assert part in question.solution
    mark = lab.check("heads.6", value(question, question.solution.replace(part, other)))
    assert bool(mark) == (not words)
    assert words in mark.message


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_never_accepted_and_raises_nothing(name):
    solution = value(questions()[name])
    answers = dict(NONSENSE)
    if isinstance(solution, dict):
        # In turn, so that every entry gets some of them, and all questions together all of them.
        turn = itertools.cycle(solution)
        answers = {label: {**solution, next(turn): answer} for label, answer in NONSENSE.items()}
        answers["a list"] = list(NONSENSE.values())
    for label, answer in answers.items():
        mark = lab.check(name, answer)
        assert not mark, label
        assert 0 < len(mark.message) < 400, label
        assert repr(mark), label


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_with_another_sign_factor_shape_or_type_is_not_accepted(name):
    solution = value(questions()[name])
    for place, answer in enumerate(spoilt(solution)):
        if name not in SIGNLESS or place > 0:
            mark = lab.check(name, answer)
            assert not mark, place
            assert mark.message


CHOICES = [question for question in questions().values() if "\na) " in question.text and not question.begin]


@pytest.mark.parametrize("question", CHOICES, ids=lambda question: question.name)
def test_only_one_choice_of_letters_is_right(question):
    options = [line[0] for line in question.text.splitlines() if line[1:3] == ") "]
    choices = ["".join(chosen) for size in range(len(options) + 1) for chosen in itertools.combinations(options, size)]
    assert [choice for choice in choices if lab.check(question.name, choice)] == [value(question)]
    assert lab.check(question.name, list(value(question).upper()))


def test_every_task_has_a_question_and_every_question_a_task():
    tasks = [task for question in questions().values() for task in question.tasks]
    assert set(tasks) == set(TASKS)


def test_an_answer_is_checked_by_what_the_library_computes(monkeypatch):
    right = value(questions()["scaling.3"])
    monkeypatch.setattr("regard.core.mechanisms.softmax.Softmax.scale", lambda self, length: 0.5)
    assert lab.check("scaling.3", 0.5)
    assert not lab.check("scaling.3", right)


def test_an_unknown_question_is_one_error_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"got 'scalin.1'; did you mean scaling.1\?"):
        lab.check("scalin.1", 3)


def test_a_mark_is_shown_as_text_in_a_notebook():
    mark = lab.check("argmax.1", "<script>")
    assert "&lt;script&gt;" in mark._repr_html_()
    assert "<script>" not in mark._repr_html_()
