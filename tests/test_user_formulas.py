"""A user's formula: it may not write to its inputs, must give what fits, and must be stated."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from good_calls import B, G, H, K, S, T, V, attend, key, query, value
from regard.core import user_code

pytestmark = pytest.mark.usefixtures("own_errors")


def stating(family: type, **methods: Any) -> Any:
    """A mechanism of a family with these methods."""
    for name, method in methods.items():
        method.__name__ = name
    return dataclass(frozen=True, kw_only=True)(type("Mine", (family,), methods))()


def weigh_in_place(self: Any, q: Tensor, k: Tensor, visible: Any, bias: Any = None) -> Tensor:
    return torch.softmax(q.mul_(2) @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT, -1)


def written(x: Tensor) -> Tensor:
    x[..., 0] = 3
    return x.abs()


WRITING = {
    "similarity": lambda: stating(rg.Mechanism, similarity=lambda self, q, k: (q @ k.exp_().mT).exp()),
    "score": lambda: stating(rg.ScoreMechanism, score=lambda self, q, k: q.mul_(2) @ k.mT),
    "features": lambda: stating(
        rg.FeatureMechanism, features=lambda self, x: x.exp_(), feature_length=lambda self, qk_length: qk_length
    ),
    "features of a module": lambda: rg.Kernel(feature_map=torch.nn.Sequential(torch.nn.ReLU(inplace=True))),
    "log_gates": lambda: rg.Gated(gate=lambda k: -written(k)),
    "rate": lambda: rg.Delta(rate=lambda k: written(k)[..., :1].sigmoid()),
    "weigh": lambda: stating(rg.Mechanism, weigh=weigh_in_place),
}
MODES = {"gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("watched", [False, True], ids=["copied", "watched"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verb", ["attend", "weights", "extend"])
@pytest.mark.parametrize("name", WRITING)
def test_a_formula_that_writes_in_place_is_refused_before_anything_is_lost(
    name: str, verb: str, mode: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if watched:  # as with many keys
        monkeypatch.setattr(user_code, "COPIED", 0)
    mechanism = WRITING[name]()
    with MODES[mode]():
        q, k, v = torch.randn(B, H, T, K), torch.randn(B, G, T, K), torch.randn(B, G, T, V)
        tensors = [q, k, v]
        if verb == "extend":
            state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=V)
            if hasattr(state, "append"):  # a history of keys that are not to be written to
                state = state.append(k, v)
                tensors += [state.keys, state.values]
        before = [tensor.clone() for tensor in tensors]
        run = {
            "attend": lambda: rg.attend(q, k, v, mechanism),
            "weights": lambda: rg.weights(q, k, mechanism),
            "extend": lambda: mechanism.extend(q, k, v, state),
        }[verb]
        for _ in range(2):
            with pytest.raises(
                ValueError,
                match=rf"^{name.split()[0]}: expected a formula that does not change its inputs, got \w+\(.*\), ",
            ):
                run()
    assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, before, strict=True))


@pytest.mark.parametrize("watched", [False, True], ids=["copied", "watched"])
@pytest.mark.parametrize("verb", ["attend", "weights", "extend"])
@pytest.mark.parametrize("argument", ["q", "k"])
def test_a_formula_that_writes_at_some_sizes_changes_nothing_at_any(
    argument: str, verb: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if watched:
        monkeypatch.setattr(user_code, "COPIED", 0)

    def similarity(self: Any, q: Tensor, k: Tensor) -> Tensor:
        x = {"q": q, "k": k}[argument]
        return ((x.mul_(2) if x.shape[-2] > 20 else x) * 0).sum() + (q @ k.mT).exp()

    mechanism = stating(rg.Mechanism, similarity=similarity)
    state = mechanism.start(batch=1, num_kv_heads=1, qk_length=4, value_length=4)
    for tokens in (3, 20, 21):
        q, k, v = (torch.randn(1, 1, tokens, 4) for _ in "qkv")
        before = [x.clone() for x in (q, k, v)]
        run = {
            "attend": lambda: rg.attend(q, k, v, mechanism),  # noqa: B023 - called before the next tokens
            "weights": lambda: rg.weights(q, k, mechanism),  # noqa: B023
            "extend": lambda: mechanism.extend(q, k, v, state),  # noqa: B023
        }[verb]
        if tokens > 20:
            with pytest.raises(
                ValueError, match=r"^similarity: expected a formula that does not change its inputs, got Mine\(\), "
            ):
                run()
        else:
            run()
        assert all(torch.equal(tensor, other) for tensor, other in zip((q, k, v), before, strict=True))


HIDING: dict[str, Any] = {
    "vmap": lambda call, v: torch.vmap(call)(v[None])[0],
    "grad": lambda call, v: torch.func.vjp(call, v)[0],
    "compiled": lambda call, v: torch.compile(call, backend="eager")(v),
}


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("name", WRITING)
def test_a_formula_that_writes_where_nothing_can_be_watched_writes_to_copies(name: str, how: str) -> None:
    mechanism, (q, k, v) = WRITING[name](), torch.randn(3, 1, 2, 5, 4).unbind()
    before = q.clone(), k.clone()
    torch.compiler.reset()
    out = HIDING[how](lambda v: rg.attend(q, k, v, mechanism), v)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert out.shape == v.shape


@torch.no_grad()
def test_a_stream_copies_no_keys_for_a_users_formula_and_remembers_few_shapes() -> None:
    """Every step has a new length."""
    inputs: list[Tensor] = []

    def similarity(self: Any, q: Tensor, k: Tensor) -> Tensor:
        inputs.append(k)
        return (q @ k.mT).exp()

    mechanism = stating(rg.Mechanism, similarity=similarity)
    state = mechanism.start(batch=1, num_kv_heads=1, qk_length=256, value_length=1, capacity=8192)
    k, v = torch.randn(1, 1, 4200, 256), torch.randn(1, 1, 4200, 1)
    state = state.append(k, v)
    for _ in range(3):
        inputs.clear()
        _, state = mechanism.extend(k[:, :, :1], k[:, :, :1], v[:, :, :1], state)
        assert [t.data_ptr() for t in inputs] == [state.keys.data_ptr()]
    few = k[:, :, :1]
    for keys in range(1, 300):
        rg.attend(few, k[:, :, :keys], v[:, :, :keys], mechanism)
    assert len(user_code._safe[mechanism]) <= user_code.MOST_SHAPES


def test_a_formula_that_writes_later_on_is_refused_when_it_does() -> None:
    mechanism = stating(rg.Mechanism, similarity=lambda self, q, k: ((q.mul_(2) if q.sum() > 0 else q) @ k.mT).exp())
    q = -torch.ones(1, 1, 3, 4)
    rg.attend(q, q, q, mechanism)
    with pytest.raises(ValueError, match="similarity: expected a formula that does not change its inputs"):
        rg.attend(-q, q, q, mechanism)


RETURNS: dict[str, Any] = {
    "array": (stating(rg.Mechanism, similarity=lambda self, q, k: (q @ k.mT).exp().numpy()), "similarity", "ndarray"),
    "array of scores": (stating(rg.ScoreMechanism, score=lambda self, q, k: (q @ k.mT).numpy()), "score", "ndarray"),
    "nothing": (stating(rg.Mechanism, similarity=lambda self, q, k: None), "similarity", "NoneType"),
    "keys first": (stating(rg.Mechanism, similarity=lambda self, q, k: (k @ q.mT).exp()), "similarity", "2, 2, 7, 1"),
    "other lengths": (stating(rg.Mechanism, similarity=lambda self, q, k: (k @ k.mT).exp()), "similarity", "7, 7"),
    "more features": (
        stating(rg.FeatureMechanism, features=lambda self, x: x.exp().repeat_interleave(2, -1),
                feature_length=lambda self, qk_length: 4), "features", r"feature_length\(3\) is 4, got .*6\)",
    ),
    "fewer features": (
        stating(rg.FeatureMechanism, features=lambda self, x: x.exp()[..., :1],
                feature_length=lambda self, qk_length: 3), "features", r"feature_length\(3\) is 3, got .*1\)",
    ),
    "an array of features": (
        stating(rg.FeatureMechanism, features=lambda self, x: x.exp().numpy(),
                feature_length=lambda self, qk_length: 3), "features", "got ndarray",
    ),
}  # fmt: skip


def verbs(mechanism: Any) -> dict[str, Callable[[], object]]:
    def extend() -> object:
        state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=V)
        return mechanism.extend(query(B, H, S, K), key(), value(), state)

    shape = {"num_heads": H, "num_kv_heads": G, "qk_length": K, "value_length": V}
    return {
        "attend": lambda: attend(mechanism),
        "weights": lambda: rg.weights(query(), key(), mechanism),
        "extend": extend,
        "cost": lambda: rg.cost(mechanism, rg.Work(query_length=T, key_length=S, **shape)),
        "cost of equal heads": lambda: rg.cost(mechanism, rg.Work(**{**shape, "num_kv_heads": H})),
        "check": lambda: rg.check(mechanism, qk_length=K),
    }


@pytest.mark.parametrize("verb", [verb for verb in verbs(None) if verb != "check"])
@pytest.mark.parametrize("name", RETURNS)
def test_what_a_formula_gives_is_checked_alike_everywhere(name: str, verb: str) -> None:
    mechanism, method, message = RETURNS[name]
    with pytest.raises(ValueError, match=rf"^{method}: expected .*{'got' if 'cost' in verb else message}.* from Mine"):
        verbs(mechanism)[verb]()


@pytest.mark.parametrize("name", WRITING)
def test_a_formula_that_writes_in_place_has_no_cost(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name.split()[0]}: expected a formula that does not change its inputs, got \w+\(.*\), "
    ):
        verbs(WRITING[name]())["cost"]()


UNSTATED = [
    ("similarity(q, k)", stating(rg.Mechanism)),
    ("similarity(q, k)", stating(rg.UnnormalisedMechanism)),
    ("score(q, k)", stating(rg.ScoreMechanism)),
    ("features(x)", stating(rg.FeatureMechanism, feature_length=lambda self, qk_length: qk_length)),
]


@pytest.mark.parametrize("verb", verbs(None))
@pytest.mark.parametrize(("signature", "mechanism"), UNSTATED)
def test_a_formula_that_is_not_stated_is_named_everywhere(signature: str, mechanism: rg.Mechanism, verb: str) -> None:
    name = signature.partition("(")[0]
    with pytest.raises(ValueError, match=rf"^{name}: expected {re.escape(signature)} to be defined by Mine, got none$"):
        verbs(mechanism)[verb]()


def test_a_formula_may_write_to_what_it_made_at_any_size_on_any_device() -> None:
    """On the meta device all storages have the address 0."""

    @dataclass(frozen=True, kw_only=True)
    class Shifted(rg.Mechanism):
        def similarity(self, q: Tensor, k: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2)
            return scores.sub_(scores.amax(-1, keepdim=True)).exp()

    for tokens in (64, 4096):
        q = torch.empty(1, 4, tokens, 64, device="meta")
        assert rg.attend(q, q, q, Shifted(), rg.causal).shape == q.shape
