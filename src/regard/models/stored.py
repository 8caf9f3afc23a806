"""A mechanism as JSON, for a model's config.

A shipped mechanism is stored as its class and fields. A user's mechanism may contain anything: JSON gets the name of
the class and the fields that JSON can represent, and tensors go into the weights file. Loading imports no code: the
caller passes the class, or an instance if a field is a function or a module for which the class has no default.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn

from regard.core.families.mechanism import Mechanism
from regard.core.mechanisms import REGISTRY

SHIPPED: dict[str, type[Mechanism]] = {type(mechanism).__name__: type(mechanism) for mechanism in REGISTRY.values()}
"""The shipped mechanisms by class name; files with these load without code from the user."""

UserMechanism: TypeAlias = Mechanism | type[Mechanism]
"""What a user passes to load a checkpoint with a mechanism of theirs: an instance, or its class."""


def is_shipped(mechanism: object) -> bool:
    """Whether a file can describe the mechanism completely, so that loading needs no code from the user.

    >>> import regard as rg, torch
    >>> is_shipped(rg.Elu()), is_shipped(rg.Kernel(feature_map=torch.relu)), is_shipped(rg.Gated(gate=torch.nn.Tanh()))
    (True, False, False)
    """
    if not isinstance(mechanism, Mechanism) or SHIPPED.get(type(mechanism).__name__) is not type(mechanism):
        return False
    return not any(_apart(_encoded(getattr(mechanism, field.name))) for field in _arguments(mechanism))


def to_json(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism as a dict that can be written as JSON.

    >>> import regard as rg, torch
    >>> to_json(rg.Argmax())
    {'name': 'Softmax', 'beta': 'inf', 'softcap': None}
    >>> to_json(rg.Kernel(feature_map=torch.nn.Linear(4, 6)))
    {'name': 'Kernel', 'shipped': False, 'fields': {'feature_map': {'object': 'Linear'}}}
    """
    name, values = (
        type(mechanism).__name__,
        {field.name: getattr(mechanism, field.name) for field in _arguments(mechanism)},
    )
    if is_shipped(mechanism):
        return {"name": name, **{key: "inf" if value == math.inf else value for key, value in values.items()}}
    return {"name": name, "shipped": False, "fields": {key: _encoded(value) for key, value in values.items()}}


def from_json(values: dict[str, Any]) -> Mechanism:
    """The shipped mechanism from what `to_json` gave."""
    if is_own(values):
        _refuse_unknown(values)
    arguments = {key: math.inf if value == "inf" else value for key, value in values.items() if key != "name"}
    name = values.get("name")
    if name not in SHIPPED:
        raise ValueError(f"mechanism: expected one of {', '.join(SHIPPED)}, got {name!r}")
    try:
        return SHIPPED[name](**arguments)
    except TypeError as error:
        raise ValueError(f"mechanism: expected the fields of {name}, got {error}") from None


def is_own(values: object) -> bool:
    """Whether JSON describes a user's mechanism, not a shipped one."""
    return isinstance(values, dict) and values.get("shipped") is False


def own_from_json(
    values: dict[str, Any], mechanisms: Sequence[UserMechanism], read: Callable[[str], Tensor | None]
) -> Mechanism:
    """A user's mechanism from what `to_json` gave: the instance among `mechanisms` with the same class name and fields,
    or a new instance of the class with that name. `read` gives the tensor of a field, which a model's layers replace by
    their own.

    >>> import regard as rg
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Near(rg.Mechanism):
    ...     width: float = 2.0
    >>> own_from_json(to_json(Near(width=3.0)), [Near], read=lambda field: None)
    Near(width=3.0)
    """
    stored = values.get("fields", {})
    if not isinstance(stored, dict):
        raise ValueError(f"mechanism: expected its fields by name, got {stored!r:.80}")
    named = [candidate for candidate in mechanisms if _class(candidate).__name__ == values.get("name")]
    if not named:
        _refuse_unknown(values)
    for candidate in named:
        if isinstance(candidate, Mechanism) and all(
            _agrees(candidate, field, value) for field, value in stored.items()
        ):
            return candidate
    for candidate in named:
        if isinstance(candidate, type):
            return _made(candidate, stored, read)
    plain = ", ".join(f"{field}={_decoded(value)!r}" for field, value in stored.items() if not _apart(value))
    raise ValueError(f"mechanisms: expected {values['name']}({plain:.80}), as the file has it, got {named[0]!r:.80}")


