"""Bad input is a ValueError before any compute: it names the argument, what was expected and what was given."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from good_calls import COMPUTE, B, G, H, K, S, T, V, attend, extend, key, later, query, square, start, truth, value
from regard.core.mechanisms import REGISTRY

pytestmark = pytest.mark.usefixtures("own_errors")


class Computes(TorchDispatchMode):
    """Records every operator that does an attention's real work."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in str(func) for part in COMPUTE):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


Mistake = tuple[Callable[[], object], str, str, str]

SHAPES: dict[str, Mistake] = {
    "q of rank 3": (lambda: attend(q=query(H, T, K)), "q", "4 dimensions", "(4, 5, 3)"),
    "k of rank 5": (lambda: attend(k=key(1, B, G, S, K)), "k", "4 dimensions", "(1, 2, 2, 7, 3)"),
    "v of rank 2": (lambda: attend(v=value(S, V)), "v", "4 dimensions", "(7, 6)"),
    "q of rank 3, weights": (lambda: rg.weights(query(H, T, K), key()), "q", "4 dimensions", "(4, 5, 3)"),
    "q of rank 3, explain": (lambda: rg.explain(query(H, T, K), key(), value()), "q", "4 dimensions", "(4, 5, 3)"),
    "q no tensor": (lambda: attend(q=[[1.0]]), "q", "tensor", "list"),
    "k no tensor": (lambda: attend(k="keys"), "k", "tensor", "str"),
    "v None": (lambda: rg.attend(query(), key(), None), "v", "tensor", "NoneType"),
    "H no multiple of G": (lambda: attend(q=query(B, 3, T, K)), "k", "3", "2"),
    "more key heads": (lambda: attend(q=query(B, 1, T, K)), "k", "1", "2"),
    "no key heads": (lambda: attend(k=key(B, 0, S, K), v=value(B, 0, S, V)), "k", "4", "0"),
    "k and v of other lengths": (lambda: attend(v=value(B, G, S - 1, V)), "v", "(2, 2, 7)", "(2, 2, 6)"),
    "k and v of other heads": (lambda: attend(v=value(B, 1, S, V)), "v", "(2, 2, 7)", "(2, 1, 7)"),
    "k of another qk_length": (lambda: attend(k=key(B, G, S, K + 1)), "k", "3", "4"),
    "k of another batch": (lambda: attend(k=key(1, G, S, K)), "k", "2", "(1, 2, 7, 3)"),
    "v of another batch": (lambda: attend(v=value(3, G, S, V)), "v", "2", "(3, 2, 7)"),
    "no qk_length": (lambda: attend(q=query(B, H, T, 0), k=key(B, G, S, 0)), "q", "qk_length", "0"),
    "no qk_length, weights": (lambda: rg.weights(query(B, H, T, 0), key(B, G, S, 0)), "q", "qk_length", "0"),
    "Channel, T ≠ S": (lambda: attend(rg.Channel(), v=value(B, G, S, K)), "q", "7", "5"),
    "Channel, K ≠ V": (lambda: attend(rg.Channel(), q=query(B, H, S, K)), "v", "3", "6"),
}

KINDS: dict[str, Mistake] = {
    "integer q": (lambda: attend(q=query(dtype=torch.long)), "q", "floating-point", "torch.int64"),
    "integer k": (lambda: attend(k=key(dtype=torch.int32)), "k", "floating-point", "torch.int32"),
    "bool v": (lambda: attend(v=value(dtype=torch.bool)), "v", "floating-point", "torch.bool"),
    "float8 q": (lambda: attend(q=query().to(torch.float8_e4m3fn)), "q", "bfloat16, float32 or", "float8_e4m3fn"),
    "float8 all": (
        lambda: attend(**{n: make().to(torch.float8_e5m2) for n, make in (("q", query), ("k", key), ("v", value))}),
        "q",
        "float16",
        "e5m2",
    ),
    "complex q": (lambda: attend(q=query(dtype=torch.complex64)), "q", "floating-point", "torch.complex64"),
    "k of another dtype": (lambda: attend(k=key(dtype=torch.float64)), "k", "torch.float32", "torch.float64"),
    "v of another dtype": (lambda: attend(v=value(dtype=torch.float16)), "v", "torch.float32", "torch.float16"),
    "k on another device": (lambda: attend(k=key(device="meta")), "k", "cpu", "meta"),
    "v on another device": (lambda: attend(v=value(device="meta")), "v", "cpu", "meta"),
    "q on another device": (lambda: attend(q=query(device="meta")), "k", "meta", "cpu"),
    "k on another device, weights": (lambda: rg.weights(query(), key(device="meta")), "k", "cpu", "meta"),
}

