"""Launching a kernel again as it was compiled: Triton looks at every argument of every launch, which takes longer than
many a kernel runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

Launches = dict[Any, tuple[CompiledKernel, tuple[Any, ...]]]
"""Kernels compiled for calls of one set of sizes and strides, and their numbers, by the place in the code that launches
them."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def layout(tensor: Tensor) -> Layout:
    """What the numbers that a kernel is given for a tensor follow from."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """From row to row along the first three dimensions."""
    return (0, 0, 0) if tensor is None else tensor.stride()[:3]  # type: ignore[return-value]


def ceil_divide(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is made for kernels and takes microseconds."""
    return -(-a // b)


def launch(
    launches: Launches,
    place: Any,
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | None, ...],
    numbers: Callable[[], tuple[Any, ...]],
    **options: Any,
) -> None:
    """Run a kernel on tensors, then numbers, then options.

    Numbers and options must follow from `place` and from what `launches` belongs to: they are asked for once.
    """
    if 0 in grid:
        return
    device = tensors[0].device  # type: ignore[union-attr] # the first is always there
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current one
            launch(launches, place, kernel, grid, tensors, numbers, **options)
        return
    key = place, *[x is None or x.data_ptr() % 16 for x in tensors]  # Triton compiles for aligned pointers
    ready = launches.get(key)
    if ready is not None:
        ready[0][grid](*tensors, *ready[1])
        return
    arguments = numbers()
    compiled = kernel[grid](*tensors, *arguments, **options)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
        constants = tuple(options[name] for name in kernel.arg_names[len(tensors) + len(arguments) :])
        launches[key] = compiled, (*arguments, *constants)
