"""The project keeps its own rules: a documented public list, one direction of imports, examples that run."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard as rg
from regard.cpu import tiles_are_forbidden

ROOT = Path(__file__).parent.parent
MODULES = sorted(module.name for module in pkgutil.walk_packages(rg.__path__, "regard."))

# Lower layers first. A module imports only from layers before its own, or from its own.
LAYERS = [
    ["files", "cpu"],
    ["mask"],
    ["structure"],
    ["state", "cost"],
    ["call"],
    ["paths"],
    ["mechanism"],
    ["mechanisms"],
    ["attention"],
    ["laws"],
    ["layers"],
    ["models"],
    ["checkpoints"],
    ["generation"],
    ["tracing"],
    ["trace"],
    ["data"],
    ["plots"],
    ["training"],
    ["bench"],
    ["demo"],
    ["cli", "__main__"],
]


def layer(module):
    part = module.split(".")[1]
    return next(depth for depth, names in enumerate(LAYERS) if part in names)


def imports(tree):
    """Modules imported anywhere in the file; those for type checkers only are left out."""
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node not in typing_only and isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regard."):
            yield node.module


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    source = Path(importlib.import_module(name).__file__).read_text()
    for imported in imports(ast.parse(source)):
        assert layer(imported) <= layer(name), f"{name} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0, f"{failed} of {tried} examples fail"


@pytest.mark.parametrize("name", rg.__all__)
def test_every_public_name_has_a_docstring_with_an_example(name):
    thing = getattr(rg, name)
    if name == "causal":  # a value: its documentation stands in its module
        return
    assert ">>> " in (thing.__doc__ or ""), f"rg.{name} has no runnable example"


def test_importing_regard_loads_nothing_optional():
    optional = (
        "matplotlib",
        "typer",
        "rich",
        "triton",
        "transformers",
        "gguf",
        "tokenizers",
        "safetensors",
        "jinja2",
        "tensorboard",
        "sacrebleu",
    )
    code = f"import sys, regard; print(*[m for m in {optional} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_cpu_guard_sets_a_limit_only_where_tiles_are_forbidden():
    assert tiles_are_forbidden("flags : amx_tile", permitted=False)
    assert not tiles_are_forbidden("flags : amx_tile", permitted=True)
    assert not tiles_are_forbidden("flags : avx512f", permitted=False)


def test_a_users_own_mechanism_in_one_class_gets_everything():
    done = subprocess.run([sys.executable, ROOT / "examples/your_own_mechanism.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Cauchy(width=2.0): every law holds" in done.stdout
    off = float(done.stdout.split("off by at most ")[1].split("\n")[0])
    assert off < 1e-5


def test_the_readme_names_every_file():
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "src/regard").rglob("*.py"):
        assert path.name in readme, f"the README's file tree lacks {path.relative_to(ROOT)}"
