"""An experiment's values: its statement, its parameters, what it measures, and the verdict that follows from numbers.

An experiment never says whether its statement holds. It returns checks, each a predicted and a measured number with a
tolerance, in three groups: what follows from the statement as it stands (`statement`), what follows from it under its
condition (`within`), and what is true in its place (`instead`). `verdict` reads them.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from regard.core.display import Html, table

if TYPE_CHECKING:
    from regard.core.style import Figure

Verdict = Literal["holds", "holds under a condition", "does not hold", "undecided", "measured here", "not run"]
Result = Literal["passed", "failed", "undecided"]
Rule = Literal["close", "at least", "at most"]
MOST_VALUES = 16
"""The longest list that a parameter takes."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A number that was predicted, the number that was measured, and how far apart they may be.

    `rule="close"`: at most `tolerance` apart. `"at least"` and `"at most"`: the measured number is on that side of the
    predicted one, or within `tolerance` of it. A statistical estimate comes with the confidence `interval` around the
    measured number: then "close" asks that the interval contains the predicted number, and that it is no wider than
    `tolerance` on either side; a wider one leaves the check undecided. A `timed` check never decides over a statement.

    >>> Check(name="variance", predicted=64, measured=63.2, tolerance=2).result
    'passed'
    >>> Check(name="variance", predicted=64, measured=50.0, tolerance=20, interval=(40.0, 60.0)).result
    'failed'
    """

    name: str
    predicted: float
    measured: float
    tolerance: float = 0.0
    rule: Rule = "close"
    interval: tuple[float, float] | None = None
    timed: bool = False

    @property
    def result(self) -> Result:
        if math.isnan(self.measured) or math.isnan(self.predicted):
            return "failed"
        low, high = self.interval or (self.measured, self.measured)
        if self.rule != "close":
            above = self.predicted - self.tolerance
            below = self.predicted + self.tolerance
            good, bad = (low >= above, high < above) if self.rule == "at least" else (high <= below, low > below)
            return "passed" if good else "failed" if bad else "undecided"
        if self.interval is None:
            # Two infinities are equal, though their difference is not a number.
            apart = 0.0 if self.measured == self.predicted else abs(self.measured - self.predicted)
            return "passed" if apart <= self.tolerance else "failed"
        if not low <= self.predicted <= high:
            return "failed"
        return "passed" if max(high - self.measured, self.measured - low) <= self.tolerance else "undecided"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "predicted": finite(self.predicted),
            "measured": finite(self.measured),
            "tolerance": finite(self.tolerance),
            "rule": self.rule,
            "interval": None if self.interval is None else [finite(end) for end in self.interval],
            "timed": self.timed,
            "result": self.result,
        }


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What an experiment returns: checks in three groups, a table of what was measured, and the picture of it."""

    statement: tuple[Check, ...]
    within: tuple[Check, ...] = ()
    instead: tuple[Check, ...] = ()
    table: tuple[Mapping[str, object], ...] = ()
    draw: "Callable[[], Figure]" = field(repr=False)

    @property
    def checks(self) -> tuple[Check, ...]:
        return (*self.statement, *self.within, *self.instead)

    @property
    def verdict(self) -> Verdict:
        """The verdict that follows from the checks; times do not decide, unless there is nothing else.

        >>> right, wrong = (Check(name="", predicted=1, measured=number) for number in (1, 2))
        >>> Measurements(statement=(wrong,), instead=(right,), draw=None).verdict
        'does not hold'
        """
        if all(check.timed for check in self.checks):
            return "measured here"
        statement = _result(self.statement)
        if statement != "failed":
            return "holds" if statement == "passed" else "undecided"
        rest = _result((*self.within, *self.instead))
        if self.within:
            verdicts: dict[Result, Verdict] = {
                "passed": "holds under a condition",
                "failed": "does not hold",
                "undecided": "undecided",
            }
            return verdicts[rest]
        return "does not hold" if rest == "passed" else "undecided"


def _result(checks: Sequence[Check]) -> Result:
    """The result of all checks that are not timed: one that failed decides."""
    results = {check.result for check in checks if not check.timed}
    return "failed" if "failed" in results else "undecided" if "undecided" in results else "passed"


