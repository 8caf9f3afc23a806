"""Models with int8 weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.paths import decode
from regard.models.base import Model, SomeModel, expect
from regard.models.layers.int8 import Int8Embedding, Int8Linear
from regard.models.layers.linear import MULTIPLE
from regard.models.layers.lora import lora_of

LEAST_WEIGHTS = 1 << 16
"""Smaller projections are not limited by memory bandwidth, so int8 weights would not make them faster."""


def quantized(model: SomeModel, *, least: int = LEAST_WEIGHTS) -> SomeModel:
    """A copy with int8 weights, one scale per row, in projections of `least` weights or more; for inference on the CPU.

    A tied head is quantized too, and the embedding looks up its int8 table. Everything else stays float32, and so do
    projections whose input width is not a multiple of 16. The products are JIT-compiled for your CPU, which needs AVX2
    or AVX-512, llvmlite and a system that allows executable memory; elsewhere int8 would be slower than float32, and a
    ValueError says so.

    Measured on SmolLM2 135M: weights of 135 MB instead of 538; over 512 tokens of Python's documentation logits are
    off by 0.17 on average and 1.6 at most (their spread is 5.3), the most likely token is the same at 96.1 % of
    positions, and perplexity is 16.12 instead of 15.99. Times are in the README's table.

    >>> import regard as rg, torch
    >>> config = rg.DecoderConfig(vocabulary_size=512, embedding_dim=128, num_layers=2, num_heads=4)
    >>> model = rg.Decoder(config)
    >>> small, tokens = rg.quantized(model), torch.randint(512, (1, 9))
    >>> small.embedding.weight.dtype
    torch.int8
    >>> with torch.no_grad():
    ...     torch.allclose(small(tokens), model.eval()(tokens), atol=0.05)
    True
    """
    _check(model, least)
    # deepcopy takes these from its memo instead of copying the originals, so no float32 weight is copied twice.
    memo: dict[int, Any] = {id(shared): shared for shared in (model.config, model.tokenizer) if shared is not None}
    for module in model.modules():
        if isinstance(module, nn.Linear) and _large(module.weight, least):
            memo[id(module)] = Int8Linear(module)
    table = model.tied_table
    if table is not None and _large(table.weight, least):
        memo[id(table)] = Int8Embedding(table)
    small = copy.deepcopy(model, memo).requires_grad_(False).eval()
    small.quantized = True
    return small


def _large(weight: Tensor, least: int) -> bool:
    return weight.numel() >= least and weight.shape[1] % MULTIPLE == 0


def _check(model: Model, least: int) -> None:
    expect(Model, model)
    if model.quantized:
        raise ValueError("model: expected float32 weights, got a quantized model")
    if lora_of(model) is not None:
        raise ValueError("model: expected one without adapters, got one with them; a saved model has them merged")
    if (reason := decode.missing()) is not None:
        raise ValueError(f"model: expected a machine on which int8 weights are fast, got one without: {reason}")
    if type(least) is not int or least < 0:
        raise ValueError(f"least: expected a number of weights, got {least!r}")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"model: expected float32 weights on the CPU, got {name} in {parameter.dtype} on {parameter.device}; "
                "load it with dtype=torch.float32"
            )
