"""Retention: linear attention whose keys fade at a fixed rate, one for each key/value head.

    w_ts  = gamma_g^(t-s) · q_t·k_s / sqrt(qk_length)   for s ≤ t,   0 for s > t          gamma_g = 1 - 2^(-5-g)
    out_t = q_t S_t / sqrt(qk_length),                  S_t = gamma_g S_{t-1} + k_t v_t^T

The decay depends on the distance of positions: a key that padding hides adds nothing, and the sums fade there as at any
other position. The weights are not normalised, and the mechanism is causal by definition, with or without a mask
(families/fading.py).

Sun et al. 2023, "Retentive network: a successor to transformer for large language models".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.families.fading import FadingMechanism


@dataclass(frozen=True, kw_only=True)
class Retention(FadingMechanism):
    """Keys fade by `decay` with every token: a number for each key/value head, repeated if there are more heads.

    By default head g has 1 - 2^(-5-g), from 0.969 on: the first heads look near, the last heads far.

    >>> import regard as rg, torch
    >>> q = k = torch.ones(1, 1, 3, 1)
    >>> rg.weights(q, k, rg.Retention(decay=(0.5,)))[0, 0].tolist()
    [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
    """

    excuses: ClassVar[Mapping[str, str]] = {
        **FadingMechanism.excuses,
        "groups": "each key/value head has a decay of its own",
    }
    decay: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.decay is None:
            return
        values = (self.decay,) if isinstance(self.decay, int | float) else self.decay
        if not isinstance(values, list | tuple) or not values or not all(_is_decay(value) for value in values):
            raise ValueError(f"decay: expected numbers above 0, at most 1, one for each head, got {self.decay!r}")
        object.__setattr__(self, "decay", tuple(values))

    def log_gates(self, k: Float[Tensor, "B G S K"], real: Bool[Tensor, "..."] | None) -> Float[Tensor, "B G S 1"]:
        logarithms = [self._logarithm(head) for head in range(k.shape[1])]
        return torch.tensor(logarithms, dtype=k.dtype, device=k.device)[:, None, None].expand(*k.shape[:3], 1)

    def _logarithm(self, head: int) -> float:
        if self.decay is None:
            return math.log1p(-(2.0 ** (-5 - head)))
        return math.log(self.decay[head % len(self.decay)])


def _is_decay(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
