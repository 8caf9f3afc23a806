"""Small models, ours and transformers', whose attention tests change."""

import pytest
import torch

import regard as rg
from generating import redraw

transformers = pytest.importorskip("transformers")

SIZES = {"vocabulary_size": 40, "embedding_dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def decoder(mechanism="softmax", **more):
    model = rg.Decoder(rg.DecoderConfig(**{**SIZES, **more}, mechanism=mechanism)).eval()
    redraw(model, 0.02)
    return loud(model)


def loud(model):
    """The model with weights ten times as large: a fresh one's attention hardly moves its output."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter *= 10
    return model


def tokens(batch=2, length=7):
    return torch.randint(3, 40, (batch, length))


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=4, n_positions=64, **ENDS)
    ).eval()


def llama():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, **ENDS
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def t5():
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    ).eval()


def bert():
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32
    )
    return transformers.BertForMaskedLM(config).eval()


THEIRS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def run(model, ids):
    """The logits of any of the models here."""
    output = model(ids)
    return getattr(output, "logits", output)


def builders():
    return {"ours": decoder, **THEIRS}