@dataclass(frozen=True)
class Between:
    """The range of a numeric parameter, ends included; the steps of its slider are even in the logarithm if `log`."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of an experiment: a number or a list of numbers, within a range."""

    name: str
    type: type
    many: bool
    default: Any
    range: Between

    def expected(self) -> str:
        """What the parameter takes, as errors and help say it."""
        low, high = (f"{end:,}" if self.type is int else f"{end:g}" for end in (self.range.low, self.range.high))
        number = "whole number" if self.type is int else "number"
        return f"1 to {MOST_VALUES} {number}s from {low} to {high}" if self.many else f"a {number} from {low} to {high}"

    def read(self, words: Sequence[str]) -> Any:
        """The value that was typed; `read` and `checked` raise the same error."""
        try:
            values = tuple(self.type(word) for text in words for word in text.split(","))
        except ValueError:
            raise ValueError(f"{self.name}: expected {self.expected()}, got {' '.join(words)!r}") from None
        if not self.many and len(values) != 1:
            raise ValueError(f"{self.name}: expected {self.expected()}, got {' '.join(words)!r}")
        return self.checked(values if self.many else values[0])

    def checked(self, value: Any) -> Any:
        """A value in this parameter's type, or a ValueError."""
        values = tuple(value) if self.many and isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        whole = all(isinstance(x, int) or (self.type is float and isinstance(x, float)) for x in values)
        if (
            not (whole and 1 <= len(values) <= MOST_VALUES)
            or any(isinstance(x, bool) for x in values)
            or not all(self.range.low <= x <= self.range.high for x in values)
        ):
            raise ValueError(f"{self.name}: expected {self.expected()}, got {value!r}")
        numbers = tuple(self.type(x) for x in values)
        return numbers if self.many else numbers[0]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A statement about attention and the function that measures it."""

    name: str
    claims: tuple[str, ...]
    """Where the statement stands: the number of a document, and of a question in it (lab/documents.py)."""
    title: str
    statement: str
    """The statement in our words, as Markdown with LaTeX between dollar signs."""
    formula: str
    """LaTeX."""
    condition: str = ""
    """The condition under which the statement holds, if there is one."""
    instead: str = ""
    """What holds in its place, if it does not."""
    needs: tuple[str, ...] = ()
    """Models with real weights, by their names in `regard models`."""
    measure: Callable[..., Measurements] = field(repr=False)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The keyword arguments of the function, with their ranges."""
        hints = get_type_hints(self.measure, include_extras=True)
        parameters = {}
        for name, argument in inspect.signature(self.measure).parameters.items():
            hint, limits = get_args(hints[name])
            many = get_origin(hint) is tuple
            kind = get_args(hint)[0] if many else hint
            parameters[name] = Parameter(name=name, type=kind, many=many, default=argument.default, range=limits)
        return parameters

    def arguments(self, **values: Any) -> dict[str, Any]:
        """All parameters: these values, checked, and defaults for the others."""
        for name in values:
            if name not in self.parameters:
                raise ValueError(f"{name}: expected a parameter of {self.name} ({', '.join(self.parameters)})")
        return {
            name: parameter.checked(values[name]) if name in values else parameter.default
            for name, parameter in self.parameters.items()
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Outcome:
    """What became of an experiment. In a notebook it is a table and a picture; `table` has the numbers.

    >>> from regard import lab
    >>> outcome = lab.run("scaling", dims=(4, 64), samples=20_000)
    >>> outcome.verdict
    'holds'
    """

    experiment: Experiment
    parameters: Mapping[str, Any]
    measurements: Measurements | None
    """None where the weights that the experiment needs are not installed."""
    missing: str = ""
    """How to install those weights."""
    seconds: float

    @property
    def verdict(self) -> Verdict:
        return self.measurements.verdict if self.measurements else "not run"

    @property
    def reading(self) -> str:
        """What to know besides the verdict: the condition, what holds in its place, or what is missing."""
        words = {
            "holds under a condition": self.experiment.condition,
            "does not hold": self.experiment.instead,
            "not run": self.missing,
        }
        return words.get(self.verdict, "")

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.measurements.checks if self.measurements else ()

    @property
    def table(self) -> list[Mapping[str, object]]:
        """The rows that were measured."""
        return list(self.measurements.table) if self.measurements else []

    @cached_property
    def figure(self) -> "Figure":
        """The picture that is the argument."""
        if self.measurements is None:
            raise ValueError(f"{self.experiment.name}: {self.missing}")
        return self.measurements.draw()

    def groups(self) -> list[tuple[str, tuple[Check, ...]]]:
        """The checks by what they follow from."""
        if self.measurements is None:
            return []
        groups = [
            ("the statement", self.measurements.statement),
            ("under the condition", self.measurements.within),
            ("in its place", self.measurements.instead),
        ]
        return [(name, checks) for name, checks in groups if checks]

    def check_rows(self) -> list[dict[str, str]]:
        """The checks as rows of a table."""
        return [
            {
                "of": group,
                "what": check.name,
                "predicted": {"close": "", "at least": "≥ ", "at most": "≤ "}[check.rule] + number(check.predicted),
                "measured": number(check.measured),
                "tolerance": number(check.tolerance),
                "interval": "" if check.interval is None else "{} … {}".format(*map(number, check.interval)),
                "result": "measured here" if check.timed else check.result,
            }
            for group, checks in self.groups()
            for check in checks
        ]

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON has it."""
        return {
            "experiment": self.experiment.name,
            "claims": list(self.experiment.claims),
            "statement": self.experiment.statement,
            "formula": self.experiment.formula,
            "parameters": dict(self.parameters),
            "verdict": self.verdict,
            "reading": self.reading,
            "checks": [{"of": group, **check.to_dict()} for group, checks in self.groups() for check in checks],
            "table": [{name: finite(value) for name, value in row.items()} for row in self.table],
            "seconds": round(self.seconds, 3),
        }

    def __repr__(self) -> str:
        passed = sum(check.result == "passed" for check in self.checks)
        counts = f"{passed} of {len(self.checks)} checks passed, {self.seconds:.1f} s" if self.checks else ""
        lines = [f"{self.experiment.name}: {self.verdict}", self.reading, counts]
        return "\n  ".join(line for line in lines if line)

    def _repr_html_(self) -> Html:
        numbers = ("predicted", "measured", "tolerance", "interval")
        notes = [self.experiment.statement, *filter(None, [self.reading])]
        heading = f"{self.experiment.title}: {self.verdict}"
        return Html(table(self.check_rows(), title=heading, right=numbers, notes=notes) + self._picture())

    def _picture(self) -> Html:
        from regard.lab.drawing import svg

        return Html(svg(self.figure) if self.measurements else "")


def number(value: float) -> str:
    """A number as people read it.

    >>> number(12345.6), number(0.27971), number(5.64e-42), number(3.0), number(float("inf"))
    ('12,346', '0.2797', '5.64e-42', '3', 'inf')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.3g}"
    if float(value).is_integer() or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def finite(value: Any) -> Any:
    """A value as JSON has it: NaN and infinities, which JSON does not have, as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
