"""Compiled attention is eager attention: outputs, gradients, and what a NaN in a masked place may do (nothing)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import regard as rg
from regard.core.calls.choice import refusal
from regard.core.mechanisms import REGISTRY

B, H, G, T, K = 2, 4, 2, 9, 5
MECHANISMS = {
    "softmax": rg.Softmax(),
    "quadratic": rg.Quadratic(),
    "elu": rg.Elu(),
    "argmax": rg.Argmax(),
    "channel": rg.Channel(),
    "gated": rg.Gated(),
}
MASKS = {"none": None, "causal": rg.causal, "padding": rg.padding([T, 4]), "window": rg.window(before=2)}
CASES = [
    (name, mask)
    for name, mechanism in MECHANISMS.items()
    for mask, rule in MASKS.items()
    if refusal(mechanism, rule) is None
]


@pytest.fixture(autouse=True)
def as_users_compile() -> Iterator[None]:
    """The annotations' checks off, as they are for users, and nothing compiled before."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    jaxtyping.config.update("jaxtyping_disable", False)


def inputs(length: int = T) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, n, length, K, generator=generator, dtype=torch.float64) for n in (H, G, G))


def compiled(mechanism: rg.Mechanism, mask: rg.Mask | None, fullgraph: bool = False) -> object:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attend(q, k, v, mechanism, mask)

    return torch.compile(call, backend="aot_eager", fullgraph=fullgraph, dynamic=False)


def run(attend: object, tensors: tuple[Tensor, ...], to: Tensor | None = None) -> list[Tensor]:
    """The output and the three gradients."""
    leaves = tuple(t.clone().requires_grad_() for t in tensors)
    out = attend(*leaves)
    if to is None:
        to = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    grads = torch.autograd.grad(out, leaves, to, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def agree(actual: list[Tensor], expected: list[Tensor]) -> None:
    for what, tensor, wanted in zip(("the output", "q", "k", "v"), actual, expected, strict=True):
        assert (tensor - wanted).abs().max() <= 1e-12, what


def eager(mechanism: rg.Mechanism, mask: rg.Mask | None) -> object:
    return lambda q, k, v: rg.attend(q, k, v, mechanism, mask, path="reference")


ONE_GRAPH = [("softmax", "none"), *((name, "causal") for name in MECHANISMS if name != "channel")]
"""Where nothing falls back to Python."""


@pytest.mark.parametrize(("name", "mask"), CASES)
def test_compiled_is_eager(name: str, mask: str) -> None:
    mechanism, rule = MECHANISMS[name], MASKS[mask]
    attend = compiled(mechanism, rule, fullgraph=(name, mask) in ONE_GRAPH)
    agree(run(attend, inputs()), run(eager(mechanism, rule), inputs()))


@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Softmax(softcap=5.0), rg.Quadratic(), rg.Elu()], ids=repr)
def test_compiled_under_autocast_computes_in_the_dtype_of_its_inputs(mechanism: rg.Mechanism) -> None:
    tensors = tuple(t.float() for t in inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which would round by some 1e-2
        out = compiled(mechanism, rg.causal, fullgraph=True)(*tensors)
    assert (out - rg.attend(*tensors, mechanism, rg.causal)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["softmax", "quadratic"])
@torch.no_grad()
def test_a_streams_step_is_one_graph(name: str) -> None:
    """Also where a kernel folds its older tokens into the sums."""
    mechanism, length = MECHANISMS[name], 200

    def step(q: Tensor, k: Tensor, v: Tensor, state: object) -> tuple[Tensor, object]:
        return mechanism.extend(q, k, v, state, mask=rg.causal)

    traced = torch.compile(step, backend="aot_eager", fullgraph=True)
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=K, capacity=length, dtype=torch.float64)
    q, k, v = inputs(length)
    outs = []
    for low in range(0, length, 100):
        here = slice(low, low + 100)
        out, state = traced(q[:, :, here], k[:, :, here], v[:, :, here], state)
        outs.append(out)
    expected = rg.attend(q, k, v, mechanism, rg.causal, path="reference")
    assert (torch.cat(outs, 2) - expected).abs().max() <= 1e-12


@dataclass(frozen=True, kw_only=True)
class Sigmoid(rg.Mechanism):
    """A user's own."""

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).sigmoid()


