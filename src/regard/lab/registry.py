"""The experiments, one file each in lab/experiments, found by their decorator."""

import pkgutil
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from time import perf_counter
from typing import Any

from regard.lab import experiments as folder
from regard.lab.documents import place
from regard.lab.experiment import Experiment, Measurements, Outcome

_REGISTERED: dict[str, Experiment] = {}


def experiment(
    *,
    claims: Sequence[str],
    title: str,
    statement: str,
    formula: str,
    condition: str = "",
    instead: str = "",
    needs: Sequence[str] = (),
) -> Callable[[Callable[..., Measurements]], Callable[..., Measurements]]:
    """Register the function below it as the experiment of its name.

    Its parameters are keyword arguments with a range, such as `dims: Annotated[tuple[int, ...], Between(1, 8192)]`.
    """

    def register(measure: Callable[..., Measurements]) -> Callable[..., Measurements]:
        _REGISTERED[measure.__name__] = Experiment(
            name=measure.__name__,
            claims=tuple(claims),
            title=title,
            statement=statement,
            formula=formula,
            condition=condition,
            instead=instead,
            needs=tuple(needs),
            measure=measure,
        )
        return measure

    return register


@cache
def experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order of the statements.

    >>> "scaling" in experiments()
    True
    """
    for module in pkgutil.iter_modules(folder.__path__):
        import_module(f"{folder.__name__}.{module.name}")
    return dict(sorted(_REGISTERED.items(), key=lambda item: ([place(claim) for claim in item[1].claims], item[0])))


def lookup(name: str) -> Experiment:
    """An experiment by name; a ValueError suggests the nearest."""
    if name not in experiments():
        near = get_close_matches(name, experiments(), n=1)
        hint = f"did you mean {near[0]}?" if near else "`regard lab list` shows them"
        raise ValueError(f"experiment: expected the name of an experiment, got {name!r}; {hint}")
    return experiments()[name]


def run(name: str, **parameters: Any) -> Outcome:
    """Run an experiment; what is not given among its parameters has its default.

    >>> outcome = run("scaling", dims=(4, 64), samples=20_000, seed=7)
    >>> outcome.verdict, outcome.table[0]["d"]
    ('holds', 4)
    """
    experiment = lookup(name)
    arguments = experiment.arguments(**parameters)
    begin = perf_counter()
    missing = missing_models(experiment.needs)
    measurements = None if missing else experiment.measure(**arguments)
    return Outcome(
        experiment=experiment,
        parameters=arguments,
        measurements=measurements,
        missing=missing,
        seconds=perf_counter() - begin,
    )


def missing_models(models: Sequence[str]) -> str:
    """How to install the models that are not here; empty if all are."""
    from regard.checkpoints.names import NAMES

    missing = [name for name in models if NAMES[name].find() is None]
    return "; ".join(f"needs {name}: {NAMES[name].command}" for name in missing)
