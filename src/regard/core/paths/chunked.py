"""Linear attention by running sums: time and memory linear in the length, in the backward pass too.

The walk over chunks is that of sums.py. The backward pass saves only the inputs and walks the same steps twice: forward
for the queries' gradients, backward for the keys' and values'. Second derivatives go through the plain walk, recorded
by autograd; so does a call with learned tensors that the mechanism does not list.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch.eager_transforms import enable_inplace_requires_grad

from regard.core.calls.call import Call, in_own_dtype, nothing
from regard.core.calls.choice import Path, never
from regard.core.eager import batched, readable, recorded, symbolic, transformed
from regard.core.masks.guard import finite, not_finite
from regard.core.masks.structure import EVERYTHING, Structure, reached
from regard.core.paths.rows import by_interval
from regard.core.paths.sums import (
    Step,
    Walk,
    alone,
    compare,
    diagonal_of,
    fold,
    meet,
    no_sums,
    steps,
    sweep,
    tiled,
    untiled,
)

if TYPE_CHECKING:
    from regard.core.families.features import FeatureMechanism


def quadratic(mechanism: "FeatureMechanism", qk_length: int, structure: Structure) -> str | None:
    """Why running sums cannot be used, which leaves the score form; None if they can."""
    if structure.rest is not None:
        return "the mask hides keys from some queries only, which running sums cannot"
    if structure.windowed:
        return "a sliding window drops keys again, which running sums cannot"
    if not mechanism.linear(qk_length):
        return f"phi has {mechanism.summed_length(qk_length):,} features"
    return None


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    mechanism: Any = call.mechanism
    if symbolic(call.queries, call.keys):
        return "a dynamic length in a trace cannot be cut into chunks"
    return quadratic(mechanism, call.qk_length, call.structure)


def run(call: Call) -> Tensor:
    """running sums in chunks of 256: time and memory linear in the length."""
    structure, offset = call.structure, call.keys - call.queries

    guarded = structure is not EVERYTHING and not finite()

    def rows(q: Tensor, k: Tensor, v: Tensor, low: int, high: int) -> Tensor:
        return _whole(call.mechanism, q, k, v, offset - low if structure.causal else None, None, guarded)

    if structure.rows is not None:
        return by_interval(call, rows)
    valid = structure.valid(call.keys, call.q.device)
    if valid is not None and not structure.causal and readable(valid):
        # Sums over few keys lose digits that the score form keeps: gather the real keys of each row first.
        rows_out = [
            _whole(call.mechanism, q[None], k[None, :, real], v[None, :, real], None, None, guarded)
            if bool(real.any())
            else nothing(call, call.queries)[:1]
            for q, k, v, real in zip(call.q, call.k, call.v, valid, strict=True)
        ]
        return torch.cat(rows_out)
    q = call.q
    if valid is not None:  # a query that sees no key must not contribute to the keys' gradients
        sees = reached(call.mask, torch.ones_like(call.k[..., 0], dtype=torch.bool), call.heads, call.queries)
        q = q.masked_fill(~sees[..., None], 0)
    return _whole(call.mechanism, q, call.k, call.v, offset if structure.causal else None, valid, guarded)


def _whole(
    mechanism: Any, q: Tensor, k: Tensor, v: Tensor, offset: int | None, valid: Tensor | None, guarded: bool
) -> Tensor:
    rows, keys, values, real = tiled(q, k, v, valid)
    bad = not_finite(keys, values) if guarded else None
    if bad is not None and real is not None:
        bad = bad & real
    walk = Walk(steps(q.shape[2], k.shape[2], offset), offset, real, bad)
    learned = mechanism.parameters()
    traced = torch.compiler.is_compiling() or transformed()
    if recorded(q, k, v, *learned) and not traced and not mechanism.captured(q.shape[3]):
        out = _Sweep.apply(mechanism, walk, rows, keys, values, *learned)  # type: ignore[no-untyped-call]
    else:
        out = _sweep(mechanism, walk, rows, keys, values)
    return untiled(out, k)


def _sweep(mechanism: Any, walk: Walk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`sweep` from no history, NaN for the queries that see a bad key."""
    out, spoiled = sweep(mechanism, walk, q, k, v, *no_sums(mechanism, k, v))[0], walk.spoiled(q.shape[2])
    if spoiled is None:
        return out
    if out.requires_grad or transformed() or torch.compiler.is_compiling():
        return torch.where(spoiled[:, None, :, None], math.nan, out)  # takes nine times as long as what follows
    return out.add_(out.new_zeros(spoiled.shape).masked_fill_(spoiled, math.nan)[:, None, :, None])


