"""The pages that people read: their code runs as it stands, and the API pages list every public name."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import regard as rg
import regard.lab
import regard.training
from blocks import python_blocks

ROOT = Path(__file__).parent.parent
PAGES = sorted(page for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")) if python_blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_as_it_stands(page, tmp_path, monkeypatch):
    """All blocks in order, as one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    program = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", program)  # where classes that a block defines say they are from
    for block in python_blocks(page):
        exec(compile(block, page, "exec"), vars(program))


def test_the_readme_the_home_page_and_every_tutorial_have_code():
    assert {ROOT / "README.md", ROOT / "docs/index.md", *(ROOT / "docs/tutorials").iterdir()} <= set(PAGES)


def test_a_block_that_fails_is_caught_at_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\nWords.\n\n```python\nassert x == 2\n```\n")
    first, second = python_blocks(page)
    scope = {}
    exec(compile(first, page, "exec"), scope)
    with pytest.raises(AssertionError) as failure:
        exec(compile(second, page, "exec"), scope)
    assert failure.traceback[-1].lineno + 1 == 10


def test_the_api_pages_list_every_public_name_once():
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
    listed = re.findall(r"^::: regard\.(.+)$", pages, re.MULTILINE)
    rooms = {"training": regard.training.__all__, "lab": regard.lab.__all__}
    public = [*rg.__all__, *(f"{room}.{name}" for room, names in rooms.items() for name in names)]
    assert sorted(listed) == sorted(name for name in public if name not in rooms)


@pytest.fixture(scope="module")
def description():
    spec = importlib.util.spec_from_file_location("regard_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup.description


PAGE = "# T\n\n![two lines](docs/a.png)\n\nSee [the design](DESIGN.md), [us](https://x.org/y), [below](#below).\n"


def test_an_index_gets_no_address_that_only_a_checkout_has(description):
    assert description(PAGE, None) == "# T\n\nSee the design, [us](https://x.org/y), [below](#below).\n"


def test_an_index_gets_absolute_addresses_where_the_source_is_known(description):
    page = description(PAGE, "https://x.org/r")
    assert "![two lines](https://x.org/r/raw/main/docs/a.png)\n\n" in page
    assert "[the design](https://x.org/r/blob/main/DESIGN.md), [us](https://x.org/y), [below](#below)" in page


def test_the_readme_of_an_index_has_no_relative_address(description):
    shown = description((ROOT / "README.md").read_text(), None)
    assert re.findall(r"]\((?!https?:|#)", shown) == []
