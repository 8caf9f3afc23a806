"""`regard train` as a user runs it: real processes, real signals, real torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import regard as rg
from regard.training.metrics import read_metrics

TINY = ["--count", "300", "--held-out", "20", "--vocabulary", "400", "--width", "16", "--heads", "2", "--layers", "1",
        "--hidden", "32", "--batch-size", "8", "--device", "cpu"]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def regard(*words, cwd, timeout=240):
    command = [sys.executable, "-m", "regard", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=ENVIRONMENT)


def losses(folder):
    return [one["loss"] for one in read_metrics(folder) if "loss" in one]


def test_a_run_leaves_a_folder_that_load_opens(tmp_path):
    done = regard("train", "translate", *TINY, "--steps", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["folder"] == "runs/translate"
    assert told["finished"]
    assert {"loss", "exact"} <= told["results"].keys()
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    straight = regard("train", "translate", *TINY, "--steps", "40", "--out", "straight", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    command = [sys.executable, "-m", "regard", "train", "translate", *TINY, "--steps", "40", "--out", "run"]
    child = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while len(losses(tmp_path / "run")) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(number)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert "to go on: regard train resume run" in out
    assert 3 <= len(losses(tmp_path / "run")) < 40
    done = regard("train", "resume", "run", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_torchrun_takes_the_same_command(tmp_path):
    one = regard("train", "translate", *TINY, "--steps", "6", "--precision", "float64", "--out", "one", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "regard"]
    command += ["train", "translate", *TINY, "--steps", "6", "--precision", "float64"]  # both must choose one folder
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    two = tmp_path / "runs/translate"
    assert os.listdir(tmp_path / "runs") == ["translate"]
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-10)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["translate", "--data", "nothing.tsv"], "nothing.tsv"),
        (["translate", "--data", "columns.tsv"], "columns.tsv, line 2: expected 2 columns"),
        (["translate", "--data", "broken.tsv"], "broken.tsv, line 2"),
        (["translate", "--data", "empty.tsv"], "empty.tsv"),
        (["translate", "--mechanism", "softmux"], "mechanism"),
        (["translate", "--kv-heads", "3"], "num_kv_heads"),
        (["translate", "--steps", "0"], "steps: expected a whole number of at least 1, got 0"),
        (["translate", "--batch-tokens", "3"], "batch_tokens"),
        (["translate", "--strategy", "fsdp"], "strategy: expected fsdp under torchrun alone"),
        (["translate", "--device", "tpu"], "device"),
        (["classify", "--data", "one.tsv"], "expected at least 2 classes"),
        (["vision", "--data", "empty-folder"], "empty-folder"),
        (["lm", "--data", "empty-folder"], "empty-folder"),
        (["bert", "--data", "empty.tsv"], "empty.tsv"),
        (["resume", "nowhere"], "nowhere"),
        (["resume", "spoiled"], "run.json"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(tmp_path, words, said):
    (tmp_path / "columns.tsv").write_text("un\tone\ndeux\ttwo\ttoo\n")
    (tmp_path / "broken.tsv").write_bytes(b"un\tone\nd\xffux\ttwo\n")
    (tmp_path / "empty.tsv").write_text("")
    (tmp_path / "one.tsv").write_text("".join(f"same\ttext number {n} of some\n" for n in range(40)))
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "spoiled").mkdir()
    (tmp_path / "spoiled/run.json").write_text("{}")
    done = regard("train", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("regard: error: ")
    assert said in lines[0]


def test_a_run_killed_before_it_began_may_begin_again(tmp_path):
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/data/tokenizer.json").write_text("half of one")
    done = regard("train", "translate", *TINY, "--steps", "1", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_other_data_cannot_go_on_with_a_run(tmp_path):
    table = Path(tmp_path / "pairs.tsv")
    table.write_text("".join(f"mot {n}\tword {n}\n" for n in range(60)))
    words = ["--data", "pairs.tsv", "--held-out", "5", "--width", "16", "--heads", "2", "--batch-size", "8"]
    done = regard("train", "translate", *words, "--steps", "2", "--out", "run", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table.write_text("".join(f"mot {n}\tanother {n}\n" for n in range(60)))
    done = regard("train", "resume", "run", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert "data: expected what the run began with" in done.stderr
