"""What a mask is, and its algebra: `&`, `|` and `~` make a small expression tree."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.core.display import Html, mask_image, table
from regard.core.masks.arguments import count
from regard.core.masks.drawing import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.core.masks.paddings import Padding
    from regard.core.masks.positions import Band

Span: TypeAlias = tuple[int, int]
"""A half-open range of key positions, [low, high)."""
MaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `mask_mod(b, h, q_idx, kv_idx) -> bool`."""

SHOWN = 16
"""Tokens at which a mask is shown that is made for any number of them."""
MOST_SHOWN = 4
"""Sequences of a batch that a notebook shows."""


class Terms(NamedTuple):
    """The terms of a conjunction, by kind: bands of positions, paddings, and the rest."""

    bands: "tuple[Band, ...]" = ()
    paddings: "tuple[Padding, ...]" = ()
    rest: "tuple[Mask, ...]" = ()


class Mask:
    """A rule over positions. Build one with `causal`, `padding`, `window`, … and combine with `&`, `|`, `~`.

    >>> import regard as rg
    >>> rg.causal & rg.window(before=2)
    causal & Window(before=2)
    >>> print((rg.causal & rg.window(before=1)).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """

    __slots__ = "_at_any_length", "_at_last"  # caches of structure.py

    def __getstate__(self) -> object:
        # A copy or a pickle has no caches. A user's class may have slots too.
        state = super().__getstate__()
        if not isinstance(state, tuple):
            return state
        fields, slots = state
        return fields, {name: value for name, value in slots.items() if name not in Mask.__slots__}

    structured = True
    """False for a dense tensor or a user's function, which can only be evaluated."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """The batch size and number of heads that the mask is made for; None is any number."""
        return None, None

    @property
    def length(self) -> int | None:
        """How many keys the mask is made for; None is any number."""
        return None

    @property
    def rows_drawn(self) -> int | None:
        """How many queries a picture of the mask has; None is as many as keys."""
        return None

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
    """Makes NumPy leave `array & mask` to the mask."""

    def __bool__(self) -> bool:
        # Python would evaluate `causal and padding(…)` to its right side and silently drop the left.
        raise ValueError("mask: expected &, | or ~ to combine masks, got `and`, `or`, `not` or `if`")

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        """Key ranges that cover every key visible to the queries at positions [low, high). May cover more."""
        return [(0, keys)]

    def terms(self) -> Terms:
        """The terms of the conjunction; a mask that is no conjunction is its only term."""
        return Terms(rest=(self,))

    def part(self, rows: tuple[int, ...], begin: int, keys: int) -> "Mask | None":
        """The mask restricted to some batch rows and to the keys from `begin` on, with positions counted from there;
        None if all of those are visible."""
        return Part(self, rows, begin)

    def sequences(self, batch: int) -> tuple[tuple[int, int, int], ...] | None:
        """For packed sequences, each of which sees only itself: the batch row, first token and number of tokens of
        each; None for any other mask."""
        return None

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise ValueError if the mask does not fit attention of this shape."""

    def visible(
        self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The mask as a bool tensor, broadcastable to (B, H, T, S)."""
        return self.at(batch, heads, torch.arange(keys - queries, keys), torch.arange(keys), device)

    def at(
        self, batch: int, heads: int, query: Tensor, key: Tensor, device: torch.device | str | None = None
    ) -> Tensor:
        """The mask at chosen absolute query and key positions, broadcastable to (B, H, len(query), len(key))."""
        visible = self(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(heads, device=device)[:, None, None],
            query.to(device)[:, None],
            key.to(device),
        )
        full = (batch, heads, query.shape[0], key.shape[0])
        try:
            torch.broadcast_shapes(visible.shape, full)
        except RuntimeError:
            raise ValueError(
                f"mask: expected {self!r} to broadcast to {full}, got a tensor of shape {tuple(visible.shape)}"
            ) from None
        return visible.reshape((1,) * (4 - visible.ndim) + tuple(visible.shape)) if visible.ndim < 4 else visible

    def draw(self, queries: int, keys: int | None = None, *, batch: int = 0, head: int = 0) -> "Drawing":
        """The mask at some lengths, as text (`print`) and as a picture (`.save("mask.png")`, `.plot()`).

        `keys` defaults to `queries`; `batch` and `head` choose the slice to draw.

        >>> import regard as rg
        >>> print(rg.causal.draw(2, 4))
        ■ ■ ■ ·
        ■ ■ ■ ■
        """
        keys = count("queries", queries) if keys is None else count("keys", keys)
        sequences, heads = (size or least for size, least in zip(self.sizes, (batch + 1, head + 1), strict=True))
        for name, index, most in (("batch", batch, sequences), ("head", head, heads)):
            if not 0 <= index < most:
                raise ValueError(f"{name}: expected 0 to {most - 1} for {self!r}, got {index}")
        self.fits(sequences, heads, count("queries", queries), keys)
        visible = self.visible(sequences, heads, queries, keys).expand(sequences, heads, queries, keys)
        return Drawing(visible=visible[batch, head], title=repr(self))

    def plot(self, queries: int | None = None, keys: int | None = None, *, batch: int = 0, head: int = 0) -> "Figure":
        """A matplotlib figure of the mask: by default of the length it is made for, or of 16 tokens.

        >>> import regard as rg
        >>> rg.causal.plot(8).axes[0].get_title("left").strip()
        'causal'
        """
        length = self.length or SHOWN
        rows = queries or self.rows_drawn or length
        return self.draw(rows, keys or (None if queries else length), batch=batch, head=head).plot()

    def _repr_html_(self) -> Html | None:
        length, (sequences, _) = self.length or SHOWN, self.sizes
        try:
            shape = self.rows_drawn or length, length
            drawings = [self.draw(*shape, batch=row) for row in range(min(sequences or 1, MOST_SHOWN))]
        except (RuntimeError, IndexError, TypeError, ValueError):  # of a user's function, made for another length
            return None
        words = f"{length:,} tokens" if sequences is None else f"{length:,} tokens, {sequences:,} sequences"
        return Html(table([], title=repr(self), notes=[words]) + mask_image([drawing.visible for drawing in drawings]))


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

    @property
    def length(self) -> int | None:
        left, right = self.left.length, self.right.length
        return right if left is None else left

    @property
    def rows_drawn(self) -> int | None:
        return self.left.rows_drawn or self.right.rows_drawn

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.left.fits(batch, heads, queries, keys)
        self.right.fits(batch, heads, queries, keys)

    def _text(self, symbol: str) -> str:
        parts = (f"({part!r})" if isinstance(part, _Pair) and type(part) is not type(self) else repr(part)
                 for part in (self.left, self.right))  # fmt: skip
        return f" {symbol} ".join(parts)


class And(_Pair):
    """A mask that shows what both of two masks show."""

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left(batch, head, query, key) & self.right(batch, head, query, key)

    def at(
        self, batch: int, heads: int, query: Tensor, key: Tensor, device: torch.device | str | None = None
    ) -> Tensor:
        return self.left.at(batch, heads, query, key, device) & self.right.at(batch, heads, query, key, device)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        first, second = self.left.spans(low, high, keys), self.right.spans(low, high, keys)
        return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]

    def terms(self) -> Terms:
        return Terms(*map(operator.add, self.left.terms(), self.right.terms()))

    def part(self, rows: tuple[int, ...], begin: int, keys: int) -> Mask | None:
        left, right = self.left.part(rows, begin, keys), self.right.part(rows, begin, keys)
        return right if left is None else left if right is None else left & right

    def __repr__(self) -> str:
        return self._text("&")


class Or(_Pair):
    """A mask that shows what either of two masks shows."""

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left(batch, head, query, key) | self.right(batch, head, query, key)

    def at(
        self, batch: int, heads: int, query: Tensor, key: Tensor, device: torch.device | str | None = None
    ) -> Tensor:
        return self.left.at(batch, heads, query, key, device) | self.right.at(batch, heads, query, key, device)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        merged: list[Span] = []  # sorted and disjoint
        for start, stop in self.left.spans(low, high, keys) + self.right.spans(low, high, keys):
            # Compared one by one: Dynamo cannot sort symbolic bounds.
            before = [span for span in merged if span[1] < start]
            after = [span for span in merged if span[0] > stop]
            touched = merged[len(before) : len(merged) - len(after)]
            whole = (min(start, touched[0][0]), max(stop, touched[-1][1])) if touched else (start, stop)
            merged = [*before, whole, *after]
        return merged

    def __repr__(self) -> str:
        return self._text("|")


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """The pairs that another mask hides."""

    inner: Mask

    @property
    def structured(self) -> bool:  # type: ignore[override]
        return self.inner.structured

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return self.inner.sizes

    @property
    def length(self) -> int | None:
        return self.inner.length

    @property
    def rows_drawn(self) -> int | None:
        return self.inner.rows_drawn

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

    @property
    def length(self) -> int | None:
        return None if self.inner.length is None else self.inner.length - self.begin

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rows = torch.tensor(self.rows, device=key.device)[batch]
        return self.inner(rows, head, query + self.begin, key + self.begin)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        inner = self.inner.spans(low + self.begin, high + self.begin, keys + self.begin)
        return [(max(a, self.begin) - self.begin, b - self.begin) for a, b in inner if b > self.begin]

    def __repr__(self) -> str:
        return f"{self.inner!r} from {self.begin} on"


def _operand(other: Mask | MaskFunction) -> Mask:
    from regard.core.masks.unstructured import as_mask  # imported here, since unstructured.py imports this file

    mask = as_mask(other)
    if mask is None:
        raise ValueError("mask: expected a mask on both sides of &, | or ~, got None")
    return mask
