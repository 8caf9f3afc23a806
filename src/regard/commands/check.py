"""`regard check`: run the laws on shipped mechanisms and on a user's mechanisms."""

import math
from typing import Annotated

import typer

import regard as rg
from regard.commands.common import named, one_thread, print_json, print_table, progress
from regard.core.laws import LAWS
from regard.core.laws.case import DTYPES, HEADS, MASKS
from regard.core.mechanisms import REGISTRY
from regard.core.mechanisms.text import CHOICES, from_text


def check(
    mechanisms: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MECHANISM]…", help=f"One of {CHOICES}. Default: all shipped mechanisms.", show_default=False
        ),
    ] = None,
    user_mechanisms: Annotated[
        list[str] | None,
        typer.Option(
            "--own", metavar="FILE.py:NAME", help="A mechanism of your own, as above. May repeat.", show_default=False
        ),
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join(LAWS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join(MASKS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join(HEADS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join(DTYPES)}. May repeat. Default: all.", show_default=False),
    ] = None,
    qk_length: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The head dimension, for a mechanism that supports only one.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where the laws run: cpu, cuda, cuda:1, …")] = "cpu",
    examples: Annotated[int, typer.Option(min=1, metavar="N", help="Random shapes for each cell.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every cell.")] = False,
) -> None:
    """Run the laws on mechanisms, for every law, mask, grouping of heads and dtype. Exit 1 if a law is broken."""
    chosen = [from_text(text) for text in mechanisms or (() if user_mechanisms else REGISTRY)]
    with named(mechanism="own"):
        chosen += [from_text(text) for text in user_mechanisms or ()]
    picked = {
        "laws": law or list(LAWS),
        "masks": mask or list(MASKS),
        "heads": heads or list(HEADS),
        "dtypes": dtype or list(DTYPES),
    }
    cells = math.prod(len(names) for names in picked.values())
    reports = []
    for number, mechanism in enumerate(chosen, start=1):
        with one_thread(), progress(cells, f"checking {number} of {len(chosen)}") as advance:
            reports.append(
                rg.check(mechanism, **picked, qk_length=qk_length, device=device, examples=examples, progress=advance)
            )
        if not as_json:
            _print(reports[-1])
    outcomes: list[str] = [cell.outcome for report in reports for cell in report.cells]
    counts = {name: outcomes.count(name.replace("_", " ")) for name in ("held", "broken", "not_applicable")}
    if as_json:
        print_json({"mechanisms": [report.to_dict() for report in reports], "cells": len(outcomes), **counts})
    else:
        spelled = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        print(f"{len(outcomes):,} cells: {spelled}")
    if counts["broken"]:
        raise typer.Exit(1)


def _print(report: rg.Report) -> None:
    print(report.heading)
    print_table(report.rows(), right=("cells",))
    for note in report.notes():
        print(note)
    print(flush=True)
