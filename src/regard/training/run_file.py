"""run.json: what a run is (its task, model, data and settings), so that nothing else goes on in its folder."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from regard.checkpoints.errors import CheckpointError
from regard.core.files import write_text
from regard.training.fingerprint import sampled
from regard.training.settings import Settings
from regard.training.task import Task

FILE = "run.json"
VERSION = 3


def read(folder: Path) -> dict[str, Any]:
    """The values of a folder's run.json; none if it has no such file.

    >>> from regard.training import run_file
    >>> run_file.read(Path("nowhere"))
    {}
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["regard"]
        Settings(**values["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected what `regard train` wrote, got {error!s:.400}") from None
    if version not in range(1, VERSION + 1):
        raise CheckpointError(f"{path}: expected version 1 to {VERSION} of a run, got {version!r:.40}")
    return values


def write(folder: Path, values: Mapping[str, Any]) -> None:
    """Write a folder's run.json.

    >>> import tempfile
    >>> from regard.training import Settings, run_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run_file.write(Path(folder), {"regard": 3, "settings": Settings(batch_size=8).to_json()})
    ...     run_file.read(Path(folder))["settings"]["batch_size"]
    8
    """
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / FILE, text + "\n")


def confirmed(values: Mapping[str, Any], task: Task, settings: Settings, folder: Path) -> dict[str, Any]:
    """The values of run.json for a task that begins or goes on in a folder whose run.json has `values`; ValueError for
    another task, model or data, and for settings that a run cannot change.

    >>> import tempfile
    >>> from regard.training import Settings, run_file
    >>> from regard.training.recipes import translate
    >>> options = translate.Options(count=50, held_out=9, embedding_dim=16, num_heads=2, num_layers=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     task = translate.build(options, Path(folder), seed=0)
    >>> values = run_file.confirmed({}, task, Settings(batch_size=8), Path("run"))
    >>> values["task"], values["model"]["class"]
    ('translate', 'Transformer')
    >>> run_file.confirmed(values, task, Settings(batch_size=9), Path("run"))
    Traceback (most recent call last):
    ValueError: batch_size: expected 8, as the run in run began, got 9
    """
    model = _described(task.model)
    _agree("task", values.get("task", task.name), task.name, folder)
    there = values.get("model", model)
    for name in [name for name in model if name in there]:  # a later version may have more fields
        _agree(f"model's {name}" if name != "class" else "model", there[name], model[name], folder)
    began = values.get("settings", settings.to_json())
    for field in fields(Settings):
        if field.metadata["fixed"]:
            _agree(field.name, began.get(field.name), getattr(settings, field.name), folder)
    data = task.fingerprint()
    if values.get("data", data) != data and not (values["regard"] == 1 and values["data"] == sampled(task)):
        raise ValueError(
            f"data: expected the examples the run began with, got others; {folder} cannot resume with them"
            + ("; runs of an earlier version held out other examples" if values["regard"] < VERSION else "")
        )
    defaults: dict[str, Any] = {"recipe": None, "options": {}, "changes": []}
    now = {"regard": VERSION, "task": task.name, "model": model, "data": data}
    return {**defaults, **values, **now, "settings": began}


def changed(values: Mapping[str, Any], settings: Settings, step: int) -> dict[str, Any]:
    """The values of run.json for a run that goes on after `step` with other settings: `changes` lists them.

    >>> from regard.training import Settings, run_file
    >>> before = {"settings": Settings(batch_size=8).to_json(), "changes": []}
    >>> run_file.changed(before, Settings(batch_size=8, steps=50), 20)["changes"]
    [{'after step': 20, 'steps': 50}]
    """
    before, now = values["settings"], settings.to_json()
    different = {name: value for name, value in now.items() if before.get(name, value) != value}
    if not different:
        return dict(values)
    return {**values, "settings": now, "changes": [*values["changes"], {"after step": step, **different}]}


def _agree(name: str, expected: Any, got: Any, folder: Path) -> None:
    if expected != got:
        raise ValueError(f"{name}: expected {expected}, as the run in {folder} began, got {got}")


def _described(model: nn.Module) -> dict[str, Any]:
    """The class of a model and the fields of its config, as JSON has them. Of a model without a config the checkpoint
    knows the tensors, which it compares when it is loaded."""
    config: Any = getattr(model, "config", None)
    values = config.to_json() if hasattr(config, "to_json") else {}
    return {"class": type(model).__name__, **json.loads(json.dumps(values))}
