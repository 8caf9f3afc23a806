"""Without the packages of an extra: what runs, and what says which extra is missing.

The packages are here; a finder that does not see them takes the place of Python's own. `make wheel` does the same with
real installations.
"""

import re
import tomllib
from pathlib import Path

import pytest

from processes import forks
from regard.core.extras import EXTRAS

ROOT = Path(__file__).parent.parent
HIDING = f"""
import sys
from importlib.machinery import PathFinder

HIDDEN = set({sorted(set(EXTRAS) - {"jinja2"})!r})  # torch itself needs jinja2

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
MODEL = """
import regard as rg, torch
model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=16, num_layers=1, num_heads=2))
"""
CALLED = """
try:
    {call}
except ModuleNotFoundError as error:
    answer = str(error)
"""
COMMAND = """
import __main__, contextlib, io, sys
__main__.HIDDEN -= {present!r}
from regard.commands import main
sys.argv = ["regard", *{words!r}]
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        main()
    except SystemExit as stop:
        answer = [stop.code, said.getvalue()]
"""


@pytest.fixture(scope="module")
def without():
    """Run code in a process without any package of an extra."""
    with forks(HIDING) as run:
        yield run


def test_the_core_and_the_models_run_without_extras(without):
    answer, modules = without(
        f"import warnings\nwarnings.simplefilter('error')\n{MODEL}"
        """
q = torch.randn(1, 2, 5, 16)
rg.attend(q, q, q, rg.Quadratic(), mask=rg.causal & rg.padding([5]))
rg.weights(q, q, rg.Softmax())
state = rg.Elu().start(batch=1, num_kv_heads=2, qk_length=16, value_length=16)
rg.Elu().extend(q, q, q, state, mask=rg.causal)
print(rg.explain(q, q, q), rg.cost(rg.Softmax(), rg.Work(query_length=8, key_length=8)), rg.causal.draw(3))
print(model.summary(8))
with rg.trace(model) as trace:
    model(torch.tensor([[1, 2, 3]]))
answer = rg.generate(model, [[1, 2, 3]], max_new_tokens=4)[0].tokens
"""
    )
    assert isinstance(answer, list), answer
    assert len(answer) == 4
    assert not modules & set(EXTRAS) - {"jinja2"}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("rg.check(rg.Softmax())", 'a check of laws needs hypothesis: pip install "regard[check]"'),
        ("rg.causal.draw(3).plot()", 'a picture needs matplotlib: pip install "regard[plots]"'),
        ("rg.prefill(model, [[1]]).save('never')", 'saving a prompt needs safetensors: pip install "regard[models]"'),
        (
            f"rg.load({str(ROOT / 'src/regard/shipped/translator')!r})",
            'a tokenizer needs tokenizers: pip install "regard[models]"',
        ),
        ("rg.load('smollm2')", 'a GGUF file needs numpy: pip install "regard[models]"'),
        ("from regard.training import train", 'training needs numpy: pip install "regard[train]"'),
    ],
)
def test_what_needs_an_extra_says_which(without, call, sentence):
    answer, _ = without(MODEL + CALLED.format(call=call))
    assert answer == sentence


@pytest.mark.parametrize(
    ("present", "words", "sentence"),
    [
        ((), ["--help"], 'this command needs typer: pip install "regard[cli]"'),
        (("typer", "rich"), ["check", "softmax"], 'a check of laws needs hypothesis: pip install "regard[check]"'),
        (("typer", "rich"), ["train", "translate"], 'training needs numpy: pip install "regard[train]"'),
        (
            ("typer", "rich"),
            ["cost", "--length", "64", "--plot", "never.png"],
            'a picture needs matplotlib: pip install "regard[plots]"',
        ),
        (
            ("typer", "rich", "matplotlib", "PIL", "numpy"),
            ["lab", "report"],
            'the lab\'s report needs markdown_it: pip install "regard[lab]"',
        ),
    ],
)
def test_a_command_that_needs_an_extra_says_which_in_one_line(without, present, words, sentence):
    answer, _ = without(COMMAND.format(present=set(present), words=words))
    assert answer == [2, f"regard: error: {sentence}\n"]


def test_a_command_whose_packages_are_there_runs(without):
    words = ["cost", "--length", "64", "--json"]
    answer, _ = without(COMMAND.format(present={"typer", "rich"}, words=words))
    assert answer == [0, ""]


def test_explain_says_what_machine_code_lacks(without):
    answer, _ = without(
        "import regard as rg, torch\nq = torch.randn(1, 2, 1, 64)\nanswer = str(rg.explain(q, q, q, rg.Softmax()))"
    )
    assert 'needs llvmlite, which is not installed: pip install "regard[fast]"' in answer


def extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


DISTRIBUTIONS = {"PIL": "pillow", "markdown_it": "markdown-it-py"}


def test_every_extra_that_an_error_names_installs_the_package():
    for package, extra in EXTRAS.items():
        named = {re.split(r"[^\w-]", requirement)[0] for requirement in extras()[extra]}
        assert DISTRIBUTIONS.get(package, package) in named, (package, extra)


def test_every_package_of_an_extra_has_its_error():
    """But those of our own development."""
    ours = {name: requirements for name, requirements in extras().items() if name not in ("test", "dev")}
    named = {re.split(r"[^\w-]", requirement)[0] for requirements in ours.values() for requirement in requirements}
    assert named - {"regard"} == {DISTRIBUTIONS.get(package, package) for package in EXTRAS}


def test_the_core_has_three_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"\W", requirement)[0] for requirement in project["dependencies"]] == [
        "torch",
        "einops",
        "jaxtyping",
    ]
