"""Checkpoints of a run: bitwise what was saved; damaged or incomplete ones are skipped."""

import json
import os
import pickle
import random
import resource
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import damaged
from processes import finished
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import DTYPES
from regard.training import store
from regard.training.checkpoint_folders import sealed


def examples():
    """Every type, and every shape that is easily forgotten."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(6, 5, generator=generator)
    shared = torch.randn(4, 4, generator=generator)
    return {
        **{f"of type {kind}": (numbers * 3).to(dtype) for kind, dtype in DTYPES.items()},
        "one number": torch.tensor(-0.0),
        "one whole number": torch.tensor(2**62 + 1),
        "none": torch.zeros(0),
        "none of many": torch.zeros(3, 0, 2, dtype=torch.bfloat16),
        "not finite": torch.tensor([float("nan"), float("inf"), -float("inf"), 5e-324], dtype=torch.float64),
        "bytes": torch.arange(256, dtype=torch.uint8)[1:],
        "turned": shared.t(),
        "every second": shared[:, ::2],
        "tied": shared,
        "tied again": shared,
        "parameter": nn.Parameter(torch.ones(3)),
        'a "name" / of [0:1], äöü\n': torch.ones(1),
    }


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(first, second):
    return (first.shape, first.dtype) == (second.shape, second.dtype) and torch.equal(bits(first), bits(second))


def empty(tensors):
    return {name: torch.full(tensor.shape, 7).to(tensor.dtype) for name, tensor in tensors.items()}


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def save(folder, *steps, keep=2, value=1.0):
    for step in steps:
        path = store.save(folder, step, {"weight": torch.full((3, 3), value)}, {"step": step}, keep=keep)
    return path


def test_what_is_saved_is_loaded_bitwise(tmp_path):
    tensors, note = examples(), {"step": 5, "best": float("-inf"), "words": "äöü", "none": None, "list": [1, 2.5]}
    path = store.save(tmp_path / "run" / "checkpoints", 5, tensors, note, keep=1)
    loaded = empty(tensors)
    assert store.load(path, loaded) == note
    assert store.read_note(path) == note
    assert [name for name in tensors if not same(tensors[name], loaded[name])] == []


def test_loading_fills_in_place_what_is_asked_for_and_no_more(tmp_path):
    path = store.save(tmp_path, 1, {"a": torch.ones(4), "b": torch.ones(2)}, {}, keep=1)
    weight = nn.Parameter(torch.zeros(2, 4))
    store.load(path, {"a": weight.data[1]})
    assert weight.tolist() == [[0] * 4, [1] * 4]
    shutil.rmtree(path)
    assert weight.sum() == 4, "what is loaded does not depend on its file"


def test_files_are_safetensors_and_json_and_no_pickle(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pickle")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    tensors = examples()
    path = store.save(tmp_path, 5, tensors, {}, keep=1)
    assert store.newest(tmp_path) == (path, [])
    store.load(path, empty(tensors))
    assert names(path) == ["manifest.json", "part-00000-of-00001.safetensors"]
    assert load_file(path / "part-00000-of-00001.safetensors").keys() == tensors.keys()
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["tensors"].keys() == tensors.keys()


def test_saving_holds_no_second_copy(tmp_path):
    # In a process of its own, whose highest use of memory is known.
    script = f"""
