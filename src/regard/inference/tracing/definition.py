"""How a layer makes weights, as a value: for programs that compute a weight again or show its parts."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from regard.core.families.mechanism import Mechanism
from regard.core.families.scores import ScoreMechanism

Option = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A layer's mechanism in numbers. For softmax the weights are

        softmax(cap(scale · q·k) + bias)        cap(x) = softcap · tanh(x / softcap), or x without a softcap

    >>> import regard as rg, torch
    >>> layer = rg.MultiHeadAttention(16, 4, mechanism=rg.Quadratic())
    >>> with rg.trace(layer) as trace:
    ...     y = layer(torch.randn(1, 3, 16))
    >>> trace.layers[0].definition
    Definition(name='Quadratic', scale=None, softcap=None, bias=False, options={'c': 1.0})
    """

    name: str
    """The mechanism's class; "Softmax" for Hugging Face models."""
    scale: float | None = None
    """The factor on q·k; None for a mechanism without scores."""
    softcap: float | None = None
    bias: bool = False
    """Whether something is added to the scores, such as T5's or ALiBi's bias by distance."""
    options: dict[str, Option] = field(default_factory=dict)
    """The mechanism's other fields: numbers and texts as they are, of tensors and functions the kind."""

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON, which has no infinity.

        >>> Definition(name="Softmax", scale=float("inf")).to_json()["scale"]
        'inf'
        """
        return {
            "name": self.name,
            "scale": _written(self.scale),
            "softcap": self.softcap,
            "bias": self.bias,
            "options": {name: _written(value) for name, value in self.options.items()},
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Definition":
        """The definition in a dict that `to_json` made; ValueError for another dict.

        >>> Definition.from_json(Definition(name="Elu", options={"n": 3}).to_json())
        Definition(name='Elu', scale=None, softcap=None, bias=False, options={'n': 3})
        """
        scale = math.inf if entry["scale"] == "inf" else entry["scale"]
        made = cls(
            name=entry["name"],
            scale=scale,
            softcap=entry["softcap"],
            bias=entry["bias"],
            options=dict(entry["options"]),
        )
        numbers = all(value is None or type(value) in (int, float) for value in (made.scale, made.softcap))
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in made.options.values())
        if type(made.name) is not str or type(made.bias) is not bool or not numbers or not plain:
            raise ValueError(f"definition: expected a mechanism's name and numbers, got {entry!r:.80}")
        return made


def definition_of(mechanism: Mechanism, qk_length: int, *, bias: bool = False) -> Definition:
    """The definition of a mechanism in a layer whose queries have some length.

    >>> import regard as rg
    >>> definition_of(rg.Softmax(softcap=30.0), 16)
    Definition(name='Softmax', scale=0.25, softcap=30.0, bias=False, options={})
    """
    options = {entry.name: getattr(mechanism, entry.name) for entry in fields(mechanism)}
    scale: float | None = None
    if isinstance(mechanism, ScoreMechanism):
        scale = mechanism.scale(qk_length)
        if "beta" in options:  # with a softcap, `scale` is what comes after it
            beta = options.pop("beta")
            scale = qk_length**-0.5 if beta is None else float(beta)
    softcap = options.pop("softcap", None)
    plain = {name: _plain(value) for name, value in options.items()}
    return Definition(name=type(mechanism).__name__, scale=scale, softcap=softcap, bias=bias, options=plain)


def _plain(value: Any) -> Option:
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def _written(value: Option) -> Option:
    return "inf" if value == math.inf else value
