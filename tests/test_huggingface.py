"""Hugging Face folders: configs, shards, tied weights, windows and special tokens."""

import json
import shutil

import pytest
import torch
import transformers

import peers
import regard as rg
from saved_models import MODELS, SIZES, change_tensors


def test_a_form_hugging_face_has_not_is_refused_before_anything_is_written(tmp_path):
    for change in ({"mechanism": "quadratic"}, {"positions": "alibi"}, {"value_length": 3, "qk_length": 6}):
        words = f"got a model whose {next(iter(change))} cannot be written in a config of llama or"
        with pytest.raises(ValueError, match=words):
            rg.save(rg.Decoder(rg.DecoderConfig(**SIZES, **change)), tmp_path / "model", layout="huggingface")
    with pytest.raises(ValueError, match="layout: expected regard or huggingface"):
        rg.save(MODELS["llama"](), tmp_path / "model", layout="onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_same_for_hugging_face_and_gguf(tmp_path):
    theirs = peers.saved(peers.decoder("gpt2"), tmp_path / "gpt2")
    change_tensors(theirs, drop=["transformer.wpe.weight"], **{"transformer.h.9.ln_1.weight": torch.ones(32)})
    with pytest.raises(rg.CheckpointError, match=r"1 missing: transformer.wpe.weight; 1 unexpected: transformer.h.9"):
        rg.load(theirs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mamba"}, "expected model_type to be one of gpt2, llama"),
        ({"model_type": None}, "expected model_type to be one of"),
        ({"num_hidden_layers": -1}, "num_hidden_layers of 0 to"),
        ({"num_hidden_layers": "3"}, "expected num_hidden_layers to be int, got '3'"),
        ({"num_hidden_layers": 10**6}, "at most 4096 layers"),
        ({"hidden_size": None}, "expected hidden_size to be int"),
        ({"hidden_act": "tanh"}, "expected hidden_act = 'silu'"),
        ({"head_dim": [1]}, "expected a llama config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "expected rope_type linear, dynamic or llama3"),
        ({"rope_parameters": {"rope_type": "linear"}}, "expected a llama config"),
        ({"rope_parameters": 7}, "expected a llama config"),
        ({"num_key_value_heads": 3}, "num_kv_heads: expected a divisor"),
        ({"model_type": "mistral", "sliding_window": "9"}, "expected sliding_window to be int, got '9'"),
        ({"eos_token_id": "</s>"}, "expected whole numbers for end_tokens"),
        ({"eos_token_id": 97}, "expected eos_token_id from 0 to 96, or null for none, got 97"),
        ({"eos_token_id": [2, -1]}, r"expected eos_token_id from 0 to 96, or null for none, got \[2, -1\]"),
    ],
)
def test_a_hugging_face_config_that_is_none_is_one_error(tmp_path, values, message):
    theirs = peers.saved(peers.decoder("llama"), tmp_path / "llama")
    config = json.loads((theirs / "config.json").read_text()) | values
    (theirs / "config.json").write_text(json.dumps(config))
    with pytest.raises(rg.CheckpointError, match=message):
        rg.load(theirs)


def test_sharded_folders_and_bin_files_load_alike(tmp_path):
    theirs = peers.decoder("llama")
    whole = rg.load(peers.saved(theirs, tmp_path / "whole")).state_dict()
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    (tmp_path / "bin").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bin")
    torch.save(theirs.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    for kind in ("shards", "bin"):
        state = rg.load(tmp_path / kind).state_dict()
        assert all(torch.equal(state[name], whole[name]) for name in whole)


TIED = {"llama-mqa": "lm_head.weight", "gpt2": "lm_head.weight", "bert": "cls.predictions.decoder.bias"}


@pytest.mark.parametrize("name", TIED)
def test_a_second_copy_of_a_tied_weight_is_left_out_and_another_tensor_is_not(name, tmp_path):
    theirs = (peers.decoder if name in peers.DECODERS else peers.encoder)(name)
    folder = peers.saved(theirs, tmp_path / "model")
    expected, state = rg.load(folder).state_dict(), theirs.state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")  # which holds both names, as .bin files do
    assert all(torch.equal(tensor, expected[key]) for key, tensor in rg.load(folder).state_dict().items())
    torch.save(state | {TIED[name]: state[TIED[name]] + 1}, folder / "pytorch_model.bin")
    with pytest.raises(rg.CheckpointError, match=f"1 unexpected: {TIED[name]}"):
        rg.load(folder)


def test_classes_of_tokens_are_refused_in_words(tmp_path):
    for kind, values in (("Bert", peers.SMALL), ("Albert", peers.ALBERT)):
        theirs = peers.build(f"{kind}ForTokenClassification", f"{kind}Config", values)
        with pytest.raises(rg.CheckpointError, match="classifiers of tokens are not supported"):
            rg.load(peers.saved(theirs, tmp_path / kind))


def test_a_model_without_layers_loads(tmp_path):
    theirs = peers.build("LlamaForCausalLM", "LlamaConfig", peers.LLAMA | {"num_hidden_layers": 0})
    ours, tokens = rg.load(peers.saved(theirs, tmp_path / "model")), peers.sequences()
    with torch.no_grad():
        assert torch.equal(ours(tokens), theirs(tokens).logits)
    assert ours.summary().parts[1].layers == 0


def test_windows_that_a_file_does_not_state_are_those_of_transformers(tmp_path):
    theirs = peers.saved(peers.decoder("mistral-window"), tmp_path / "mistral")
    config = json.loads((theirs / "config.json").read_text())
    del config["sliding_window"]
    (theirs / "config.json").write_text(json.dumps(config))
    expected = transformers.AutoConfig.from_pretrained(theirs).sliding_window
    assert rg.load(theirs).config.window.width == expected == 4096
    theirs = peers.saved(peers.decoder("qwen2-window"), tmp_path / "qwen2")
    config = json.loads((theirs / "config.json").read_text()) | {"layer_types": ["chunked_attention"] * 3}
    (theirs / "config.json").write_text(json.dumps(config))
    with pytest.raises(rg.CheckpointError, match="expected full_attention or sliding_attention"):
        rg.load(theirs)


def test_a_base_model_saved_alone_loads_too(tmp_path):
    theirs = peers.encoder("bert")
    hidden = rg.load(peers.saved(theirs.bert, tmp_path / "base"))(peers.sequences())
    assert torch.equal(hidden, rg.load(peers.saved(theirs, tmp_path / "whole"))(peers.sequences()))


@pytest.mark.parametrize("named", ["config", "generation", "both", "list", "none"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@torch.no_grad()
def test_end_tokens_are_those_of_either_file_and_outlive_saving(name, named, tmp_path):
    if name == "t5":
        sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        values = {**sizes, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 0}
        theirs = peers.build("T5ForConditionalGeneration", "T5Config", values)
        theirs.generation_config.decoder_start_token_id = 0
    else:
        theirs = peers.decoder(name)
    prompt = peers.sequences(1, 9)
    whole = rg.generate(rg.load(peers.saved(theirs, tmp_path / "plain")), prompt, max_new_tokens=12)[0].tokens
    assert len(whole) == 12
    end = next((token for at, token in enumerate(whole) if at > 1 and token not in whole[:at]), whole[0])
    ends = {
        "config": (90, None),
        "generation": (None, end),
        "both": (90, end),
        "list": (90, [95, end]),
        "none": (None, None),
    }
    if named == "config":
        ends["config"] = (end, None)
    folder = peers.saved(theirs, tmp_path / "model")
    for file, value in zip(("config.json", "generation_config.json"), ends[named], strict=True):
        values = json.loads((folder / file).read_text())
        values["eos_token_id"] = value
        (folder / file).write_text(json.dumps(values))
    if named == "config":
        (folder / "generation_config.json").unlink()
    ours = rg.load(folder)
    expected = whole if named == "none" else whole[: whole.index(end) + 1]
    assert ours.config.end_tokens == {"none": (), "list": (95, end)}.get(named, (end,))
    text = rg.generate(ours, prompt, max_new_tokens=12)[0]
    assert (text.tokens, text.reason) == (expected, "length" if named == "none" else "end")
    for layout in ("regard", "huggingface"):
        again = rg.load(rg.save(ours, tmp_path / layout, layout=layout))
        assert again.config == ours.config
    back = type(theirs).from_pretrained(tmp_path / "huggingface")
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    assert (
        back.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()[-len(expected) :]
        == expected
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": "</s>"}', "expected whole numbers for end_tokens, got"),
        ('{"eos_token_id": [1, true]}', "expected whole numbers for end_tokens, got"),
        ('{"eos_token_id": 50256}', "expected eos_token_id from 0 to 96, or null for none, got 50256"),
        ('{"decoder_start_token_id": 1.5}', "expected whole numbers for start_token, got 1.5"),
        ("[1]", "generation_config.json: expected a JSON object, got list"),
        ("{", "generation_config.json: expected"),
    ],
)
def test_a_generation_config_that_is_none_is_refused(text, message, tmp_path):
    folder = peers.saved(peers.decoder("gpt2"), tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(rg.CheckpointError, match=message):
        rg.load(folder)
