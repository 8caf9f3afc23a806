"""Graders: what is wrong with an answer, as a sentence, or "" if it is right.

Each takes the expected answer, which the library computed, and `near`: typical mistakes, as sentences with the answer
that each would give. An answer that equals one of these gets its sentence; for any other, the sentence names the entry,
the input or the shape that is wrong, never the expected number.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from regard.lab.question import BLANK

Near = Mapping[str, float]


def kind(value: object) -> str:
    """What an answer is, in a few words.

    >>> kind(torch.ones(2, 3)), kind("yes"), kind(int)
    ('a tensor of shape (2, 3)', "the text 'yes'", 'the class int')
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, bool | float):
        return f"{value!r}"
    if isinstance(value, int):
        return f"{value!r}" if abs(value) < 10**15 else "a whole number of more than 15 digits"
    return "a function" if callable(value) else f"a value of type {type(value).__name__}"


def blank(value: object, depth: int = 3) -> bool:
    """Whether nothing was answered: dots or None, also in parts of the answer, and in their parts.

    >>> blank(...), blank({"a": 1, "b": ...}), blank(0)
    (True, True, False)
    """
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return value is ... or value is None or (depth > 0 and any(blank(part, depth - 1) for part in parts))


def real(value: object) -> float | None:
    """A number, or a tensor with one, as a float; None for anything else."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except Exception:  # a student's type may raise anything
        return None


def close(value: float, expected: float, tolerance: float = 1e-3) -> bool:
    """Whether numbers agree: relative to the expected one, exactly where that is 0 or infinite."""
    if math.isinf(expected) or math.isnan(value):
        return value == expected
    return abs(value - expected) <= tolerance * abs(expected)


def number(answer: object, expected: float, near: Near | None = None, *, tolerance: float = 1e-3) -> str:
    """What is wrong with a number.

    >>> number(8.0, 64.0, {"this is the standard deviation": 8.0}), number(63.99, 64.0), number("64", 64.0)
    ('this is the standard deviation', '', "expected a number, got the text '64'")
    """
    if blank(answer):
        return BLANK
    value = real(answer)
    if value is None:
        return f"expected a number, got {kind(answer)}"
    if close(value, expected, tolerance):
        return ""
    for sentence, wrong in (near or {}).items():
        if close(value, wrong, tolerance):
            return sentence
    return f"{value:.6g} is {_apart(value, expected)}"


def _apart(value: float, expected: float) -> str:
    """How a wrong number differs, without saying the right one."""
    if math.isnan(value):
        return "not a number"
    if expected and close(-value, expected):
        return "right but for its sign"
    if expected not in (0, 1) and value and close(1 / value, expected):
        return "the reciprocal of what was asked for"
    for factor in (2, 10, 100, 1000):
        if expected and close(value, factor * expected):
            return f"too large by a factor of {factor}"
        if expected and close(value * factor, expected):
            return f"too small by a factor of {factor}"
    return "too large" if value > expected else "too small"


def formula(
    answer: object,
    expected: Callable[..., float],
    cases: Iterable[Sequence[float]],
    near: Mapping[str, Callable[..., float]] | None = None,
    *,
    tolerance: float = 1e-3,
) -> str:
    """What is wrong with a function of numbers, compared at some of its arguments.

    >>> formula(lambda d: d, lambda d: d**0.5, [(4,), (9,)], {"this is the variance": lambda d: d})
    'this is the variance'
    """
    names = arguments(expected)
    cases = [tuple(case) for case in cases]
    values, fault = evaluated(answer, names, cases)
    if fault:
        return fault
    right = [expected(*case) for case in cases]
    if all(close(value, truth, tolerance) for value, truth in zip(values, right, strict=True)):
        return ""
    for sentence, mistake in (near or {}).items():
        if all(close(value, mistake(*case), tolerance) for value, case in zip(values, cases, strict=True)):
            return sentence
    places = [place for place in range(len(cases)) if not close(values[place], right[place], tolerance)]
    case, apart = cases[places[0]], _apart(values[places[0]], right[places[0]])
    share = f" ({len(cases) - len(places)} of {len(cases)} cases are right)" if len(places) < len(cases) else ""
    return f"at {_at(names, case)} it gives {values[places[0]]:.6g}, which is {apart}{share}"


def evaluated(answer: object, names: Sequence[str], cases: Sequence[Sequence[float]]) -> tuple[list[float], str]:
    """What a function of numbers gives in some cases, or why it does not give numbers.

    >>> evaluated(lambda d: d + 1, ["d"], [(4,), (9,)]), evaluated(8, ["d"], [(4,)])[1]
    (([5.0, 10.0], ''), 'expected a function, `lambda d: …`, got 8')
    """
    signature = f"lambda {', '.join(names)}: …"
    if blank(answer):
        return [], BLANK
    if not callable(answer) or isinstance(answer, type):
        return [], f"expected a function, `{signature}`, got {kind(answer)}"
    values = []
    for case in cases:
        result, error = called(answer, *case)
        if error == BLANK or (not error and blank(result)):
            return [], BLANK
        if error:
            return [], f"expected `{signature}`; at {_at(names, case)} it {error}"
        value = real(result)
        if value is None:
            return [], f"expected a number at {_at(names, case)}, got {kind(result)}"
        values.append(value)
    return values, ""


def _at(names: Sequence[str], case: Sequence[float]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in zip(names, case, strict=True))


def arguments(function: Callable[..., object]) -> list[str]:
    """The names of arguments that a function must get.

    >>> arguments(lambda d, beta=1.0: d)
    ['d']
    """
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def called(function: Callable[..., object], *inputs: object) -> tuple[object, str]:
    """What a student's function returns for copies of arguments, or what it raises, as words."""
    copies = [argument.clone() if isinstance(argument, Tensor) else argument for argument in inputs]
    try:
        return function(*copies), ""
    except NotImplementedError:
        return None, BLANK
    except Exception as error:  # a student's function may raise anything
        lines = str(error).strip().splitlines()
        return None, f"raises {type(error).__name__}{': ' + lines[0][:160] if lines else ''}"


