"""A form: how a published architecture maps to one of our models, config and tensors.

It is defined once for both directions: loading and exporting use the same list of links.
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
"""Fields of our config that an exported model may lose."""


@dataclass(frozen=True)
class Link:
    """One of their tensors and ours: theirs is ours, concatenated along the rows, and transposed if `transposed`."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def split(self, tensor: Tensor, shapes: Shapes) -> dict[str, Tensor]:
        """Our tensors from theirs."""
        tensor = tensor.T if self.transposed else tensor
        if len(self.ours) == 1:  # any rank, also a scalar
            return {self.ours[0]: tensor}
        parts = tensor.split([shapes[name][0] for name in self.ours])
        return dict(zip(self.ours, parts, strict=True))

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Their tensor from ours."""
        parts = [tensors[name] for name in self.ours]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (tensor.T if self.transposed else tensor).contiguous()

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The shape that their tensor must have."""
        first = shapes[self.ours[0]]
        whole = first if len(self.ours) == 1 else (sum(shapes[name][0] for name in self.ours), *first[1:])
        return whole[::-1] if self.transposed else whole


def link(theirs: str, *ours: str, transposed: bool = False) -> Link:
    """A Link, with our names as separate arguments."""
    return Link(theirs, ours, transposed)


def linear(theirs: str, *ours: str, bias: bool = True, transposed: bool = False) -> list[Link]:
    """The links of a projection or a norm: its weight and, with `bias`, its bias."""
    links = [Link(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed)]
    return [*links, Link(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))] if bias else links


@dataclass(frozen=True, kw_only=True)
class Form:
    """A published architecture. `model_types` are its names in config.json."""

    model_types: tuple[str, ...]
    model: Callable[[Any], Model]
    config: type[Config]
    read_config: Callable[[dict[str, Any], Shapes], Config]
    """Our config, from theirs and from the file's tensors, which show what heads the model has."""
    write_config: Callable[[Any], dict[str, Any]]
    """Their config from ours. It may lose fields that it cannot represent; `lost` lists them."""
    links: Callable[[Any], Iterable[Link]]
    prefix: str = ""
    """The prefix of the base model's tensor names; a base model that was saved alone does not have it."""
    ignored: str = r"$^"
    """A pattern of tensor names that are not loaded."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tied weights that a file may contain twice, as .bin files do: the name of the copy, and that of the original."""
    start_fields: tuple[str, ...] = ("bos_token_id",)
    """The fields of config.json for the token that a generated sequence begins with."""
    read_more: Callable[[Path, Path, Any], dict[str, Any]] = lambda root, folder, config: {}
    """Fields of our config that come from other files: `root` has modules.json, `folder` the weights."""
    write_more: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Those files by name, written from our config."""
    more_fields: tuple[str, ...] = ()
    """The names of those fields."""

    def lost(self, config: Config, values: dict[str, Any], shapes: Shapes) -> list[str]:
        """The fields of a config that `read_config` would not restore from `values`, or its ValueError.

        `shapes` are those of our tensors. Special tokens are written separately, and dropout matters only in training.
        """
        links = [link for link in self.links(config) if set(link.ours) <= shapes.keys()]
        back = self.read_config(values, {link.theirs: link.shape(shapes) for link in links}).explicit()
        explicit = config.explicit()
        names = (entry.name for entry in fields(config) if entry.name not in (*UNWRITTEN, *self.more_fields))
        return [name for name in names if getattr(explicit, name) != getattr(back, name)]


def need(values: Mapping[str, Any], name: str, kind: type | tuple[type, ...] = int) -> Any:
    """A required field of their config, of type `kind`; integers must be at least 0 and below 2³¹."""
    value = values.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"config.json: expected {name} to be {_kind(kind)}, got {value!r:.80}")
    if isinstance(value, int) and not 0 <= value < 2**31:
        raise CheckpointError(f"config.json: expected {name} of 0 to {2**31 - 1}, got {value!r:.80}")
    return value


def _kind(kind: type | tuple[type, ...]) -> str:
    return " or ".join(part.__name__ for part in (kind if isinstance(kind, tuple) else (kind,)))


def choice(values: Mapping[str, Any], name: str, words: Mapping[str, str], default: str | None = None) -> str:
    """Our word for the word in their config."""
    value = values.get(name, default)
    if value not in words:
        raise CheckpointError(f"config.json: expected {name} to be one of {', '.join(words)}, got {value!r:.80}")
    return words[value]


def activation(values: Mapping[str, Any], name: str, default: str, *, gated: bool = False) -> str:
    """Our name of the activation in their config."""
    words = {
        theirs: ours for ours, entry in ACTIVATIONS.items() for theirs in entry.published if gated or not entry.gated
    }
    return choice(values, name, words, default)


def published(activation: str) -> str | None:
    """Their name of our activation, if there is one."""
    names = ACTIVATIONS[activation].published
    return names[0] if names else None


def unsupported(values: Mapping[str, Any], **expected: Any) -> None:
    """Raise CheckpointError for a field whose value asks for a computation that is not supported."""
    for name, value in expected.items():
        if values.get(name, value) != value:
            raise CheckpointError(
                f"config.json: expected {name} = {value!r}, since no other value is supported, got {values[name]!r:.80}"
            )


def class_names(values: Mapping[str, Any], num_classes: int) -> tuple[str, ...]:
    """The class names in their config; () if it only numbers the classes, or names only some."""
    labels = values.get("id2label")
    entries = [labels.get(str(index)) for index in range(num_classes)] if isinstance(labels, dict) else []
    names = tuple(entry for entry in entries if isinstance(entry, str))
    numbered = names == tuple(f"LABEL_{index}" for index in range(num_classes))
    return () if numbered or len(names) < num_classes else names


def written_names(names: tuple[str, ...], num_classes: int) -> dict[str, Any]:
    """The fields of their config with the class names."""
    labels = dict(enumerate(names or (f"LABEL_{index}" for index in range(num_classes))))
    return {
        "id2label": {str(index): name for index, name in labels.items()},
        "label2id": {name: index for index, name in labels.items()},
    }