def check_user_mechanisms(mechanisms: Sequence[UserMechanism]) -> None:
    """Raise ValueError unless `mechanisms` is a list of mechanisms or mechanism classes.

    >>> import regard as rg
    >>> check_user_mechanisms([rg.Softmax, rg.Elu()])
    """
    if isinstance(mechanisms, Mechanism | type | str):
        raise ValueError(f"mechanisms: expected a list like [Mine], got {mechanisms!r}")
    for entry in mechanisms:
        if not issubclass(_class(entry), Mechanism):
            raise ValueError(f"mechanisms: expected classes like Mine or values like Mine(…), got {entry!r}")


def _class(mechanism: UserMechanism) -> type[Mechanism]:
    return mechanism if isinstance(mechanism, type) else type(mechanism)


def _arguments(mechanism: UserMechanism) -> list[Any]:
    return [field for field in fields(mechanism) if field.init]


def _encoded(value: Any) -> Any:
    """A field's value for JSON; what JSON cannot represent becomes a dict that describes it."""
    if isinstance(value, Tensor):
        return {"tensor": list(value.shape), "parameter": isinstance(value, nn.Parameter)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, list | tuple):
        parts = [_encoded(part) for part in value]
        if not any(_apart(part) for part in parts):
            return parts
    kept = {"object": type(value).__name__}
    return kept if isinstance(value, nn.Module) else kept | {"is": described(value)}


def described(value: Any) -> str:
    """A description of an object that is the same in every process: a function's full name, or its repr.

    >>> import torch
    >>> described(torch.nn.functional.relu), described({"a": 1})
    ('torch.nn.functional.relu', "{'a': 1}")
    """
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    kind: Any = type(value)
    return str(kind.__qualname__) if kind.__repr__ is object.__repr__ else repr(value)[:200]


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["float"]) if value.get("float") in ("inf", "-inf", "nan") else None
    return tuple(_decoded(part) for part in value) if isinstance(value, list) else value


def _apart(value: Any) -> bool:
    """Whether JSON has only a description of a field, not its value."""
    return isinstance(value, dict) and "float" not in value


def _agrees(mechanism: Mechanism, field: str, value: Any) -> bool:
    mine = _encoded(getattr(mechanism, field, None))
    return bool(mine == value) or ("tensor" in value and _apart(mine) if isinstance(value, dict) else False)


def _made(kind: type[Mechanism], stored: dict[str, Any], read: Callable[[str], Tensor | None]) -> Mechanism:
    """An instance with the stored fields, and the class's defaults for those that a file does not store."""
    defaults = {field.name: _encoded(_default(field)) for field in _arguments(kind)}
    arguments: dict[str, Any] = {}
    for field, value in stored.items():
        if not _apart(value):
            arguments[field] = _decoded(value)
        elif "tensor" in value and (tensor := read(field)) is not None:
            arguments[field] = nn.Parameter(tensor) if value.get("parameter") is True else tensor
        elif "object" in value and defaults.get(field) != value:
            raise ValueError(
                f"mechanisms: expected an instance {kind.__name__}({field}=…), since a file does not store a "
                f"{value.get('object', 'tensor')!s:.40}, got the class"
            )
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"mechanisms: expected the fields of {kind.__name__}, got {error}") from None


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _refuse_unknown(values: dict[str, Any]) -> NoReturn:
    name, stored = values.get("name"), values.get("fields")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"mechanism: expected the name of a class, got {name!r:.80}")
    entries = stored.items() if isinstance(stored, dict) else ()
    objects = [field for field, value in entries if isinstance(value, dict) and "object" in value]
    call = f"{name:.60}({', '.join(f'{field}=…' for field in objects)})" if objects else f"{name:.60}"
    raise ValueError(
        f"mechanism: expected mechanisms=[{call:.90}], as a file imports no code, got none of that class; "
        f"in a command: --mechanism FILE.py:{name:.40}"
    )
