"""GPT-2: learned positions, LayerNorm, GELU; projections stored transposed, and q, k, v as one."""

from collections.abc import Iterator
from typing import Any

from regard.checkpoints.form import Form, Link, Shapes, activation, linear, link, need, published, unsupported
from regard.core.mechanisms import Softmax
from regard.models.decoder import Decoder, DecoderConfig


def read_config(values: dict[str, Any], shapes: Shapes) -> DecoderConfig:
    """Our config from Hugging Face's."""
    unsupported(values, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    scaled = values.get("scale_attn_weights", True)
    width = need(values, "n_embd")
    return DecoderConfig.gpt2(
        vocabulary_size=need(values, "vocab_size"),
        embedding_dim=width,
        num_layers=need(values, "n_layer"),
        num_heads=need(values, "n_head"),
        hidden_dim=values.get("n_inner") or 4 * width,
        context_length=need(values, "n_positions"),
        norm_epsilon=float(values.get("layer_norm_epsilon", 1e-5)),
        activation=activation(values, "activation_function", "gelu_new"),
        tied=bool(values.get("tie_word_embeddings", True)),
        mechanism=Softmax() if scaled else Softmax(beta=1.0),
        dropout=float(values.get("resid_pdrop") or 0.0),
        attention_dropout=float(values.get("attn_pdrop") or 0.0),
    )


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Hugging Face's config from ours."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocabulary_size,
        "n_embd": config.embedding_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.hidden_dim or 4 * config.embedding_dim,
        "n_positions": config.context_length,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": published(config.activation),
        "tie_word_embeddings": config.tied,
        "scale_attn_weights": config.mechanism != Softmax(beta=1.0),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


def links(config: DecoderConfig) -> Iterator[Link]:
    """Which of their tensors are which of ours."""
    yield link("transformer.wte.weight", "embedding.weight")
    yield link("transformer.wpe.weight", "positions.weight")
    yield from linear("transformer.ln_f", "stack.norm")
    if not config.tied:
        yield link("lm_head.weight", "head.weight")
    for index in range(config.num_layers):
        theirs, ours = f"transformer.h.{index}", f"stack.blocks.{index}"
        heads = (f"{ours}.attention.W_{name}" for name in "qkv")
        yield from linear(f"{theirs}.attn.c_attn", *heads, transposed=True)
        yield from linear(f"{theirs}.attn.c_proj", f"{ours}.attention.W_o", transposed=True)
        yield from linear(f"{theirs}.mlp.c_fc", f"{ours}.network.up", transposed=True)
        yield from linear(f"{theirs}.mlp.c_proj", f"{ours}.network.down", transposed=True)
        yield from linear(f"{theirs}.ln_1", f"{ours}.attention_norm")
        yield from linear(f"{theirs}.ln_2", f"{ours}.network_norm")


FORM = Form(
    model_types=("gpt2",),
    model=Decoder,
    config=DecoderConfig,
    read_config=read_config,
    write_config=write_config,
    links=links,
    prefix="transformer.",
    ignored=r".*\.attn\.(masked_)?bias$",
    copies={"lm_head.weight": "transformer.wte.weight"},
)
