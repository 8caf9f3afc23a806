"""Kernel attention by running sums, a chunk of keys at a time.

Walking the keys in chunks, a query takes its own chunk in score form (exact, and dense enough for the matrix units) and
everything before it through the sums

    num_t = sum over its chunk of sim(q_t, k_s) v_s  +  phi(q_t)·sums             sums       = sum phi(k_s) v_s^T
    den_t = sum over its chunk of sim(q_t, k_s)      +  phi(q_t)·normaliser       normaliser = sum phi(k_s)

and when a chunk is done it is folded into the sums. Features exist for one chunk at a time, in the backward pass too,
which walks the same steps twice: forward for the queries' gradients, backward for the keys' and values'.

What is walked is a list of steps, made by `steps` from the lengths alone. The computation, its gradient and its cost
all follow that one list.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.call import Call, Path, in_own_dtype, nothing, poisoned
from regard.cost import Cost, Work, accumulator
from regard.mask import Padding
from regard.mask import causal as causal_mask
from regard.paths.rows import by_interval
from regard.state import KernelState
from regard.structure import Structure, both, reached, structure

if TYPE_CHECKING:
    from regard.mechanisms.kernel import FeatureMechanism

CHUNK = 256
"""Keys folded at a time: long enough for the matrix units, short enough for the chunk's quadratic part."""


@dataclass(frozen=True)
class Step:
    """Queries [start, stop) meet keys [low, high) and the sums; or, with no queries, these keys are folded in."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def folds(self) -> bool:
        return self.start == self.stop


def steps(queries: int, keys: int, offset: int | None, fold_to: int | None = None) -> list[Step]:
    """What to do, in order. Query i stands at key position i + offset; None is no causality.

    Keys up to `fold_to` are folded in the end (by default all but the last chunk, which nothing comes after).
    """
    fold_to = (keys - 1) // CHUNK * CHUNK if fold_to is None else fold_to
    edges = [*range(0, fold_to, CHUNK), fold_to, keys]
    plan: list[Step] = []
    done = 0 if offset is None else min(queries, max(0, -offset))  # queries before the first key see nothing
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


def quadratic(mechanism: "FeatureMechanism", qk_length: int, known: Structure) -> str | None:
    """Why sums cannot serve, so that only the score form is left; None if they can."""
    if known.rest is not None:
        return f"{known.rest!r} hides keys pair by pair, which sums over keys cannot"
    if known.windowed:
        return "a window takes keys out again, which sums over keys cannot"
    if not mechanism.linear(qk_length):
        return f"phi has {mechanism.summed_length(qk_length):,} features"
    return None


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    mechanism: Any = call.mechanism
    return quadratic(mechanism, call.qk_length, call.structure)


def run(call: Call) -> Tensor:
    """running sums in chunks of 256: time and memory linear in the length."""
    known, offset = call.structure, call.keys - call.queries

    def rows(q: Tensor, k: Tensor, v: Tensor, low: int, high: int) -> Tensor:
        return _whole(call.mechanism, q, k, v, offset - low if known.causal else None, None)

    if known.rows is not None:
        return by_interval(call, rows)
    valid = known.valid(call.keys, call.q.device)
    if valid is not None and not known.causal:
        # Sums over few keys lose digits that the score form keeps: take the real keys out of the holes first.
        each = [
            _whole(call.mechanism, q[None], k[None, :, real], v[None, :, real], None, None)
            if bool(real.any())
            else nothing(call, call.queries)[:1]
            for q, k, v, real in zip(call.q, call.k, call.v, valid, strict=True)
        ]
        return torch.cat(each)
    q = call.q
    if valid is not None:  # a query that sees nothing must not reach the keys' gradients either
        sees = reached(call.mask, torch.ones_like(call.k[..., 0], dtype=torch.bool), call.heads, call.queries)
        q = q.masked_fill(~sees[..., None], 0)
    return _whole(call.mechanism, q, call.k, call.v, offset if known.causal else None, valid)


def _whole(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, offset: int | None, valid: Tensor | None) -> Tensor:
    heads = q.shape[1]
    tiled, keys, values, real = _tiled(q, k, v, valid)
    plan = steps(q.shape[2], k.shape[2], offset)
    learned = mechanism.parameters()
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *learned))
    if needed and not torch.compiler.is_compiling():
        out = _Sweep.apply(  # type: ignore[no-untyped-call]
            mechanism, plan, offset, real, tiled, keys, values, *learned
        )
    else:
        out, _, _ = sweep(mechanism, plan, offset, real, tiled, keys, values, *_nothing(mechanism, keys, values))
    return rearrange(out, "(b g) r t v -> b (g r) t v", b=q.shape[0], r=heads // k.shape[1])


def _tiled(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Batch and key heads as one axis M: q (M, R, T, K), k (M, S, K), v (M, S, V), valid (M, S)."""
    groups = k.shape[1]
    real = None if valid is None else valid.repeat_interleave(groups, dim=0)
    return (
        rearrange(q, "b (g r) t k -> (b g) r t k", g=groups),
        rearrange(k, "b g s k -> (b g) s k"),
        rearrange(v, "b g s v -> (b g) s v"),
        real,
    )


