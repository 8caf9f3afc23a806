"""Numbers of every recorded head: how spread its weights are, how far it looks, and how two traces differ.

    entropy    mean over rows of  -Σ_s w_ts log w_ts, in nats;  log n for uniform weights over n keys, 0 for one key
    first      mean over rows of the weight on the first real key
    distance   mean over rows of  Σ_s w_ts |t - s|, in tokens; none in cross-attention
    change     mean over rows of  ½ Σ_s |w_ts - w'_ts|, between 0 (the same weights) and 1 (no key in common)

Rows at padding and rows that see nothing are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.display import Html, table
from regard.inference.tracing.record import Trace, TracedLayer

PART_BYTES = 2**22
"""Of weights that a table of the same size is made for at once: it stays in the processor's cache, and the next table
takes the same memory."""


@dataclass(frozen=True)
class HeadStatistics:
    """The numbers of one head, means over all rows of the batch."""

    layer: int
    head: int
    kind: str
    entropy: float | None
    """None for weights that may be negative, as those of linear attention with a state."""
    first: float
    distance: float | None


class Statistics(list[HeadStatistics]):
    """The numbers of every head, as a list. Prints the first ten heads; a notebook shows all."""

    def _table(self) -> list[dict[str, object]]:
        return [
            {
                "layer": head.layer,
                "head": head.head,
                "kind": head.kind,
                "entropy": _shown(head.entropy),
                "first": _shown(head.first),
                "distance": _shown(head.distance),
            }
            for head in self
        ]

    def __repr__(self) -> str:
        lines = [
            f"{row['layer']:>5} {row['head']:>5}  {row['kind']:<5}  "
            f"{row['entropy']:>7}  {row['first']:>5}  {row['distance']:>8}"
            for row in self._table()[:10]
        ]
        more = [f"… {len(self) - 10} more heads"] * (len(self) > 10)
        heading = "layer  head  kind   entropy  first  distance"
        return "\n".join([f"Statistics of {len(self)} heads", heading, *lines, *more])

    def _repr_html_(self) -> Html:
        right = ("layer", "head", "entropy", "first", "distance")
        return table(self._table(), title=f"Statistics of {len(self)} heads", right=right)


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


@dataclass(frozen=True)
class HeadChange:
    """How far the weights of one head differ between two traces."""

    layer: int
    head: int
    kind: str
    change: float


@dataclass(frozen=True, repr=False)
class Comparison:
    """The heads of two traces, by how far their weights differ. Prints the ten that differ most.

    >>> import regard as rg, torch
    >>> layer, x = rg.MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
    >>> with rg.trace(layer) as before:
    ...     y = layer(x)
    >>> with rg.intervene(layer, heads=[1], beta=0.0), rg.trace(layer) as after:
    ...     y = layer(x)
    >>> [head.head for head in before.compare(after).strongest if head.change > 0]
    [1]
    """

    heads: tuple[HeadChange, ...]

    @property
    def strongest(self) -> list[HeadChange]:
        """The heads, those that differ most first."""
        return sorted(self.heads, key=lambda head: head.change, reverse=True)

    def of(self, *, layer: int, head: int) -> HeadChange:
        """The change of one head."""
        for candidate in self.heads:
            if (candidate.layer, candidate.head) == (layer, head):
                return candidate
        raise ValueError(f"head: expected a recorded layer and head, got layer {layer} head {head}")

    def _rows(self) -> list[dict[str, object]]:
        return [
            {"layer": head.layer, "head": head.head, "kind": head.kind, "change": f"{head.change:.3f}"}
            for head in self.strongest[:10]
        ]

    def __repr__(self) -> str:
        lines = [f"{row['layer']:>5} {row['head']:>5}  {row['kind']:<5}  {row['change']}" for row in self._rows()]
        return "\n".join([f"Comparison of {len(self.heads)} heads", "layer  head  kind   change", *lines])

    def _repr_html_(self) -> Html:
        return table(self._rows(), title=f"Comparison of {len(self.heads)} heads, the largest changes first")


def statistics(trace: Trace) -> Statistics:
    """Entropy, weight on the first token and mean distance of every recorded head; not of attention between channels.

    >>> import torch
    >>> from regard.inference.trace import Trace, TracedLayer
    >>> from regard.inference.tracing.statistics import statistics
    >>> weights = torch.eye(4).roll(-1, dims=1)[None, None]  # each token looks at the one before it
    >>> layer = TracedLayer(
    ...     index=0, name="", kind="self", mechanism="", heads=(0,), rows=(0, 1, 2, 3), weights=weights)
    >>> [(head.entropy, head.first, head.distance) for head in statistics(Trace([layer]))]
    [(0.0, 0.25, 1.5)]
    """
    return Statistics(head for layer in trace.layers for head in layer_statistics(layer))


def layer_statistics(layer: TracedLayer) -> list[HeadStatistics]:
    """The statistics of a layer's heads."""
    if not layer.by_pairs:
        return []
    layer = layer.flat()
    weights = layer.need("weights")
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    least = weights.amin(-1)
    rows = _rows(layer, (least != 0) | (weights.amax(-1) != 0))
    signed = bool((least < 0).any())
    entropy = [None] * len(layer.heads) if signed else _mean(_entropy(weights), rows)
    first = _mean(_on_first(layer, weights), rows)
    queries = torch.tensor(layer.rows, device=weights.device)[:, None]
    steps = (queries - torch.arange(weights.shape[3], device=weights.device)).abs().to(weights.dtype)
    away = torch.einsum("bhts,ts->bht", weights, steps)  # without a table of products
    distance = _mean(away, rows) if layer.kind == "self" else [None] * len(first)
    return [
        HeadStatistics(layer.index, head, layer.kind, spread, on_first, away)
        for head, spread, on_first, away in zip(layer.heads, entropy, first, distance, strict=True)
    ]


