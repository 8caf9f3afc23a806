"""The command line: parse, call, print.

Results go to standard output, progress and errors to standard error. Exit codes: 0 all is well, 1 a law is broken or a
goal is missed, 2 something the user can put right, 130 interrupted.
"""

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from regard.cli import bench, chat, check, classify, cost, demo, generate, models, train, translate

# What typer has no public name for in all of its versions: the parent of everything wrong with a command line.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _examples(*commands: str) -> str:
    """The last section of a command's help; an empty line is how typer ends a line."""
    return "\n\n".join(["Example:" if len(commands) == 1 else "Examples:", *(f"  {command}" for command in commands)])


app = typer.Typer(
    name="regard",
    help="State an attention mechanism once; compute, stream, see, count and prove it.",
    epilog=_examples("regard demo", "regard cost --plot cost.png", "regard check quadratic"),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Run the command line: `regard`, or `python -m regard`."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="regard", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: `regard cost | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except UsageError as error:
        code = _fail(error.format_message())  # type: ignore[attr-defined]
    except ValueError as error:
        code = _fail(str(error))
    except OSError as error:
        code = _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        print("regard: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    print(f"regard: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


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


app.command(epilog=_examples("regard demo --out tour"))(demo.demo)
app.command(
    epilog=_examples("regard check quadratic --law streamed --mask causal", "regard check --own mine.py:Cauchy --json")
)(check.check)
app.command(epilog=_examples("regard cost --length 1024,16384 --kv-heads 8 --plot cost.png", "regard cost --measure"))(
    cost.cost
)
app.command(epilog=_examples("regard bench --list", "regard bench --only padded --only append --json"))(bench.bench)
app.command(epilog=_examples("regard models", "regard models smollm2 --length 2048"))(models.models)
app.command(
    epilog=_examples(
        "regard convert smollm2 smollm2-hf", "regard convert minilm minilm-elu --to regard --mechanism elu"
    )
)(models.convert)
app.command(
    epilog=_examples(
        'regard generate smollm2 "The capital of France is" --max-new-tokens 16',
        'regard generate smollm2 "Write a haiku." --chat --temperature 0.8 --seed 1 --show-cost',
        "regard generate smollm2 --file prompts.txt --n 2 --temperature 1 --json",
    )
)(generate.generate)
app.command(epilog=_examples("regard chat smollm2", 'regard chat smollm2 --system "Answer briefly."'))(chat.chat)
app.add_typer(train.app, name="train")
app.command(
    epilog=_examples(
        'regard translate "La voiture rouge est rapide."',
        "regard translate --model runs/translate --file sentences.txt",
    )
)(translate.translate)
app.command(epilog=_examples('regard classify runs/classify "Return a list of the names in the archive."'))(
    classify.classify
)
