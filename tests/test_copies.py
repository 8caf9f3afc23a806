"""Every value is itself when it is copied and pickled."""

import copy
import pickle

import pytest
import torch

import regard as rg
from generating import DECODERS, PROMPTS, made

VALUES = {
    "generated": lambda: rg.Generated(
        "Paris.", tokens=[7, 8], reason="end", log_probabilities=[-0.1, -2.0], alternatives=[[(7, 0.9)]], score=0.5
    ),
    "prompt": lambda: rg.prefill(made("gqa"), PROMPTS),
    "prompt of sums": lambda: rg.prefill(made("quadratic"), PROMPTS),
    "prompt of a source": lambda: rg.prefill(made("t5"), PROMPTS),
    "prompt in int8": lambda: rg.prefill(made("gqa"), PROMPTS, storage=torch.int8),
    "state": lambda: made("gqa").start(batch=1, capacity=4),
    "config": lambda: DECODERS["window"],
    "scaling": lambda: rg.RotaryScaling(kind="linear", factor=2.0),
    "mask": lambda: rg.causal & rg.padding([3, 2]) & ~rg.window(before=1, after=0),
    "mechanism": lambda: rg.Quadratic(),
    "work": lambda: rg.Work(query_length=4, key_length=4),
    "cost": lambda: rg.cost(rg.Softmax(), rg.Work(query_length=4, key_length=4)),
    "plan": lambda: rg.explain(*torch.randn(3, 1, 1, 4, 4)),
    "summary": lambda: made("gqa").summary(5),
    "model": lambda: made("gqa"),
    "int8 model": lambda: rg.quantized(made("gqa").float(), least=1),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", ["copy", "deepcopy", 0, pickle.HIGHEST_PROTOCOL])
def test_every_value_is_itself_when_copied_and_pickled(name, way):
    value = VALUES[name]()
    again = getattr(copy, way)(value) if isinstance(way, str) else pickle.loads(pickle.dumps(value, way))
    assert type(again) is type(value)
    assert same(vars(value), vars(again))
    assert str(again) == str(value)


def same(left, right) -> bool:
    """Whether two values hold the same, whatever they are made of."""
    if isinstance(left, torch.Tensor):
        alike = (left.shape, left.dtype) == (right.shape, right.dtype)
        return alike and bool(((left == right) | (left != left)).all())  # room to spare may hold anything
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (type(left) is type(right) and hasattr(left, "__dict__") and same(vars(left), vars(right)))
