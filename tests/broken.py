"""One deliberately broken mechanism for each law. The name of each says what is wrong with it."""

from dataclasses import dataclass, field, replace
from typing import Any

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

    def sdpa_scale(self, qk_length):
        return None

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
        found = compare(rearrange(q, "b (r g) t k -> b g (r t) k", g=k.shape[1]), k)
        return rearrange(found, "b g (r t) s -> b (r g) t s", r=q.shape[1] // k.shape[1])


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
