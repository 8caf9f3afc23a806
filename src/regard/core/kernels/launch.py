"""Launching a kernel again as it was compiled: Triton looks at every argument of every launch, which takes longer than
many a kernel runs. And launching all kernels of a call again, without the Python between them."""

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton
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
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    fresh: tuple[int, ...] = (),
) -> None:
    """Run a kernel with tensors, then fresh numbers, then the numbers and options of `arguments`.

    `arguments` is called once per `place` and `launches`, so its result must depend on nothing else. Fresh numbers may
    differ at every call, so the kernel must not be specialised for them.
    """
    if 0 in grid:
        return
    index = tensors[0].get_device()  # type: ignore[union-attr] # the first is always there
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):  # Triton launches on the current one
            launch(launches, place, kernel, grid, tensors, arguments, fresh)
        return
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    key = place, *[-1 if p is None else p & 15 for p in pointers]  # Triton compiles for aligned pointers
    ready = launches.get(key)
    if ready is not None:
        run, head, rest = ready
        run(*grid, torch._C._cuda_getCurrentRawStream(index), *head, *pointers, *fresh, *rest)
        if _recording.launches is not None:
            _recording.launches.append((ready, grid, tensors, fresh))
        return
    numbers, options = arguments()
    compiled = kernel[grid](*tensors, *fresh, *numbers, **options)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
        constants = tuple(options[name] for name in kernel.arg_names[len(tensors) + len(fresh) + len(numbers) :])
        launches[key] = *_launcher(compiled), (*numbers, *constants)
    if _recording.launches is not None:
        _recording.launches.append((launches.get(key), grid, tensors, fresh))


def _launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a kernel, and what it is given between the stream and the kernel's own arguments."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    hooks = None, None, None
    if triton.__version__.startswith("3.6.") and run.global_scratch_size == run.profile_scratch_size == 0:
        # Past `run`, which is Python and would allocate what is not wanted.
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, *hooks)
    return run, (function, metadata, *hooks)


MOST_SCRATCH = 1 << 29
"""Bytes of intermediate results that a chain keeps side by side; beyond them launching takes no time worth saving."""


class _Recording(threading.local):
    launches: list[tuple[Any, ...]] | None = None
    """What was launched in this thread, while that is recorded: kernels as compiled, grids, tensors, fresh numbers."""


_recording = _Recording()


