"""Running sums over keys, and the walk over chunks in which queries read them (chunkwise linear attention).

The keys are walked in chunks. A query attends to its chunk in score form (exact, and dense enough for matrix units) and
to everything before it through the sums

    num_t = sum over its chunk of sim(q_t, k_s) v_s  +  phi(q_t)·sums             sums       = sum phi(k_s) v_s^T
    den_t = sum over its chunk of sim(q_t, k_s)      +  phi(q_t)·normaliser       normaliser = sum phi(k_s)

and when a chunk is done it is folded into (added to) the sums. Features exist for one chunk at a time.

`steps` makes the list of steps from the lengths alone. The computation (chunked.py), its gradient, the token-by-token
form (stream.py) and the cost (sums_cost.py) all follow this list.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.cost import accumulator
from regard.core.eager import recorded, transformed
from regard.core.masks.guard import cleaned

CHUNK = 256
"""Keys per chunk: enough for efficient matrix products, few enough for the quadratic part within a chunk."""


@dataclass(frozen=True)
class Step:
    """Queries [start, stop) attend to keys [low, high) and the sums; or, without queries, these keys are folded in."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def folds(self) -> bool:
        return self.start == self.stop


def steps(queries: int, keys: int, offset: int | None, fold_to: int | None = None) -> list[Step]:
    """The steps, in order. Query i is at key position i + offset; None means not causal.

    Keys up to `fold_to` are folded at the end (by default all but the last chunk, which no later query needs).
    """
    fold_to = (keys - 1) // CHUNK * CHUNK if fold_to is None else fold_to
    edges = [*range(0, fold_to, CHUNK), fold_to, keys]
    plan: list[Step] = []
    done = 0 if offset is None else min(queries, max(0, -offset))  # queries before the first key see no key
    for low, high in pairwise(edges):
        last = high == keys
        stop = queries if last else done if offset is None else min(queries, max(done, high - offset))
        plan += [Step(a, min(a + CHUNK, stop), low, high) for a in range(done, stop, CHUNK)]
        done = stop
        if not last and high > low:
            plan.append(Step(0, 0, low, high))
        if last:
            break
    return plan


