"""`regard check`: the laws, on shipped mechanisms and on those of the user's files."""

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import regard as rg
from regard.cli.common import one_thread, print_json, progress
from regard.laws import LAWS
from regard.laws.case import DTYPES, HEADS, MASKS
from regard.mechanisms import REGISTRY, named


def check(
    mechanisms: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MECHANISM]…", help=f"Of {', '.join(REGISTRY)}. Default: all.", show_default=False),
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="A mechanism of your own, as module:name or file.py:Name. May repeat.",
            show_default=False,
        ),
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(LAWS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(MASKS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(HEADS)}. May repeat. Default: all.", show_default=False),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(DTYPES)}. May repeat. Default: all.", show_default=False),
    ] = None,
    qk_length: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="For a mechanism that takes heads of one length alone.", show_default=False
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, metavar="N", help="Random shapes for each cell.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every cell.")] = False,
) -> None:
    """Run the laws on mechanisms: every law, mask, grouping of heads and dtype is a cell. Exit 1 if one is broken."""
    chosen = [named(name) for name in mechanisms or ([] if own else REGISTRY)] + [_own(place) for place in own or []]
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
            reports.append(rg.check(mechanism, **picked, qk_length=qk_length, examples=examples, progress=advance))
        if not as_json:
            print(reports[-1], end="\n\n", flush=True)
    outcomes = [cell.outcome for report in reports for cell in report.cells]
    counts = {name: outcomes.count(name.replace("_", " ")) for name in ("held", "broken", "not_applicable")}
    if as_json:
        print_json({"mechanisms": [report.to_dict() for report in reports], "cells": len(outcomes), **counts})
    else:
        spelled = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        print(f"{len(outcomes):,} cells: {spelled}")
    if counts["broken"]:
        raise typer.Exit(1)


def _own(place: str) -> rg.Mechanism:
    """The mechanism at `module:name` or `file.py:Name`; a class or function is called for one."""
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(f"own: expected module:name or file.py:Name, got {place!r}")
    module = _module(where)
    if not hasattr(module, name):
        raise ValueError(f"own: expected {where} to have {name!r}, got nothing of that name")
    found = getattr(module, name)
    if callable(found) and not isinstance(found, rg.Mechanism):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(f"own: expected {name} to need no arguments, got {error}") from error
    if not isinstance(found, rg.Mechanism):
        raise ValueError(f"own: expected {name} to be a regard.Mechanism, got {type(found).__name__}")
    return found


def _module(where: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` finds modules
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        if not Path(where).is_file():
            raise ValueError(f"own: expected a file, got {where!r}, which is none")
        name = Path(where).stem
        spec = importlib.util.spec_from_file_location(name, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except ValueError:
        raise
    except Exception as error:  # whatever a user's file raises is theirs to put right
        raise ValueError(f"own: {where} cannot be imported: {type(error).__name__}: {error}") from error
