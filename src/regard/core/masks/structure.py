"""The structure of a mask, read from its expression tree and not from a dense table: what computations and costs need.

A structure is a band of positions (causal, sliding window), intervals of real keys (padding), and the rest. Most masks
have no rest, and a mask that hides nothing at a shape is `EVERYTHING`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import and_

import torch
from torch import Tensor

from regard.core.eager import symbolic
from regard.core.masks import Mask, Padding, Span, padding_of

FOREVER = 1 << 62
"""A length beyond the limits of any mask."""
QUERY_BLOCK = 128
"""Query rows per block, wherever a mask is evaluated block by block."""


def _together(paddings: tuple[Padding, ...]) -> tuple[Span, ...] | None:
    """The real keys of each row under all paddings; None if a row has holes."""
    row_spans = [padding.rows for padding in paddings if padding.rows is not None]
    if len(row_spans) < len(paddings):
        return None
    if len(row_spans) == 1:
        return row_spans[0]
    return tuple((max(a for a, _ in spans), min(b for _, b in spans)) for spans in zip(*row_spans, strict=True))


@dataclass(frozen=True)
class Structure:
    """A mask as a conjunction: a band of positions, real keys, and the rest."""

    before: int | None = None
    after: int | None = None
    paddings: tuple[Padding, ...] = ()
    rest: Mask | None = None
    rows: tuple[Span, ...] | None = field(init=False, repr=False, compare=False)
    """An interval of real keys per batch row; None without padding, or if a row has holes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _together(self.paddings) if self.paddings else None)

    @property
    def windowed(self) -> bool:
        return self.before is not None or self.after not in (None, 0)

    @property
    def causal(self) -> bool:
        return self.after == 0

    @property
    def positional(self) -> bool:
        """Whether queries of one sequence see different keys."""
        return self.before is not None or self.after is not None or self.rest is not None

    def valid(self, keys: int, device: torch.device | str | None = None) -> Tensor | None:
        """The table (B, S) of real keys, or None without padding."""
        if not self.paddings:
            return None
        if len(self.paddings) == 1:
            return self.paddings[0].valid(keys, device)
        return torch.stack([padding.valid(keys, device) for padding in self.paddings]).all(0)


EVERYTHING, CAUSAL = Structure(), Structure(after=0)
"""The structure of a mask that hides nothing, and of the causal mask."""


def structure_of(mask: Mask | None, queries: int, keys: int) -> Structure:
    """Take a mask apart into its band, its padding and the rest, dropping limits that exclude nothing at this shape:
    `EVERYTHING` itself if none does. With a dynamic length in a trace, all limits stay.

    A mask caches its structure at the last shape and at unlimited length: all layers of a step ask for the same.
    """
    if mask is None:
        return EVERYTHING
    if torch.compiler.is_compiling():
        return _structure_of(mask, queries, keys)
    place = "_at_any_length" if type(keys) is int and keys == FOREVER else "_at_last"
    cached = getattr(mask, place, None)
    if cached is None or cached[0] != queries or cached[1] != keys:
        cached = queries, keys, _structure_of(mask, queries, keys)
        # A structure that contains the mask would make a reference cycle, and keep its table alive.
        itself = cached[2].rest is mask or mask in cached[2].paddings
        if not itself and not symbolic(queries, keys):
            object.__setattr__(mask, place, cached)  # a single assignment, so that threads see the old or the new cache
    structure: Structure = cached[2]
    return structure


def _structure_of(mask: Mask, queries: int, keys: int) -> Structure:
    bands, paddings, others = mask.terms()
    befores = [band.before for band in bands if band.before is not None]
    afters = [band.after for band in bands if band.after is not None]
    before, after = (
        min(befores) if befores else None,
        min(afters) if afters else None,
    )  # Dynamo does not support default=
    rest = reduce(and_, others) if others else None
    is_open = symbolic(queries, keys)
    if before is not None and not is_open and before >= keys - 1:
        before = None
    if after is not None and not is_open and after >= queries - 1 and queries <= keys:
        after = None
    if paddings:
        structure = Structure(before, after, paddings, rest)
        if structure.rows is None or is_open or any(a > 0 or b < keys for a, b in structure.rows):
            return structure
    if before is None and after in (None, 0) and rest is None:
        return EVERYTHING if after is None else CAUSAL
    return Structure(before, after, (), rest)


def with_padding(mask: Mask | None, padding: Padding) -> Mask:
    """The conjunction of a mask and padding, cached so that all layers of a step share one value."""
    if mask is None:
        return padding
    tables = mask.terms().rest or padding.rows is None  # too large to cache
    if tables or torch.compiler.is_compiling():
        return mask & padding
    return _joined(mask, padding)


@lru_cache(maxsize=64)
def _joined(mask: Mask, padding: Padding) -> Mask:
    return mask & padding


def both(first: Padding | None, second: Padding | None, keys: int) -> Padding | None:
    """Keys that are real in both; None means no padding."""
    parts = tuple(padding for padding in (first, second) if padding is not None)
    if len(parts) < 2:
        return parts[0] if parts else None
    joined = Structure(paddings=parts)
    if joined.rows is not None:
        return Padding(joined.rows)
    # The table of a state is on the state's device.
    device = max((p.table.device.type for p in parts if p.table is not None), default="cpu")
    return padding_of(torch.stack([p.valid(keys, device) for p in parts]).all(0))


