"""A task of a user's is checked before its first step, so that a wrong name is not an error after hours."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.training.parallel import Objective
from regard.training.task import Task

TRIED = 2
"""Examples that are tried."""
SHIPPED = "regard."
"""Modules of recipes, which have tests; their evaluations take seconds."""


def check_task(task: Task, runner: Any = None) -> None:
    """Raise ValueError unless the terms of the loss have totals and counts, and `evaluate` gives what is `watched`.

    The model is evaluated and tested once, in eval mode; random states stay as they are. `runner` calls the
    model: the task's `Objective`, or its FSDP wrapper.

    >>> import torch
    >>> from regard.training.checked import check_task
    >>> from types import SimpleNamespace
    >>> task = SimpleNamespace(watched=("los", "least"), model=torch.nn.Linear(1, 1), sizes=lambda: [1])
    >>> task.batch, task.counts = lambda indices, epoch: {"x": torch.ones(1, 1)}, lambda batch: {"loss": 1}
    >>> task.totals = lambda model, batch: {"loss": model(batch["x"]).sum()}
    >>> task.evaluate = task.test = lambda model: {"loss": 1.0}
    >>> check_task(task)
    Traceback (most recent call last):
    ValueError: watched: expected a result of evaluate (loss), got 'los'
    """
    if type(task).__module__.startswith(SHIPPED):
        return
    name, way = task.watched
    if way not in ("least", "most"):
        raise ValueError(f"watched: expected (name, 'least') or (name, 'most'), got {task.watched}")
    model, training, run = task.model, task.model.training, runner or Objective(task)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            batch = task.batch(list(range(min(TRIED, len(task.sizes())))), 0)
            _check_terms(task.counts(batch), run({key: tensor.to(device) for key, tensor in batch.items()}))
            results = run(task.evaluate)
            tested = run(task.test)
    finally:
        model.train(training)
    for which, values in (("evaluate", results), ("test", tested)):
        if not isinstance(values, Mapping) or not all(isinstance(value, int | float) for value in values.values()):
            raise ValueError(f"{which}: expected numbers by name, got {values!r:.200}")
    if name not in results:
        raise ValueError(f"watched: expected a result of evaluate ({', '.join(results)}), got {name!r}")


def _check_terms(counts: Mapping[str, int], totals: Mapping[str, object]) -> None:
    for key, total in totals.items():
        if not isinstance(total, Tensor) or total.ndim:
            raise ValueError(f"totals: expected a scalar tensor for {key!r}, got {_shown(total)}")
    if counts.keys() != totals.keys():
        raise ValueError(
            f"counts: expected a count for each total ({', '.join(totals) or 'none'}), "
            f"got {', '.join(counts) or 'none'}"
        )


def _shown(value: object) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
