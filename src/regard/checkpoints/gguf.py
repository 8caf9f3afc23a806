"""GGUF files of the Llama form: config and tokenizer are in the metadata, tensors may be quantized.

For rotary positions llama.cpp pairs neighbouring coordinates, Hugging Face the two halves, so llama.cpp's converter
reorders the rows of W_q and W_k within each head. Loading restores the order.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from regard.checkpoints.assembly import assemble
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.form import Link, linear, link
from regard.checkpoints.gguf_file import GgufFile, open_gguf
from regard.checkpoints.tokenizer import Tokenizer
from regard.core.families.mechanism import Mechanism
from regard.models.base import Model
from regard.models.decoder import Decoder, DecoderConfig
from regard.models.layers.positions import Rotary, RotaryScaling


def load(
    path: Path,
    *,
    mechanism: Mechanism | str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """The model of a GGUF file, dequantized to float32 unless `dtype` says otherwise."""
    file = open_gguf(path)
    try:
        config = read_config(file)
        tokenizer = Tokenizer.from_gguf(file.metadata)
        ends = () if tokenizer.eos is None else (tokenizer.eos,)
        config = replace(config, start_token=tokenizer.bos, end_tokens=ends, padding_token=tokenizer.pad)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: expected the metadata of a llama, got {error!r:.200}") from None
    if mechanism is not None:
        config = config.with_mechanism(mechanism)

    def read(name: str) -> Tensor:
        tensor = file.read(name)
        if name.endswith(("attn_q.weight", "attn_q.bias")):
            return halves(tensor, config.num_heads)
        if name.endswith(("attn_k.weight", "attn_k.bias")):
            return halves(tensor, config.num_kv_heads or config.num_heads)
        return tensor

    model = assemble(
        Decoder, config, links, file.shapes, read, path=path, ignored=r"rope_freqs\.weight", dtype=dtype, device=device
    )
    model.tokenizer = tokenizer
    return model


def halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from neighbours (0, K/2, 1, K/2 + 1, …) to halves (0, 1, …)."""
    return rearrange(tensor, "(h k pair) ... -> (h pair k) ...", h=heads, pair=2)


def read_config(file: GgufFile) -> DecoderConfig:
    """Our config from a file's metadata."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path}: expected the architecture llama, got {architecture!r:.80}")

    def field(name: str, kind: type[int] | type[float], default: Any = None) -> Any:
        value: Any = file.metadata.get(f"llama.{name}", default)
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 2**31:
            raise CheckpointError(f"{file.path}: expected llama.{name} to be {kind.__name__}, got {value!r:.80}")
        return value

    width, heads = field("embedding_length", int), field("attention.head_count", int)
    length = field("attention.key_length", int, width // heads)
    for name, expected in (("rope.dimension_count", length), ("attention.value_length", length)):
        if field(name, int, expected) != expected:
            raise CheckpointError(
                f"{file.path}: expected llama.{name} = {expected} (qk_length), got {field(name, int)}"
            )
    if file.metadata.get("llama.expert_count"):
        raise CheckpointError(f"{file.path}: expected one network per layer, got experts, which are not supported")
    base = field("rope.freq_base", float, 10000.0)
    return DecoderConfig(
        vocabulary_size=file.shapes.get("token_embd.weight", (0,))[0],
        embedding_dim=width,
        num_layers=field("block_count", int),
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", int, heads),
        qk_length=length,
        value_length=length,
        hidden_dim=field("feed_forward_length", int),
        context_length=field("context_length", int),
        rotary_base=base,
        rotary_scaling=_scaling(file, length, base),
        norm_epsilon=field("attention.layer_norm_rms_epsilon", float),
        attention_bias="blk.0.attn_q.bias" in file.shapes,
        output_bias="blk.0.attn_output.bias" in file.shapes,
        tied="output.weight" not in file.shapes,
    )


def _scaling(file: GgufFile, length: int, base: float) -> RotaryScaling | None:
    """The rotary scaling, from the metadata or, for Llama 3, from a tensor of divisors."""
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return RotaryScaling(kind="linear", factor=float(file.metadata["llama.rope.scaling.factor"]))
    if kind != "none":
        raise CheckpointError(f"{file.path}: expected llama.rope.scaling.type linear or none, got {kind!r:.80}")
    if "rope_freqs.weight" not in file.shapes:
        return None
    divisors = file.read("rope_freqs.weight")
    scaling = RotaryScaling(kind="llama3", factor=float(divisors.max()))
    plain, scaled = Rotary(length=length, base=base), Rotary(length=length, base=base, scaling=scaling)
    if tuple(divisors.shape) != (length // 2,) or not torch.allclose(
        plain.frequencies() / scaled.frequencies(), divisors, rtol=1e-3
    ):
        raise CheckpointError(f"{file.path}: expected rope_freqs.weight to be Llama 3's scaling, got other divisors")
    return scaling


def links(config: DecoderConfig) -> Iterator[Link]:
    """Which of the file's tensors are which of ours."""
    yield link("token_embd.weight", "embedding.weight")
    yield link("output_norm.weight", "stack.norm.weight")
    if not config.tied:
        yield link("output.weight", "head.weight")
    for index in range(config.num_layers):
        theirs, ours = f"blk.{index}", f"stack.blocks.{index}"
        for name, bias in (("q", config.attention_bias), ("k", config.attention_bias), ("v", config.attention_bias)):
            yield from linear(f"{theirs}.attn_{name}", f"{ours}.attention.W_{name}", bias=bias)
        yield from linear(f"{theirs}.attn_output", f"{ours}.attention.W_o", bias=config.output_bias)
        for name in ("gate", "up", "down"):
            yield from linear(f"{theirs}.ffn_{name}", f"{ours}.network.{name}", bias=False)
        yield link(f"{theirs}.attn_norm.weight", f"{ours}.attention_norm.weight")
        yield link(f"{theirs}.ffn_norm.weight", f"{ours}.network_norm.weight")