MASKS: dict[str, Mistake] = {
    "float mask": (lambda: attend(mask=torch.zeros(T, S)), "mask", "bool", "torch.float32"),
    "integer mask": (lambda: attend(mask=torch.ones(T, S, dtype=torch.long)), "mask", "bool", "torch.int64"),
    "float mask, weights": (lambda: rg.weights(query(), key(), mask=torch.zeros(T, S)), "mask", "bool", "float32"),
    "mask of other keys": (lambda: attend(mask=truth(T, S + 1)), "mask", "(2, 4, 5, 7)", "(1, 1, 5, 8)"),
    "mask of other queries": (lambda: attend(mask=truth(T - 1, S)), "mask", "(2, 4, 5, 7)", "(1, 1, 4, 7)"),
    "mask of other heads": (lambda: attend(mask=truth(B, 3, T, S)), "mask", "(2, 4, 5, 7)", "(2, 3, 5, 7)"),
    "mask of other batch": (lambda: attend(mask=truth(3, 1, T, S)), "mask", "(2, 4, 5, 7)", "(3, 1, 5, 7)"),
    "mask of rank 3": (lambda: attend(mask=truth(B, T, S)), "mask", "(T, S) or (B, H, T, S)", "(2, 5, 7)"),
    "mask of rank 1": (lambda: attend(mask=truth(S)), "mask", "(T, S)", "(7,)"),
    "mask of rank 5": (lambda: attend(mask=truth(1, B, H, T, S)), "mask", "(T, S)", "(1, 2, 4, 5, 7)"),
    "padding of other batch": (lambda: attend(mask=rg.padding([1, 2, 3])), "mask", "2", "3"),
    "padding beyond the keys": (lambda: attend(mask=rg.padding([1, S + 1])), "mask", "7", "8"),
    "padding table of fewer keys": (lambda: attend(mask=rg.padding(valid=truth(B, S - 1))), "mask", "7", "6"),
    "padding table of more keys": (
        lambda: attend(mask=rg.padding(valid=torch.arange(S + 1) < torch.tensor([[3], [4]]))), "mask", "7", "8"),
    "padding inside an expression": (lambda: attend(mask=rg.causal & ~rg.padding([1])), "mask", "2", "1"),
    "segments of other length": (lambda: attend(mask=rg.segments([[0, 1]])), "mask", "(2, 7)", "(1, 2)"),
    "grid of other size": (lambda: attend(mask=rg.window2d(grid=(2, 2), radius=1)), "mask", "4", "7"),
    "a word": (lambda: attend(mask="causal"), "mask", "a mask", "str"),
    "a list": (lambda: attend(mask=[[True]]), "mask", "a mask", "list"),
    "a number": (lambda: attend(mask=1), "mask", "a mask", "int"),
    "a mask with None": (lambda: attend(mask=rg.causal & None), "mask", "a mask", "None"),
    "a function of scores": (lambda: attend(mask=lambda b, h, q, k: q - k), "mask", "bool", "torch.int64"),
    "a function of another shape": (lambda: attend(mask=lambda b, h, q, k: truth(9)), "mask", "(2, 4, 5, 7)", "(9,)"),
    "a function of no tensor": (lambda: attend(mask=lambda b, h, q, k: True), "mask", "bool", "bool"),
    "a function with if": (
        lambda: attend(mask=lambda b, h, q, k: q >= k if q > 2 else k < 1), "mask", "tensors of positions", "<lambda>"),
    "a function with and": (
        lambda: attend(mask=lambda b, h, q, k: q >= k and k > 1), "mask", "tensors of positions", "<lambda>"),
    "a function of numbers": (
        lambda: attend(mask=lambda b, h, q, k: k < q.item()), "mask", "tensors of positions", "<lambda>"),
    "negative window": (lambda: attend(mask=rg.window(before=-1)), "before", "at least 0", "-1"),
    "negative window after": (lambda: attend(mask=rg.window(after=-2)), "after", "at least 0", "-2"),
    "causal Channel": (lambda: square(rg.Channel(), rg.causal), "mask", "padding", "causal"),
    "causal Channel, weights": (
        lambda: rg.weights(query(), query(), rg.Channel(), rg.causal), "mask", "padding", "causal"),
    "windowed Channel": (lambda: square(rg.Channel(), rg.window(before=1)), "mask", "padding", "Window(before=1)"),
    "dense Channel": (lambda: square(rg.Channel(), truth(T, T)), "mask", "padding", "dense"),
    "causal Channel cost": (
        lambda: rg.cost(rg.Channel(), rg.Work(query_length=9, key_length=9, mask=rg.causal)),
        "mask", "padding", "causal"),
}  # fmt: skip