class Chain:
    """Computes as `run` does, which does nothing with the inputs but launch kernels on them and on `constants`.

    The first call is recorded: which kernels it launched, and where their tensors lay. Calls like it, of the same sizes
    and strides, launch them again: all intermediate results lie in one piece of memory. A `number` that may be another
    at every call is given last, and is the first of the first kernel's fresh numbers.
    """

    def __init__(self, run: Callable[..., Any], *constants: Tensor | None) -> None:
        self.run, self.constants = run, [x for x in constants if x is not None]
        self.launches: list[tuple[Any, ...]] | None = None
        self.plain = False
        """Whether it cannot be recorded."""
        self.index = 0
        self.out: tuple[Any, ...] | None = None
        """The sizes and dtype of the output; empty if they are those of the first input."""
        self.scratch: Tensor | None = None
        """A tensor of the size of the intermediate memory, a single byte repeated."""
        self.fixed: list[int | None] = []
        """Pointers to constants, and None."""
        self.moved: list[tuple[int, int]] = []
        """Pointers into an input, the output or the intermediate memory: which of these, and how many bytes on."""

    def __call__(self, *inputs: Tensor, number: int | None = None) -> Any:
        if self.launches is None:
            return self._run(inputs, number) if self.plain else self._recorded(inputs, number)
        pointers: list[int | None] = []
        bits = 0
        for x in inputs:
            pointer = x.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        if bits & 15 or torch._C._cuda_getDevice() != self.index:  # kernels were compiled for these
            return self._run(inputs, number)
        out, scratch = None, None
        if self.out is not None:
            out = inputs[0].new_empty(self.out[0], dtype=self.out[1]) if self.out else torch.empty_like(inputs[0])
            pointers.append(out.data_ptr())
        if self.scratch is not None:
            scratch = torch.empty_like(self.scratch)
            pointers.append(scratch.data_ptr())
        pointers += self.fixed
        pointers += [pointers[base] + offset for base, offset in self.moved]  # type: ignore[operator]
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        fresh = () if number is None else (number,)
        for run, grid, head, choose, numbers in self.launches:
            run(*grid, stream, *head, *choose(pointers), *fresh, *numbers)
            fresh = ()
        return out

    def _run(self, inputs: Sequence[Tensor], number: int | None) -> Any:
        return self.run(*inputs) if number is None else self.run(*inputs, number)

    def _recorded(self, inputs: tuple[Tensor, ...], number: int | None) -> Any:
        """Compute, and keep the launches if they can be launched again."""
        views = [x.detach() for x in inputs]  # of inputs that are one tensor too, so that each is known by itself
        noted: list[tuple[Any, ...]] = []
        _recording.launches = noted
        try:
            out = self._run(views, number)
        finally:
            _recording.launches = None
        index = inputs[0].get_device()
        if not any([x.data_ptr() & 15 for x in inputs]) and (index < 0 or index == torch._C._cuda_getDevice()):
            launches = self._chained(views, out, noted, 0 if number is None else 1)
            self.plain, self.launches = launches is None, launches
        return out

    def _chained(
        self, inputs: list[Tensor], out: Tensor | None, noted: list[tuple[Any, ...]], fresh_count: int
    ) -> list[tuple[Any, ...]] | None:
        """The launches, with each tensor as a place in an input, the output or the memory between; None if something
        else was computed with."""
        outside = {x.untyped_storage().data_ptr() for x in inputs}
        constant = {x.untyped_storage().data_ptr() for x in self.constants}
        output_storage = None if out is None else out.untyped_storage().data_ptr()
        between = len(inputs) + (out is not None)
        offsets: dict[int, int] = {}
        nbytes = 0

        def place(tensor: Tensor | None) -> tuple[int | None, int | None] | None:
            nonlocal nbytes
            if tensor is None:
                return None, None
            for which, x in enumerate(inputs):
                if tensor is x:
                    return which, 0
            storage = tensor.untyped_storage().data_ptr()
            if storage in outside:
                return None
            if storage in constant:
                return None, tensor.data_ptr()
            if storage == output_storage:
                return len(inputs), tensor.data_ptr() - storage
            if storage not in offsets:
                offsets[storage] = nbytes
                nbytes += ceil_divide(tensor.untyped_storage().nbytes(), 512) * 512
            return between, offsets[storage] + tensor.data_ptr() - storage

        launches: list[tuple[Any, ...]] = []
        for ready, grid, tensors, fresh in noted:
            places = [place(tensor) for tensor in tensors]
            if ready is None or None in places:
                return None
            run, head, rest = ready
            launches.append((run, grid, head, places, (*fresh[0 if launches else fresh_count :], *rest)))
        written = out is None or any((len(inputs), 0) in places for *_, places, _ in launches)
        if nbytes > MOST_SCRATCH or not written or not (out is None or out.is_contiguous()):
            return None
        first = inputs[0]
        if out is not None:
            alike = first.is_contiguous() and (out.shape, out.dtype) == (first.shape, first.dtype)
            self.out = () if alike else (out.shape, out.dtype)
        self.scratch = first.new_empty(1, dtype=torch.uint8).expand(nbytes) if nbytes else None
        self.index = first.get_device()
        return self._choosing(launches, between + (nbytes > 0))

    def _choosing(self, launches: list[tuple[Any, ...]], bases: int) -> list[tuple[Any, ...]]:
        """The launches with functions that choose their pointers from a list: those to the inputs, the output and the
        intermediate memory (`bases` of them), `fixed` and `moved`."""
        places = {place for *_, chosen, _ in launches for place in chosen}
        self.fixed = [offset for base, offset in places if base is None]
        self.moved = [(base, offset) for base, offset in places if base is not None and offset]
        index: dict[tuple[int | None, int | None], int] = {(base, 0): base for base in range(bases)}
        index |= {(None, offset): bases + at for at, offset in enumerate(self.fixed)}
        index |= {place: bases + len(self.fixed) + at for at, place in enumerate(self.moved)}
        return [
            (run, grid, head, itemgetter(*(index[place] for place in chosen)), numbers)
            for run, grid, head, chosen, numbers in launches
        ]
