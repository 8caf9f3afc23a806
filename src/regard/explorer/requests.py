"""What a page asks for, from JSON to values. Anything else than what is expected is a ValueError before any work."""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from regard.core.mechanisms import named
from regard.explorer.changes import HeadChange, beta_of
from regard.explorer.subject import Input, Pair, Picture, Text

MOST_CHARACTERS = 100_000
"""The longest text, before it is cut into tokens."""
MOST_CHANGES = 256
MOST_STEPS = 64
"""New tokens of one generation."""
CHANGES = ("silence", "mean", "hide", "beta", "mechanism", "window")
WINDOW = "window"
"""The name of softmax within a window, among the mechanisms."""
DEFAULT_WINDOW = 8


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A pass of a model."""

    model: str = ""
    chosen: "Input | str" = ""
    """What the model reads; a string is the name of a built-in picture."""
    origin: str | None = None
    """Another run, whose model and tokens are taken instead."""
    changes: tuple[HeadChange, ...] = ()
    twin: bool = False
    lane: str = ""
    """The lane of the pass: a newer pass in the same lane replaces it."""


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    >>> parsed(b'{"run": "1"}')
    {'run': '1'}
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("body: expected JSON, got something else") from None
    if not isinstance(value, dict):
        raise ValueError(f"body: expected a JSON object, got {type(value).__name__}")
    return value


def text_of(body: Mapping[str, Any], name: str, *, most: int = MOST_CHARACTERS) -> str:
    """A string of a request."""
    value = body.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, got {value!r:.40}")
    if len(value) > most:
        raise ValueError(f"{name}: expected at most {most:,} characters, got {len(value):,}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no tokenizer takes
        raise ValueError(f"{name}: expected whole characters, got half of a surrogate pair") from None
    return value


def number_of(body: Mapping[str, Any], name: str, *, least: int = 0, most: int | None = None) -> int:
    """A whole number of a request.

    >>> number_of({"layer": 3}, "layer")
    3
    """
    value = body.get(name)
    if type(value) is not int or value < least or (most is not None and value > most):
        upper = "" if most is None else f" to {most}"
        raise ValueError(f"{name}: expected a whole number from {least}{upper}, got {value!r:.40}")
    return value


def flag_of(body: Mapping[str, Any], name: str) -> bool:
    """True or false; false if it is not there."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r:.40}")
    return value


def numbers_of(body: Mapping[str, Any], name: str, *, least: int | None = 0) -> tuple[int, ...] | None:
    """Whole numbers of a request; None for null and where there are none."""
    value = body.get(name)
    if value is None:
        return None
    whole = isinstance(value, list) and all(type(number) is int for number in value)
    if not whole or not value or len(value) > 100_000 or (least is not None and min(value) < least):
        raise ValueError(f"{name}: expected a list of whole numbers, or null, got {value!r:.40}")
    return tuple(value)


def run_request(body: Mapping[str, Any]) -> RunRequest:
    """The body of `run`.

    >>> run_request({"model": "minilm", "input": {"text": "a"}, "changes": [{"heads": [1], "silence": True}]}).changes
    (HeadChange(layers=None, heads=(1,), silence=True, mean=False, hide=(), beta=None, mechanism=None, window=None),)
    """
    listed = body.get("changes") or []
    if not isinstance(listed, list) or len(listed) > MOST_CHANGES:
        raise ValueError(f"changes: expected a list of at most {MOST_CHANGES}, got {listed!r:.40}")
    request = RunRequest(
        changes=tuple(change_of(change) for change in listed),
        twin=flag_of(body, "twin"),
        lane=text_of(body, "lane", most=64) if body.get("lane") is not None else "",
    )
    if body.get("of") is not None:
        return replace(request, origin=text_of(body, "of", most=64))
    return replace(request, model=text_of(body, "model", most=4096), chosen=input_of(body.get("input")))


def input_of(value: object) -> "Input | str":
    """What a model reads: a text, a source with a target, or a picture. A string is a built-in picture's name."""
    if not isinstance(value, dict):
        raise ValueError(f"input: expected an object with text, source or image, got {value!r:.40}")
    if "text" in value:
        return Text(text_of(value, "text"))
    if "source" in value:
        target = None if value.get("target") is None else text_of(value, "target")
        return Pair(text_of(value, "source"), target)
    if "image" in value:
        image = text_of(value, "image", most=2**24)
        if len(image) <= 64:
            return image
        encoded = image.rpartition("base64,")[2] if image.startswith("data:") else image
        try:
            return Picture(base64.b64decode(encoded, validate=True))
        except (binascii.Error, ValueError):
            raise ValueError("image: expected the name of a picture, or base64, got something else") from None
    raise ValueError(f"input: expected text, source or image, got {list(value)!r:.80}")


def input_json(chosen: Input) -> dict[str, Any]:
    """What `input_of` reads.

    >>> input_of(input_json(Pair("le chat"))) == Pair("le chat")
    True
    """
    if isinstance(chosen, Text):
        return {"text": chosen.text}
    if isinstance(chosen, Pair):
        return {"source": chosen.source, "target": chosen.target}
    return {"image": base64.b64encode(chosen.content).decode()}


def change_of(value: object) -> HeadChange:
    """One change."""
    if not isinstance(value, dict):
        raise ValueError(f"changes: expected objects, got {value!r:.40}")
    if not set(value) <= {"layers", "heads", *CHANGES}:
        unknown = sorted(set(value) - {"layers", "heads", *CHANGES})
        raise ValueError(f"changes: expected some of {', '.join(CHANGES)}, got {unknown!r:.80}")
    mechanism = None if value.get("mechanism") is None else text_of(value, "mechanism", most=64)
    window = None if value.get("window") is None else number_of(value, "window", most=1_000_000)
    if mechanism == WINDOW or window is not None:
        if mechanism not in (None, "softmax", WINDOW):
            raise ValueError(f"window: expected it with softmax, got {mechanism}")
        mechanism, window = None, DEFAULT_WINDOW if window is None else window
    if mechanism is not None:
        named(mechanism)  # of the shipped ones: a page imports no code
    change = HeadChange(
        layers=numbers_of(value, "layers"),
        heads=numbers_of(value, "heads"),
        silence=flag_of(value, "silence"),
        mean=flag_of(value, "mean"),
        hide=(numbers_of(value, "hide", least=None) if value.get("hide") else None) or (),
        beta=None if value.get("beta") is None else beta_of(value["beta"]),
        mechanism=mechanism,
        window=window,
    )
    replaced = change.beta is not None or change.mechanism is not None or change.window is not None
    if not (change.silence or change.mean or change.hide or replaced):
        raise ValueError(f"changes: expected one of {', '.join(CHANGES)}, got none")
    return change
