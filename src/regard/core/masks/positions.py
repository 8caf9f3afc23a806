"""Masks by position alone: `causal`, `Window`, `window2d`, `global_tokens`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.masks.arguments import count, whole_number
from regard.core.masks.base import Mask, Span, Terms


@dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """Keys from `before` before the query to `after` after it; None is no limit. `causal` is the band (None, 0)."""

    before: int | None
    after: int | None

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=key.device)
        if self.before is not None:
            visible = visible & (key >= query - self.before)
        if self.after is not None:
            visible = visible & (key <= query + self.after)
        return visible

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        first = 0 if self.before is None else max(0, low - self.before)
        last = keys if self.after is None else min(keys, high + self.after)
        return [(first, last)] if first < last else []

    def terms(self) -> Terms:
        return Terms(bands=(self,))

    def part(self, rows: tuple[int, ...], begin: int, keys: int) -> Mask:
        return self  # distances do not change

    def __repr__(self) -> str:
        if (self.before, self.after) == (None, 0):
            return "causal"
        return f"Band(before={self.before}, after={self.after})"


causal: Mask = Band(None, 0)
"""A query sees the keys up to its own position.

>>> import regard as rg
>>> print(rg.causal.draw(3))
■ · ·
■ ■ ·
■ ■ ■
"""


@dataclass(frozen=True, repr=False)
class Window(Band):
    """A sliding window: besides itself, a token sees `before` tokens before it and `after` tokens after it.

    It is a mask, and the value of `window` in configs. Windows with the same numbers are equal.

    >>> import regard as rg
    >>> rg.Window(before=15), rg.Window(8, 8).width, rg.Window(2) == rg.window(before=2)
    (Window(before=15), 17, True)
    >>> print(rg.Window(before=1, after=1).draw(4))
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■
    """

    before: int
    after: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", count("before", self.before))
        object.__setattr__(self, "after", count("after", self.after))

    @property
    def width(self) -> int:
        """How many tokens a token sees, including itself."""
        return self.before + 1 + self.after

    def __repr__(self) -> str:
        return f"Window(before={self.before}{f', after={self.after}' if self.after else ''})"


def window(before: int = 0, after: int = 0) -> Window:
    """A sliding window: besides itself, a token sees `before` tokens before it and `after` tokens after it.

    >>> import regard as rg
    >>> rg.window(after=2)
    Window(before=0, after=2)
    """
    return Window(before, after)


@dataclass(frozen=True, eq=False, repr=False)
class Window2d(Mask):
    """Keys at most `radius` rows and columns of a grid away from the query."""

    grid: tuple[int, int]
    radius: int

    @property
    def length(self) -> int | None:
        return self.grid[0] * self.grid[1]

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
    return Window2d((sides[0], sides[1]), count("radius", radius))


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    """The first `count` tokens see all and are seen by all."""

    count: int

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((query >= 0) & (query < self.count)) | (key < self.count)

    def spans(self, low: int, high: int, keys: int) -> list[Span]:
        if low < self.count and high > 0:
            return [(0, keys)]
        return [(0, min(self.count, keys))] if self.count and keys else []

    def __repr__(self) -> str:
        return f"global_tokens({self.count})"


def global_tokens(n: int) -> Mask:
    """The first n tokens see all and are seen by all; combine with a window by `|`.

    >>> import regard as rg
    >>> print((rg.global_tokens(1) | rg.window()).draw(3))
    ■ ■ ■
    ■ ■ ·
    ■ · ■
    """
    return GlobalTokens(count("n", n))
