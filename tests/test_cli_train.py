"""`regard train` as a user runs it; in processes of its own where signals and torchrun need them."""

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from PIL import Image

import regard as rg
from processes import finished, started
from regard.training import Card, Report, Settings, recipes
from regard.training.metrics import read_metrics
from regard.training.parallel import Place
from regard.training.recipes import translate
from regard.training.records import write_card
from regard.training.runs import begin, default_folder, reopen
from test_cli import Inside, entry_point

TINY = ["--count", "300", "--held-out", "20", "--vocabulary-size", "400", "--embedding-dim", "16", "--num-heads", "2",
        "--num-layers", "1", "--hidden-dim", "32", "--batch-size", "8", "--device", "cpu"]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SIGNALLED = """
import os, runpy, sys
from regard.training.metrics import Metrics

number = int(sys.argv.pop())

def log(self, step, values, kind, written=Metrics.log):
    written(self, step, values, kind)
    if step == 3 and kind == "training":
        os.kill(os.getpid(), number)

Metrics.log = log
runpy.run_module("regard", run_name="__main__", alter_sys=True)
"""
"""The command, which sends itself a signal in its third step."""


@pytest.fixture
def regard(monkeypatch, capsys) -> Inside:
    monkeypatch.setenv("COLUMNS", "200")
    return entry_point(monkeypatch, capsys)


