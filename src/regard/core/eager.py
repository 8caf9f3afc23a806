"""Whether a computation runs now, on numbers that Python can read, or is being traced or transformed."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

Constant = TypeVar("Constant")
_PLAIN = {Tensor, Parameter}


def transformed() -> bool:
    """Whether a transform of torch.func, or forward derivatives, must reach inside every operator."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def readable(*tensors: Tensor) -> bool:
    """Whether Python can read numbers of these tensors: not in a trace or transform, not where there are none.

    >>> import torch
    >>> readable(torch.zeros(1)), readable(torch.zeros(1, device="meta"))
    (True, False)
    >>> torch.vmap(lambda x: x + readable(x))(torch.zeros(2))
    tensor([0., 0.])
    """
    if torch.compiler.is_compiling() or transformed():
        return False
    for tensor in tensors:  # a loop: this is asked at every step
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
    return True


def recorded(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from these tensors.

    >>> import torch
    >>> leaf = torch.zeros(1, requires_grad=True)
    >>> with torch.no_grad():
    ...     recorded(leaf)
    False
    >>> recorded(leaf, torch.zeros(1)), recorded(torch.zeros(1))
    (True, False)
    """
    if torch.is_grad_enabled():
        for tensor in tensors:  # a loop: this is asked at every step
            if tensor.requires_grad:
                return True
    return False


def untouched() -> bool:
    """Whether tensors made here are plain ones, which may be kept for later: no trace, transform or mode is at work."""
    return not torch.compiler.is_compiling() and not transformed() and torch._C._len_torch_dispatch_stack() == 0


def kept(maxsize: int) -> Callable[[Callable[..., Constant]], Callable[..., Constant]]:
    """Decorates a function that makes constant tensors: the last `maxsize` are kept for later calls.

    They are made outside of any transform or mode, which would stick to them: an inference tensor cannot be saved for a
    gradient, a fake one has no numbers. A trace by Dynamo, and fake tensors, which take none but fake ones beside them,
    get constants of their own; to torch.export plain tensors are constants.

    >>> import torch
    >>> @kept(8)
    ... def positions(count: int) -> torch.Tensor:
    ...     return torch.arange(count)
    >>> with torch.inference_mode():
    ...     first = positions(3)
    >>> first.is_inference(), positions(3) is first
    (False, True)
    """

    def decorate(make: Callable[..., Constant]) -> Callable[..., Constant]:
        @lru_cache(maxsize)
        def plain(*arguments: Any) -> Constant:
            with torch._C._DisableFuncTorch(), _disable_current_modes(), torch.inference_mode(False):
                return make(*arguments)

        @wraps(make)
        def constant(*arguments: Any) -> Constant:
            if torch.compiler.is_dynamo_compiling() or (_fakes() and not torch.compiler.is_exporting()):
                return make(*arguments)
            return plain(*arguments)

        return constant

    return decorate


def _fakes() -> bool:
    """Whether tensors made here are fake ones."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def direct(*tensors: Tensor) -> bool:
    """Whether code may compute on the memory of these tensors past torch's dispatcher, which takes longer than a short
    step: they are plain tensors, and nobody traces, transforms or watches operators.

    >>> import torch
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> direct(torch.zeros(1))
    True
    >>> with FlopCounterMode(display=False):
    ...     direct(torch.zeros(1))
    False
    """
    if not untouched() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._autograd._profiler_enabled() or torch._C._len_torch_function_stack() > 0:
        return False
    for tensor in tensors:  # noqa: SIM110 - a loop takes half the time, and this is asked at every step
        if type(tensor) not in _PLAIN or tensor.is_neg():  # a negative view: its memory holds -x
            return False
    return True


def symbolic(*sizes: int) -> bool:
    """Whether a trace holds one of these sizes open, as torch.export does for a dynamic dimension."""
    for size in sizes:  # noqa: SIM110 - a loop takes half the time, and this is asked at every call
        if isinstance(size, torch.SymInt):
            return True
    return False
