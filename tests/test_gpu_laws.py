"""The laws of the core on a CUDA device, on every path that serves there. Run by hand: `pytest -m gpu`."""

import pytest
import torch

import regard as rg
from regard.core.laws.case import MASKS
from regard.core.mechanisms import REGISTRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS = {
    "softmax": rg.Softmax(),
    "quadratic": rg.Quadratic(),
    "taylor": rg.Taylor(),
    "elu": rg.Elu(),
    "given features": rg.Kernel(feature_map=torch.relu),
}
"""Mechanisms that kernels of ours compute in float32 and half precision."""


def holds(mechanism, **chosen):
    report = rg.check(mechanism, **chosen, heads=["GQA"], device="cuda", examples=1)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", KERNELS)
def test_laws_hold_where_kernels_serve(name, mask, dtype):
    holds(KERNELS[name], masks=[mask], dtypes=[dtype], qk_length=8)


@pytest.mark.parametrize("name", REGISTRY)
def test_laws_hold_in_float64(name):
    holds(REGISTRY[name], masks=["causal", "combined"], dtypes=["float64"])
