"""`regard train`: recipes, whose flags are the fields of their options and of the settings, and tasks of a user's."""

import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from regard.commands import leaving_at_once
from regard.commands.commands import COMMANDS, command, documentation, examples, group
from regard.commands.common import output, print_json, print_table, result_rows
from regard.core.masks import Window
from regard.core.masks.text import WINDOW, window_from_text
from regard.training import recipes
from regard.training.settings import Settings

if TYPE_CHECKING:
    from regard.training import Report, Task
    from regard.training.parallel import Place

FLAGS = {"start": "--from"}
"""Flags that are not named after their field: `from` is a keyword in Python."""

EXAMPLES = 32
"""The default batch size of a task of a user's."""

Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Folder of the run; runs/NAME if not given.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default the GPU if there is one.")]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="Under torchrun: ddp (replicated model), fsdp (sharded), or hsdp (sharded within each machine).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Begin again from step 0; what there was moves to RUN/former-1.")
]


def _command(name: str) -> Callable[..., None]:
    """The command of a recipe, or of a task of a user's."""
    if name in recipes.NAMES:
        with leaving_at_once():
            module = recipes.recipe(name)
        make, defaults, words = module.Options, module.settings(), module.__doc__ or ""
        options, hints = fields(make), {**get_type_hints(Settings), **get_type_hints(make)}
    else:
        make, defaults, words = dict, Settings(batch_size=EXAMPLES), f"Train {name}, a task of your own."
        options, hints = (), get_type_hints(Settings)
    settings = fields(Settings)

    def run(**values: Any) -> None:
        typed = {field: value for field, value in values.items() if value is not None}
        chosen = {field.name: _value(field, hints, typed) for field in options if field.name in typed}
        changed = {field.name: typed[field.name] for field in settings if field.name in typed}
        for size, other in (("batch_tokens", "batch_size"), ("batch_size", "batch_tokens")):
            if size in changed and other not in changed:
                changed[other] = None
        run_settings = replace(defaults, **changed)
        run_options = make(**chosen)
        with _placed(values["device"], values["strategy"]) as place:
            from regard.training.runs import begin, default_folder

            folder = values["out"] or default_folder(name if name in recipes.NAMES else name.rpartition(":")[2])
            task = begin(name, run_options, run_settings, folder, place)
            report = _run(task, run_settings, folder, place)
        if place.first:
            _show(report, folder, values["as_json"])

    parameters = [
        *(_parameter(field, hints[field.name], None, "What to train") for field in options),
        *(_parameter(field, hints[field.name], getattr(defaults, field.name), "How to train") for field in settings),
        *(_fixed("out", Out, None), _fixed("device", Device, None)),
        *(_fixed("strategy", Strategy, "ddp"), _fixed("as_json", AsJson, False)),
    ]
    return _signed(run, parameters, _summary(words))


def _signed(run: Callable[..., None], parameters: list[inspect.Parameter], words: str) -> Callable[..., None]:
    """A function with these parameters and this documentation, which typer reads."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = words
    return run


def _fixed(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(field: "Field[Any]", hint: Any, default: Any, panel: str) -> inspect.Parameter:
    """The command-line option of a field. Its value is None unless it is typed; the help text has the default."""
    shown = field.default if default is None and field.default is not MISSING else default
    words = str(field.metadata["help"])
    if shown not in (None, (), ""):
        words += escape(f" [default: {shown}]")
    kind = {NAMES: list[str], NUMBERS: str, Window: str}.get(_plain(hint), _plain(hint))
    flags = [FLAGS.get(field.name, "--" + field.name.replace("_", "-")), field.metadata["also"]]
    if kind is bool:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags if flag]
    metavar = WINDOW if _plain(hint) is Window else None
    option = typer.Option(*filter(None, flags), help=words, metavar=metavar, show_default=False, rich_help_panel=panel)
    return _fixed(field.name, Annotated[kind | None, option], None)


NAMES, NUMBERS = tuple[str, ...], tuple[int, ...]
"""Fields with several values: for names the flag is repeated, numbers are separated by commas."""


def _plain(hint: Any) -> Any:
    """The type of a field without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not types.NoneType)
    return hint


