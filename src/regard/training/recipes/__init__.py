"""Recipes: one file each, with its `Options`, its default `settings()` and `build(options, folder, seed)`, which gives
the task."""

import importlib
from types import ModuleType

from regard.core.calls.choice import refusal
from regard.core.extras import needed_for
from regard.core.masks import causal
from regard.core.masks.structure import Structure
from regard.core.mechanisms.text import from_text

NAMES = ("translate", "lm", "bert", "classify", "vision")


def recipe(name: str) -> ModuleType:
    """The module of a recipe.

    >>> from regard.training.recipes import recipe
    >>> recipe("translate").Options().mechanism
    'softmax'
    """
    if name not in NAMES:
        raise ValueError(f"recipe: expected one of {', '.join(NAMES)}, got {name!r}")
    with needed_for("training", "train"):
        return importlib.import_module(f"regard.training.recipes.{name}")


def check_causal(mechanism: str, window: int | None) -> None:
    """Raise ValueError for a mechanism that a decoder cannot have, or not with a window.

    >>> from regard.training.recipes import check_causal
    >>> check_causal("softmax", window=16)
    """
    found = from_text(mechanism)
    if refusal(found, causal) is not None:
        raise ValueError(f"mechanism: expected one that can be causal, got {mechanism}")
    if window is not None and found.streams(1, Structure(before=window - 1, after=0)) is not None:
        raise ValueError(f"window: expected none with {mechanism}, whose sums forget nothing, got {window}")
