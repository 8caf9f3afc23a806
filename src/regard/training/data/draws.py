"""Random numbers as a function of seed, epoch and example, so that a resumed run draws the same numbers again.

They are hashes (SplitMix64, Steele et al. 2014), computed for all examples of a batch at once: making a generator per
example would take longer than a step on a GPU.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STRIDE = np.uint64(0x9E3779B97F4A7C15)


def draws(
    seed: int, epoch: int, indices: Sequence[int] | NDArray[np.int64], count: int, purpose: int = 0
) -> NDArray[np.float64]:
    """Numbers in [0, 1), also after rounding to float32: a row of `count` numbers per example, independent for each
    `purpose`.

    >>> import numpy as np
    >>> from regard.training.data.draws import draws
    >>> both = draws(0, 1, [7, 9], count=3)
    >>> np.array_equal(both[1:, :2], draws(0, 1, [9], count=2)), both.round(2).tolist()
    (True, [[0.23, 0.19, 0.28], [0.89, 0.84, 0.67]])
    """
    state = np.zeros(1, np.uint64)
    for part in (seed, epoch, purpose):
        state = _scattered(state + STRIDE + np.uint64(part % 2**64))
    rows = _scattered(state + STRIDE + np.asarray(indices).astype(np.uint64))
    hashes = _scattered(rows[:, None] + STRIDE * np.arange(1, count + 1, dtype=np.uint64))
    return (hashes >> np.uint64(40)) / float(2**24)


def _scattered(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
