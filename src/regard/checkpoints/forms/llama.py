"""Llama, Mistral and Qwen2: rotary positions, RMSNorm, SwiGLU, grouped heads, windows in some layers."""

from collections.abc import Iterator
from typing import Any

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.form import Form, Link, Shapes, linear, link, need, unsupported
from regard.core.masks import Window
from regard.models.decoder import Decoder, DecoderConfig
from regard.models.layers.positions import RotaryScaling


def read_config(values: dict[str, Any], shapes: Shapes) -> DecoderConfig:
    """Our config from Hugging Face's."""
    kind = values["model_type"]
    unsupported(values, hidden_act="silu", pretraining_tp=1)
    layers = need(values, "num_hidden_layers")
    base, scaling = _rotary(values)
    window, window_layers = _window(values, kind, layers)
    qkv_bias = kind == "qwen2" or bool(values.get("attention_bias", False))
    return DecoderConfig(
        vocabulary_size=need(values, "vocab_size"),
        embedding_dim=need(values, "hidden_size"),
        num_layers=layers,
        num_heads=need(values, "num_attention_heads"),
        num_kv_heads=values.get("num_key_value_heads") or need(values, "num_attention_heads"),
        qk_length=values.get("head_dim"),
        value_length=values.get("head_dim"),
        hidden_dim=need(values, "intermediate_size"),
        context_length=need(values, "max_position_embeddings"),
        rotary_base=base,
        rotary_scaling=scaling,
        norm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        attention_bias=qkv_bias,
        output_bias=kind == "llama" and qkv_bias,
        network_bias=bool(values.get("mlp_bias", False)),
        window=window,
        window_layers=window_layers,
        tied=bool(values.get("tie_word_embeddings", False)),
        attention_dropout=float(values.get("attention_dropout") or 0.0),
    )


def _rotary(values: dict[str, Any]) -> tuple[float, RotaryScaling | None]:
    """The rotary base and scaling. Newer files have both in rope_parameters, older ones in two fields."""
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    base = float(rope.get("rope_theta", values.get("rope_theta") or 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    unsupported(rope, partial_rotary_factor=1.0)
    if kind == "default":
        return base, None
    if kind not in ("linear", "dynamic", "llama3"):
        raise CheckpointError(f"config.json: expected rope_type linear, dynamic or llama3, got {kind!r:.80}")
    more = {}
    if kind == "llama3":
        more = {
            "low_frequency_factor": float(rope["low_freq_factor"]),
            "high_frequency_factor": float(rope["high_freq_factor"]),
            "original_context_length": int(
                rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
            ),
        }
    return base, RotaryScaling(kind=kind, factor=float(rope["factor"]), **more)  # type: ignore[arg-type]


def _window(values: dict[str, Any], kind: str, layers: int) -> tuple[Window | None, tuple[int, ...] | None]:
    """The window and its layers; `sliding_window` counts the token itself, and is 4096 by default in transformers."""
    sizes = {"sliding_window": 4096, **values}
    if kind == "llama" or not sizes["sliding_window"]:
        return None, None
    if kind == "qwen2" and not values.get("use_sliding_window", False):
        return None, None
    window = Window(before=need(sizes, "sliding_window") - 1)
    if kind == "mistral":
        return window, None
    types = values.get("layer_types")
    if types is None:
        return window, tuple(range(values.get("max_window_layers", 28), layers))
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"config.json: expected full_attention or sliding_attention as the layer_types of {layers} layers, "
            f"got {types!r:.80}"
        )
    return window, tuple(index for index, layer_type in enumerate(types) if layer_type == "sliding_attention")


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Hugging Face's config of ours: Llama's unless there is a window (Mistral) or biases on q, k, v alone (Qwen2)."""
    qwen = config.attention_bias and not config.output_bias
    mistral = config.window is not None and config.window_layers is None
    kind = "qwen2" if qwen else "mistral" if mistral else "llama"
    sliding = {} if config.window is None else {"sliding_window": config.window.width}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if (scaling := config.rotary_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_context_length,
            }
    values: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[kind] + "ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.embedding_dim,
        "intermediate_size": config.hidden_dim or 4 * config.embedding_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_length,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary_base,
        "rope_parameters": rope,
        "attention_dropout": config.attention_dropout,
    }
    if kind == "llama":
        values |= {"attention_bias": config.attention_bias, "mlp_bias": config.network_bias}
    elif kind == "mistral":
        values |= sliding
    else:
        types = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        values |= {"use_sliding_window": config.window is not None, "layer_types": types, **sliding}
    return values


def links(config: DecoderConfig) -> Iterator[Link]:
    """Which of their tensors are which of ours."""
    yield link("model.embed_tokens.weight", "embedding.weight")
    yield link("model.norm.weight", "stack.norm.weight")
    if not config.tied:
        yield link("lm_head.weight", "head.weight")
    for index in range(config.num_layers):
        theirs, ours = f"model.layers.{index}", f"stack.blocks.{index}"
        for name, bias in (
            ("q", config.attention_bias),
            ("k", config.attention_bias),
            ("v", config.attention_bias),
            ("o", config.output_bias),
        ):
            yield from linear(f"{theirs}.self_attn.{name}_proj", f"{ours}.attention.W_{name}", bias=bias)
        for name in ("gate", "up", "down"):
            yield from linear(f"{theirs}.mlp.{name}_proj", f"{ours}.network.{name}", bias=config.network_bias)
        yield link(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
        yield link(f"{theirs}.post_attention_layernorm.weight", f"{ours}.network_norm.weight")


FORM = Form(
    model_types=("llama", "mistral", "qwen2"),
    model=Decoder,
    config=DecoderConfig,
    read_config=read_config,
    write_config=write_config,
    links=links,
    prefix="model.",
    ignored=r".*rotary_emb\.inv_freq$",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)
