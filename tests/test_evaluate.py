"""Validation chooses the best model; the test is measured once, at the end; `regard evaluate` measures a run again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chaos import RECIPES, write_data
from forked import Forks, forks
from regard.training import Settings, evaluate, train
from regard.training.metrics import read_metrics
from test_cli import entry_point
from test_nothing_lost import tree
from test_training import Counting, settings

SMALL = ["--batch-size", "8", "--device", "cpu"]
FILES = {
    "translate": ("val.tsv", "test.tsv"),
    "lm": ("val.txt", "test.txt"),
    "bert": ("val.txt", "test.txt"),
    "chat": ("val.jsonl", "test.jsonl"),
    "classify": ("val.tsv", "test.tsv"),
    "vision": ("val", "test"),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks() as parent:
        yield parent


@pytest.fixture
def regard(processes, tmp_path):
    """Run `regard … --json` in a process of its own, without a picture of the curves; what it printed, as JSON."""

    def run(*words):
        out = tmp_path.with_name(f"{tmp_path.name}-{len(list(tmp_path.parent.iterdir()))}.txt")
        plain = "from regard.training import loop; loop.write_curves = lambda *_: None"
        child = processes.regard([*words, "--json"], out, cwd=tmp_path, before=plain)
        assert child.wait() == 0, child.text
        return json.loads(child.text[child.text.index("{\n") :])

    return run


def own_files(recipe, folder):
    """Files to validate and to test with, beside the data that chaos.py makes."""
    first, second = (folder / name for name in FILES[recipe])
    for number, path in enumerate((first, second)):
        rows = range(1000 * (number + 1), 1000 * (number + 1) + 12)
        if recipe == "translate":
            path.write_text("".join(f"mot {n}\tword {n}\n" for n in rows))
        elif recipe == "classify":
            path.write_text("".join(f"{n % 2}\tother text {n}\n" for n in rows))
        elif recipe == "chat":
            chats = (
                [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": str(n)}] for n in rows
            )
            path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
        elif recipe == "vision":
            path.mkdir()
            for name in ("images-idx3", "labels-idx1"):
                source = folder / "images" / f"{('train', 't10k')[number]}-{name}-ubyte"
                (path / f"t10k-{name}-ubyte").write_bytes(source.read_bytes())
        else:
            path.write_text("".join(f"It was {n}. Now it is {n}.\n\n" for n in rows))
    return ["--validation-data", first.name, "--test-data", second.name]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_measured_again_bitwise(recipe, regard, tmp_path):
    write_data(tmp_path)
    pairs = zip(RECIPES[recipe][::2], RECIPES[recipe][1::2], strict=True)
    flags = [word for pair in pairs if pair[0] != "--held-out" for word in pair]
    flags += [*SMALL, *own_files(recipe, tmp_path), "--evaluate-every", "2"]
    done = regard("train", recipe, *flags, "--steps", "4", "--out", "run")
    run = tmp_path / "run"
    before = tree(run)
    results = regard("evaluate", "run")
    assert results["best"]["validation"] == done["results"]
    assert results["best"]["test"] == done["test"] != done["results"]
    assert results["last"]["step"] == 4
    evaluations = {record["step"]: record["evaluation"] for record in read_metrics(run) if "evaluation" in record}
    assert results["last"]["validation"] == evaluations[4]
    assert results["best"]["validation"] == evaluations[results["best"]["step"]]
    file = FILES[recipe][1]
    assert regard("evaluate", "run", "--data", file)["best"]["data"] == done["test"]
    assert tree(run) == before, "it writes nothing"
    again = regard("train", "resume", "run", "--steps", "5")
    tests = [record for record in read_metrics(run) if "test" in record]
    assert tests == [{"step": 5, "test": again["test"]}], "measured at the end, once"
    assert f"| {next(iter(again['test']))} |" in (run / "README.md").read_text()


class Drifting(Counting):
    """Each step makes validation worse and the test better; `seen` has the bias that was tested."""

    def __init__(self) -> None:
        super().__init__()
        self.model.level = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def totals(self, model, batch):
        return {name: total - 1e3 * model.level.sum() for name, total in super().totals(model, batch).items()}

    def evaluate(self, model):
        return {"loss": float(model.level.detach())}

    def test(self, model):
        self.seen.append(float(model.level.detach()))
        return {"loss": -self.seen[-1]}


def test_the_test_chooses_nothing(tmp_path):
    task = Drifting()
    report = train(task, settings(steps=8, evaluate_every=2), tmp_path / "run")
    levels = [record["evaluation"]["loss"] for record in read_metrics(tmp_path / "run") if "evaluation" in record]
    assert levels == sorted(levels)
    assert levels[0] < levels[-1] == float(task.model.level.detach()), "the model that is there is the last"
    assert report.results == {"loss": levels[0]}
    assert report.test == {"loss": -levels[0]}
    assert task.seen == [0.0, levels[0]], "tried at the start, and once at the end"
    results = evaluate(Drifting(), tmp_path / "run")
    assert results == {
        "best": {"step": 2, "validation": {"loss": levels[0]}, "test": {"loss": -levels[0]}},
        "last": {"step": 8, "validation": {"loss": levels[-1]}, "test": {"loss": -levels[-1]}},
    }


def test_what_cannot_be_evaluated_is_one_line(tmp_path, monkeypatch, capsys):
    regard = entry_point(monkeypatch, capsys)
    write_data(tmp_path)
    (tmp_path / "empty").mkdir()
    flags = [*RECIPES["classify"], *SMALL, "--steps", "2"]
    assert regard("train", "classify", *flags, "--out", "run", cwd=tmp_path).returncode == 0
    (tmp_path / "bad.tsv").write_text("0\tone text\n2\tanother\n")
    for words, message in (
        (["nowhere"], "run: expected the folder of a run, got nowhere, which has no run.json"),
        (["empty"], "run: expected the folder of a run, got empty, which has no run.json"),
        (
            ["run", "--data", "gone.tsv"],
            "--data: expected a file of labels and texts, got gone.tsv, which is not a file",
        ),
        (["run", "--data", "bad.tsv"], "bad.tsv, line 2: expected a label of the training texts (0, 1), got '2'"),
        (["run", "--device", "moon"], "--device: expected one that is here, got 'moon'"),
    ):
        text = regard("evaluate", *words, cwd=tmp_path).stderr
        assert len(text.strip().splitlines()) == 1, text
        assert text.startswith(f"regard: error: {message}"), text
    before = tree(tmp_path)
    for flag, message in (
        ("--validation-data", "--validation-data: expected a file of labels and texts, got gone.tsv"),
        ("--test-data", "--test-data: expected a file of labels and texts, got gone.tsv"),
    ):
        text = regard("train", "classify", *flags, flag, "gone.tsv", "--out", "other", cwd=tmp_path).stderr
        assert text.startswith(f"regard: error: {message}"), text
    assert tree(tmp_path) == before


def test_a_task_without_files_says_so(tmp_path):
    train(Counting(), Settings(steps=1, batch_size=8), tmp_path / "run")
    assert list(evaluate(Counting(), tmp_path / "run")["best"]) == ["step", "validation"]
    with pytest.raises(ValueError, match="data: expected a task that reads files by `measure`, got Counting"):
        evaluate(Counting(), tmp_path / "run", ["some.txt"])
    with pytest.raises(ValueError, match=f"run: expected a run with a model, got {tmp_path}, which has no run.json"):
        evaluate(Counting(), Path(tmp_path))
