"""Masks: who may attend to whom.

A mask is a value: a rule `mask(batch, head, query_position, key_position) -> bool`, and **True means "may attend"**,
always. Masks compose with `&`, `|` and `~` into a small expression tree, so that a computation can ask for the tree's
structure (a band? key intervals?) instead of building a dense T×S tensor.

Positions are absolute. With S keys and T queries, query i stands at position S - T + i, so that the last query stands
at the last key: one cached step, a chunked prefill and the whole sequence all mean the same thing.
"""

import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard.eager import readable, untouched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Span: TypeAlias = tuple[int, int]
"""A half-open range of key positions, [low, high)."""


class Mask:
    """A rule over positions. Build one with `causal`, `padding`, `window`, … and combine with `&`, `|`, `~`.

    >>> import regard as rg
    >>> rg.causal & rg.window(before=2)
    causal & window(before=2, after=0)
    >>> print((rg.causal & rg.window(before=1)).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """

    structured = True
    """Whether the rule is known to us; False for a dense tensor or a user's function, which can only be evaluated."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """How many sequences and heads the mask is made for; None is any number."""
        return None, None

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        raise NotImplementedError

    def __and__(self, other: "Mask | MaskFunction") -> "Mask":
        return And(self, _operand(other))

    def __or__(self, other: "Mask | MaskFunction") -> "Mask":
        return Or(self, _operand(other))

    def __invert__(self) -> "Mask":
        return Not(self)

    __rand__ = __and__
    __ror__ = __or__
    __array_ufunc__ = None
    """NumPy leaves `array & mask` to the mask."""

    def __bool__(self) -> bool:
        # `causal and padding(…)` would be its right side alone, and lose the left one without a word.
        raise ValueError("mask: expected &, | or ~ to combine masks, got `and`, `or`, `not` or `if`")

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        """Key ranges that cover every key visible to the queries at positions [low, high). May cover more."""
        return [(0, keys)]

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise ValueError if the mask cannot belong to attention of this shape."""

    def visible(
        self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The mask as a bool tensor, broadcastable to (B, H, T, S)."""
        return self.at(batch, heads, torch.arange(keys - queries, keys), torch.arange(keys), device)

    def at(
        self, batch: int, heads: int, query: Tensor, key: Tensor, device: torch.device | str | None = None
    ) -> Tensor:
        """The mask at chosen absolute query and key positions, broadcastable to (B, H, len(query), len(key))."""
        found = self(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(heads, device=device)[:, None, None],
            query.to(device)[:, None],
            key.to(device),
        )
        full = (batch, heads, query.shape[0], key.shape[0])
        try:
            torch.broadcast_shapes(found.shape, full)
        except RuntimeError:
            raise ValueError(
                f"mask: expected {self!r} to broadcast to {full}, got a tensor of shape {tuple(found.shape)}"
            ) from None
        return found.reshape((1,) * (4 - found.ndim) + tuple(found.shape)) if found.ndim < 4 else found

    def draw(self, queries: int, keys: int | None = None, *, batch: int = 0, head: int = 0) -> "Drawing":
        """A picture of the mask, as text (`print`) and as an image (`.save("mask.png")`, `.figure()`).

        `keys` defaults to `queries`; `batch` and `head` choose the slice to draw.

        >>> import regard as rg
        >>> print(rg.causal.draw(2, 4))
        ■ ■ ■ ·
        ■ ■ ■ ■
        """
        keys = _count("queries", queries) if keys is None else _count("keys", keys)
        sequences, heads = (size or least for size, least in zip(self.sizes, (batch + 1, head + 1), strict=True))
        for name, one, most in (("batch", batch, sequences), ("head", head, heads)):
            if not 0 <= one < most:
                raise ValueError(f"{name}: expected 0 to {most - 1} for {self!r}, got {one}")
        self.fits(sequences, heads, _count("queries", queries), keys)
        found = self.visible(sequences, heads, queries, keys).expand(sequences, heads, queries, keys)
        return Drawing(visible=found[batch, head], title=repr(self))


MaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `mask_mod(b, h, q_idx, kv_idx) -> bool`."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """A mask, drawn. `str()` is the text form, `save` and `figure` the picture.

    >>> import regard as rg
    >>> str(rg.causal.draw(2))
    '■ ·\\n■ ■'
    """

    visible: Tensor
    title: str

    def __str__(self) -> str:
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in self.visible.tolist())

    def figure(self) -> "Figure":
        """A matplotlib figure: queries down, keys across, visible pairs filled."""
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure

        rows, columns = self.visible.shape
        figure = Figure(figsize=(max(2.5, min(8, 0.22 * columns + 1)), max(2.5, min(8, 0.22 * rows + 1))), dpi=120)
        axes = figure.subplots()
        axes.imshow(self.visible.numpy(), cmap=ListedColormap(["#eef1f5", "#2b5c8a"]), vmin=0, vmax=1)
        if max(rows, columns) <= 40:
            axes.set_xticks([x - 0.5 for x in range(columns)], minor=True)
            axes.set_yticks([y - 0.5 for y in range(rows)], minor=True)
            axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)
        axes.set_xlabel("key position")
        axes.set_ylabel("query")
        axes.set_title(self.title, fontsize=9)
        figure.tight_layout()
        return figure

    def save(self, path: str | Path) -> Path:
        """Write the picture (format by suffix) and give back its path."""
        from regard.files import save_figure

        return save_figure(self.figure(), path)


@dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """Keys from `before` before the query to `after` after it; None is no limit. `causal` is the band (None, 0)."""

    before: int | None
    after: int | None

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)
        if self.before is not None:
            seen = seen & (key >= query - self.before)
        if self.after is not None:
            seen = seen & (key <= query + self.after)
        return seen

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        first = 0 if self.before is None else max(0, low - self.before)
        last = keys if self.after is None else min(keys, high + self.after)
        return [(first, last)] if first < last else []

    def __repr__(self) -> str:
        if (self.before, self.after) == (None, 0):
            return "causal"
        return f"window(before={self.before}, after={self.after})"


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Which keys of each batch row are real: one interval a row where they are contiguous, else a bool table (B, S)."""

    rows: tuple[Span, ...] | None
    table: Tensor | None = None
    label: str = "padding(…)"
    width: int | None = None
    """Over how many keys a user's table spoke; None for lengths, which hold for any number of keys."""
    ends: Tensor | None = None
    """Lengths (B,) that Python cannot read, in a trace, in place of intervals or a table."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return self.batch, None

    @property
    def batch(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        # Not len(…), which would fix a batch that a trace holds open.
        return (self.table if self.ends is None else self.ends).shape[0]  # type: ignore[union-attr]

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.ends is not None:
            return key < self.ends.to(key.device)[batch]
        if self.rows is None:
            assert self.table is not None
            return self.table.to(key.device)[batch, key]
        bounds = torch.tensor(self.rows, dtype=torch.long, device=key.device).view(-1, 2)[batch]
        return (key >= bounds[..., 0]) & (key < bounds[..., 1])

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        if self.rows is None:
            return [(0, keys)]
        real = [(a, min(b, keys)) for a, b in self.rows if a < min(b, keys)]
        return [(min(a for a, _ in real), max(b for _, b in real))] if real else []

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if self.batch != batch:
            raise ValueError(f"mask: expected padding for {batch} sequences (the batch), got {self.batch}")
        if self.width not in (None, keys):
            raise ValueError(f"mask: expected padding(valid=…) over {keys} keys, got {self.width}")
        if self.rows is not None and any(b > keys for _, b in self.rows):
            raise ValueError(
                f"mask: expected padding lengths of at most {keys} keys, got {max(b for _, b in self.rows)}"
            )

    def valid(self, keys: int, device: torch.device | str | None = None) -> Tensor:
        """The table (B, S) of real keys."""
        if self.table is not None:
            return self.table.to(device)
        if self.rows is not None and untouched():
            return _table(self.rows, keys, torch.device("cpu" if device is None else device))
        return self.at(self.batch, 1, torch.zeros(1, dtype=torch.long), torch.arange(keys), device)[:, 0, 0]

    def between(self, low: int, high: int, keys: int) -> "Padding | None":
        """The padding of the keys at [low, high), as positions from 0; None if all of them are real."""
        if self.ends is not None:
            return replace(self, ends=(self.ends - low).clamp(0, high - low))
        if self.rows is None:
            valid = self.valid(keys)[:, low:high]
            return None if readable(valid) and bool(valid.all()) else padding_of(valid)
        size = high - low
        cut = tuple((min(max(a - low, 0), size), min(max(b - low, 0), size)) for a, b in self.rows)
        return None if all(span == (0, size) for span in cut) else Padding(cut)

    def part(self, rows: tuple[int, ...], begin: int, keys: int) -> "Padding | None":
        """The padding of some batch rows over the keys from `begin` on; None if all of those are real."""
        left = self.between(begin, keys, keys)
        if left is None:
            return None
        if left.ends is not None:
            return replace(left, ends=left.ends[list(rows)])
        if left.rows is None:
            assert left.table is not None
            return padding_of(left.table[list(rows)])
        spans = tuple(left.rows[row] for row in rows)
        return None if all(span == (0, keys - begin) for span in spans) else Padding(spans)

    def counts(self) -> list[int]:
        """How many keys of each sequence are real."""
        if self.rows is None:
            assert self.table is not None
            return [int(n) for n in self.table.sum(-1)]
        return [max(0, b - a) for a, b in self.rows]

    def __repr__(self) -> str:
        return self.label


@lru_cache(maxsize=32)
def _table(rows: tuple[Span, ...], keys: int, device: torch.device) -> Tensor:
    """Which keys of each batch row are real, (B, S): made once for all layers of a step. Nobody writes to it."""
    with torch.inference_mode(False):
        bounds, place = torch.tensor(rows, device=device).view(-1, 2, 1), torch.arange(keys, device=device)
        return (place >= bounds[:, 0]) & (place < bounds[:, 1])


@dataclass(frozen=True, eq=False, repr=False)
class Window2d(Mask):
    grid: tuple[int, int]
    radius: int

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        width = self.grid[1]
        rows = (query.div(width, rounding_mode="floor") - key.div(width, rounding_mode="floor")).abs()
        columns = (query % width - key % width).abs()
        return (rows <= self.radius) & (columns <= self.radius) & (query >= 0)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        width = self.grid[1]
        first = max(0, (low // width - self.radius) * width)
        last = min(keys, ((high - 1) // width + self.radius + 1) * width)
        return [(first, last)] if first < last else []

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if keys != self.grid[0] * self.grid[1]:
            raise ValueError(f"mask: expected {self.grid[0] * self.grid[1]} keys for {self!r}, got {keys}")

    def __repr__(self) -> str:
        return f"window2d(grid={self.grid}, radius={self.radius})"


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    count: int

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((query >= 0) & (query < self.count)) | (key < self.count)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        if low < self.count and high > 0:
            return [(0, keys)]
        return [(0, min(self.count, keys))] if self.count and keys else []

    def __repr__(self) -> str:
        return f"global_tokens({self.count})"


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed sequences: a query sees the keys that carry its own id."""

    ids: Tensor
    reach: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None
    """For every sequence and position, the first and one past the last position that carries the same id; None in a
    trace, which cannot read ids."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return (None if self.ids.shape[0] == 1 else self.ids.shape[0]), None

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ids = self.ids.to(key.device)
        row = torch.zeros_like(batch) if ids.shape[0] == 1 else batch
        return (ids[row, query.clamp(min=0)] == ids[row, key]) & (query >= 0)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        if self.reach is None:
            return [(0, keys)]
        low, high = max(low, 0), min(high, keys)
        if low >= high or not self.reach:
            return []
        first = min(min(row[0][low:high]) for row in self.reach)
        last = max(max(row[1][low:high]) for row in self.reach)
        return [(first, last)]

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if self.ids.shape[0] not in (1, batch) or self.ids.shape[1] != keys:
            raise ValueError(f"mask: expected segments(ids) of shape {(batch, keys)}, got {tuple(self.ids.shape)}")

    def __repr__(self) -> str:
        return f"segments({tuple(self.ids.shape)})"


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """Sequences one after another, as `segments` has them, known by their lengths alone."""

    lengths: tuple[int, ...]

    @cached_property
    def ids(self) -> Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.long))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """One past the last position of each sequence."""
        return tuple(accumulate(self.lengths))

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ids = self.ids.to(key.device)
        return (ids[query.clamp(min=0)] == ids[key]) & (query >= 0)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        low, high = max(low, 0), min(high, keys)
        if low >= high:
            return []
        first, last = bisect_right(self.ends, low), bisect_right(self.ends, high - 1)
        return [(self.ends[first] - self.lengths[first], self.ends[last])]

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if sum(self.lengths) != keys:
            raise ValueError(f"mask: expected packed sequences of {keys} tokens in all, got {sum(self.lengths)}")

    def __repr__(self) -> str:
        return f"packed({len(self.lengths)} sequences)"


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A bool tensor (…, T, S). Its rows are the last T positions of its S columns, like the queries themselves."""

    table: Tensor
    structured = False

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        table = self.table.to(key.device)
        rows, columns = table.shape[-2:]
        row = torch.zeros_like(query) if rows == 1 else query - (columns - rows)
        has_row = (row >= 0) & (row < rows)
        batch, head = (
            at if size > 1 else torch.zeros_like(at) for at, size in zip((batch, head), table.shape[:2], strict=True)
        )
        return table[batch, head, row.clamp(0, rows - 1), key] & has_row

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        batch, heads = self.table.shape[:2]
        return (None if batch == 1 else batch), (None if heads == 1 else heads)

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        b, h, t, s = self.table.shape
        if b not in (1, batch) or h not in (1, heads) or t not in (1, queries, keys) or s != keys:
            raise ValueError(
                f"mask: expected dense(…) broadcastable to (B, H, T, S) = {(batch, heads, queries, keys)}, "
                f"got {tuple(self.table.shape)}"
            )

    def __repr__(self) -> str:
        return f"dense({tuple(self.table.shape)})"


@dataclass(frozen=True, eq=False, repr=False)
class Function(Mask):
    """A user's rule with FlexAttention's signature."""

    rule: MaskFunction
    structured = False

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        try:
            found = self.rule(batch, head, query, key)
        except TypeError as wrong:
            raise ValueError(f"mask: expected a function of (batch, head, query, key), got {self!r}: {wrong}") from None
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            given = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"mask: expected {self!r} to return a bool tensor, got {given}")
        return found

    def __repr__(self) -> str:
        return f"function({getattr(self.rule, '__name__', type(self.rule).__name__)})"


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    left: Mask
    right: Mask

    @property
    def structured(self) -> bool:  # type: ignore[override]
        return self.left.structured and self.right.structured

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        left, right = self.left.sizes, self.right.sizes
        return (right[0] if left[0] is None else left[0]), (right[1] if left[1] is None else left[1])

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.left.fits(batch, heads, queries, keys)
        self.right.fits(batch, heads, queries, keys)

    def _text(self, symbol: str) -> str:
        parts = (f"({part!r})" if isinstance(part, _Pair) and type(part) is not type(self) else repr(part)
                 for part in (self.left, self.right))  # fmt: skip
        return f" {symbol} ".join(parts)


