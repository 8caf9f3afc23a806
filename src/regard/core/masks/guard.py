"""What is masked reaches nothing, by construction: a NaN or infinity too, and nobody reads a number to make it so.

A path that reads keys which some of its queries do not see computes with a copy in which bad keys and values are 0;
then the queries that see one of them get NaN. This is part of the computation, so that it holds on every device and
under every trace and transform. Which paths need it is their own to say (choice.py).
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.core.masks import Mask
from regard.core.masks.structure import reached


class _Policy(threading.local):
    """What is taken for granted, in this thread alone. torch.compile follows it, which it does not a ContextVar."""

    finite = False


_policy = _Policy()


@contextmanager
def all_finite() -> Iterator[None]:
    """Within this, keys and values are taken to be finite, and nothing is done about those that are not: for training,
    where one NaN anywhere spoils the loss, which is looked at. Other threads are guarded as ever.

    >>> import torch
    >>> from regard.core.masks.guard import all_finite, bad_keys
    >>> spoiled = torch.full((1, 1, 2, 4), torch.nan)
    >>> bad_keys(spoiled, spoiled)
    tensor([[[True, True]]])
    >>> with all_finite():
    ...     print(bad_keys(spoiled, spoiled))
    None
    """
    before, _policy.finite = _policy.finite, True
    try:
        yield
    finally:
        _policy.finite = before


def finite() -> bool:
    """Whether keys and values are taken to be finite, here and now."""
    return _policy.finite


def bad_keys(k: Tensor, v: Tensor) -> Tensor | None:
    """Which keys (B, G, S) carry a NaN or infinity, or whose value does; None where all are taken to be finite."""
    return None if _policy.finite else not_finite(k, v)


def not_finite(k: Tensor, v: Tensor) -> Tensor:
    """Which keys carry a NaN or infinity, or whose value does: (…, S, K) and (…, S, V) to (…, S)."""
    marks = [_mark(tensor.detach()) for tensor in (k, v) if tensor.shape[-1]]
    return sum(marks[1:], marks[0]).isnan()


def _mark(rows: Tensor) -> Tensor:
    """0 for a row of finite numbers, NaN for others: a finite number times 0 is 0."""
    if rows.shape[-1] <= 16:  # less than two vectors, over which reductions are slow
        return rows.mul(0).sum(-1)
    return rows.amax(-1).mul(0) + rows.amin(-1).mul(0)  # the extremes of a row are finite if all of it is


def cleaned(tensor: Tensor, bad: Tensor | None) -> Tensor:
    """The tensor with zeros where it is bad."""
    return tensor if bad is None else torch.where(bad[..., None], 0, tensor)


def poisoned(out: Tensor, mask: Mask | None, bad: Tensor | None) -> Tensor:
    """NaN for exactly the queries that see a bad key: no masked NaN leaks, and no visible one is hidden."""
    if bad is None:
        return out
    return torch.where(reached(mask, bad, out.shape[1], out.shape[2])[..., None], math.nan, out)