def losses(folder):
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def test_a_run_leaves_a_folder_that_load_opens(regard, tmp_path):
    done = regard("train", "translate", *TINY, "--steps", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["folder"] == "runs/translate"
    assert report["finished"]
    assert {"loss", "exact"} <= report["results"].keys()
    run = tmp_path / "runs/translate"
    assert {"run.json", "environment.json", "metrics.jsonl", "checkpoints", "model", "README.md", "curves.png"} <= set(
        os.listdir(run)
    )
    assert json.loads((run / "environment.json").read_text())["threads"] == 1
    model = rg.load(run)
    assert model.tokenizer is not None
    assert rg.generate(model, ["Le chat dort."], max_new_tokens=3)[0].tokens
    again = regard("train", "translate", *TINY, "--steps", "4", "--out", "runs/translate", cwd=tmp_path)
    assert again.returncode == 2
    assert "expected a new folder" in again.stderr
    assert "regard train resume runs/translate" in again.stderr
    more = regard("train", "resume", "runs/translate", "--steps", "6", "--device", "cpu", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert len(losses(run)) == 6


def test_a_signal_saves_and_says_how_to_go_on(regard, tmp_path):
    straight = regard("train", "translate", *TINY, "--steps", "8", "--out", "straight", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    children = {}
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            command = ["train", "translate", *TINY, "--steps", "8", "--out", number.name, str(int(number))]
            child = started("-c", SIGNALLED, *command, cwd=tmp_path, env=ENVIRONMENT)
            children[number.name] = stack.enter_context(child)
        for run, child in children.items():
            out, err = child.communicate()
            assert child.returncode == 130, err
            assert f"to resume: regard train resume {run}" in out
            assert 3 <= len(losses(tmp_path / run)) < 8
            done = regard("train", "resume", run, "--device", "cpu", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert losses(tmp_path / run) == losses(tmp_path / "straight")


def test_torchrun_takes_the_same_command(regard, tmp_path):
    alone = regard("train", "translate", *TINY, "--steps", "6", "--precision", "float64", "--out", "one", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "regard"]
    command += ["train", "translate", *TINY, "--steps", "6", "--precision", "float64", "--strategy", "fsdp"]
    done = finished(*command, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    two = tmp_path / "runs/translate"
    assert os.listdir(tmp_path / "runs") == ["translate"], "both choose one folder"
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-10)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2


RECIPES = [name for name in recipes.NAMES if name != "chat"]  # which has no sizes: test_chat_recipe.py
FAILURES = {
    "a missing file": (["--data", "nothing.tsv"], "nothing.tsv"),
    "an empty file": (["--data", "empty.tsv"], "empty.tsv"),
    "an empty folder": (["--data", "empty-folder"], "empty-folder"),
    "bytes that are no text": (["--data", "bytes.tsv"], "bytes.tsv"),
    "a mechanism of no name": (["--mechanism", "softmux"], "softmux"),
    "a width that heads do not divide": (["--embedding-dim", "17", "--num-heads", "2"], ": expected"),
    "no steps": (["--steps", "0"], "steps: expected a whole number of at least 1, got 0"),
    "a batch too small": (["--batch-tokens", "1"], "--batch-tokens: expected room for the longest example"),
    "a device that is not here": (["--device", "tpu"], "device"),
    "shards for one process": (["--strategy", "fsdp"], "strategy: expected fsdp only under torchrun"),
    "a flag of no name": (["--nosuch", "1"], "nosuch"),
}
FEW = ["--count", "50", "--held-out", "5"]


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("translate", {"encoder_window": rg.Window(3, 3), "decoder_window": rg.Window(2)}, 3),
        ("lm", {"window": rg.Window(5)}, 6),
        ("bert", {"window": rg.Window(4, 4)}, 4),
        ("vision", {"window_radius": 1}, 1),
        ("vision", {"model": "davit", "window_size": 5}, 5),
    ],
)
def test_a_run_knows_its_windows_also_one_from_before_they_had_two_sides(name, options, size, files, monkeypatch):
    monkeypatch.chdir(files)
    place = Place(0, 1, torch.device("cpu"))
    small = {key: str(files / value) if key == "data" else value for key, value in SMALL[name].items()}
    wanted = recipes.recipe(name).Options(**small, **options)
    begin(name, wanted, Settings(batch_size=8), files / "run", place)
    assert reopen(files / "run", place)[0].options == wanted
    values = json.loads((files / "run/run.json").read_text())
    values["options"] = {key: value for key, value in values["options"].items() if "window" not in key}
    values["options"]["window"] = size
    (files / "run/run.json").write_text(json.dumps(values))
    assert reopen(files / "run", place)[0].options == wanted


SPECIAL = [
    (["translate", "--data", "columns.tsv"], "columns.tsv, line 2: expected 2 columns"),
    (["translate", "--data", "broken.tsv"], "broken.tsv, line 2"),
    (["translate", *FEW, "--num-kv-heads", "3"], "--num-kv-heads: expected a divisor of --num-heads 4"),
    (["translate", *FEW, "--kv-heads", "3"], "--kv-heads: expected a divisor of --num-heads 4"),
    (["translate", *FEW, "--kv-heads=3"], "--kv-heads: expected a divisor of --num-heads 4"),
    (["lm", "--data", "words.txt", "--context", "1"], "--context: expected at least 2, got 1"),
    (["lm", "--data", "nothing", "--batch-tokens", "9"], "--batch-tokens: expected room for the longest example, 256"),
    (["vision", "--patch-size", "5"], "--patch-size: expected a divisor of the images' sides, 28 and 28, got 5"),
    (["translate", "--data", "ten.tsv", "--held-out", "5"], "--held-out: expected 1 to 4 of 10 examples, got 5"),
    (["lm", "--data", "words.txt", "--window", "-1"], "--window: expected BEFORE or BEFORE,AFTER of at least 0"),
    (["lm", "--data", "words.txt", "--window", "8,8"], "--window: expected after 0, since a decoder's tokens see no"),
    (["translate", *FEW, "--encoder-window", "8;8"], "--encoder-window: expected BEFORE or BEFORE,AFTER"),
    (["translate", *FEW, "--mechanism", "elu", "--decoder-window", "8"], "--decoder-window: expected none with Elu()"),
    (["vision", "--num-layers", "2,x"], "--num-layers: expected whole numbers, like 4 or 1,2,1, got '2,x'"),
    (["vision", "--num-layers", "1,2"], "--num-layers: expected one number for a ViT, got 1,2"),
    (["classify", "--data", "one.tsv"], "expected at least 2 classes"),
    (["classify", "--from", "nowhere"], "nowhere"),
    (["resume", "nowhere"], "nowhere"),
    (["resume", "spoiled"], "run.json"),
    (["resume", "older"], "older/run.json: expected what `regard train` wrote, got"),
]
SMALL: dict[str, dict[str, object]] = {
    "translate": {"count": 50, "held_out": 5},
    "lm": {"data": "words.txt", "vocabulary_size": 300, "context_length": 32},
    "bert": {"data": "words.txt", "vocabulary_size": 80},
    "classify": {"data": "labels.tsv", "vocabulary_size": 80},
    "vision": {"data": "images"},
}
"""Data that is read in no time, for failures that come after it."""


@pytest.fixture
def files(tmp_path):
    """A folder with data of all kinds, some of it wrong in many ways."""
    (tmp_path / "columns.tsv").write_text("un\tone\ndeux\ttwo\ttoo\n")
    (tmp_path / "ten.tsv").write_text("".join(f"mot {n}\tword {n}\n" for n in range(10)))
    (tmp_path / "broken.tsv").write_bytes(b"un\tone\nd\xffux\ttwo\n")
    (tmp_path / "bytes.tsv").write_bytes(b"\xff\xfe\x00\x80" * 100)
    (tmp_path / "empty.tsv").write_text("")
    (tmp_path / "one.tsv").write_text("".join(f"same\ttext number {n} of some\n" for n in range(40)))
    (tmp_path / "labels.tsv").write_text("".join(f"{n % 2}\ttext number {n} of some\n" for n in range(80)))
    (tmp_path / "words.txt").write_text("".join(f"It is {n}. So it was {n}.\n\n" for n in range(200)))
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "spoiled").mkdir()
    (tmp_path / "spoiled/run.json").write_text("{}")
    older = {"recipe": "translate", "options": {"width": 16}, "settings": Settings(batch_size=8).to_json(), "data": ""}
    (tmp_path / "older").mkdir()
    (tmp_path / "older/run.json").write_text(json.dumps(older))
    for number in range(8):
        folder = tmp_path / "images" / ("train" if number % 4 else "test") / ("odd" if number % 2 else "even")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (14, 14), number).save(folder / f"{number}.png")
    return tmp_path


