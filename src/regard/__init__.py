"""Regard: state an attention mechanism once; compute, stream, see, count and prove it."""

from regard.cpu import guard

guard()  # before anything can run on oneDNN

from regard.attention import attend, explain, weights
from regard.call import Plan
from regard.checkpoints import CheckpointError, load, save
from regard.cost import Cost, LayerCost, Work, cost, crossover, layer_cost
from regard.generation import Generated, Prompt, generate, prefill, stream
from regard.laws import Report, check
from regard.layers.attention import MultiHeadAttention
from regard.layers.positions import RotaryScaling
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
from regard.models.davit import DaViT, DaViTConfig
from regard.models.decoder import Decoder, DecoderConfig
from regard.models.encoder import Encoder, EncoderConfig
from regard.models.quantized import quantized
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vision import VisionConfig, VisionTransformer
from regard.trace import Trace, trace

__all__ = [
    "Argmax",
    "Channel",
    "CheckpointError",
    "Cost",
    "DaViT",
    "DaViTConfig",
    "Decoder",
    "DecoderConfig",
    "Elu",
    "Encoder",
    "EncoderConfig",
    "Generated",
    "Kernel",
    "LayerCost",
    "Mask",
    "Mechanism",
    "MultiHeadAttention",
    "Plan",
    "Polynomial",
    "Prompt",
    "Quadratic",
    "RandomFeatures",
    "Report",
    "RotaryScaling",
    "Softmax",
    "Taylor",
    "Trace",
    "Transformer",
    "TransformerConfig",
    "Uniform",
    "VisionConfig",
    "VisionTransformer",
    "Work",
    "attend",
    "causal",
    "check",
    "cost",
    "crossover",
    "dense",
    "explain",
    "generate",
    "global_tokens",
    "layer_cost",
    "load",
    "padding",
    "prefill",
    "quantized",
    "save",
    "segments",
    "stream",
    "trace",
    "weights",
    "window",
    "window2d",
]
