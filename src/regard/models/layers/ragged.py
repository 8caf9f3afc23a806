"""A padded batch without its padding.

Norms, projections and position-wise networks treat each token by itself and need no padding: they get the real tokens
of all rows, one after another. Only attention sees the padded batch, with a mask that hides the padding. A batch that
is half padding then costs half.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Which tokens (B, T) of a padded batch are real.

    >>> import torch
    >>> from regard.models.layers.ragged import Ragged
    >>> ragged = Ragged(torch.tensor([[True, True, False], [True, False, False]]))
    >>> x = torch.randn(2, 3, 4)
    >>> ragged.pack(x).shape, ragged.pad(ragged.pack(x)).shape
    (torch.Size([3, 4]), torch.Size([2, 3, 4]))
    """

    valid: Tensor

    @cached_property
    def index(self) -> Tensor:
        """The index of each real token in the flattened batch, (N,)."""
        return self.valid.flatten().nonzero()[:, 0]

    def pack(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "N E"]:
        """The real tokens, one after another."""
        return x.flatten(0, 1).index_select(0, self.index)

    def pad(self, x: Float[Tensor, "N E"]) -> Float[Tensor, "B T E"]:
        """The padded batch again, exactly 0 where there is padding."""
        room = x.new_zeros(self.valid.numel(), x.shape[-1])
        return room.index_copy(0, self.index, x).unflatten(0, tuple(self.valid.shape))

    def packed_positions(self, positions: Tensor | tuple[Tensor, Tensor] | None) -> Any:
        """The positions of the real tokens, (N,), or their rotary tables, (N, K), from those of the padded batch."""
        batch, tokens = self.valid.shape
        if positions is None:
            positions = torch.arange(tokens, device=self.valid.device)
        if isinstance(positions, Tensor):
            return self.pack(positions.expand(batch, tokens)[..., None])[:, 0]
        return tuple(self.pack(table.expand(batch, 1, -1, -1)[:, 0]) for table in positions)
