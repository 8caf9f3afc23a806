"""From logits to the next token: the most likely one, or a sample from a truncated distribution.

    repetition penalty → temperature → top-k → top-p → min-p → draw

A sample is argmax(logits + Gumbel noise), with noise from the sequence's generator: it depends on the seed and the
logits of the sequence, never on the other sequences in the batch.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

LIKELIEST = 2048
"""`top_p` looks at this many of the most likely tokens first: sorting a whole vocabulary takes 25 times as long."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; top_k, top_p and min_p then have no effect.

    >>> from regard.inference.generation.sampling import Sampling
    >>> Sampling(temperature=0.8, top_p=0.9).greedy
    False
    """

    temperature: float = 0.0
    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float | None = None
    """Only the most likely tokens whose probabilities sum to this."""
    min_p: float | None = None
    """Only tokens with at least this fraction of the highest probability."""
    repetition_penalty: float = 1.0
    """For tokens that are in the sequence already: divides positive logits and multiplies negative ones."""

    def __post_init__(self) -> None:
        if not (_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature: expected a finite number of at least 0, got {self.temperature!r}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k: expected a whole number of at least 1, got {self.top_k!r}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (_number(value) and 0 < value <= 1):
                raise ValueError(f"{name}: expected a number above 0 and at most 1, got {value!r}")
        if not (_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise ValueError(f"repetition_penalty: expected a number above 0, got {self.repetition_penalty!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def penalised(self, logits: Float[Tensor, "D"], seen: Iterable[int]) -> Float[Tensor, "D"]:
        """The logits with the repetition penalty for the tokens in `seen`."""
        index = torch.tensor(sorted(set(seen)), dtype=torch.long, device=logits.device)
        before = logits[index]
        worse = torch.where(before > 0, before / self.repetition_penalty, before * self.repetition_penalty)
        return logits.index_copy(0, index, worse)

    def cut(self, logits: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """The logits divided by the temperature, minus the largest; -inf for removed tokens. Ties at the limit stay.

        >>> import torch
        >>> from regard.inference.generation.sampling import Sampling
        >>> Sampling(temperature=1.0, top_k=2).cut(torch.tensor([1.0, 3.0, 2.0])).tolist()
        [-inf, 0.0, -1.0]
        """
        # The largest logit becomes 0, which no temperature makes infinite: the most likely token stays so.
        logits = logits.double()
        # A GPU multiplies by the inverse, which is finite only for normal numbers.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, sys.float_info.min)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits.masked_fill_(logits < logits.topk(self.top_k).values[..., -1:], -math.inf)
        if self.top_p is not None and self.top_p < 1:  # at 1 all tokens stay, whatever their sum is rounded to
            logits.masked_fill_(logits < _least(logits, logits.softmax(-1), self.top_p), -math.inf)
        if self.min_p is not None:
            logits.masked_fill_(logits < math.log(self.min_p), -math.inf)
        return logits

    def draw(self, logits: Float[Tensor, "B D"], generators: Sequence[torch.Generator]) -> Int[Tensor, "B"]:
        """A token for each row, with noise from the row's generator.

        The noise is drawn on the CPU, so that a seed gives the same noise on every device.
        """
        # A GPU processes all rows at once; a CPU one by one, since a row fits its cache.
        size, tokens = 1 if logits.device.type == "cpu" else len(logits), []
        for start in range(0, len(logits), size):
            scores = self.cut(logits[start : start + size])
            for row, generator in zip(scores, generators[start : start + size], strict=True):
                noise = torch.empty(len(row), dtype=torch.float64).exponential_(generator=generator)
                row -= noise.log_().to(row.device)
            tokens.append(scores.argmax(-1))
        return torch.cat(tokens)


def _least(
    logits: Float[Tensor, "*b D"], probabilities: Float[Tensor, "*b D"], top_p: float, most: int = LIKELIEST
) -> Float[Tensor, "*b 1"]:
    """The lowest logit of each row among the most likely tokens whose probabilities sum to `top_p`.

    The `most` likely tokens are tried first; only rows that need more are sorted completely. Sums begin with the most
    likely token, so that `most` does not change the result.
    """
    most = min(most, logits.shape[-1])
    ordered, index = logits.topk(most)
    share = probabilities.gather(-1, index)
    inside = share.cumsum(-1) - share < top_p
    least = ordered.gather(-1, inside.sum(-1, keepdim=True).sub_(1).clamp_(min=0))
    short = inside[..., -1]
    if most == logits.shape[-1] or not bool(short.any()):
        return least
    return least.masked_scatter(short[..., None], _least(logits[short], probabilities[short], top_p, logits.shape[-1]))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