def letters(answer: object, expected: str, options: str, near: Mapping[str, str] | None = None) -> str:
    """What is wrong with a choice of letters; `near` says of a letter why it is, or is not, among the right ones.

    >>> letters("abc", "ab", "abc", {"c": "batches do not mix"})
    'c should not be chosen: batches do not mix'
    """
    if blank(answer):
        return BLANK
    # A text, a list or a set of letters: other things that can be gone through may have no end.
    chosen = {letter.strip().lower() for letter in answer if isinstance(letter, str)} if _has_letters(answer) else set()
    chosen -= {"", ","}
    if not chosen or not chosen <= set(options):
        return f'expected letters of {", ".join(options)}, such as "{options[:2]}", got {kind(answer)}'
    for letter in options:
        if (letter in chosen) != (letter in expected):
            why = (near or {}).get(letter, "")
            what = "should not be chosen" if letter in chosen else "is missing"
            return f"{letter} {what}{': ' + why if why else ''}"
    return ""


def _has_letters(answer: object) -> TypeGuard[Collection[object]]:
    return isinstance(answer, str | list | tuple | set)


def entries(
    answer: object, expected: Mapping[str, object], near: Mapping[str, Mapping[str, object]] | None = None
) -> str:
    """What is wrong with a dict of answers: numbers, shapes (tuples) and words.

    >>> entries({"K": (2, 5), "Q": "source"}, {"K": (5, 2), "Q": "target"})
    'K: the sizes are right, their order is not; Q: not source'
    """
    if fault := unfilled(answer, expected):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    return together({name: _entry(values[name], right, (near or {}).get(name, {})) for name, right in expected.items()})


def unfilled(answer: object, names: Iterable[str]) -> str:
    """What keeps an answer from being a dict with an answer for each name; "" if it is one.

    >>> unfilled({"Q": ...}, "Q"), unfilled({"Q": 1, "K": ...}, "QK"), unfilled([1], "Q")
    ('not answered yet', 'not answered yet: K', "expected a dict with 'Q', got a value of type list")
    """
    names = list(names)
    if answer is ... or answer is None:
        return BLANK
    if not isinstance(answer, dict):
        return f"expected a dict with {', '.join(map(repr, names))}, got {kind(answer)}"
    for name in names:
        if name not in answer:
            return f"expected an entry {name!r}, got {', '.join(map(str, answer)) or 'an empty dict'}"
    empty = [name for name in names if blank(answer[name])]
    if empty:
        return BLANK if len(empty) == len(names) else f"{BLANK}: {', '.join(empty)}"
    return ""


