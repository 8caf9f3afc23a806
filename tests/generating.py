"""Models, prompts and a tokenizer for tests of generation."""

from collections.abc import Sequence

import torch
from torch import nn

import regard as rg
from regard.checkpoints import Tokenizer
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.models.layers.attention import without_mechanisms

SIZES = {"vocabulary_size": 61, "embedding_dim": 16, "num_layers": 3, "num_heads": 4, "context_length": 256}
DECODERS = {
    "mha": rg.DecoderConfig(**SIZES),
    "gqa": rg.DecoderConfig(**SIZES, num_kv_heads=2),
    "mqa": rg.DecoderConfig(**SIZES, num_kv_heads=1),
    "gpt2": rg.DecoderConfig.gpt2(**SIZES),
    "alibi": rg.DecoderConfig(**SIZES, positions="alibi"),
    "window": rg.DecoderConfig(**SIZES, window=rg.Window(6), window_layers=(0, 2), num_kv_heads=2),
    "window-alibi": rg.DecoderConfig(**SIZES, window=rg.Window(4), positions="alibi"),
    **{
        name: rg.DecoderConfig(**SIZES, mechanism=name)
        for name, mechanism in REGISTRY.items()
        if weighs_tokens(mechanism, 8)
    },
}
SEQUENCES = {
    "transformer": rg.TransformerConfig(**SIZES, num_decoder_layers=2, start_token=1),
    "t5": rg.TransformerConfig.t5(**SIZES, qk_length=6, end_tokens=()),
    "kernel": rg.TransformerConfig(**SIZES, mechanism="quadratic", start_token=2),
}
PROMPTS = [[5, 9, 2], [7], list(range(3, 40)), [11, 12, 13, 14, 15, 16, 17, 18, 19], [60, 1]]


def redraw(model: rg.Decoder, deviation: float) -> None:
    """Weights as large as they are here after training; with those that training begins with, texts repeat a token."""
    for module in without_mechanisms(model):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)


def made(name: str) -> rg.Decoder | rg.Transformer:
    torch.manual_seed(0)
    if name in DECODERS:
        model: rg.Decoder | rg.Transformer = rg.Decoder(DECODERS[name])
        redraw(model, 0.5)
    else:
        model = rg.Transformer(SEQUENCES[name])
    return model.double().eval()


ALPHABET = [chr(97 + at) for at in range(26)] + [chr(65 + at) for at in range(26)] + list("0123456")


def lettered(hidden: Sequence[int]) -> Tokenizer:
    """A tokenizer of 61 tokens, single letters, and special ones at the places of `hidden`, whose ids end nothing."""
    roles = ("unk", "pad", "mask")
    names = [*ALPHABET, "<a>", "<b>"]
    special = {}
    for role, at in zip(roles, hidden, strict=False):
        names[at] = special[role] = f"<|{role}|>"
    return Tokenizer.from_vocabulary(names, special=special)
