"""The project keeps its own rules: a documented public list, one direction of imports, examples that run."""

import ast
import doctest
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard as rg
from regard.core.tiles import tiles_are_forbidden

ROOT = Path(__file__).parent.parent
MODULES = sorted(module.name for module in pkgutil.walk_packages(rg.__path__, "regard."))

# Lower layers first. A module imports only from layers before its own, or from its own.
ROOMS = ["core", "models", "checkpoints", "inference", "training", "lab", "explorer", "commands", "__main__"]
CORE = [
    ["tiles", "files", "extras", "cpu", "eager", "tensors", "user_code", "display", "style"],
    ["masks"],
    ["states"],
    ["calls"],
    ["cost", "cost_figure"],
    ["kernels"],
    ["paths"],
    ["families"],
    ["mechanisms"],
    ["attention"],
    ["laws", "weights_figure"],
]


def python_files(path):
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def layer(module):
    """Where a module stands: its room, and its place in the core."""
    _, room, *inner = module.split(".")
    if room != "core" or not inner:
        return ROOMS.index(room), 0
    return 0, next(depth for depth, names in enumerate(CORE) if inner[0] in names)


def imports(source, module, is_package=False):
    """Modules of ours that a file imports, anywhere in it and in any way; those for type checkers only are left out.

    A name taken from the package itself is its submodule, or the module that defines the public name."""
    tree = ast.parse(source)
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    nodes = [node for node in ast.walk(tree) if node not in typing_only]
    package = {"regard"}  # what the package is called in this file
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "regard" and name.asname:
                    package.add(name.asname)
                elif name.name.startswith("regard."):
                    modules.add(name.name)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package]
            origin = ".".join([*above, *filter(None, [node.module])] if node.level else [node.module])
            if origin == "regard":
                modules |= {rg._HOME.get(name.name, f"regard.{name.name}") for name in node.names}
            elif origin.startswith("regard."):
                modules.add(origin)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in package:
            modules.add(rg._HOME.get(node.attr, f"regard.{node.attr}"))
    return modules


def against_the_direction(source, module, is_package=False):
    """Imports of a file that its layer may not have."""
    return {other for other in imports(source, module, is_package) if layer(other) > layer(module)}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    path = Path(importlib.import_module(name).__file__)
    assert not against_the_direction(path.read_text(), name, is_package=path.name == "__init__.py")


@pytest.mark.parametrize(
    "line",
    [
        "from regard import checkpoints",
        "from regard import checkpoints as files",
        "from regard import load",
        "from regard import causal, load",
        "from regard.checkpoints import load",
        "from regard.checkpoints.names import NAMES",
        "import regard.checkpoints",
        "import regard.checkpoints.names as names",
        "import torch, regard.checkpoints",
        "from ... import checkpoints",
        "from ...checkpoints import load",
        "from ...checkpoints.names import NAMES",
        "import regard as rg\nrg.load('smollm2')",
        "import regard\nregard.checkpoints.load('smollm2')",
        "def late():\n    from regard import checkpoints",
        "class Late:\n    def load(self):\n        import regard.checkpoints",
        "try:\n    from regard.checkpoints import load\nexcept ImportError:\n    pass",
        "if not TYPE_CHECKING:\n    from regard import checkpoints",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from regard import checkpoints",
    ],
)
def test_an_import_against_the_direction_is_caught(line):
    source, module = Path(rg.__path__[0], "core/masks/structure.py").read_text(), "regard.core.masks.structure"
    assert not against_the_direction(source, module)
    assert {other.split(".")[1] for other in against_the_direction(f"{source}\n{line}\n", module)} == {"checkpoints"}


def test_an_import_for_type_checkers_has_no_direction():
    assert not imports("if TYPE_CHECKING:\n    from regard import checkpoints", "regard.core.masks")


def test_a_relative_import_counts_from_its_file():
    assert imports("from ..laws import check", "regard.core.paths.sums") == {"regard.core.laws"}
    assert imports("from ..laws import check", "regard.core.paths", is_package=True) == {"regard.core.laws"}
    assert imports("from .sums import steps", "regard.core.paths", is_package=True) == {"regard.core.paths.sums"}


VAGUE = {"one", "ones", "found", "given", "held", "known", "own", "said", "told", "each"}
NAMED = ("src/regard", "benchmarks", "examples", "docs", "tests", "setup.py")
"""Folders and files in which every name says what it is the name of."""


