"""Which keys of each sequence are real: `padding`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.eager import kept, readable, symbolic
from regard.core.masks.arguments import from_numpy, whole_number
from regard.core.masks.base import Mask, Span, Terms


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Which keys of each batch row are real: one interval per row if they are contiguous, else a bool table (B, S)."""

    rows: tuple[Span, ...] | None
    table: Tensor | None = None
    label: str = "padding(…)"
    width: int | None = None
    """The number of keys in a user's table; None for lengths, which fit any number of keys."""
    ends: Tensor | None = None
    """Lengths (B,) in a trace, where Python cannot read them; instead of intervals or a table."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return self.batch, None

    @property
    def length(self) -> int | None:
        if self.width is not None or self.ends is not None:
            return self.width
        return self.table.shape[1] if self.rows is None else max((end for _, end in self.rows), default=None)  # type: ignore[union-attr]

    @property
    def batch(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        # Not len(…), which would specialise a dynamic batch size.
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

    def terms(self) -> Terms:
        return Terms(paddings=(self,))

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
        if self.rows is not None and not symbolic(keys):
            return _table(self.rows, keys, torch.device("cpu" if device is None else device))
        return self.at(self.batch, 1, torch.zeros(1, dtype=torch.long), torch.arange(keys), device)[:, 0, 0]

    def between(self, low: int, high: int, keys: int) -> "Padding | None":
        """The padding of the keys at [low, high), as positions from 0; None if all of them are real."""
        if self.ends is not None:
            return replace(self, ends=(self.ends - low).clamp(0, high - low))
        if self.rows is None:
            valid = self.valid(keys)[:, low:high]
            if not valid.is_cpu:  # another look would wait for the device
                return Padding(None, valid, label=f"padding(valid={tuple(valid.shape)})")
            return None if readable(valid) and bool(valid.all()) else padding_of(valid)
        size = high - low
        cut = tuple((min(max(a - low, 0), size), min(max(b - low, 0), size)) for a, b in self.rows)
        return None if all(span == (0, size) for span in cut) else Padding(cut)

    def part(self, rows: tuple[int, ...], begin: int, keys: int) -> "Padding | None":
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


@kept(32)
def _table(rows: tuple[Span, ...], keys: int, device: torch.device) -> Tensor:
    """Which keys of each batch row are real, (B, S): cached for all layers of a step, and never written to."""
    bounds, place = torch.tensor(rows, device=device).view(-1, 2, 1), torch.arange(keys, device=device)
    return (place >= bounds[:, 0]) & (place < bounds[:, 1])


def padding(lengths: Tensor | Sequence[int] | None = None, *, valid: Tensor | None = None) -> Mask:
    """Only real keys are visible. Pass `lengths` (B,) for right padding, or `valid`, bool (B, S), for any padding: as
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
        return _padding_to(from_numpy("lengths", lengths))
    valid = from_numpy("valid", valid)
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.ndim != 2:
        kind = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise ValueError(f"valid: expected a bool tensor of shape (B, S), got {kind}")
    # A copy, since a mask is a value and states keep it: later writes to the user's tensor must not change it.
    return replace(padding_of(valid.clone()), width=valid.shape[1])


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


def _short(items: list[int]) -> str:
    return repr(items) if len(items) <= 6 else f"[{', '.join(map(str, items[:4]))}, … {len(items)} rows]"
