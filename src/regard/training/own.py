"""A task of a user's from text, FILE.py:NAME or MODULE:NAME: what `regard train` and `regard train resume` build."""

from typing import Any

import torch

from regard.core.mechanisms.user_modules import called, named
from regard.training.task import Task


def lookup(text: str) -> Any:
    """The class or function that a text names.

    >>> from regard.training.own import lookup
    >>> lookup("regard.training.recipes.lm:LanguageModelling").name
    'lm'
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(f"task: expected FILE.py:NAME or MODULE:NAME, got {text!r}")
    thing = named("task", text, _is_task)
    if not callable(thing):
        raise ValueError(f"task: expected a class of regard.training.Task, got {text!r}, which is {thing!r:.80}")
    return thing


def build(text: str, seed: int) -> Task:
    """The task that a text names, made without arguments after seeding torch, so that all processes make the same."""
    thing = lookup(text)
    torch.manual_seed(seed)
    task = called("task", thing, text)
    if not isinstance(task, Task):
        raise ValueError(f"task: expected {text!r} to give a regard.training.Task, got {type(task).__name__}")
    return task


def _is_task(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Task) and thing is not Task