def padding_between(mask: Mask | None, low: int, high: int, keys: int) -> Padding | None:
    """The padding of a mask for the keys [low, high) of `keys`, with positions from 0; None if all are real."""
    padding: Padding | None = None
    for term in () if mask is None else mask.terms().paddings:
        padding = both(padding, term, keys)
    return None if padding is None else padding.between(low, high, keys)


def part_of(mask: Mask | None, rows: tuple[int, ...], begin: int, keys: int) -> Mask | None:
    """A mask over `keys` keys, restricted to some batch rows and the keys from `begin` on, with positions from
    there."""
    return None if mask is None else mask.part(rows, begin, keys)


def blocks(
    mask: Mask | None, queries: int, keys: int, size: int = QUERY_BLOCK
) -> Iterator[tuple[int, int, list[Span]]]:
    """Blocks of query rows [start, stop), each with the key spans that contain all it may see."""
    offset = keys - queries
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        spans = [(0, keys)] if mask is None else mask.spans(start + offset, stop + offset, keys)
        yield start, stop, spans


def positions(spans: list[Span]) -> Tensor:
    """The key positions of some spans, in order."""
    return torch.cat([torch.arange(a, b) for a, b in spans]) if spans else torch.zeros(0, dtype=torch.long)


def count_pairs(mask: Mask | None, batch: int, heads: int, queries: int, keys: int) -> int:
    """Visible (query, key) pairs over the batch and heads; every pair counts where the mask is not structured."""
    if mask is None or not mask.structured:
        return batch * heads * queries * keys
    structure = structure_of(mask, queries, keys)
    if structure.rest is None and (not structure.paddings or structure.rows is not None):
        rows = structure.rows or ((0, keys),)
        pairs = [_band_pairs(structure, queries, keys, low, high) for low, high in rows]
        return heads * (sum(pairs) if structure.rows else batch * pairs[0])
    total = 0
    offset = keys - queries
    for start, stop, spans in blocks(mask, queries, keys):
        visible = mask.at(batch, heads, torch.arange(start, stop) + offset, positions(spans))
        copies = math.prod((batch, heads, stop - start, sum(b - a for a, b in spans))) // max(1, visible.numel())
        total += int(visible.sum()) * copies
    return total


def _band_pairs(structure: Structure, queries: int, keys: int, low: int, high: int) -> int:
    """Pairs of queries at the last positions and keys at [low, high), within the band."""
    place = range(keys - queries, keys)
    # Keys below the upper limit minus keys below the lower: each is the sum of a clamped ramp.
    last = queries * high if structure.after is None else _ramp(place, structure.after + 1, low, high)
    first = queries * low if structure.before is None else _ramp(place, -structure.before, low, high)
    return last - first if high > low else 0


def _ramp(place: range, shift: int, low: int, high: int) -> int:
    """The sum of place + shift, clamped to [low, high], over a range of places."""
    start, stop = place.start + shift, place.stop + shift
    below, above = min(max(low - start, 0), len(place)), min(max(stop - high, 0), len(place))
    inside = range(start + below, stop - above)
    return (
        below * low + above * high + (inside[0] + inside[-1]) * len(inside) // 2
        if inside
        else below * low + above * high
    )


def count_keys(mask: Mask | None, batch: int, queries: int, keys: int) -> int:
    """Keys, over the batch, within the spans that the queries may see."""
    if mask is None or not queries:
        return batch * keys
    structure = structure_of(mask, queries, keys)
    spans = mask.spans(keys - queries, keys, keys)
    if structure.rows is None:
        return batch * sum(b - a for a, b in spans)
    return sum(max(0, min(b, d) - max(a, c)) for a, b in spans for c, d in structure.rows)


def reached(mask: Mask | None, flags: Tensor, heads: int, queries: int) -> Tensor:
    """Which queries see at least one flagged key: flags (B, G, S) -> (B, H, T)."""
    batch, groups, keys = flags.shape
    if queries == 0:
        return flags.new_zeros(batch, heads, 0)
    structure = structure_of(mask, queries, keys)
    if structure.rest is None:
        valid = structure.valid(keys, flags.device)
        counted = flags if valid is None else flags & valid[:, None]
        sums = torch.nn.functional.pad(counted.long().cumsum(-1), (1, 0))
        place = torch.arange(keys - queries, keys, device=flags.device)
        first = (place - structure.before).clamp(0, keys) if structure.before is not None else torch.zeros_like(place)
        last = (
            (place + structure.after + 1).clamp(0, keys)
            if structure.after is not None
            else torch.full_like(place, keys)
        )
        visible = sums[..., torch.maximum(first, last)] - sums[..., first] > 0
        return visible.repeat_interleave(heads // groups, dim=1)
    parts = []
    assert mask is not None
    whole: list[tuple[int, int, list[Span]]] = [(0, queries, [(0, keys)])]
    for start, stop, spans in whole if symbolic(queries, keys) else blocks(mask, queries, keys):
        place = torch.arange(start, stop) + keys - queries
        visible = mask.at(batch, heads, place, positions(spans), flags.device)
        near = torch.cat([flags[:, :, None, low:high] for low, high in spans] or [flags[:, :, None, :0]], -1)
        if visible.shape[1] == 1:  # the same for all heads
            hits = (visible & near).any(-1).repeat_interleave(heads // groups, dim=1)
        else:
            hits = (visible & near.repeat_interleave(heads // groups, dim=1)).any(-1)
        parts.append(hits.expand(batch, heads, stop - start))
    return torch.cat(parts, -1)