@pytest.fixture
def wrong(files, monkeypatch, capsys):
    """Run a command that fails: its only line."""
    before = sorted(files.rglob("*"))
    call = entry_point(monkeypatch, capsys)

    def run(*words):
        done = call("train", *words, cwd=files)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stdout == ""
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("regard: error: ")
        assert sorted(files.rglob("*")) == before, "something was left behind"
        return lines[0]

    return run


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_one_line_and_leaves_nothing(wrong, recipe, failure):
    words, message = FAILURES[failure]
    small = {} if "--data" in words else SMALL[recipe]
    data = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert message in wrong(recipe, *data, *words)
    assert message in wrong(recipe, *data, *words, "--out", "deep/er/run")


@pytest.mark.parametrize(
    ("words", "message"), SPECIAL, ids=lambda part: " ".join(part) if isinstance(part, list) else ""
)
def test_what_a_user_gets_wrong_is_one_line(wrong, words, message):
    assert message in wrong(*words)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_card_says_what_the_model_learned_from_and_is_for(files, monkeypatch, recipe):
    monkeypatch.chdir(files)
    module = recipes.recipe(recipe)
    task = module.build(module.Options(**SMALL[recipe], embedding_dim=16, num_heads=2), files, seed=0)
    card = task.card()
    assert isinstance(card, Card)
    assert card.data not in ("", Card().data)
    assert card.use not in ("", Card().use)
    write_card(task, Settings(steps=1, batch_size=8), files, Report(step=1, steps=1, results={"loss": 0.5}))
    text = (files / "README.md").read_text()
    assert f"## Data\n{card.data}\n" in text
    assert f"## Use\n{card.use}\n" in text


def test_a_failure_leaves_the_name_and_what_others_put_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, place = translate.Options(data=("nothing.tsv",)), Place(0, 1, torch.device("cpu"))
    assert default_folder("translate") == Path("runs/translate")
    Path("runs/lm").mkdir(parents=True)
    Path("mine").mkdir()
    for folder in ("runs/translate", "mine"):
        with pytest.raises((ValueError, OSError)):
            begin("translate", options, Settings(steps=1, batch_size=8), folder, place)
    assert default_folder("translate") == Path("runs/translate")
    assert sorted(map(str, Path().rglob("*"))) == ["mine", "runs", "runs/lm"]


def test_an_interrupt_while_data_is_read_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(translate, "train_bpe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(
            "translate",
            translate.Options(count=50, held_out=5),
            Settings(steps=1, batch_size=8),
            tmp_path / "runs/translate",
            Place(0, 1, torch.device("cpu")),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "names", [("data/mine.txt",), ("environment.json",), ("data/mine.txt", "environment.json"), ("out",)]
)
def test_a_run_deletes_nothing_that_it_did_not_write(tmp_path, names):
    target = tmp_path / "run"
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("mine")
    options, settings = translate.Options(count=50, held_out=5), Settings(steps=1, batch_size=8)
    place = Place(0, 1, torch.device("cpu"))
    folders = [target, target / "out"] if names == ("out",) else [target]
    for folder in folders:
        with pytest.raises(
            ValueError, match=r"out: expected a new folder or an empty one, got .*, which (has|is a file)"
        ):
            begin("translate", options, settings, folder, place)
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == set(names)
    assert all((target / name).read_text() == "mine" for name in names)


def test_other_data_cannot_go_on_with_a_run(regard, tmp_path):
    table = Path(tmp_path / "pairs.tsv")
    table.write_text("".join(f"mot {n}\tword {n}\n" for n in range(60)))
    words = ["--data", "pairs.tsv", "--held-out", "5", "--embedding-dim", "16", "--num-heads", "2", "--batch-size", "8"]
    done = regard("train", "translate", *words, "--steps", "2", "--out", "run", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table.write_text("".join(f"mot {n}\tanother {n}\n" for n in range(60)))
    done = regard("train", "resume", "run", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert "data: expected the examples the run began with" in done.stderr
