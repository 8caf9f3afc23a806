"""The batches of each step in turn, made when they are needed or ahead of that by processes of their own."""

import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from regard.training.batches import Integers, plan
from regard.training.parallel import Place
from regard.training.settings import Settings
from regard.training.task import Batch, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """The examples of a step, and the position in the order of examples after it."""

    indices: list[int]
    epoch: int
    batch: int


class Course:
    """The order of examples from a position on, without end."""

    def __init__(self, sizes: Sequence[int] | Integers, settings: Settings) -> None:
        self._plan: Callable[[int], Any] = lambda epoch: plan(
            sizes, settings.seed, epoch, batch_tokens=settings.batch_tokens, batch_size=settings.batch_size
        )
        self.move(0, 0)

    def move(self, epoch: int, batch: int) -> None:
        self.epoch, self.batch = epoch, batch
        self.batches = self._plan(epoch)

    def __iter__(self) -> Iterator[Turn]:
        while True:
            if self.batch >= len(self.batches):
                self.move(self.epoch + 1, 0)
            self.batch += 1
            yield Turn(self.batches[self.batch - 1], self.epoch, self.batch)


@dataclass(frozen=True)
class Step:
    """What one process computes in a step: a batch for each of its micro-batches."""

    turn: Turn
    batches: list[Batch]
    weights: list[int]
    """1, or 0 for a micro-batch without examples: it computes one all the same, since every process must take part."""
    counts: dict[str, float]
    """The predictions of each loss term, of all micro-batches together."""


class _Steps(Dataset[Any]):
    """A process's steps by their turns; an error is a result, which the process that trains raises."""

    def __init__(self, task: Task, place: Place, accumulate: int) -> None:
        self.task, self.rank, self.accumulate = task, place.rank, accumulate
        self.parts = place.world * accumulate

    def __getitem__(self, turn: Turn) -> tuple[Step | None, Exception | None]:
        try:
            return self._step(turn), None
        except Exception as error:
            return None, error

    def _step(self, turn: Turn) -> Step:
        first = self.rank * self.accumulate
        pieces = [turn.indices[first + at :: self.parts] for at in range(self.accumulate)]
        batches = [self.task.batch(piece or turn.indices[:1], turn.epoch) for piece in pieces]
        counts: dict[str, float] = {}
        for piece, batch in zip(pieces, batches, strict=True):
            for name, count in self.task.counts(batch).items():
                counts[name] = counts.get(name, 0) + (count if piece else 0)
        return Step(turn, batches, [int(bool(piece)) for piece in pieces], counts)


def steps(task: Task, course: Course, place: Place, settings: Settings) -> Generator[Step, None, None]:
    """The steps of a process from the course's position on; with `settings.workers`, that many processes make them
    ahead. Close the generator to end these processes."""
    # A generator of its own: the loader draws from it, and the numbers that training draws stay what they were.
    options: dict[str, Any] = {"generator": torch.Generator(), "batch_size": None, "collate_fn": _same}
    if settings.workers:
        options |= {"num_workers": settings.workers, "worker_init_fn": _ignore_interrupts}
    loader = DataLoader(_Steps(task, place, settings.accumulate), sampler=course, **options)
    for step, error in loader:
        if error is not None:
            raise error
        yield step


def _same(value: T) -> T:
    return value


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal; the one that trains saves, and then ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
