"""Files of a run for people: the best model, a figure of its curves, a model card, the environment."""

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard import checkpoints
from regard.checkpoints.adapters import save_adapters
from regard.checkpoints.modules import save_module, write_module
from regard.checkpoints.writing import entries, in_order, save_pieces
from regard.core.files import save_figure, write_text
from regard.models.layers.lora import PARTS, lora_of, merged_tensors, trained_tensors
from regard.models.registry import is_listed
from regard.models.stored import is_shipped
from regard.training.metrics import read_metrics
from regard.training.parallel import Objective, Place
from regard.training.settings import Settings
from regard.training.task import Task

if TYPE_CHECKING:
    from regard.training.loop import Report

BASE = "../data/start"
"""From a run's model/ to the model that a recipe's training starts from."""


def write_model(objective: Objective, folder: Path, place: Place) -> None:
    """Save the current model for `rg.load`, of one with adapters these alone if the run has its base. All processes
    call this; rank 0 writes. The weights of a sharded model are gathered and written one after another."""
    model: Any = objective.model
    lora = lora_of(model)
    apart = lora is not None and is_listed(model) and Path(os.path.normpath(folder / BASE)).is_dir()
    for left in folder.parent.glob(f".{folder.name}-*") if place.first else ():  # temporary folders of killed saves
        shutil.rmtree(left, ignore_errors=True)
    if apart:
        adapters = {name: _whole(tensor) for name, tensor in trained_tensors(model).items()}
        if place.first:
            save_adapters(model, adapters, folder, BASE)
    elif place.sharded:
        _write_gathered(model, folder, place)
    elif place.first and is_listed(model):
        checkpoints.save(model, folder)
    elif place.first:
        save_module(model, merged_tensors(model.state_dict(), lora), folder)


def _write_gathered(model: Any, folder: Path, place: Place) -> None:
    lora = lora_of(model)
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    ordered = in_order({name: tensor for name, tensor in state.items() if name.rpartition(".")[2] not in PARTS})

    def gathered(name: str) -> Tensor:
        projection = name.removesuffix("weight")
        parts = [name, *(f"{projection}{part}" for part in PARTS if f"{projection}{part}" in state)]
        return merged_tensors({part: _whole(state[part]) for part in parts}, lora)[name]

    wholes = (gathered(name) for name in ordered)
    write = checkpoints.write_model if is_listed(model) else write_module
    try:
        if place.first:
            write(model, folder, partial(save_pieces, entries(ordered), wholes))
    finally:
        for _ in wholes:  # every process takes part, also when the disk of rank 0 is full
            pass


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def environment(place: Place) -> dict[str, Any]:
    """The machine, the versions and the command, so that a run can be repeated."""
    packages = {}
    for name in ("torch", "numpy", "tokenizers", "safetensors", "regard"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["regard", *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": packages,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": place.world,
        "strategy": place.strategy if place.world > 1 else "one process",
        "device": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else place.device.type,
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of the checkout that the package runs from; None outside of a checkout.

    >>> from regard.training.records import commit
    >>> commit() is None or len(commit()) >= 7
    True
    """
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def write_curves(task: Task, folder: Path) -> None:
    """Draw a run's curves.png if matplotlib is installed."""
    lines = read_metrics(folder)
    if not lines or find_spec("matplotlib") is None:
        return
    from regard.training.curves import curves_figure

    figure = curves_figure({folder.resolve().name: lines}, label_smoothing=task.label_smoothing)
    save_figure(figure, folder / "curves.png")


def write_card(task: Task, settings: Settings, folder: Path, report: "Report") -> None:
    """Write a run's README.md, its model card: model, data, results, settings."""
    card = task.card()
    model: Any = task.model
    tested = {name: f"{value:.4g}" for name, value in report.test.items()}
    rows = "\n".join(f"| {name} | {value:.4g} | {tested.get(name, '')} |" for name, value in report.results.items())
    count = sum(parameter.numel() for parameter in model.parameters())
    mechanism = getattr(getattr(model, "config", None), "mechanism", None)
    extra = f", mechanisms=[{type(mechanism).__name__}]" if mechanism is not None and not is_shipped(mechanism) else ""
    if not is_listed(model):
        extra = f", model={type(model).__name__}(…)"
    code = f"import regard as rg\n\nmodel = rg.load({json.dumps(str(folder))}{extra})"
    parts = [
        f"# {task.name}: a {type(model).__name__.lower()} of {count:,} parameters",
        ("" if mechanism is None else f"Mechanism: `{mechanism!r}`. ")
        + f"Trained for {report.step:,} of {settings.steps:,} steps"
        + (", stopped early." if report.early else "."),
        "## Data\n" + card.data,
        "## Results\nValidation chose this model; the test was measured once, at the end.\n\n"
        "| | validation | test |\n|---|---|---|\n" + rows,
        *(["![curves](curves.png)"] if (folder / "curves.png").exists() else []),
        f"## Use\n{card.use}\n\n```python\n{code}\n```",
        "## Settings\n```json\n" + json.dumps(settings.to_json(), indent=1) + "\n```",
        "Options are in run.json, the machine and the versions in environment.json, every step in metrics.jsonl.",
    ]
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")
