"""Run folders, which have all that is needed to resume or repeat a run.

run.json            recipe, options, task, model, settings and their changes, a fingerprint of the data (run_file.py)
environment.json    machine, versions, command
data/               tokenizer, token files and the model that training starts from, made once
checkpoints/        step-00000100/ …
model/              the best model so far: rg.load opens the run
metrics.jsonl  tensorboard/  curves.png  README.md
former-1/           what there was before a restart: a run folder, too

A run is made under a temporary name, and gets its own when its data has been read: a start that fails leaves nothing.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.native import with_windows
from regard.core.files import write_text
from regard.core.masks import Window
from regard.core.mechanisms.user_modules import absolute
from regard.training import own, run_file
from regard.training.batches import check_sizes
from regard.training.checked import check_task
from regard.training.initial import fill, filled_later, without_memory
from regard.training.lock import LOCK, one_writer, writer
from regard.training.metrics import check_loggers
from regard.training.parallel import Place
from regard.training.recipes import NAMES, recipe
from regard.training.records import environment
from regard.training.settings import Settings
from regard.training.store import together
from regard.training.task import Task

UNFINISHED = ".unfinished"
"""In the temporary name of a run whose data is being read. If it is killed, its files may be deleted."""
BEGUN = ("data", "environment.json", run_file.FILE)
"""What a run has when it begins, in the order in which it is moved into a folder that was there before."""
STAYS = {*BEGUN, LOCK}
"""What a restart leaves where it is, besides former runs."""


def begin(name: str, options: Any, settings: Settings, folder: str | Path, place: Place) -> Task:
    """Begin a run of a recipe, or of a task of a user's (FILE.py:NAME), in a new folder. All processes call this.

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
    check_loggers(settings)
    check_sizes([getattr(options, "least_batch", 1)], settings.batch_tokens)
    target = Path(folder)
    missing = [parent for parent in (target, *target.parents) if not parent.exists()]
    beside = Path(together(lambda: str(_unfinished(target)) if place.first else "")[0])
    try:
        with one_writer(beside) if place.first else nullcontext():
            task = _built(name, options, settings, beside, place)
            check_sizes(task.sizes(), settings.batch_tokens)
            if not (place.sharded and place.world > 1):
                fill(task.model, task.model, settings.seed, torch.device("cpu"))
            if not without_memory(task.model):  # otherwise training checks the task, when the model is filled
                check_task(task)
            values = {
                "regard": run_file.VERSION,
                "recipe": name,
                "options": _remembered(options) if name in NAMES else {},
                "settings": settings.to_json(),
                "changes": [],
            }
            place.wait()  # every process has read its data

            def finish() -> None:
                write_text(beside / "environment.json", json.dumps(environment(place), indent=1) + "\n")
                run_file.write(beside, values if name in NAMES else {**values, "recipe": absolute(name)})
                _move(beside, target)

            together(lambda: finish() if place.first else None)
    except BaseException:
        if place.first:
            shutil.rmtree(beside, ignore_errors=True)
            for parent in missing:
                with suppress(OSError):  # not empty: others have put something there
                    parent.rmdir()
        raise
    if place.first and beside.exists():
        beside.rmdir()
    return task


def _unfinished(target: Path) -> Path:
    """A temporary folder for a run that will be `target`: next to it, or in it if it is there. Temporary folders of
    killed starts are removed."""
    _check_new(target)
    for left in _left(target):
        shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        for name in BEGUN:
            shutil.rmtree(target / name, ignore_errors=True)
            (target / name).unlink(missing_ok=True)
    beside = _temporary(target, uuid4().hex[:8])
    (beside / "data").mkdir(parents=True)
    return beside


def _temporary(target: Path, mark: str) -> Path:
    inside = target / f"{UNFINISHED}-{mark}"
    return inside if target.exists() else target.with_name(f".{target.name}{UNFINISHED}-{mark}")


def _left(target: Path) -> list[Path]:
    """The temporary folders of starts of this run; ValueError if one of them is still being made."""
    pattern = _temporary(target, "*")
    left = sorted(pattern.parent.glob(pattern.name))
    for folder in left:
        if (name := writer(folder)) is not None:
            raise ValueError(f"out: expected a folder of its own, got {target}, which is being made by {name}")
    return left


def _move(beside: Path, target: Path) -> None:
    """Give a run its name."""
    if not target.exists():
        os.rename(beside, target)
        return
    with one_writer(target):
        names = {path.name for path in target.iterdir()} - {beside.name, LOCK}
        if names:
            raise ValueError(f"out: expected a new folder or an empty one, got {target}, which has {min(names)}")
        for name in BEGUN:
            os.rename(beside / name, target / name)


