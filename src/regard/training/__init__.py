"""Training: recipes for any mechanism, on one machine or many; a killed run resumes where it stopped.

A recipe builds a `Task` (a model, its examples, its loss); `train` runs it in a folder that has everything about the
run, and `rg.load` opens that folder. A task of your own is a class with five methods.

Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.core.extras import needed_for

if TYPE_CHECKING:
    from regard.models.layers.lora import Lora as Lora
    from regard.models.layers.lora import adapt as adapt
    from regard.training.divided import divided as divided
    from regard.training.evaluation import evaluate as evaluate
    from regard.training.fingerprint import digest as digest
    from regard.training.loop import Report as Report
    from regard.training.loop import train as train
    from regard.training.metrics import Logger as Logger
    from regard.training.settings import Settings as Settings
    from regard.training.settings import option as option
    from regard.training.task import IGNORED as IGNORED
    from regard.training.task import Batch as Batch
    from regard.training.task import Card as Card
    from regard.training.task import Task as Task
    from regard.training.task import Totals as Totals

_HOMES = {
    "regard.models.layers.lora": "Lora adapt",
    "regard.training.divided": "divided",
    "regard.training.evaluation": "evaluate",
    "regard.training.fingerprint": "digest",
    "regard.training.loop": "Report train",
    "regard.training.metrics": "Logger",
    "regard.training.settings": "Settings option",
    "regard.training.task": "IGNORED Batch Card Task Totals",
}
"""The public names, by the module that defines them; the imports above say the same to type checkers."""
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_for("training", "train"):
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
