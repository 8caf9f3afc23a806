"""Which examples are in each batch: a pure function of seed and epoch, so that a checkpoint needs the step number only.

Examples are shuffled, sorted by size within stretches of the shuffled order, cut into batches, and the batches are
shuffled again: batches have little padding, and the order stays random. An epoch is kept as arrays, a few bytes per
example: 10⁹ tokens are millions of examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRETCH = 64
"""How many batches of examples are sorted by size together."""

Integers = NDArray[np.integer[Any]]


def check_sizes(sizes: Sequence[int] | Integers, batch_tokens: int | None) -> None:
    """Raise ValueError unless there are examples and every example fits into a batch.

    >>> from regard.training.batches import check_sizes
    >>> check_sizes([5, 1, 4, 2], batch_tokens=8)
    """
    if not len(sizes):
        raise ValueError("sizes: expected at least one example, got none")
    if batch_tokens is not None and (longest := int(np.max(sizes))) > batch_tokens:
        raise ValueError(f"batch_tokens: expected room for the longest example, {longest} tokens, got {batch_tokens}")


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of an epoch: `plan[7]` has the examples of the eighth.

    >>> from regard.training.batches import plan
    >>> batches = plan([5, 1, 4, 2], seed=0, epoch=0, batch_size=2)
    >>> len(batches), sorted(batches[0] + batches[1])
    (2, [0, 1, 2, 3])
    """

    examples: Integers
    """All examples, those of a batch side by side."""
    bounds: Integers
    """Where each batch begins among them, and where the last one ends."""
    turns: Integers
    """Which batch each step has."""
    padding: float
    """The share of the batches' tokens that is padding."""

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, step: int) -> list[int]:
        batch = self.turns[step]
        indices: list[int] = self.examples[self.bounds[batch] : self.bounds[batch + 1]].tolist()
        return indices


def plan(
    sizes: Sequence[int] | Integers,
    seed: int,
    epoch: int,
    *,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
) -> Plan:
    """The batches of an epoch: `batch_size` examples each, or as many as fit into `batch_tokens` when padded to the
    longest. A last batch of less than half the size is dropped, unless it is the only one.

    >>> from regard.training.batches import plan
    >>> [plan([5, 1, 4, 2], seed=0, epoch=0, batch_tokens=10)[step] for step in range(2)]
    [[2, 0], [1, 3]]
    """
    check_sizes(sizes, batch_tokens)
    lengths = np.asarray(sizes)
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(np.arange(len(lengths), dtype=np.int32 if len(lengths) < 2**31 else np.int64))
    examples = batch_size or max(1, int(batch_tokens or 0) // max(1, int(lengths.mean())))
    if lengths.min() != lengths.max():
        for start in range(0, len(order), STRETCH * examples):
            part = order[start : start + STRETCH * examples]
            part[:] = part[np.argsort(lengths[part], kind="stable")]
    if batch_size is not None:
        bounds = _even(len(order), batch_size)
        if len(bounds) > 2 and 2 * (bounds[-1] - bounds[-2]) < batch_size:
            bounds = bounds[:-1]
    elif lengths.min() == lengths.max():
        bounds = _even(len(order), examples)
    else:
        bounds = _filled(lengths[order], batch_tokens or 0)
    order = order[: bounds[-1]]
    return Plan(order, bounds, random.permutation(len(bounds) - 1), _padding(lengths[order], bounds))


def _even(count: int, size: int) -> Integers:
    """The bounds of batches of `size` examples each, the last of the rest."""
    return np.append(np.arange(0, count, size), count)


def _filled(sizes: Integers, tokens: int) -> Integers:
    """The bounds of batches of as many examples as fit into `tokens` when padded to the longest."""
    bounds = [0]
    while bounds[-1] < len(sizes):
        begin = bounds[-1]
        ahead = np.maximum.accumulate(sizes[begin : begin + tokens // max(1, int(sizes[begin]))])
        fits = ahead * np.arange(1, len(ahead) + 1) <= tokens
        bounds.append(begin + (len(ahead) if fits.all() else int(fits.argmin())))
    return np.array(bounds)


def _padding(sizes: Integers, bounds: Integers) -> float:
    """The share of the batches' tokens that is padding; `sizes` are in the order of the plan's examples."""
    room = int((np.maximum.reduceat(sizes, bounds[:-1]) * np.diff(bounds)).sum())
    return (room - int(sizes.sum())) / room if room else 0.0
