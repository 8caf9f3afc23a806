"""What importing costs: nothing is imported before it is needed, and a name means the same whatever came first.

Counted in modules, not timed. Each look is a fresh process; those that need torch are forks of one that has it."""

import ast
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import regard as rg
from processes import forks
from regard.commands import commands, train

HEAVY = {"torch", "numpy", "einops", "jaxtyping", "hypothesis", "matplotlib", "transformers", "typer", "rich"}
# Not triton: torch's own FLOP counter, which our operators tell their FLOPs, imports it where it is installed.
HEAVY |= {"tokenizers", "safetensors", "jinja2", "gguf", "tensorboard", "sacrebleu", "llvmlite", "starlette", "uvicorn"}
CORE = ("attend", "weights", "explain", "Softmax", "Quadratic", "Channel", "Mechanism", "causal", "padding")
CORE += ("cost", "Work", "crossover", "layer_cost")
ENTRY = "import sys\nfrom regard.commands import main\nsys.argv[0] = 'regard'\n"


@pytest.fixture(scope="module")
def forked():
    """Run code in a process that has imported torch and nothing of ours; gives its `answer` and its modules."""
    with forks() as run:
        yield run


def modules_after(code):
    code += "\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def ran(*words):
    return f"{ENTRY}sys.argv[1:] = {list(words)!r}\nmain()"


def test_importing_regard_imports_nothing_heavy_and_only_the_guard_of_ours():
    modules = modules_after("import regard")
    assert not modules & HEAVY
    assert {name for name in modules if name.startswith("regard.")} == {"regard.core", "regard.core.tiles"}


@pytest.mark.skipif(sys.platform != "linux", reason="the guard reads /proc/cpuinfo, which only Linux has")
def test_the_guard_runs_before_torch_is_there():
    code = (
        "import sys\nopened = []\nsys.addaudithook(lambda event, found: event == 'open' and opened.append(found[0]))\n"
    )
    code += "import regard\nprint('/proc/cpuinfo' in map(str, opened), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_the_core_imports_no_models_and_nothing_it_does_not_compute_with(forked):
    answer, modules = forked(f"import regard as rg\nanswer = len([getattr(rg, name) for name in {CORE}])")
    assert answer == len(CORE)
    assert modules & HEAVY == {"torch", "numpy", "einops", "jaxtyping"}
    assert {name.split(".")[1] for name in modules if name.startswith("regard.")} == {"core"}
    assert not modules & {"regard.core.laws", "regard.core.style"}


def test_models_import_no_tokenizer_until_a_checkpoint_is_loaded_nor_hypothesis_until_a_check_runs(forked):
    _, modules = forked("import regard as rg\nrg.Decoder, rg.load, rg.save, rg.generate, rg.trace, rg.Prompt, rg.check")
    assert modules & HEAVY == {"torch", "numpy", "einops", "jaxtyping"}


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["nosuch"]])
def test_help_needs_no_torch(words):
    code = f"{ENTRY}sys.argv[1:] = {words!r}\ntry:\n    main()\nexcept SystemExit:\n    print(file=sys.stderr)"
    modules = modules_after(code)
    assert "regard.commands.commands" in modules
    assert modules & HEAVY <= {"typer", "rich"}
    ours = {name for name in modules if name.startswith("regard.")}
    assert not {name for name in ours if not name.startswith("regard.commands")} - {
        "regard.core",
        "regard.core.tiles",
        "regard.core.extras",
    }


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_command_imports_only_its_own(forked, name):
    """Training belongs to `train`, the laws and hypothesis to `check`; pictures and tokenizers wait for the work."""
    answer, modules = forked(ran(name, "--help"))
    assert answer is None
    needed = {"check": {"hypothesis"}}.get(name, set())
    assert modules & HEAVY <= {"torch", "numpy", "einops", "jaxtyping", "typer", "rich"} | needed
    assert ("regard.training" in modules) == (name == "train")
    others = {f"regard.commands.{module}" for module, _ in commands.COMMANDS.values()} & modules
    shared = {"generate": {"models"}, "chat": {"generate", "models"}}.get(name, set())
    assert others == {f"regard.commands.{module}" for module in {commands.COMMANDS[name][0], *shared}}


