"""BERT and ALBERT: encoders with heads for masked words, for the next sentence and for classes."""

from collections.abc import Iterator
from typing import Any

from regard.checkpoints import sentences
from regard.checkpoints.errors import CheckpointError
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
from regard.models.encoder import Encoder, EncoderConfig


def _shared(values: dict[str, Any], shapes: Shapes, pooler: str) -> dict[str, Any]:
    """The fields that both configs share; `pooler` is the name of the pooler's weight."""
    unsupported(values, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    if "classifier.weight" in shapes and pooler not in shapes:
        raise CheckpointError(
            "config.json: expected a classifier of sequences, which needs a pooler, got a classifier without one: "
            "classifiers of tokens are not supported"
        )
    segments = need({"type_vocab_size": 2, **values}, "type_vocab_size")
    if not segments:
        raise CheckpointError("config.json: expected type_vocab_size of at least 1, got 0")
    num_classes = shapes["classifier.weight"][0] if "classifier.weight" in shapes else 0
    return {
        "pooler": pooler in shapes,
        "vocabulary_size": need(values, "vocab_size"),
        "embedding_dim": need(values, "hidden_size"),
        "num_layers": need(values, "num_hidden_layers"),
        "num_heads": need(values, "num_attention_heads"),
        "hidden_dim": need(values, "intermediate_size"),
        "context_length": need(values, "max_position_embeddings"),
        "num_segments": segments,
        "norm_epsilon": float(values.get("layer_norm_eps", 1e-12)),
        "num_classes": num_classes,
        "class_names": class_names(values, num_classes),
        "tied": bool(values.get("tie_word_embeddings", True)),
        "dropout": float(values.get("hidden_dropout_prob") or 0.0),
        "attention_dropout": float(values.get("attention_probs_dropout_prob") or 0.0),
    }


def _written(config: EncoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.embedding_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.hidden_dim or 4 * config.embedding_dim,
        "max_position_embeddings": config.context_length,
        "type_vocab_size": config.num_segments,
        "layer_norm_eps": config.norm_epsilon,
        "hidden_act": published(config.activation),
        "tie_word_embeddings": config.tied,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        **(written_names(config.class_names, config.num_classes) if config.num_classes else {}),
    }


def _head(config: EncoderConfig, name: str) -> str:
    """The class of transformers with the same heads."""
    if config.num_classes:
        return f"{name}ForSequenceClassification"
    if config.next_sentence:
        return f"{name}ForPreTraining" if config.masked_words else f"{name}ForNextSentencePrediction"
    return f"{name}ForMaskedLM" if config.masked_words else f"{name}Model"


def read_bert(values: dict[str, Any], shapes: Shapes) -> EncoderConfig:
    """Our config from Hugging Face's."""
    return EncoderConfig(
        **_shared(values, shapes, "bert.pooler.dense.weight"),
        activation=activation(values, "hidden_act", "gelu"),
        masked_words="cls.predictions.bias" in shapes,
        next_sentence="cls.seq_relationship.weight" in shapes,
    )


def write_bert(config: EncoderConfig) -> dict[str, Any]:
    """Hugging Face's config from ours."""
    return {"architectures": [_head(config, "Bert")], "model_type": "bert", **_written(config)}


def bert_links(config: EncoderConfig) -> Iterator[Link]:
    """Which of their tensors are which of ours."""
    yield link("bert.embeddings.word_embeddings.weight", "embedding.weight")
    yield link("bert.embeddings.position_embeddings.weight", "positions.weight")
    yield link("bert.embeddings.token_type_embeddings.weight", "segments.weight")
    yield from linear("bert.embeddings.LayerNorm", "embedding_norm")
    for index in range(config.num_layers):
        theirs, ours = f"bert.encoder.layer.{index}", f"stack.blocks.{index}"
        for name, word in (("q", "query"), ("k", "key"), ("v", "value")):
            yield from linear(f"{theirs}.attention.self.{word}", f"{ours}.attention.W_{name}")
        yield from linear(f"{theirs}.attention.output.dense", f"{ours}.attention.W_o")
        yield from linear(f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm")
        yield from linear(f"{theirs}.intermediate.dense", f"{ours}.network.up")
        yield from linear(f"{theirs}.output.dense", f"{ours}.network.down")
        yield from linear(f"{theirs}.output.LayerNorm", f"{ours}.network_norm")
    if config.pooler:
        yield from linear("bert.pooler.dense", "pooler")
    if config.masked_words:
        yield link("cls.predictions.bias", "words.bias")
        yield from linear("cls.predictions.transform.dense", "words.dense")
        yield from linear("cls.predictions.transform.LayerNorm", "words.norm")
        if not config.tied:
            yield link("cls.predictions.decoder.weight", "words.table.weight")
            yield link("cls.predictions.decoder.bias", "words.bias")  # transformers uses this bias, so it is read last
    if config.next_sentence:
        yield from linear("cls.seq_relationship", "order")
    if config.num_classes:
        yield from linear("classifier", "classes")


def read_albert(values: dict[str, Any], shapes: Shapes) -> EncoderConfig:
    """Our config from Hugging Face's."""
    unsupported(values, inner_group_num=1)
    if "sop_classifier.classifier.weight" in shapes and "predictions.bias" not in shapes:
        raise CheckpointError(
            "config.json: expected ALBERT's head for masked words together with that for sentence order, got none"
        )
    return EncoderConfig(
        **_shared(values, shapes, "albert.pooler.weight"),
        activation=activation(values, "hidden_act", "gelu_new"),
        factor_dim=need(values, "embedding_size"),
        num_shared=values.get("num_hidden_groups", 1),
        masked_words="predictions.bias" in shapes,
        next_sentence="sop_classifier.classifier.weight" in shapes,
    )


def write_albert(config: EncoderConfig) -> dict[str, Any]:
    """Hugging Face's config from ours."""
    return {
        "architectures": [_head(config, "Albert")],
        "model_type": "albert",
        **_written(config),
        "embedding_size": config.factor_dim,
        "num_hidden_groups": config.num_shared or config.num_layers,
        "inner_group_num": 1,
    }


def albert_links(config: EncoderConfig) -> Iterator[Link]:
    """Which of their tensors are which of ours."""
    yield link("albert.embeddings.word_embeddings.weight", "embedding.weight")
    yield link("albert.embeddings.position_embeddings.weight", "positions.weight")
    yield link("albert.embeddings.token_type_embeddings.weight", "segments.weight")
    yield from linear("albert.embeddings.LayerNorm", "embedding_norm")
    yield from linear("albert.encoder.embedding_hidden_mapping_in", "widen")
    for index in range(config.num_shared or config.num_layers):
        theirs = f"albert.encoder.albert_layer_groups.{index}.albert_layers.0"
        ours = f"stack.blocks.{index}"
        for name, word in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "dense")):
            yield from linear(f"{theirs}.attention.{word}", f"{ours}.attention.W_{name}")
        yield from linear(f"{theirs}.attention.LayerNorm", f"{ours}.attention_norm")
        yield from linear(f"{theirs}.ffn", f"{ours}.network.up")
        yield from linear(f"{theirs}.ffn_output", f"{ours}.network.down")
        yield from linear(f"{theirs}.full_layer_layer_norm", f"{ours}.network_norm")
    if config.pooler:
        yield from linear("albert.pooler", "pooler")
    if config.masked_words:
        yield link("predictions.bias", "words.bias")
        yield from linear("predictions.dense", "words.dense")
        yield from linear("predictions.LayerNorm", "words.norm")
        if not config.tied:
            yield link("predictions.decoder.weight", "words.table.weight")
            yield link("predictions.decoder.bias", "words.bias")  # transformers uses this bias, so it is read last
    if config.next_sentence:
        yield from linear("sop_classifier.classifier", "order")
    if config.num_classes:
        yield from linear("classifier", "classes")


SENTENCES: dict[str, Any] = {
    "read_more": sentences.read,
    "write_more": sentences.written,
    "more_fields": sentences.FIELDS,
}
"""Encoders may come from a sentence-transformers folder, with more config files."""
BERT = Form(
    model_types=("bert",),
    model=Encoder,
    config=EncoderConfig,
    read_config=read_bert,
    write_config=write_bert,
    links=bert_links,
    **SENTENCES,
    prefix="bert.",
    # Buffers, and three heads that only AntiBERTy has.
    ignored=r".*embeddings\.position_ids$|cls\.(species|chain|graft)\..*",
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)
ALBERT = Form(
    model_types=("albert",),
    model=Encoder,
    config=EncoderConfig,
    read_config=read_albert,
    write_config=write_albert,
    links=albert_links,
    **SENTENCES,
    prefix="albert.",
    ignored=r".*embeddings\.position_ids$",
    copies={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
)
