"""`regard models` and `regard convert`: show and convert checkpoints by name or path."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

import regard as rg
from regard.checkpoints import NAMES, check_target, load_with, resolve, save_peft
from regard.commands.common import one_of, print_json, print_table, waiting
from regard.core.cost import human
from regard.core.mechanisms.text import CHOICES, lookup

LAYOUTS = ("huggingface", "regard", "peft")
FILE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ANY_SOURCE = f"One of {', '.join(NAMES)}; or a checkpoint folder; or a .gguf file."
MechanismName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Another mechanism, one of {CHOICES}. Default: the model's; if that is your own, it must be given.",
    ),
]
"""A checkpoint imports no code, so the file of a user's mechanism must be given."""


def models(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME_OR_PATH", help=f"{ANY_SOURCE} Default: list the names.", show_default=False),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Count at this length. Default: the model's context, at most 4,096."),
    ] = None,
    mechanism: MechanismName = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list as JSON; for models, a JSON object per line.")
    ] = False,
) -> None:
    """List the models that install by name; or show the layers, heads, parameters, state and FLOPs of models."""
    if not sources:
        for name, value in (("length", length), ("mechanism", mechanism)):
            if value is not None:
                raise ValueError(f"{name}: expected a model as well, got none")
        _list_names(as_json)
        return
    chosen = None if mechanism is None else lookup(mechanism)
    for source in sources:
        with waiting(f"loading {source}"):
            summary = load_with(source, chosen).summary(length)
        if as_json:
            print(json.dumps(summary.to_json(), ensure_ascii=False))
            continue
        if len(sources) > 1:
            print(source)
        rows = summary.rows()
        print_table(rows, right=list(rows[0])[-2:])
        print("\n".join(summary.notes()), flush=True)


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=ANY_SOURCE, show_default=False)],
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Written atomically; an earlier checkpoint there is replaced."),
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="huggingface: for other libraries. regard: any model, any mechanism. peft: adapters of a LoRA run.",
        ),
    ] = "huggingface",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"One of {', '.join(FILE_DTYPES)}. Default: the source's, float32 for .gguf files."
        ),
    ] = None,
    mechanism: MechanismName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert a model to a checkpoint folder: weights, config and tokenizer. Adapters of a LoRA run are merged."""
    # Check everything that does not need the model first: loading takes seconds.
    one_of("to", to, {name: name for name in LAYOUTS})
    chosen = None if mechanism is None else lookup(mechanism)
    if to != "regard" and chosen not in (None, rg.Softmax()):
        raise ValueError(f"mechanism: expected --to regard, which can store {mechanism}, got --to {to}")
    wanted = None if dtype is None else one_of("dtype", dtype, FILE_DTYPES)
    check_target(folder)
    if resolve(source).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"folder: expected another than the source's, which would be overwritten, got {folder}")
    with waiting(f"converting {source}"):
        model = load_with(source, chosen, dtype=wanted)
        if to == "peft":
            save_peft(resolve(source), model, folder)
        else:
            rg.save(model, folder, layout=to)  # type: ignore[arg-type]
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kind, kept = type(model).__name__, str(model.dtype).removeprefix("torch.")
    if as_json:
        files = [{"name": name, "bytes": size} for name, size in sizes.items()]
        report = {"source": source, "folder": str(folder), "to": to, "model": kind, "dtype": kept}
        print_json({**report, "parameters": parameters, "files": files})
        return
    print_table([{"file": name, "size": human(size, "B")} for name, size in sizes.items()], right=("size",))
    print(f"{kind}, {parameters:,} parameters, {kept}")
    print(f"-> {folder}")


def _list_names(as_json: bool) -> None:
    rows = []
    for name, entry in NAMES.items():
        path = entry.find()
        rows.append(
            {
                "name": name,
                "description": entry.description,
                "licence": entry.licence,
                "installed": path is not None,
                "path": None if path is None else str(path),
                "command": entry.command,
            }
        )
    if as_json:
        print_json(rows)
        return
    shown = [{**row, "installed": "yes" if row["installed"] else "no"} for row in rows]
    print_table(shown, drop=("path", "command"))
    # Below the table, so that a narrow terminal does not break commands in two.
    for row in rows:
        if not row["installed"]:
            print(f"to install {row['name']}: {row['command']}")