def _value(field: "Field[Any]", hints: dict[str, Any], typed: dict[str, Any]) -> Any:
    """The typed value of a field, converted to the field's type."""
    value, kind = typed[field.name], _plain(hints[field.name])
    if kind is Window:
        return window_from_text(field.name, value)
    if kind == NUMBERS:
        if not all(part.isascii() and part.isdigit() for part in value.split(",")):
            raise ValueError(f"{field.name}: expected whole numbers, like 4 or 1,2,1, got {value!r}")
        return tuple(int(part) for part in value.split(","))
    return tuple(value) if kind == NAMES else value


def resume() -> Callable[..., None]:
    """Resume a run from its newest valid checkpoint, perhaps with other settings, which run.json records."""
    settings = [field for field in fields(Settings) if not field.metadata["fixed"]]
    hints = get_type_hints(Settings)

    def run(folder: Path, **values: Any) -> None:
        changes = {field.name: values[field.name] for field in settings if values[field.name] is not None}
        with _placed(values["device"], values["strategy"]) as place:
            from regard.training.lock import writing
            from regard.training.runs import check_run, reopen

            Settings(**{"batch_size": 1, **changes})  # an error in a flag comes before one in the run
            check_run(folder)
            with writing(folder, place):
                task, changed = reopen(folder, place, **changes)
                report = _run(task, changed, folder, place, restart=values["restart"])
        if place.first:
            _show(report, folder, values["as_json"])

    parameters = [
        inspect.Parameter("folder", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Run),
        *(_fixed("restart", Restart, False), _fixed("device", Device, None)),
        *(_fixed("strategy", Strategy, "ddp"), _fixed("as_json", AsJson, False)),
        *(_parameter(field, hints[field.name], "as before", "How to go on") for field in settings),
    ]
    return _signed(run, parameters, str(resume.__doc__))


def _placed(device: str | None, strategy: str) -> Any:
    from regard.training.parallel import placed

    return placed(device, strategy)


def _run(task: "Task", settings: Settings, folder: Path, place: "Place", *, restart: bool = False) -> "Report":
    from regard.training import loop

    return loop.train(task, settings, folder, place=place, restart=restart)


def _show(report: "Report", folder: Path, as_json: bool) -> None:
    if as_json:
        values = {
            "folder": str(folder),
            "step": report.step,
            "steps": report.steps,
            "finished": report.finished,
            "early": report.early,
            "interrupted": report.interrupted,
            "loss": report.loss,
            "tokens_per_second": report.tokens_per_second,
            "results": report.results,
            "test": report.test,
        }
        from regard.training.metrics import without_nan

        print_json(without_nan(values))
    else:
        if report.results:
            columns = {"validation": report.results, **({"test": report.test} if report.test else {})}
            print_table(result_rows(columns, "best model"), right=list(columns))
        output().print(f"{report.step:,} steps, {report.tokens_per_second:,.0f} tokens/s -> {folder}", markup=False)
    if report.interrupted:
        words = f"saved after step {report.step:,}; to resume: regard train resume {folder}"
        print(words, file=sys.stderr if as_json else sys.stdout)
        raise typer.Exit(130)


def _load(name: str) -> Any:
    """The command of a recipe or of a task of a user's, or `resume`."""
    if name == "resume":
        flags = ("", " --steps 20000 --learning-rate 1e-4", " --restart")
        return command(resume(), name, tuple(f"regard train resume runs/translate{part}" for part in flags))
    if name not in recipes.NAMES:
        return command(_command(name), name, (f"regard train {name} --steps 2000 --batch-size 16 --out runs/mine",))
    mechanisms = (f"--mechanism quadratic --out runs/{name}-quadratic", "--mechanism my_file.py:Mine")
    return command(_command(name), name, tuple(f"regard train {name} {flags}" for flags in mechanisms))


def _listed(name: str) -> str:
    if name == "resume":
        return documentation(Path(__file__), name)
    return _summary(documentation(Path(recipes.__file__).with_name(f"{name}.py")))


def _summary(text: str) -> str:
    """The first paragraph of a docstring, as one line."""
    return text.split("\n\n")[0].replace("\n", " ")


def train() -> None:
    """Train a model with a recipe or with a task of your own (FILE.py:NAME), or resume a run."""


app = group(
    {name: _listed(name) for name in (*recipes.NAMES, "resume")},
    _load,
    epilog=examples(*COMMANDS["train"][1]),
    others=lambda name: ":" in name,
)
app.callback()(train)
