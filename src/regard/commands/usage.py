"""Errors in a command line, in the form of all our errors: the argument, what was expected, and what it got."""

import re
from difflib import get_close_matches
from typing import Any

EXPECTED = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
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
    if hasattr(error, "possibilities"):
        return f"no option {error.option_name}; {_meant(error)}"
    message = str(error.format_message())
    match = re.match(r"No such command (['\"])(?P<name>.*?)\1\.", message)
    if match or message.startswith("Missing command"):
        names = sorted(error.ctx.command.commands)
        close = get_close_matches(match["name"], names, 1) if match else []
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"command: expected one of {', '.join(names)}, got {repr(match['name']) if match else 'none'}{hint}"
    if match := re.match(r"Option '(.*)' requires an argument", message):
        return f"{match[1]}: expected a value, got none"
    if match := re.match(r"Option '(.*)' requires (\d+) arguments", message):
        return f"{match[1]}: expected {match[2]} values, got fewer"
    if match := re.match(r"Option '(.*)' does not take a value", message):
        return f"{match[1]}: expected no value, got one"
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
    if wrong["type"] not in EXPECTED:
        return f"{name}: {wrong['msg']}, got {wrong['input']!r:.60}"
    return f"{name}: expected {EXPECTED[wrong['type']].format(**wrong.get('ctx', {}))}, got {wrong['input']!r:.60}"


def _meant(error: Any) -> str:
    """The option that an unknown one may stand for: its beginning (--temp), its initials (--lr), a slip (--modle)."""
    names = [name.lstrip("-") for parameter in error.ctx.command.get_params(error.ctx) for name in parameter.opts]
    typed = error.option_name.lstrip("-")
    longer = [name for name in names if name.startswith(typed)]
    initials = {name for name in names if "".join(word[:1] for word in name.split("-")) == typed}
    close = longer[:1] or sorted(initials) or get_close_matches(typed, names, 1)
    return (
        f"did you mean {' or '.join(f'--{name}' for name in close)}?"
        if close
        else f"`{error.ctx.command_path} --help` lists the options"
    )
