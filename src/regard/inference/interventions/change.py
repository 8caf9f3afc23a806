"""A change of attention, and what several changes make of one run.

    out_h  =  W_h V        W from the mechanism, the mask and the scale;  V the values

A change replaces something of this for some layers and heads: the mechanism, its scale beta, keys that are hidden, W,
V, or out_h. Changes of the same head add up in the order they began; where two replace the same thing, the later wins.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.families.mechanism import Mechanism

if TYPE_CHECKING:
    from regard.inference.tracing.record import Trace, TracedLayer


@dataclass(frozen=True, eq=False, kw_only=True)
class Change:
    """What `intervene` was asked for; None and False leave things as they are."""

    layers: frozenset[int] | None = None
    """Numbers of layers, None for all."""
    heads: tuple[int, ...] | None = None
    silence: bool | Bool[Tensor, "B H"] = False
    """All chosen heads, or which head of which sequence."""
    mean: "bool | Trace" = False
    """Over the tokens of the pass, or of a trace."""
    hide: tuple[int, ...] = ()
    """Positions of keys in their sequence, negative ones from the end of the pass."""
    beta: float | None = None
    mechanism: Mechanism | None = None
    weights: "Trace | None" = None
    values: "Trace | None" = None

    def applies(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def chosen_heads(self, count: int) -> set[int]:
        """The chosen heads of `count`, from 0."""
        if self.heads is None:
            return set(range(count))
        if wrong := [head for head in self.heads if not -count <= head < count]:
            raise ValueError(f"heads: expected whole numbers from {-count} to {count - 1}, got {wrong[0]}")
        return {head % count for head in self.heads}


@dataclass(frozen=True, eq=False, kw_only=True)
class Changed:
    """All changes of some heads of one run, added up."""

    heads: tuple[int, ...]
    hidden: frozenset[int] = frozenset()
    """Keys of the run, from 0."""
    beta: float | None = None
    mechanism: Mechanism | None = None
    weights: Float[Tensor, "B h T S"] | None = None
    values: Float[Tensor, "B G S V"] | None = None
    mean: bool | Float[Tensor, "1 h 1 V"] = False
    silence: bool | Bool[Tensor, "B h"] = False

    @property
    def weighs(self) -> bool:
        """Whether the weights differ from the model's."""
        return self.weights is not None or self.mechanism is not None or self.beta is not None or bool(self.hidden)

    @property
    def recomputes(self) -> bool:
        """Whether attention has to be computed again."""
        return self.weighs or self.values is not None


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """The sizes of one run of attention, and where its keys are in their sequence."""

    batch: int
    heads: int
    queries: int
    keys: int
    first: int = 0
    """The position of the first key: a sliding window drops the keys before it."""
    unused: int = 0
    """Room at the end of the keys that no token has taken yet, as static caches have it."""

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + self.keys - self.unused

    def columns(self, positions: Iterable[int]) -> list[int]:
        """The keys at positions of the sequence, negative ones from its end; keys that are not there have none.

        >>> from regard.inference.interventions.change import CallShape
        >>> CallShape(batch=1, heads=1, queries=1, keys=4, first=10).columns([-1, 11, 3, 20])
        [3, 1]
        """
        places = (place + self.end if place < 0 else place for place in positions)
        return [place - self.first for place in places if self.first <= place < self.end]


def added(changes: Iterable[tuple[int, Change]], shape: CallShape) -> list[Changed]:
    """The changes of a run, by heads that have the same ones; each change comes with the number of its layer.

    >>> from regard.inference.interventions.change import CallShape, Change, added
    >>> changes = [(0, Change(heads=(0, 1), beta=2.0)), (0, Change(heads=(1,), hide=(-1,)))]
    >>> shape = CallShape(batch=1, heads=4, queries=3, keys=3)
    >>> [(part.heads, part.beta, sorted(part.hidden)) for part in added(changes, shape)]
    [((0,), 2.0, []), ((1,), 2.0, [2])]
    """
    by_head: dict[int, list[tuple[int, Change]]] = {}
    for layer, change in changes:
        for head in change.chosen_heads(shape.heads):
            by_head.setdefault(head, []).append((layer, change))
    groups: dict[tuple[int, ...], list[int]] = {}
    for head in sorted(by_head):
        groups.setdefault(tuple(id(change) for _, change in by_head[head]), []).append(head)
    return [_together(tuple(heads), by_head[heads[0]], shape) for heads in groups.values()]


