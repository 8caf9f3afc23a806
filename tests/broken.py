"""One deliberately broken mechanism for each law. The name of each says what is wrong with it."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import nn

import regard as rg
from regard.core.calls.call import Call
from regard.core.calls.choice import Path
from regard.core.paths import reference


@dataclass(frozen=True, kw_only=True)
class Similar(rg.Mechanism):
    """A sound mechanism to break: positive, bounded similarities."""

    def similarity(self, q, k):
        return torch.sigmoid(q @ k.transpose(-1, -2))


class ForgetsItsFirstToken(rg.Softmax):
    def extend(self, q, k, v, state, mask=None, *, bias=None):
        if state.length == 1:
            state.buffer.values[:, :, 0] = 0
        return super().extend(q, k, v, state, mask, bias=bias)


class WritesIntoForks(rg.Softmax):
    def extend(self, q, k, v, state, mask=None, *, bias=None):
        state.buffer.used = state.length  # a fork's history is overwritten instead of copied
        return super().extend(q, k, v, state, mask, bias=bias)


class LooksAtTheWholeBatch(Similar):
    def similarity(self, q, k):
        return super().similarity(q - q.mean(0, keepdim=True), k)


class CountsPaddingIn(Similar):
    def similarity(self, q, k):
        return super().similarity(q, k) ** (1 + k.shape[-2] / 8)


class WeighsNegatively(Similar):
    def similarity(self, q, k):
        return super().similarity(q, k) - 0.3


class ShowsOtherWeights(Similar):
    def choose_weights(self, call, rows, heads):
        return super().choose_weights(call, rows, heads).sqrt()


class AveragesWhenBlind(rg.Softmax):
    """The finite sentinel: -1e9 instead of "not visible" makes an empty row the mean of all values."""

    def weigh(self, q, k, visible, bias=None):
        scores = self.grouped(self.score, q, k)
        return torch.softmax(scores if visible is None else scores.masked_fill(~visible, -1e9), dim=-1)

    def paths(self):
        return (reference.PATH,)


class CentresByMaskedKeys(Similar):
    def similarity(self, q, k):
        return super().similarity(q, k - k.mean(-2, keepdim=True))


class PrefersEvenPositions(Similar):
    def similarity(self, q, k):
        return super().similarity(q, k) * (1 + torch.arange(k.shape[-2]) % 2)


class ForgetsAGradient(Similar):
    def similarity(self, q, k):
        return super().similarity(q.detach(), k)


class Overflows(Similar):
    def similarity(self, q, k):
        return torch.exp(q @ k.transpose(-1, -2))


class TilesItsHeads(Similar):
    def grouped(self, compare, q, k):
        scores = compare(rearrange(q, "b (r g) t k -> b g (r t) k", g=k.shape[1]), k)
        return rearrange(scores, "b g (r t) s -> b (r g) t s", r=q.shape[1] // k.shape[1])


class HasAWrongPath(Similar):
    def paths(self):
        return (reference.PATH, Path("nearly", reference.cannot, lambda call: reference.run(call) * 1.001))


@dataclass(frozen=True, kw_only=True)
class ForgetsWhatItLearns(rg.Mechanism):
    """One of its paths computes with a copy of its parameter."""

    steepness: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.ones(())))

    def similarity(self, q, k):
        return torch.sigmoid(self.steepness * (q @ k.transpose(-1, -2)))

    def paths(self):
        def run(call):
            frozen = replace(self, steepness=self.steepness.detach())
            return reference.run(Call(frozen, call.q, call.k, call.v, call.mask))

        return (Path("forgetful", reference.cannot, run), reference.PATH)


class _OnceDerived(torch.autograd.Function):
    """Gradients that autograd takes for constants."""

    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return reference.run(Call(call.mechanism, *tensors, call.mask))

    @staticmethod
    def backward(ctx, grad):
        tensors = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = reference.run(Call(ctx.call.mechanism, *tensors, ctx.call.mask))
        return (None, *torch.autograd.grad(out, tensors, grad.detach()))


class HasNoCurvature(Similar):
    def paths(self):
        flat = Path("flat", reference.cannot, lambda call: _OnceDerived.apply(call, call.q, call.k, call.v))
        return (flat, reference.PATH)


class Undercounts(Similar):
    def cost(self, work):
        true = super().cost(work)
        return replace(true, flops=true.flops // 2)


@dataclass(frozen=True, eq=False, kw_only=True)
class KeptState(rg.FixedState):
    """Keys and values, or their running sums: a state of one's own that grows, or does not."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Averages(rg.UnnormalisedMechanism):
    """A sound mechanism with its own state to break: the sum of all values so far, weighed by their keys' lengths. Its
    state keeps every token if it `grows`, and otherwise the sums alone."""

    ordered: ClassVar[bool] = True
    excuses: ClassVar[dict[str, str]] = {**rg.UnnormalisedMechanism.excuses, "permuted": "its order counts"}
    grows: bool

    def weigh(self, q, k, visible, bias=None):
        place = torch.arange(k.shape[2])
        seen = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] >= place
        seen = seen if visible is None else seen & visible
        kind = torch.promote_types(k.dtype, torch.float32)
        sizes = k.to(kind).square().sum(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
        return torch.where(seen, sizes[:, :, None], 0)

    def state_type(self, qk_length):
        return KeptState

    def empty_state(self, sizes, capacity):
        tokens = 0 if self.grows else 1
        keys, values = sizes.zeros(tokens, 1), sizes.zeros(tokens, sizes.value_length)
        return KeptState(mechanism=self, sizes=sizes, keys=keys, values=values)

    def advance(self, q, k, v, state, rule, bias):
        new = state.receive(q, k, v, rule)
        keys, values = new.k.to(state.keys.dtype).square().sum(-1, keepdim=True), new.v.to(state.values.dtype)
        keys, values = torch.cat([new.state.keys, keys], 2), torch.cat([new.state.values, values], 2)
        if not self.grows:  # the first is what came before
            values = (keys * values).cumsum(2) + (1 - keys[:, :, :1]) * values[:, :, :1]
            keys = torch.ones_like(keys)
        count = k.shape[2]
        ahead = torch.ones(count, keys.shape[2], dtype=keys.dtype).tril(keys.shape[2] - count)
        out = ahead @ (keys * values) if self.grows else values[:, :, values.shape[2] - count :]
        kept = slice(None) if self.grows else slice(-1, None)
        out = out.repeat_interleave(q.shape[1] // k.shape[1], 1).to(q.dtype)
        return new.attended(out, keys=keys[:, :, kept], values=values[:, :, kept])


@dataclass(frozen=True, kw_only=True)
class StatesNoSteps(Averages):
    """The cost of its formula, also for a decode step, which its state makes another."""

    def cost(self, work):
        return super().cost(replace(work, cached=False))


@dataclass(frozen=True, kw_only=True)
class HidesItsGrowth(Averages):
    """The bytes of its state as it starts."""

    def cost(self, work):
        return replace(
            super().cost(work), state_bytes=super().cost(replace(work, key_length=0, query_length=0)).state_bytes
        )


class RefusesWithoutAReason(Similar):
    def refuses(self, call: Any) -> str | None:
        return None if call.bias is None else "no"


BROKEN: dict[str, rg.Mechanism] = {
    "streamed": ForgetsItsFirstToken(),
    "forked": WritesIntoForks(),
    "batched": LooksAtTheWholeBatch(),
    "padded": CountsPaddingIn(),
    "weights": ShowsOtherWeights(),
    "normalised": WeighsNegatively(),
    "empty": AveragesWhenBlind(),
    "leakless": CentresByMaskedKeys(),
    "permuted": PrefersEvenPositions(),
    "gradients": ForgetsAGradient(),
    "extremes": Overflows(),
    "groups": TilesItsHeads(),
    "paths": HasAWrongPath(),
    "learned": ForgetsWhatItLearns(),
    "curved": HasNoCurvature(),
    "cost": Undercounts(),
    "refusals": RefusesWithoutAReason(),
}
