"""Files of several dtypes give models of one."""

import functools
import itertools
import random
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import peers
import regard as rg
from regard.checkpoints.huggingface import export
from saved_models import MODELS

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def forward(model):
    """What a model makes of some input of its own kind, in its own dtype."""
    tokens = peers.sequences(2, 6, 19)
    if isinstance(model, rg.Transformer):
        return model(tokens, tokens)
    if isinstance(model, rg.Decoder | rg.Encoder):
        return model(tokens)
    size = getattr(model.config, "image_size", 32)
    sides = size if isinstance(size, tuple) else (size, size)
    return model(torch.randn(1, model.config.num_channels, *sides, dtype=model.dtype))


def mixed(folder, draw):
    """Give every tensor of a folder a dtype that `draw` picks; what they are then."""
    tensors = {name: tensor.to(draw()) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


@st.composite
def hugging_face_models(draw):
    """A model of any published form, of random sizes and options."""
    heads, length = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4]))
    kind = draw(st.sampled_from(["Llama", "Mistral", "Qwen2", "GPT2", "Bert", "Albert", "T5", "ViT"]))
    sizes = {"vocab_size": 19, "hidden_size": heads * length, "intermediate_size": draw(st.integers(1, 9))}
    sizes |= {"num_hidden_layers": draw(st.integers(1, 3)), "num_attention_heads": heads, "pad_token_id": 0}
    tied = {"tie_word_embeddings": draw(st.booleans())}
    if kind in ("Llama", "Mistral", "Qwen2"):
        sizes |= tied | {"num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))}
        name = f"{kind}ForCausalLM"
    elif kind == "GPT2":
        name, sizes = (
            "GPT2LMHeadModel",
            {"n_embd": heads * length, "n_head": heads, "n_layer": 2, "vocab_size": 19, "eos_token_id": None} | tied,
        )
    elif kind == "T5":
        name, sizes = "T5ForConditionalGeneration", {"d_model": 6, "d_kv": length, "num_heads": heads, "vocab_size": 19}
        sizes |= {"d_ff": 5, "num_layers": 2, "feed_forward_proj": draw(st.sampled_from(["relu", "gated-gelu"]))}
    elif kind == "ViT":
        name = f"ViT{draw(st.sampled_from(['Model', 'ForImageClassification']))}"
        sizes |= {"image_size": 8, "patch_size": 4}
    else:
        sizes |= {"embedding_size": 3} if kind == "Albert" else {}
        name = kind + draw(st.sampled_from(["Model", "ForMaskedLM", "ForSequenceClassification"]))
    return peers.build(name, f"{kind}Config", sizes).float()


@settings(max_examples=16, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(
    theirs=hugging_face_models(), few=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3), seed=st.integers(0, 9)
)
@torch.no_grad()
def test_files_of_several_dtypes_give_models_of_one(theirs, few, seed):
    with tempfile.TemporaryDirectory() as root:
        folder = peers.saved(theirs, Path(root) / "model")
        tensors = mixed(folder, functools.partial(random.Random(seed).choice, few))
        model = rg.load(folder)
        assert {tensor.dtype for tensor in model.state_dict().values()} == {model.dtype}
        assert model.dtype in {tensor.dtype for tensor in tensors.values()} | {torch.float32, torch.bfloat16}
        assert forward(model).dtype == model.dtype
        expected = {name: tensor.to(model.dtype) for name, tensor in tensors.items()}
        written = export(model)[1]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items() if name in expected)
        again = rg.load(rg.save(model, Path(root) / "again"))
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_our_own_files_of_several_dtypes_too(name, tmp_path):
    folder = rg.save(MODELS[name](), tmp_path / "model")
    few = itertools.cycle([torch.float32, torch.bfloat16, torch.float64])
    mixed(folder, lambda: next(few))
    model = rg.load(folder)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {model.dtype}
    assert forward(model).isfinite().all()
    assert rg.load(folder, dtype=torch.float64).dtype == torch.float64


@torch.no_grad()
def test_t5_in_float16_with_float32_parts_computes_what_transformers_does(tmp_path):
    values = {"vocab_size": 97, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    peers.build("T5ForConditionalGeneration", "T5Config", values).half().save_pretrained(tmp_path / "half")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "half", dtype=torch.float16)
    folder = peers.saved(theirs, tmp_path / "mixed")
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {
        torch.float16,
        torch.float32,
    }  # transformers keeps `wo` in float32
    tokens, target = peers.sequences(2, 20), peers.sequences(2, 9)
    model = rg.load(folder)
    assert model.dtype == torch.float32  # `wo` is kept wider because float16 would overflow
    expected = theirs.double()(input_ids=tokens, decoder_input_ids=target).logits
    assert (model.double()(tokens, target) - expected).abs().max() <= 1e-10
