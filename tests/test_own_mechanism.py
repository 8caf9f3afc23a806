"""A user's own mechanism, in a file of its own: named in commands, trained by every recipe, saved and loaded."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import regard as rg
from regard.commands.suite.rates import Rates
from regard.core.mechanisms.text import from_text, lookup
from regard.core.mechanisms.user_modules import absolute
from regard.training import Report, Settings, recipes
from regard.training.metrics import read_metrics
from regard.training.parallel import Place
from regard.training.records import write_card
from regard.training.runs import begin, reopen
from test_cli import Inside, entry_point
from test_cli_train import SMALL, files

__all__ = ["files"]


SOURCE = """
from dataclasses import dataclass, field

import torch
from torch import nn

import regard as rg
from beside import halved


@dataclass(frozen=True, kw_only=True)
class Mine(rg.Mechanism):
    width: float = 2.0
    scale: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.rand(1)))
    counts: torch.Tensor = field(default_factory=lambda: torch.tensor([1, 2]))

    def similarity(self, q, k):
        return torch.sigmoid(self.scale * self.counts[0] * halved(q @ k.transpose(-1, -2)) / self.width)


@dataclass(frozen=True, kw_only=True)
class Sized(rg.Mechanism):
    size: int


@dataclass(frozen=True, kw_only=True)
class Failing(rg.Mechanism):
    def __post_init__(self):
        raise ZeroDivisionError("of mine")


@dataclass(frozen=True, kw_only=True)
class Fixed(rg.Mechanism):
    W: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.eye(16)))

    def similarity(self, q, k):
        return torch.sigmoid(q @ self.W @ k.transpose(-1, -2))


wide = Mine(width=8.0)


def narrow():
    return Mine(width=0.5)
"""


BROKEN = {
    "absent": None,
    "spelled": "x = 1\ny = = 2\n",
    "raising": "x = 1\n\n\ndef fail():\n    raise KeyError('nothing')\n\n\nfail()\n",
    "leaving": "import sys\nsys.exit(3)\n",
    "importing": "import no_such_module\n",
}


@pytest.fixture
def regard(monkeypatch, capsys) -> Inside:
    monkeypatch.setenv("COLUMNS", "200")
    return entry_point(monkeypatch, capsys)


@pytest.fixture
def here(files, monkeypatch) -> Path:
    """The folder that commands run in: a mechanism in a file, data to train on, and files that are wrong."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(files)
    (files / "mine.py").write_text(SOURCE)
    (files / "beside.py").write_text("def halved(x):\n    return x / 2\n")
    (files / "package").mkdir()
    (files / "package/__init__.py").touch()
    (files / "package/inner.py").write_text("from .other import Mine\n")
    (files / "package/other.py").write_text(SOURCE)
    for name, text in BROKEN.items():
        if text is not None:
            (files / f"{name}.py").write_text(text)
    return files


# A text


@pytest.mark.parametrize(
    ("text", "width"),
    [("mine.py:Mine", 2.0), ("./mine.py:wide", 8.0), ("mine.py:narrow", 0.5), ("package.inner:Mine", 2.0)],
)
def test_a_text_names_a_class_a_value_or_a_function(here, text, width):
    mechanism = from_text(text)
    assert mechanism.width == width
    assert rg.attend(*torch.randn(3, 1, 2, 5, 4), mechanism).shape == (1, 2, 5, 4)
    for name in [module for module in sys.modules if module.startswith("package")]:
        del sys.modules[name]


def test_a_file_is_run_once_and_again_when_it_changed(here, tmp_path):
    kind = lookup("mine.py:Mine")
    assert lookup(str(here / "mine.py:Mine")) is kind
    (here / "mine.py").write_text(SOURCE.replace("width: float = 2.0", "width: float = 20.0"))
    assert from_text("mine.py:Mine").width == 20.0


