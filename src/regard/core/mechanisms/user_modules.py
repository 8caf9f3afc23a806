"""A user's code, imported from a file or a module by name.

This is the only place that imports it. Commands and training recipes call it; loading a checkpoint never does.
"""

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def named(noun: str, text: str, fits: Callable[[object], bool]) -> Any:
    """What FILE.py:NAME or MODULE:NAME names; a ValueError about a `noun` that is not there lists what `fits`.

    >>> from regard.core.mechanisms.user_modules import named
    >>> named("number", "math:tau", callable)
    6.283185307179586
    """
    place, _, name = text.rpartition(":")
    module = _imported(noun, place, text)
    if not hasattr(module, name):
        there = [key for key, value in vars(module).items() if fits(value)]
        hint = f"; it has {', '.join(there)}" if there else ""
        raise ValueError(f"{noun}: expected a name in {place}, got {text!r}, which is not there{hint}")
    return getattr(module, name)


def called(noun: str, make: Callable[[], Any], text: str) -> Any:
    """What a user's class or function gives; any error is reported as theirs.

    >>> from regard.core.mechanisms.user_modules import called
    >>> called("number", lambda: 7, "mine.py:seven")
    7
    """
    try:
        return make()
    except Exception as error:
        reason = _reason(error)
        raise ValueError(f"{noun}: expected {text!r} to give a {noun} without arguments, got {reason}") from error


def absolute(text: str) -> str:
    """The text with the absolute path of its file, so that it can be used from another folder.

    >>> from regard.core.mechanisms.user_modules import absolute
    >>> absolute("softmax"), absolute("package.module:Mine"), absolute("/home/me/./mine.py:Mine")
    ('softmax', 'package.module:Mine', '/home/me/mine.py:Mine')
    """
    place, _, name = text.rpartition(":")
    return f"{_file(place)}:{name}" if place.endswith(".py") else text


def _file(place: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(place)))


def _imported(noun: str, place: str, text: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not _file(place).is_file():
        raise ValueError(f"{noun}: expected a file, got {text!r}, and there is no file {place}")
    # So that the module's imports work as with `python FILE` and `python -m MODULE`, now and when the mechanism runs.
    folder = str(_file(place).parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        # Random numbers that a module draws at import are the same in all processes of a training run.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # only the CPU's generator: a GPU's would not be restored
            return _run(_file(place)) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{noun}: expected {text!r} to be importable, got {_reason(error)}") from error


def _run(file: Path) -> ModuleType:
    """The module of a file, run once as long as the file does not change, so that its classes are the same in the whole
    process."""
    status = file.stat()
    version = hashlib.sha256(f"{file} {status.st_mtime_ns} {status.st_size}".encode()).hexdigest()[:12]
    name = re.sub(r"\W", "_", f"{file.stem}_{version}")  # never equal to another module's name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _reason(error: BaseException) -> str:
    """What a user's code raised, and where, in one line."""
    words = f": {str(error).splitlines()[0]:.200}" if str(error).strip() else ""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} in {Path(error.filename).name}, line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    skipped = (__file__, importlib.__file__)
    user_frames = [frame for frame in frames if frame.filename not in skipped and not frame.filename.startswith("<")]
    user_frames = [frame for frame in user_frames if frame.filename == user_frames[0].filename and frame.lineno]
    where = f" in {Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno}" if user_frames else ""
    return f"{type(error).__name__}{where}{words}"
