"""Mechanisms that forget: sums over keys that fade with every token.

    w_ts  = scale · (q_t ⊙ exp(g_{s+1} + … + g_t)) · k_s   for s ≤ t,   0 for s > t          scale = 1 / sqrt(qk_length)
    out_t = scale · q_t S_t,                               S_t = exp(g_t) ⊙ S_{t-1} + k_t v_t^T

A member states `log_gates`: g_t ≤ 0, a number for each token and head, or one for each feature. The weights are not
normalised and of any sign. The order of tokens is part of the formula, so members are causal by themselves, also
without a mask. A key that padding hides adds nothing to the sums. Other masks hide keys pair by pair, or take them out
again, which sums cannot: they are refused.

The whole sequence is computed in chunks. Within a chunk, blocks of 1, 2, 4, … tokens are joined in pairs: the queries
of the second block see the keys of the first through the gates up to the border between them and from there on, so that
no exponent is above 0 and no difference of sums is taken, however strong the gates.

Yang et al. 2024, "Gated linear attention transformers with hardware-efficient training".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from regard.call import Call, Path, cleaned, in_own_dtype, poisoned, taint
from regard.cost import COUNTED, Cost, Work, accumulator, count_flops
from regard.eager import symbolic
from regard.mask import Mask, causal
from regard.mechanism import UnnormalisedMechanism
from regard.owned import made_on, own_dtype, probe
from regard.paths import reference
from regard.paths.exact import choose_scores
from regard.state import FixedState, Sizes, State
from regard.structure import EVERYTHING, Structure, reached, structure

CHUNK = 64
"""Tokens after which the sums are brought up to date: as many as a usual head has features."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RecurrentState(FixedState):
    """The fading sums S (B, G, K, V), in float32 or better: all that is kept, whatever the length."""

    sums: Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentMechanism(UnnormalisedMechanism):
    """A mechanism that forgets. A subclass states `log_gates`."""

    ordered: ClassVar[bool] = True
    excuses: ClassVar[Mapping[str, str]] = {
        **UnnormalisedMechanism.excuses,
        "permuted": "a key counts for less the more tokens came after it",
    }

    def log_gates(
        self, k: Float[Tensor, "B G S K"], real: Bool[Tensor, "..."] | None
    ) -> Float[Tensor, "B G S 1"] | Float[Tensor, "B G S K"]:
        """g, at most 0, from the keys: what each token leaves of the sums before it, as a logarithm.

        `real` (B, 1, S, 1) says which keys padding does not hide; None if it hides none.
        """
        raise NotImplementedError(f"{type(self).__name__} states no log_gates(k, real)")

    def gates(self, k: Tensor, real: Tensor | None) -> Tensor:
        """`log_gates` in float32 or better, computed in the dtype of the mechanism's tensors; ValueError unless it is
        of the right shape."""
        kind = accumulator(k.dtype)
        gates = self.log_gates(k.to(own_dtype(self) or kind), real)
        if not isinstance(gates, Tensor) or gates.shape not in ((*k.shape[:3], 1), k.shape):
            given = tuple(gates.shape) if isinstance(gates, Tensor) else type(gates).__name__
            raise ValueError(
                f"gate: expected (…, S, 1) or (…, S, K) from keys (…, S, K) = {tuple(k.shape)}, got {given}"
            )
        return gates.to(kind)

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        # The last query stands at the last key, so it sees every key that padding does not hide.
        real = None if visible is None else visible[..., -1, :, None]
        places = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        return _weights(q, k, self.gates(k, real), places, real)

    def choose_weights(self, call: Call, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        tainted = taint(call.k, call.k)
        k, repeats = cleaned(call.k, tainted), call.heads // call.groups
        q = choose_scores(call.q, rows, heads)
        size = (*q.shape[:3], call.keys)
        if 0 in size:
            return q.new_zeros(size) + q[..., :0].sum() + k[..., :0].sum()
        real = _real(call)
        with in_own_dtype(q):
            gates = self.gates(k, real)
            if heads is not None:  # every chosen query head brings its own key head
                groups = [head // repeats for head in heads]
                k, gates = k[:, groups], gates[:, groups]
            places = torch.arange(call.queries, device=q.device) + call.keys - call.queries
            weights = _weights(q, k, gates, places if rows is None else places[rows], real).to(q.dtype)
        if tainted is None:
            return weights
        seen = choose_scores(reached(call.mask, tainted, call.heads, call.queries)[..., None], rows, heads)
        return weights.masked_fill(seen, torch.nan)

    def refuses(self, call: Call) -> str | None:
        return super().refuses(call) or self.streams(call.qk_length, call.structure)

    def streams(self, qk_length: int, known: Structure = EVERYTHING) -> str | None:
        if known.rest is None and not known.windowed:
            return None
        given = f"{known.rest!r}" if known.rest is not None else "a window"
        return (
            f"mask: expected causal, padding, both or none for {self!r}: its sums fade keys and drop none, got {given}"
        )

    def paths(self) -> tuple[Path, ...]:
        return (RECURRENT, reference.PATH)

    def state_type(self, qk_length: int) -> type[Any]:
        return RecurrentState

    def empty_state(self, sizes: Sizes, capacity: int, storage: torch.dtype | None = None) -> State:
        if storage is not None:
            raise ValueError(f"storage: expected None, {self!r} keeps sums, not keys and values, got {storage}")
        return RecurrentState(mechanism=self, sizes=sizes, sums=sizes.zeros(sizes.qk_length, sizes.value_length))

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: RecurrentState,
        rule: Mask | None,
        bias: Tensor | None,
        tainted: Tensor | None,
    ) -> tuple[Tensor, Any]:
        count = k.shape[2]
        fresh = state.fresh(rule, count)
        flags = state.flags(count, fresh, tainted)
        if count == 0 or state.batch == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3]) + q[..., :0].sum(), state.grown(count, fresh, flags)
        real = None if fresh is None else fresh.valid(count, k.device)[:, None, :, None]
        k = k if real is None else k.masked_fill(~real, 0)
        out, sums = _walk(q, k, v, self.gates(k, real), state.sums if state.length else None, keep=True)
        assert sums is not None
        return poisoned(out, causal, flags), state.grown(count, fresh, flags, sums=sums)

    def cost(self, work: Work) -> Cost:
        if (reason := self.streams(work.qk_length, _known(work))) is not None:
            raise ValueError(reason)
        heads = work.batch * work.num_kv_heads
        state_bytes = heads * work.qk_length * work.value_length * accumulator(work.dtype).itemsize
        tokens, old, moved = work.query_length, max(0, work.key_length - work.query_length), work.io_bytes
        streamed = work.cached and old > 0
        if streamed:
            moved = replace(work, key_length=tokens, mask=None).io_bytes + state_bytes
        else:
            tokens = min(tokens, work.key_length)
        flops, gate_flops, gate_length = 0, *self._gate_cost(work.qk_length)
        if tokens:
            flops = _walk_flops(work, tokens, history=old > 0, keep=streamed)
            flops += (tokens if streamed else work.key_length) * gate_flops
            flops += 0 if streamed else 2 * old * work.qk_length * work.value_length
        return Cost(
            flops=heads * flops,
            bytes=moved,
            state_bytes=state_bytes,
            activation_bytes=heads * _walk_size(work, tokens, gate_length) * accumulator(work.dtype).itemsize,
            form="linear",
        )

    def _gate_cost(self, qk_length: int) -> tuple[int, int]:
        """FLOPs of a token's gates, and how many there are for each head."""
        x = probe(self, (1, 1, COUNTED, qk_length))
        with made_on(x.device), torch.no_grad():
            return count_flops(lambda: self.gates(x, None)) // COUNTED, self.gates(x, None).shape[-1]


