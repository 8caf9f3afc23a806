"""Whole numbers and arrays as users pass them: Python's, NumPy's or a tensor's."""

import operator
from typing import Any

import torch
from torch import Tensor

FAR = 1 << 40
"""A distance greater than any sequence; sums with it still fit 64 bits."""


def whole_number(value: Any) -> int | None:
    """A Python int from an int, or from a NumPy or tensor integer; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def count(name: str, value: int) -> int:
    """A whole number of at least 0, at most `FAR`, or an error that names the argument."""
    number = whole_number(value)
    if number is None or number < 0:
        raise ValueError(f"{name}: expected a whole number of at least 0, got {value!r}")
    return min(number, FAR)


def from_numpy(name: str, value: Any) -> Any:
    """A NumPy array copied to a tensor; anything else unchanged."""
    if isinstance(value, Tensor) or not hasattr(value, "__array__"):
        return value
    import numpy as np

    try:
        return torch.from_numpy(np.array(value, order="C"))  # PyTorch has no negative strides
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected an array of bools or whole numbers, got {value!r}") from None
