"""Softmax attention, one continuum from the uniform average to the hard choice.

    w_ts = exp(beta q_t·k_s) / sum over visible s' of exp(beta q_t·k_s')          beta = 1 / sqrt(K) by default

`beta = 0` weighs all visible keys alike (`Uniform`). `beta = inf` is the limit: all weight on the best key, and keys
that tie share it equally (`Argmax`). `softcap` bends the scores to cap·tanh(score / cap) (Gemma 2).

Vaswani et al. 2017, "Attention is all you need".
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Path
from regard.core.cost import Cost, Work, score_cost
from regard.core.families.scores import ScoreMechanism
from regard.core.paths import band, blocks, cudnn, decode, gpu, masked, parts, reference, sdpa, split
from regard.core.states.key_values import KeyValueState
from regard.core.states.state import Sizes, State

PATHS = (
    decode.PATH, split.PATH, cudnn.PATH, band.PATH, masked.PATH, sdpa.PATH, parts.PATH, blocks.FUSED, reference.PATH,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Softmax(ScoreMechanism):
    """Softmax (softargmax) of beta·q·k over the visible keys. `beta=None` is 1/sqrt(qk_length).

    >>> import regard as rg, torch
    >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [1.0]]]])
    >>> [round(rg.weights(q, k, rg.Softmax(beta=b))[0, 0, 0, 1].item(), 3) for b in (0, 1, 10, float("inf"))]
    [0.5, 0.731, 1.0, 1.0]
    """

    beta: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.beta is not None and not (isinstance(self.beta, int | float) and self.beta >= 0):
            raise ValueError(f"beta: expected a number from 0 to inf, or None for 1/sqrt(qk_length), got {self.beta!r}")
        if self.softcap is not None and not (isinstance(self.softcap, int | float) and 0 < self.softcap < math.inf):
            raise ValueError(f"softcap: expected a finite number above 0, or None, got {self.softcap!r}")
        if self.hard and self.softcap is not None:
            raise ValueError(f"softcap: expected None with beta=inf, whose scores have no size, got {self.softcap!r}")

    @property
    def hard(self) -> bool:
        return self.beta == math.inf

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        # Argmax is discontinuous: in float64 only true ties tie, in whatever order the products are summed.
        return torch.float64 if self.hard else super().precision(dtype)

    def score(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        products = q @ k.transpose(-1, -2)
        if self.softcap is None:
            return products
        return self.softcap * torch.tanh(products * (self._beta(q.shape[-1]) / self.softcap))

    def scale(self, qk_length: int) -> float:
        return self._beta(qk_length) if self.softcap is None else 1.0

    def _beta(self, qk_length: int) -> float:
        return qk_length**-0.5 if self.beta is None else float(self.beta)

    def refuses(self, call: Call) -> str | None:
        if call.bias is not None and self.hard:
            return "bias: expected none with beta=inf, where no finite term changes the choice, got one"
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        formula = cls.score, cls.scale, cls.weigh, cls.mix
        cls.as_defined = formula == (Softmax.score, Softmax.scale, Softmax.weigh, Softmax.mix)

    as_defined: ClassVar[bool] = True
    """Whether a subclass keeps the formula above."""

    def sdpa_scale(self, qk_length: int) -> float | None:
        """The scale with which PyTorch's SDPA computes this mechanism; None if it does not."""
        if self.softcap is not None or not self.as_defined:
            return None
        scale = self._beta(qk_length)
        return scale if scale <= 1e6 else None

    def empty_state(self, sizes: Sizes, capacity: int) -> State:
        # On a GPU, forks that no kernel of ours reads in parts (paths/shared_gpu.py) would copy at every step.
        in_parts = self.sdpa_scale(sizes.qk_length) is not None and gpu.fits(sizes)
        may_share = self.as_defined and (torch.device(sizes.device).type == "cpu" or in_parts)
        return KeyValueState.empty(sizes, capacity, sizes.storage, may_share=may_share)

    def cost(self, work: Work) -> Cost:
        if type(self).score is not Softmax.score:
            return super().cost(work)
        return score_cost(work, self.precision(work.dtype))

    def paths(self) -> tuple[Path, ...]:
        return PATHS


def Argmax() -> Softmax:  # noqa: N802 - named as the mechanism it is
    """Hard attention, the end of the softmax continuum: all weight on the best key, ties share equally.

    >>> import regard as rg, torch
    >>> q = torch.tensor([[[[1.0, 1.0, 2.0]]]])
    >>> k = torch.tensor([[[[1.0, 2, 0], [0, 3, 4], [5, 0, 0], [0, 0, 1]]]])
    >>> v = torch.tensor([[[[2.0, 0, 1], [1, 4, 3], [0, -1, 4], [1, 0, -1]]]])
    >>> rg.attend(q, k, v, rg.Argmax()).flatten().tolist()
    [1.0, 4.0, 3.0]
    """
    return Softmax(beta=math.inf)


def Uniform() -> Softmax:  # noqa: N802 - named as the mechanism it is
    """The other end: the plain mean of the visible values.

    >>> import regard as rg, torch
    >>> v = torch.tensor([[[[1.0], [3.0]]]])
    >>> rg.attend(v, v, v, rg.Uniform()).flatten().tolist()
    [2.0, 2.0]
    """
    return Softmax(beta=0.0)
