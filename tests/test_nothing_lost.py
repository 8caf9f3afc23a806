"""What a run has made is never lost: by a second process, a failed start, other data, a checkpoint that cannot be read.

Commands run in real processes (forked.py), which are killed, limited and run side by side.
"""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
from forked import Forks, forks
from regard.training import Settings, recipes, run_file, train
from regard.training.data.held_out import split
from regard.training.lock import one_writer, writer
from regard.training.metrics import read_metrics
from regard.training.parallel import Place
from regard.training.recipes import classify, lm, translate, vision
from regard.training.runs import begin, reopen
from test_training import Counting, settings

RUN = [
    *("lm", "--data", "words.txt", "--vocabulary-size", "300", "--context", "16", "--embedding-dim", "16"),
    *("--num-heads", "2", "--num-layers", "1", "--batch-size", "2", "--device", "cpu"),
    *("--save-every", "2", "--evaluate-every", "4", "--dropout", "0.1"),
]
ALONE = Place(0, 1, torch.device("cpu"))
KILLED_WHILE_READING = """
import os, signal
from regard.training.recipes import lm
lm.train_bpe = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
WAITING_WHILE_READING = """
import time
from regard.training.recipes import lm
def waiting(*words, train=lm.train_bpe):
    while not os.path.exists("go"):
        time.sleep(0.02)
    return train(*words)
lm.train_bpe = waiting
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks() as parent:
        yield parent


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are most of the time of a small run."""
    monkeypatch.setattr("regard.training.loop.write_curves", lambda *_: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "words.txt").write_text("".join(f"It is {n}. So it was {n}.\n\n" for n in range(60)))
    return tmp_path


@pytest.fixture
def regard(processes, folder):
    def run(*words, code=0, before=""):
        """Run `regard …` to its end; what it printed."""
        out = folder.with_name(f"{folder.name}-{time.monotonic_ns()}.txt")
        child = processes.regard(words, out, cwd=folder, before=before)
        assert child.wait() == code, child.text
        return child.text

    return run


def losses(run):
    return [(record["step"], record["loss"]) for record in read_metrics(run) if "loss" in record]


def tree(folder):
    """Every file below a folder, and its bytes."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def error_line(text):
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("regard: error: "), text
    return lines[0]


# Checkpoints that cannot be loaded


def test_without_a_good_checkpoint_resume_refuses_and_restart_keeps_the_old_run(regard, folder):
    regard("train", *RUN, "--steps", "6", "--out", "run")
    run = folder / "run"
    first = losses(run)
    assert [step for step, _ in first] == [1, 2, 3, 4, 5, 6]
    (run / "checkpoints/.DS_Store").write_bytes(b"Bud1")
    (run / "checkpoints/step-00000006/.DS_Store").write_bytes(b"Bud1")
    assert "resumed after step 6" in regard("train", "resume", "run", "--steps", "8")
    kept = {path.name: path / "manifest.json" for path in sorted((run / "checkpoints").glob("step-*"))}
    for manifest in kept.values():
        manifest.write_bytes(manifest.read_bytes().replace(b'"version": 1', b'"version": 9'))
    before = tree(run)
    line = error_line(regard("train", "resume", "run", code=2))
    assert all(f"checkpoints/{name}/manifest.json: expected the checksum" in line for name in kept), line
    assert line.endswith("regard train resume run --restart, or train(…, restart=True)")
    assert tree(run) == before, "nothing is touched"
    regard("train", "resume", "run", "--restart", "--steps", "6")
    assert losses(run) == first, "it began again, bitwise"
    former = run / "former-1"
    assert len(losses(former)) == 8
    assert sorted(path.name for path in (former / "checkpoints").glob("step-*")) == sorted(kept)
    assert rg.load(former).tokenizer is not None
    assert (former / "data/train.tokens").read_bytes() == (run / "data/train.tokens").read_bytes()


