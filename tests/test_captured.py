"""What a formula captures: tensors that get their gradient, and those that a layer refuses."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import regard as rg
from learned_mechanisms import Bilinear, attention, make_tensors


class Map:
    def __init__(self, W):
        self.W = W

    def __call__(self, x, bias=0.1):
        return torch.relu(x @ self.W) + bias

    method = __call__


WEIGHT = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)


def by_default(x, W=WEIGHT):
    return torch.relu(x @ W) + 0.1


def by_argument(W, x):
    return torch.relu(x @ W) + 0.1


def closure():
    W = WEIGHT
    return lambda x: torch.relu(x @ W) + 0.1


CAPTURES = {
    "a closure": closure(),
    "a global": lambda x: torch.relu(x @ WEIGHT) + 0.1,
    "a default": by_default,
    "a partial": functools.partial(by_argument, WEIGHT),
    "a method": Map(WEIGHT).method,
    "an object": Map(WEIGHT),
    "another function": lambda x: by_default(x),
    "a product": lambda x, W=2 * WEIGHT: torch.relu(x @ W) + 0.1,
}


@pytest.mark.parametrize("grad", [True, False], ids=["learned q", "plain q"])
@pytest.mark.parametrize("feature_map", CAPTURES.values(), ids=CAPTURES)
def test_a_captured_tensor_gets_its_gradient(feature_map, grad):
    mechanism, tensors = rg.Kernel(feature_map=feature_map), make_tensors(300, grad=grad)
    grads = [
        torch.autograd.grad(
            rg.attend(*tensors, mechanism, rg.causal, path=path).square().sum(), WEIGHT, retain_graph=True
        )
        for path in ("chunked", "reference")
    ]
    torch.testing.assert_close(*grads)
    assert grads[0][0].abs().sum() > 0


@pytest.mark.parametrize("feature_map", CAPTURES.values(), ids=CAPTURES)
def test_a_layer_refuses_what_it_cannot_register(feature_map):
    with pytest.raises(ValueError, match=r"mechanism: expected its learned tensors in fields.* captures .*\(4, 6\)"):
        rg.MultiHeadAttention(8, 2, mechanism=rg.Kernel(feature_map=feature_map))


def test_a_layer_names_what_it_cannot_register():
    with pytest.raises(ValueError, match=r"Kernel, whose function captures WEIGHT \(4, 6\)$"):
        rg.MultiHeadAttention(8, 2, mechanism=rg.Kernel(feature_map=CAPTURES["a global"]))
    with pytest.raises(ValueError, match=r"^W: expected an nn.Parameter, .* got a tensor with requires_grad$"):
        attention(Bilinear(W=torch.randn(8, 8, requires_grad=True), shift=torch.ones(1)))
    with pytest.raises(
        ValueError, match=r"^mechanism: expected one that works with qk_length = 8, got Kernel, which raises "
    ):
        attention(rg.Kernel(feature_map=nn.Linear(5, 5)))


CONSTANT = torch.randn(4, 6, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Turned(rg.Mechanism):
    """A user's mechanism whose formula reads a global."""

    def similarity(self, q, k):
        return torch.sigmoid(q @ CONSTANT @ CONSTANT.mT @ k.mT)


CONSTANTS = {
    "a closure": lambda: rg.Kernel(feature_map=(lambda W: lambda x: torch.relu(x @ W))(CONSTANT)),
    "a default": lambda: rg.Kernel(feature_map=lambda x, W=CONSTANT: torch.relu(x @ W)),
    "a partial": lambda: rg.Kernel(feature_map=functools.partial(by_argument, CONSTANT)),
    "a method": lambda: rg.Kernel(feature_map=Map(CONSTANT).method),
    "an object": lambda: rg.Kernel(feature_map=Map(CONSTANT)),
    "a gate": lambda: rg.Gated(gate=lambda k: -(k @ CONSTANT @ CONSTANT.mT).abs()),
    "a global": Turned,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_layer_refuses_a_constant_that_it_could_not_move_or_save(name):
    message = r"mechanism: expected its tensors in fields, as .* captures (W|CONSTANT|argument 0) \(4, 6\)$"
    with pytest.raises(ValueError, match=message), torch.device("cpu"):
        rg.MultiHeadAttention(8, 2, mechanism=CONSTANTS[name]())


def test_numbers_and_tensors_made_by_a_formula_are_no_constants():
    half = torch.tensor(0.5)

    def features(x):
        mask = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype, device=x.device)
        return torch.relu(x * mask + torch.arange(4, device=x.device) * half) + x.new_ones(4)

    layer = rg.MultiHeadAttention(8, 2, mechanism=rg.Kernel(feature_map=features))
    assert layer.double()(torch.randn(1, 3, 8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("holder", [tuple, list, lambda parts: dict(enumerate(parts))], ids=["tuple", "list", "dict"])
@pytest.mark.parametrize("grad", [True, False], ids=["learned", "constant"])
def test_tensors_within_a_field_are_refused_by_the_fields_name(holder, grad):
    @dataclass(frozen=True, kw_only=True)
    class Heated(rg.Mechanism):
        heats: object

        def similarity(self, q, k):
            return torch.sigmoid(self.heats[0] * (q @ k.mT) + self.heats[1])

    heats = holder([nn.Parameter(torch.ones(1), requires_grad=grad) for _ in range(2)])
    with pytest.raises(ValueError, match=r"^heats: expected tensors in fields of their own, or in an nn.ParameterList"):
        attention(Heated(heats=heats))
    attention(Heated(heats=nn.ParameterList([torch.ones(1), torch.ones(1)])))
    attention(Heated(heats=(1.0, 2.0)))
