"""What a page asks to be changed in a model's attention, as values, and the model with these changes."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from regard.core.families.mechanism import Mechanism
from regard.core.mechanisms import named
from regard.inference.intervene import intervene
from regard.inference.interventions.ours import with_beta


@dataclass(frozen=True, kw_only=True)
class HeadChange:
    """One change of some layers and heads; None is all of them."""

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    silence: bool = False
    mean: bool = False
    hide: tuple[int, ...] = ()
    beta: float | None = None
    mechanism: str | None = None

    def applies(self, layer: int, head: int) -> bool:
        """Whether it changes this head."""
        return (self.layers is None or layer in self.layers) and (self.heads is None or head in self.heads)


@contextmanager
def changed(model: nn.Module, changes: Sequence[HeadChange]) -> Iterator[None]:
    """The model with all changes, in their order.

    >>> import regard as rg, torch
    >>> layer, x = rg.MultiHeadAttention(16, 4), torch.randn(1, 6, 16)
    >>> with changed(layer, [HeadChange(heads=(1,), silence=True)]):
    ...     silenced = layer(x)
    >>> torch.equal(silenced, layer(x))
    False
    """
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(
                intervene(
                    model,
                    layers=change.layers,
                    heads=change.heads,
                    silence=change.silence,
                    mean=change.mean,
                    hide=change.hide,
                    beta=change.beta,
                    mechanism=change.mechanism,
                )
            )
        yield


def changed_mechanism(mechanism: Mechanism, changes: Sequence[HeadChange], layer: int, head: int) -> Mechanism:
    """The mechanism of a head with the changes.

    >>> import regard as rg
    >>> changed_mechanism(rg.Softmax(), [HeadChange(layers=(2,), beta=0.0)], layer=2, head=0)
    Softmax(beta=0.0, softcap=None)
    """
    for change in changes:
        if change.applies(layer, head):
            if change.mechanism is not None:
                mechanism = named(change.mechanism)
            if change.beta is not None:
                mechanism = with_beta(mechanism, change.beta)
    return mechanism


def hidden_keys(changes: Sequence[HeadChange], layer: int, head: int, keys: int) -> set[int]:
    """The positions of keys that the changes hide from a head."""
    places = (place for change in changes if change.applies(layer, head) for place in change.hide)
    return {place % keys for place in places if -keys <= place < keys}


def beta_of(value: object) -> float:
    """A beta as JSON has it: a number, or "inf"."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f'beta: expected a number of at least 0, or "inf", got {value!r:.40}')
    return float(value)
