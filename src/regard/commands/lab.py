"""`regard lab`: statements about attention, run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.commands.commands import COMMANDS, command, documentation, examples, group
from regard.commands.common import print_json, print_table, progress
from regard.lab.experiment import Experiment, Outcome
from regard.lab.registry import experiments, lookup, run

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def list_(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Show these with their parameters.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The experiments; with an ID, its statement and its parameters."""
    chosen = [lookup(name) for name in names] if names else list(experiments().values())
    if as_json:
        print_json({"experiments": [_described(experiment) for experiment in chosen]})
    elif names:
        for experiment in chosen:
            _print_experiment(experiment)
    else:
        print_table(
            [
                {"id": experiment.name, "of": ", ".join(experiment.claims), "title": experiment.title}
                for experiment in chosen
            ]
        )


def run_(
    words: Annotated[
        list[str],
        typer.Argument(metavar="ID… [--PARAMETER VALUE…]", help="Experiments, and values for their parameters."),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the picture of the experiment to this image file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run experiments: their measurements, and the verdict that follows from them."""
    names, typed = _parsed(words)
    chosen = [lookup(name) for name in names]
    values = [_read(experiment, typed) for experiment in chosen]
    if plot is not None and len(chosen) > 1:
        raise ValueError(f"plot: expected one experiment, got {len(chosen)}")
    outcomes = []
    with progress(len(chosen), "lab") as advance:
        for experiment, parameters in zip(chosen, values, strict=True):
            advance(experiment.name)
            outcomes.append(run(experiment.name, **parameters))
    if plot is not None:
        from regard.core.files import save_figure

        save_figure(outcomes[0].figure, plot)
    if as_json:
        print_json({"outcomes": [outcome.to_dict() for outcome in outcomes]})
        return
    for outcome in outcomes:
        _print_outcome(outcome)
    if plot is not None:
        print(f"-> {plot}")


def report_(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="These experiments alone.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Write the report to this folder.")] = Path("lab"),
    pdf: Annotated[bool, typer.Option(help="Write report.pdf beside the HTML page.")] = True,
    restart: Annotated[
        bool, typer.Option("--restart", help="Run all again, also what the folder has from before.")
    ] = False,
) -> None:
    """Run all experiments, and write one HTML page, a PDF and a JSON file; called again, it goes on where it was."""
    from regard.lab.reporting import report

    with progress(len(names or experiments()), "lab") as advance:
        content = report(names or (), folder=out, pdf=pdf, restart=restart, begin=advance)
    print_table([{"verdict": verdict, "statements": str(count)} for verdict, count in content.counts.items()])
    for entry in content.entries:
        if entry.outcome.measurements is None:
            print(f"{entry.outcome.experiment.name}: {entry.outcome.missing}")
    print(f"-> {out / 'index.html'}")


def sheet(
    names: Annotated[
        list[str],
        typer.Argument(metavar="ID…", help="Documents (000 to 004), topics or experiments: a sheet for each."),
    ],
    solutions: Annotated[bool, typer.Option("--solutions", help="With the solutions, for teachers.")] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Write into this folder.")] = Path(),
) -> None:
    """Write worksheets: questions with cells that check the answers, as a notebook and as Markdown."""
    from regard.lab.sheet import chosen, write_sheet

    for name in names:
        chosen(name)
    for name in names:
        for path in write_sheet(name, out, solutions=solutions):
            print(f"-> {path}")


def _parsed(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The names that come before the first flag, and the words after each flag."""
    names: list[str] = []
    typed: dict[str, list[str]] = {}
    target = names
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            target = typed.setdefault(flag.replace("-", "_"), [])
            target += [value] if equals else []
        else:
            target.append(word)
    if not names:
        raise ValueError("experiment: expected at least one ID before the parameters; `regard lab list` shows them")
    return names, typed


def _read(experiment: Experiment, typed: dict[str, list[str]]) -> dict[str, Any]:
    for name in typed:
        if name not in experiment.parameters:
            flags = ", ".join(f"--{name}" for name in experiment.parameters)
            raise ValueError(f"--{name}: expected a parameter of {experiment.name} ({flags})")
    return {name: experiment.parameters[name].read(words) for name, words in typed.items()}


def _described(experiment: Experiment) -> dict[str, Any]:
    return {
        "id": experiment.name,
        "claims": list(experiment.claims),
        "title": experiment.title,
        "statement": experiment.statement,
        "formula": experiment.formula,
        "needs": list(experiment.needs),
        "parameters": {
            name: {"default": parameter.default, "low": parameter.range.low, "high": parameter.range.high}
            for name, parameter in experiment.parameters.items()
        },
    }


def _print_experiment(experiment: Experiment) -> None:
    print(f"{experiment.name} ({', '.join(experiment.claims)}): {experiment.title}\n{experiment.statement}")
    print_table(
        [
            {
                "parameter": f"--{name}",
                "default": " ".join(map(str, parameter.default)) if parameter.many else str(parameter.default),
                "takes": parameter.expected(),
            }
            for name, parameter in experiment.parameters.items()
        ]
    )


def _print_outcome(outcome: Outcome) -> None:
    print(outcome)
    if outcome.checks:
        print_table(outcome.check_rows(), right=("predicted", "measured", "tolerance", "interval"), section=("of",))


SUBCOMMANDS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "list": (list_, ("regard lab list", "regard lab list scaling")),
    "run": (
        run_,
        (
            "regard lab run noise orthogonal",
            "regard lab run scaling --dims 4 4096 --samples 100000 --seed 7",
            "regard lab run temperature --plot temperature.svg --json",
        ),
    ),
    "report": (report_, ("regard lab report", "regard lab report scaling noise --out two --no-pdf")),
    "sheet": (
        sheet,
        ("regard lab sheet 003 --out sheets", "regard lab sheet scaling masks --solutions --out sheets"),
    ),
}
"""For each command of the lab its function, and the examples at the end of its help."""


def _load(name: str) -> Any:
    function, examples = SUBCOMMANDS[name]
    built = command(function, name, examples)
    # Parameters of an experiment are flags that click does not know.
    built.ignore_unknown_options = name == "run"
    return built


app = group(
    {name: documentation(Path(__file__), function.__name__) for name, (function, _) in SUBCOMMANDS.items()},
    _load,
    epilog=examples(*COMMANDS["lab"][1]),
)


@app.callback()
def lab() -> None:
    """Statements about attention, measured: experiments whose verdicts follow from numbers."""
