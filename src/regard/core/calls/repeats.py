"""Calls, and steps of a stream, like one before, on a GPU: what was checked and chosen for that one is run again.

A kernel for a short sequence runs as long as it takes to launch it. Checks, the choice of a path and what the path
finds out take several times as long, and follow from the mechanism, the mask, and the sizes, strides, dtypes and
devices of the tensors; so they are kept by these, where no gradient is recorded and nothing is traced.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Path
from regard.core.eager import recorded, untouched
from regard.core.masks.positions import Band
from regard.core.states.state import State

MOST = 1024
"""Calls that are kept; then all are forgotten."""

Step = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any] | None]
"""The output of a token and the longer state; None for a state that has no room for it, or folds."""

_kept_runs: dict[Any, Any] = {}


def key_of(q: Any, k: Any, v: Any, mechanism: Any, mask: Any) -> tuple[Any, ...] | None:
    """The key under which a call is kept; None if it must not be kept."""
    if not (type(q) is type(k) is type(v) is Tensor and _launched(q)):
        return None
    if mask is not None and not isinstance(mask, Band):  # others are mostly made for one call
        return None
    if recorded(q, k, v):
        return None
    if not untouched() or torch.is_autocast_enabled("cuda"):
        return None
    sizes = q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()
    return mechanism, mask, *sizes, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device


def step_key(q: Any, k: Any, v: Any, mechanism: Any, mask: Any, state: Any) -> tuple[Any, ...] | None:
    """The key under which a state's step by one token is kept; None if it must not be kept."""
    if not (isinstance(q, Tensor) and _launched(q)) or q.ndim != 4 or q.shape[2] != 1:
        return None
    key = key_of(q, k, v, mechanism, mask)
    layout = None if key is None else getattr(state, "layout", None)  # what is no state is refused by `extend`
    return None if key is None or layout is None else (*key, layout)


def find(key: tuple[Any, ...] | None) -> Any:
    """What runs a call, or a step, like one before; None if there was none."""
    try:
        return _kept_runs.get(key)
    except TypeError:  # a mechanism of the user's with a field that has no hash
        return None


def keep(key: tuple[Any, ...] | None, call: Call, path: Path) -> None:
    """Keep what runs calls like this one, which was checked, by the path that was chosen for it."""
    if key is None or path.again is None or call.empty:
        return
    again = path.again(call)
    if again is not None:
        _keep(key, again)


def keep_step(key: tuple[Any, ...], step: Step | None) -> None:
    """Keep what extends states like one by tokens like these; if there is nothing, that."""
    _keep(key, step or _no_step)


def _no_step(q: Tensor, k: Tensor, v: Tensor, state: State) -> None:
    return None


def _keep(key: tuple[Any, ...], run: Any) -> None:
    if len(_kept_runs) >= MOST:
        _kept_runs.clear()
    with suppress(TypeError):  # as above
        _kept_runs[key] = run


def _launched(q: Tensor) -> bool:
    """Whether computing is launching kernels."""
    return q.is_cuda
