"""The command line, run as a person runs it: in a process of its own."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import broken
import regard as rg
from processes import finished
from regard.commands import main, train
from regard.commands.commands import load as load_command

Inside: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
COMMANDS = ("demo", "check", "cost", "bench", "models", "convert", "generate", "chat", "train", "translate", "classify")
PNG = b"\x89PNG\r\n\x1a\n"
NO_LENGTHS = ("1k", "1e12", "1e30", "0", "-1", "nan", "1.5", "text", "", "64,,128", "1" + "0" * 30, "9" * 5000)
QUICK = ("--law", "weights", "--mask", "causal", "--dtype", "float32")

OWN = """
from dataclasses import dataclass

import torch

import regard as rg


@dataclass(frozen=True, kw_only=True)
class Cauchy(rg.Mechanism):
    def similarity(self, q, k):
        return 1 / (1 + torch.cdist(q, k) ** 2)


@dataclass(frozen=True, kw_only=True)
class Signed(rg.Mechanism):
    def similarity(self, q, k):
        return q @ k.transpose(-1, -2)


@dataclass(frozen=True, kw_only=True)
class Sized(rg.Mechanism):
    size: int


def projected():
    return rg.Kernel(feature_map=torch.nn.Sequential(torch.nn.Linear(64, 4), torch.nn.Softplus()))
"""


def regard(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return finished("-m", "regard", *arguments, cwd=cwd)


def entry_point(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    """The same entry point in this process, where torch is loaded already: for the many small cases."""

    def call(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["regard", *arguments])
        if cwd is not None:
            monkeypatch.chdir(cwd)
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(stop.value.code or 0), printed.out, printed.err)

    return call


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(OWN)
    (folder / "broken.py").write_text("import nothing_of_this_name\n")
    (folder / "taken").write_text("a file where a folder is wanted")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of no use and a file."""
    folder = tmp_path_factory.mktemp("model")
    config = rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2)
    rg.save(rg.Decoder(config), folder / "model")
    (folder / "taken").write_text("a file where a folder is wanted")
    return folder


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_an_example(inside: Inside, command: str) -> None:
    done = inside(*filter(None, [command]), "--help")
    assert done.returncode == 0
    assert re.search(rf"Examples?:\s+regard {command or 'demo'}", done.stdout)
    assert done.stderr == ""


def test_no_arguments_is_help_that_names_every_command() -> None:
    done = regard()
    assert done.returncode == 0
    assert all(re.search(rf"│ {command}\s", done.stdout) for command in COMMANDS)


