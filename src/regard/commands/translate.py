"""`regard translate`: translate sentences."""

import json
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.commands.common import Device, named, progress, read_text, waiting
from regard.core.files import save_figure

if TYPE_CHECKING:
    from regard.inference.generation import Generated

AT_ONCE = 256
"""Lines that are translated together; they are printed after that."""
WARNED = 5
"""How many warnings about lines outside of the training domain are printed; further ones are counted."""


def translate(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]…", help="Sentences; - for standard input, line by line.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A run or a checkpoint. Default: French to English, as shipped."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a sentence on each line; - for standard input.")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, metavar="N", help="Search for the likeliest text with N beams.")] = 4,
    show: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the cross-attention between words to this image file.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="The model's mechanism, if it is your own.")
    ] = None,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line for each sentence.")] = False,
) -> None:
    """Translate sentences, French to English unless another model is given. Empty lines stay empty.

    A sentence outside of the training domain is translated, too, with a warning on standard error that says why.
    """
    lines = _lines(texts, file)
    if show is not None and len(lines) != 1:
        raise ValueError(f"show: expected one sentence to draw, got {len(lines)}")
    if mechanism is not None and model is None:
        raise ValueError(f"mechanism: expected --model as well, got only {mechanism!r}")
    with waiting("loading the translator"):
        from regard.checkpoints import load_with
        from regard.core.mechanisms.text import lookup
        from regard.training.recipes import translate as recipe

        chosen = None if mechanism is None else lookup(mechanism)
        translator = recipe.shipped(device) if model is None else load_with(model, chosen, device=device)
        domain = recipe.domain(model)
    outside = [domain.outside(line) if domain is not None else [] for line in lines]
    with progress(-(-len(lines) // AT_ONCE), "translating") as advance:
        for start in range(0, len(lines), AT_ONCE):
            advance(f"line {start + 1:,}")
            part = lines[start : start + AT_ONCE]
            composed = [unicodedata.normalize("NFC", line) for line in part if line.strip()]
            written = recipe.translate(translator, composed, beams=beams)
            if show is not None:
                with named(path="show"):
                    save_figure(recipe.attention_figure(translator, lines[0], written[0]), show)
            _print(part, written, None if domain is None else outside[start : start + AT_ONCE], as_json)
    _warn(outside)


def _lines(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    if texts and file is not None:
        raise ValueError("text: expected sentences or --file, got both")
    if texts == ["-"]:
        file = Path("-")
    if file is not None:
        lines = read_text("text", file).replace("\r\n", "\n").removesuffix("\n").split("\n")
        if not any(line.strip() for line in lines):
            raise ValueError(f"text: expected sentences, got none in {file}")
        return lines
    if not texts:
        raise ValueError(
            'text: expected a sentence to translate, as in regard translate "Le chat dort.", or --file FILE, got none'
        )
    if not all(text.strip() for text in texts):
        raise ValueError("text: expected sentences, got an empty one")
    return list(texts)


def _warn(outside: Sequence[Sequence[str]]) -> None:
    """Warn on standard error about sentences outside of the training domain, with the reasons."""
    reasons = {number: "; ".join(line) for number, line in enumerate(outside, start=1) if line}
    for number, reason in list(reasons.items())[:WARNED]:
        place = f"line {number:,} is " if len(outside) > 1 else ""
        print(f"regard: {place}outside of what the translator knows ({reason})", file=sys.stderr)
    if len(reasons) > WARNED:
        print(f"regard: and {len(reasons) - WARNED:,} more of {len(outside):,} lines", file=sys.stderr)


def _print(
    lines: Sequence[str], written: Sequence["Generated"], outside: Sequence[Sequence[str]] | None, as_json: bool
) -> None:
    left = iter(written)
    for number, line in enumerate(lines):
        text = next(left) if line.strip() else None
        if not as_json:
            print(text or "")
        elif text is not None:
            score = {} if text.score is None else {"score": text.score}
            reasons = None if outside is None else outside[number]
            values = {"text": line, "translation": str(text), "reason": text.reason, **score, "outside": reasons}
            print(json.dumps(values, ensure_ascii=False))
