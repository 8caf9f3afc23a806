"""Whether a computation runs eagerly, on numbers that Python can read, or under a trace or transform."""

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
TENSORS = {Tensor, Parameter}
"""The types of tensors whose memory may be read; not those of subclasses."""


def transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active: it must see every operator."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def readable(*tensors: Tensor) -> bool:
    """Whether Python can read numbers of these tensors: not in a trace or transform, not of meta or fake tensors.

    >>> import torch
    >>> readable(torch.zeros(1)), readable(torch.zeros(1, device="meta"))
    (True, False)
    >>> torch.vmap(lambda x: x + readable(x))(torch.zeros(2))
    tensor([0., 0.])
    """
    if torch.compiler.is_compiling() or transformed():
        return False
    for tensor in tensors:  # a loop is fast: every decode step runs this
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
        for tensor in tensors:  # a loop is fast: every decode step runs this
            if tensor.requires_grad:
                return True
    return False


def batched(tensor: Tensor) -> bool:
    """Whether a tensor is one of many inside a vmap: torch.func's, or that of `is_grads_batched` and of Jacobians with
    `vectorize`, which no other function here notices.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x * 1
    >>> _ = y.register_hook(lambda grad: print(batched(grad)))
    >>> _ = torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    True
    >>> _ = torch.autograd.grad(y, x, torch.ones(2))
    False
    """
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def untouched() -> bool:
    """Whether tensors made here are plain and may be cached: no trace, transform or dispatch mode is active."""
    return not torch.compiler.is_compiling() and not transformed() and torch._C._len_torch_dispatch_stack() == 0


def kept(maxsize: int) -> Callable[[Callable[..., Constant]], Callable[..., Constant]]:
    """A decorator for functions that make constant tensors: an LRU cache of `maxsize`.

    Cached tensors are made outside of any transform or mode, since an inference tensor cannot be saved for backward and
    a fake tensor has no data. Under Dynamo and under FakeTensorMode, which accept no cached plain tensors, the constant
    is made anew; torch.export takes the plain tensors as constants.

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
    """Whether tensors made here are fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def direct(*tensors: Tensor) -> bool:
    """Whether code may bypass torch's dispatcher and compute on the memory of these tensors: they are plain tensors,
    and nothing traces, transforms or observes operators. The dispatcher takes longer than a short decode step.

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
    for tensor in tensors:  # noqa: SIM110 - a loop takes half the time, and every decode step runs this
        if type(tensor) not in TENSORS or tensor.is_neg():  # a negative view: its memory holds -x
            return False
    return True


def symbolic(*sizes: int) -> bool:
    """Whether one of these sizes is symbolic, as a dynamic dimension is under torch.export."""
    for size in sizes:  # noqa: SIM110 - a loop takes half the time, and every call runs this
        if isinstance(size, torch.SymInt):
            return True
    return False


def surely_equal(first: int, second: int) -> bool:
    """Whether two sizes are equal. Of dynamic sizes under torch.export: whether they are equal whatever they turn out
    to be, without a guard that would fix the answer for the whole program.

    >>> surely_equal(3, 3), surely_equal(3, 4)
    (True, False)
    """
    equal = first == second
    if not isinstance(equal, torch.SymBool):
        return bool(equal)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, which only a trace needs

    return statically_known_true(equal)
