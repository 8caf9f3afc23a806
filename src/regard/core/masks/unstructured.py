"""Masks that can only be evaluated: a bool tensor (`dense`) and a user's function; and what may be passed as a mask."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.masks.arguments import from_numpy
from regard.core.masks.base import Mask, MaskFunction


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A bool tensor (…, T, S). Its rows are at the last T of its S positions, like the queries."""

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

    # Indexing by rows and columns is much faster than by every element.
    def at(
        self, batch: int, heads: int, query: Tensor, key: Tensor, device: torch.device | str | None = None
    ) -> Tensor:
        table = self.table.to(device)
        rows, columns = table.shape[-2:]
        if rows > 1:
            row = query.to(device) - (columns - rows)
            table = table.index_select(2, row.clamp(0, rows - 1)) & ((row >= 0) & (row < rows))[:, None]
        return table.index_select(3, key.to(device))

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        batch, heads = self.table.shape[:2]
        return (None if batch == 1 else batch), (None if heads == 1 else heads)

    @property
    def length(self) -> int | None:
        return self.table.shape[3]

    @property
    def rows_drawn(self) -> int | None:
        rows = self.table.shape[2]
        return rows if rows > 1 else None

    def fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        b, h, t, s = self.table.shape
        if b not in (1, batch) or h not in (1, heads) or t not in (1, queries, keys) or s != keys:
            raise ValueError(
                f"mask: expected dense(…) broadcastable to (B, H, T, S) = {(batch, heads, queries, keys)}, "
                f"got {tuple(self.table.shape)}"
            )

    def __repr__(self) -> str:
        return f"dense({tuple(self.table.shape)})"


def dense(table: Tensor) -> Mask:
    """A bool tensor, (T, S) or (B, H, T, S), where a size of 1 broadcasts; True = may attend.

    >>> import regard as rg, torch
    >>> print(rg.dense(torch.tensor([[True, False], [True, True]])).draw(2))
    ■ ·
    ■ ■
    """
    table = from_numpy("mask", table)
    if not isinstance(table, Tensor) or table.dtype != torch.bool:
        kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(
            f"mask: expected a bool tensor (True = may attend), got {kind}; an additive score term belongs in `bias`"
        )
    if table.ndim not in (2, 4):
        # With three dimensions the first could be the batch or the heads, so it is refused.
        raise ValueError(f"mask: expected (T, S) or (B, H, T, S), with 1 for all alike, got shape {tuple(table.shape)}")
    return Dense(table if table.ndim == 4 else table[None, None])


_OF_MANY = ("Boolean value of Tensor", "a Tensor with")
"""The beginning of PyTorch's error for a tensor used as a bool."""


@dataclass(frozen=True, eq=False, repr=False)
class Function(Mask):
    """A user's rule with FlexAttention's signature."""

    rule: MaskFunction
    structured = False

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        try:
            visible = self.rule(batch, head, query, key)
        except TypeError as wrong:
            raise ValueError(f"mask: expected a function of (batch, head, query, key), got {self!r}: {wrong}") from None
        except RuntimeError as wrong:
            if not str(wrong).startswith(_OF_MANY):
                raise
            raise ValueError(
                "mask: expected a function of tensors of positions (combined by &, |, ~ and torch.where, not by `and`, "
                f"`or`, `not` and `if`), got {self!r}: {wrong}"
            ) from None
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            kind = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
            raise ValueError(f"mask: expected {self!r} to return a bool tensor, got {kind}")
        return visible

    def __repr__(self) -> str:
        return f"function({getattr(self.rule, '__name__', type(self.rule).__name__)})"


def as_mask(mask: "Mask | MaskFunction | Tensor | None") -> Mask | None:
    """What a user may pass as `mask`, as a Mask: a mask, a bool tensor or array, a mask_mod function, or None."""
    if mask is None or isinstance(mask, Mask):
        return mask
    mask = from_numpy("mask", mask)
    if isinstance(mask, Tensor):
        return dense(mask)
    if callable(mask):
        if (getattr(mask, "__module__", None) or "").startswith("regard.core.masks."):
            raise ValueError(f"mask: expected a mask like {mask.__name__}(…), got the function itself: call it")
        return Function(mask)
    raise ValueError(f"mask: expected a mask, a bool tensor, a function or None, got {type(mask).__name__}")
