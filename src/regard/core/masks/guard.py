"""A NaN or infinity in a masked key or value reaches nothing, by construction: no number is read to decide it.

A path that reads keys which some of its queries do not see computes with a copy in which bad keys and values (those
with a NaN or infinity) are 0; then the queries that see a bad key get NaN. This is part of the computation, so that it
holds on every device and under every trace and transform. A path says whether it needs the guard (`Path.reads_hidden`,
choice.py).
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from regard.core.masks import Mask
from regard.core.masks.structure import reached

_finite: ContextVar[bool] = ContextVar("finite", default=False)
"""What this thread, or this task of an event loop, assumes."""


class _Compiled(threading.local):
    """The same for compiled calls, by thread: torch.compile cannot trace a ContextVar."""

    finite = False


_compiled = _Compiled()


@contextmanager
def all_finite() -> Iterator[None]:
    """A context in which keys and values are assumed finite and the guard is left out: for training, where a NaN
    anywhere makes the loss NaN, which the loop checks. Other threads and other tasks of an event loop keep the guard;
    in compiled calls other threads do.

    >>> import torch
    >>> from regard.core.masks.guard import all_finite, bad_keys
    >>> spoiled = torch.full((1, 1, 2, 4), torch.nan)
    >>> bad_keys(spoiled, spoiled)
    tensor([[[True, True]]])
    >>> with all_finite():
    ...     print(bad_keys(spoiled, spoiled))
    None
    """
    traced = torch.compiler.is_compiling()
    before, _compiled.finite = (_compiled.finite if traced else _finite.get()), True
    if not traced:
        _finite.set(True)
    try:
        yield
    finally:
        _compiled.finite = before
        if not traced:
            _finite.set(before)


def finite() -> bool:
    """Whether keys and values are assumed finite here."""
    return _compiled.finite if torch.compiler.is_compiling() else _finite.get()


def bad_keys(k: Tensor, v: Tensor) -> Tensor | None:
    """Which keys (B, G, S) have a NaN or infinity in the key or its value; None where all are assumed finite."""
    return None if finite() else not_finite(k, v)


def not_finite(k: Tensor, v: Tensor) -> Tensor:
    """Which keys have a NaN or infinity in the key or its value: (…, S, K) and (…, S, V) to (…, S)."""
    marks = [_mark(tensor.detach()) for tensor in (k, v) if tensor.shape[-1]]
    return sum(marks[1:], marks[0]).isnan()


def _mark(rows: Tensor) -> Tensor:
    """0 for a row of finite numbers, NaN for others: a finite number times 0 is 0."""
    if rows.shape[-1] <= 16:  # less than two vectors, over which reductions are slow
        return rows.mul(0).sum(-1)
    return rows.amax(-1).mul(0) + rows.amin(-1).mul(0)  # the extremes of a row are finite if all of it is


def cleaned(tensor: Tensor, bad: Tensor | None) -> Tensor:
    """The tensor with 0 in place of bad keys or values."""
    return tensor if bad is None else torch.where(bad[..., None], 0, tensor)


def poisoned(out: Tensor, mask: Mask | None, bad: Tensor | None) -> Tensor:
    """NaN for exactly the queries that see a bad key: no masked NaN leaks, and no visible one is hidden."""
    if bad is None:
        return out
    return torch.where(reached(mask, bad, out.shape[1], out.shape[2])[..., None], math.nan, out)
