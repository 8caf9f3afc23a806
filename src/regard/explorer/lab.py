"""The lab's page: the experiments as JSON, what a page asks of one, and its outcome.

An experiment runs in a process of its own, since a hand on a slider asks for the next before the last has ended: a
process can be ended at any moment. It is forked from one that has imported everything once (warm.py).
"""

import multiprocessing
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from html import escape
from multiprocessing.connection import Connection
from typing import Any

from regard.explorer.layers import no_check
from regard.explorer.requests import text_of
from regard.lab.documents import document
from regard.lab.drawing import svg
from regard.lab.experiment import MOST_VALUES, Experiment, Outcome, Parameter, number
from regard.lab.registry import experiments, lookup, missing_models, run
from regard.lab.reporting.formula import mathml

SECONDS = 30.0
"""How long an experiment may take here."""
MOST_WORD = 40
"""Characters of a parameter's value."""
MOST_ROWS = 200
"""The most rows of an experiment's table."""
_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
_INLINE = ((r"\*\*(.+?)\*\*", r"<strong>\1</strong>"), (r"\*(.+?)\*", r"<em>\1</em>"), (r"`(.+?)`", r"<code>\1</code>"))


def lab_json() -> dict[str, Any]:
    """All experiments, as the page reads them."""
    return {"experiments": [_experiment_json(experiment) for experiment in experiments().values()], "seconds": SECONDS}


def _experiment_json(experiment: Experiment) -> dict[str, Any]:
    return {
        "id": experiment.name,
        "claims": experiment.claims,
        "document": document(experiment.claims[0]),
        "title": experiment.title,
        "statement": words_html(experiment.statement),
        "formula": formula_html(experiment.formula, block=True),
        "missing": missing_models(experiment.needs),
        "parameters": [_parameter_json(parameter) for parameter in experiment.parameters.values()],
    }


def _parameter_json(parameter: Parameter) -> dict[str, Any]:
    default = parameter.default if parameter.many else (parameter.default,)
    return {
        "name": parameter.name,
        "whole": parameter.type is int,
        "many": parameter.many,
        "default": [str(value) for value in default],
        "low": parameter.range.low,
        "high": parameter.range.high,
        "log": parameter.range.log,
        "takes": parameter.expected(),
    }


def asked_experiment(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The experiment that a page asks for, and its parameters, checked: errors are those of the library.

    >>> asked_experiment({"id": "scaling", "parameters": {"dims": ["4", "64"]}})[1]["dims"]
    (4, 64)
    """
    experiment = lookup(text_of(body, "id", most=100))
    typed = body.get("parameters") or {}
    if not isinstance(typed, dict) or not all(_is_typed(words) for words in typed.values()):
        raise ValueError(f"parameters: expected lists of at most {MOST_VALUES} words, got {typed!r:.40}")
    declared = experiment.parameters
    read = {name: declared[name].read(words) if name in declared else words for name, words in typed.items()}
    return experiment.name, experiment.arguments(**read)


def _is_typed(words: object) -> bool:
    short = isinstance(words, list) and 1 <= len(words) <= MOST_VALUES
    return short and all(isinstance(word, str) and len(word) <= MOST_WORD for word in words)  # type: ignore[attr-defined]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """What became of an experiment, as the page reads it.

    >>> from regard import lab
    >>> outcome_json(lab.run("scaling", dims=(4, 64), samples=20_000))["verdict"]
    'holds'
    """
    rows = outcome.table[:MOST_ROWS]
    return {
        "type": "outcome",
        "id": outcome.experiment.name,
        "verdict": outcome.verdict,
        "reading": words_html(outcome.reading),
        "seconds": outcome.seconds,
        "checks": outcome.check_rows(),
        "columns": list(rows[0]) if rows else [],
        "rows": [[_cell(value) for value in row.values()] for row in rows],
        "left_out": len(outcome.table) - len(rows),
        "picture": svg(outcome.figure) if outcome.measurements else None,
    }


def _cell(value: object) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def measured(name: str, arguments: Mapping[str, Any], check: Callable[[], None] = no_check) -> dict[str, Any]:
    """An experiment's outcome as JSON. `check` may raise to end it; after `SECONDS` it is ended, too."""
    here, there = _context().Pipe(duplex=False)
    process = _context().Process(target=_measure, args=(there, name, dict(arguments)), daemon=True)
    process.start()
    there.close()
    begun = time.monotonic()
    try:
        while not here.poll(0.02):
            check()
            if time.monotonic() - begun > SECONDS:
                raise ValueError(
                    f"{name}: expected parameters with which it takes at most {SECONDS:g} s, got others; choose "
                    f"smaller ones, or run it without a limit: regard lab run {name}"
                )
        answer: dict[str, Any] = here.recv()
    except EOFError:
        raise ValueError(f"{name}: its process ended without an answer; was there too little memory?") from None
    finally:
        process.kill()
        process.join()
        here.close()
    if answer["type"] == "refused":
        raise ValueError(answer["reason"])
    return answer


def prepare() -> None:
    """Start the process that experiments are forked from, so that the first need not wait for it."""
    process = _context().Process(target=no_check, daemon=True)
    process.start()
    process.join()


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
    if _FORKS:
        context.set_forkserver_preload(["regard.explorer.warm"])
    return context


def _measure(answer: Connection, name: str, arguments: dict[str, Any]) -> None:
    """Runs in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    try:
        answer.send(outcome_json(run(name, **arguments)))
    except (ValueError, ModuleNotFoundError) as error:
        answer.send({"type": "refused", "reason": str(error)})
    except Exception as error:
        traceback.print_exception(error, file=sys.stderr)
        answer.send({"type": "refused", "reason": f"{name}: the experiment failed: {type(error).__name__}"})


def words_html(text: str) -> str:
    """A statement as HTML: Markdown's emphasis, and LaTeX between dollar signs as MathML.

    >>> words_html("*so* a < b")
    '<p><em>so</em> a &lt; b</p>'
    """
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    return "".join(f"<p>{_inline(paragraph)}</p>" for paragraph in paragraphs)


def _inline(text: str) -> str:
    parts = text.split("$")
    for place in range(0, len(parts), 2):
        parts[place] = escape(parts[place], quote=False)
        for mark, element in _INLINE:
            parts[place] = re.sub(mark, element, parts[place])
    parts[1::2] = [formula_html(latex) for latex in parts[1::2]]
    return "".join(parts)


def formula_html(latex: str, *, block: bool = False) -> str:
    r"""LaTeX as MathML; as it is written, where latex2mathml is not installed.

    >>> "<math" in formula_html(r"\sqrt{d}") or "<code>" in formula_html(r"\sqrt{d}")
    True
    """
    try:
        return mathml(latex, display=block)
    except ModuleNotFoundError:
        return f"<code>{escape(latex, quote=False)}</code>"