BIASES: dict[str, Mistake] = {
    "bias of a kernel": (lambda: attend(rg.Quadratic(), bias=torch.zeros(T, S)), "bias", "", ""),
    "bias of Elu, weights": (
        lambda: rg.weights(query(), key(), rg.Elu(), bias=torch.zeros(T, S)), "bias", "", ""),
    "bias of a streamed kernel": (lambda: extend(rg.Elu(), bias=torch.zeros(T, T)), "bias", "", ""),
    "bias of Channel": (lambda: square(rg.Channel(), bias=torch.zeros(T, T)), "bias", "", ""),
    "bias of Argmax": (lambda: attend(rg.Argmax(), bias=torch.zeros(T, S)), "bias", "", ""),
    "bias of another shape": (lambda: attend(bias=torch.zeros(T, S + 1)), "bias", "(2, 4, 5, 7)", "(5, 8)"),
    "bias of rank 5": (lambda: attend(bias=torch.zeros(2, B, H, T, S)), "bias", "(2, 4, 5, 7)", "(2, 2, 4, 5, 7)"),
    "bias of more rows": (lambda: attend(bias=torch.zeros(3, 1, T, S)), "bias", "(2, 4, 5, 7)", "(3, 1, 5, 7)"),
    "bool bias": (lambda: attend(bias=truth(T, S)), "bias", "floating-point", "torch.bool"),
    "a number as bias": (lambda: attend(bias=1.0), "bias", "floating-point", "float"),
    "bias elsewhere": (lambda: attend(bias=torch.zeros(T, S, device="meta")), "bias", "cpu", "meta"),
}  # fmt: skip

MECHANISMS: dict[str, Mistake] = {
    "negative beta": (lambda: rg.Softmax(beta=-1.0), "beta", "0 to inf", "-1.0"),
    "beta NaN": (lambda: rg.Softmax(beta=math.nan), "beta", "0 to inf", "nan"),
    "beta a word": (lambda: rg.Softmax(beta="hot"), "beta", "number", "'hot'"),
    "softcap 0": (lambda: rg.Softmax(softcap=0.0), "softcap", "above 0", "0.0"),
    "softcap inf": (lambda: rg.Softmax(softcap=math.inf), "softcap", "finite", "inf"),
    "softcap of a choice": (lambda: rg.Softmax(beta=math.inf, softcap=3.0), "softcap", "None", "3.0"),
    "odd degree": (lambda: rg.Polynomial(degree=3), "degree", "even", "3"),
    "degree 0": (lambda: rg.Polynomial(degree=0), "degree", "at least 2", "0"),
    "degree 2.0": (lambda: rg.Polynomial(degree=2.0), "degree", "even", "2.0"),
    "negative c": (lambda: rg.Quadratic(c=-0.5), "c", "at least 0", "-0.5"),
    "c NaN": (lambda: rg.Quadratic(c=math.nan), "c", "finite", "nan"),
    "negative c of a polynomial": (lambda: rg.Polynomial(degree=2, c=-1), "c", "at least 0", "-1"),
    "no features": (lambda: rg.RandomFeatures(n=0), "n", "at least 1", "0"),
    "a seed of another kind": (lambda: rg.RandomFeatures(seed=0.5), "seed", "whole number", "0.5"),
    "feature map no function": (lambda: rg.Kernel(feature_map=3), "feature_map", "function", "int"),
    "feature map of another shape": (
        lambda: attend(rg.Kernel(feature_map=lambda x: x.sum())), "feature_map", "'C'", "()"),
    "unknown scale": (lambda: rg.Channel(scale="heads"), "scale", "'tokens'", "'heads'"),
    "mechanism a word": (lambda: attend("softmax"), "mechanism", "a mechanism", "'softmax'"),
    "mechanism a class": (lambda: attend(rg.Softmax), "mechanism", "a mechanism", "Softmax"),
    "mechanism a mask": (lambda: attend(rg.causal), "mechanism", "a mechanism", "causal"),
    "mechanism a word, weights": (lambda: rg.weights(query(), key(), "x"), "mechanism", "a mechanism", "'x'"),
    "mechanism a word, explain": (
        lambda: rg.explain(query(), key(), value(), "x"), "mechanism", "a mechanism", "'x'"),
    "mechanism a word, cost": (lambda: rg.cost("softmax", rg.Work()), "mechanism", "a mechanism", "'softmax'"),
}  # fmt: skip

