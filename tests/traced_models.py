"""Hugging Face models, and stacks of ours, for tests of traces."""

import pytest
import torch

from regard.core.tensors import weighs_tokens
from regard.inference.trace import TracedLayer
from regard.models.layers.block import BlockConfig, Stack

transformers = pytest.importorskip("transformers")
EVERYTHING = ("weights", "queries", "keys", "values", "scores", "outputs")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STEPS = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
SIDES = {
    f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 32))
}
PAIR = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, **SIDES, **ENDS, **STEPS}


def gpt2(**more):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=4, n_positions=64, **ENDS, **more)
    )


def decoder(name, **more):
    config = getattr(transformers, f"{name}Config")(**SIZES, **ENDS, num_key_value_heads=2, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def t5():
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    )


def vit():
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=32, image_size=16, patch_size=4))


def whisper():
    sizes = {**PAIR, "max_source_positions": 10, "max_target_positions": 32, "num_mel_bins": 8}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))


MODELS = {
    "gpt2": gpt2,
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "albert": lambda: transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=8)),
    "llama": lambda: decoder("Llama"),
    "mistral": lambda: decoder("Mistral", sliding_window=4),
    "qwen2": lambda: decoder("Qwen2"),
    "t5": t5,
    "vit": vit,
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**PAIR)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**PAIR)),
    "whisper": whisper,
}
TWO_SIDED = ("t5", "bart", "marian", "whisper")


def inputs(name):
    tokens = torch.randint(3, 40, (2, 9))
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": tokens[:, :5]}
    arguments = {"input_ids": tokens, "attention_mask": real}
    return {**arguments, "decoder_input_ids": tokens[:, :5]} if name in TWO_SIDED else arguments


def eager(model, **arguments):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = model(**arguments, output_attentions=True)
    model.set_attn_implementation(before)
    return out


def attentions(out):
    if getattr(out, "cross_attentions", None):
        pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
        return [*out.encoder_attentions, *(weights for pair in pairs for weights in pair)]
    return list(out.attentions)


def stack(mechanism, *, cross=False, layers=3, causal=True, shared=None, **more):
    config = BlockConfig(embedding_dim=16, num_heads=4, hidden_dim=32, mechanism=mechanism, num_kv_heads=2, cross=cross)
    return Stack(config, layers, causal=causal and weighs_tokens(mechanism, 8), num_shared=shared, **more).eval()


def layer_of(weights, *, kind="self", visible=None, index=0, real=None, **more):
    """A layer of given weights (B, H, T, S)."""
    heads, rows = tuple(range(weights.shape[1])), tuple(range(weights.shape[2]))
    facts = {"index": index, "name": "", "kind": kind, "mechanism": "", "heads": heads, "rows": rows}
    return TracedLayer(**facts, weights=weights, visible=visible, real=real, **more)