def test_version_is_the_package_version(inside: Inside) -> None:
    from importlib.metadata import version

    assert inside("--version").stdout == f"regard {version('regard')}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nosuch"], "nosuch"),
        (["trian"], "got 'trian'; did you mean train?"),
        (["cost", "--heads", "0"], "--heads: expected at least 1, got '0'"),
        (["cost", "extra", "words"], "arguments: expected no more, got 'extra words'"),
        (["cost", "-q"], "no option -q"),
        (["train"], "command: expected one of bert, chat, classify, lm, resume, translate, vision, got none"),
        (["cost", "--heads"], "--heads: expected a value, got none"),
        (["it's"], 'got "it\'s"'),
        (["cost", "--json=5"], "--json: expected no value, got one"),
        (["cost", "--heads", "9" * 5000], "--heads: expected a whole number of fewer digits, got '999"),
        (["chat", "smollm2", "--temp", "1"], "no option --temp; did you mean --temperature?"),
        (["cost", "--heads", "many"], "--heads: expected a whole number, got 'many'"),
        (["generate", "smollm2", "hi", "--temperature", "hot"], "--temperature: expected a number, got 'hot'"),
        (["convert", "smollm2"], "FOLDER: expected a value, got none"),
        (["generate", "model", "--devise", "cpu"], "no option --devise; did you mean --device?"),
        (["translate", "--modle", "x"], "no option --modle; did you mean --model?"),
        (["train", "bert", "--lr", "1"], "no option --lr; did you mean --learning-rate or --lora-rank?"),
        (["--hlep"], "no option --hlep; did you mean --help?"),
        (["cost", "--zebra"], "no option --zebra; `regard cost --help` lists the options"),
        (["view", "minilm", "--pair", "x"], "--pair: expected 2 values, got fewer"),
        (["cost", "--length", "4096,"], "got '4096,'"),
        (["cost", "--own", "file.py"], "got 'file.py'; write file.py:NAME"),
        (["train", "lm", "--mechanism", "sofmax"], "got 'sofmax'; did you mean softmax?"),
        (["check", "nosuch"], "nosuch"),
        (["check", "softmax", "--law", "nosuch"], "streamed"),
        (["check", "softmax", "--examples", "0"], "examples"),
        (["check", "--own", "mine.py:Nothing"], "Nothing"),
        (["check", "--own", "mine.py:Sized"], "size"),
        (["check", "--own", "mine.py:projected"], "--qk-length: expected one that Kernel takes, got 4"),
        (["check", "--own", "mine.py:torch"], "regard.Mechanism"),
        (["check", "--own", "mine"], "FILE.py:NAME, MODULE:NAME, got 'mine'"),
        (["check", "--own", "broken.py:Any"], "nothing_of_this_name"),
        (["check", "--own", "absent.py:Any"], "absent.py"),
        (["cost", "--dtype", "int8"], "bfloat16"),
        (["cost", "--mode", "train"], "prefill"),
        *((["cost", "--length", text], "length: expected whole numbers from 1 to 1,000,") for text in NO_LENGTHS),
        (["cost", "--heads", "1000000000000"], "heads"),
        (["cost", "--batch", "0"], "batch"),
        (["cost", "--kv-heads", "3"], "divisor"),
        (["cost", "--mechanism", "channel"], "causal"),
        (["cost", "--window", "8,8"], "--no-causal"),
        (
            ["cost", "--window", "8,8,8"],
            "--window: expected BEFORE or BEFORE,AFTER of at least 0, like 15 or 8,8, got '8,8,8'",
        ),
        (["cost", "--length", "64", "--plot", "cost.nosuch"], "cost.nosuch"),
        (["cost", "--length", "64", "--plot", "absent/cost.png"], "absent"),
        (["demo", "--out", "taken"], "taken: expected a folder, got a file"),
        (["demo", "--out", "taken/inside"], "taken"),
        (["bench", "--only", "nosuch"], "nosuch"),
    ],
)
def test_an_error_is_one_line_and_exit_2(inside: Inside, folder: Path, arguments: list[str], named: str) -> None:
    done = inside(*arguments, cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(rf"regard: error: [^\n]*{re.escape(named)}[^\n]*\n", done.stderr)
    assert len(done.stderr) < 500


BESIDE = {
    "generate": ["model", "x"], "chat": ["model"], "models": ["model"], "convert": ["model", "out"],
    "classify": ["model", "x"], "translate": ["x"], "train resume": ["taken"],
}  # fmt: skip
"""What a command needs beside its flags."""
FILES = ("--out", "--plot", "--show", "--file")
FREE = ("--stop", "--system", "--suffix")
"""Flags that take any text."""


def commands() -> dict[str, Any]:
    recipes = {f"train {name}": train._load(name) for name in load_command("train").commands}
    return {name: load_command(name) for name in COMMANDS if name != "train"} | recipes


def bad_values(flag: str) -> tuple[str, ...]:
    if flag in FILES:
        return ("taken/inside",)
    return () if flag in FREE else ("nosuch",) if flag == "--length-penalty" else ("nosuch", "-1")


@pytest.mark.parametrize("command", commands())
def test_an_error_names_the_flag_that_was_typed(inside: Inside, model: Path, command: str) -> None:
    """Every flag that takes a value, with bad ones; of a file there may be nothing to say but its name."""
    options = [option for option in commands()[command].params if option.opts[0].startswith("-")]
    for flag, bad in (
        (option.opts[0], bad) for option in options if not option.is_flag for bad in bad_values(option.opts[0])
    ):
        more = BESIDE.get(command, [])
        if command.startswith("train") and command != "train resume" and flag not in ("--steps", "--out"):
            more = ["--steps", "1", "--out", "run"]
        done = inside(*command.split(), *more, flag, bad, cwd=model)
        assert done.returncode == 2, (flag, bad, done.stdout, done.stderr)
        assert re.fullmatch(rf"regard: error: ({re.escape(bad)}: |[^\n]*{flag}\b)[^\n]*\n", done.stderr), (flag, bad)
        assert not re.search(r"\w\(\w*=|error: \w+_\w+:", done.stderr), done.stderr  # words of Python's
    assert sorted(path.name for path in model.iterdir()) == ["model", "taken"]


def test_an_error_in_a_process_of_its_own() -> None:
    done = regard("check", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"regard: error: mechanism: [^\n]*'nosuch'\n", done.stderr)


def test_an_interrupt_at_any_moment_is_one_line_and_exit_130(folder: Path) -> None:
    """While modules are imported, while the law is checked, and where hypothesis makes another exception of it."""
    moments = [str(Path(__file__).with_name("moments.py")), "80000", "run_engine", "--"]
    done = finished(*moments, "check", "elu", *QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["code"] == 0
    assert len(report["endings"]) > 10
    assert [
        ending for ending in report["endings"] if (ending["code"], ending["said"]) != (130, "regard: interrupted\n")
    ] == []


def test_check_prints_a_report(inside: Inside) -> None:
    done = inside("check", "elu", *QUICK)
    assert done.returncode == 0
    assert done.stdout.startswith("Elu(): every law holds\n")
    assert done.stdout.endswith("3 cells: 3 held, 0 broken, 0 not applicable\n")
    assert done.stderr == ""


def test_check_json_counts_its_cells(inside: Inside) -> None:
    done = inside(
        "check", "softmax", "quadratic", "--law", "groups", "--mask", "causal", "--dtype", "float64", "--json"
    )
    report = json.loads(done.stdout)
    assert [mechanism["mechanism"] for mechanism in report["mechanisms"]] == [
        "Softmax(beta=None, softcap=None)",
        "Quadratic(c=1.0)",
    ]
    assert (report["cells"], report["held"], report["broken"], report["not_applicable"]) == (6, 4, 0, 2)
    cells = [cell for mechanism in report["mechanisms"] for cell in mechanism["cells"]]
    assert len(cells) == 6
    assert {cell["reason"] for cell in cells if cell["outcome"] == "not applicable"} == {
        "every query head has keys of its own"
    }


def test_own_mechanism_that_holds_exits_0(inside: Inside, folder: Path) -> None:
    done = inside("check", "--own", "mine:Cauchy", *QUICK, cwd=folder)
    assert done.returncode == 0
    assert done.stdout.startswith("Cauchy(): every law holds")


def test_own_mechanism_for_heads_of_one_length(inside: Inside, folder: Path) -> None:
    done = inside("check", "--own", "mine.py:projected", "--qk-length", "64", *QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "every law holds" in done.stdout


def test_own_mechanism_that_breaks_a_law_exits_1_with_a_counterexample(inside: Inside, folder: Path) -> None:
    done = inside("check", "--own", "mine.py:Signed", *QUICK[2:], "--law", "normalised", "--json", cwd=folder)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["broken"] == 3
    cell = report["mechanisms"][0]["cells"][0]
    assert cell["outcome"] == "broken"
    assert "weight" in cell["reason"]
    assert cell["counterexample"]["qk_length"] >= 1


def test_cost_table_has_every_row_and_the_crossover(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = inside("cost", "--length", "1024,4096", "--kv-heads", "8", "--embedding-dim", "512")
    assert done.returncode == 0
    assert len(re.findall(r"(?:softmax|quadratic)\s+GQA 32/8\s+(?:prefill|decode)\s+[14],0", done.stdout)) == 8
    assert "bottleneck" in done.stdout
    crossover = r"GQA 32/8\s+prefill\s+quadratic takes fewer FLOPs than softmax from [\d,]+ tokens on"
    assert re.search(crossover, done.stdout)


def test_cost_json_is_what_the_library_says(inside: Inside) -> None:
    import regard as rg

    done = inside("cost", "--length", "2048", "--heads", "8", "--kv-heads", "2", "--mode", "prefill", "--json")
    report = json.loads(done.stdout)
    work = rg.Work(query_length=2048, key_length=2048, num_heads=8, num_kv_heads=2, mask=rg.causal)
    for row, mechanism in zip(report["rows"], (rg.Softmax(), rg.Quadratic()), strict=True):
        expected = rg.cost(mechanism, work)
        assert (row["flops"], row["bytes"], row["form"]) == (expected.flops, expected.bytes, expected.form)
        assert (row["state_bytes"], row["activation_bytes"]) == (expected.state_bytes, expected.activation_bytes)
    assert [crossover["from"] for crossover in report["crossovers"]] == [
        rg.crossover(rg.Softmax(), rg.Quadratic(), work)
    ]


@pytest.mark.parametrize("length", [1, 10**15])
def test_cost_of_any_length_is_drawn(inside: Inside, tmp_path: Path, length: int) -> None:
    done = inside("cost", "--kv-heads", "8", "--length", str(length), "--plot", "cost.svg", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "cost.svg").stat().st_size > 1000


@pytest.mark.parametrize("mechanism", ["softmax", "quadratic", "elu", "uniform"])
@pytest.mark.parametrize("length", [10**12, 10**15])
def test_cost_of_any_length_is_a_number(inside: Inside, length: int, mechanism: str) -> None:
    done = inside("cost", "--mechanism", mechanism, "--kv-heads", "8", "--length", str(length), "--json")
    assert done.returncode == 0, done.stderr
    prefill, decode = json.loads(done.stdout)["rows"]
    assert prefill["length"] == decode["length"] == length
    grows = 1 if prefill["form"] == "linear" else 2
    assert 1 < prefill["flops"] / length**grows < 1e8


def test_cost_crossover_does_not_depend_on_the_order(inside: Inside) -> None:
    shape = ("--heads", "4", "--kv-heads", "4", "--length", "64", "--json")
    forward, backward = (
        json.loads(inside("cost", "--mechanism", first, "--mechanism", second, *shape).stdout)["crossovers"]
        for first, second in (("softmax", "quadratic"), ("quadratic", "softmax"))
    )
    assert [(crossover["cheaper"], crossover["from"]) for crossover in forward] == [
        (crossover["cheaper"], crossover["from"]) for crossover in backward
    ]
    assert {crossover["cheaper"] for crossover in forward} == {"quadratic"}


def test_cost_crossover_of_a_mechanism_with_itself_is_none(inside: Inside) -> None:
    done = inside("cost", "--mechanism", "softmax", "--mechanism", "uniform", "--kv-heads", "8", "--mode", "prefill")
    assert "softmax and uniform take equally many FLOPs" in done.stdout


def test_cost_with_a_window_says_why_it_is_quadratic(inside: Inside) -> None:
    done = inside("cost", "--mechanism", "quadratic", "--window", "64", "--length", "512", "--mode", "prefill")
    assert "(1) quadratic in the length: a sliding window" in done.stdout


def test_cost_measure_says_what_was_measured(inside: Inside) -> None:
    shape = ("--heads", "1", "--qk-length", "8", "--length", "64")
    report = json.loads(inside("cost", "--measure", *shape, "--json").stdout)["measured"]
    assert (report["first"], report["second"], report["num_heads"], report["dtype"]) == (
        "softmax",
        "quadratic",
        1,
        "float32",
    )
    assert len(report["rates"]) == 2
    assert all(rate["flops_per_second"] > 0 for rate in report["rates"].values())
    predicted, measured, off = report["predicted"], report["measured"], report["difference_percent"]
    crossed = predicted is not None and measured is not None  # on a busy machine they may not cross
    assert off == (pytest.approx(100 * (predicted - measured) / measured) if crossed else None)
    alone = inside("cost", "--measure", "--mechanism", "softmax", *shape)
    assert (alone.returncode, alone.stderr) == (
        2,
        "regard: error: --measure: expected two mechanisms to compare, got one\n",
    )


def test_cost_plot_is_a_picture(inside: Inside, tmp_path: Path) -> None:
    done = inside("cost", "--length", "512,8192", "--plot", "cost.png", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "cost.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["cost.png"]


def test_bench_lists_its_suite(inside: Inside) -> None:
    from regard.commands.suite import SUITE

    lines = inside("bench", "--list", "--json").stdout.splitlines()
    assert [bench["name"] for bench in json.loads(lines[-1])["suite"]] == list(SUITE)


def test_every_benchmark_is_in_the_suite() -> None:
    """Of two with one name, one would be lost."""
    from regard.commands.suite import SUITE, attention, generation, models, overhead, training

    listed = [bench.name for part in (attention, overhead, models, generation, training) for bench in part.BENCHES]
    assert listed == list(SUITE)


@pytest.mark.parametrize("name", ["call-8", "step-16-padded", "step-elu"])
def test_overhead_is_what_ours_takes_beyond_its_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.commands.suite import SUITE, overhead, run

    monkeypatch.setattr(overhead, "CALLS", 2)
    result = run(SUITE[name])
    beyond = (result.ours_ms - result.peer_ms) * 1e3
    assert f" {beyond:.0f} beyond; " in result.note
    assert result.ours_ms > 0 < result.peer_ms
    allowed = int(result.note.partition("beyond; ")[2].split()[0])
    assert result.passed == (beyond <= allowed)
    slow = replace(result, ratio=result.peer_ms / (result.peer_ms + 1.01e-3 * allowed))
    quick = replace(result, ratio=result.peer_ms / (result.peer_ms + 0.99e-3 * allowed))
    assert (slow.passed, quick.passed) == (False, True)


@pytest.mark.parametrize("name", ["mine.py:Cauchy", "elu", "channel"])
def test_bench_times_a_mechanism_by_name(
    inside: Inside, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("regard.commands.suite.attention.LENGTHS", (8, 24))
    called = name.rpartition(":")[2]
    done = inside("bench", "--mechanism", name, "--qk-length", "4", "--quick", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [result["name"] for result in results] == [
        f"{called}-{n}-{peer}" for n in (8, 24) for peer in ("sdpa", "reference")
    ]
    assert [result["peer"] for result in results] == ["SDPA softmax", "its plain formula"] * 2
    assert all(result["ours_ms"] > 0 and result["peer_ms"] > 0 and result["ratio"] > 0 for result in results)
    listed = inside("bench", "--mechanism", name, "--list").stdout
    assert all(result["name"] in listed for result in results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mechanism", "mine.py:projected", "--qk-length", "4"],
            "--qk-length: expected one that Kernel takes, got 4",
        ),
        (["--mechanism", "mine.py:Cauchy", "--gpu"], "--mechanism: expected none with --gpu, got 'mine.py:Cauchy'"),
        (["--only", "padded", "--gpu"], "--only: expected none with --gpu, got ['padded']"),
        (["--quick", "--gpu"], "--quick: expected none with --gpu, got True"),
        (["--list", "--gpu"], "--list: expected none with --gpu, got True"),
        (["--mechanism", "elu", "--only", "padded"], "--only: expected a benchmark of"),
    ],
)
def test_bench_refuses_what_it_cannot_time(inside: Inside, folder: Path, arguments: list[str], message: str) -> None:
    done = inside("bench", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"regard: error: {message}")


class WrongAtFirst(broken.HasAWrongPath):
    def paths(self) -> Any:
        return tuple(reversed(super().paths()))


def test_a_benchmark_whose_results_differ_is_refused() -> None:
    from regard.commands.suite import of_mechanism, run

    with pytest.raises(ValueError, match=r"^wrong-256-sdpa: expected results within .* no speed to report"):
        run(of_mechanism("wrong", WrongAtFirst())[0], quick=True)


def test_demo_leaves_runs_a_page_and_its_pictures(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On little data, since models that have learned nothing write until they may not; `make demo` is the whole."""
    from regard.commands import demo_page

    for name, value in {"count": 2000, "held-out": 20, "vocabulary-size": 400}.items():
        monkeypatch.setitem(demo_page.SIZES, name, value)
    for name, least in {
        "TESTED": 20,
        "ALIGNED": 8,
        "CHECKED_MASKS": ("causal",),
        "CHECKED_DTYPES": ("float32",),
    }.items():
        monkeypatch.setattr(demo_page, name, least)
    done = inside("demo", "--out", "tour", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "tour" / "index.html").read_text()
    pictures = re.findall(r'src="([^"]+)"', page)
    assert len(pictures) == 4
    assert all((tmp_path / "tour" / name).read_bytes().startswith(PNG) for name in pictures)
    runs = ["quadratic", "quadratic.log", "softmax", "softmax.log"]
    assert sorted(path.name for path in (tmp_path / "tour").iterdir()) == sorted([*pictures, *runs, "index.html"])
    assert done.stdout.count("every law holds") == 2
    assert done.stdout.rstrip().endswith("index.html")
    assert "http" not in page
    again = inside("demo", "--out", "tour", cwd=tmp_path)
    assert again.returncode == 2
    assert "out: expected a folder without runs" in again.stderr
