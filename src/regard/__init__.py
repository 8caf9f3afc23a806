"""Regard: state an attention mechanism once; compute, stream, see, count and prove it."""

from regard.cpu import guard

guard()  # before anything can run on oneDNN

from regard.attention import attend, explain, weights
from regard.call import Plan
from regard.cost import Cost, LayerCost, Work, cost, crossover, layer_cost
from regard.laws import Report, check
from regard.mask import Mask, causal, dense, global_tokens, padding, segments, window, window2d
from regard.mechanism import Mechanism
from regard.mechanisms import (
    Argmax,
    Channel,
    Elu,
    Kernel,
    Polynomial,
    Quadratic,
    RandomFeatures,
    Softmax,
    Taylor,
    Uniform,
)

__all__ = [
    "Argmax",
    "Channel",
    "Cost",
    "Elu",
    "Kernel",
    "LayerCost",
    "Mask",
    "Mechanism",
    "Plan",
    "Polynomial",
    "Quadratic",
    "RandomFeatures",
    "Report",
    "Softmax",
    "Taylor",
    "Uniform",
    "Work",
    "attend",
    "causal",
    "check",
    "cost",
    "crossover",
    "dense",
    "explain",
    "global_tokens",
    "layer_cost",
    "padding",
    "segments",
    "weights",
    "window",
    "window2d",
]
