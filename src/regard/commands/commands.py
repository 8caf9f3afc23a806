"""The commands by name.

The module of a command, and torch with it, is imported when the command or its help is run. `regard --help` imports no
such module: it reads docstrings from the source files.
"""

import ast
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regard.commands import leaving_at_once
from regard.core.extras import needed_for

Abort = typer.Abort
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base class of errors in a command line; not all versions of typer have a public name for it."""

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
        (
            "regard train translate --mechanism quadratic",
            "regard train lm --mechanism my_file.py:Mine",
            "regard train my_file.py:MyTask --steps 2000",
        ),
    ),
    "evaluate": (
        "evaluate",
        (
            "regard evaluate runs/translate",
            "regard evaluate runs/classify --data labels.tsv --data more.tsv --json",
        ),
    ),
    "translate": (
        "translate",
        (
            'regard translate "La voiture rouge est rapide."',
            "regard translate --model runs/translate --file sentences.txt",
            'regard translate --model runs/own --mechanism my_file.py:Mine "Le chat dort."',
        ),
    ),
    "view": (
        "view",
        (
            "regard view",
            'regard view minilm "The animal did not cross the street because it was tired."',
            'regard view smollm2 "The capital of France is" --export page.html',
            "regard view --lab scaling",
        ),
    ),
    "lab": ("lab", ("regard lab list", "regard lab run noise", "regard lab run scaling --dims 4 4096 --seed 7")),
    "classify": (
        "classify",
        (
            'regard classify runs/classify "Return a list of the names in the archive."',
            'regard classify runs/own --mechanism my_file.py:Mine "Return a list."',
        ),
    ),
}
"""For each command, the module with the function of its name, and the examples at the end of its help."""
EXTRA = {"train": "train", "evaluate": "train", "demo": "train"}
"""The extra that a command needs completely. For other commands, an error names the smallest extra with the package."""


def load(name: str) -> Any:
    """Import a command's module and build the command."""
    module_name, lines = COMMANDS[name]
    with leaving_at_once(), needed_for("this command", EXTRA.get(name)):
        module = import_module(f"regard.commands.{module_name}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    return command(getattr(module, name), name, lines)


def command(function: Callable[..., None], name: str, lines: tuple[str, ...]) -> Any:
    """Make a function the command `name`; `lines` are the examples of its help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(name, epilog=examples(*lines))(function)
    built: Any = typer.main.get_command(app)
    built.callback = _with_flags(built.callback, built.params)
    return built


OPTIONS = {"storage": "state"}
"""Options by the library's argument that they set, which errors name; only where the two names differ by more than
`num_` or a plural s."""


def _with_flags(run: Callable[..., Any], parameters: Any) -> Callable[..., Any]:
    """Wrap a command so that its errors name the flag that was typed instead of the library's Python argument."""
    options = [(option.name, _typed(option.opts)) for option in parameters if option.opts[0].startswith("-")]
    flags = {spelling: flag for name, flag in options for spelling in (name, flag.strip("-").replace("-", "_"))}

    def flag(name: str) -> str | None:
        spellings = (name, name.removeprefix("num_"), name.removesuffix("s"), OPTIONS.get(name, ""))
        return next((flags[spelling] for spelling in spellings if spelling in flags), None)

    def run_with_flags(**values: Any) -> Any:
        try:
            return run(**values)
        except ValueError as error:
            name, colon, rest = str(error).partition(": expected ")
            if not colon or flag(name) is None:
                raise
            rest = re.sub(r"\b([a-z_]+) ?= ?(?=\w)", lambda match: f"{flag(match[1]) or match[1]} ", rest)
            raise ValueError(f"{flag(name)}{colon}{rest}") from error

    return run_with_flags


def _typed(spellings: list[str]) -> str:
    """The spelling of a flag on the command line, or the first spelling."""
    words = {word.partition("=")[0] for word in sys.argv}
    return next((spelling for spelling in spellings if spelling in words), spellings[0])


def examples(*commands: str) -> str:
    """The last section of a command's help; typer joins lines that are not separated by an empty line."""
    return "\n\n".join(["Example:" if len(commands) == 1 else "Examples:", *(f"  {command}" for command in commands)])


def group(
    documentation: dict[str, str],
    load: Callable[[str], Any],
    *,
    others: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> typer.Typer:
    """A group of commands listed with their documentation; a command is loaded by its name when it is run. `others`
    says whether a name that is not listed is a command, too."""

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and others(args[0]):
                return args[0], load(args[0]), args[1:]
            name, _, rest = super().resolve_command(ctx, args)
            return name, load(str(name)), rest

    app = typer.Typer(
        cls=Group, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", **options
    )
    for name, text in documentation.items():
        app.command(name, help=text)(_placeholder)
    return app


def _placeholder() -> None:
    """Placeholder in a group for a command that is not loaded yet."""


def documentation(source: Path, function: str | None = None) -> str:
    """The docstring of a module or of one of its functions, without importing the module."""
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
        from importlib.metadata import version  # 30 ms that `regard --help` does not need

        print(f"regard {version('regard')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Define an attention mechanism once; compute, stream, see, price and test it."""
