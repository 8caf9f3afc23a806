"""The commands by name. The module of a command, and torch with it, is imported when the command is run or its own help
is asked for; `regard --help` reads what it lists from the source of the modules."""

import ast
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regard.commands import leaving_at_once

Abort = typer.Abort
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The parent of everything wrong with a command line; not all versions of typer have a public name for it."""

COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "demo": ("demo", ("regard demo --out tour",)),
    "check": (
        "check",
        ("regard check quadratic --law streamed --mask causal", "regard check my_file.py:Mine --qk-length 64 --json"),
    ),
    "cost": (
        "cost",
        (
            "regard cost --length 1024,16384 --kv-heads 8 --plot cost.png",
            "regard cost --own my_file.py:Mine",
            "regard cost --measure",
        ),
    ),
    "bench": (
        "bench",
        (
            "regard bench --list",
            "regard bench --only padded --only append --json",
            "regard bench --mechanism my_file.py:Mine",
        ),
    ),
    "models": (
        "models",
        (
            "regard models",
            "regard models smollm2 --length 2048",
            "regard models runs/lm --mechanism my_file.py:Mine",
        ),
    ),
    "convert": (
        "models",
        (
            "regard convert smollm2 smollm2-hf",
            "regard convert minilm minilm-elu --to regard --mechanism elu",
            "regard convert runs/lm own --to regard --mechanism my_file.py:Mine",
        ),
    ),
    "generate": (
        "generate",
        (
            'regard generate smollm2 "The capital of France is" --max-new-tokens 16',
            'regard generate smollm2 "Write a haiku." --chat --temperature 0.8 --seed 1 --show-cost',
            "regard generate smollm2 --file prompts.txt --n 2 --temperature 1 --json",
            'regard generate runs/lm "def" --mechanism my_file.py:Mine',
        ),
    ),
    "chat": (
        "chat",
        (
            "regard chat smollm2",
            'regard chat smollm2 --system "Answer briefly."',
            "regard chat my_chat_model --mechanism my_file.py:Mine",
        ),
    ),
    "train": (
        "train",
        ("regard train translate --mechanism quadratic", "regard train lm --mechanism my_file.py:Mine"),
    ),
    "translate": (
        "translate",
        (
            'regard translate "La voiture rouge est rapide."',
            "regard translate --model runs/translate --file sentences.txt",
            'regard translate --model runs/own --mechanism my_file.py:Mine "Le chat dort."',
        ),
    ),
    "classify": (
        "classify",
        (
            'regard classify runs/classify "Return a list of the names in the archive."',
            'regard classify runs/own --mechanism my_file.py:Mine "Return a list."',
        ),
    ),
}
"""Of each command the module that has a function of its name, and the examples that its help ends with."""


def load(name: str) -> Any:
    """The command: its module is imported now."""
    module, commands = COMMANDS[name]
    with leaving_at_once():
        imported = import_module(f"regard.commands.{module}")
    if hasattr(imported, "app"):
        return typer.main.get_command(imported.app)
    return command(getattr(imported, name), name, commands)


def command(function: Callable[..., None], name: str, commands: tuple[str, ...]) -> Any:
    """A function as the command `name`, with examples."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    alone.command(name, epilog=examples(*commands))(function)
    made: Any = typer.main.get_command(alone)
    made.callback = _in_flags(made.callback, made.params)
    return made


OPTIONS = {"storage": "state", "embedding_dim": "width", "hidden_dim": "hidden", "vocabulary_size": "vocabulary"}
"""Arguments of the library's, which its errors name, by the options that they come from; num_heads is --heads and laws
is --law anyway."""


def _in_flags(run: Callable[..., Any], parameters: Any) -> Callable[..., Any]:
    """A command whose errors name the flag that was typed, where the library names an argument of Python's."""
    options = [(one.name, one.opts[0]) for one in parameters if one.opts[0].startswith("-")]
    flags = {spelling: flag for name, flag in options for spelling in (name, flag.strip("-").replace("-", "_"))}

    def flag(name: str) -> str | None:
        spellings = (name, name.removeprefix("num_"), name.removesuffix("s"), OPTIONS.get(name, ""))
        return next((flags[spelling] for spelling in spellings if spelling in flags), None)

    def spoken(**values: Any) -> Any:
        try:
            return run(**values)
        except ValueError as error:
            name, colon, rest = str(error).partition(": expected ")
            if not colon or flag(name) is None:
                raise
            rest = re.sub(r"\b([a-z_]+) ?= ?(?=\w)", lambda match: f"{flag(match[1]) or match[1]} ", rest)
            raise ValueError(f"{flag(name)}{colon}{rest}") from error

    return spoken


def examples(*commands: str) -> str:
    """The last section of a command's help; an empty line is how typer ends a line."""
    return "\n\n".join(["Example:" if len(commands) == 1 else "Examples:", *(f"  {command}" for command in commands)])


def group(documentation: dict[str, str], load: Callable[[str], Any], **options: Any) -> typer.Typer:
    """Commands that are listed with their documentation, and loaded by name when one is run."""

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, _, rest = super().resolve_command(ctx, args)
            return name, load(str(name)), rest

    made = typer.Typer(
        cls=Group, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", **options
    )
    for name, text in documentation.items():
        made.command(name, help=text)(_placeholder)
    return made


def _placeholder() -> None:
    """What a group lists; the command itself takes its place when it is run."""


def documentation(source: Path, function: str | None = None) -> str:
    """The docstring of a module, or of one of its functions, without importing it."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    nodes: list[Any] = [node for node in tree.body if getattr(node, "name", None) == function] if function else [tree]
    return ast.get_docstring(nodes[0]) or ""


def _documentation(name: str) -> str:
    return documentation(Path(__file__).with_name(f"{COMMANDS[name][0]}.py"), name)


app = group(
    {name: _documentation(name) for name in COMMANDS},
    load,
    name="regard",
    epilog=examples("regard demo", "regard cost --plot cost.png", "regard check quadratic"),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"regard {version('regard')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """State an attention mechanism once; compute, stream, see, count and prove it."""
