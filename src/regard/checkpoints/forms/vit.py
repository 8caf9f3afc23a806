"""ViT: patches, a class token, learned positions, pre-norm blocks; and a classifier, or the pooler of pre-training.

The pooler, a tanh layer on the class token, becomes the hidden layer of our MLP head: a model that was saved with a
pooler and without a classifier returns the pooler's output. With a classifier the pooler has no effect and is skipped.
"""

from collections.abc import Iterator
from typing import Any

from regard.checkpoints.form import (
    Form,
    Link,
    Shapes,
    activation,
    class_names,
    linear,
    link,
    need,
    published,
    unsupported,
    written_names,
)
from regard.models.vision import VisionConfig, VisionTransformer


def read_config(values: dict[str, Any], shapes: Shapes) -> VisionConfig:
    """Our config from Hugging Face's."""
    width = need(values, "hidden_size")
    classified = "classifier.weight" in shapes
    pooled = "vit.pooler.dense.weight" in shapes and not classified
    if pooled:
        unsupported(values, pooler_act="tanh")
    return VisionConfig(
        image_size=_size(values, "image_size", 224),
        patch_size=_size(values, "patch_size", 16),
        num_channels=values.get("num_channels", 3),
        embedding_dim=width,
        num_layers=need(values, "num_hidden_layers"),
        num_heads=need(values, "num_attention_heads"),
        hidden_dim=need(values, "intermediate_size"),
        num_classes=shapes["classifier.weight"][0] if classified else 0,
        class_names=class_names(values, shapes["classifier.weight"][0]) if classified else (),
        head="mlp" if pooled else "linear",
        representation_dim=(values.get("pooler_output_size") or width) if pooled else None,
        norm_epsilon=float(values.get("layer_norm_eps", 1e-12)),
        activation=activation(values, "hidden_act", "gelu"),
        attention_bias=bool(values.get("qkv_bias", True)),
        dropout=float(values.get("hidden_dropout_prob") or 0.0),
        attention_dropout=float(values.get("attention_probs_dropout_prob") or 0.0),
    )


def _size(values: dict[str, Any], name: str, default: int) -> Any:
    size = need({name: default, **values}, name, (int, list, tuple))
    return size if isinstance(size, int) else tuple(size)


def write_config(config: VisionConfig) -> dict[str, Any]:
    """Hugging Face's config from ours."""
    return {
        "architectures": ["ViTForImageClassification" if config.num_classes else "ViTModel"],
        "model_type": "vit",
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "hidden_size": config.embedding_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.hidden_dim or 4 * config.embedding_dim,
        "pooler_output_size": config.representation_dim or config.embedding_dim,
        "pooler_act": "tanh",
        "layer_norm_eps": config.norm_epsilon,
        "hidden_act": published(config.activation),
        "qkv_bias": config.attention_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        **(written_names(config.class_names, config.num_classes) if config.num_classes else {}),
    }


def links(config: VisionConfig) -> Iterator[Link]:
    """Which of their tensors are which of ours."""
    yield link("vit.embeddings.cls_token", "class_token")
    yield link("vit.embeddings.position_embeddings", "positions")
    yield from linear("vit.embeddings.patch_embeddings.projection", "patches")
    for index in range(config.num_layers):
        theirs, ours = f"vit.encoder.layer.{index}", f"stack.blocks.{index}"
        for name, word in (("q", "query"), ("k", "key"), ("v", "value")):
            yield from linear(
                f"{theirs}.attention.attention.{word}", f"{ours}.attention.W_{name}", bias=config.attention_bias
            )
        yield from linear(f"{theirs}.attention.output.dense", f"{ours}.attention.W_o")
        yield from linear(f"{theirs}.intermediate.dense", f"{ours}.network.up")
        yield from linear(f"{theirs}.output.dense", f"{ours}.network.down")
        yield from linear(f"{theirs}.layernorm_before", f"{ours}.attention_norm")
        yield from linear(f"{theirs}.layernorm_after", f"{ours}.network_norm")
    yield from linear("vit.layernorm", "stack.norm")
    if config.head == "mlp":
        yield from linear("vit.pooler.dense", "hidden")
    if config.num_classes:
        yield from linear("classifier", "head")


FORM = Form(
    model_types=("vit",),
    model=VisionTransformer,
    config=VisionConfig,
    read_config=read_config,
    write_config=write_config,
    links=links,
    prefix="vit.",
    # Not used by a classifier: the pooler, and the token of masked patches.
    ignored=r"vit\.(pooler\.dense\.(weight|bias)|embeddings\.mask_token)",
)
