"""Models of transformers with small random weights, as the reference that ours must agree with."""

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from torch import Tensor

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # small weights would make every architecture look alike
}
LLAMA = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 128}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **more}, "max_position_embeddings": 48}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-mqa": ("Llama", LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-head-length": ("Llama", LLAMA | {"head_dim": 12}),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", LLAMA | rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", LLAMA | rope("dynamic", factor=4.0)),
    "llama-llama3": ("Llama", LLAMA | rope("llama3", factor=8.0, **LLAMA3)),
    "mistral-window": ("Mistral", LLAMA | {"sliding_window": 9, "head_dim": 10}),
    "mistral-full": ("Mistral", LLAMA | {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 50, "activation_function": "relu"}),
    "gpt2-unscaled": ("GPT2", GPT2 | {"scale_attn_weights": False, "activation_function": "gelu"}),
}
ALBERT = SMALL | {"embedding_size": 20, "max_position_embeddings": 128}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForPreTraining", SMALL | {"max_position_embeddings": 128}),
    "bert-plain": ("Bert", "Model", SMALL | {"hidden_act": "relu", "max_position_embeddings": 80}),
    "bert-untied": ("Bert", "ForMaskedLM", SMALL | {"tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    "bert-classes": ("Bert", "ForSequenceClassification", SMALL | {"num_labels": 5, "type_vocab_size": 3}),
    "albert": ("Albert", "ForPreTraining", ALBERT),
    "albert-groups": ("Albert", "ForMaskedLM", ALBERT | {"num_hidden_layers": 5, "num_hidden_groups": 2}),
    "albert-classes": ("Albert", "ForSequenceClassification", ALBERT | {"num_labels": 4}),
}


def decoder(name: str) -> Any:
    kind, values = DECODERS[name]
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return build(f"{kind}{head}", f"{kind}Config", values)


def encoder(name: str) -> Any:
    kind, head, values = ENCODERS[name]
    return build(f"{kind}{head}", f"{kind}Config", values)


def build(model: str, config: str, values: dict[str, Any], seed: int = 0) -> Any:
    """A model in float64, its biases and norms random too: zeros and ones would hide a mistake."""
    torch.manual_seed(seed)
    made = getattr(transformers, model)(getattr(transformers, config)(**values)).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def sequences(batch: int = 3, length: int = 70, vocabulary: int = 97) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def left_padded(batch: int, length: int, *pads: int) -> tuple[Tensor, Tensor]:
    """Which tokens are real (B, T), with so many of each row's first ones padding; and their positions."""
    valid = torch.ones(batch, length, dtype=torch.bool)
    for row, count in enumerate(pads):
        valid[row, :count] = False
    return valid, (valid.long().cumsum(-1) - 1).clamp(min=0)
