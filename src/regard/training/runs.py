"""Run folders, which have all that is needed to resume or repeat a run.

run.json            recipe, options, settings, a fingerprint of the data
environment.json    machine, versions, command
data/               tokenizer and token files, made once
checkpoints/        step-00000100/ …
model/              the best model so far: rg.load opens the run
metrics.jsonl  tensorboard/  curves.png  README.md
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.native import with_windows
from regard.core.files import write_text
from regard.core.masks import Window
from regard.core.mechanisms.text import absolute
from regard.training.batches import check_sizes
from regard.training.parallel import Place
from regard.training.recipes import recipe
from regard.training.records import environment
from regard.training.settings import Settings
from regard.training.task import Task

VERSION = 1
UNFINISHED = ".unfinished"
"""Marks a run's folder until run.json is written: if the run is killed before, its files may be deleted."""
BEFORE = {"data", "environment.json", UNFINISHED}
"""Names that a run's folder may have before run.json is written."""
SAMPLED = 16
"""How many examples a fingerprint hashes completely; of the others it hashes the size."""


def begin(name: str, options: Any, settings: Settings, folder: str | Path, place: Place) -> Task:
    """Begin a run in a new folder. All processes call this.

    >>> import tempfile, torch
    >>> from regard.training import Settings
    >>> from regard.training.parallel import Place
    >>> from regard.training.recipes import translate
    >>> from regard.training.runs import begin, reopen
    >>> options = translate.Options(count=100, embedding_dim=16, num_heads=2, num_layers=1)
    >>> place = Place(0, 1, torch.device("cpu"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     task = begin("translate", options, Settings(steps=2, batch_size=8), Path(folder) / "run", place)
    ...     reopen(Path(folder) / "run", place)[1].steps
    2
    """
    target = Path(folder)
    place.wait()  # every process chooses its folder, perhaps the first free name, before rank 0 creates it
    missing = [folder for folder in (target, *target.parents) if not folder.exists()]
    if place.first:
        _check_new(target)
        target.mkdir(parents=True, exist_ok=True)
        (target / UNFINISHED).touch()
        shutil.rmtree(target / "data", ignore_errors=True)
        (target / "data").mkdir(exist_ok=True)
    place.wait()
    try:
        task = _built(name, options, settings, target, place)
        check_sizes(task.sizes(), settings.batch_tokens)
    except BaseException:
        if place.first:
            _remove(target, missing)
        raise
    if place.first:
        values = {
            "regard": VERSION,
            "recipe": name,
            "options": _remembered(options),
            "settings": settings.to_json(),
            "data": fingerprint(task),
        }
        write_text(target / "environment.json", json.dumps(environment(place), indent=1) + "\n")
        write_text(target / "run.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")
        (target / UNFINISHED).unlink()
    place.wait()
    return task


def _remembered(options: Any) -> dict[str, Any]:
    """The options as JSON values, a mechanism's file by its absolute path so that the run resumes from any folder."""
    values = asdict(options)
    mechanism = values.get("mechanism")
    return values if mechanism is None else {**values, "mechanism": absolute(mechanism)}


def _recalled(name: str, values: dict[str, Any]) -> Any:
    """The options of a recipe that `_remembered` wrote."""
    vision = "DaViT" if values.get("model") == "davit" else "VisionTransformer"
    models = {"lm": "Decoder", "translate": "Transformer", "vision": vision}
    options = with_windows(models.get(name, "Encoder"), values)
    return recipe(name).Options(**{key: _from_json(value) for key, value in options.items()})


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return Window(**value)
    return tuple(value) if isinstance(value, list) else value


def _remove(target: Path, made: Sequence[Path]) -> None:
    """Remove a run that could not begin, its data and the folders made for it, so that its name is free again."""
    shutil.rmtree(target / "data", ignore_errors=True)
    (target / UNFINISHED).unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):  # not empty: others have put something there
            folder.rmdir()


def _check_new(target: Path) -> None:
    """Raise ValueError unless the folder is new or empty, or has a run that was killed before it began."""
    if not target.exists():
        return
    wanted = f"out: expected a new folder or an empty one, got {target}, which"
    if not target.is_dir():
        raise ValueError(f"{wanted} is a file")
    names = {path.name for path in target.iterdir()}
    if names and not (UNFINISHED in names and names <= BEFORE):
        again = f"; to resume it: regard train resume {target}" if "run.json" in names else ""
        raise ValueError(f"{wanted} has {', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''}{again}")


def reopen(folder: str | Path, place: Place, steps: int | None = None) -> tuple[Task, Settings]:
    """The task and the settings of a run, to resume it, with another number of steps if `steps` is given."""
    target = Path(folder)
    path = target / "run.json"
    if not path.is_file():
        raise ValueError(f"run: expected the folder of a run, got {target}, which has no run.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        name, data = values["recipe"], values["data"]
        settings = Settings(**values["settings"])
        options = _recalled(name, values["options"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected what `regard train` wrote, got {error!s:.400}") from None
    if steps is not None:
        settings = replace(settings, steps=steps)
    task = _built(name, options, settings, target, place)
    if fingerprint(task) != data:
        raise ValueError(
            f"data: expected the examples the run began with, got others; {target} cannot resume with them"
        )
    if place.first and steps is not None:
        write_text(path, json.dumps({**values, "settings": settings.to_json()}, indent=1, ensure_ascii=False) + "\n")
    place.wait()
    return task, settings


def _built(name: str, options: Any, settings: Settings, folder: Path, place: Place) -> Task:
    with place.first_alone():
        return recipe(name).build(options, folder / "data", settings.seed)


def fingerprint(task: Task) -> str:
    """A hash of a task's examples: all sizes, and some examples completely."""
    sizes = task.sizes()
    digest = hashlib.sha256(json.dumps([len(sizes), [int(size) for size in sizes]]).encode())
    for name, tensor in sorted(task.batch(list(range(min(SAMPLED, len(sizes)))), 0).items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def default_folder(name: str) -> Path:
    """The folder of a run if none is named: runs/NAME, or the first free runs/NAME-2, runs/NAME-3, …"""
    base = Path("runs") / name
    return next(
        folder for folder in (base, *(base.with_name(f"{name}-{n}") for n in range(2, 10_000))) if not folder.exists()
    )