def _together(heads: tuple[int, ...], changes: list[tuple[int, Change]], shape: CallShape) -> Changed:
    total = Changed(heads=heads)
    for layer, change in changes:
        if change.mechanism is not None:
            total = replace(total, mechanism=change.mechanism, beta=None, weights=None)
        if change.beta is not None:
            total = replace(total, beta=change.beta, weights=None)
        if change.hide:
            total = replace(total, hidden=total.hidden | set(shape.columns(change.hide)))
        if change.weights is not None:
            total = replace(total, weights=_patched_weights(change.weights.layers[layer].flat(), heads, shape))
        if change.values is not None:
            total = replace(total, values=_patched_values(change.values.layers[layer].flat(), shape))
        if isinstance(change.mean, bool):
            total = replace(total, mean=total.mean if change.mean is False else True)
        else:
            total = replace(total, mean=_recorded_mean(change.mean.layers[layer].flat(), heads))
        if isinstance(change.silence, Tensor):
            total = replace(total, silence=change.silence[:, list(heads)])
        elif change.silence:
            total = replace(total, silence=True)
    return total


def _patched_weights(layer: "TracedLayer", heads: tuple[int, ...], shape: CallShape) -> Tensor:
    weights = layer.need("weights")
    missing = [head for head in heads if head not in layer.heads]
    if missing:
        raise ValueError(f"weights: expected a trace of heads {list(heads)}, got one of {list(layer.heads)}")
    chosen = weights[:, [layer.heads.index(head) for head in heads]]
    expected = (shape.batch, len(heads), shape.queries, shape.keys)
    return _fitting("weights", chosen, expected, layer.index)


def _patched_values(layer: "TracedLayer", shape: CallShape) -> Tensor:
    values = layer.need("values")
    if layer.heads != tuple(range(shape.heads)):
        raise ValueError(f"values: expected a trace of all {shape.heads} heads, got one of {list(layer.heads)}")
    return _fitting("values", values, (shape.batch, values.shape[1], shape.keys, values.shape[3]), layer.index)


def _recorded_mean(layer: "TracedLayer", heads: tuple[int, ...]) -> Float[Tensor, "1 h 1 V"]:
    """The mean output of heads over the real tokens of a trace."""
    weights, values = layer.need("weights"), layer.need("values")
    if missing := [head for head in heads if head not in layer.heads]:
        raise ValueError(f"mean: expected a trace of heads {list(heads)}, got one without {missing[0]}")
    out = weights @ values.repeat_interleave(weights.shape[1] // values.shape[1], 1)
    real = None
    if layer.kind == "self" and layer.real is not None:
        real = layer.real[:, list(layer.rows)]
    return _mean(out[:, [layer.heads.index(head) for head in heads]], real)


def _fitting(name: str, tensor: Tensor, expected: tuple[int, ...], layer: int) -> Tensor:
    if tensor.shape[0] == 1:
        tensor = tensor.expand(expected[0], *tensor.shape[1:])
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name}: expected {expected} in layer {layer}, as this pass has, got {tuple(tensor.shape)}")
    return tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadOutputs:
    """What the heads of one run gave, as a model's adapter reports it."""

    out: Float[Tensor, "B H T V"]
    real: Bool[Tensor, "B T"] | None
    """Which queries are no padding; None if all."""
    step: bool
    """Whether these are new tokens after others, whose outputs are gone."""
    compute: Callable[[Changed], Float[Tensor, "B H T V"]]
    """The output of all heads with the changes that need attention again."""