PATHS: dict[str, Mistake] = {
    "unknown path": (lambda: attend(path="flash"), "path", "'sdpa'", "'flash'"),
    "unknown path, explain": (
        lambda: rg.explain(query(), key(), value(), path="flash"), "path", "'reference'", "'flash'"),
    "another mechanism's path": (lambda: attend(path="chunked"), "path", "'sdpa'", "'chunked'"),
    "sdpa with a window": (lambda: attend(mask=rg.window(before=1), path="sdpa"), "path", "", "'sdpa'"),
    "sdpa with a bias": (lambda: attend(bias=torch.zeros(T, S), path="sdpa"), "path", "", "'sdpa'"),
    "sdpa, causal, T ≠ S": (lambda: attend(mask=rg.causal, path="sdpa"), "path", "", "'sdpa'"),
    "sdpa for a choice": (lambda: attend(rg.Argmax(), path="sdpa"), "path", "", "'sdpa'"),
    "chunked with a window": (
        lambda: attend(rg.Elu(), rg.window(before=1), path="chunked"), "path", "", "'chunked'"),
    "parts without a mask": (
        lambda: rg.attend(key().half(), key().half(), value().half(), path="parts"), "path", "", "'parts'"),
}  # fmt: skip

WORKS: dict[str, Mistake] = {
    "no heads": (lambda: rg.Work(num_heads=0), "num_heads", "at least 1", "0"),
    "negative kv heads": (lambda: rg.Work(num_kv_heads=-1), "num_kv_heads", "at least 1", "-1"),
    "heads that do not divide": (lambda: rg.Work(num_heads=6, num_kv_heads=4), "num_kv_heads", "6", "4"),
    "qk_length a fraction": (lambda: rg.Work(qk_length=1.5), "qk_length", "whole number", "1.5"),
    "value_length 0": (lambda: rg.Work(value_length=0), "value_length", "at least 1", "0"),
    "negative batch": (lambda: rg.Work(batch=-1), "batch", "at least 0", "-1"),
    "negative query_length": (lambda: rg.Work(query_length=-1), "query_length", "at least 0", "-1"),
    "key_length a word": (lambda: rg.Work(key_length="long"), "key_length", "whole number", "'long'"),
    "integer dtype": (lambda: rg.Work(dtype=torch.int8), "dtype", "floating-point", "torch.int8"),
    "dtype a word": (lambda: rg.Work(dtype="float32"), "dtype", "floating-point", "'float32'"),
    "mask a word": (lambda: rg.Work(mask="causal"), "mask", "a mask", "str"),
    "mask of other keys": (lambda: rg.Work(key_length=8, mask=rg.padding([9])), "mask", "8", "9"),
    "cost of no work": (lambda: rg.cost(rg.Softmax(), 4096), "work", "Work", "4096"),
}