def together(faults: Mapping[str, str]) -> str:
    """What is wrong with the parts of an answer, as one sentence.

    >>> together({"Q": "", "K": "transposed"})
    'K: transposed'
    """
    return "; ".join(f"{name}: {fault}" for name, fault in faults.items() if fault)


def _entry(value: object, right: object, near: Mapping[str, object]) -> str:
    if isinstance(right, tuple):
        return shape(value, right, {sentence: wrong for sentence, wrong in near.items() if isinstance(wrong, tuple)})
    if isinstance(right, str):
        return word(value, right, {sentence: wrong for sentence, wrong in near.items() if isinstance(wrong, str)})
    if isinstance(right, bool):
        return (
            ""
            if value is right
            else f"not {value}"
            if isinstance(value, bool)
            else f"expected True or False, got {kind(value)}"
        )
    numbers = {sentence: wrong for sentence, wrong in near.items() if isinstance(wrong, int | float)}
    return number(value, float(right), numbers)  # type: ignore[arg-type]


def word(answer: object, expected: str, near: Mapping[str, str] | None = None) -> str:
    """What is wrong with a word.

    >>> word("Causal", "causal"), word("both", "causal"), word(1, "causal")
    ('', 'not both', 'expected a word in quotes, got 1')
    """
    if blank(answer):
        return BLANK
    if not isinstance(answer, str):
        return f"expected a word in quotes, got {kind(answer)}"
    typed = answer.strip().lower()
    if typed == expected.lower():
        return ""
    return next((sentence for sentence, wrong in (near or {}).items() if typed == wrong.lower()), f"not {answer[:40]}")


def shape(answer: object, expected: tuple[int, ...], near: Mapping[str, tuple[int, ...]] | None = None) -> str:
    """What is wrong with a shape.

    >>> shape((2, 4, 5), (2, 5, 4)), shape([2, 5], (2, 5, 4))
    ('the sizes are right, their order is not', 'expected 3 axes, got 2')
    """
    if blank(answer):
        return BLANK
    sizes = tuple(map(real, answer)) if isinstance(answer, tuple | list) else ()
    if not sizes or None in sizes:
        return f"expected a shape, a tuple of whole numbers, got {kind(answer)}"
    if sizes == expected:
        return ""
    for sentence, wrong in (near or {}).items():
        if sizes == wrong:
            return sentence
    if len(sizes) != len(expected):
        return f"expected {len(expected)} axes, got {len(sizes)}"
    if sorted(sizes) == sorted(expected):  # type: ignore[type-var]
        return "the sizes are right, their order is not"
    axes = [axis for axis, (size, right) in enumerate(zip(sizes, expected, strict=True)) if size != right]
    return f"wrong at axis {', '.join(map(str, axes))} (counted from 0)"


def tensor(
    answer: object,
    expected: Tensor,
    near: Mapping[str, Tensor] | None = None,
    *,
    tolerance: float = 1e-4,
    probabilities: bool = False,
) -> str:
    """What is wrong with a tensor (or a list, or an array), relative to the largest expected entry or 1.

    With `probabilities` the rows of the answer must sum to 1.

    >>> tensor([[1.0, 3.0], [2.0, 4.0]], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    'transposed: the last two axes are swapped'
    """
    if blank(answer):
        return BLANK
    values = _values(answer)
    if values is None:
        return f"expected a tensor of shape {tuple(expected.shape)}, got {kind(answer)}"
    expected = expected.detach().double()
    size = max(1.0, expected.abs().max().item()) * tolerance
    if _same(values, expected, size):
        return ""
    for sentence, wrong in (near or {}).items():
        if _same(values, wrong.detach().double(), size):
            return sentence
    if values.ndim >= 2 and _same(values.mT, expected, size):
        return "transposed: the last two axes are swapped"
    if values.shape != expected.shape:
        if values.numel() == expected.numel() and _same(values.reshape(expected.shape), expected, size):
            return f"the numbers are right, but their shape is {tuple(values.shape)}, not {tuple(expected.shape)}"
        return f"expected a tensor of shape {tuple(expected.shape)}, got one of shape {tuple(values.shape)}"
    if not values.isfinite().all():
        place = tuple((~values.isfinite()).nonzero()[0].tolist())
        return f"{values[place].item()} at {place}"
    if probabilities and (values < -size).any():
        return "weights are probabilities, and some of these are negative"
    if probabilities and not torch.allclose(values.sum(-1), expected.sum(-1), atol=size):
        sums = values.sum(-1).flatten()
        worst = sums[(sums - expected.sum(-1).flatten()).abs().argmax()].item()
        return f"weights are probabilities, but a row of these sums to {worst:.3g}"
    return _differing(values, expected, size)


