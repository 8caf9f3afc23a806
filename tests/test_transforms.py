"""Attention inside what PyTorch does with functions: threads, compilation, and transforms of whole functions."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from regard.core.calls.choice import refusal
from regard.core.masks.guard import all_finite, finite
from regard.core.mechanisms import REGISTRY
from regard.core.paths import gpu
from regard.core.tensors import weighs_tokens
from regard.models.vision import local
from transformed import B, G, H, K, T, close, inputs, spoiled


@contextmanager
def another_thread_takes_all_for_finite() -> Iterator[None]:
    inside, done = threading.Event(), threading.Event()

    def trust() -> None:
        with all_finite():
            inside.set()
            done.wait()

    thread = threading.Thread(target=trust)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_all_finite_is_a_policy_of_its_own_thread(compiled: bool) -> None:
    """A training thread trusts its numbers; a thread that serves beside it must not."""
    q, k, v = inputs()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attend(q, k, v, mask=rg.causal)

    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    expected = attend(q, k, v)[:, :, :-1]
    with all_finite():  # where there is a graph, one is made for this policy
        assert torch.equal(call(q, k, v)[:, :, :-1], expected)
    with another_thread_takes_all_for_finite():
        out = call(q, spoiled(k), spoiled(v))
    assert torch.equal(out[:, :, :-1], expected)
    assert out[:, :, -1].isnan().all()


@pytest.mark.parametrize("name", ["softmax", "elu", "gated"])
def test_all_finite_is_a_policy_of_its_own_task(name: str) -> None:
    """A task that trusts its numbers, and waits, leaves the guard to the other tasks of the event loop."""
    q, k, v = inputs()
    expected = rg.attend(q, k, v, REGISTRY[name], rg.causal, path="reference")[:, :, :-1]
    inside, done = asyncio.Event(), asyncio.Event()

    async def trust() -> None:
        with all_finite():
            inside.set()
            await done.wait()
            assert finite()
        assert not finite()

    async def serve() -> None:
        await inside.wait()
        with all_finite():  # entered and left by one task, while another is inside
            pass
        out = rg.attend(q, spoiled(k), spoiled(v), REGISTRY[name], rg.causal, path="reference")
        done.set()
        assert close(out[:, :, :-1], expected)
        assert out[:, :, -1].isnan().all()

    async def both() -> None:
        await asyncio.gather(trust(), serve())

    asyncio.run(both())


LEFT = torch.arange(T) >= torch.tensor([[2], [0]])
HOLES = torch.arange(T) % 3 > torch.tensor([[-1], [0]])
MASKS: dict[str, Callable[[], rg.Mask | None]] = {
    "none": lambda: None,
    "causal": lambda: rg.causal,
    "right": lambda: rg.padding([T, 4]),
    "causal left": lambda: rg.causal & rg.padding(valid=LEFT),
    "causal holes": lambda: rg.causal & rg.padding(valid=HOLES),
    "window": lambda: rg.window(before=2),
    "table": lambda: rg.dense(torch.arange(T)[:, None] >= torch.arange(T)),
}
CASES = [(name, mask) for name in REGISTRY for mask in MASKS if refusal(REGISTRY[name], MASKS[mask]()) is None]
every_case = pytest.mark.parametrize(("name", "mask"), CASES, ids=lambda name: name)
every_mechanism = pytest.mark.parametrize("name", REGISTRY)


def attend(name: str, mask: str, path: str | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    rule = MASKS[mask]()
    return lambda q, k, v: rg.attend(q, k, v, REGISTRY[name], rule, path=path)


def hides_the_last(mask: str) -> bool:
    """Whether some query does not see the last key."""
    return mask != "none"


@every_case
def test_vmap_over_any_input_is_the_loop(name: str, mask: str) -> None:
    """Also where a hidden key is NaN: what reads no numbers must be safe for any."""
    q, k, v = inputs()
    stacked = [torch.stack([t, t.flip(2) / 2, t * 0 - 1]) for t in (q, k, v)]
    stacked[1][1], stacked[2][1] = spoiled(stacked[1][1]), spoiled(stacked[2][1])
    call, plain = attend(name, mask), attend(name, mask, path="reference")
    for over in ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (None, 0, 0)):
        arguments = [many if axis == 0 else single for many, single, axis in zip(stacked, (q, k, v), over, strict=True)]
        mapped = torch.vmap(call, in_dims=over)(*arguments)
        for row in range(3):
            expected = plain(*(t[row] if axis == 0 else t for t, axis in zip(arguments, over, strict=True)))
            if row == 1 and 0 in over[1:]:  # the NaN shows where it is seen
                seen = expected.isnan()
                assert mapped[row][seen].isnan().all(), over
                mapped[row][seen], expected[seen] = 0, 0
            assert close(mapped[row], expected), over


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch.func.jvp's own
@every_case
def test_functional_gradients_are_autograds(name: str, mask: str) -> None:
    tensors, plain = inputs(), attend(name, mask, path="reference")
    to = torch.randn(B, H, T, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attend(name, mask)(q, k, v) * to).sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(plain(*leaves), leaves, to, allow_unused=True, materialize_grads=True)
    assert all(close(actual, wanted) for actual, wanted in zip(gradients, expected, strict=True))
    _, tangent = torch.func.jvp(attend(name, mask), tensors, tuple(expected))
    # Forward and backward derivatives are one linear map, read from its two ends.
    assert close((tangent * to).sum(), sum(gradient.square().sum() for gradient in expected))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's kernel, batched by a loop
@pytest.mark.parametrize("queries", [T - 2, T], ids=["T<S", "T=S"])
@pytest.mark.parametrize("name", [name for name in REGISTRY if weighs_tokens(REGISTRY[name], K)])
def test_a_backward_pass_of_many_gradients_is_the_loop(name: str, queries: int) -> None:
    """`is_grads_batched`, which vectorised Jacobians use, and torch.vmap over the backward pass."""
    q, k, v = inputs()
    leaves = [t.requires_grad_() for t in (q[:, :, :queries], k, v)]
    generator = torch.Generator().manual_seed(1)
    many = torch.randn(3, B, H, queries, K, generator=generator, dtype=torch.float64)
    zeros = [torch.zeros_like(t).expand(3, *t.shape) for t in leaves]
    for mask in ("none", "causal", "causal left"):
        out = attend(name, mask)(*leaves)

        def pull(grad: Tensor, batched: bool = False, out: Tensor = out) -> tuple[Tensor, ...]:
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": not batched}
            grads = torch.autograd.grad(out, leaves, grad, is_grads_batched=batched, **options)
            return tuple(t if grad is None else grad for t, grad in zip(zeros, grads, strict=True))

        loop = [torch.stack(grads) for grads in zip(*(pull(grad) for grad in many), strict=True)]
        assert all(map(close, pull(many, batched=True), loop)), mask
        if name != "argmax":  # its gradients of queries and keys do not exist, which torch.vmap refuses
            assert all(map(close, torch.vmap(pull)(many), loop)), mask


@pytest.mark.parametrize("name", ["quadratic", "elu"])
def test_batched_gradients_through_running_sums(name: str) -> None:
    """More keys than a chunk has; a second derivative of batched gradients is refused, not wrong."""
    leaves = [t.requires_grad_() for t in inputs(300)]
    out = rg.attend(*leaves, REGISTRY[name], rg.causal)
    many = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loop = [torch.autograd.grad(out, leaves, grad, retain_graph=True) for grad in many]
    batched = torch.autograd.grad(out, leaves, many, is_grads_batched=True, retain_graph=True)
    assert all(close(grad, torch.stack(single)) for grad, single in zip(batched, zip(*loop, strict=True), strict=True))
    with pytest.raises(NotImplementedError, match=r"second derivatives of batched gradients .* path='reference'"):
        torch.autograd.grad(out, leaves, many, is_grads_batched=True, create_graph=True)


@every_case
def test_tensors_without_numbers_have_the_right_shape(name: str, mask: str) -> None:
    expected = attend(name, mask)(*inputs())
    out = attend(name, mask)(*(t.to("meta") for t in inputs()))
    assert (out.shape, out.dtype, out.device.type) == (expected.shape, expected.dtype, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = attend(name, mask)(*(mode.from_tensor(t) for t in inputs()))
    assert (fake.shape, fake.dtype, fake.device.type) == (expected.shape, expected.dtype, "cpu")
    assert close(attend(name, mask)(*inputs()), expected), "something fake was kept"


@pytest.mark.parametrize("name", [name for name, mechanism in REGISTRY.items() if mechanism.streams(K) is None])
def test_a_stream_of_tensors_without_numbers(name: str) -> None:
    mechanism, (q, k, v) = REGISTRY[name], (t.to("meta") for t in inputs(200))
    sizes = {"batch": B, "num_kv_heads": G, "qk_length": K, "value_length": K, "capacity": 200}
    state = mechanism.start(**sizes, dtype=torch.float64, device="meta")
    for low, high in ((0, 150), (150, 151), (151, 200)):
        here = slice(low, high)
        out, state = mechanism.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, mask=rg.causal)
        assert out.shape == (B, H, high - low, K)
    assert state.length == 200


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name, mechanism in REGISTRY.items() if mechanism.streams(K) is None])
def test_a_step_that_records_nothing_is_the_same_with_gradients_enabled(name: str) -> None:
    mechanism, (q, k, v) = REGISTRY[name], inputs(6, torch.float32)
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=K, capacity=16)
    _, state = mechanism.extend(*(t[:, :, :5] for t in (q, k, v)), state, mask=rg.causal)
    ran = []
    for enabled in (False, True):
        fork = state.reorder(torch.arange(B))  # with space of its own
        with torch.set_grad_enabled(enabled), Operators() as operators:
            mechanism.extend(*(t[:, :, 5:] for t in (q, k, v)), fork, mask=rg.causal)
        ran.append(operators.names)
    assert ran[0] == ran[1]


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("name", [name for name, mechanism in REGISTRY.items() if mechanism.streams(K) is None])
def test_padding_alone_stays_in_the_autograd_graph(name: str, rows: int) -> None:
    """Whatever is recorded, whole and streamed, as the first tokens and as later ones."""
    mechanism = REGISTRY[name]
    hidden = rg.causal & rg.padding(valid=torch.zeros(rows, 2 * T, dtype=torch.bool))
    for recorded in range(3):
        tokens = [t[:rows].clone().requires_grad_(number == recorded) for number, t in enumerate(inputs())]
        state = mechanism.start(batch=rows, num_kv_heads=G, qk_length=K, value_length=K, dtype=torch.float64)
        first, state = mechanism.extend(*tokens, state, mask=rg.causal & rg.padding([0] * rows))
        later, _ = mechanism.extend(*tokens, state, mask=hidden)
        whole = rg.attend(*tokens, mechanism, mask=rg.causal & rg.padding([0] * rows))
        for out in (first, later, whole):
            (grad,) = torch.autograd.grad(out.sum(), tokens[recorded], retain_graph=True)
            assert not out.any()
            assert not grad.any()
        with torch.no_grad():
            assert not mechanism.extend(*tokens, state, mask=hidden)[0].requires_grad


@pytest.mark.parametrize("recorded", ["q", "k", "v"])
@pytest.mark.parametrize("name", ["retention", "gated", "delta"])
def test_a_nan_in_the_state_gives_no_gradient_whatever_is_recorded(name: str, recorded: str) -> None:
    mechanism, (q, k, v) = REGISTRY[name], inputs()
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=K, dtype=torch.float64)
    _, state = mechanism.extend(q, spoiled(k), spoiled(v), state, mask=rg.causal)
    tokens = {"q": q, "k": k, "v": v}
    tokens[recorded] = tokens[recorded].clone().requires_grad_()
    out, _ = mechanism.extend(*tokens.values(), state, mask=rg.causal)
    assert out.isnan().all()
    (grad,) = torch.autograd.grad(out, tokens[recorded], torch.ones_like(out))
    assert bool((grad == 0).all())


def test_a_table_of_padding_is_made_once_and_is_plain() -> None:
    """All layers of a step share it, so that no mode in which the first of them ran may stick to it."""
    lengths = [3, 5, 7, 1]
    with FakeTensorMode():
        assert isinstance(rg.padding(lengths).valid(9), FakeTensor)
    with torch.inference_mode():
        table = rg.padding(lengths).valid(9)
    assert rg.padding(lengths).valid(9) is table
    assert not table.is_inference()
    assert torch.equal(table, torch.arange(9) < torch.tensor(lengths)[:, None])


@pytest.mark.parametrize("first", ["inference", "fake"])
@pytest.mark.parametrize("name", list(REGISTRY))
def test_a_call_in_a_mode_leaves_nothing_of_it_behind(name: str, first: str) -> None:
    """Tables that a call keeps for later ones are plain tensors: with numbers, and fit for gradients."""
    size = {"inference": 5, "fake": 6}[first]  # of no other test here: what is kept is kept by size
    mask = rg.causal if REGISTRY[name].streams(size) is None else None
    for length in (9, 300):  # few tokens, and sums over many
        tokens = torch.randn(1, 1, length, size)
        if first == "inference":
            with torch.inference_mode():
                rg.attend(tokens, tokens, tokens, REGISTRY[name], mask)
        else:
            with FakeTensorMode() as mode:
                fake = mode.from_tensor(tokens)
                rg.attend(fake, fake, fake, REGISTRY[name], mask)
        leaf = tokens.clone().requires_grad_()
        out = rg.attend(leaf, leaf, leaf, REGISTRY[name], mask)
        expected = rg.attend(leaf, leaf, leaf, REGISTRY[name], mask, path="reference")
        assert torch.allclose(out, expected, rtol=1e-3, atol=1e-4)
        out.sum().backward()
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())


def test_tables_for_gpus_and_for_local_attention_are_plain_after_a_mode() -> None:
    for make in (
        lambda: gpu.table(((0, 3), (1, 2)), torch.device("cpu")),
        lambda: local((2, 5), 1, torch.device("cpu")).table,
    ):
        with FakeTensorMode():
            make()
        with torch.inference_mode():
            table = make()
        assert make() is table
        assert not isinstance(table, FakeTensor)
        assert not table.is_inference()