import resource, torch
from pathlib import Path
from regard.training import store
tensors = {{f"weight.{{n}}": torch.ones(2**20) for n in range(16)}}
store.save(Path({str(tmp_path)!r}), 0, {{"small": torch.ones(3)}}, {{}}, keep=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.save(Path({str(tmp_path)!r}), 1, tensors, {{}}, keep=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    extra = finished("-c", script).stdout
    assert int(extra) < 16 * 1024, f"{extra} KiB more for 65,536 KiB of tensors"


def test_the_newest_stay(tmp_path):
    save(tmp_path, 5, 10, 15, 20, keep=3)
    assert names(tmp_path) == ["step-00000010", "step-00000015", "step-00000020"]
    assert store.newest(tmp_path) == (tmp_path / "step-00000020", [])
    save(tmp_path, 25, keep=1)
    assert names(tmp_path) == ["step-00000025"]


def test_what_does_not_look_whole_is_not_counted_among_those_that_stay(tmp_path):
    save(tmp_path, 5, 10, 15, keep=3)
    (tmp_path / "step-00000010" / "manifest.json").write_text("")
    save(tmp_path, 20, keep=3)
    assert names(tmp_path) == ["step-00000005", "step-00000015", "step-00000020"]


def test_a_run_that_goes_back_keeps_what_it_saves(tmp_path):
    save(tmp_path, 5, 10)
    next(damaged.flips(tmp_path / "step-00000010", 1, random.Random(0)))
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-00000006", "step-00000010"]
    assert store.newest(tmp_path)[0] == tmp_path / "step-00000006"
    save(tmp_path, 10, keep=1)
    assert names(tmp_path) == ["step-00000010"]
    assert store.newest(tmp_path) == (tmp_path / "step-00000010", [])


def test_steps_are_ordered_as_numbers(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000, keep=5)
    assert store.newest(tmp_path)[0].name == "step-100000000"


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, value=1.0)
    path = save(tmp_path, 5, value=2.0)
    weight = torch.zeros(3, 3)
    store.load(path, {"weight": weight})
    assert weight.sum() == 18
    assert names(tmp_path) == ["step-00000005"]


def test_a_kill_while_a_step_is_replaced_loses_nothing(tmp_path):
    path = save(tmp_path, 5)
    displaced = path.rename(tmp_path / ".step-00000005-old")
    assert store.newest(tmp_path) == (displaced, [])
    assert store.load(displaced, {"weight": torch.zeros(3, 3)}) == {"step": 5}
    save(tmp_path, 10)
    assert names(tmp_path) == ["step-00000005", "step-00000010"]
    shutil.copytree(tmp_path / "step-00000005", displaced)
    assert store.newest(tmp_path)[0].name == "step-00000010"
    save(tmp_path, 15, keep=3)
    assert names(tmp_path) == ["step-00000005", "step-00000010", "step-00000015"]


def test_what_killed_saves_left_is_named_and_then_removed(tmp_path):
    save(tmp_path, 5)
    left = [tmp_path / ".step-00000010-0123abcd", tmp_path / ".step-00000003-0123abcd"]
    for folder in left:
        folder.mkdir()
        (folder / "part-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("somebody's")
    newest, skipped = store.newest(tmp_path)
    assert newest.name == "step-00000005"
    assert len(skipped) == 1
    assert str(left[0]) in skipped[0]
    save(tmp_path, 15)
    assert names(tmp_path) == ["notes.txt", "step-00000005", "step-00000015"]


def test_there_may_be_nothing(tmp_path):
    assert store.newest(tmp_path) == (None, [])
    assert store.newest(tmp_path / "nowhere") == (None, [])
    (tmp_path / ".step-00000005-0123abcd").mkdir()
    newest, skipped = store.newest(tmp_path)
    assert newest is None, "the first save was killed: there is nothing to lose"
    assert len(skipped) == 1
    (tmp_path / "step-00000005").write_text("a file")
    with pytest.raises(CheckpointError, match=r"got none: .*step-00000005: expected a checkpoint's folder, got a file"):
        store.newest(tmp_path)
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-00000005"]


def test_files_of_others_are_ignored(tmp_path):
    path = save(tmp_path, 5, 10)
    for folder in (tmp_path, path):
        (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tmp_path / "step-10").mkdir()
    assert store.newest(tmp_path) == (path, [])
    assert store.load(path, {"weight": torch.zeros(3, 3)}) == {"step": 10}
    save(tmp_path, 15, 20)
    assert names(tmp_path) == [".DS_Store", "step-00000015", "step-00000020", "step-10"]


def test_if_none_is_good_each_is_named_with_its_reason(tmp_path):
    save(tmp_path, 5, 10)
    (tmp_path / "step-00000005" / "manifest.json").write_text("")
    resealed(lambda manifest: {**manifest, "version": 2})(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError) as error:
        store.newest(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: expected a checkpoint that can be loaded, got none: {tmp_path}/step-00000010/manifest.json: "
        f"expected version 1, got 2; {tmp_path}/step-00000005/manifest.json: expected a checkpoint's manifest, got an "
        "empty file"
    )
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


@pytest.mark.parametrize("kind", ["flips", "truncations"])
def test_damage_is_noticed(kind, tmp_path):
    path = damaged.make_two(tmp_path)
    outcomes = list(getattr(damaged, kind)(path, {"flips": 100, "truncations": 30}[kind], random.Random(1)))
    assert len(outcomes) >= 60
    assert [where for where, seen in outcomes if not seen] == []
    assert store.newest(tmp_path) == (path, []), "undamaged, it is chosen"


def missing(path):
    next(path.glob("part-*")).unlink()


def folder_instead(path):
    part = next(path.glob("part-*"))
    part.unlink()
    part.mkdir()


def pipe_instead(path):
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def resealed(change):
    def damage(path):
        text = (path / "manifest.json").read_text()
        changed = change(json.loads(text))
        changed.pop("sha256")
        (path / "manifest.json").write_bytes(sealed(json.dumps(changed)[1:]))

    return damage


DAMAGES = {
    "a missing part": (missing, "part-00000-of-00001.safetensors: expected a part of the checkpoint, got no such file"),
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "manifest.json: expected a checkpoint's manifest, got no such",
    ),
    "an empty manifest": (
        lambda path: (path / "manifest.json").write_text(""),
        "manifest.json: expected a checkpoint's manifest",
    ),
    "an empty folder": (
        lambda path: [file.unlink() for file in path.iterdir()],
        "manifest.json: expected a checkpoint's manifest",
    ),
    "a folder": (folder_instead, "part-00000-of-00001.safetensors: expected a part of the checkpoint, got a folder"),
    "a pipe": (
        pipe_instead,
        "manifest.json: expected a checkpoint's manifest, got something that is not a regular file",
    ),
    "another version": (
        resealed(lambda manifest: {**manifest, "version": 2}),
        "manifest.json: expected version 1, got 2",
    ),
    "no files": (
        resealed(lambda manifest: {**manifest, "files": []}),
        "manifest.json: expected files, tensors and a note",
    ),
    "files of no size": (resealed(lambda manifest: {**manifest, "files": {"a": {}}}), "a: expected a part"),
    "files elsewhere": (
        resealed(lambda manifest: {**manifest, "files": {"../step-00000005/manifest.json": {"bytes": 1}}}),
        "manifest.json: expected 1 bytes",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_whole_is_skipped_with_a_reason(name, tmp_path):
    damage, message = DAMAGES[name]
    path = damaged.make_two(tmp_path)
    damage(path)
    newest, skipped = store.newest(tmp_path)
    assert newest == tmp_path / "step-00000005"
    assert len(skipped) == 1
    assert message in skipped[0]
    with pytest.raises(CheckpointError) as error:
        store.load(path, {})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F99"}, "expected every tensor's type, shape and place"),
        ({"chunks": [{"file": "../x", "name": "w", "offsets": [0, 0], "sizes": [7, 5]}]}, "in the checkpoint's files"),
        ({"chunks": 3}, "expected every tensor's type, shape and place"),
        (
            {"chunks": [{"file": "part-00000-of-00001.safetensors", "name": "w", "offsets": [0, 0], "sizes": [7, 5]}]},
            "expected a tensor of the file, got 'w'",
        ),
        (
            {
                "chunks": [
                    {"file": "part-00000-of-00001.safetensors", "name": "step", "offsets": [0, 0], "sizes": [7, 5]}
                ]
            },
            "expected tensors that can be read",
        ),
    ],
)
def test_a_manifest_that_lies_is_refused(change, message, tmp_path):
    path = damaged.make_two(tmp_path)
    resealed(lambda manifest: {**manifest, "tensors": {"weight": {**manifest["tensors"]["weight"], **change}}})(path)
    with pytest.raises(CheckpointError, match=message.replace("'", ".")):
        store.load(path, {"weight": torch.zeros(7, 5)})


def test_tensors_of_another_run_are_listed(tmp_path):
    path = store.save(tmp_path, 5, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, {}, keep=1)
    wanted = {"a": torch.zeros(3), "b": torch.zeros(3).double(), "c": torch.zeros(1), "d": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        store.load(path, wanted)
    assert str(error.value) == (
        f"{path}: expected the tensors of this run, got 'a' of float32 (2,) instead of float32 (3,); "
        "'b' of float32 (3,) instead of float64 (3,); no 'd'"
    )
    assert wanted["c"].sum() == 0, "nothing is half-loaded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step: expected a whole number of at least 0, got -1"),
        ({"step": 1.5}, "step: expected a whole number of at least 0, got 1.5"),
        ({"keep": 0}, "keep: expected a whole number of at least 1, got 0"),
        ({"note": {"a": torch.ones(1)}}, "note: expected what JSON can hold"),
        ({"tensors": {"a": [1, 2]}}, "got no tensor as 'a'"),
        ({"tensors": {"a": torch.zeros(2, dtype=torch.complex64)}}, "got torch.complex64 as 'a'"),
    ],
)
def test_what_cannot_be_saved_is_refused(change, message, tmp_path):
    save(tmp_path, 5)
    with pytest.raises(ValueError, match=message):
        store.save(tmp_path, **{"step": 10, "tensors": {}, "note": {}, "keep": 1, **change})
    assert names(tmp_path) == ["step-00000005"]