def _nothing(mechanism: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over no keys."""
    kind, qk_length = accumulator(k.dtype), k.shape[-1]
    return (
        k.new_zeros(k.shape[0], mechanism.summed_length(qk_length), v.shape[-1], dtype=kind),
        k.new_zeros(k.shape[0], mechanism.normaliser_length(qk_length), dtype=kind),
    )


def sweep(
    mechanism: Any,
    plan: list[Step],
    offset: int | None,
    valid: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    normaliser: Tensor,
    history: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the steps. Gives the output (M, R, T, V) and the sums after the last fold."""
    kind, keep = sums.dtype, torch.is_grad_enabled() or torch.compiler.is_compiling()
    first = min([step.start for step in plan if not step.folds] or [q.shape[2]])
    parts = [q.new_zeros(*q.shape[:2], first, v.shape[-1])]  # queries before the first key
    room = None if keep else _room(mechanism, plan, q, k, kind, history)
    whole = None if keep else q.new_empty(*q.shape[:3], v.shape[-1])
    if whole is not None:
        whole[:, :, :first] = 0
    owned = False  # the caller's sums are a value; ours can be added to in place
    for step in plan:
        keys, values = k[:, step.low : step.high].to(kind), v[:, step.low : step.high].to(kind)
        real = None if valid is None else valid[:, step.low : step.high]
        if step.folds:
            folded_phi, shown, count = fold(mechanism, keys, values, real, room)
            sums = torch.baddbmm(sums, folded_phi.transpose(-1, -2), shown, out=sums if owned else None)
            normaliser = normaliser + count
            history, owned = True, not keep
            continue
        queries = q[:, :, step.start : step.stop].to(kind)
        similar, phi = compare(mechanism, queries, keys, _diagonal(step, offset), real)
        if history:
            out = divide(*meet(mechanism, queries, similar, phi, values, sums, normaliser, room))
        else:
            out = alone(similar, values)
        out = out.unflatten(1, (q.shape[1], -1))
        if whole is None:
            parts.append(out.to(q.dtype))
        else:
            whole[:, :, step.start : step.stop] = out
    return torch.cat(parts, dim=2) if whole is None else whole, sums, normaliser


def _room(mechanism: Any, plan: list[Step], q: Tensor, k: Tensor, kind: torch.dtype, history: bool) -> Tensor | None:
    """One buffer for the features of any step, used again and again."""
    if not history and not any(step.folds for step in plan):
        return None
    most = max(step.high - step.low if step.folds else q.shape[1] * (step.stop - step.start) for step in plan)
    return torch.empty(k.shape[0] * most * mechanism.summed_length(k.shape[-1]), dtype=kind, device=k.device)


def _diagonal(step: Step, offset: int | None) -> int | None:
    """How far past a query's own row index the keys of a step are visible to it; None if all are to all."""
    if offset is None or step.start + offset >= step.high - 1:
        return None
    return step.start + offset - step.low


def fold(
    mechanism: Any, k: Tensor, v: Tensor, real: Tensor | None, room: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi of keys (M, L, K), the values (M, L, V) to sum with it, and what the keys add to the normaliser."""
    phi = mechanism.summed_features(k, room)
    if real is not None:
        v = v.masked_fill(~real[..., None], 0)
    return phi, v, mechanism.normaliser(k, phi, real)


def compare(
    mechanism: Any, q: Tensor, k: Tensor, diagonal: int | None, real: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Similarities (M, R·t, L) of queries (M, R, t, K) and one chunk of keys, 0 where hidden; and phi(q), if formed."""
    rows, phi = q.flatten(1, 2), None
    if mechanism.short:
        similar = mechanism.similarity(rows, k)
    else:
        phi = mechanism.summed_features(rows)
        similar = phi @ mechanism.summed_features(k).transpose(-1, -2)
    if diagonal is not None:
        tiled = similar.unflatten(1, q.shape[1:3])
        similar = (tiled.tril(diagonal) if tiled.requires_grad else tiled.tril_(diagonal)).flatten(1, 2)
    if real is not None:
        similar = similar.masked_fill(~real[:, None], 0)
    return similar, phi


def alone(similar: Tensor, v: Tensor) -> Tensor:
    """The output where there is nothing but one chunk: the plain formula, to the last digit."""
    total = similar.sum(-1, keepdim=True)
    return (similar / total.masked_fill(total == 0, 1)) @ v


def meet(
    mechanism: Any,
    q: Tensor,
    similar: Tensor,
    phi: Tensor | None,
    v: Tensor,
    sums: Tensor,
    normaliser: Tensor,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Numerator (M, R·t, V) and denominator (M, R·t) of queries (M, R, t, K) over one chunk and the sums before it."""
    rows = q.flatten(1, 2)
    phi = mechanism.summed_features(rows, room) if phi is None else phi
    num = torch.baddbmm(phi @ sums, similar, v)
    return num, similar.sum(-1) + mechanism.denominator(rows, phi, normaliser)


def divide(num: Tensor, den: Tensor) -> Tensor:
    """num / den, and 0 where there is nothing to divide by."""
    return num / den.masked_fill(den == 0, math.inf)[..., None]


class _Sweep(torch.autograd.Function):
    """`sweep` from no history, with a backward pass that keeps only the inputs and works a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        mechanism: Any,
        plan: list[Step],
        offset: int | None,
        valid: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Tensor,
    ) -> Tensor:
        ctx.mechanism, ctx.plan, ctx.offset, ctx.valid = mechanism, plan, offset, valid
        ctx.save_for_backward(q, k, v, *learned)
        return sweep(mechanism, plan, offset, valid, q, k, v, *_nothing(mechanism, k, v))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *learned = ctx.saved_tensors
        back = _Backward(ctx.mechanism, ctx.plan, ctx.offset, ctx.valid, q, k, v, learned, grad)
        with in_own_dtype(q):
            back.queries_forward()
            back.keys_backward()
        grads = (back.q_grad.to(q.dtype), back.k_grad.to(k.dtype), back.v_grad.to(v.dtype))
        return (None, None, None, None, *grads, *back.learned_grads)


class _Backward:
    """The two walks of the backward pass.

    With out = num / den, the gradient reaching num is g / den and the one reaching den is -(g·out) / den.
    """

    def __init__(
        self,
        mechanism: Any,
        plan: list[Step],
        offset: int | None,
        valid: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        learned: list[Tensor],
        grad: Tensor,
    ) -> None:
        self.mechanism, self.plan, self.offset, self.valid = mechanism, plan, offset, valid
        self.q, self.k, self.v, self.learned = q, k, v, learned
        self.sums, self.normaliser = _nothing(mechanism, k, v)
        kind = self.sums.dtype
        self.grad = grad.to(kind)
        self.through_sums: dict[Step, tuple[Tensor, Tensor]] = {}
        """The gradients of numerator and denominator, for each step whose queries read the sums."""
        self.q_grad, self.k_grad, self.v_grad = (torch.zeros_like(t, dtype=kind) for t in (q, k, v))
        self.learned_grads = [torch.zeros_like(t) for t in learned]

    def _leaves(self, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        kind = self.sums.dtype
        k = self.k[:, step.low : step.high].to(kind).detach().requires_grad_()
        v = self.v[:, step.low : step.high].to(kind).detach().requires_grad_()
        return k, v, None if self.valid is None else self.valid[:, step.low : step.high]

    def _pull(self, outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(outputs, inputs + self.learned, grads, allow_unused=True, materialize_grads=True)
        for total, more in zip(self.learned_grads, found[len(inputs) :], strict=True):
            total += more
        return list(found[: len(inputs)])

    def queries_forward(self) -> None:
        """Every gradient of the chunks' own part, and the queries' through the sums."""
        history = False
        for step in self.plan:
            k, v, real = self._leaves(step)
            if step.folds:
                folded_phi, shown, count = fold(self.mechanism, k.detach(), v.detach(), real)
                self.sums.baddbmm_(folded_phi.transpose(-1, -2), shown)
                self.normaliser += count
                history = True
                continue
            here = (slice(None), slice(None), slice(step.start, step.stop))
            q = self.q[here].to(k.dtype).detach().requires_grad_()
            grad = self.grad[here].flatten(1, 2)
            with torch.enable_grad():
                similar, phi = compare(self.mechanism, q, k, _diagonal(step, self.offset), real)
                if history:
                    num, den = meet(self.mechanism, q, similar, phi, v, self.sums, self.normaliser)
                else:
                    out = alone(similar, v)
            if history:
                none = den.detach() == 0
                inverse = den.detach().masked_fill(none, 1).reciprocal().masked_fill(none, 0)[..., None]
                num_grad = grad * inverse
                den_grad = -(num_grad * num.detach() * inverse).sum(-1)
                self.through_sums[step] = num_grad, den_grad
                grads = self._pull((num, den), (num_grad, den_grad), [q, k, v])
            else:
                grads = self._pull((out,), (grad,), [q, k, v])
            self.q_grad[here] += grads[0]
            self.k_grad[:, step.low : step.high] += grads[1]
            self.v_grad[:, step.low : step.high] += grads[2]

    def keys_backward(self) -> None:
        """The keys' and values' gradients through the sums, which later queries have read."""
        sums_grad, normaliser_grad = torch.zeros_like(self.sums), torch.zeros_like(self.normaliser)
        for step in reversed(self.plan):
            if step.folds:
                k, v, real = self._leaves(step)
                with torch.enable_grad():
                    phi, shown, count = fold(self.mechanism, k, v, real)
                    added = phi.transpose(-1, -2) @ shown
                grads = self._pull((added, count), (sums_grad, normaliser_grad), [k, v])
                self.k_grad[:, step.low : step.high] += grads[0]
                self.v_grad[:, step.low : step.high] += grads[1]
                continue
            if step not in self.through_sums:
                continue
            num_grad, den_grad = self.through_sums[step]
            q = self.q[:, :, step.start : step.stop].to(sums_grad.dtype).flatten(1, 2)
            phi = self.mechanism.summed_features(q)
            sums_grad += phi.transpose(-1, -2) @ num_grad
            with torch.enable_grad():
                normaliser = self.normaliser.detach().requires_grad_()
                den = self.mechanism.denominator(q, phi, normaliser)
            normaliser_grad += torch.autograd.grad(den, normaliser, den_grad)[0]


def folded(length: int, recent: int) -> int:
    """How many of `length` tokens a stream has folded: all but the newest recent/2 … recent, whatever the chunks."""
    half = recent // 2
    return half * max(0, math.ceil(length / half) - 2)


def stream(
    mechanism: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: KernelState,
    causal: bool,
    padding: Padding | None,
    tainted: Tensor | None,
    recent: int,
) -> tuple[Tensor, KernelState]:
    """Append tokens to a state and attend from them. `padding` speaks of the tokens not yet folded, new ones included.

    A key the padding hides is left out of the sums for good.
    """
    new, length = k.shape[2], state.length + k.shape[2]
    fold_to = folded(length, recent) - state.folded
    held = state.recent if state.recent.length + new <= recent else state.recent.resized(state.recent.length + new)
    held = held.append(k, v, None, tainted, recorded=q.requires_grad)
    held = replace(held, padding=both(held.padding, padding, held.length))
    valid = None if held.padding is None else held.padding.valid(held.length, k.device)
    tiled, keys, values, real = _tiled(q, held.keys, held.values, valid)
    offset = held.length - new if causal else None
    out, sums, normaliser = sweep(
        mechanism,
        steps(new, held.length, offset, fold_to),
        offset,
        real,
        tiled,
        keys,
        values,
        state.sums.flatten(0, 1),
        state.normaliser.flatten(0, 1),
        history=state.folded > 0,
    )
    shape = state.sums.shape[:2]
    longer = replace(
        state,
        sums=sums.unflatten(0, shape),
        normaliser=normaliser.unflatten(0, shape),
        folded=state.folded + fold_to,
        recent=held.resized(recent, fold_to) if fold_to else held,
        tainted=_folded_taint(state, held.tainted, valid, fold_to),
        padding=state.padding_after(held.padding, fold_to, held.length),
    )
    out = rearrange(out, "(b g) r t v -> b (g r) t v", g=shape[1])
    return poisoned(out, causal_mask if causal else None, _taint(state, held.tainted, valid, held.length)), longer


def _taint(state: KernelState, tainted: Tensor | None, valid: Tensor | None, keys: int) -> Tensor | None:
    """Real keys that came with a NaN or infinity: the sums, as if they were one key, and those not folded before."""
    if tainted is None and state.tainted is None:
        return None
    batch, groups = state.sums.shape[:2]
    before = state.tainted if state.tainted is not None else state.sums.new_zeros(batch, groups, dtype=torch.bool)
    if tainted is None:
        tainted = state.sums.new_zeros(batch, groups, keys, dtype=torch.bool)
    elif valid is not None:
        tainted = tainted & valid[:, None]
    return torch.cat([before[..., None], tainted], dim=-1)


def _folded_taint(state: KernelState, tainted: Tensor | None, valid: Tensor | None, fold_to: int) -> Tensor | None:
    if not fold_to or tainted is None:
        return state.tainted
    found = _taint(state, tainted, valid, tainted.shape[-1])
    assert found is not None
    more = found[..., : fold_to + 1].any(-1)
    return more if state.tainted is not None or bool(more.any()) else None


def sums_bytes(mechanism: Any, work: Work) -> int:
    """Bytes of the running sums and their normaliser."""
    each = mechanism.summed_length(work.qk_length) * work.value_length + mechanism.normaliser_length(work.qk_length)
    return work.batch * work.num_kv_heads * each * accumulator(work.dtype).itemsize


def cost(mechanism: Any, work: Work, recent: int, state_bytes: int) -> Cost:
    """The cost of the linear form, from the very steps that are walked.

    Fewer queries than keys are a step of a stream, unless the work says its keys are not cached: what came before is in
    the sums. Folding is spread over the tokens.
    """
    length, streamed = work.key_length, work.cached and work.query_length < work.key_length
    groups, kind = work.batch * work.num_kv_heads, accumulator(work.dtype).itemsize
    size = mechanism.summed_length(work.qk_length)
    if streamed:
        flops = work.batch * _stream_flops(mechanism, work, recent)
        moved = replace(work, key_length=work.query_length, mask=None).io_bytes + state_bytes
    else:
        known = structure(work.rule, work.query_length, length)
        spans = known.rows or ((0, length),) * work.batch
        offset = length - work.query_length
        plans = [(steps(work.query_length, b - a, offset - a if known.causal else None), b - a) for a, b in spans]
        flops = sum(_flops(mechanism, work, plan, False) for plan, keys in plans if keys > 0 < work.query_length)
        moved = work.io_bytes
    # A whole sequence folds chunk by chunk; a stream folds half of the newest keys, which its queries meet one by one.
    fold, keys = (recent // 2, recent) if streamed else (min(CHUNK, length), min(CHUNK, length))
    rows = max(work.num_heads // work.num_kv_heads * min(CHUNK, work.query_length), fold)
    return Cost(
        flops=work.num_kv_heads * flops,
        bytes=moved,
        state_bytes=state_bytes,
        activation_bytes=sums_bytes(mechanism, work) + groups * rows * (size + keys) * kind,
        form="linear",
    )


def _stream_flops(mechanism: Any, work: Work, recent: int) -> int:
    """FLOPs a key head spends on the newest tokens of a stream."""
    before, length = work.key_length - work.query_length, work.key_length
    start, end = folded(before, recent), folded(length, recent)
    causal = structure(work.rule, work.query_length, length).causal
    plan = steps(work.query_length, length - start, before - start if causal else None, end - start)
    meetings = [step for step in plan if not step.folds]
    spread = work.query_length * _fold_flops(mechanism, work) if end else 0
    return _flops(mechanism, work, meetings, end > 0) + spread


def _flops(mechanism: Any, work: Work, plan: list[Step], history: bool) -> int:
    """FLOPs a key head spends on a list of steps."""
    size, phi = mechanism.summed_length(work.qk_length), mechanism.feature_flops(work.qk_length)
    score = work.qk_length if mechanism.short else size
    per_query = 2 * size * work.value_length + mechanism.normaliser_flops(work.qk_length)[0]
    total = 0
    for step in plan:
        keys, queries = step.high - step.low, work.num_heads // work.num_kv_heads * (step.stop - step.start)
        if step.folds:
            total += keys * _fold_flops(mechanism, work)
            history = True
            continue
        total += 2 * queries * keys * (score + work.value_length) + history * queries * per_query
        total += phi * (queries * (history or not mechanism.short) + keys * (not mechanism.short))
    return total


def _fold_flops(mechanism: Any, work: Work) -> int:
    per_key = mechanism.normaliser_flops(work.qk_length)[1]
    size = mechanism.summed_length(work.qk_length)
    return int(2 * size * work.value_length + per_key + mechanism.feature_flops(work.qk_length))


PATH = Path("chunked", cannot, run)
