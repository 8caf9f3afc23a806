"""The tensors of a mechanism: what it lists, what its functions capture, and where and in what dtype it computes."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.core.user_code import runs_user_code

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism

M = TypeVar("M", bound="Mechanism")

_real: ContextVar[bool] = ContextVar("real", default=False)


def flat(mechanism: "Mechanism") -> list[Tensor]:
    """The tensors of a mechanism, its modules' parameters and buffers among them."""
    tensors: list[Tensor] = []
    for value in mechanism.tensors().values():
        tensors += [value] if isinstance(value, Tensor) else [*value.parameters(), *value.buffers()]
    return tensors


def replaced(mechanism: M, tensors: dict[str, Any]) -> M:
    """A copy of the mechanism with other tensors or modules in some of its fields.

    `dataclasses.replace` would run the checks again, and refuses fields that were computed from others.
    """
    other = object.__new__(type(mechanism))  # torch.compile cannot trace copy.copy
    for name, value in {**vars(mechanism), **tensors}.items():
        object.__setattr__(other, name, value)
    return other


def same(owner: object, mechanism: "Mechanism") -> bool:
    """Whether `mechanism` can extend a state of `owner`: equal fields, and identical tensors; None fits any
    mechanism."""
    if owner is None or owner is mechanism:
        return True
    if type(owner) is not type(mechanism):
        return False
    old, new = vars(owner), vars(mechanism)  # `dataclasses.fields` takes longer, and every step asks
    if old.keys() != new.keys():
        return False
    return all(old[name] is value or _equal(old[name], value) for name, value in new.items())


def _equal(old: object, new: object) -> bool:
    """Whether two values are equal by `==`; False where that gives no single bool (arrays, containers of tensors)."""
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return False
    try:
        return bool(old == new)
    except (RuntimeError, ValueError):
        return False


def brief(value: object) -> str:
    """A field in one line: a tensor's shape, a module's name."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    return f"{type(value).__name__}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def own_dtype(mechanism: "Mechanism") -> torch.dtype | None:
    """The widest dtype among a mechanism's floating-point tensors; None if it has none."""
    return _widest(_floating(mechanism))


def _floating(mechanism: "Mechanism") -> list[Tensor]:
    return [tensor for tensor in flat(mechanism) if tensor.is_floating_point()]


def _widest(tensors: list[Tensor]) -> torch.dtype | None:
    return reduce(torch.promote_types, [tensor.dtype for tensor in tensors]) if tensors else None


def fitted(mechanism: "Mechanism", dtype: torch.dtype) -> "Mechanism":
    """The mechanism for inputs of this dtype: with its floating-point tensors cast up to the widest dtype among them
    and the inputs, in which its formula then computes; the mechanism itself if nothing is narrower. Autograd records
    the casts.

    >>> import regard as rg, torch
    >>> from regard.core.tensors import fitted
    >>> kernel = rg.Kernel(feature_map=torch.nn.Linear(4, 6))
    >>> fitted(kernel, torch.float32) is kernel, fitted(kernel, torch.float64).feature_map.weight.dtype
    (True, torch.float64)
    """
    tensors = _floating(mechanism)
    widest = _widest(tensors)
    if widest is None or not dtype.is_floating_point:
        return mechanism
    widest = torch.promote_types(widest, dtype)
    if all(tensor.dtype == widest for tensor in tensors):
        return mechanism
    return cast(mechanism, widest)