def test_a_former_run_resumes_too(tmp_path):
    train(Counting(), settings(steps=4), tmp_path)
    before = losses(tmp_path)
    train(Counting(), settings(steps=2), tmp_path, restart=True)
    assert losses(tmp_path) == before[:2]
    train(Counting(), settings(steps=5), tmp_path / "former-1")
    assert [step for step, _ in losses(tmp_path / "former-1")] == [1, 2, 3, 4, 5]
    train(Counting(), settings(steps=1), tmp_path, restart=True)
    assert len(losses(tmp_path / "former-2")) == 2


def test_a_file_that_may_not_be_read_is_an_error_of_the_system(regard, folder):
    place = Path(tempfile.mkdtemp())  # a folder that everybody may enter, unlike pytest's
    try:
        place.chmod(0o755)
        shutil.copy(folder / "words.txt", place)
        regard("train", *RUN, "--data", place / "words.txt", "--steps", "4", "--out", place / "run")
        manifest = place / "run/checkpoints/step-00000004/manifest.json"
        before = tree(place)
        if os.getuid() == 0:  # root may read everything: become somebody who may not
            for path in (place, *place.rglob("*")):
                os.chown(path, 65534, 65534)
        manifest.chmod(0)
        nobody = "import os; os.getuid() or os.setuid(65534)"
        words = ["train", "resume", place / "run", "--steps", "6"]
        line = error_line(regard(*words, code=2, before=nobody))
        assert line == f"regard: error: {manifest}: Permission denied"
        manifest.chmod(0o644)
        assert tree(place) == before
    finally:
        shutil.rmtree(place)


# One writer


def test_of_two_that_resume_at_once_one_is_refused(regard, processes, folder):
    regard("train", *RUN, "--steps", "2", "--out", "run")
    words = ["train", "resume", "run", "--steps", "60"]
    children = [processes.regard(words, folder / f"{number}.txt", cwd=folder) for number in range(2)]
    codes = sorted((child.wait(), child.text) for child in children)
    assert [code for code, _ in codes] == [0, 2], codes
    assert "run: expected a folder that no other process writes, got run, which is written by process" in codes[1][1]
    assert [step for step, _ in losses(folder / "run")] == list(range(1, 61))
    assert not (folder / "run/.lock").exists()


def test_the_lock_names_its_process_and_dies_with_it(regard, processes, folder):
    regard("train", *RUN, "--steps", "2", "--out", "run")
    child = processes.regard(["train", "resume", "run", "--steps", "1000000"], folder / "one.txt", cwd=folder)
    while len(losses(folder / "run")) < 4:
        assert child.poll() is None, child.text
        time.sleep(0.02)
    line = error_line(regard("train", "resume", "run", code=2))
    assert f"written by process {child.pid} on " in line
    with pytest.raises(ValueError, match=f"written by process {child.pid} on"):
        train(Counting(), settings(), folder / "run")
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert (folder / "run/.lock").exists()
    assert writer(folder / "run") is None
    last = int(regard("train", "resume", "run", "--steps", "5").split("resumed after step ")[1].split()[0])
    assert last >= 2


