"""Compiled programs are kept on disk: taken again if whole, compiled again if not, and never a reason to fail."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from regard.core import cpu

if (_missing := cpu.missing()) is not None:
    pytest.skip(_missing, allow_module_level=True)

from regard.core.paths import compiler, decode

CODE, NAME = bytes(range(256)) * 40, "a" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "regard" / "code"


def step() -> None:
    """A decode step in which every program is looked for anew, and right."""
    compiler._compiled.cache_clear()
    decode._program.cache_clear()
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 40, 16)
    out = torch.ops.regard.decode(q, k, k, 0.25, None, None, None)
    assert (out - torch.softmax(0.25 * q @ k.mT, -1) @ k).abs().max() < 1e-5


def refuse_to_compile(*_: object) -> None:
    raise AssertionError("compiled")


def test_a_program_is_compiled_once(folder, monkeypatch):
    step()
    (kept,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiler, "optimized", refuse_to_compile)
    step()
    assert list(folder.iterdir()) == [kept]


@pytest.mark.parametrize("other", ["processor", "llvmlite", "program"])
def test_what_an_object_depends_on_names_it(folder, monkeypatch, other):
    step()
    if other == "processor":
        monkeypatch.setattr(compiler, "host", lambda lanes, real=compiler.host: (real(lanes)[0], ("another",)))
    elif other == "llvmlite":
        monkeypatch.setattr(compiler.llvmlite, "__version__", "0")
    else:
        monkeypatch.setattr("regard.core.paths.decode_code.BLOCK", 48)
    step()
    assert len(list(folder.iterdir())) == 2


BROKEN = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a bit": lambda path: path.write_bytes(path.read_bytes()[:200] + b"\xff\xee" + path.read_bytes()[202:]),
    "another's": lambda path: path.write_bytes(compiler._checksum("b" * 64, CODE) + CODE),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_object_that_is_broken_is_compiled_again(folder, how):
    step()
    (kept,) = folder.iterdir()
    good = kept.read_bytes()
    BROKEN[how](kept)
    step()
    assert how == "a folder" or kept.read_bytes() == good


@pytest.mark.parametrize("how", ["a file", "under a file", "relative", "no home", "anyone may write"])
def test_a_folder_that_cannot_be_used_is_no_error(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    base = {"relative": "here", "under a file": str(tmp_path / "file" / "deeper")}.get(how, str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    folder = Path(base) / "regard" / "code"
    (tmp_path / "file").write_text("")
    if how == "a file":
        folder.parent.mkdir(parents=True)
        folder.write_text("")
    if how in ("relative", "no home"):
        monkeypatch.setenv("XDG_CACHE_HOME", "" if how == "no home" else "here")
        monkeypatch.setenv("HOME", "nowhere")
    if how == "anyone may write":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        data = compiler._checksum(NAME, CODE) + CODE
        (folder / NAME).write_bytes(data)
        assert compiler.load(NAME) is None  # somebody else may have written it
    step()
    assert not Path("here").exists()
    assert not folder.is_dir() or len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("linked", [False, True], ids=["plain", "linked"])
@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (0o777, False), (0o775, False), (0o1777, True)], ids=oct)
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_can_replace_is_not_used(folder, tmp_path, monkeypatch, above, mode, used, linked):
    """Whoever may write to a parent can rename what is in it, unless the parent is sticky."""
    if linked:
        (tmp_path / "far").mkdir()
        (tmp_path / "near").symlink_to("far")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "near"))
        folder = tmp_path / "far" / "regard" / "code"
    compiler.store(NAME, CODE)
    assert compiler.load(NAME) == CODE
    parent = folder.parents[above]
    before = parent.stat().st_mode
    parent.chmod(mode)
    try:
        assert compiler.load(NAME) == (CODE if used else None)
        compiler.store("b" * 64, CODE)
        assert (folder / ("b" * 64)).exists() == used
    finally:
        parent.chmod(before)


def test_objects_are_bounded_and_those_in_use_stay(folder, monkeypatch):
    monkeypatch.setattr(compiler, "MOST_OBJECTS", 3)
    names = [letter * 64 for letter in "abcde"]
    for age, name in enumerate(names[:3]):
        compiler.store(name, CODE)
        os.utime(folder / name, (age, age))
    assert compiler.load(names[0]) == CODE
    for name in names[3:]:
        compiler.store(name, CODE)
    assert sorted(path.name for path in folder.iterdir()) == [names[0], *names[3:]]


def _keep(times: int) -> bool:
    """Whether every object that is there is whole, while others write it."""
    for _ in range(times):
        compiler.store(NAME, CODE)
        if compiler.load(NAME) != CODE:
            return False
    return True


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_may_keep_the_same_object_at_once(folder):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map_async(_keep, [50] * 3).get(60) == [True] * 3
    assert [path.name for path in folder.iterdir()] == [NAME]