def _known(work: Work) -> Structure:
    return structure(work.rule, work.query_length, work.key_length)


def _real(call: Call) -> Tensor | None:
    """Which keys are real, (B, 1, S, 1)."""
    valid = call.structure.valid(call.keys, call.q.device)
    return None if valid is None else valid[:, None, :, None]


def _weights(q: Tensor, k: Tensor, gates: Tensor, places: Tensor, real: Tensor | None) -> Tensor:
    """The plain formula: the weights (B, H, T, S) of queries that stand at `places` among the keys."""
    kind = gates.dtype
    seen = places[:, None] >= torch.arange(k.shape[2], device=k.device)
    shown = seen if real is None else seen & real.transpose(-1, -2)
    # A query that sees nothing must not reach the keys' gradients either.
    q = q.to(kind).masked_fill(~shown.any(-1, keepdim=True), 0) * k.shape[3] ** -0.5
    q, k = rearrange(q, "b (g r) t k -> b g r t k", g=k.shape[1]), k.to(kind)[:, :, None].transpose(-1, -2)
    if real is not None:
        k = k.masked_fill(~real[:, :, None].transpose(-1, -2), 0)
    # One gate for all features, or feature by feature.
    parts = [(q, k)] if gates.shape[-1] == 1 else zip(q.split(1, -1), k.split(1, -2), strict=True)
    weights = torch.zeros((), dtype=kind, device=q.device)
    for (queries, keys), gate in zip(parts, gates.unbind(-1), strict=True):
        between = _after(gate[:, :, None].masked_fill(~seen, 0))  # gates after the key, up to the query
        fade = between.masked_fill(~shown, -torch.inf).exp()
        weights = weights + queries @ keys * fade[:, :, None]
    return weights.flatten(1, 2)