def test_a_thread_locks_out_the_others_of_its_process(tmp_path):
    refused = []

    def other():
        with pytest.raises(ValueError, match="which is written by this process") as error, one_writer(tmp_path):
            pass
        refused.append(error)

    with one_writer(tmp_path), one_writer(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused
    assert list(tmp_path.iterdir()) == []


# A start that fails


def test_a_start_that_is_killed_leaves_the_name_free(regard, folder):
    regard("train", *RUN, "--steps", "1", code=-signal.SIGKILL, before=KILLED_WHILE_READING)
    assert [path.name.startswith(".lm.unfinished-") for path in (folder / "runs").iterdir()] == [True]
    regard("train", *RUN, "--steps", "1")
    assert os.listdir(folder / "runs") == ["lm"], "and the next one cleans up"
    (folder / "there").mkdir()
    regard("train", *RUN, "--steps", "1", "--out", "there", code=-signal.SIGKILL, before=KILLED_WHILE_READING)
    assert [path.name.startswith(".unfinished-") for path in (folder / "there").iterdir()] == [True]
    regard("train", *RUN, "--steps", "1", "--out", "there")
    assert set(os.listdir(folder / "there")) == set(os.listdir(folder / "runs/lm"))


def test_two_that_start_at_once_have_folders_of_their_own(regard, processes, folder):
    words = ["train", *RUN, "--steps", "1"]
    first = processes.regard(words, folder / "one.txt", cwd=folder, before=WAITING_WHILE_READING)
    while not list(folder.glob("runs/.lm.unfinished-*/.lock")):
        assert first.poll() is None, first.text
        time.sleep(0.02)
    assert "-> runs/lm-2" in regard(*words)
    line = error_line(regard(*words, "--out", "runs/lm", code=2))
    assert f"runs/lm, which is being made by process {first.pid} on" in line
    (folder / "go").touch()
    assert first.wait() == 0, first.text
    assert sorted(os.listdir(folder / "runs")) == ["lm", "lm-2"]


def test_a_task_that_cannot_begin_leaves_nothing(tmp_path):
    task = Counting()
    task.watched = ("los", "least")
    with pytest.raises(ValueError, match="watched"):
        train(task, settings(), tmp_path / "deep/er/run")
    assert list(tmp_path.iterdir()) == []


# Data


def idx(folder, labels):
    """Small images of two classes as MNIST's files."""
    folder.mkdir(exist_ok=True)
    pictures = np.random.default_rng(0).integers(0, 255, (len(labels), 8, 8), dtype=np.uint8)
    for kind in ("train", "t10k"):
        sizes = np.array(pictures.shape, ">u4").tobytes()
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + sizes + pictures.tobytes())
        count = np.array([len(labels)], ">u4").tobytes()
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + count + bytes(labels))


def pairs(folder, last):
    rows = [f"mot {n}\tword {n}\n" for n in range(80)]
    (folder / "pairs.tsv").write_text("".join([*rows[:-1], f"mot 79\t{last}\n"]))


def held_out_pair(folder, which):
    """Change the last pair to validate or to test with."""
    path = folder / "pairs.tsv"
    _, validation, test = split(translate.read_pairs(path), key=lambda pair: pair[0], count=5)
    path.write_text(path.read_text().replace(f"\t{(test if which == 'test' else validation)[-1][1]}\n", "\tanother\n"))


def texts(folder, which):
    (folder / "texts").mkdir(exist_ok=True)
    documents = {f"{n}.txt": f"This is text {n}.\n" * 20 for n in range(40)}
    trained, validation, test = split(list(documents), key=str, share=lm.HELD_OUT)
    changed = {"": None, "trained": trained[-1], "validation": validation[-1], "test": test[-1]}[which]
    for name, text in documents.items():
        (folder / "texts" / name).write_text(text.replace("text", "test") if name == changed else text)