def _check_new(target: Path) -> None:
    """Raise ValueError unless the folder is new or empty, or has a run that was killed before it began."""
    if (file := next((parent for parent in target.parents if parent.is_file()), None)) is not None:
        raise ValueError(f"out: expected a folder, got {target}, and {file} is a file")
    if not target.exists():
        return
    wanted = f"out: expected a new folder or an empty one, got {target}, which"
    if not target.is_dir():
        raise ValueError(f"{wanted} is a file")
    names = {path.name for path in target.iterdir()}
    unfinished = {name for name in names if name.startswith(f"{UNFINISHED}-")}
    if names and not (unfinished and names - unfinished <= STAYS):
        again = f"; to resume it: regard train resume {target}" if run_file.FILE in names else ""
        raise ValueError(f"{wanted} has {', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''}{again}")


def _built(name: str, options: Any, settings: Settings, folder: Path, place: Place) -> Task:
    """The task, made by rank 0 first, so that the others find its files; an error is raised on all processes."""
    tasks: list[Task] = []

    def build() -> None:
        task = recipe(name).build(options, folder / "data", settings.seed) if name in NAMES else None
        tasks.append(task or own.build(name, settings.seed))

    with filled_later(place):
        together(lambda: build() if place.first else None)
        together(lambda: None if place.first else build())
    return tasks[0]


def _remembered(options: Any) -> dict[str, Any]:
    """The options as JSON values, files by their absolute paths so that the run resumes from any folder."""
    values = asdict(options)
    if values.get("mechanism") is not None:
        values["mechanism"] = absolute(values["mechanism"])
    for name in ("data", "validation_data", "test_data", "start"):
        if isinstance(path := values.get(name), str):
            values[name] = _whole_path(path) if name != "start" or Path(path).exists() else path
        elif path is not None:
            values[name] = [_whole_path(part) for part in path]
    return values


def _whole_path(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


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


def check_run(folder: str | Path) -> None:
    """Raise ValueError unless a folder has a run of `regard train`.

    >>> from regard.training.runs import check_run
    >>> check_run("nowhere")
    Traceback (most recent call last):
    ValueError: run: expected the folder of a run, got nowhere, which has no run.json
    """
    target = Path(folder)
    values = run_file.read(target)
    if not values:
        raise ValueError(f"run: expected the folder of a run, got {target}, which has no run.json")
    if values.get("recipe") is None:
        raise ValueError(
            f"run: expected a run of `regard train`, got {target}, which train(…) in Python made; it resumes when it "
            "is called again with the same task"
        )


def reopen(folder: str | Path, place: Place, **changes: Any) -> tuple[Task, Settings]:
    """The task and the settings of a run, to resume it, perhaps with changed settings.

    >>> import tempfile, torch
    >>> from regard.training import Settings
    >>> from regard.training.parallel import Place
    >>> from regard.training.recipes import translate
    >>> from regard.training.runs import begin, reopen
    >>> options = translate.Options(count=100, embedding_dim=16, num_heads=2, num_layers=1)
    >>> place = Place(0, 1, torch.device("cpu"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     task = begin("translate", options, Settings(steps=2, batch_size=8), Path(folder) / "run", place)
    ...     reopen(Path(folder) / "run", place, steps=5)[1].steps
    5
    """
    target = Path(folder)
    check_run(target)
    values = run_file.read(target)
    try:
        name = values["recipe"]
        settings = Settings(**values["settings"])
        options = _recalled(name, values["options"]) if name in NAMES else None
    except (ValueError, KeyError, TypeError) as error:
        path = target / run_file.FILE
        raise CheckpointError(f"{path}: expected what `regard train` wrote, got {error!s:.400}") from None
    return _built(name, options, settings, target, place), replace(settings, **changes)


def set_aside(folder: Path) -> Path:
    """Move what a run has made into a folder former-1, former-2, … in it, so that the run can begin again. The former
    run can be loaded and resumed, too. Checkpoints are moved last: a kill loses nothing.

    >>> import tempfile
    >>> from regard.training.runs import set_aside
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / "metrics.jsonl").touch()
    ...     set_aside(Path(folder)).name, [path.name for path in Path(folder).iterdir()]
    ('former-1', ['former-1'])
    """
    former = next(path for path in (folder / f"former-{number}" for number in range(1, 10_000)) if not path.exists())
    made = sorted(path for path in folder.iterdir() if path.name not in STAYS and not path.name.startswith("former-"))
    former.mkdir()
    for name in BEGUN:
        if (folder / name).is_dir():
            shutil.copytree(folder / name, former / name, copy_function=_linked)
        elif (folder / name).exists():
            shutil.copy2(folder / name, former / name)
    for path in sorted(made, key=lambda path: path.name == "checkpoints"):
        os.rename(path, former / path.name)
    return former


def _linked(source: str, target: str) -> None:
    """A second name for a file: files of data are replaced, never changed. A copy where that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def default_folder(name: str) -> Path:
    """The folder of a run if none is named: runs/NAME, or the first free runs/NAME-2, runs/NAME-3, …"""
    base = Path("runs") / name
    folders: Sequence[Path] = (base, *(base.with_name(f"{name}-{number}") for number in range(2, 10_000)))
    return next(folder for folder in folders if not folder.exists() and not _being_made(folder))


def _being_made(target: Path) -> bool:
    pattern = _temporary(target, "*")
    return any(writer(folder) is not None for folder in pattern.parent.glob(pattern.name))