def _differing(values: Tensor, expected: Tensor, size: float) -> str:
    """How numbers of the right shape differ."""
    if _same(-values, expected, size):
        return "every entry has the wrong sign"
    factor = (values * expected).sum().item() / max(expected.square().sum().item(), 1e-30)
    if factor and _same(values, factor * expected, size):
        return f"every entry is {factor:.4g} times what it should be"
    offset = (values - expected).mean().item()
    if _same(values - offset, expected, size):
        return f"every entry is off by {offset:.4g}"
    wrong = (values - expected).abs() > size
    place = tuple(wrong.nonzero()[0].tolist())
    where = f"at {place} " if place else ""
    value, right = values[place].item(), expected[place].item()
    return f"{int(wrong.sum())} of {wrong.numel()} entries are wrong; {where}{value:.4g} is {_apart(value, right)}"


def _values(answer: object) -> Tensor | None:
    try:
        return torch.as_tensor(answer).detach().cpu().double()
    except Exception:  # whatever a student's type raises, it is no tensor
        return None


def _same(values: Tensor, expected: Tensor, size: float) -> bool:
    return values.shape == expected.shape and bool((values - expected).abs().le(size).all())


def function(
    answer: object,
    expected: Callable[..., object],
    cases: Mapping[str, Sequence[object]],
    near: Mapping[str, Callable[..., object]] | None = None,
    *,
    parts: Sequence[str] = ("output",),
    tolerance: float = 1e-4,
    probabilities: bool = False,
) -> str:
    """What is wrong with a function of tensors, compared with a function of the library on each input of `cases`.

    `parts` names the tensors that it returns.

    >>> function(lambda x: x.T, lambda x: x, {"a square": [torch.eye(2)], "a row": [torch.ones(1, 2)]})
    'for a row: transposed: the last two axes are swapped (1 of 2 inputs are right)'
    """
    if blank(answer):
        return BLANK
    if not callable(answer):
        return f"expected a function of ({', '.join(arguments(expected))}), got {kind(answer)}"
    results: dict[str, tuple[object, ...]] = {}
    for label, inputs in cases.items():
        result, error = called(answer, *inputs)
        if error == BLANK or (not error and blank(result)):
            return BLANK
        if error:
            return f"for {label} it {error}"
        results[label] = result if len(parts) > 1 and isinstance(result, tuple | list) else (result,)  # type: ignore[assignment]
        if len(results[label]) != len(parts):
            return f"expected {len(parts)} tensors ({', '.join(parts)}), got {kind(result)}"
    faults = _compared(results, expected, cases, parts, tolerance, probabilities)
    if not faults:
        return ""
    for sentence, mistake in (near or {}).items():
        if not _compared(results, mistake, cases, parts, tolerance, False):
            return sentence
    label, fault = next(iter(faults.items()))
    share = f" ({len(cases) - len(faults)} of {len(cases)} inputs are right)" if len(faults) < len(cases) else ""
    return f"for {label}: {fault}{share}"


def _compared(
    results: Mapping[str, tuple[object, ...]],
    expected: Callable[..., object],
    cases: Mapping[str, Sequence[object]],
    parts: Sequence[str],
    tolerance: float,
    probabilities: bool,
) -> dict[str, str]:
    """What is wrong with the results, by the label of the input; empty if all are right."""
    faults = {}
    for label, inputs in cases.items():
        right = expected(*inputs)
        truths = right if isinstance(right, tuple) else (right,)
        for part, result, truth in zip(parts, results[label], truths, strict=True):
            fault = tensor(result, truth, tolerance=tolerance, probabilities=probabilities)
            if fault:
                faults[label] = fault if len(parts) == 1 else f"{part}: {fault}"
                break
    return faults
