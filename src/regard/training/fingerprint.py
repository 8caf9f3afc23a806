"""The fingerprint of a task's data: one hash of everything that examples and evaluations are made of."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.training.task import Task

SAMPLED = 16
"""How many examples the fingerprint of a task without one of its own takes from `batch`."""
CHUNK = 2**24
"""Items of an array that are hashed together: a memory-mapped array is never whole in memory."""


def digest(*parts: Any) -> str:
    """The SHA-256 of tensors, arrays, texts, numbers, and lists and dicts of them.

    >>> import torch
    >>> from regard.training.fingerprint import digest
    >>> digest([1, "two"], torch.ones(3))[:8], digest([1, "two"], torch.zeros(3))[:8]
    ('07bfb0da', '797fb9c9')
    """
    total = hashlib.sha256()
    for part in parts:
        for piece in _pieces(part):
            total.update(piece)
    return total.hexdigest()


def of_attributes(task: "Task") -> str:
    """The fingerprint of a task without one of its own: all sizes, some examples as `batch` makes them, and all of the
    attributes that hold data: tensors, arrays, lists and dicts. A text, a number, an open file are not data.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> from regard.training.fingerprint import of_attributes
    >>> def prints(last):
    ...     labels = torch.tensor([0] * 99 + [last])
    ...     make = lambda indices, epoch: {"labels": labels[list(indices)]}
    ...     return of_attributes(SimpleNamespace(labels=labels, sizes=lambda: [1] * 100, batch=make))
    >>> prints(0) == prints(0), prints(0) == prints(1)
    (True, False)
    """
    sizes = task.sizes()
    batch = task.batch(list(range(min(SAMPLED, len(sizes)))), 0)
    data: dict[str, str] = {}
    for name, value in sorted(vars(task).items()):
        if isinstance(value, Tensor | np.ndarray | list | tuple | dict):
            with suppress(TypeError):  # not data: a list of modules, say
                data[name] = digest(value)
    return digest(np.asarray(sizes, np.int64), dict(sorted(batch.items())), data)


def sampled(task: "Task") -> str:
    """The fingerprint that run.json had in its first version: all sizes, and some examples."""
    sizes = task.sizes()
    total = hashlib.sha256(json.dumps([len(sizes), [int(size) for size in sizes]]).encode())
    for name, tensor in sorted(task.batch(list(range(min(SAMPLED, len(sizes)))), 0).items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """The bytes of a value, preceded by its type and shape; TypeError for what is not data."""
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        yield f"{whole.dtype} {tuple(whole.shape)}".encode()
        yield whole.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype.str} {value.shape}".encode()
        flat = value.reshape(-1)
        for start in range(0, len(flat), CHUNK):
            yield np.ascontiguousarray(flat[start : start + CHUNK]).view(np.uint8).data
    else:
        try:
            text = json.dumps(value)  # numbers, texts, and lists of them: a list of 100,000 pairs takes 0.1 s
        except (TypeError, ValueError):
            yield from _parts(value)
        else:
            yield text.encode()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Mapping):
        yield b"{"
        for name, part in value.items():
            yield from _pieces(name)
            yield from _pieces(part)
        yield b"}"
    elif isinstance(value, Sequence):
        yield b"["
        for part in value:
            yield from _pieces(part)
        yield b"]"
    else:
        raise TypeError(f"data: expected tensors, arrays, texts and numbers, got {type(value).__name__}")
