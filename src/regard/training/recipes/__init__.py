"""Recipes, one file each: the `Options`, the default `settings()`, and `build(options, folder, seed)`, which makes the
task."""

import importlib
from types import ModuleType

from regard.core.calls.choice import refusal
from regard.core.extras import needed_for
from regard.core.masks import causal
from regard.core.mechanisms.text import from_text

NAMES = ("translate", "lm", "chat", "bert", "classify", "vision")


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


def check_causal(mechanism: str) -> None:
    """Raise ValueError for a mechanism that a decoder cannot have.

    >>> from regard.training.recipes import check_causal
    >>> check_causal("softmax")
    """
    if refusal(from_text(mechanism), causal) is not None:
        raise ValueError(f"mechanism: expected one that can be causal, got {mechanism}")
