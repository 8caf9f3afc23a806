"""Tasks and models of a user's: trained, refused where they do not fit, saved, loaded and resumed."""

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import regard as rg
from processes import finished
from regard.checkpoints.errors import CheckpointError
from regard.training import Settings, Task, train
from regard.training.metrics import read_metrics
from test_cli import Inside, entry_point

ROOT = Path(__file__).parent.parent
FILE = """
import os
import sys

import torch
from torch import nn

from regard.training import Settings, Task, train


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(width, 3, bias=False)
        self.second.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.head = nn.Linear(3, 1)
        self.again = self.head  # tied

    def forward(self, x):
        return self.head(self.second(self.drop(self.norm(self.first(x.to(self.head.weight))).relu())))


class Sums(Task):
    name = "sums"

    def __init__(self, width=6):
        self.model = Net(width)
        random = torch.Generator().manual_seed(0)
        self.x, self.held_out = torch.randn(64, 3, generator=random), torch.randn(32, 3, generator=random)

    def sizes(self):
        return [1] * len(self.x)

    def batch(self, indices, epoch):
        return {"x": self.x[list(indices)]}

    def counts(self, batch):
        return {"square": len(batch["x"])}

    def totals(self, model, batch):
        x = batch["x"].to(self.model.head.weight.dtype)
        return {"square": (model(x) - x.sum(1, keepdim=True)).square().sum()}

    def evaluate(self, model):
        with torch.no_grad():
            return {"loss": float(self.totals(model, {"x": self.held_out})["square"]) / len(self.held_out)}


class Misnamed(Sums):
    watched = "accuracy", "most"


def nothing():
    return 3


if __name__ == "__main__":
    for steps in (4, 8):  # the second call goes on
        torch.manual_seed(0)
        settings = Settings(steps=steps, batch_size=8, schedule="constant", precision="float64")
        report = train(Sums(), settings, sys.argv[1])
    print(report.step, os.environ.get("RANK"), flush=True)
"""


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are most of the time of a small run."""
    monkeypatch.setattr("regard.training.loop.write_curves", lambda *_: None)


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The names of FILE, which is written to sums.py."""
    (tmp_path / "sums.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "sums_of_a_user"}
    exec(FILE, scope)
    return scope


@pytest.fixture
def regard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


def plan(**changes) -> Settings:
    return Settings(**{"steps": 6, "batch_size": 8, "warmup": 2, "save_every": 2, "evaluate_every": 3, **changes})


def losses(run):
    return [record["loss"] for record in read_metrics(run) if "loss" in record]


def test_any_module_is_trained_saved_and_resumed(sums, tmp_path):
    torch.manual_seed(0)
    straight = sums["Sums"]()
    report = train(straight, plan(), tmp_path / "straight")
    torch.manual_seed(0)

    def interrupt(report):
        if report.kind == "step" and report.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    train(sums["Sums"](), plan(), tmp_path / "run", watch=interrupt)
    assert len(losses(tmp_path / "run")) == 4
    torch.manual_seed(7)
    again = sums["Sums"]()
    train(again, plan(), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert all(map(torch.equal, again.model.state_dict().values(), straight.model.state_dict().values()))
    loaded = rg.load(tmp_path / "run", model=sums["Net"]())
    assert not loaded.training
    assert again.evaluate(loaded)["loss"] == pytest.approx(report.results["loss"], rel=1e-5)
    assert loaded.again is loaded.head
    assert "model=Net(…)" in (tmp_path / "run/README.md").read_text()
    assert rg.load(tmp_path / "run", model=sums["Net"](), dtype=torch.float64).head.weight.dtype == torch.float64
    with pytest.raises(CheckpointError, match=re.escape("expected model=Net(…), as a file imports no code, got none")):
        rg.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"'first\.weight' of \(6, 3\) instead of \(9, 3\)"):
        rg.load(tmp_path / "run", model=sums["Net"](9))
    with pytest.raises(CheckpointError, match=r"no 'weight'; .*'first\.weight', which it does not have"):
        rg.load(tmp_path / "run", model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="model: expected no mechanism with a model"):
        rg.load(tmp_path / "run", model=nn.Linear(1, 1), mechanism="elu")


class Copies(Task):
    """A decoder of a user's repeats a token."""

    name = "copies"

    def __init__(self, subclass: bool = False, tokens: int = 6, **changes: object) -> None:
        sizes = {"vocabulary_size": 9, "embedding_dim": 16, "num_layers": 1, "num_heads": 2}
        config = rg.DecoderConfig(**{**sizes, **changes})
        self.model = Own(config) if subclass else rg.Decoder(config)
        self.tokens = torch.arange(40)[:, None].expand(40, tokens) % 9

    def sizes(self):
        return [self.tokens.shape[1]] * 40

    def batch(self, indices, epoch):
        return {"tokens": self.tokens[list(indices)]}

    def counts(self, batch):
        return {"loss": batch["tokens"][:, 1:].numel()}

    def totals(self, model, batch):
        logits = model(batch["tokens"][:, :-1])
        targets = batch["tokens"][:, 1:]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")}

    def evaluate(self, model):
        return {"loss": float(self.totals(model, self.batch(range(9), 0))["loss"]) / 45}


class Own(rg.Decoder):
    """A model of a user's that is a decoder."""


def test_the_folder_of_a_task_is_a_run_that_load_opens(tmp_path):
    train(Copies(), plan(), tmp_path / "run")
    assert isinstance(rg.load(tmp_path / "run"), rg.Decoder)
    train(Copies(subclass=True), plan(), tmp_path / "own")
    assert isinstance(rg.load(tmp_path / "own", model=Copies(subclass=True).model), Own)


class Renamed(Copies):
    name = "renamed"


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (
            lambda: Copies(mechanism="elu"),
            {},
            "model's mechanism: expected .*Softmax.*, as the run in .* began, got .*Elu",
        ),
        (lambda: Copies(embedding_dim=32), {}, "model's embedding_dim: expected 16, as the run in .* began, got 32"),
        (lambda: Copies(subclass=True), {}, "model: expected Decoder, as the run in .* began, got Own"),
        (Renamed, {}, "task: expected copies, as the run in .* began, got renamed"),
        (lambda: Copies(tokens=7), {}, "data: expected the examples the run began with"),
        (Copies, {"batch_size": 4}, "batch_size: expected 8, as the run in .* began, got 4"),
        (Copies, {"seed": 4}, "seed: expected 0, as the run in .* began, got 4"),
        (Copies, {"precision": "float64"}, "precision: expected float32, as the run in .* began, got float64"),
    ],
)
def test_something_else_in_the_same_folder_is_refused(make, changes, words, tmp_path):
    train(Copies(), plan(steps=2), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=words):
        train(make(), plan(steps=4, **changes), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_settings_that_change_are_recorded(tmp_path):
    train(Copies(), plan(steps=4, schedule="constant"), tmp_path)
    train(Copies(), plan(steps=6, schedule="constant", learning_rate=0.5, evaluate_every=1), tmp_path)
    values = json.loads((tmp_path / "run.json").read_text())
    assert values["changes"] == [{"after step": 4, "steps": 6, "learning_rate": 0.5, "evaluate_every": 1}]
    assert values["settings"]["learning_rate"] == 0.5
    rates = [record["rate"] for record in read_metrics(tmp_path) if "rate" in record]
    assert rates == [0.0005, 0.001, 0.001, 0.001, 0.5, 0.5]
    assert [record["step"] for record in read_metrics(tmp_path) if "evaluation" in record] == [3, 4, 5, 6]


def wrong(**methods):
    return type("Wrong", (Copies,), {"__module__": "mine", **methods})()


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"watched": ("los", "least")}, r"watched: expected a result of evaluate \(loss\), got 'los'"),
        ({"watched": ("loss", "lowest")}, r"watched: expected \(name, 'least'\) or"),
        ({"counts": lambda self, batch: {"los": 1}}, r"counts: expected a count for each total \(loss\), got los"),
        ({"counts": lambda self, batch: {}}, r"counts: expected a count for each total \(loss\), got none"),
        ({"totals": lambda self, model, batch: {"loss": 3.0}}, "totals: expected a scalar tensor for 'loss', got 3.0"),
        ({"totals": lambda self, model, batch: {"loss": torch.ones(2)}}, r"'loss', got one of shape \(2,\)"),
        ({"evaluate": lambda self, model: {"loss": "low"}}, "evaluate: expected numbers by name, got {'loss': 'low'}"),
        ({"evaluate": lambda self, model: 0.5}, "evaluate: expected numbers by name, got 0.5"),
    ],
)
def test_what_is_wrong_with_a_task_is_said_at_the_start(methods, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(wrong(**methods), plan(), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_check_leaves_no_trace(tmp_path):
    """A task that counts its evaluations, and draws in them, learns the same."""
    draws = []

    def evaluate(self, model):
        draws.append(float(torch.rand(())))
        return Copies.evaluate(self, model)

    torch.manual_seed(0)
    train(wrong(evaluate=evaluate), plan(evaluate_every=6), tmp_path / "checked")
    assert len(draws) == 2
    torch.manual_seed(0)
    train(Copies(), plan(evaluate_every=6), tmp_path / "plain")
    assert losses(tmp_path / "checked") == losses(tmp_path / "plain")


def test_a_result_that_is_no_number_is_null_and_worse_than_any(tmp_path):
    results = iter([0.9, math.nan, math.inf, 0.5])  # the first is the check
    task = wrong(evaluate=lambda self, model: {"loss": next(results)})
    report = train(task, plan(steps=3, evaluate_every=1, save_every=1), tmp_path)
    assert report.results == {"loss": 0.5}
    texts = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert len(texts) >= 6
    for text in texts:
        assert "NaN" not in text
        assert "Infinity" not in text
    assert '"evaluation": {"loss": null}' in (tmp_path / "metrics.jsonl").read_text()
    assert math.isnan(read_metrics(tmp_path)[1]["evaluation"]["loss"])


def test_the_loss_that_ends_a_run_is_null(tmp_path):
    task = wrong(totals=lambda self, model, batch: {"loss": Copies.totals(self, model, batch)["loss"] * math.nan})
    with pytest.raises(ValueError, match="loss: expected a finite number, got nan"):
        train(task, plan(), tmp_path)
    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert record["loss"] is None


def test_torchrun_trains_one_model(sums, tmp_path):
    torch.manual_seed(0)
    task = sums["Sums"]()
    steps = plan(steps=8, schedule="constant", precision="float64", warmup=100, save_every=None, evaluate_every=None)
    task.model.drop.p = 0.0
    (tmp_path / "sums.py").write_text(FILE.replace("Dropout(0.2)", "Dropout(0.0)").replace("BatchNorm1d", "LayerNorm"))
    task.model.norm = nn.LayerNorm(6)
    train(task, steps, tmp_path / "one")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "sums.py", "two"]
    done = finished(*command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == ["0", "1", "8", "8"]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-10)
    assert json.loads((tmp_path / "two/environment.json").read_text())["processes"] == 2
    assert "resumed after step 4" in done.stderr, "progress is shown, once"
    assert done.stderr.count("resumed after step 4") == 1


def test_the_command_trains_a_task_of_a_file(sums, regard, tmp_path, monkeypatch):
    words = ["--steps", "4", "--batch-size", "8", "--save-every", "2", "--device", "cpu"]
    done = regard("train", "sums.py:Sums", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "-> runs/Sums" in done.stdout
    (tmp_path / "elsewhere").mkdir()
    done = regard("train", "resume", "../runs/Sums", "--steps", "6", "--learning-rate", "0.01", "--evaluate-every", "1",
                  cwd=tmp_path / "elsewhere")  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/Sums"
    assert len(losses(run)) == 6
    values = json.loads((run / "run.json").read_text())
    assert values["recipe"] == f"{tmp_path}/sums.py:Sums"
    assert values["changes"] == [{"after step": 4, "steps": 6, "learning_rate": 0.01, "evaluate_every": 1}]
    assert isinstance(rg.load(run, model=sums["Net"]()), nn.Module)
    for text, message in (
        ("sums.py:Misnamed", "watched: expected a result of evaluate (loss), got 'accuracy'"),
        ("sums.py:nothing", "task: expected 'sums.py:nothing' to give a regard.training.Task, got int"),
        ("sums.py:Net", "to give a regard.training.Task, got Net"),
        ("sums.py:Absent", "task: expected a name in sums.py, got 'sums.py:Absent', which is not there; it has Sums"),
        ("absent.py:Sums", "task: expected a file, got 'absent.py:Sums', and there is no file absent.py"),
    ):
        done = regard("train", text, "--out", "new", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("regard: error: ")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert sorted(os.listdir(tmp_path / "runs")) == ["Sums"]
    done = regard("train", "sums.py:Sums", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--learning-rate" in done.stdout


def test_a_run_of_python_is_not_resumed_by_the_command(regard, tmp_path):
    train(Copies(), plan(steps=2), tmp_path / "run")
    done = regard("train", "resume", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "run: expected a run of `regard train`, got run, which train(…) in Python made" in done.stderr
