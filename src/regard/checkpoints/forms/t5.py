"""T5 (v1.0, v1.1, Flan): RMSNorm before each sub-layer, a bias by distance in the first block of each stack."""

from collections.abc import Iterator
from typing import Any

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.form import Form, Link, Shapes, activation, link, need, published, unsupported
from regard.models.layers.network import ACTIVATIONS
from regard.models.transformer import Transformer, TransformerConfig


def read_config(values: dict[str, Any], shapes: Shapes) -> TransformerConfig:
    """Our config from Hugging Face's."""
    unsupported(values, is_encoder_decoder=True)
    layers = need(values, "num_layers")
    if not layers:
        raise CheckpointError(
            "config.json: expected num_layers of at least 1, since the first layer has the positions, got 0"
        )
    tied, scaled = _head(values, shapes)
    dropout = float(values.get("dropout_rate") or 0.0)
    return TransformerConfig.t5(
        vocabulary_size=need(values, "vocab_size"),
        embedding_dim=need(values, "d_model"),
        num_layers=layers,
        num_decoder_layers=layers if values.get("num_decoder_layers") is None else need(values, "num_decoder_layers"),
        num_heads=need(values, "num_heads"),
        qk_length=need(values, "d_kv"),
        hidden_dim=need(values, "d_ff"),
        context_length=values.get("n_positions") or 512,
        num_buckets=values.get("relative_attention_num_buckets", 32),
        longest_distance=values.get("relative_attention_max_distance", 128),
        norm_epsilon=float(values.get("layer_norm_epsilon", 1e-6)),
        activation=activation(values, "feed_forward_proj", "relu", gated=True),
        tied=tied,
        scaled_output=scaled,
        dropout=dropout,
        attention_dropout=dropout,
    )


def _head(values: dict[str, Any], shapes: Shapes) -> tuple[bool, bool]:
    """Whether the head is tied to the embedding, and whether its input is scaled.

    In older files `tie_word_embeddings` means both, and a tied file may contain a copy of the head. Newer files always
    say tied and have `scale_decoder_outputs`; there the head is separate if the file has its tensor.
    """
    says_tied = values.get("tie_word_embeddings") is not False
    scaled = bool(values.get("scale_decoder_outputs", says_tied))
    return (says_tied and scaled) or "lm_head.weight" not in shapes, scaled


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Hugging Face's config from ours."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocabulary_size,
        "d_model": config.embedding_dim,
        "d_kv": config.head_length,
        "d_ff": config.hidden_dim or 4 * config.embedding_dim,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.num_heads,
        "n_positions": config.context_length,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.longest_distance,
        "layer_norm_epsilon": config.norm_epsilon,
        "feed_forward_proj": published(config.activation),
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.scaled_output,
        "dropout_rate": config.dropout,
    }


def links(config: TransformerConfig) -> Iterator[Link]:
    """Which of their tensors are which of ours."""
    yield link("shared.weight", "embedding.weight")
    if not config.tied:
        yield link("lm_head.weight", "head.weight")
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        yield link(f"{stack}.final_layer_norm.weight", f"{stack}.norm.weight")
        first = f"{stack}.block.0.layer.0.SelfAttention"
        yield link(f"{first}.relative_attention_bias.weight", f"{stack}.bias.table.weight")
        for index in range(layers):
            yield from _block(config, f"{stack}.block.{index}.layer", f"{stack}.blocks.{index}", stack == "decoder")


def _block(config: TransformerConfig, theirs: str, ours: str, cross: bool) -> Iterator[Link]:
    attentions = [("SelfAttention", "attention"), *([("EncDecAttention", "cross")] if cross else [])]
    for place, (name, attention) in enumerate(attentions):
        for part in "qkvo":
            yield link(f"{theirs}.{place}.{name}.{part}.weight", f"{ours}.{attention}.W_{part}.weight")
        yield link(f"{theirs}.{place}.layer_norm.weight", f"{ours}.{attention}_norm.weight")
    last = f"{theirs}.{len(attentions)}"
    gated = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    plain = {"wi": "up", "wo": "down"}
    for name, projection in (gated if ACTIVATIONS[config.activation].gated else plain).items():
        yield link(f"{last}.DenseReluDense.{name}.weight", f"{ours}.network.{projection}.weight")
    yield link(f"{last}.layer_norm.weight", f"{ours}.network_norm.weight")


FORM = Form(
    model_types=("t5",),
    model=Transformer,
    config=TransformerConfig,
    read_config=read_config,
    write_config=write_config,
    links=links,
    # The embedding by its other names, and a bias of cross-attention that early files have and no model reads.
    ignored=r"((encoder|decoder)\.embed_tokens|.*EncDecAttention\.relative_attention_bias)\.weight$",
    copies={"lm_head.weight": "shared.weight"},
    start_fields=("bos_token_id", "decoder_start_token_id"),
)
