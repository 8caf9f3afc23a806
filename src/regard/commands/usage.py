"""Errors in a command line, in the form of all our errors: the argument, what was expected, and what it got."""

import re
from difflib import get_close_matches
from typing import Any

EXPECTED = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "a number below {lt}",
}
"""What was expected, by the kind of a value's error; others keep their message."""


def sentence(error: Any) -> str:
    """What is wrong with a command line, and what may have been meant.

    >>> import typer
    >>> from regard.commands.usage import sentence
    >>> sentence(typer.BadParameter("not this"))
    'not this'
    """
    if close := getattr(error, "possibilities", None):  # the closest match first
        return f"no option {error.option_name}; did you mean {close[0]}?"
    message = str(error.format_message())
    match = re.match(r"No such command '(.*?)'", message)
    if match or message.startswith("Missing command"):
        names = sorted(error.ctx.command.commands)
        close = get_close_matches(match[1], names, 1) if match else []
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"command: expected one of {', '.join(names)}, got {repr(match[1]) if match else 'none'}{hint}"
    if match := re.match(r"No such option: (.*)", message):
        return f"no option {match[1]}"
    if match := re.match(r"Option '(.*)' requires an argument", message):
        return f"{match[1]}: expected a value, got none"
    if match := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return f"arguments: expected no more, got {match[1]!r}"
    parameter = getattr(error, "param", None)
    if parameter is None:
        return str(error.message) or message
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name
    if message.startswith("Missing"):
        return f"{name}: expected a value, got none"
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return f"{name}: {error.message}"
    wrong = details()[0]
    expected = EXPECTED.get(wrong["type"], wrong["msg"]).format(**wrong.get("ctx", {}))
    return f"{name}: expected {expected}, got {wrong['input']!r}"