class And(_Pair):
    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left(batch, head, query, key) & self.right(batch, head, query, key)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        mine, other = self.left.spans(low, high, keys), self.right.spans(low, high, keys)
        return [(max(a, c), min(b, d)) for a, b in mine for c, d in other if max(a, c) < min(b, d)]

    def __repr__(self) -> str:
        return self._text("&")


class Or(_Pair):
    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left(batch, head, query, key) | self.right(batch, head, query, key)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        merged: list[Span] = []
        for span in sorted(self.left.spans(low, high, keys) + self.right.spans(low, high, keys)):
            if merged and span[0] <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], span[1]))
            else:
                merged.append(span)
        return merged

    def __repr__(self) -> str:
        return self._text("|")


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    inner: Mask

    @property
    def structured(self) -> bool:  # type: ignore[override]
        return self.inner.structured

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return self.inner.sizes

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ~self.inner(batch, head, query, key)

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.inner.fits(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return f"~({self.inner!r})" if isinstance(self.inner, _Pair) else f"~{self.inner!r}"


@dataclass(frozen=True, eq=False, repr=False)
class Part(Mask):
    """A mask over some batch rows and the keys from `begin` on, positions counted from there."""

    inner: Mask
    rows: tuple[int, ...]
    begin: int

    @property
    def structured(self) -> bool:  # type: ignore[override]
        return self.inner.structured

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return len(self.rows), self.inner.sizes[1]

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rows = torch.tensor(self.rows, device=key.device)[batch]
        return self.inner(rows, head, query + self.begin, key + self.begin)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        inner = self.inner.spans(low + self.begin, high + self.begin, keys + self.begin)
        return [(max(a, self.begin) - self.begin, b - self.begin) for a, b in inner if b > self.begin]

    def __repr__(self) -> str:
        return f"{self.inner!r} from {self.begin} on"


causal: Mask = Band(None, 0)
"""A query sees the keys up to its own position.

>>> import regard as rg
>>> print(rg.causal.draw(3))
■ · ·
■ ■ ·
■ ■ ■
"""


def window(before: int = 0, after: int = 0) -> Mask:
    """A query sees `before` keys before it, `after` keys after it, and itself always.

    >>> import regard as rg
    >>> print(rg.window(before=1, after=1).draw(4))
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■
    """
    return Band(_count("before", before), _count("after", after))


def window2d(grid: tuple[int, int], radius: int) -> Mask:
    """Tokens on a grid of (height, width), row by row: a query sees the tokens at most `radius` rows and columns away.

    >>> import regard as rg
    >>> print(rg.window2d(grid=(2, 2), radius=0).draw(4))
    ■ · · ·
    · ■ · ·
    · · ■ ·
    · · · ■
    """
    sides = [whole_number(side) for side in grid] if isinstance(grid, tuple | list) else []
    if len(sides) != 2 or sides[0] is None or sides[1] is None or min(sides[0], sides[1]) < 1:
        raise ValueError(f"grid: expected two positive whole numbers (height, width), got {grid!r}")
    return Window2d((sides[0], sides[1]), _count("radius", radius))


def global_tokens(n: int) -> Mask:
    """The first n tokens see all and are seen by all; combine with a window by `|`.

    >>> import regard as rg
    >>> print((rg.global_tokens(1) | rg.window()).draw(3))
    ■ ■ ■
    ■ ■ ·
    ■ · ■
    """
    return GlobalTokens(_count("n", n))


def segments(ids: Tensor | Sequence[Sequence[int]]) -> Mask:
    """Packed sequences: a query sees the keys with its own id. `ids` is (B, S), or (S,) for one row shared by all.

    >>> import regard as rg
    >>> print(rg.segments([[0, 0, 1]]).draw(3))
    ■ ■ ·
    ■ ■ ·
    · · ■
    """
    ids = _from_numpy("ids", ids)
    if not isinstance(ids, Tensor) and len({len(row) if hasattr(row, "__len__") else None for row in ids}) > 1:
        raise ValueError(f"ids: expected rows of one length, got {ids!r}")
    table = torch.as_tensor(ids)
    if table.ndim == 1:
        table = table[None]
    if table.ndim != 2 or table.dtype.is_floating_point:
        raise ValueError(f"ids: expected whole numbers of shape (B, S), got {table.dtype} {tuple(table.shape)}")
    # Positions are looked up in it, which PyTorch does not do for every kind of whole number.
    return Segments(table.long(), tuple(map(_reach, table.tolist())) if readable(table) else None)


def _reach(row: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, label in enumerate(row):
        first.setdefault(label, position)
        last[label] = position + 1
    return tuple(first[label] for label in row), tuple(last[label] for label in row)


def dense(table: Tensor) -> Mask:
    """A bool tensor, (T, S) or (B, H, T, S) with 1 for all alike, True = may attend.

    >>> import regard as rg, torch
    >>> print(rg.dense(torch.tensor([[True, False], [True, True]])).draw(2))
    ■ ·
    ■ ■
    """
    table = _from_numpy("mask", table)
    if not isinstance(table, Tensor) or table.dtype != torch.bool:
        given = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(
            f"mask: expected a bool tensor (True = may attend), got {given}; an additive score term belongs in `bias`"
        )
    if table.ndim not in (2, 4):
        # Of three dimensions the first could be the batch or the heads, and guessing is how masks go wrong.
        raise ValueError(f"mask: expected (T, S) or (B, H, T, S), with 1 for all alike, got shape {tuple(table.shape)}")
    return Dense(table if table.ndim == 4 else table[None, None])


def padding(lengths: Tensor | Sequence[int] | None = None, *, valid: Tensor | None = None) -> Mask:
    """Only real keys are seen. Give `lengths` (B,) for right padding, or `valid`, bool (B, S), for any padding: as
    tensors or NumPy arrays, or the lengths as a list.

    >>> import regard as rg, torch
    >>> print(rg.padding([1, 2]).draw(2, batch=0))
    ■ ·
    ■ ·
    >>> print(rg.padding(valid=torch.tensor([[False, True]])).draw(2))
    · ■
    · ■
    """
    if (lengths is None) == (valid is None):
        raise ValueError(
            "padding: expected either lengths or valid=…, got " + ("both" if valid is not None else "none")
        )
    if lengths is not None:
        return _padding_to(_from_numpy("lengths", lengths))
    valid = _from_numpy("valid", valid)
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.ndim != 2:
        given = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise ValueError(f"valid: expected a bool tensor of shape (B, S), got {given}")
    return replace(padding_of(valid), width=valid.shape[1])


def _padding_to(lengths: Tensor | Sequence[int]) -> Padding:
    """Right padding."""
    if isinstance(lengths, Tensor) and (lengths.ndim != 1 or lengths.dtype.is_floating_point):
        raise ValueError(f"lengths: expected whole numbers of shape (B,), got {lengths.dtype} {tuple(lengths.shape)}")
    if not isinstance(lengths, Tensor | Sequence):
        raise ValueError(f"lengths: expected whole numbers of shape (B,), got {lengths!r}")
    if isinstance(lengths, Tensor) and not readable(lengths):
        return Padding(None, label=f"padding(lengths={tuple(lengths.shape)})", ends=lengths)
    listed = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    counts = [count for count in map(whole_number, listed) if count is not None and count >= 0]
    if len(counts) < len(listed):
        raise ValueError(f"lengths: expected whole numbers of at least 0, got {listed}")
    return Padding(tuple((0, n) for n in counts), label=f"padding({_short(counts)})")


def padding_of(valid: Tensor) -> Padding:
    """The padding of a bool table (B, S), as intervals where every row is contiguous."""
    label = f"padding(valid={tuple(valid.shape)})"
    keys = valid.shape[1]
    if keys == 0:
        return Padding(((0, 0),) * len(valid), label=label)
    counts = valid.sum(-1)
    starts = torch.where(counts > 0, valid.long().argmax(-1), 0)
    ends = starts + counts
    position = torch.arange(keys, device=valid.device)
    contiguous = (position >= starts[:, None]) & (position < ends[:, None])
    if readable(contiguous) and torch.equal(contiguous, valid):
        return Padding(tuple(zip(starts.tolist(), ends.tolist(), strict=True)), label=label)
    return Padding(None, valid, label=label)


def as_mask(mask: "Mask | MaskFunction | Tensor | None") -> Mask | None:
    """What a user may pass as `mask`, as a Mask: a mask, a bool tensor or array, a mask_mod function, or None."""
    if mask is None or isinstance(mask, Mask):
        return mask
    mask = _from_numpy("mask", mask)
    if isinstance(mask, Tensor):
        return dense(mask)
    makers: tuple[object, ...] = (window, window2d, global_tokens, segments, dense, padding)
    if mask in makers:
        raise ValueError(f"mask: expected a mask like {mask.__name__}(…), got the function itself: call it")
    if callable(mask):
        return Function(mask)
    raise ValueError(f"mask: expected a mask, a bool tensor, a function or None, got {type(mask).__name__}")


def _operand(other: "Mask | MaskFunction") -> Mask:
    mask = as_mask(other)
    if mask is None:
        raise ValueError("mask: expected a mask on both sides of &, | or ~, got None")
    return mask


def whole_number(value: Any) -> int | None:
    """A Python int from one, or from NumPy's or a tensor's whole number; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _count(name: str, value: int) -> int:
    count = whole_number(value)
    if count is None or count < 0:
        raise ValueError(f"{name}: expected a whole number of at least 0, got {value!r}")
    return count


def _from_numpy(name: str, value: Any) -> Any:
    """A NumPy array as a tensor of its own, anything else as it is."""
    if isinstance(value, Tensor) or not hasattr(value, "__array__"):
        return value
    try:
        return torch.from_numpy(np.array(value, order="C"))  # PyTorch takes no negative strides
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected an array of bools or whole numbers, got {value!r}") from None


def _short(items: list[int]) -> str:
    return repr(items) if len(items) <= 6 else f"[{', '.join(map(str, items[:4]))}, … {len(items)} rows]"