def test_a_file_takes_no_other_modules_name_and_draws_the_same_numbers_everywhere(here):
    for name in ("json.py", "regard.py", "a b-c.py"):
        (here / name).write_text(SOURCE + "\nrandom = Mine(scale=nn.Parameter(torch.randn(9)))\n")
    before = torch.get_rng_state()
    scales = [from_text(f"{name}:random").scale for name in ("json.py", "regard.py", "a b-c.py")]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])
    assert sys.modules["json"] is json
    assert sys.modules["regard"] is rg


ERRORS = {
    "nowhere.py:Mine": "and there is no file nowhere.py",
    "package:Mine": "which is not there",
    "mine.py:Other": "which is not there; it has Mine, Sized, Failing, Fixed, wide",
    "mine.py:torch": "expected a regard.Mechanism, got 'mine.py:torch', which is a module",
    "mine.py:dataclass": "which is a function",
    "beside.py:halved": "TypeError",
    "mine.py:field": "Field",
    "spelled.py:Any": "SyntaxError in spelled.py, line 2",
    "raising.py:Any": "KeyError in raising.py, line 5: 'nothing'",
    "leaving.py:Any": "SystemExit in leaving.py, line 2: 3",
    "importing.py:Any": "ModuleNotFoundError in importing.py, line 1: No module named 'no_such_module'",
    "no_such.module:Any": "ModuleNotFoundError: No module named 'no_such'",
    "mine.py:Sized": "TypeError",
    "mine.py:Failing": "ZeroDivisionError in mine.py, line 29: of mine",
    "mine.py:": "FILE.py:NAME, MODULE:NAME, got 'mine.py:'",
    ":Mine": "got ':Mine'",
    "mine.py": "got 'mine.py'",
    "softmux": "expected one of softmax, ",
}


COMMANDS = {
    "check": ["check", "TEXT"],
    "check --own": ["check", "--own", "TEXT"],
    "cost": ["cost", "--mechanism", "TEXT"],
    "cost --own": ["cost", "--own", "TEXT"],
    "generate": ["generate", "model", "text", "--mechanism", "TEXT"],
    "chat": ["chat", "model", "--mechanism", "TEXT"],
    "convert": ["convert", "model", "out", "--to", "regard", "--mechanism", "TEXT"],
    "models": ["models", "model", "--mechanism", "TEXT"],
    "translate": ["translate", "text", "--model", "model", "--mechanism", "TEXT"],
    "classify": ["classify", "model", "text", "--mechanism", "TEXT"],
    **{f"train {name}": ["train", name, "--mechanism", "TEXT"] for name in recipes.NAMES},
}


def small_model(folder: Path) -> Path:
    sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    return rg.save(rg.Decoder(rg.DecoderConfig(**sizes)), folder)


@pytest.mark.parametrize("text", ERRORS)
def test_a_text_that_names_none_is_one_line_that_says_it(here, regard, text):
    done = regard("check", text)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"regard: error: mechanism: [^\n]*{re.escape(ERRORS[text])}[^\n]*\n", done.stderr), done.stderr
    assert repr(text) in done.stderr
    assert len(done.stderr) < 500


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_text_and_says_what_is_wrong_with_it(here, regard, command):
    small_model(here / "model")
    before = sorted(here.rglob("*"))
    done = regard(*["raising.py:Mine" if word == "TEXT" else word for word in COMMANDS[command]])
    assert (done.returncode, done.stdout) == (2, "")
    assert "'raising.py:Mine' to be importable, got KeyError in raising.py, line 5" in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in str(path)) == before


def test_the_path_of_a_file_is_whole_and_a_modules_name_stays(here):
    assert absolute("mine.py:Mine") == f"{here}/mine.py:Mine"
    assert absolute("softmax") == "softmax"
    assert absolute("package.inner:Mine") == "package.inner:Mine"


# Runs


USES = {
    "translate": ["translate", "--model", "saved", "It is"],
    "lm": ["generate", "saved", "It is", "--max-new-tokens", "3"],
    "bert": ["models", "saved"],
    "classify": ["classify", "saved", "It is"],
    "vision": ["models", "saved"],
}
"""What opens a model of each recipe from scratch."""


