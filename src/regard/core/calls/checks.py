"""Checks before a state is started or extended."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.core.calls.call import A_FLOAT, FLOATS, Call
from regard.core.masks import Mask
from regard.core.masks.structure import FOREVER, structure_of
from regard.core.states.state import State
from regard.core.user_code import runs_user_code

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism


def check_start(
    mechanism: "Mechanism",
    batch: int,
    num_kv_heads: int,
    qk_length: int,
    value_length: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Raise ValueError unless a state of these sizes, dtype and device can be made."""
    sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "qk_length": qk_length}
    for name, size in {**sizes, "value_length": value_length, "capacity": capacity}.items():
        least = 0 if name in ("batch", "capacity") else 1
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {size!r}")
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected {A_FLOAT}, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device: expected one that PyTorch has here, got {device!r}: {error!s:.80}") from None
    if (reason := mechanism.streams(qk_length)) is not None:
        raise ValueError(reason)


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether queries, keys and values certainly fit together: a quick test, since every decode step runs it."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if not q.ndim == k.ndim == v.ndim == 4:
        return False
    batch, heads, _, length = q.shape
    key_batch, groups, count, key_length = k.shape
    alike = batch == key_batch and length == key_length > 0 and groups > 0 and heads % groups == 0
    return alike and v.shape[2] == count and q.dtype == k.dtype == v.dtype and q.device == k.device


def check_extend(
    mechanism: "Mechanism",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    mask: Mask | None,
    bias: Tensor | None,
) -> None:
    """Raise ValueError for tokens that do not fit the state, or a mask under which the state cannot be extended."""
    if runs_user_code(mechanism) or not _fit(q, k, v):
        Call(mechanism, q, k, v).check()  # raises the error that names what is wrong, if anything is
    state.check(k, v)
    batch, heads, queries, _ = q.shape
    if queries != k.shape[2]:
        raise ValueError(f"q: expected as many new queries as new keys, {k.shape[2]}, got {queries}")
    total = state.length + queries
    if mask is not None:
        mask.fits(batch, heads, queries, total)
    # A window that hides nothing yet will hide keys later: refuse it at the first token, not in the middle.
    if (reason := mechanism.streams(k.shape[3], structure_of(mask, FOREVER, FOREVER))) is not None:
        raise ValueError(reason)
    if bias is not None:
        keys, values = (t.new_empty(1).expand(*t.shape[:2], total, t.shape[3]) for t in (k, v))
        Call(mechanism, q, keys, values, None, bias).check()