class _Sweep(torch.autograd.Function):
    """`_sweep`, with a backward pass that saves only the inputs and works chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        mechanism: Any,
        walk: Walk,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Tensor,
    ) -> Tensor:
        ctx.mechanism, ctx.walk = mechanism, walk
        ctx.save_for_backward(q, k, v, *learned)
        return _sweep(mechanism, walk, q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if batched(grad):
            return (None, None, *_plain_gradients(ctx.mechanism, ctx.walk, grad, *ctx.saved_tensors))
        grads = _Gradients.apply(ctx.mechanism, ctx.walk, grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return (None, None, *grads)


def _plain_gradients(mechanism: Any, walk: Walk, grad: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """The gradients of `_Sweep` by plain operators, which have batching rules: for several gradients in one backward
    pass."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "chunked: second derivatives of batched gradients are not implemented; compute with path='reference'"
        )
    # The inputs are plain tensors; only the gradient is batched. They are detached, so that the graph they came from is
    # not differentiated again.
    with torch._C._DisableFuncTorch(), enable_inplace_requires_grad(True), torch.enable_grad(), in_own_dtype(grad):
        inputs = [*(tensor.detach().requires_grad_() for tensor in saved[:3]), *saved[3:]]
        out = _sweep(mechanism, walk, *inputs[:3])
    return torch.autograd.grad(out, inputs, grad, allow_unused=True, materialize_grads=True)


class _Gradients(torch.autograd.Function):
    """The gradients of `_Sweep`, as a function that can itself be differentiated.

    `once_differentiable` is not enough: autograd skips the error it leaves in the graph if only some inputs need
    gradients, and it leaves none if the incoming gradient is a constant.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mechanism: Any,
        walk: Walk,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.mechanism, ctx.walk = mechanism, walk
        ctx.save_for_backward(grad, q, k, v, *learned)
        back = _Backward(mechanism, walk, q, k, v, list(learned), grad)
        with in_own_dtype(q):
            back.queries_forward()
            back.keys_backward()
        grads = (back.q_grad.to(q.dtype), back.k_grad.to(k.dtype), back.v_grad.to(v.dtype))
        return (*grads, *back.learned_grads)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("chunked: third derivatives are not implemented; compute with path='reference'")
        # Detached, so that the graph they came from, perhaps of the same mechanism, is not differentiated again.
        grad, q, k, v = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[:4])
        inputs = [q, k, v, *ctx.saved_tensors[4:]]
        with torch.enable_grad(), in_own_dtype(q):
            out = _sweep(ctx.mechanism, ctx.walk, q, k, v)
            first = torch.autograd.grad(out, inputs, grad, create_graph=True, allow_unused=True, materialize_grads=True)
            pairs = [pair for pair in zip(first, directions, strict=True) if pair[0].requires_grad]
            second = torch.autograd.grad(
                [grad for grad, _ in pairs],
                [grad, *inputs],
                [direction for _, direction in pairs],
                allow_unused=True,
            )
        return (None, None, *second)


class _Backward:
    """The two walks of the backward pass.

    With out = num / den, the gradient reaching num is g / den and the one reaching den is -(g·out) / den.
    """

    def __init__(
        self,
        mechanism: Any,
        walk: Walk,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        learned: list[Tensor],
        grad: Tensor,
    ) -> None:
        self.mechanism, self.walk = mechanism, walk
        self.q, self.k, self.v, self.learned = q, k, v, learned
        self.sums, self.normaliser = no_sums(mechanism, k, v)
        kind = self.sums.dtype
        spoiled, self.grad = walk.spoiled(q.shape[2]), grad.to(kind)
        if spoiled is not None:  # a NaN output has no gradient
            self.grad = torch.where(spoiled[:, None, :, None], 0, self.grad)
        self.through_sums: dict[Step, tuple[Tensor, Tensor]] = {}
        """The gradients of numerator and denominator, for each step whose queries read the sums."""
        self.q_grad, self.k_grad, self.v_grad = (torch.zeros_like(t, dtype=kind) for t in (q, k, v))
        self.learned_grads = [torch.zeros_like(t) for t in learned]

    def _leaves(self, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v, real = self.walk.chunk(step, self.k, self.v, derived=True)
        kind = self.sums.dtype
        return k.to(kind).detach().requires_grad_(), v.to(kind).detach().requires_grad_(), real

    def _pull(self, outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
        grads_in = torch.autograd.grad(outputs, inputs + self.learned, grads, allow_unused=True, materialize_grads=True)
        for total, more in zip(self.learned_grads, grads_in[len(inputs) :], strict=True):
            total += more
        return list(grads_in[: len(inputs)])

    def queries_forward(self) -> None:
        """All gradients within chunks, and the queries' gradients through the sums."""
        history = False
        for step in self.walk.plan:
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
                similar, phi = compare(self.mechanism, q, k, diagonal_of(step, self.walk.offset), real)
                if history:
                    num, den = meet(self.mechanism, q.flatten(1, 2), similar, phi, v, self.sums, self.normaliser)
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
        for step in reversed(self.walk.plan):
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


PATH = Path("chunked", cannot, run, never)