def cast(mechanism: "Mechanism", dtype: torch.dtype) -> "Mechanism":
    """The mechanism with its floating-point tensors in a dtype, as they are in a model of that dtype."""
    return replaced(mechanism, {name: _cast(value, dtype) for name, value in mechanism.tensors().items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor or module in another dtype. A module becomes a shallow copy, so that gradients reach its parameters."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if not isinstance(value, nn.Module):  # a place that a module leaves empty
        return value
    other = object.__new__(type(value))  # torch.compile cannot trace copy.copy
    other.__dict__.update(value.__dict__)
    for members in ("_parameters", "_buffers", "_modules"):
        other.__dict__[members] = {name: _cast(member, dtype) for name, member in value.__dict__[members].items()}
    return other


def probe(mechanism: "Mechanism", shape: tuple[int, ...]) -> Tensor:
    """Zeros with the dtype and device of a mechanism's tensors, including those that functions among its fields
    capture."""
    tensors = _floating(mechanism)
    if not tensors:
        functions = [value for value in vars(mechanism).values() if callable(value)]
        captured = [tensor for function in functions for tensor in named_tensors(function).values()]
        tensors = [tensor for tensor in captured if tensor.is_floating_point()]
    return tensors[0].new_zeros(shape, dtype=_widest(tensors)) if tensors else torch.zeros(shape, device="cpu")


def weighs_tokens(mechanism: "Mechanism", qk_length: int) -> bool:
    """Whether the weights are between queries and keys, (…, T, S), and not between channels: tested on a small example.

    >>> import regard as rg
    >>> from regard.core.tensors import weighs_tokens
    >>> weighs_tokens(rg.Softmax(), 8), weighs_tokens(rg.Channel(), 8)
    (True, False)
    """
    tokens = 3 if qk_length == 2 else 2
    x = probe(mechanism, (1, 1, tokens, qk_length))
    with torch.no_grad(), made_on(x.device):
        return fitted(mechanism, x.dtype).compare(x, x).shape[-1] == tokens


def named_tensors(value: Any, name: str = "", depth: int = 3) -> dict[str, Tensor]:
    """Tensors that a function refers to: in its closure, globals and defaults, in arguments bound by functools.partial,
    in the object of a method; and those of modules and functions among them.

    >>> import torch
    >>> W = torch.randn(4, 6)
    >>> list(named_tensors(lambda x: torch.relu(x @ W)))
    ['W']
    """
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, nn.Module):
        members = [*value.named_parameters(), *value.named_buffers()]
        return {f"{name}.{inner}".lstrip("."): tensor for inner, tensor in members}
    parts: dict[str, Any] = {}
    if isinstance(value, partial):
        bound = {f"argument {place}": part for place, part in enumerate(value.args)}
        parts = {name: value.func, **bound, **value.keywords}
    elif inspect.ismethod(value):
        parts = {name: value.__func__, **_attributes(value.__self__)}
    elif inspect.isfunction(value):
        scope = inspect.getclosurevars(value)
        defaults = inspect.signature(value).parameters.values()
        parts = {**scope.globals, **scope.nonlocals, **{entry.name: entry.default for entry in defaults}}
    elif callable(value) and not inspect.isclass(value):
        parts = _attributes(value)
    if not depth:
        return {}
    return {
        inner: tensor for key, part in parts.items() for inner, tensor in named_tensors(part, key, depth - 1).items()
    }


def _attributes(thing: object) -> dict[str, Any]:
    """The attributes of an object; a module stands for itself."""
    return {type(thing).__name__: thing} if isinstance(thing, nn.Module) else dict(getattr(thing, "__dict__", {}))


class _Reads(TorchDispatchMode):
    """Records the tensors that operators read and that no operator before them made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self.made: list[Tensor] = []
        self.read: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # of a tensor made of Python's numbers
            self.read += [
                value
                for value in tree_leaves((args, kwargs))
                if isinstance(value, Tensor) and not any(value is other for other in (*self.made, *self.read))
            ]
        result = func(*args, **(kwargs or {}))
        self.made += [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        return result


def constants(mechanism: "Mechanism", qk_length: int) -> list[Tensor]:
    """Tensors without gradient that the weights are computed from and that the mechanism does not list, wherever they
    are: in a closure, a global, an object. A tensor of a single number without dimensions counts as a number.

    >>> import regard as rg, torch
    >>> from regard.core.tensors import constants
    >>> W = torch.randn(4, 6)
    >>> constants(rg.Kernel(feature_map=lambda x: torch.relu(x @ W)), 4)[0] is W
    True
    """
    if not runs_user_code(mechanism):
        return []
    x = probe(mechanism, (1, 1, 1, qk_length))
    computing = fitted(mechanism, x.dtype)
    with torch.no_grad(), made_on(x.device), _Reads() as reads:
        computing.compare(x, x)
    listed = [x, *flat(computing)]
    return [
        tensor
        for tensor in reads.read
        if tensor.ndim and not tensor.requires_grad and not any(tensor is other for other in listed)
    ]


def leaves(tensor: Tensor) -> list[Tensor]:
    """The leaves of a tensor's autograd graph."""
    nodes, visited, tensors = [tensor.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        if hasattr(node, "variable"):
            tensors.append(node.variable)
    return tensors


def made_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which new tensors are made on this device, even while a model is built on another ("meta")."""
    usual = torch.compiler.is_compiling() or torch.get_default_device() == device
    return nullcontext() if usual else device


@contextmanager
def real_place() -> Iterator[None]:
    """A context in which a mechanism makes its tensors with data, even while a model is built on the meta device, or
    without memory for its weights: what fills the model may not contain them."""
    place, before = torch.get_default_device(), _real.set(True)
    try:
        with made_on(torch.device("cpu") if place.type == "meta" else place):
            yield
    finally:
        _real.reset(before)


def in_real_place() -> bool:
    """Whether this is in the context `real_place`."""
    return _real.get()