def compare(trace: Trace, other: Trace) -> Comparison:
    """How far the weights of every head differ between two traces of the same layers, heads and sizes."""
    numbers = [layer.index for layer in trace.layers]
    if numbers != [layer.index for layer in other.layers]:
        raise ValueError(
            f"other: expected a trace of the layers {numbers}, got {[layer.index for layer in other.layers]}"
        )
    heads = []
    for recorded, compared in zip(trace.layers, other.layers, strict=True):
        layer, changed = recorded.flat(), compared.flat()
        before, after = layer.need("weights").double(), changed.need("weights").double()
        if before.shape != after.shape or layer.heads != changed.heads:
            raise ValueError(
                f"other: expected weights {tuple(before.shape)} in layer {layer.index}, got {tuple(after.shape)}"
            )
        filled = (before != 0).any(-1)
        rows = _rows(layer, filled) if layer.by_pairs else torch.ones_like(filled)
        change = _mean((before - after).abs().sum(-1) / 2, rows)
        heads += [
            HeadChange(layer.index, head, layer.kind, value) for head, value in zip(layer.heads, change, strict=True)
        ]
    return Comparison(tuple(heads))


def _rows(layer: TracedLayer, filled: Tensor) -> Tensor:
    """The rows (B, H, T) that count: of real tokens, and `filled` with weights that are not all 0."""
    if layer.kind == "self" and layer.real is not None:
        return filled & layer.real.to(filled.device)[:, None, list(layer.rows)]
    return filled


def heads_at_once(weights: Tensor) -> int:
    """How many heads of weights (B, H, T, S) make one part of `PART_BYTES`."""
    head = weights.nbytes // max(1, weights.shape[1])
    return max(1, PART_BYTES // max(1, head))


def _entropy(weights: Tensor) -> Tensor:
    """The entropy (B, H, T) of each row."""
    tiny = torch.finfo(weights.dtype).tiny  # 0 log 0 is 0
    rows = weights.flatten(0, 2)
    parts = rows.split(max(1, PART_BYTES // max(1, rows[:1].nbytes)))
    negative = [part.clamp_min(tiny).log_().mul_(part).sum(-1) for part in parts]
    return 0 - torch.cat(negative).view(weights.shape[:3])


def _on_first(layer: TracedLayer, weights: Tensor) -> Tensor:
    """The weight (B, H, T) on the first real key."""
    if layer.real is None:
        return weights[..., 0]
    first = layer.real.to(weights.device).int().argmax(-1)
    return weights.gather(-1, first[:, None, None, None].expand(*weights.shape[:3], 1))[..., 0]


def _mean(numbers: Tensor, rows: Tensor) -> Sequence[float]:
    """The mean over batch and rows, for every head."""
    return (numbers.masked_fill(~rows, 0).sum((0, 2)) / rows.sum((0, 2))).tolist()
