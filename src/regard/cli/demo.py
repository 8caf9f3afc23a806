"""`regard demo`: a tour."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.common import one_thread, output, progress

if TYPE_CHECKING:
    from regard.demo import Step


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the pictures and the page.")] = Path(
        "regard-demo"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the words' vectors.")] = 0,
) -> None:
    """A tour of a minute: a softmax and a quadratic mechanism computed, streamed, seen, counted and proved."""
    out.mkdir(parents=True, exist_ok=True)  # before the seconds that drawing takes to load
    from regard.demo import run

    console = output()
    number = 0

    def show(step: "Step") -> None:
        nonlocal number
        number += 1
        console.print(f"\n[bold]{number}. {step.title}[/bold]")
        console.print(step.words, markup=False, highlight=False)
        print(f"\n{step.numbers}")
        for picture in step.pictures:
            print(f"-> {out / picture.name}")

    with one_thread():
        page = run(out, seed=seed, show=show, watch=lambda cells: progress(cells, "proving"))
    print(f"\nAll of it on one page: {page}")
