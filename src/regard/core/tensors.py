"""The tensors of a mechanism: what it lists, what its functions capture, and where and in what dtype it computes."""

import copy
import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism

M = TypeVar("M", bound="Mechanism")


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
    other = copy.copy(mechanism)
    for name, value in tensors.items():
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
    """The dtype of a mechanism's tensors, which its formula computes in; None if it has none."""
    like = _floating(mechanism)
    return None if like is None else like.dtype


def _floating(mechanism: "Mechanism") -> Tensor | None:
    return next((tensor for tensor in flat(mechanism) if tensor.is_floating_point()), None)


def probe(mechanism: "Mechanism", shape: tuple[int, ...]) -> Tensor:
    """Zeros with the dtype and device of a mechanism's tensors, including those that functions among its fields
    capture."""
    like = _floating(mechanism)
    if like is None:
        functions = [value for value in vars(mechanism).values() if callable(value)]
        captured = [tensor for function in functions for tensor in named_tensors(function).values()]
        like = next((tensor for tensor in captured if tensor.is_floating_point()), None)
    return torch.zeros(shape, device="cpu") if like is None else like.new_zeros(shape)


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
        return mechanism.compare(x, x).shape[-1] == tokens


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


def real_place() -> AbstractContextManager[object]:
    """A context in which a mechanism makes its tensors with data, even while a model is built on the meta device: the
    file that fills the model may not contain them."""
    place = torch.get_default_device()
    return made_on(torch.device("cpu") if place.type == "meta" else place)