def tiled(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Batch and key heads as one axis M: q (M, R, T, K), k (M, S, K), v (M, S, V), valid (M, S)."""
    batch, heads, queries, length = q.shape
    groups = k.shape[1]
    real = None if valid is None else valid.repeat_interleave(groups, dim=0)
    rows = q.reshape(batch * groups, heads // groups, queries, length)
    return rows, k.flatten(0, 1), v.flatten(0, 1), real


def untiled(out: Tensor, k: Tensor) -> Tensor:
    """(M, R, T, V) as (B, H, T, V), for keys (B, G, S, K)."""
    _, shared, queries, length = out.shape
    return out.reshape(k.shape[0], k.shape[1] * shared, queries, length)


def no_sums(mechanism: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over no keys: zeros."""
    kind, qk_length = accumulator(k.dtype), k.shape[-1]
    return (
        k.new_zeros(k.shape[0], mechanism.summed_length(qk_length), v.shape[-1], dtype=kind),
        k.new_zeros(k.shape[0], mechanism.normaliser_length(qk_length), dtype=kind),
    )


@dataclass(frozen=True, eq=False)
class Walk:
    """The steps over M key heads, and which of their keys must be cleaned before they are read."""

    plan: list[Step]
    offset: int | None
    """The position of the first query among the keys; None means not causal."""
    valid: Tensor | None = None
    """Which keys are real, (M, S); None if all are."""
    bad: Tensor | None = None
    """Which real keys have a NaN or infinity in the key or its value, (M, S); None if all are assumed finite."""

    def chunk(self, step: Step, k: Tensor, v: Tensor, derived: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values of a step, safe to compute with, and which of them are real.

        The queries that see a bad key become NaN afterwards; here it is kept from those that do not. All later queries
        see what is folded. Above the diagonal similarities are 0, so only values can leak there. Gradients reach
        everything that was computed with: for them, all bad keys and values become 0.
        """
        here = slice(step.low, step.high)
        k, v, real = k[:, here], v[:, here], None if self.valid is None else self.valid[:, here]
        bad = None if self.bad is None else self.bad[:, here]
        if derived or real is not None:
            hidden = unreadable(real, bad)
            return cleaned(k, hidden), cleaned(v, hidden), real
        if bad is not None and not step.folds and diagonal_of(step, self.offset) is not None:
            v = v.nan_to_num(0, 0, 0)  # takes an eighth of the time of `where`
        return k, v, real

    def spoiled(self, queries: int) -> Tensor | None:
        """Which of the queries see a bad key, (M, T); None if none can."""
        if self.bad is None:
            return None
        if self.offset is None:
            return self.bad.any(-1, keepdim=True).expand(-1, queries)
        keys = self.bad.shape[1]
        last = (torch.arange(queries, device=self.bad.device) + self.offset + 1).clamp(0, keys)
        return F.pad(self.bad.int().cumsum(-1), (1, 0))[:, last] > 0


def unreadable(real: Tensor | None, bad: Tensor | None) -> Tensor | None:
    """Which keys (M, S) are padding or bad; None if none can be."""
    if real is None:
        return bad
    return ~real if bad is None else ~real | bad


def sweep(
    mechanism: Any,
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    normaliser: Tensor,
    history: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the steps. Gives the output (M, R, T, V) and the sums after the last fold."""
    plan, offset, kind = walk.plan, walk.offset, sums.dtype
    learned = recorded(q, k, v, sums) or mechanism.learns(q.shape[3])
    keep = learned or torch.compiler.is_compiling() or transformed()
    first = min([step.start for step in plan if not step.folds] or [q.shape[2]])
    parts = [q.new_zeros(*q.shape[:2], first, v.shape[-1])]  # queries before the first key
    room = None if keep else _room(mechanism, plan, q, k, kind, history)
    whole = None if keep else q.new_empty(*q.shape[:3], v.shape[-1])
    if whole is not None:
        whole[:, :, :first] = 0
    owned = False  # the caller's sums must not change; this copy can be added to in place
    for step in plan:
        keys, values, real = walk.chunk(step, k, v, derived=keep)
        keys, values = keys.to(kind), values.to(kind)
        if step.folds:
            folded_phi, shown, count = fold(mechanism, keys, values, real, room)
            sums = torch.baddbmm(sums, folded_phi.transpose(-1, -2), shown, out=sums if owned else None)
            normaliser = normaliser + count
            history, owned = True, not keep
            continue
        queries = q[:, :, step.start : step.stop].to(kind)
        similar, phi = compare(mechanism, queries, keys, diagonal_of(step, offset), real)
        if history:
            out = divide(*meet(mechanism, queries.flatten(1, 2), similar, phi, values, sums, normaliser, room))
        else:
            out = alone(similar, values)
        out = out.unflatten(1, (q.shape[1], -1))
        if whole is None:
            parts.append(out.to(q.dtype))
        else:
            whole[:, :, step.start : step.stop] = out
    return torch.cat(parts, dim=2) if whole is None else whole, sums, normaliser


def _room(mechanism: Any, plan: list[Step], q: Tensor, k: Tensor, kind: torch.dtype, history: bool) -> Tensor | None:
    """One buffer for the features of all steps."""
    if not history and not any(step.folds for step in plan):
        return None
    most = max(step.high - step.low if step.folds else q.shape[1] * (step.stop - step.start) for step in plan)
    return torch.empty(k.shape[0] * most * mechanism.summed_length(k.shape[-1]), dtype=kind, device=k.device)


def diagonal_of(step: Step, offset: int | None) -> int | None:
    """How far past its row index a query sees the keys of a step; None if all queries see all keys."""
    if offset is None or step.start + offset >= step.high - 1:
        return None
    return step.start + offset - step.low


def fold(
    mechanism: Any, k: Tensor, v: Tensor, real: Tensor | None, room: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi of keys (M, L, K), the values (M, L, V) to multiply it with, and what the keys add to the normaliser."""
    phi = mechanism.summed_features(k, room)
    if real is not None:
        v = v.masked_fill(~real[..., None], 0)
    return phi, v, mechanism.normaliser(k, phi, real)


def compare(
    mechanism: Any, q: Tensor, k: Tensor, diagonal: int | None, real: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Similarities (M, R·t, L) of queries (M, R, t, K) and one chunk of keys, 0 where hidden; and phi(q), if it was
    computed."""
    similar, phi = _similar(mechanism, q.flatten(1, 2), k)
    if diagonal is not None:
        heads = similar.unflatten(1, q.shape[1:3])
        recorded = heads.requires_grad or transformed()
        similar = (heads.tril(diagonal) if recorded else heads.tril_(diagonal)).flatten(1, 2)
    if real is not None:
        similar = similar.masked_fill(~real[:, None], 0)
    return similar, phi


def _similar(mechanism: Any, rows: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """Similarities (M, N, L) of queries (M, N, K) and keys (M, L, K); and phi of the queries, if it was computed."""
    if mechanism.short:
        return mechanism.similarity(rows, k), None
    phi = mechanism.summed_features(rows)
    return torch.bmm(phi, mechanism.summed_features(k).transpose(-1, -2)), phi


def alone(similar: Tensor, v: Tensor) -> Tensor:
    """The output of a single chunk without sums: the plain formula, to the last digit."""
    total = similar.sum(-1, keepdim=True)
    return torch.bmm(similar / total.masked_fill(total == 0, 1), v)


def meet(
    mechanism: Any,
    rows: Tensor,
    similar: Tensor,
    phi: Tensor | None,
    v: Tensor,
    sums: Tensor,
    normaliser: Tensor,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Numerator (M, N, V) and denominator (M, N) of queries (M, N, K) over one chunk and the sums before it."""
    phi = mechanism.summed_features(rows, room) if phi is None else phi
    num = torch.baddbmm(torch.bmm(phi, sums), similar, v)
    return num, similar.sum(-1) + mechanism.denominator(rows, phi, normaliser)


def divide(num: Tensor, den: Tensor) -> Tensor:
    """num / den, and 0 where den is 0."""
    return num / den.masked_fill(den == 0, math.inf).unsqueeze(-1)


def step(
    mechanism: Any,
    real: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    normaliser: Tensor,
    history: bool,
) -> Tensor:
    """`sweep` for one query of each head, which sees every real key and the sums: (M, R, 1, K) -> (M, R, 1, V)."""
    rows, kind = q.flatten(1, 2), sums.dtype
    if q.dtype != kind:
        rows, k, v = rows.to(kind), k.to(kind), v.to(kind)
    similar, phi = _similar(mechanism, rows, k)
    if real is not None:
        similar = similar.masked_fill(~real[:, None], 0)
    if history:
        sums, normaliser = sums.flatten(0, 1), normaliser.flatten(0, 1)
        out = divide(*meet(mechanism, rows, similar, phi, v, sums, normaliser))
    else:
        out = alone(similar, v)
    return out.unsqueeze(2) if q.dtype == kind else out.unsqueeze(2).to(q.dtype)
