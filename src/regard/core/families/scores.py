"""Mechanisms whose weights are the softmax of scores.

    w_ts = exp(scale · score(q_t, k_s) + bias_ts) / sum over visible s' of the same

A member defines `score` (the logits before scaling). Scores are additive, so a bias makes sense, and attention over
parts of the keys can be merged by their log-sum-exps (paths/parts.py).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.families.mechanism import Mechanism
from regard.core.user_code import undefined


@dataclass(frozen=True, kw_only=True)
class ScoreMechanism(Mechanism):
    """A mechanism of your own with softmax weights: one class with one method, `score(q, k)`.

    >>> import regard as rg, torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Distance(rg.ScoreMechanism):
    ...     def score(self, q, k):
    ...         return -torch.cdist(q, k)
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> rg.attend(q, k, v, Distance(), mask=rg.causal, bias=torch.zeros(5, 5)).shape
    torch.Size([1, 2, 5, 4])
    """

    hidden_score: ClassVar[float] = -math.inf

    def score(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        """The score of each query and key, of any size and sign."""
        raise undefined(self, "score(q, k)")

    def scale(self, qk_length: int) -> float:
        """The factor on the scores; infinity puts all weight on the best key, shared equally between ties."""
        return 1.0

    def compare(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        return self.score(q, k)

    def compare_heads(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B G S K"]) -> Float[Tensor, "B H T S"]:
        return self._grouped(self.score, q, k)

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        if bias is not None:
            reachable = bias != -math.inf
            visible = reachable if visible is None else visible & reachable
        empty = hidden = None
        if visible is not None:
            empty = ~visible.any(-1, keepdim=True)
            hidden = ~(visible | empty)
            q = q.masked_fill(empty, 0)  # a query that sees no key must not contribute to the keys' gradients

        def shown(scores: Tensor) -> Tensor:
            return scores if hidden is None else scores.masked_fill(hidden, -math.inf)

        scores, scale = self.grouped(self.score, q, k), self.scale(q.shape[-1])
        best = shown(scores.detach()).amax(-1, keepdim=True)
        if scale == math.inf:
            ties = shown(scores.detach()) == best
            weights = ties / ties.sum(-1, keepdim=True, dtype=scores.dtype)
        else:
            # The shift changes no weight; it keeps scale · score within range for any scale.
            scores = scale * (scores - best)
            if bias is not None:
                bias = bias.masked_fill(bias == -math.inf, 0)
                scores = scores + (bias if empty is None else bias.masked_fill(empty, 0))
            weights = torch.softmax(shown(scores), dim=-1)
        return weights if empty is None else weights.masked_fill(empty, 0)

    def trace_scores(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"] | None:
        scores, scale = self.grouped(self.score, q, k), self.scale(q.shape[-1])
        scores = scores if scale == math.inf else scores * scale  # argmax compares the unscaled scores
        return scores if bias is None else scores + bias

    def refuses(self, call: Call) -> str | None:
        return None