@dataclass(frozen=True, kw_only=True)
class Tanh(rg.ScoreMechanism):
    """A user's own, by its scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).tanh()


STREAMING = [*(mechanism for mechanism in REGISTRY.values() if mechanism.streams(K) is None), Sigmoid(), Tanh()]
PADDED = {"no": (0, 0), "left": (2, 0), "alike": (2, 2)}


@pytest.mark.parametrize(
    ("mechanism", "padded"),
    [(mechanism, "left") for mechanism in STREAMING]
    + [(rg.Softmax(softcap=30.0), "no"), (Sigmoid(), "no"), (rg.Softmax(), "alike")],
    ids=str,
)
@torch.no_grad()
def test_steps_of_a_stream_share_two_graphs(mechanism: rg.Mechanism, padded: str) -> None:
    """One for the first step, one for all lengths of history, also where padding grows with it."""
    q, k, v = inputs()
    mask = rg.causal & rg.padding(valid=torch.arange(T) >= torch.tensor(PADDED[padded])[:, None])
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=K, capacity=64, dtype=torch.float64)
    start = rg.causal & rg.padding(valid=torch.arange(4) >= torch.tensor(PADDED[padded])[:, None])
    _, state = mechanism.extend(q[:, :, :4], k[:, :, :4], v[:, :, :4], state, mask=start)

    def step(q: Tensor, k: Tensor, v: Tensor, state: object) -> tuple[Tensor, object]:
        return mechanism.extend(q, k, v, state, mask=rg.causal)

    graphs, outs = CompileCounter(), []
    traced = torch.compile(step, backend=graphs, fullgraph=True)
    for place in range(4, T):
        here = slice(place, place + 1)
        out, state = traced(q[:, :, here], k[:, :, here], v[:, :, here], state)
        outs.append(out)
    assert graphs.frame_count <= 2
    expected = rg.attend(q, k, v, mechanism, mask, path="reference")[:, :, 4:]
    assert (torch.cat(outs, 2) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("dynamic", [None, True])
def test_random_features_are_a_constant_of_one_graph(dynamic: bool | None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attend(q, k, v, rg.RandomFeatures(n=16), rg.causal)

    graphs = CompileCounter()
    traced, tensors = torch.compile(attend, backend=graphs, fullgraph=True, dynamic=dynamic), inputs()
    agree(run(traced, tensors), run(attend, tensors))
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("mechanism", "rule", "dynamic"),
    [
        (rg.Softmax(), rg.causal & rg.window(before=5), True),
        (rg.Softmax(), rg.causal & (rg.window(before=2) | rg.global_tokens(2)), None),
        (rg.Retention(), rg.causal, None),  # took minutes at 40 tokens
    ],
    ids=repr,
)
@torch.no_grad()
def test_a_compiled_call_at_another_length(mechanism: rg.Mechanism, rule: rg.Mask, dynamic: bool | None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attend(q, k, v, mechanism, rule)

    traced = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)
    for length in (30, 40):
        tensors = inputs(length)
        assert (traced(*tensors) - eager(mechanism, rule)(*tensors)).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["softmax", "quadratic"])
def test_a_compiled_step_goes_on_from_a_state_made_in_inference_mode(name: str) -> None:
    mechanism, (q, k, v) = MECHANISMS[name], inputs()

    def step(low: int, high: int, state: object) -> tuple[Tensor, object]:
        return mechanism.extend(q[:, :, low:high], k[:, :, low:high], v[:, :, low:high], state, mask=rg.causal)

    with torch.inference_mode():
        state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=K, capacity=T, dtype=torch.float64)
        _, state = step(0, 5, state)
    with torch.no_grad():
        out, _ = torch.compile(step, backend="aot_eager")(5, T, state)
    expected = rg.attend(q, k, v, mechanism, rg.causal, path="reference")[:, :, 5:]
    assert (out - expected).abs().max() <= 1e-12


def test_one_graph_over_several_chunks() -> None:
    """Longer than a chunk, so that sums are kept and read."""
    rule, mechanism, tensors = rg.causal, rg.Quadratic(), inputs(300)
    agree(run(compiled(mechanism, rule, fullgraph=True), tensors), run(eager(mechanism, rule), tensors))


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(("name", "mask"), [("softmax", "padding"), ("quadratic", "causal"), ("elu", "padding")])
def test_a_bad_number_in_a_masked_place_changes_nothing_compiled(name: str, mask: str, poison: float) -> None:
    """A graph cannot look at the numbers, so it must be right for clean and for bad ones, one after the other."""
    mechanism, rule, (q, k, v) = MECHANISMS[name], MASKS[mask], inputs()
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[1, :, 6:], dirty_v[1, :, 6:] = poison, poison
    attend = compiled(mechanism, rule)
    # Only the queries that do not see the bad keys are asked for their gradients.
    to = torch.ones(B, H, T, K, dtype=torch.float64)
    if mask == "causal":
        to[1, :, 6:] = 0
    clean = run(attend, (q, k, v), to)
    dirty = run(attend, (q, dirty_k, dirty_v), to)
    if mask == "causal":
        assert dirty[0][1, :, 6:].isnan().all(), "a visible bad number is hidden"
        clean[0][1, :, 6:] = dirty[0][1, :, 6:] = 0
    agree(dirty, clean)
    assert all((grad[1, :, 6:] == 0).all() for grad in dirty[2:])


def test_a_compiled_empty_row_is_zero() -> None:
    for rule in (rg.padding([T, 0]), rg.padding([T, 0]) & rg.window(before=1)):
        out, *grads = run(compiled(rg.Softmax(), rule), inputs())
        assert (out[1] == 0).all()
        assert all((grad[1] == 0).all() for grad in grads)
