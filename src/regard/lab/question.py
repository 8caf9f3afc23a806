"""Questions of worksheets, and `check`, which says whether an answer is right, or what is wrong with it.

A question is a function that takes an answer and returns what is wrong with it, or "" if the answer is right. It
compares with what the library computes at that moment: no expected answer is written down. The answer that a
teacher's sheet shows is code, and goes through the same function.
"""

import pkgutil
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from html import escape
from importlib import import_module

from regard.core.display import Html
from regard.lab import questions as folder

BLANK = "not answered yet"
"""What graders return for an answer that still has the dots of its sheet."""
_REGISTERED: "dict[str, Question]" = {}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, where it comes from, and what checks its answers."""

    name: str
    tasks: tuple[str, ...]
    """The tasks of documents that it follows: `003.1c` is question 1 (c) of document 003 (lab/documents.py)."""
    text: str
    """Markdown, with LaTeX between dollar signs."""
    begin: str
    """The code that a student's sheet has: a `def`, whose body is to be written, or nothing."""
    solution: str
    """An expression, or the body of the `def` in `begin`."""
    points: int
    wrong: Callable[[object], str] = field(repr=False)

    @property
    def topic(self) -> str:
        return self.name.partition(".")[0]

    @property
    def variable(self) -> str:
        """The name that an answer has in a sheet."""
        defined = re.match(r"(?:def|class) (\w+)", self.begin)
        return defined[1] if defined else self.name.replace(".", "_")


@dataclass(frozen=True, kw_only=True, repr=False)
class Mark:
    """Whether an answer is right, and if not, why. It is true if the answer is right, so that `assert` works.

    >>> from regard import lab
    >>> lab.check("scaling.3", 8.0)
    scaling.3: this is √d; scores are multiplied by its reciprocal
    >>> bool(lab.check("scaling.3", 0.125))
    True
    """

    question: str
    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return f"{self.question}: {self.message}"

    def _repr_html_(self) -> Html:
        colour, sign = ("#2e7d32", "✓") if self.right else ("#c62828", "✗")
        return Html(
            f'<p><b style="color:{colour}">{sign} {escape(self.question)}</b> '
            f'<span style="white-space:pre-wrap">{escape(self.message)}</span></p>'
        )


def question(
    name: str, *, tasks: Sequence[str], text: str, solution: str, begin: str = "", points: int = 1
) -> Callable[[Callable[[object], str]], Callable[[object], str]]:
    """Register the function below it, which says what is wrong with an answer, as a question."""

    def register(wrong: Callable[[object], str]) -> Callable[[object], str]:
        if name in _REGISTERED:
            raise ValueError(f"question: expected a new name, got {name!r} twice")
        _REGISTERED[name] = Question(
            name=name, tasks=tuple(tasks), text=text, begin=begin, solution=solution, points=points, wrong=wrong
        )
        return wrong

    return register


@cache
def questions() -> dict[str, Question]:
    """All questions by name.

    >>> questions()["scaling.3"].tasks
    ('000.1a', '001.4', '003.1c')
    """
    for module in pkgutil.iter_modules(folder.__path__):
        import_module(f"{folder.__name__}.{module.name}")
    return dict(sorted(_REGISTERED.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[str, int]:
    topic, _, number = name.partition(".")
    return topic, int(number)


def check(name: str, answer: object) -> Mark:
    """Check an answer to a question of a worksheet (`regard lab sheet`) against the library.

    The answer may be a number, text, a tensor, a function, a module or a dict of these, as the question asks; a wrong
    one of any type is not an error, but gets a message.

    >>> from regard import lab
    >>> lab.check("kernel.2", lambda D: D**2)
    kernel.2: these are all products of two entries, x₁x₂ and x₂x₁ apart, and nothing of lower degree
    >>> lab.check("kernel.2", lambda D: (D + 1) * (D + 2) // 2).right
    True
    """
    if name not in questions():
        near = get_close_matches(str(name), questions(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(questions())}"
        raise ValueError(f"question: expected the name of a question, got {name!r}; {hint}")
    with warnings.catch_warnings():
        # Automatic graders take a line on stderr for a failure.
        warnings.simplefilter("ignore")
        message = questions()[name].wrong(answer)
    return Mark(question=name, right=not message, message=message or "right")