TINY = {"embedding_dim": 16, "num_heads": 2}
DATA = {
    "vision: 24 of 40 labels": (
        "vision",
        {"data": "images", "patch_size": 4, "num_layers": (1,), **TINY},
        lambda folder: idx(folder / "images", [0, 1] * 20),
        lambda folder: idx(folder / "images", [0, 1] * 8 + [1, 0] * 12),
    ),
    "translate: the last pair": (
        "translate",
        {"data": ("pairs.tsv",), "held_out": 5, "num_layers": 1, **TINY},
        lambda folder: pairs(folder, "word 79"),
        lambda folder: pairs(folder, "word 80"),
    ),
    "translate: a pair to validate with": (
        "translate",
        {"data": ("pairs.tsv",), "held_out": 5, "num_layers": 1, **TINY},
        lambda folder: pairs(folder, "word 79"),
        lambda folder: held_out_pair(folder, "validation"),
    ),
    "translate: a pair to test with": (
        "translate",
        {"data": ("pairs.tsv",), "held_out": 5, "num_layers": 1, **TINY},
        lambda folder: pairs(folder, "word 79"),
        lambda folder: held_out_pair(folder, "test"),
    ),
    "lm: the last document": (
        "lm",
        {"data": "texts", "vocabulary_size": 300, "num_layers": 1, **TINY},
        lambda folder: texts(folder, ""),
        lambda folder: texts(folder, "trained"),
    ),
    "lm: a document to validate with": (
        "lm",
        {"data": "texts", "vocabulary_size": 300, "num_layers": 1, **TINY},
        lambda folder: texts(folder, ""),
        lambda folder: texts(folder, "validation"),
    ),
    "lm: a document to test with": (
        "lm",
        {"data": "texts", "vocabulary_size": 300, "num_layers": 1, **TINY},
        lambda folder: texts(folder, ""),
        lambda folder: texts(folder, "test"),
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_changed_anywhere_is_refused(case, tmp_path, monkeypatch):
    recipe, options, make, change = DATA[case]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    chosen = recipes.recipe(recipe).Options(**options)
    plan = Settings(steps=1, batch_size=4)
    train(begin(recipe, chosen, plan, "run", ALONE), plan, "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # it resumes from anywhere
    task, again = reopen("../run", ALONE, steps=2)
    assert train(task, again, "../run").step == 2
    change(tmp_path)
    task, again = reopen("../run", ALONE, steps=3)
    before = tree(tmp_path / "run")
    with pytest.raises(ValueError, match="data: expected the examples the run began with, got others"):
        train(task, again, "../run")
    assert tree(tmp_path / "run") == before


def test_a_run_has_its_data_and_what_it_started_from(tmp_path, monkeypatch):
    """`classify` keeps its tokens and the model of --from: the files may change, and the model may go."""
    monkeypatch.chdir(tmp_path)
    Path("labels.tsv").write_text("".join(f"{n % 2}\ttext number {n} of some\n" for n in range(80)))
    small = {"data": "labels.tsv", "vocabulary_size": 80, "num_layers": 1, **TINY}
    plan = Settings(steps=1, batch_size=4)
    train(begin("classify", classify.Options(**small), plan, "first", ALONE), plan, "first")
    options = classify.Options(data="labels.tsv", start="first", mechanism="quadratic")
    train(begin("classify", options, plan, "second", ALONE), plan, "second")
    shutil.rmtree("first")
    Path("labels.tsv").unlink()
    monkeypatch.chdir("/")
    task, again = reopen(tmp_path / "second", ALONE, steps=3)
    assert train(task, again, tmp_path / "second").step == 3
    assert task.model.config.mechanism == rg.Quadratic()
    shutil.rmtree(tmp_path / "second/checkpoints")
    weights = reopen(tmp_path / "second", ALONE)[0].model.stack.blocks[0].network.up.weight
    assert torch.equal(weights, rg.load(tmp_path / "second/data/start").stack.blocks[0].network.up.weight)


def test_images_resume_without_the_model_of_from(tmp_path):
    idx(tmp_path / "images", [0, 1] * 20)
    shape = {"patch_size": 4, "num_layers": (1,), **TINY}
    first = vision.build(vision.Options(data=str(tmp_path / "images"), **shape), tmp_path, seed=0)
    start = rg.save(first.model, tmp_path / "first")
    plan = Settings(steps=1, batch_size=4)
    begin("vision", vision.Options(data=str(tmp_path / "images"), start=str(start)), plan, tmp_path / "run", ALONE)
    shutil.rmtree(start)
    assert train(reopen(tmp_path / "run", ALONE)[0], plan, tmp_path / "run").finished


def test_a_run_of_the_first_version_goes_on(tmp_path, monkeypatch):
    from regard.training.fingerprint import sampled

    pairs(tmp_path, "word 79")
    options = translate.Options(data=(str(tmp_path / "pairs.tsv"),), held_out=5, num_layers=1, **TINY)
    plan = Settings(steps=1, batch_size=4)
    task = begin("translate", options, plan, tmp_path / "run", ALONE)
    values = json.loads((tmp_path / "run/run.json").read_text())
    values = {"regard": 1, "data": sampled(task), **{name: values[name] for name in ("recipe", "options", "settings")}}
    (tmp_path / "run/run.json").write_text(json.dumps(values))
    assert train(*reopen(tmp_path / "run", ALONE), tmp_path / "run").finished
    values = json.loads((tmp_path / "run/run.json").read_text())
    assert values["regard"] == run_file.VERSION
    assert values["data"] == task.fingerprint()
