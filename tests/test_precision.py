"""The dtype a formula computes in: the widest of the inputs and the mechanism's tensors, and never less."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import regard as rg
from regard.core.laws.case import in_dtype

K = 8


def tensor(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@dataclass(frozen=True, kw_only=True)
class Heated(rg.ScoreMechanism):
    heat: nn.Parameter = field(default_factory=lambda: nn.Parameter(tensor(K, K)))

    def score(self, q, k):
        return q @ self.heat @ k.transpose(-1, -2)


@dataclass(frozen=True, kw_only=True)
class Metric(rg.Mechanism):
    metric: nn.Module = field(default_factory=lambda: nn.Sequential(nn.Linear(K, K), nn.Tanh(), nn.Linear(K, K)))

    def similarity(self, q, k):
        return torch.sigmoid(self.metric(q) @ self.metric(k).transpose(-1, -2))


@dataclass(frozen=True, kw_only=True)
class Projected(rg.FeatureMechanism):
    W: nn.Parameter = field(default_factory=lambda: nn.Parameter(tensor(K, 6)))

    def features(self, x):
        return nn.functional.softplus(x @ self.W)

    def feature_length(self, qk_length):
        return 6


MECHANISMS = {
    "a score": Heated,
    "a similarity": Metric,
    "features": Projected,
    "a feature map": lambda: rg.Kernel(feature_map=nn.Sequential(nn.Linear(K, 6), nn.Softplus())),
    "a gate": lambda: rg.Gated(gate=nn.Sequential(nn.Linear(K, K), nn.LogSigmoid())),
    "a rate": lambda: rg.Delta(rate=nn.Sequential(nn.Linear(K, 1), nn.Sigmoid())),
}


def results(mechanism, q):
    """What a mechanism gives for these tokens: whole on every path, streamed, and its weights."""
    state = mechanism.start(batch=1, num_kv_heads=2, qk_length=K, value_length=K, dtype=q.dtype)
    first, state = mechanism.extend(q[:, :, :150], q[:, :, :150], q[:, :, :150], state, rg.causal)
    rest, state = mechanism.extend(q[:, :, 150:], q[:, :, 150:], q[:, :, 150:], state, rg.causal)
    return {
        "whole": rg.attend(q, q, q, mechanism, rg.causal),
        "plain": rg.attend(q, q, q, mechanism, rg.causal, path="reference"),
        "streamed": torch.cat([first, rest], 2),
        "weights": rg.weights(q, q, mechanism, rg.causal),
    }


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
def test_narrow_tensors_are_cast_up_to_the_inputs_and_get_their_gradients(name, grad):
    torch.manual_seed(0)
    narrow = MECHANISMS[name]()
    wide, q = in_dtype(narrow, torch.float64), torch.randn(1, 2, 160, K, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        for (what, out), exact in zip(results(narrow, q).items(), results(wide, q).values(), strict=True):
            assert out.dtype == torch.float64
            assert (out - exact).abs().max() < 1e-12, what
            if grad:
                ours, theirs = (
                    torch.autograd.grad(x.square().sum(), m.parameters()) for x, m in ((out, narrow), (exact, wide))
                )
                for actual, wanted in zip(ours, theirs, strict=True):
                    assert actual.dtype == torch.float32
                    torch.testing.assert_close(actual, wanted.float(), rtol=1e-5, atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Mixed(rg.ScoreMechanism):
    table: torch.Tensor
    heat: torch.Tensor

    def score(self, q, k):
        return (q @ self.heat @ k.transpose(-1, -2)) * self.table


@pytest.mark.parametrize("kinds", [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_widest_of_several_tensors_counts_in_whatever_order_they_are(kinds, dtype):
    mechanism = Mixed(table=torch.ones(1, dtype=kinds[0]), heat=torch.eye(K, dtype=kinds[1]))
    q = (torch.randn(1, 2, 20, K) * 200).to(dtype)  # scores beyond float16's range
    out, exact = rg.attend(q, q, q, mechanism, rg.causal), rg.attend(q, q, q, rg.Softmax(beta=1.0), rg.causal)
    torch.testing.assert_close(out, exact)
    layer = rg.MultiHeadAttention(16, 2, mechanism=mechanism)
    with rg.trace(layer, keep=("scores",)) as trace:
        layer(torch.randn(1, 4, 16))
    assert trace.layers[0].scores.dtype == torch.float32
    assert rg.cost(mechanism, rg.Work(qk_length=K, key_length=64)).flops > 0
    assert rg.check(mechanism, qk_length=K, laws=["weights"], masks=["causal"], dtypes=["float32"], examples=1).ok


def test_the_cast_is_part_of_a_compiled_call():
    mechanism, q = MECHANISMS["a feature map"](), torch.randn(1, 2, 9, K, dtype=torch.float64)
    compiled = torch.compile(lambda q: rg.attend(q, q, q, mechanism, rg.causal), fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(q), rg.attend(q, q, q, mechanism, rg.causal), rtol=0, atol=1e-12)