WEIGHTS: dict[str, Mistake] = {
    "row beyond": (lambda: rg.weights(query(), key(), rows=[T]), "rows", "-5 to 4", "[5]"),
    "row before": (lambda: rg.weights(query(), key(), rows=[-T - 1]), "rows", "-5 to 4", "[-6]"),
    "head beyond": (lambda: rg.weights(query(), key(), heads=[0, H]), "heads", "-4 to 3", "[0, 4]"),
    "row a fraction": (lambda: rg.weights(query(), key(), rows=[0.5]), "rows", "number", "0.5"),
    "row a word": (lambda: rg.weights(query(), key(), rows=["last"]), "rows", "number", "last"),
    "rows one number": (lambda: rg.weights(query(), key(), rows=3), "rows", "number", "3"),
    "rows of Channel": (lambda: rg.weights(query(), query(), rg.Channel(), rows=[0]), "rows", "none", "[0]"),
}

STATES: dict[str, Mistake] = {
    "start without kv heads": (lambda: start(rg.Softmax(), num_kv_heads=0), "num_kv_heads", "at least 1", "0"),
    "start with a negative capacity": (lambda: start(rg.Softmax(), capacity=-1), "capacity", "at least 0", "-1"),
    "start with half a row": (lambda: start(rg.Elu(), batch=0.5), "batch", "whole number", "0.5"),
    "start in float8": (
        lambda: start(rg.Elu(), dtype=torch.float8_e4m3fn), "dtype", "float32 or float64", "float8_e4m3fn"),
    "start with a batch of True": (lambda: start(rg.Elu(), batch=True), "batch", "a whole number", "True"),
    "start with a capacity of True": (lambda: start(rg.Softmax(), capacity=True), "capacity", "a whole number", "True"),
    "start in integers": (lambda: start(rg.Elu(), dtype=torch.int32), "dtype", "floating-point", "torch.int32"),
    "start in a word": (lambda: start(rg.Softmax(), dtype="float32"), "dtype", "floating-point", "float32"),
    "start on a device of no kind": (lambda: start(rg.Softmax(), device="foo"), "device", "PyTorch", "'foo'"),
    "start on a device that is not here": (lambda: start(rg.Elu(), device="cuda:99"), "device", "PyTorch", "cuda:99"),
    "start on a number": (lambda: start(rg.Softmax(), device=1.5), "device", "PyTorch", "1.5"),
    "start Channel": (lambda: start(rg.Channel()), "mechanism", "", ""),
    "other batch": (
        lambda: extend(q=query(1, H, T, K), k=key(1, G, T, K), v=value(1, G, T, V)),
        "k", "(2, 2, 5, 3)", "(1, 2, 5, 3)"),
    "other kv heads": (lambda: extend(k=key(B, 1, T, K), v=value(B, 1, T, V)), "k", "(2, 2, 5, 3)", "(2, 1, 5, 3)"),
    "other qk_length": (
        lambda: extend(q=query(B, H, T, 4), k=key(B, G, T, 4)), "k", "(2, 2, 5, 3)", "(2, 2, 5, 4)"),
    "other value_length": (lambda: extend(v=value(B, G, T, V + 1)), "v", "(2, 2, 5, 6)", "(2, 2, 5, 7)"),
    "other value_length, kernel": (
        lambda: extend(rg.Elu(), v=value(B, G, T, V + 1)), "v", "(2, 2, 5, 6)", "(2, 2, 5, 7)"),
    "other dtype": (
        lambda: extend(q=query().double(), k=key(B, G, T, K).double(), v=value(B, G, T, V).double()),
        "k", "torch.float32", "torch.float64"),
    "other dtype, kernel": (
        lambda: extend(rg.Elu(), q=query().double(), k=key(B, G, T, K).double(), v=value(B, G, T, V).double()),
        "k", "torch.float32", "torch.float64"),
    "k and v of other lengths": (lambda: extend(v=value(B, G, T - 1, V)), "v", "(2, 2, 5)", "(2, 2, 4)"),
    "more queries than keys": (lambda: extend(q=query(B, H, T + 1, K)), "q", "5", "6"),
    "rank 3": (lambda: extend(q=query(H, T, K)), "q", "4 dimensions", "(4, 5, 3)"),
    "beyond the capacity": (lambda: extend(state=later(rg.Softmax())), "state", "8 tokens", "5 + 5"),
    "mask of the new keys only": (
        lambda: extend(rg.Elu(), state=later(rg.Elu()), mask=rg.padding(valid=truth(B, T))), "mask", "10", "5"),
    "float mask": (lambda: extend(mask=torch.zeros(T, T)), "mask", "bool", "torch.float32"),
    "window of a kernel": (lambda: extend(rg.Elu(), mask=rg.window(before=1)), "mask", "causal", "window"),
    "dense mask of a kernel": (lambda: extend(rg.Elu(), mask=truth(T, T)), "mask", "causal", "dense"),
    "no state": (lambda: rg.Softmax().extend(query(), key(B, G, T, K), value(B, G, T, V), None), "state", "", "None"),
    "channels in a stream": (
        lambda: rg.Channel().extend(
            query(), key(B, G, T, K), value(B, G, T, K), start(rg.Softmax(), value_length=K)
        ), "mechanism", "token-by-token", "Channel"),
    "a kernel's state": (lambda: extend(state=start(rg.Elu())), "state", "", "KernelState"),
    "another kernel's state": (lambda: extend(rg.Elu(), state=start(rg.Quadratic())), "state", "", ""),
}  # fmt: skip

