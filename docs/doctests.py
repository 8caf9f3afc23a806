"""Examples in docstrings as blocks of code, from >>> to the next empty line; to Markdown they would be quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)", re.MULTILINE)


class Doctests(griffe.Extension):
    """What mkdocstrings loads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of an object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", obj.docstring.value
            )
