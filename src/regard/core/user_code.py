"""A user's code: what is required of a user's class, and a check that its formulas do not write to their inputs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from regard.core.eager import transformed, untouched

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism


def check_class(kind: "type[Mechanism]") -> None:
    """Raise TypeError for a user's class with a field that would hide a method of mechanisms, or with an `__init__`,
    which sets values that are not fields."""
    if "__init__" in vars(kind):
        raise TypeError(
            f"{kind.__name__}: expected fields, as of a dataclass, got an __init__: what it sets would not be "
            "compared, shown or saved"
        )
    bases = [parent for parent in kind.__mro__[1:] if parent.__module__.startswith("regard.")]
    for name, annotation in vars(kind).get("__annotations__", {}).items():
        if "ClassVar" in str(annotation):
            continue
        owner = next((parent for parent in bases if name in vars(parent)), None)
        if owner is not None and name not in {entry.name for entry in fields(owner)}:
            raise TypeError(
                f"{kind.__name__}: expected a field of another name than {name!r}, which every {owner.__name__} has "
                "for itself"
            )


def undefined(mechanism: "Mechanism", signature: str) -> ValueError:
    """The error for a mechanism that does not define a formula which its family needs.

    >>> import regard as rg
    >>> from regard.core.user_code import undefined
    >>> undefined(rg.Mechanism(), "similarity(q, k)")
    ValueError('similarity: expected similarity(q, k) to be defined by Mechanism, got none')
    """
    name = signature.partition("(")[0]
    return ValueError(f"{name}: expected {signature} to be defined by {type(mechanism).__name__}, got none")


def runs_user_code(mechanism: "Mechanism") -> bool:
    """Whether a mechanism runs a user's code: its class, or a module or function among its fields."""
    if not mechanism.shipped:
        return True
    names = mechanism.__dataclass_fields__  # `vars` would be shorter, but torch.compile of PyTorch 2.11 cannot trace it
    return any(callable(getattr(mechanism, name)) for name in names)


def is_user_code(function: Callable[..., Any]) -> bool:
    """Whether a function or method comes from outside of this package."""
    return not (function.__module__ or "").startswith("regard.")


_safe: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each mechanism, the formulas and shapes that were observed not to write to their inputs."""
MOST_SHAPES = 256
"""How many of them are remembered: each step of a stream has a new shape."""
COPIED = 1 << 20
"""Inputs of up to this many numbers are copied. Above, watching the operators takes less time, at any size."""


def read_only(mechanism: "Mechanism", name: str, formula: Callable[..., Any], *tensors: Tensor) -> Any:
    """`formula(*tensors)`; ValueError if a user's formula writes to its inputs, which belong to the caller or to a KV
    cache. For new shapes the formula gets copies, or its operators are watched, so that nothing is lost; later it gets
    the tensors themselves, and their version counters show a write that depends on numbers, after the fact. Tensors
    made in inference mode have no version counter, but copies made outside of it do. A write to `x.data` is not
    noticed where nothing is watched. Under transforms and torch.compile nothing can be watched: the formula gets
    copies, which inductor leaves out."""
    if not runs_user_code(mechanism):
        return formula(*tensors)
    if torch.compiler.is_compiling() or transformed():
        return formula(*[tensor.clone() for tensor in tensors])
    plain = untouched()  # nothing to copy or watch under a dispatch mode, which may count operators or memory
    watch: AbstractContextManager[object] = nullcontext()
    if plain:
        safe: set[Any] = _safe.setdefault(mechanism, set())
        key = name, *(tensor.shape for tensor in tensors)
        if key not in safe:
            if sum(tensor.numel() for tensor in tensors) <= COPIED:
                tensors = tuple(_counting_copy(tensor) for tensor in tensors)
            else:
                watch = _Watch(tensors)
    versions = _versions(tensors)
    try:
        with watch:
            result = formula(*tensors)
        written = _versions(tensors) != versions
    except _Written:
        written = True
    if written:
        raise ValueError(
            f"{name}: expected a formula that does not change its inputs, got {mechanism!r}, which "
            "writes to them in place (x.mul_(2) or x[…] = 2 instead of x * 2)"
        )
    if plain:
        if len(safe) >= MOST_SHAPES:
            safe.clear()
        safe.add(key)
    return result


class _Written(Exception):  # noqa: N818 - not an error yet
    """An operator is about to write to an input."""


class _Watch(TorchDispatchMode):
    """Raises before an operator writes to the memory of some tensors."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storages by identity: on the meta device all addresses are 0.
        self.memory = {tensor.untyped_storage()._cdata for tensor in tensors}

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would import all of it first: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for number, argument in enumerate(schema.arguments):
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                if argument.is_write and any(self._watches(x) for x in tree_leaves(value)):
                    raise _Written
        return func(*args, **kwargs)

    def _watches(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.memory


def _counting_copy(tensor: Tensor) -> Tensor:
    """A copy with a version counter, in inference mode too."""
    if not torch.is_inference_mode_enabled():
        return tensor.clone()
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def weigh(mechanism: "Mechanism", q: Tensor, k: Tensor, visible: Tensor | None, bias: Tensor | None) -> Tensor:
    """The mechanism's exact weights; a user's `weigh` is checked for writes."""
    if not is_user_code(mechanism.weigh):
        return mechanism.weigh(q, k, visible, bias)
    return read_only(mechanism, "weigh", lambda q, k: mechanism.weigh(q, k, visible, bias), q, k)
