"""`regard demo`: train, translate, look inside, compare, count and check in two minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.commands.common import one_thread, output, print_table, progress

if TYPE_CHECKING:
    from regard.commands.demo_page import Step


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the pictures and the page.")] = Path(
        "regard-demo"
    ),
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of each training.")] = 900,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of weights and order.")] = 0,
) -> None:
    """Train two small translators in about two minutes, one with softmax and one with quadratic attention; translate,
    see where they attend, compare, count, check the laws."""
    out.mkdir(parents=True, exist_ok=True)  # fail before the imports for figures, which take seconds
    from regard.commands.demo_page import run

    console = output()
    number = 0

    def show(step: "Step") -> None:
        nonlocal number
        number += 1
        console.print(f"\n[bold]{number}. {step.title}[/bold]")
        console.print(step.words, markup=False, highlight=False)
        if step.rows:
            print_table(step.rows, right=step.right)
        for note in step.notes:
            print(note)
        for picture in step.pictures:
            print(f"-> {out / picture.name}")

    with one_thread():
        page = run(out, steps=steps, seed=seed, show=show, watch=progress)
    print(f"\nAll of it on one page: {page}")
