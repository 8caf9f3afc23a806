"""Work on held-out examples that is divided over the processes of a run.

Every process gets the results of all items in their order, and adds them up as one process would: an evaluation is
bitwise the same on any number of processes, if the weights are.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar

from regard.training.parallel import Place
from regard.training.store import together

Item = TypeVar("Item")
Result = TypeVar("Result")

_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def dividing(place: Place) -> Iterator[None]:
    """Let `divided` divide work over all processes; all of them enter this.

    >>> import torch
    >>> from regard.training.divided import divided, dividing
    >>> with dividing(Place(0, 1, torch.device("cpu"))):
    ...     divided(abs, [-3, 4])
    [3, 4]
    """
    before = _place.set(place if place.world > 1 else None)
    try:
        yield
    finally:
        _place.reset(before)


def divided(work: Callable[[Item], Result], items: Iterable[Item], *, generates: bool = False) -> list[Result]:
    """`work(item)` for every item, in order. In the evaluation of a run on several processes each of them works on some
    of the items, and all get all results, which should be small: sums, predictions.

    Of a sharded model the processes gather the weights together, so each calls it as often as the others: the last ones
    repeat an item when there are too few. Work that `generates` calls it as often as its texts are long, and with a
    sharded model every process does all of it.

    >>> from regard.training.divided import divided
    >>> divided(len, ["held-out", "texts"])
    [8, 5]
    """
    place = _place.get()
    if place is None or (generates and place.sharded):
        return [work(item) for item in items]
    rows, mine = iter(items), []
    while row := list(islice(rows, place.world)):
        has = place.rank < len(row)
        if has or place.sharded:
            result = work(row[place.rank if has else 0])
            mine += [result] if has else []
    parts = together(lambda: mine)
    return [parts[at % place.world][at // place.world] for at in range(sum(map(len, parts)))]
