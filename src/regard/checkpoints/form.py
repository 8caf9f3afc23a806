"""How a published architecture corresponds to one of our models: its config, and tensor by tensor.

A form is stated once and read both ways: loading and exporting walk the same list of links.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.errors import CheckpointError
from regard.models.base import Model
from regard.models.config import Config
from regard.models.layers.network import ACTIVATIONS

Shapes = Mapping[str, tuple[int, ...]]
UNWRITTEN = ("start_token", "end_tokens", "padding_token", "dropout", "attention_dropout")
"""Fields of a config in which a model read back may differ."""


@dataclass(frozen=True)
class Link:
    """One of their tensors and ours: theirs is ours one below the other, transposed if `transposed`."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def split(self, tensor: Tensor, shapes: Shapes) -> dict[str, Tensor]:
        """Ours from theirs."""
        tensor = tensor.T if self.transposed else tensor
        if len(self.ours) == 1:  # of any rank, a learned number too
            return {self.ours[0]: tensor}
        parts = tensor.split([shapes[name][0] for name in self.ours])
        return dict(zip(self.ours, parts, strict=True))

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Theirs from ours."""
        parts = [tensors[name] for name in self.ours]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (tensor.T if self.transposed else tensor).contiguous()

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The shape theirs must have."""
        first = shapes[self.ours[0]]
        whole = first if len(self.ours) == 1 else (sum(shapes[name][0] for name in self.ours), *first[1:])
        return whole[::-1] if self.transposed else whole


def link(theirs: str, *ours: str, transposed: bool = False) -> Link:
    """A link, briefly."""
    return Link(theirs, ours, transposed)


def linear(theirs: str, *ours: str, bias: bool = True, transposed: bool = False) -> list[Link]:
    """Weight and, if there is one, bias of a projection, or of a norm."""
    found = [Link(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed)]
    return [*found, Link(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))] if bias else found


@dataclass(frozen=True, kw_only=True)
class Form:
    """A published architecture. `model_types` is what its config.json calls it."""

    model_types: tuple[str, ...]
    model: Callable[[Any], Model]
    config: type[Config]
    read_config: Callable[[dict[str, Any], Shapes], Config]
    """Our config from theirs and from the names that are there, which say what heads the model has."""
    write_config: Callable[[Any], dict[str, Any]]
    """Their config from ours. What theirs cannot say is lost: `lost` names it."""
    links: Callable[[Any], Iterable[Link]]
    prefix: str = ""
    """What stands before the base model's names, unless it was saved alone."""
    ignored: str = r"$^"
    """A pattern of names that hold nothing to load."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tied weights that a file may hold twice, as .bin files do: the second name, and the first one's."""
    start_fields: tuple[str, ...] = ("bos_token_id",)
    """What config.json calls the token that a generated sequence begins with."""
    read_more: Callable[[Path, Path, Any], dict[str, Any]] = lambda root, folder, config: {}
    """Fields of our config that other files of a folder say: `root` has modules.json, `folder` the weights."""
    write_more: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Those files by name, from our config."""
    said_elsewhere: tuple[str, ...] = ()
    """Those fields."""

    def lost(self, config: Config, values: dict[str, Any], shapes: Shapes) -> list[str]:
        """The fields that `read_config` would not give back of a config written as `values`; its error is a ValueError.

        `shapes` are those of our tensors. Special tokens are written apart, and dropout changes training alone.
        """
        links = [link for link in self.links(config) if set(link.ours) <= shapes.keys()]
        back = self.read_config(values, {link.theirs: link.shape(shapes) for link in links}).explicit()
        explicit = config.explicit()
        names = (entry.name for entry in fields(config) if entry.name not in (*UNWRITTEN, *self.said_elsewhere))
        return [name for name in names if getattr(explicit, name) != getattr(back, name)]


def need(values: Mapping[str, Any], name: str, kind: type | tuple[type, ...] = int) -> Any:
    """A field of their config that must be there, of a kind; whole numbers are at least 0 and below 2³¹."""
    found = values.get(name)
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise CheckpointError(f"config.json: expected {name} to be {_kind(kind)}, got {found!r:.80}")
    if isinstance(found, int) and not 0 <= found < 2**31:
        raise CheckpointError(f"config.json: expected {name} of 0 to {2**31 - 1}, got {found!r:.80}")
    return found


def _kind(kind: type | tuple[type, ...]) -> str:
    return " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))


def choice(values: Mapping[str, Any], name: str, known: Mapping[str, str], default: str | None = None) -> str:
    """Our word for one of theirs."""
    found = values.get(name, default)
    if found not in known:
        raise CheckpointError(f"config.json: expected {name} to be one of {', '.join(known)}, got {found!r:.80}")
    return known[found]


def activation(values: Mapping[str, Any], name: str, default: str, *, gated: bool = False) -> str:
    """Our activation for theirs."""
    known = {
        theirs: ours for ours, entry in ACTIVATIONS.items() for theirs in entry.published if gated or not entry.gated
    }
    return choice(values, name, known, default)


def published(activation: str) -> str | None:
    """Their name of our activation, if there is one."""
    names = ACTIVATIONS[activation].published
    return names[0] if names else None


def unsupported(values: Mapping[str, Any], **expected: Any) -> None:
    """Raise for fields whose other values mean a computation we do not do."""
    for name, value in expected.items():
        if values.get(name, value) != value:
            raise CheckpointError(
                f"config.json: expected {name} = {value!r}, other values are not supported, got {values[name]!r:.80}"
            )


def class_names(values: Mapping[str, Any], num_classes: int) -> tuple[str, ...]:
    """What their config calls the classes; nothing if it only numbers them, or leaves some out."""
    labels = values.get("id2label")
    known = [labels.get(str(index)) for index in range(num_classes)] if isinstance(labels, dict) else []
    found = tuple(one for one in known if isinstance(one, str))
    numbered = found == tuple(f"LABEL_{index}" for index in range(num_classes))
    return () if numbered or len(found) < num_classes else found


def written_names(names: tuple[str, ...], num_classes: int) -> dict[str, Any]:
    """The fields of their config that say what classes are called."""
    labels = dict(enumerate(names or (f"LABEL_{index}" for index in range(num_classes))))
    return {
        "id2label": {str(index): name for index, name in labels.items()},
        "label2id": {name: index for index, name in labels.items()},
    }
