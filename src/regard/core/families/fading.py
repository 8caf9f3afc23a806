"""Gated linear attention: sums over keys that fade with every token.

    w_ts = scale · (q_t ⊙ exp(g_{s+1} + … + g_t)) · k_s   for s ≤ t,   0 for s > t          scale = 1 / sqrt(qk_length)
    S_t  = exp(g_t) ⊙ S_{t-1} + k_t v_t^T

A member defines `log_gates`: g_t ≤ 0, a number for each token and head, or one for each feature.

The whole sequence is computed in chunks. Within a chunk, blocks of 1, 2, 4, … tokens are joined in pairs: the queries
of the second block see the keys of the first through two sums of gates, up to the border between them and from there
on. So no exponent is above 0 and no sums are subtracted, however strong the gates.

Yang et al. 2024, "Gated linear attention transformers with hardware-efficient training".
"""

from dataclasses import dataclass
from operator import index

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.cost import COUNTED, Work, accumulator, count_formula
from regard.core.families.recurrent import RecurrentMechanism, chunk_size, filled, seen_keys
from regard.core.tensors import made_on, own_dtype, probe
from regard.core.user_code import read_only, undefined


@dataclass(frozen=True, kw_only=True)
class FadingMechanism(RecurrentMechanism):
    """A mechanism whose sums fade. A subclass defines `log_gates`."""

    def log_gates(
        self, k: Float[Tensor, "B G S K"], real: Bool[Tensor, "..."] | None
    ) -> Float[Tensor, "B G S 1"] | Float[Tensor, "B G S K"]:
        """g ≤ 0 from the keys: the logarithm of the share that each token leaves of the sums before it.

        `real` (B, 1, S, 1) says which keys padding does not hide; None if it hides none.
        """
        raise undefined(self, "log_gates(k, real)")

    def gates(self, k: Tensor, real: Tensor | None) -> Tensor:
        """`log_gates` in float32 or better, computed in the dtype of the mechanism's tensors; ValueError unless its
        shape is right."""
        kind = accumulator(k.dtype)
        keys = k.to(own_dtype(self) or kind)
        gates = read_only(self, "log_gates", lambda keys: self.log_gates(keys, real), keys)
        # Compared one by one: Dynamo cannot find a symbolic size in a tuple.
        if not isinstance(gates, Tensor) or (gates.shape != k.shape and gates.shape != (*k.shape[:3], 1)):
            shape = tuple(gates.shape) if isinstance(gates, Tensor) else type(gates).__name__
            raise ValueError(
                f"gate: expected (…, S, 1) or (…, S, K) from keys (…, S, K) = {tuple(k.shape)}, got {shape}"
            )
        return gates.to(kind)

    def table(
        self, q: Tensor, k: Tensor, places: Tensor, real: Tensor | None, groups: list[int] | None = None
    ) -> Tensor:
        gates = self.gates(k, real)
        kind = gates.dtype
        if groups is not None:
            k, gates = k[:, groups], gates[:, groups]
        before, visible = seen_keys(places, k.shape[2], real)
        # A query that sees no key must not contribute to the keys' gradients either.
        q = q.to(kind).masked_fill(~visible.any(-1, keepdim=True), 0) * k.shape[3] ** -0.5
        k = k if real is None else k.masked_fill(~real, 0)
        q, k = rearrange(q, "b (g r) t k -> b g r t k", g=k.shape[1]), k.to(kind)[:, :, None].transpose(-1, -2)
        # One gate for all features, or one per feature.
        parts = [(q, k)] if gates.shape[-1] == 1 else zip(q.split(1, -1), k.split(1, -2), strict=True)
        weights = torch.zeros((), dtype=kind, device=q.device)
        for (queries, keys), gate in zip(parts, gates.unbind(-1), strict=True):
            between = _after(gate[:, :, None].masked_fill(~before, 0))  # gates after the key, up to the query
            fade = between.masked_fill(~visible, -torch.inf).exp()
            weights = weights + queries @ keys * fade[:, :, None]
        return weights.flatten(1, 2)

    def walk(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, sums: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        gates, old = self.gates(k, real), index(k.shape[2]) - index(q.shape[2])
        if old:  # tokens without queries: one product
            assert sums is None
            fade = _after(gates[:, :, :old].transpose(-1, -2)).transpose(-1, -2).exp()
            sums = (k[:, :, :old].to(fade.dtype) * fade).transpose(-1, -2) @ v[:, :, :old].to(fade.dtype)
        return _walk(q, k[:, :, old:], v[:, :, old:], gates[:, :, old:], sums, keep)

    def walk_flops(self, work: Work, queries: int, keys: int, history: bool, keep: bool) -> int:
        size, rows, square = (
            chunk_size(queries),
            work.num_heads // work.num_kv_heads,
            work.qk_length * work.value_length,
        )
        chunks, old = -(-queries // size), keys - queries
        of_pairs = rows * (2 * work.qk_length + (size - 1) * (work.qk_length + work.value_length))
        folds, reads = chunks if keep else chunks - 1, chunks if history or old else chunks - 1
        flops = size * (chunks * of_pairs + 2 * square * (folds + rows * reads))
        return flops + 2 * old * square + keys * self._gate_cost(work.qk_length)[0]

    def walk_size(self, work: Work, tokens: int) -> int:
        # The sums before each chunk; for each token its query, key, value, gates and output, and its share of one level
        # of joins.
        size, rows = chunk_size(max(1, tokens)), work.num_heads // work.num_kv_heads
        chunks, qk_length, value_length = -(-tokens // size), work.qk_length, work.value_length
        gates = 6 * self._gate_cost(qk_length)[1]
        token = (rows + 1) * (qk_length + value_length) + gates + rows * value_length
        level = (rows + 1) * qk_length + rows * (size // 2 + value_length)
        return chunks * (qk_length * value_length + size * token + size * level // 2)

    def _gate_cost(self, qk_length: int) -> tuple[int, int]:
        """FLOPs of a token's gates, and the number of gates per head."""
        flops = count_formula(self, self._all_gates, (1, 1, COUNTED, qk_length)) // COUNTED
        x = probe(self, (1, 1, 1, qk_length))
        with made_on(x.device), torch.no_grad():
            return flops, self._all_gates(x).shape[-1]

    def _all_gates(self, k: Tensor) -> Tensor:
        return self.gates(k, None)


def _after(gates: Tensor) -> Tensor:
    """For each token, the sum of the gates of all later tokens, over the last axis."""
    # Padded before it is sliced: torch.export would refuse lengths that leave a single token.
    return F.pad(gates, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, sums: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The output for as many queries as keys, given the sums before them; and, if `keep`, the sums after them."""
    dtype, kind, tokens, heads = q.dtype, gates.dtype, k.shape[2], q.shape[1] // k.shape[1]
    size = chunk_size(tokens)
    q = rearrange(q.to(kind) * q.shape[3] ** -0.5, "b (g r) t k -> b g t (r k)", g=k.shape[1])
    # Padding of the last chunk changes nothing: its keys are 0, and gates of 0 leave the sums as they are.
    q, k, v, gates = (filled(x.to(kind), -tokens % size) for x in (q, k, v, gates))
    q = q.unflatten(-1, (heads, -1))  # (B, G, T, R, K)
    upto, after = gates, torch.zeros_like(gates)  # sums of gates: from a block's start to the token, from it to the end
    out = (q @ k[..., None]) * v[..., None, :]
    length = 1
    while length < size:
        (_, queries), (keys, _), (values, _) = (_halves(x, length) for x in (q, k, v))
        (upto_first, upto_second), (after_first, after_second) = _halves(upto, length), _halves(after, length)
        queries, keys = queries * upto_second.exp()[..., None, :], keys * after_first.exp()
        more = (queries.flatten(3, 4) @ keys.transpose(-1, -2) @ values).unflatten(3, (length, heads))
        first, second = _halves(out, length)
        out = _joined(first, second + more)
        upto = _joined(upto_first, upto_second + upto_first[..., -1:, :])
        after = _joined(after_first + upto_second[..., -1:, :], after_second)
        length *= 2
    out, sums = _through_sums(q, k, v, upto, after, out, sums, size, keep)
    return rearrange(out[:, :, :tokens], "b g t r v -> b (g r) t v").to(dtype), sums


def _through_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    upto: Tensor,
    after: Tensor,
    out: Tensor,
    sums: Tensor | None,
    size: int,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Add what queries see of earlier chunks to the output; and, if `keep`, give the sums after the last chunk."""
    chunks = k.shape[2] // size
    folded, first = chunks if keep else chunks - 1, 1 if sums is None else 0
    starts = [] if sums is None else [sums]
    if folded:
        keys = (k * after.exp())[:, :, : folded * size].unflatten(2, (folded, size))
        added = keys.transpose(-1, -2) @ v[:, :, : folded * size].unflatten(2, (folded, size))
        fades = upto.unflatten(2, (chunks, size))[..., -1, :].exp()[..., None]
        for chunk in range(folded):
            sums = added[:, :, chunk] if sums is None else fades[:, :, chunk] * sums + added[:, :, chunk]
            starts.append(sums)
    starts = starts[: chunks - first]
    if not starts:
        return out, sums
    late = slice(first * size, None)
    queries = (q[:, :, late] * upto[:, :, late].exp()[..., None, :]).unflatten(2, (len(starts), size))
    more = (queries.flatten(3, 4) @ torch.stack(starts, 2)).unflatten(3, (size, -1)).flatten(2, 3)
    return torch.cat([out[:, :, : first * size], out[:, :, late] + more], 2), sums


def _halves(x: Tensor, length: int) -> tuple[Tensor, ...]:
    """Tokens as pairs of blocks: the first and the second block of each pair, (B, G, T, …) -> twice (B, G, N, length,
    …)."""
    return x.unflatten(2, (-1, 2, length)).unbind(3)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], 3).flatten(2, 4)
