"""The best and the last model of a run, and what they reach on validation and test examples, or on other files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from regard.checkpoints.adapters import FILE as ADAPTERS
from regard.checkpoints.modules import load_module
from regard.checkpoints.sources import open_folder, open_safetensors
from regard.models.layers.lora import PARTS, lora_of, trained_tensors
from regard.training import run_file, store
from regard.training.metrics import read_metrics
from regard.training.settings import Settings
from regard.training.task import Task

MODEL = "model"
"""The folder of the best model in a run."""


def evaluate(
    task: Task,
    folder: str | Path,
    data: Sequence[str] = (),
    *,
    device: str = "cpu",
    advance: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Results of a run's best and last model on the task's validation and test examples, or on the examples of files.

    The task's model has the best weights afterwards. `advance` is called with the name of each result as it begins.

    >>> import tempfile
    >>> from regard.training import Settings, evaluate, train
    >>> from regard.training.recipes import translate
    >>> options = translate.Options(count=200, held_out=9, embedding_dim=16, num_heads=2, num_layers=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     task = translate.build(options, Path(folder), seed=0)
    ...     report = train(task, Settings(steps=2, batch_size=8), f"{folder}/run")
    ...     results = evaluate(task, f"{folder}/run")
    >>> list(results), results["best"]["validation"] == report.results, results["best"]["test"] == report.test
    (['best', 'last'], True, True)
    """
    folder = Path(folder)
    values = run_file.read(folder)
    if not values or not (folder / MODEL).is_dir():
        missing = "run.json" if not values else "model yet"
        raise ValueError(f"run: expected a run with a model, got {folder}, which has no {missing}")
    settings = Settings(**values["settings"])
    run_file.confirmed(values, task, settings, folder)
    model = task.model.to(device)
    if settings.precision == "float64":
        model.double()
    measures: dict[str, Callable[[Any], dict[str, float]]] = {"validation": task.evaluate, "test": task.test}
    if data:
        measures = {"data": lambda model: task.measure(model, data)}
    results: dict[str, dict[str, Any]] = {}
    steps = {
        "best": best_step(folder, task.watched),
        "last": _load_last(model, folder, averaged=settings.ema is not None),
    }
    for name in ("last", "best"):
        if name == "best":
            _load_best(model, folder)
        if steps[name] is None:
            continue
        if name == "best" and steps["best"] == steps["last"]:
            results["best"] = results["last"]
            continue
        results[name] = {"step": steps[name]}
        for part, measure in measures.items():
            advance(f"{name} model, {part}")
            if measured := _measured(model, measure, settings):
                results[name][part] = measured
    return {name: results[name] for name in ("best", "last") if name in results}


def _measured(model: nn.Module, measure: Callable[[Any], dict[str, float]], settings: Settings) -> dict[str, float]:
    """Results in the precision in which the run was evaluated."""
    device = next(model.parameters()).device.type
    precision = torch.autocast(device, torch.bfloat16) if settings.precision == "bfloat16" else nullcontext()
    with torch.no_grad(), precision:
        return measure(model.eval())


def better(before: float, now: float, way: Literal["least", "most"]) -> bool:
    """Whether a result is better than the best so far; any number is better than NaN.

    >>> better(0.5, 0.4, "least"), better(float("nan"), 0.4, "most")
    (True, True)
    """
    if before != before:
        return now == now
    return now < before if way == "least" else now > before


def best_step(folder: Path, watched: tuple[str, Literal["least", "most"]]) -> int | None:
    """The step of a run's best evaluation; None before the first."""
    name, way = watched
    best: tuple[int, float] | None = None
    for record in read_metrics(folder):
        if "evaluation" in record and (best is None or better(best[1], record["evaluation"][name], way)):
            best = record["step"], record["evaluation"][name]
    return None if best is None else best[0]


def _load_last(model: nn.Module, folder: Path, averaged: bool) -> int | None:
    """Load the weights of the newest checkpoint, or their averages; its step, or None if there is no checkpoint."""
    path, _ = store.newest(folder / "checkpoints")
    if path is None:
        return None
    step: int = store.load(path, {f"model.{name}": tensor for name, tensor in trained_tensors(model).items()})["step"]
    if averaged:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        store.load(path, {f"average.{name}": parameter.detach() for name, parameter in trained.items()})
    return step


def _load_best(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of a run's best, or its shards of them."""
    tensors = model.state_dict()
    if lora_of(model) is None and not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        load_module(folder / MODEL, model)
        return
    alone = folder / MODEL / ADAPTERS
    source = open_safetensors(alone) if alone.exists() else open_folder(folder / MODEL)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in source.shapes:
                whole = source.read(name).to(tensor)
                tensor.copy_(_shard(whole, tensor) if isinstance(tensor, DTensor) else whole)
            elif name.endswith(PARTS[1]):  # the adapters are merged into the weights
                tensor.zero_()


def _shard(whole: Tensor, tensor: DTensor) -> DTensor:
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


@contextmanager
def best_weights(model: nn.Module, folder: Path) -> Iterator[None]:
    """Give a model that is trained in this run's folder its best weights for a while."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = model.training
    _load_best(model, folder)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(kept[name])
        model.train(training)
