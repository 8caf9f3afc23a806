"""Gated linear attention: each key decides how much of the state before it is kept.

    w_ts  = (q_t ⊙ exp(g_{s+1} + … + g_t)) · k_s / sqrt(qk_length)   for s ≤ t,   0 for s > t        g_t = gate(k_t) ≤ 0
    out_t = q_t S_t / sqrt(qk_length),                               S_t = exp(g_t) ⊙ S_{t-1} + k_t v_t^T

A gate is one number for each token and head, or one for each feature. A key that padding hides neither adds to the sums
nor fades them: its gate is left out. The weights are not normalised, and the mechanism is causal by definition, with or
without a mask (families/fading.py).

Yang et al. 2024, "Gated linear attention transformers with hardware-efficient training".
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

from regard.core.cost import accumulator
from regard.core.families.fading import FadingMechanism
from regard.core.tensors import replaced

SOFTNESS = 16
"""The divisor of log-gates, as in the paper: an untrained gate keeps about 96 % at every token."""


class Gate(nn.Module):
    """A learned gate for each feature: g = logsigmoid(W k + b) / 16, the same for all heads, W = 1 and b = 0 at first.

    >>> import torch
    >>> from regard.core.mechanisms.gated import Gate
    >>> Gate(4)(torch.zeros(2, 3, 5, 4)).shape
    torch.Size([2, 3, 5, 4])
    """

    def __init__(self, qk_length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(qk_length))
        self.bias = nn.Parameter(torch.zeros(qk_length))

    def forward(self, k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b S K"]:
        return _soft(linear(k, self.weight, self.bias))


@dataclass(frozen=True, kw_only=True)
class Gated(FadingMechanism):
    """Linear attention with gates from the keys. `gate` gives their logarithms, at most 0: a function or a module,
    whose parameters learn, from keys (…, S, K) to (…, S, 1), one for each head, or (…, S, K), one for each feature.

    Without it the gates come straight from the keys, g = logsigmoid(k) / 16; a layer starts from there with a learned
    module, g = logsigmoid(W k + b) / 16.

    >>> import regard as rg, torch
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> scalar = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.LogSigmoid())
    >>> rg.attend(q, k, v, rg.Gated(gate=scalar)).shape
    torch.Size([1, 2, 5, 4])
    >>> [name for name, _ in rg.MultiHeadAttention(8, 2, mechanism="gated").attend.named_parameters()]
    ['gate.weight', 'gate.bias']
    """

    gate: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.gate is not None and not callable(self.gate):
            raise ValueError(
                f"gate: expected a function (…, S, K) -> (…, S, 1) or (…, S, K), got {type(self.gate).__name__}"
            )

    def for_layer(self, qk_length: int) -> "Gated":
        if self.gate is not None:
            return self
        return replaced(self, {"gate": Gate(qk_length)})

    def log_gates(
        self, k: Float[Tensor, "B G S K"], real: Bool[Tensor, "..."] | None
    ) -> Float[Tensor, "B G S 1"] | Float[Tensor, "B G S K"]:
        gates = _soft(k) if self.gate is None else self.gate(k)
        if real is None or not isinstance(gates, Tensor):  # the family refuses a result that is not a tensor
            return gates
        return gates.masked_fill(~real, 0)


def _soft(x: Tensor) -> Tensor:
    return logsigmoid(x.to(accumulator(x.dtype))) / SOFTNESS