def test_counting_cost_imports_neither_pictures_nor_laws(forked):
    answer, modules = forked(ran("cost", "--json"))
    assert answer is None
    assert modules & HEAVY == {"torch", "numpy", "einops", "jaxtyping", "typer", "rich"}
    assert not modules & {"regard.core.laws", "regard.core.style", "regard.training", "regard.checkpoints"}


def test_a_check_leaves_no_files(forked, tmp_path):
    """hypothesis, loaded by the command itself, would keep a folder wherever that runs."""
    quick = ("--law", "weights", "--mask", "causal", "--dtype", "float32", "--json")
    answer, modules = forked(f"import os\nos.chdir({str(tmp_path)!r})\n{ran('check', 'softmax', *quick)}")
    assert answer is None
    assert "hypothesis" in modules
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_does_not_import_the_others(forked):
    _, modules = forked(ran("train", "lm", "--help"))
    recipes = {name.split(".")[3] for name in modules if name.startswith("regard.training.recipes.")}
    assert recipes == {"lm", "started"}, "and what recipes that start from a model have in common"


def test_what_help_lists_is_what_the_commands_say():
    """`regard --help` and `regard train --help` read docstrings from source: they must be the commands' own."""
    listed = typer.main.get_command(commands.app).commands
    assert list(listed) == list(commands.COMMANDS)
    for name, placeholder in listed.items():
        assert placeholder.help == commands.load(name).help, name
        assert placeholder.help
    for name, placeholder in commands.load("train").commands.items():
        assert placeholder.help == train._load(name).help, name
        assert placeholder.help


def test_type_checkers_see_the_public_names():
    """The imports under TYPE_CHECKING and the table that is imported by are one list."""
    tree = ast.parse(Path(rg.__file__).read_text())
    typed = {
        (name.asname, node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    rooms = {("lab", "regard")}  # public as a module
    assert {(name, module) for name, module in typed if name} == set(rg._HOME.items()) | rooms
    assert rg.__all__ == sorted(rg._HOME)


def test_public_names_are_listed_and_unknown_ones_refused():
    assert set(rg.__all__) <= set(dir(rg))
    assert {"__all__", "__path__"} <= set(dir(rg))
    scope: dict[str, object] = {}
    exec("from regard import *", scope)
    assert set(rg.__all__) <= set(scope)
    assert all(scope[name] is getattr(rg, name) for name in rg.__all__)
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'atend'"):
        _ = rg.atend
    with pytest.raises(ImportError, match="atend"):
        exec("from regard import atend")


def test_no_public_name_is_a_submodule():
    """Python would set the package's attribute to the module, as soon as somebody imports it."""
    assert not {module.name for module in pkgutil.iter_modules(rg.__path__)} & set(rg.__all__)


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
"""


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["--help"], "typer"),
        (["--help"], "rich.console"),
        *(([name], "torch") for name in commands.COMMANDS),
        *(([name], "numpy") for name in ("check", "generate", "train")),
    ],
    ids=str,
)
def test_ctrl_c_during_imports_is_one_line(words, module):
    code = f"{INTERRUPTED.format(module=module)}{ran(*words)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "regard: interrupted\n"


def test_an_ignored_interrupt_stays_ignored_during_imports():
    code = INTERRUPTED.format(module="typer").replace("default_int_handler", "SIG_IGN")
    done = subprocess.run([sys.executable, "-c", f"{code}{ran('--version')}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_handler_is_the_old_one_after_a_command(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["regard", "cost", "--length", "64", "--json"])
    from regard.commands import main

    with pytest.raises(SystemExit):
        main()
    assert signal.getsignal(signal.SIGINT) is before