def _after(gates: Tensor) -> Tensor:
    """For each token the sum of the gates of those that come after it, over the last axis."""
    return F.pad(gates[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


def _cannot(call: Call) -> str | None:
    if symbolic(call.queries, call.keys):
        return "a trace that holds a length open cannot cut it into chunks"
    return None


def _run(call: Call) -> Tensor:
    """fading sums in chunks of 64: time and memory linear in the length."""
    mechanism: Any = call.mechanism
    q, k, v, real = call.q, call.k, call.v, _real(call)
    if real is not None:
        k = k.masked_fill(~real, 0)
        sees = reached(call.mask, torch.ones_like(k[..., 0], dtype=torch.bool), call.heads, call.queries)
        q = q.masked_fill(~sees[..., None], 0)  # as in the plain formula
    gates = mechanism.gates(k, real)
    blind, old, sums = max(0, call.queries - call.keys), max(0, call.keys - call.queries), None
    if old:
        fade = _after(gates[:, :, :old].transpose(-1, -2)).transpose(-1, -2).exp()
        sums = (k[:, :, :old].to(fade.dtype) * fade).transpose(-1, -2) @ v[:, :, :old].to(fade.dtype)
    out, _ = _walk(q[:, :, blind:], k[:, :, old:], v[:, :, old:], gates[:, :, old:], sums, keep=False)
    return F.pad(out, (0, 0, blind, 0)) if blind else out


RECURRENT = Path("recurrent", _cannot, _run)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, sums: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The output for as many queries as keys, given the sums before them; and, to `keep`, the sums after them."""
    dtype, kind, tokens, heads = q.dtype, gates.dtype, k.shape[2], q.shape[1] // k.shape[1]
    size = _chunk(tokens)
    q = rearrange(q.to(kind) * q.shape[3] ** -0.5, "b (g r) t k -> b g t (r k)", g=k.shape[1])
    # What fills the last chunk up changes nothing: keys of 0, and gates of 0, which leave everything as it is.
    q, k, v, gates = (_filled(x.to(kind), -tokens % size) for x in (q, k, v, gates))
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
    """The output with what queries see of the chunks before theirs; and the sums after the last chunk, to `keep`."""
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


def _filled(x: Tensor, more: int) -> Tensor:
    return F.pad(x, (0, 0, 0, more)) if more else x


def _halves(x: Tensor, length: int) -> tuple[Tensor, ...]:
    """The first and second blocks of pairs of blocks of tokens: (B, G, T, …) -> twice (B, G, N, length, …)."""
    return x.unflatten(2, (-1, 2, length)).unbind(3)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], 3).flatten(2, 4)


def _chunk(tokens: int) -> int:
    """Tokens of a chunk: a power of two, so that its blocks can be joined in pairs."""
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def _walk_flops(work: Work, tokens: int, history: bool, keep: bool) -> int:
    """FLOPs of `_walk` for each key head."""
    size, rows = _chunk(tokens), work.num_heads // work.num_kv_heads
    chunks = -(-tokens // size)
    of_pairs = rows * (2 * work.qk_length + (size - 1) * (work.qk_length + work.value_length))
    folds, reads = chunks if keep else chunks - 1, chunks if history else chunks - 1
    return size * (chunks * of_pairs + 2 * work.qk_length * work.value_length * (folds + rows * reads))


def _walk_size(work: Work, tokens: int, gate_length: int) -> int:
    """Numbers that `_walk` holds at once, for each key head: the sums before each chunk, and of each token its query,
    key, value, gates and output, and its share of one level of blocks."""
    size, rows = _chunk(max(1, tokens)), work.num_heads // work.num_kv_heads
    chunks, qk_length, value_length = -(-tokens // size), work.qk_length, work.value_length
    token = (rows + 1) * (qk_length + value_length) + 6 * gate_length + rows * value_length
    level = (rows + 1) * qk_length + rows * (size // 2 + value_length)
    return chunks * (qk_length * value_length + size * token + size * level // 2)