def vague_names(source):
    """The lines of a file with names of VAGUE. Names of other packages are theirs: torch.ones, hypothesis.given."""
    nodes = list(ast.walk(ast.parse(source)))
    aliases = [name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in node.names]
    imported = {name.asname or name.name for name in aliases} - (VAGUE & {name.asname for name in aliases})
    lines = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            continue
        for field in ("id", "arg", "attr", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name.strip("_") in VAGUE and name not in imported:
                lines.add(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize("path", sorted(path for name in NAMED for path in python_files(ROOT / name)), ids=str)
def test_names_say_the_thing(path):
    assert vague_names(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "found = 1",
        "for one in range(3): pass",
        "def _held(x): return x",
        "def choose(given): return given",
        "class Part:\n    own: int",
        "self.known = {}",
        "choose(told=1)",
        "import torch as each",
        "lambda said: said",
        "try:\n    pass\nexcept ValueError as one:\n    pass",
    ],
)
def test_a_name_that_says_nothing_is_caught(line):
    assert vague_names(line)


def test_names_of_other_packages_are_theirs():
    assert not vague_names(
        "import torch\nfrom hypothesis import given\nx = torch.ones(3)\n@given(x)\ndef check(): pass"
    )


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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*mechanism.py")), ids=lambda path: path.name)
def test_a_mechanism_of_ones_own_needs_public_names_alone(path):
    tree = ast.parse(path.read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in imported if module.startswith("regard.")]


def test_the_cpu_guard_sets_a_limit_only_where_tiles_are_forbidden():
    assert tiles_are_forbidden("flags : amx_tile", permitted=False)
    assert not tiles_are_forbidden("flags : amx_tile", permitted=True)
    assert not tiles_are_forbidden("flags : avx512f", permitted=False)


def test_a_users_own_mechanism_in_one_class_gets_everything_and_leaves_nothing(tmp_path):
    command = [sys.executable, ROOT / "examples/your_own_mechanism.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert done.returncode == 0, done.stderr
    assert "Cauchy(width=2.0): every law holds" in done.stdout
    off = float(done.stdout.split("off by at most ")[1].split("\n")[0])
    assert off < 1e-5


def tree(page):
    """The paths of DESIGN.md's file tree, each with what it says of them."""
    block = page.split("## Layout")[1].split("```")[1]
    folders, listed = [], {}
    for line in block.strip("\n").split("\n"):
        name, _, words = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        if depth > len(folders):  # a second line of words
            continue
        folders[depth:] = [name]
        listed["".join(folders)] = words.strip()
        if not name.endswith("/"):
            folders.pop()
    return listed


def files_of(root):
    return {str(path.relative_to(root)) for path in (root / "src/regard").rglob("*.py")}


def test_the_tree_of_the_design_is_the_files():
    listed = tree((ROOT / "DESIGN.md").read_text())
    assert {path for path in listed if path.endswith(".py")} == files_of(ROOT)
    assert [path for path in listed if not (ROOT / path).exists()] == []
    folders = {str(Path(path).parent) + "/" for path in files_of(ROOT)}
    assert folders <= set(listed)
    # A folder of modules is told by its __init__.py.
    assert [path for path, words in listed.items() if not words and f"{path}__init__.py" not in listed] == []


def test_a_row_that_is_missing_or_too_many_in_the_tree_is_caught():
    lines = (ROOT / "DESIGN.md").read_text().split("\n")
    rows = [number for number, line in enumerate(lines) if line.lstrip().startswith(("__init__.py", "errors.py"))]
    assert len(rows) > 5
    for number in rows:
        fewer = tree("\n".join(lines[:number] + lines[number + 1 :]))
        assert {path for path in fewer if path.endswith(".py")} < files_of(ROOT)
        more = tree("\n".join([*lines[: number + 1], lines[number].replace(".py", "2.py"), *lines[number + 1 :]]))
        assert {path for path in more if path.endswith(".py")} > files_of(ROOT)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("table")


def test_the_readmes_tables_are_the_committed_results(table):
    readme = (ROOT / "README.md").read_text()
    assert table.with_tables(readme) == readme, "run benchmarks/table.py"
    assert table.with_tables(readme.replace(" 1.33× |", " 9.33× |")) == readme
