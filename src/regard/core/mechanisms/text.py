"""A mechanism from text: the name of a shipped mechanism, or FILE.py:NAME or MODULE:NAME for a user's.

This is the only place that imports a user's code. Commands and training recipes call it; loading a checkpoint never
does.
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

from regard.core.families.mechanism import Mechanism
from regard.core.mechanisms import REGISTRY, hint

CHOICES = f"{', '.join(REGISTRY)}; or your own: FILE.py:NAME, MODULE:NAME"
"""What a command's help says after "one of"."""


def from_text(text: str) -> Mechanism:
    """The mechanism that a text names; a class is instantiated.

    >>> from regard.core.mechanisms.text import from_text
    >>> from_text("quadratic"), from_text("regard.core.mechanisms:Elu")
    (Quadratic(c=1.0), Elu())
    """
    return made(lookup(text), text)


def lookup(text: str) -> Mechanism | type[Mechanism]:
    """What a text names: a mechanism, or a class of mechanisms. A function is called.

    >>> from regard.core.mechanisms.text import lookup
    >>> lookup("softmax"), lookup("regard:Softmax")
    (Softmax(beta=None, softcap=None), <class 'regard.core.mechanisms.softmax.Softmax'>)
    """
    if text in REGISTRY:
        return REGISTRY[text]
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(f"mechanism: expected one of {CHOICES}, got {text!r}{_hint(text)}")
    module = _imported(place, text)
    if not hasattr(module, name):
        there = [key for key, value in vars(module).items() if _is_mechanism(value)]
        hint = f"; it has {', '.join(there)}" if there else ""
        raise ValueError(f"mechanism: expected a name in {place}, got {text!r}, which is not there{hint}")
    thing = getattr(module, name)
    if callable(thing) and not isinstance(thing, Mechanism | type):
        thing = _called(thing, text)
    if not _is_mechanism(thing):
        kind = f"the class {thing.__name__}" if isinstance(thing, type) else f"of type {type(thing).__name__}"
        raise ValueError(f"mechanism: expected a regard.Mechanism, got {text!r}, which is {kind}")
    return thing


def _hint(text: str) -> str:
    """What may have been meant: a file without the name in it, or a shipped mechanism."""
    return f"; write {text}:NAME" if text.endswith(".py") else hint(text)


def made(thing: Mechanism | type[Mechanism], text: str | None = None) -> Mechanism:
    """The mechanism itself, or an instance of a class, made without arguments; `text` is its name in errors.

    >>> import regard as rg
    >>> made(rg.Quadratic), made(rg.Quadratic(c=2.0))
    (Quadratic(c=1.0), Quadratic(c=2.0))
    """
    return _called(thing, text or thing.__name__) if isinstance(thing, type) else thing


def absolute(text: str) -> str:
    """The text with the absolute path of its file, so that it can be used from another folder.

    >>> absolute("softmax"), absolute("package.module:Mine"), absolute("/home/me/./mine.py:Mine")
    ('softmax', 'package.module:Mine', '/home/me/mine.py:Mine')
    """
    place, _, name = text.rpartition(":")
    return f"{_file(place)}:{name}" if place.endswith(".py") else text


def _is_mechanism(thing: object) -> bool:
    return isinstance(thing, Mechanism) or (
        isinstance(thing, type) and issubclass(thing, Mechanism) and thing is not Mechanism
    )


def _file(place: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(place)))


def _called(make: Callable[[], Any], text: str) -> Any:
    try:
        return make()
    except Exception as error:  # any error of a user's code is reported as theirs
        raise ValueError(
            f"mechanism: expected {text!r} to give a mechanism without arguments, got {_reason(error)}"
        ) from error


def _imported(place: str, text: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not _file(place).is_file():
        raise ValueError(f"mechanism: expected a file, got {text!r}, and there is no file {place}")
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
        raise ValueError(f"mechanism: expected {text!r} to be importable, got {_reason(error)}") from error


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