def changed_output(outputs: HeadOutputs, parts: list[Changed]) -> Float[Tensor, "B H T V"]:
    """The output with every changed head in its place; the others are bitwise what they were."""
    out = outputs.out
    for part in parts:
        heads = list(part.heads)
        new = outputs.compute(part)[:, heads] if part.recomputes else outputs.out[:, heads]
        if isinstance(part.mean, Tensor):
            new = part.mean.to(new).expand_as(new)
        elif part.mean:
            if outputs.step:
                raise ValueError("mean: expected whole passes, or mean=trace for token-by-token ones, got a step")
            new = _mean(new, outputs.real).expand_as(new)
        if isinstance(part.silence, Tensor):
            # A picture's windows stand on the batch axis, those of an image together.
            rows = part.silence.to(new.device).repeat_interleave(len(new) // len(part.silence), 0)
            new = new.masked_fill(rows[:, :, None, None], 0)
        elif part.silence:
            new = torch.zeros_like(new)
        out = out.index_copy(1, torch.tensor(heads, device=out.device), new.to(out.dtype))
    return out


def always_causal(mechanism: Mechanism) -> ValueError:
    """The error for a mechanism that only decoders can have."""
    return ValueError(
        f"mechanism: expected one for tokens that see each other both ways, got {mechanism!r}, which is always causal"
    )


def _mean(out: Tensor, real: Tensor | None) -> Tensor:
    """Over all tokens of all sequences, padding apart: (1, h, 1, V)."""
    if real is None:
        return out.mean((0, 2), keepdim=True)
    kept = real[:, None, :, None]
    return out.where(kept, 0).sum((0, 2), keepdim=True) / kept.sum()


ACTIVE: dict[nn.Module, list["Place"]] = {}
"""The attention modules whose runs are changed now, and the contexts that change them, in the order they began."""


class Place:
    """One context: its changes, and the number of the run that each module is in."""

    def __init__(self, changes: Iterable[Change]) -> None:
        self.changes, self.numbers, self.seen = tuple(changes), dict[nn.Module, int](), set[int]()
        self.keys = 0
        """The number of keys of the longest sequence in a changed run."""

    def enter(self, module: nn.Module, number: int) -> None:
        """A module begins a run of this number."""
        self.numbers[module] = number
        self.seen.add(number)

    def check(self) -> None:
        """Raise ValueError for layers that never ran."""
        chosen = {layer for change in self.changes for layer in change.layers or ()}
        if self.seen and (missing := sorted(chosen - self.seen)):
            raise ValueError(f"layers: expected some of those that ran, 0 to {max(self.seen)}, got {missing}")
        places = [place for change in self.changes for place in change.hide]
        if self.keys and (absent := [place for place in places if not -self.keys <= place < self.keys]):
            raise ValueError(f"hide: expected positions of the {self.keys} keys, got {absent[0]}")


def changes_of(module: nn.Module, shape: CallShape) -> list[Changed]:
    """What is changed of the run that a module is in."""
    for place in ACTIVE.get(module, ()):
        if any(change.applies(place.numbers.get(module, -1)) for change in place.changes):
            place.keys = max(place.keys, shape.end)
    current = [
        (place.numbers[module], change)
        for place in ACTIVE.get(module, ())
        if module in place.numbers
        for change in place.changes
    ]
    return added([(layer, change) for layer, change in current if change.applies(layer)], shape)


def call_shape(q: Float[Tensor, "B H T K"], k: Float[Tensor, "B G S K"], first: int = 0, unused: int = 0) -> CallShape:
    """The shape of a run by its queries and keys."""
    batch, heads, queries, _ = q.shape
    return CallShape(batch=batch, heads=heads, queries=queries, keys=k.shape[2], first=first, unused=unused)
