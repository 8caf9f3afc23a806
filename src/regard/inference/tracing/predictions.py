"""What a model predicts while it is traced: the likeliest tokens at each position, or the likeliest classes.

Of each position the 20 likeliest are kept, whatever the size of the vocabulary, so that a long sequence's logits are
not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MOST = 20
"""Predictions that are kept of each position."""
BLOCK = 2**22
"""Logits whose probabilities are computed at once."""
Spelling = Callable[[list[int]], list[str]]


class Prediction(NamedTuple):
    """A token or class that a model predicts."""

    token: str
    """Its text; the number, if the model has no tokenizer."""
    probability: float
    id: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """The likeliest tokens at every recorded position, the likeliest first; of a classifier, the likeliest classes."""

    positions: tuple[int, ...]
    """Of the tokens that were read: the prediction at position t is of the token after it in decoders, and of the
    token there in models of masked words."""
    ids: Int[Tensor, "B T N"]
    probabilities: Float[Tensor, "B T N"]
    names: dict[int, str] = field(default_factory=dict)
    real: Bool[Tensor, "B T"] | None = None
    """Which positions are not padding; None if all."""

    def __repr__(self) -> str:
        batch, rows, most = self.ids.shape
        return f"Predictions(batch={batch}, positions={rows}, the {most} likeliest tokens)"

    def top(self, k: int = 5, *, position: int | None = None, sequence: int = 0) -> tuple[Prediction, ...]:
        """The k likeliest at a position, by default at the last one that is not padding.

        >>> import torch
        >>> ids, shares = torch.tensor([[[7, 3]]]), torch.tensor([[[0.75, 0.125]]])
        >>> Predictions(positions=(4,), ids=ids, probabilities=shares, names={7: "a", 3: "b"}).top(1)
        (Prediction(token='a', probability=0.75, id=7),)
        """
        batch = len(self.ids)
        if type(k) is not int or not 1 <= k <= MOST:
            raise ValueError(f"k: expected 1 to {MOST}, got {k!r}")
        if type(sequence) is not int or not 0 <= sequence < batch:
            raise ValueError(f"sequence: expected 0 to {batch - 1}, got {sequence!r}")
        row = self._row(position, sequence)
        ids, shares = self.ids[sequence, row, :k].tolist(), self.probabilities[sequence, row, :k].tolist()
        return tuple(
            Prediction(self.names.get(number, str(number)), share, number)
            for number, share in zip(ids, shares, strict=True)
        )

    def _row(self, position: int | None, sequence: int) -> int:
        if position is None:
            real = [] if self.real is None else self.real[sequence].nonzero().flatten().tolist()
            return real[-1] if real else len(self.positions) - 1
        if type(position) is int and -len(self.positions) <= position < 0:
            return len(self.positions) + position
        if type(position) is not int or position not in self.positions:
            shown = _shown(self.positions)
            raise ValueError(f"position: expected a recorded position, {shown}, got {position!r}")
        return self.positions.index(position)


def likeliest(logits: Float[Tensor, "B T D"]) -> tuple[Int[Tensor, "B T N"], Float[Tensor, "B T N"]]:
    """The ids of the largest logits and their probabilities.

    >>> import torch
    >>> ids, shares = likeliest(torch.tensor([[[0.0, 2.0, 1.0]]]))
    >>> ids.tolist(), [round(share, 2) for share in shares[0, 0].tolist()]
    ([[[1, 2, 0]]], [0.67, 0.24, 0.09])
    """
    rows, most = logits.flatten(0, -2), min(MOST, logits.shape[-1])
    ids = torch.empty(len(rows), most, dtype=torch.long, device=rows.device)
    shares = torch.empty(len(rows), most, device=rows.device)
    step = max(1, BLOCK // max(1, logits.shape[-1]))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].float()
        largest = part.topk(most)
        ids[start : start + step] = largest.indices
        shares[start : start + step] = (largest.values - part.logsumexp(-1, keepdim=True)).exp()
    return ids.unflatten(0, logits.shape[:-1]), shares.unflatten(0, logits.shape[:-1])


@dataclass(frozen=True, eq=False)
class PredictedRows:
    """The predictions of one pass."""

    positions: tuple[int, ...]
    ids: Int[Tensor, "B T N"]
    probabilities: Float[Tensor, "B T N"]
    real: Bool[Tensor, "B T"] | None
    spell: Spelling


def joined(parts: Sequence[PredictedRows]) -> Predictions | None:
    """The predictions of consecutive passes as one value."""
    parts = [part for part in parts if part.positions]
    if not parts:
        return None
    ids = torch.cat([part.ids for part in parts], 1)
    real = None
    if any(part.real is not None for part in parts):
        whole = [torch.ones(part.ids.shape[:2], dtype=torch.bool, device=ids.device) for part in parts]
        real = torch.cat(
            [table if part.real is None else part.real for part, table in zip(parts, whole, strict=True)], 1
        )
    numbers = ids.unique().tolist()
    return Predictions(
        positions=tuple(position for part in parts for position in part.positions),
        ids=ids,
        probabilities=torch.cat([part.probabilities for part in parts], 1),
        names=dict(zip(numbers, parts[-1].spell(numbers), strict=True)),
        real=real,
    )


def _shown(positions: Sequence[int]) -> str:
    if list(positions) == list(range(positions[0], positions[-1] + 1)):
        return f"{positions[0]} to {positions[-1]}"
    return f"one of {list(positions)}"
