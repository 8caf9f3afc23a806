"""Chat templates, which are programs that came with a checkpoint: rendered in jinja2's sandbox, within bounds."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from regard.checkpoints.errors import CheckpointError

MOST_LETTERS = 2**24
"""Of anything that a template multiplies."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text a template makes of some values, with the helpers that transformers offers to templates.

    >>> render("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {"messages": [{"role": "user",
    ... "content": "hi"}]})
    '<user>hi'
    """
    try:
        return str(_environment().from_string(template).render(**values))
    except CheckpointError:
        raise
    except Exception as error:  # whatever a program can run into
        raise CheckpointError(f"chat_template: expected messages that it takes, got {error}") from error


def _environment() -> Any:
    from jinja2 import TemplateError, ext, nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            # The sandbox keeps a template from files and functions, but not from ten gigabytes of spaces.
            sizes = [value if isinstance(value, int | float) else len(value) for value in (left, right)]
            if operator == "**" or sizes[0] * sizes[1] > MOST_LETTERS:
                raise CheckpointError(f"chat_template: expected a small product, got {sizes[0]} {operator} {sizes[1]}")
            return super().call_binop(context, operator, left, right)

    class Generation(ext.Extension):
        """{% generation %} marks what the model wrote, for training; here it is only text."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    found = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found
