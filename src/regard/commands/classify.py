"""`regard classify`: the classes of texts."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from regard.commands.common import Device, output, progress, read_text, waiting

AT_ONCE = 64
"""Texts per batch; they are printed after each batch."""
BAR = 20
"""Characters of a full bar."""


def classify(
    source: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A run of `regard train classify`, or a checkpoint.", show_default=False),
    ],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]…", help="Texts to classify; - for standard input, line by line.", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a text on each line; - for standard input.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="The model's mechanism, if it is your own.")
    ] = None,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line for each text.")] = False,
) -> None:
    """Print the class of each text with its probability; for a single text, the probabilities of all classes."""
    lines = _lines(texts, file)
    with waiting(f"loading {source}"):
        from regard.checkpoints import load_with
        from regard.core.mechanisms.text import lookup
        from regard.models.base import expect
        from regard.models.encoder import Encoder

        model = expect(Encoder, load_with(source, None if mechanism is None else lookup(mechanism), device=device))
    if not model.config.num_classes or model.tokenizer is None:
        raise ValueError(
            f"model: expected an encoder with classes and a tokenizer, as `regard train classify` makes, got {source}"
        )
    names = model.config.class_names or tuple(map(str, range(model.config.num_classes)))
    results: list[dict[str, Any]] = []
    with progress(-(-len(lines) // AT_ONCE), "classifying") as advance:
        for start in range(0, len(lines), AT_ONCE):
            advance(f"text {start + 1:,}")
            part = lines[start : start + AT_ONCE]
            for text, row in zip(part, model.probabilities(part).tolist(), strict=True):
                likely = dict(sorted(zip(names, row, strict=True), key=lambda item: -item[1]))
                results.append({"text": text, "label": next(iter(likely)), "probabilities": likely})
                if as_json:
                    print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    if not as_json:
        _print(results)
    cut = sum(len(model.tokenizer.encode(line)) > model.config.context_length for line in lines)
    if cut:
        print(f"{cut:,} of the texts were truncated to {model.config.context_length} tokens", file=sys.stderr)


def _lines(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    if texts and file is not None:
        raise ValueError("text: expected texts or --file, got both")
    if texts == ["-"]:
        file = Path("-")
    if file is None:
        if not texts:
            raise ValueError(
                'text: expected a text to classify, as in regard classify MODEL "Some text.", or --file FILE, got none'
            )
        lines, place = list(texts), "text"
    else:
        lines, place = read_text("text", file).replace("\r\n", "\n").removesuffix("\n").split("\n"), "line"
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            raise ValueError(f"text: expected words, got an empty {place}{f' {number}' if len(lines) > 1 else ''}")
    return lines


def _print(results: Sequence[dict[str, Any]]) -> None:
    """Print a row for each text; for a single text, a row for each class."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("label")
    table.add_column("probability", justify="right")
    table.add_column("", no_wrap=True, width=BAR)
    if len(results) == 1:
        for label, likely in results[0]["probabilities"].items():
            table.add_row(escape(label), f"{likely:.1%}", _bar(likely))
    else:
        table.add_column("text", overflow="ellipsis", no_wrap=True)
        for result in results:
            likely = result["probabilities"][result["label"]]
            table.add_row(escape(result["label"]), f"{likely:.1%}", _bar(likely), Text(result["text"]))
    output().print(table)


def _bar(part: float) -> Text:
    """A bar, in eighths of a character."""
    eighths = round(part * BAR * 8)
    return Text("█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else ""), style="cyan")
