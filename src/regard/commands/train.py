"""`regard train`: recipes. Their flags are the fields of their options and of the settings."""

import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from regard.commands import leaving_at_once
from regard.commands.commands import COMMANDS, command, documentation, examples, group
from regard.commands.common import output, print_json, print_table
from regard.training import recipes
from regard.training.settings import Settings

if TYPE_CHECKING:
    from regard.training import Report, Task
    from regard.training.parallel import Place

FLAGS = {"start": "--from"}
"""Fields whose flag is not their own name: `from` is a word of Python's."""

Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Folder of the run; runs/NAME if not given.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one and nothing is said.")
]
Strategy = Annotated[str, typer.Option("--strategy", help="Under torchrun: ddp (whole models) or fsdp (shards).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the end of the run as JSON.")]


def _command(name: str) -> Callable[..., None]:
    """The command of a recipe."""
    with leaving_at_once():
        module = recipes.recipe(name)
    options, settings = fields(module.Options), fields(Settings)
    defaults = module.settings()

    def run(**given: Any) -> None:
        chosen = {one.name: _plain(given[one.name]) for one in options if given[one.name] is not None}
        changed = {one.name: given[one.name] for one in settings if given[one.name] is not None}
        for one, other in (("batch_tokens", "batch_size"), ("batch_size", "batch_tokens")):
            if one in changed and other not in changed:
                changed[other] = None
        wanted = replace(defaults, **changed)
        made = module.Options(**chosen)
        with _placed(given["device"], given["strategy"]) as place:
            from regard.training.runs import begin, default_folder

            folder = given["out"] or default_folder(name)
            task = begin(name, made, wanted, folder, place)
            _run(task, wanted, folder, place, given["as_json"])

    hints = {**get_type_hints(Settings), **get_type_hints(module.Options)}
    parameters = [
        *(_parameter(one, hints[one.name], None, "What to train") for one in options),
        *(_parameter(one, hints[one.name], getattr(defaults, one.name), "How to train") for one in settings),
        *(_fixed("out", Out, None), _fixed("device", Device, None)),
        *(_fixed("strategy", Strategy, "ddp"), _fixed("as_json", AsJson, False)),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__ = _summary(module.__doc__ or "")
    return run


def _fixed(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(one: "Field[Any]", hint: Any, default: Any, panel: str) -> inspect.Parameter:
    """A field as an option that is None unless it is given, its default told in words."""
    shown = one.default if default is None and one.default is not MISSING else default
    words = str(one.metadata.get("help", ""))
    if shown not in (None, (), ""):
        words += escape(f" [default: {shown}]")
    flag = FLAGS.get(one.name, "--" + one.name.replace("_", "-"))
    kind = _kind(hint)
    flags = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)
    option = typer.Option(*flags, help=words, show_default=False, rich_help_panel=panel)
    return _fixed(one.name, Annotated[kind | None, option], None)


def _kind(hint: Any) -> Any:
    """The type of a flag, whether or not it may be left out."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not types.NoneType)
    return list[str] if get_origin(hint) is tuple else hint


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Train to this many steps instead.")] = None,
    device: Device = None,
    strategy: Strategy = "ddp",
    as_json: AsJson = False,
) -> None:
    """Go on with a run after its newest good checkpoint."""
    with _placed(device, strategy) as place:
        from regard.training.runs import reopen

        task, settings = reopen(folder, place, steps)
        _run(task, settings, folder, place, as_json)


def _placed(device: str | None, strategy: str) -> Any:
    from regard.training.parallel import placed

    return placed(device, strategy)


def _run(task: "Task", settings: Settings, folder: Path, place: "Place", as_json: bool) -> None:
    from regard.training import loop

    if not place.first:
        loop.train(task, settings, folder, place=place)
        return
    console = Console(stderr=True)
    columns = (
        TextColumn(task.name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as bar:
        line = bar.add_task(task.name, total=settings.steps, loss=float("nan"), speed=0.0)

        def watch(report: "Report") -> None:
            bar.update(line, completed=report.step, loss=report.loss, speed=report.tokens_per_second)
            lines = [report.message] if report.message else []
            if report.kind == "evaluated":
                told = ", ".join(f"{name} {value:.4g}" for name, value in report.results.items())
                lines.append(f"step {report.step:,}: {told}; {report.tokens_per_second:,.0f} tokens/s")
                lines += [f"    {sample}" for sample in report.samples]
            for words in lines:
                console.print(words, highlight=False, markup=False, soft_wrap=True)

        report = loop.train(task, settings, folder, place=place, watch=watch)
    _show(report, folder, as_json)


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
        }
        print_json(values)
    else:
        if report.results:
            rows = [{"best result": name, "": f"{value:.4g}"} for name, value in report.results.items()]
            print_table(rows, right=("",))
        output().print(f"{report.step:,} steps, {report.tokens_per_second:,.0f} tokens/s -> {folder}", markup=False)
    if report.interrupted:
        words = f"saved after step {report.step:,}; to go on: regard train resume {folder}"
        print(words, file=sys.stderr if as_json else sys.stdout)
        raise typer.Exit(130)


def _load(name: str) -> Any:
    """The command of a recipe, or `resume`."""
    if name == "resume":
        return command(resume, name, ("regard train resume runs/translate",))
    shipped, own = f"--mechanism quadratic --out runs/{name}-quadratic", "--mechanism my_file.py:Mine"
    return command(_command(name), name, (f"regard train {name} {shipped}", f"regard train {name} {own}"))


def _listed(name: str) -> str:
    if name == "resume":
        return documentation(Path(__file__), name)
    return _summary(documentation(Path(recipes.__file__).with_name(f"{name}.py")))


def _summary(text: str) -> str:
    """The first paragraph of a docstring, as one line."""
    return text.split("\n\n")[0].replace("\n", " ")


def train() -> None:
    """Train a model by a recipe; or go on with a run."""


app = group(
    {name: _listed(name) for name in (*recipes.NAMES, "resume")},
    _load,
    epilog=examples(*COMMANDS["train"][1]),
    no_args_is_help=True,
)
app.callback()(train)