@pytest.mark.parametrize("recipe", USES)
def test_every_recipe_trains_it_and_goes_on_with_it(here, regard, monkeypatch, recipe):
    module, place = recipes.recipe(recipe), Place(0, 1, torch.device("cpu"))
    values = {name: str(here / value) if name == "data" else value for name, value in SMALL[recipe].items()}
    if recipe == "translate":
        values["vocabulary_size"] = 300
    options = module.Options(**values, embedding_dim=16, num_heads=2, mechanism="mine.py:Mine")
    task = begin(recipe, options, Settings(steps=2, batch_size=4), here / "run", place)
    learned = [parameter for name, parameter in task.model.named_parameters() if name.endswith("attend.scale")]
    assert learned
    sum(task.totals(task.model, task.batch([0, 1, 2], 0)).values()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in learned)
    assert json.loads((here / "run/run.json").read_text())["options"]["mechanism"] == f"{here}/mine.py:Mine"
    rg.save(task.model, here / "saved")
    assert "--mechanism FILE.py:Mine" in regard(*USES[recipe]).stderr
    done = regard(*USES[recipe], "--mechanism", "mine.py:Mine")
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.chdir("/")
    again, _ = reopen(here / "run", place)
    pairs = zip(task.model.named_parameters(), again.model.parameters(), strict=True)
    assert [name for (name, parameter), same in pairs if not torch.equal(parameter, same)] == []
    write_card(task, Settings(steps=1, batch_size=8), here, Report(step=1, steps=1, results={"loss": 0.5}))
    assert f'model = rg.load("{here}", mechanisms=[Mine])' in (here / "README.md").read_text()


TINY = ["--data", "words.txt", "--vocabulary-size", "300", "--context-length", "32", "--embedding-dim", "16",
        "--num-heads", "2", "--num-layers", "2", "--batch-size", "4", "--evaluate-every", "9", "--schedule", "constant",
        "--device", "cpu", "--mechanism", "mine.py:wide"]  # fmt: skip


