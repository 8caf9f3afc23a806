"""`regard evaluate`: what the best and the last model of a run reach."""

from pathlib import Path
from typing import Annotated

import typer

from regard.commands.common import Device, print_json, print_table, progress, result_rows


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `regard train`.", show_default=False)],
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Files or folders to measure with, in the form of the recipe's --data."),
    ] = None,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure a run's best and last model on its validation and test data, or on files of yours."""
    with progress(2 if data else 4, "evaluating") as advance:
        advance("reading the run")
        from regard.training.evaluation import evaluate as measure
        from regard.training.metrics import without_nan
        from regard.training.parallel import placed
        from regard.training.runs import check_run, reopen

        check_run(run)
        with placed(device) as place:
            task, _ = reopen(run, place)
            results = measure(task, run, data or (), device=device, advance=advance)
    if as_json:
        print_json({"folder": str(run), **without_nan(results)})
        return
    columns = {
        f"{name} model, {part}": values[part]
        for name, values in results.items()
        for part in ("data", "validation", "test")
        if part in values
    }
    steps = " and ".join(f"the {name} is of step {values['step']:,}" for name, values in results.items())
    print_table(result_rows(columns, "result"), right=list(columns))
    print(f"{run}: {steps}")