COMPUTE_FIRST = ("state: beyond the capacity", "state: mask of the new keys only")
"""These meet some good tokens before they go wrong; they have a test of their own."""

MISTAKES = {
    f"{group}: {name}": mistake
    for group, several in {
        "shape": SHAPES, "kind": KINDS, "mask": MASKS, "bias": BIASES, "mechanism": MECHANISMS,
        "path": PATHS, "work": WORKS, "weights": WEIGHTS, "state": STATES,
    }.items()
    for name, mistake in several.items()
}  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "expected", "got"), MISTAKES.values(), ids=MISTAKES)
def test_an_error_names_the_argument_the_expected_and_the_given(
    call: Callable[[], object], argument: str, expected: str, got: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}: ") as caught:
        call()
    message = str(caught.value)
    assert "expected" in message
    assert "got" in message
    before, _, after = message.partition("got ")
    assert expected in before.partition("expected")[2]
    assert got in after


EARLY = {name: mistake for name, mistake in MISTAKES.items() if name not in COMPUTE_FIRST}


@pytest.mark.parametrize("call", [mistake[0] for mistake in EARLY.values()], ids=EARLY)
def test_an_error_comes_before_any_compute(call: Callable[[], object]) -> None:
    with Computes() as computes, pytest.raises(ValueError, match=": "):
        call()
    assert computes.seen == []


def test_a_state_that_is_full_is_found_before_any_compute() -> None:
    state = later(rg.Softmax())
    with Computes() as computes, pytest.raises(ValueError, match=r"^state: "):
        extend(state=state)
    assert computes.seen == []


@pytest.mark.parametrize(
    "call",
    [attend, lambda: attend(rg.Elu()), lambda: square(rg.Channel()), lambda: rg.weights(query(), key()), extend],
    ids=["softmax", "elu", "channel", "weights", "extend"],
)
def test_the_recorder_sees_compute_where_there_is_some(call: Callable[[], object]) -> None:
    with Computes() as computes:
        call()
    assert computes.seen


@pytest.mark.parametrize("mechanism", REGISTRY.values(), ids=REGISTRY)
def test_explaining_computes_nothing(mechanism: rg.Mechanism) -> None:
    x = torch.ones(B, H, 300, K)
    with Computes() as computes:
        plan = rg.explain(x, x, x, mechanism)
    assert plan.path in str(plan)
    assert plan.path not in plan.rejected
    assert computes.seen == []


def test_a_bad_mechanism_is_not_made() -> None:
    """A frozen value that was checked when it was made cannot go wrong later."""
    with pytest.raises(AttributeError):
        rg.Softmax().beta = -1.0
    with pytest.raises(TypeError):
        rg.Quadratic(2.0)
