"""Models with int8 weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.paths import decode
from regard.models.base import Model, SomeModel, expect
from regard.models.layers.int8 import Int8Embedding, Int8Linear
from regard.models.layers.linear import MULTIPLE

LEAST_WEIGHTS = 1 << 16
"""Below this a projection is not bound by reading its weights, and rounding them gains nothing."""


def quantized(model: SomeModel, *, least: int = LEAST_WEIGHTS) -> SomeModel:
    """A copy whose projections of at least `least` weights hold int8 ones, one scale a row; for inference on the CPU.

    A tied head is one of them, and the embedding looks up its table. Everything else is as it was, and so are
    projections whose inputs are no multiple of 16. Refused where int8 would be slower than float32: machine code, JIT-
    compiled for your CPU, multiplies them, which needs AVX2 or AVX-512, llvmlite and a system that lets code be made.

    Measured on SmolLM2 135M: weights of 135 MB instead of 538; over 512 tokens of Python's documentation logits are
    off by 0.17 on average and 1.6 at most, where their spread is 5.3, the likeliest token is the same at 96.1 % of
    places, and perplexity is 16.12 instead of 15.99. Times are in the README's table.

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
    # Deep copies take what the memo holds for the originals, which are thus never copied in float32.
    memo: dict[int, Any] = {id(one): one for one in (model.config, model.tokenizer) if one is not None}
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
        raise ValueError("model: expected one with float32 weights, got a quantized one")
    if (reason := decode.missing()) is not None:
        raise ValueError(f"model: expected a machine on which int8 weights are fast, got one without: {reason}")
    if type(least) is not int or least < 0:
        raise ValueError(f"least: expected a number of weights, got {least!r}")
    for name, one in model.named_parameters():
        if one.dtype != torch.float32 or one.device.type != "cpu":
            raise ValueError(
                f"model: expected float32 weights on the CPU, got {name} in {one.dtype} on {one.device}; "
                "load it with dtype=torch.float32"
            )