@contextmanager
def files_of_at_most(size):
    """A disk that is full: what a file may hold is bounded, and writing more fails as on a full one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_error_and_leaves_what_was_there(tmp_path):
    tensors = {f"weight.{n}": torch.ones(2000) for n in range(4)}
    path = store.save(tmp_path, 5, tensors, {"step": 5}, keep=1)
    whole = max(file.stat().st_size for file in path.iterdir())
    for size in (*range(0, whole, 1500), whole - 1):
        for step in (5, 10):  # replaced, or new
            message = f"checkpoint of step {step}: File too large"
            with pytest.raises(OSError, match=message) as error, files_of_at_most(size):
                store.save(tmp_path, step, tensors, {}, keep=1)
            assert error.value.filename == str(tmp_path)
            assert names(tmp_path) == ["step-00000005"]
    assert store.newest(tmp_path) == (path, [])
    assert store.load(path, empty(tensors)) == {"step": 5}


def test_a_failure_at_any_call_leaves_what_was_there(tmp_path, monkeypatch):
    """Of all that is asked of the system, the n-th call fails, for every n: as if the disk broke there."""
    calls = failures = 0
    real = {name: getattr(os, name) for name in ("rename", "fsync", "mkdir")}

    def failing(name, last):
        def run(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == last:
                raise OSError(5, "Input/output error")
            return real[name](*args, **kwargs)

        return run

    for last in range(1, 30):
        folder, calls = tmp_path / str(last), 0
        save(folder, 3, 5, value=1.0)
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, failing(name, last))
            try:
                save(folder, 5, value=2.0, keep=1)
            except OSError as error:
                failures += 1
                assert str(folder) in str(error)  # noqa: PT017
        if calls < last:
            break
        assert names(folder) in (["step-00000003", "step-00000005"], ["step-00000005"])
        assert store.newest(folder) == (folder / "step-00000005", [])
        save(folder, 10)
    assert failures >= 8
