"""What a page asks to be changed in a model's attention, as values, and the model with these changes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.calls.choice import Path
from regard.core.families.mechanism import Mechanism
from regard.core.mechanisms import Softmax, named
from regard.core.paths import reference
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
    mechanism: str | Mechanism | None = None
    window: int | None = None
    """A sliding window: how many keys before and after itself a query sees."""

    def applies(self, layer: int, head: int) -> bool:
        """Whether it changes this head."""
        return (self.layers is None or layer in self.layers) and (self.heads is None or head in self.heads)


@dataclass(frozen=True, kw_only=True)
class WindowedSoftmax(Softmax):
    """Softmax over the keys at most `window` places away, in self-attention.

    A mask would do the same; a change of attention has none but hidden keys, so that here the mechanism knows the band.

    >>> import regard as rg, torch
    >>> q = torch.randn(1, 2, 5, 4)
    >>> near = rg.weights(q, q, WindowedSoftmax(window=1))
    >>> torch.allclose(near, rg.weights(q, q, rg.Softmax(), rg.window(before=1, after=1)))
    True
    """

    window: int

    def band(self, queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
        """Which keys the last `queries` of `keys` tokens see."""
        places = torch.arange(keys - queries, keys, device=device)[:, None]
        return (places - torch.arange(keys, device=device)).abs() <= self.window

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        near = self.band(q.shape[2], k.shape[2], q.device)[None, None]
        return super().weigh(q, k, near if visible is None else visible & near, bias)

    def paths(self) -> tuple[Path, ...]:
        return (reference.PATH,)  # others would compute blocks of queries, whose places are lost


def with_windows(
    changes: Sequence[HeadChange], layers: Iterable[tuple[int, str, Mechanism | None]]
) -> tuple[HeadChange, ...]:
    """The changes with windows as mechanisms, one for each layer of self-attention, whose beta and softcap stay.

    `layers` are the number, kind and mechanism of each.
    """
    expanded: list[HeadChange] = []
    for change in changes:
        if change.window is None:
            expanded.append(change)
            continue
        chosen = [entry for entry in layers if change.layers is None or entry[0] in change.layers]
        windowed = [(number, mechanism) for number, kind, mechanism in chosen if kind == "self"]
        if not windowed:
            raise ValueError("window: expected layers of self-attention, got none of them")
        for number, mechanism in windowed:
            if not isinstance(mechanism, Softmax):
                raise ValueError(f"window: expected layers of softmax, got {mechanism!r} in layer {number}")
            near = WindowedSoftmax(beta=mechanism.beta, softcap=mechanism.softcap, window=change.window)
            expanded.append(replace(change, layers=(number,), mechanism=near, window=None))
    return tuple(expanded)


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
                mechanism = named(change.mechanism) if isinstance(change.mechanism, str) else change.mechanism
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
