"""The delta rule: a token does not add its value to what is stored under its key, but moves the stored value towards
it.

    S_t  = S_{t-1} + rate_t · k_t (v_t - k_t S_{t-1})^T,       out_t = q_t S_t / sqrt(qk_length)
    w_ts = q_t (I - rate_t k_t k_t^T) … (I - rate_{s+1} k_{s+1} k_{s+1}^T) k_s · rate_s / sqrt(qk_length)   for s ≤ t

Keys are normalised to length 1. Every token makes a correction u_t = rate_t (v_t - k_t S_{t-1}), so

    (I + L) u = rate v,    L_ts = rate_t k_t·k_s for s < t,      out_t = sum over s ≤ t of q_t·k_s u_s / sqrt(qk_length)

and a triangular system gives the corrections of a chunk, or of the whole sequence, and so the weights. The weights are
not normalised, the mechanism is causal by definition, with or without a mask, and a hidden key makes no correction
(families/recurrent.py).

Schlag et al. 2021, "Linear transformers are secretly fast weight programmers"; Yang et al. 2024, "Parallelizing linear
transformers with the delta rule over sequence length".
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.cost import COUNTED, Work, accumulator, count_formula
from regard.core.eager import symbolic
from regard.core.families.recurrent import RecurrentMechanism, chunk_size, filled, seen_keys
from regard.core.tensors import own_dtype, replaced
from regard.core.user_code import read_only

TABLE = 512
"""Keys per triangular system when weights are asked for."""


class Rate(nn.Module):
    """A learned rate: sigmoid(w·k + b), the same for all heads, w = 0 and b = 0 at first.

    >>> import torch
    >>> from regard.core.mechanisms.delta import Rate
    >>> Rate(4)(torch.randn(2, 3, 5, 4)).unique().tolist()
    [0.5]
    """

    def __init__(self, qk_length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, qk_length))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b S 1"]:
        return torch.sigmoid(F.linear(k, self.weight, self.bias))


@dataclass(frozen=True, kw_only=True)
class Delta(RecurrentMechanism):
    """The delta rule. `rate` says how far a token moves the value stored under its key: a function or a module, whose
    parameters learn, from keys (…, S, K) to (…, S, 1), between 0 and 1. Without it the rate is 1/2, and a layer learns
    its rate starting from there.

    >>> import regard as rg, torch
    >>> k = torch.ones(1, 1, 2, 1)  # one key twice: at full rate the second value takes the place of the first
    >>> v = torch.tensor([[[[3.0], [5.0]]]])
    >>> rg.attend(k, k, v, rg.Delta(rate=lambda k: torch.ones_like(k)))[0, 0, :, 0].tolist()
    [3.0, 5.0]
    """

    rate: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not callable(self.rate):
            raise ValueError(f"rate: expected a function (…, S, K) -> (…, S, 1), got {type(self.rate).__name__}")

    def for_layer(self, qk_length: int) -> "Delta":
        if self.rate is not None:
            return self
        return replaced(self, {"rate": Rate(qk_length)})

    def rates(self, k: Tensor) -> Tensor:
        """The rate of each key in float32 or better, computed in the dtype of the mechanism's tensors; ValueError
        unless its shape is right."""
        kind, shape = accumulator(k.dtype), (*k.shape[:3], 1)
        if self.rate is None:
            return torch.full(shape, 0.5, dtype=kind, device=k.device)
        rates = read_only(self, "rate", self.rate, k.to(own_dtype(self) or kind))
        if not isinstance(rates, Tensor) or rates.shape != shape:
            actual = tuple(rates.shape) if isinstance(rates, Tensor) else type(rates).__name__
            raise ValueError(f"rate: expected (…, S, 1) from keys (…, S, K) = {tuple(k.shape)}, got {actual}")
        return rates.to(kind)

    def table(
        self, q: Tensor, k: Tensor, places: Tensor, real: Tensor | None, groups: list[int] | None = None
    ) -> Tensor:
        rates = self.rates(k)
        if groups is not None:
            k, rates = k[:, groups], rates[:, groups]
        _, visible = seen_keys(places, k.shape[2], real)
        # A query that sees no key must not contribute to the keys' gradients either.
        q = q.to(rates.dtype).masked_fill(~visible.any(-1, keepdim=True), 0) * k.shape[3] ** -0.5
        k = _directions(k if real is None else k.masked_fill(~real, 0), rates.dtype)
        visible = visible if real is None else visible[:, :, None]
        q = rearrange(q, "b (g r) t k -> b g r t k", g=k.shape[1])
        keys, weights = k.shape[2], []
        edges = [(0, keys)] if symbolic(keys) else [(low, low + TABLE) for low in range(0, keys, TABLE)]
        for low, high in reversed(edges):  # newest keys first: each block removes its part from the query
            part, rate = k[:, :, low:high], rates[:, :, low:high]
            scores = (q @ part[:, :, None].transpose(-1, -2)).masked_fill(~visible[..., low:high], 0)
            system = _corrected(part, rate)[:, :, None].expand(-1, -1, scores.shape[2], -1, -1)
            through = torch.linalg.solve_triangular(system, scores, upper=False, left=False, unitriangular=True)
            weights.append(through * rate[:, :, None].transpose(-1, -2))
            q = q - weights[-1] @ part[:, :, None]
        return torch.cat(weights[::-1], -1).flatten(1, 2)

    def walk(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, sums: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype, tokens, queries, groups = q.dtype, k.shape[2], q.shape[2], k.shape[1]
        size = chunk_size(tokens)
        rates, more = self.rates(k), -tokens % size
        kind = rates.dtype
        q = F.pad(q.to(kind) * q.shape[3] ** -0.5, (0, 0, tokens - queries, more))
        k, v, rates = filled(_directions(k, kind), more), filled(v.to(kind), more), filled(rates, more)
        q = rearrange(q, "b (g r) (n c) k -> b g n (r c) k", g=groups, c=size)
        k, v, rates = (x.unflatten(2, (-1, size)) for x in (k, v, rates))
        scores = (q @ k.transpose(-1, -2)).unflatten(3, (-1, size)).tril().flatten(3, 4)
        # Each token's correction: its new value, minus what its key reads from the sums (below).
        new_values, new_keys = torch.linalg.solve_triangular(
            _corrected(k, rates), torch.cat([rates * v, rates * k], -1), upper=False, unitriangular=True
        ).split([v.shape[-1], k.shape[-1]], -1)
        out = []
        for chunk in range(k.shape[2]):
            change = new_values[:, :, chunk] if sums is None else new_values[:, :, chunk] - new_keys[:, :, chunk] @ sums
            inside = scores[:, :, chunk] @ change
            out.append(inside if sums is None else inside + q[:, :, chunk] @ sums)
            if keep or chunk + 1 < k.shape[2]:
                added = k[:, :, chunk].transpose(-1, -2) @ change
                sums = added if sums is None else sums + added
        whole = rearrange(torch.stack(out, 2), "b g n (r c) v -> b (g r) (n c) v", c=size)
        return whole[:, :, tokens - queries : tokens].to(dtype), sums

    def walk_flops(self, work: Work, queries: int, keys: int, history: bool, keep: bool) -> int:
        # The triangular systems are not matrix products, and not counted.
        size, rows, square = chunk_size(keys), work.num_heads // work.num_kv_heads, work.qk_length * work.value_length
        chunks = -(-keys // size)
        of_pairs = size * (rows * (work.qk_length + work.value_length) + work.qk_length)
        folds, reads = chunks if keep else chunks - 1, chunks if history else chunks - 1
        flops = 2 * size * (chunks * of_pairs + square * (folds + (rows + 1) * reads))
        return flops + keys * (count_formula(self, self.rates, (1, 1, COUNTED, work.qk_length)) // COUNTED)

    def walk_size(self, work: Work, tokens: int) -> int:
        # For each token its query, key, output, correction and read, and its rows of a chunk's two matrices.
        size, rows, both = (
            chunk_size(max(1, tokens)),
            work.num_heads // work.num_kv_heads,
            work.qk_length + work.value_length,
        )
        return -(-tokens // size) * size * (rows * (both + size) + size + work.qk_length + 2 * both)


def _directions(k: Tensor, kind: torch.dtype) -> Tensor:
    return F.normalize(k.to(kind), dim=-1, eps=1e-12)


def _corrected(k: Tensor, rates: Tensor) -> Tensor:
    """L (its diagonal is implied): how much each key is corrected for each key before it."""
    return (rates * (k @ k.transpose(-1, -2))).tril(-1)
