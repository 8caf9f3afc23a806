"""Which examples are in each batch: a pure function of seed and epoch, so that a checkpoint needs the step number only.

Examples are shuffled, sorted by size within stretches of the shuffled order, cut into batches, and the batches are
shuffled again: batches have little padding, and the order stays random.
"""

from collections.abc import Sequence

import numpy as np

STRETCH = 64
"""How many batches of examples are sorted by size together."""


def check_sizes(sizes: Sequence[int], batch_tokens: int | None) -> None:
    """Raise ValueError unless there are examples and every example fits into a batch.

    >>> from regard.training.batches import check_sizes
    >>> check_sizes([5, 1, 4, 2], batch_tokens=8)
    """
    if not len(sizes):
        raise ValueError("sizes: expected at least one example, got none")
    if batch_tokens is not None and (longest := int(np.max(sizes))) > batch_tokens:
        raise ValueError(f"batch_tokens: expected room for the longest example, {longest} tokens, got {batch_tokens}")


def plan(
    sizes: Sequence[int], seed: int, epoch: int, *, batch_tokens: int | None = None, batch_size: int | None = None
) -> list[list[int]]:
    """The batches of an epoch as lists of indices: `batch_size` examples each, or as many as fit into `batch_tokens`
    when padded to the longest. A last batch of less than half the size is dropped, unless it is the only one.

    >>> from regard.training.batches import plan
    >>> plan([5, 1, 4, 2], seed=0, epoch=0, batch_size=2) == plan([5, 1, 4, 2], seed=0, epoch=0, batch_size=2)
    True
    >>> sorted(sum(plan([5, 1, 4, 2], seed=0, epoch=0, batch_tokens=10), []))
    [0, 1, 2, 3]
    """
    check_sizes(sizes, batch_tokens)
    lengths = np.asarray(sizes)
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lengths))
    examples = batch_size or max(1, int(batch_tokens or 0) // max(1, int(lengths.mean())))
    if lengths.min() != lengths.max():
        stretches = (order[start : start + STRETCH * examples] for start in range(0, len(order), STRETCH * examples))
        order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in stretches])
    if batch_size is not None:
        batches = [order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)]
        if len(batches) > 1 and 2 * len(batches[-1]) < batch_size:
            batches.pop()
    else:
        batches = _filled(order, lengths, batch_tokens or 0)
    random.shuffle(batches)
    return batches


def _filled(order: np.ndarray, sizes: np.ndarray, tokens: int) -> list[list[int]]:
    """Batches of as many examples as fit into `tokens` when padded to the longest."""
    batches: list[list[int]] = [[]]
    longest = 0
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        longest = max(longest, size)
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = size
        batches[-1].append(index)
    return batches


def waste(sizes: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of the batches' tokens that is padding.

    >>> from regard.training.batches import waste
    >>> waste([4, 2, 3], [[0, 1], [2]]) == 2 / 11
    True
    """
    lengths = np.asarray(sizes)
    room = sum(int(lengths[list(batch)].max()) * len(batch) for batch in batches)
    real = sum(int(lengths[list(batch)].sum()) for batch in batches)
    return (room - real) / room if room else 0.0
