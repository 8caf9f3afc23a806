"""Launching a kernel again as it was compiled: Triton looks at every argument of every launch, which takes longer than
many a kernel runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

Launches = dict[Any, tuple[Any, ...]]
"""Kernels compiled for calls of one set of sizes and strides, with what they are given, by the place in the code that
launches them."""

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


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least a number above 0. Triton's own takes microseconds, too."""
    return 1 << (number - 1).bit_length()


def limits(bounds: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The first real key of each batch row, and the one after the last, as kernels are given them."""
    return (None, None) if bounds is None else (bounds[0], bounds[1])


def launch(
    launches: Launches,
    place: Any,
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | None, ...],
    told: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    fresh: tuple[int, ...] = (),
) -> None:
    """Run a kernel on tensors, then fresh numbers, then those that it is told, then options.

    What it is told must follow from `place` and from what `launches` belongs to: it is asked for once. Fresh numbers
    may be others at every call, so the kernel must not be specialised for them.
    """
    if 0 in grid:
        return
    index = tensors[0].get_device()  # type: ignore[union-attr] # the first is always there
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):  # Triton launches on the current one
            launch(launches, place, kernel, grid, tensors, told, fresh)
        return
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    key = place, *[-1 if p is None else p & 15 for p in pointers]  # Triton compiles for aligned pointers
    ready = launches.get(key)
    if ready is not None:
        run, function, metadata, rest = ready
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(*grid, stream, function, metadata, None, None, None, *pointers, *fresh, *rest)
        return
    numbers, options = told()
    compiled = kernel[grid](*tensors, *fresh, *numbers, **options)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
        constants = tuple(options[name] for name in kernel.arg_names[len(tensors) + len(fresh) + len(numbers) :])
        launches[key] = compiled.run, compiled.function, compiled.packed_metadata, (*numbers, *constants)