def test_a_run_is_trained_resumed_saved_loaded_and_generates(here, regard):
    words = [word if word != "words.txt" else str(here / word) for word in TINY]
    for steps, out in ((4, "whole"), (2, "run")):
        done = regard("train", "lm", *words, "--steps", str(steps), "--out", out)
        assert done.returncode == 0, done.stderr
    (here / "elsewhere").mkdir()
    done = regard("train", "resume", "../run", "--steps", "4", "--device", "cpu", cwd=here / "elsewhere")
    assert done.returncode == 0, done.stderr
    losses = [[record["loss"] for record in read_metrics(here / name) if "loss" in record] for name in ("whole", "run")]
    assert losses[0] == losses[1]

    with pytest.raises(rg.CheckpointError, match=r"mechanisms=\[Mine\].*--mechanism FILE\.py:Mine"):
        rg.load(here / "run")
    kind = lookup(f"{here}/mine.py:Mine")
    model = rg.load(here / "run", mechanisms=[kind])
    scales = [block.attention.mechanism.scale for block in model.stack.blocks]
    assert model.config.mechanism.width == 8.0  # the run's, not the class's
    assert len({scale.item() for scale in scales}) == 2  # each layer learned its own
    assert all(isinstance(scale, nn.Parameter) for scale in scales)
    expected = rg.generate(model, "It is", max_new_tokens=5)[0]

    for source in ("run", "run/model"):
        for text in ("mine.py:Mine", "mine.py:wide"):
            done = regard("generate", source, "It is", "--max-new-tokens", "5", "--mechanism", text, cwd=here)
            assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
    for command in (["generate", "run", "It is"], ["models", "run"], ["convert", "run", "out", "--to", "regard"]):
        done = regard(*command)
        assert done.returncode == 2
        assert re.fullmatch(r"regard: error: [^\n]*--mechanism FILE.py:Mine\n", done.stderr)
    described = regard("models", "run", "--mechanism", "mine.py:Mine").stdout
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" in described
    assert "Mine(width=8.0" in described
    done = regard("convert", "run", "out", "--to", "regard", "--mechanism", "mine.py:Mine")
    assert done.returncode == 0, done.stderr
    copied = rg.load(here / "out", mechanisms=[kind])
    assert all(torch.equal(tensor, copied.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_it_takes_the_place_of_another_attention(here, regard):
    model = rg.load(small_model(here / "model"))
    done = regard("convert", "model", "out", "--to", "regard", "--mechanism", "mine.py:wide")
    assert done.returncode == 0, done.stderr
    loaded = rg.load(here / "out", mechanisms=[lookup("mine.py:Mine")])
    assert loaded.config.mechanism.width == 8.0
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    # Under another name than the file's it is another attention: what the file's had learned stays there.
    (here / "other.py").write_text(SOURCE.replace("class Mine", "class Other").replace("Mine(", "Other("))
    kind = lookup("other.py:Other")
    swapped = rg.load(here / "out", mechanism=kind(scale=nn.Parameter(torch.tensor([7.0]))))
    assert swapped.stack.blocks[0].attention.mechanism.scale.item() == 7.0


@pytest.mark.parametrize("recipe", ["classify", "vision"])
def test_fine_tuning_starts_from_what_it_has_learned(here, recipe):
    kind, module = lookup("mine.py:Mine"), recipes.recipe(recipe)
    mechanism = kind(width=3.0, scale=nn.Parameter(torch.tensor([0.25])))
    if recipe == "classify":
        first = recipes.recipe("bert")
        task = first.build(first.Options(**SMALL["bert"], embedding_dim=16, num_heads=2), here, seed=0)
        model = rg.Encoder(task.model.config.with_mechanism(mechanism))
        model.tokenizer = task.model.tokenizer
    else:
        task = module.build(
            module.Options(**SMALL["vision"], embedding_dim=16, num_heads=2, mechanism="mine.py:Mine"), here, seed=0
        )
        model = rg.VisionTransformer(task.model.config.with_mechanism(mechanism))
    rg.save(model, here / "start")
    for folder in ("data", "other"):
        (here / folder).mkdir()
    data = {"data": SMALL[recipe]["data"], "start": str(here / "start")}
    with pytest.raises(rg.CheckpointError, match=r"mechanisms=\[Mine\]"):
        module.build(module.Options(**data), here / "data", seed=0)
    task = module.build(module.Options(**data, mechanism="mine.py:Mine"), here / "data", seed=0)
    layers = [parameter for name, parameter in task.model.named_parameters() if name.endswith("attend.scale")]
    assert [parameter.item() for parameter in layers] == [0.25] * len(layers) != []
    assert task.model.config.mechanism.width == 3.0
    swapped = module.build(module.Options(**data, mechanism="softmax"), here / "other", seed=0)
    assert swapped.model.config.mechanism == rg.Softmax()


@pytest.mark.parametrize(
    "mechanism",
    [
        "mine.py:Mine",
        {"name": "mine.py:Mine", "shipped": False},
        {"name": "Mine", "shipped": False, "fields": []},
        {"name": "Mine", "shipped": False, "fields": {"width": {"tensor": [10**12]}}},
        {"name": "Mine", "shipped": False, "fields": {"nothing": 3}},
        {"name": "Mine", "shipped": True},
        {"name": ["Mine"], "shipped": False},
    ],
    ids=str,
)
def test_a_checkpoint_imports_no_code_and_names_what_it_wants(here, mechanism):
    kind = lookup("mine.py:Mine")
    (here / "mine.py").write_text("raise SystemExit('imported')\n")
    folder = small_model(here / "model")
    values = json.loads((folder / "config.json").read_text())
    values["config"]["mechanism"] = mechanism
    (folder / "config.json").write_text(json.dumps(values))
    for mechanisms in ([], [kind]):
        with pytest.raises(rg.CheckpointError, match=r"^[^\n]*$"):
            rg.load(folder, mechanisms=mechanisms)


# Cost and laws


def test_cost_counts_it_beside_the_shipped_ones_with_its_parameters(here, regard):
    shape = ("--length", "512", "--heads", "4", "--kv-heads", "4", "--qk-length", "16", "--mode", "prefill")
    done = regard("cost", "--own", "mine.py:Fixed", *shape, "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert [row["mechanism"] for row in output["rows"]] == ["softmax", "quadratic", "Fixed"]
    assert [row["parameters"] for row in output["rows"]] == [0, 0, 256]
    heads = {"num_heads": 4, "num_kv_heads": 4, "qk_length": 16, "value_length": 16}
    work = rg.Work(query_length=512, key_length=512, **heads, mask=rg.causal)
    softmax, _, fixed = (row["flops"] for row in output["rows"])
    assert fixed == rg.cost(from_text("mine.py:Fixed"), work).flops
    assert fixed == softmax + 2 * 4 * 512 * 16 * 16  # q @ W, once for each query
    assert [(crossover["first"], crossover["second"]) for crossover in output["crossovers"]] == [
        ("softmax", "quadratic"),
        ("softmax", "Fixed"),
    ]
    table = regard("cost", "--own", "mine.py:Fixed", *shape).stdout
    assert re.search(r"activation +parameters +form", table)
    assert re.search(r"Fixed +MHA.* 256 +score", table)
    assert "parameters" not in regard("cost", *shape).stdout


def test_two_files_with_one_name_are_told_apart(here, regard):
    (here / "other.py").write_text(SOURCE)
    mechanisms = ("--mechanism", "mine.py:Mine", "--own", "other.py:Mine", "--own", "other.py:wide")
    done = regard("cost", *mechanisms, "--length", "64", "--kv-heads", "4", "--mode", "prefill", "--json")
    assert [row["mechanism"] for row in json.loads(done.stdout)["rows"]] == ["mine.py:Mine", "other.py:Mine", "wide"]


def test_a_length_of_heads_that_it_does_not_take_is_one_line(here, regard):
    for command in (["cost", "--own", "mine.py:Fixed"], ["check", "mine.py:Fixed"]):
        done = regard(*command)
        assert done.returncode == 2
        assert re.fullmatch(
            r"regard: error: --qk-length: expected one that Fixed takes, got \d+, with which it raises [^\n]*\n",
            done.stderr,
        )
    with pytest.raises(ValueError, match="qk_length: expected one that Fixed takes, got 64"):
        rg.cost(from_text("mine.py:Fixed"), rg.Work(qk_length=64))


def test_check_takes_it_where_it_takes_a_name(here, regard):
    quick = ("--law", "weights", "--mask", "causal", "--dtype", "float32", "--heads", "MHA")
    done = regard("check", "elu", "mine.py:Fixed", "--qk-length", "16", *quick)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^Elu\(\): every law holds[^$]*^Fixed\(W=Parameter\(16, 16\)\): every law holds", done.stdout, re.M
    )


def test_rates_are_those_of_a_mechanism_that_has_no_hash():
    @dataclass(frozen=True, kw_only=True)
    class Listed(rg.Mechanism):
        factors: list

        def similarity(self, q, k):
            return torch.sigmoid(self.factors[0] * (q @ k.transpose(-1, -2)))

    mechanism, work = Listed(factors=[2.0]), rg.Work(query_length=64, key_length=64)
    rates = Rates(((rg.Softmax(), ((64, 1e9),)), (mechanism, ((64, 2e9),))))
    assert rates.seconds(mechanism, work) == rg.cost(mechanism, work).flops / 2e9
    assert rates.table["Listed(factors=[2.0])"] == {"flops_per_second": 2e9}
