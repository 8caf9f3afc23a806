"""Data that is wrong in more than fifty ways: one line that names the file, exit code 2, the folder as it was."""

import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from test_cli import Inside, entry_point

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset={}\\n"\n\n'


def text(name, content):
    """A file; bytes, or text as UTF-8."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def empty(name):
    return lambda folder: (folder / name).mkdir()


def several(*makers):
    return lambda folder: [make(folder) for make in makers]


def po(body, charset="UTF-8"):
    return text("bad.po", HEADER.format(charset) + body)


def mo(count=1, table=28, strings=((3, 44), (3, 47)), data=b"one" + b"un\0", magic=0x950412DE, revision=0):
    spans = b"".join(struct.pack("<2I", *span) for span in strings)
    head = struct.pack("<7I", magic, revision, count, table, table + 8 * count, 0, 0)
    return text("bad.mo", head + spans + data)


def idx(changes):
    """MNIST's files with 8 images of two classes; `changes` replaces some of them."""

    def make(folder):
        (folder / "bad").mkdir()
        for name in IDX:
            images = "images" in name
            sizes = struct.pack(">3I", 8, 4, 4) if images else struct.pack(">I", 8)
            body = bytes(range(128)) if images else bytes([0, 1] * 4)
            whole = bytes([0, 0, 8, 3 if images else 1]) + sizes + body
            changed = changes.get(name, whole)
            target = name
            if callable(changed):
                changed, target = changed(whole), f"{name}.gz"
            if changed is not None:
                (folder / "bad" / target).write_bytes(changed)

    return make


def idx_images(count, side=4, body=None):
    data = bytes(count * side * side) if body is None else body
    return bytes([0, 0, 8, 3]) + struct.pack(">3I", count, side, side) + data


def idx_labels(*labels):
    return bytes([0, 0, 8, 1]) + struct.pack(">I", len(labels)) + bytes(labels)


def cifar(last):
    def make(folder):
        (folder / "bad").mkdir()
        record = bytes([1]) + bytes(3072)
        for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
            (folder / "bad" / f"{name}.bin").write_bytes(bytes(3073) + record)
        (folder / "bad/data_batch_5.bin").write_bytes(last)

    return make


def pictures(*files):
    """A folder of a folder for each class: names, and sizes or bytes."""

    def make(folder):
        for name, content in files:
            path = folder / "bad" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                Image.new("L", content, 7).save(path)

    return make


def png(folder):
    """A picture of 30,000 × 30,000 pixels in a few bytes."""
    pictures(("a/1.png", (4, 4)), ("a/2.png", (4, 4)), ("b/1.png", (4, 4)), ("b/2.png", (4, 4)))(folder)
    path = folder / "bad/b/2.png"
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">2I", 30_000, 30_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)


TWO = (("a/1.png", (4, 4)), ("a/2.png", (4, 4)), ("b/1.png", (4, 4)))
CASES = {
    # recipe, how the file is made, --data, what the error has besides --data
    "pairs: no file": ("translate", text("other.tsv", ""), "bad.tsv", "no such file"),
    "pairs: an empty file": ("translate", text("bad.tsv", ""), "bad.tsv", "empty"),
    "pairs: an empty line": ("translate", text("bad.tsv", "\n"), "bad.tsv", "line 1: expected 2 columns"),
    "pairs: no tab": ("translate", text("bad.tsv", "un\tone\ndeux two\n"), "bad.tsv", "line 2: expected 2 columns"),
    "pairs: two tabs": ("translate", text("bad.tsv", "un\tone\tuno\n"), "bad.tsv", "line 1: expected 2 columns, got 3"),
    "pairs: no target": ("translate", text("bad.tsv", "un\tone\ndeux\t \n"), "bad.tsv", "line 2: expected a source"),
    "pairs: no source": ("translate", text("bad.tsv", " \tone\n"), "bad.tsv", "an empty source"),
    "pairs: not UTF-8": ("translate", text("bad.tsv", b"un\tone\nd\xffux\ttwo\n"), "bad.tsv", "line 2: expected UTF-8"),
    "pairs: UTF-16": ("translate", text("bad.tsv", "un\tone\n".encode("utf-16")), "bad.tsv", "expected UTF-8"),
    "pairs: another suffix": ("translate", text("bad.csv", "un,one\n"), "bad.csv", "expected a .tsv"),
    "pairs: a folder of nothing": ("translate", empty("bad"), "bad", "expected a folder with .tsv"),
    "pairs: a folder with a bad file": (
        "translate",
        several(empty("bad"), text("bad/a.tsv", "un\tone\n"), text("bad/b.tsv", "deux\n")),
        "bad",
        "b.tsv, line 1",
    ),
    "po: not a catalogue": ("translate", text("bad.po", "hello\n"), "bad.po", "line 1: expected msgid"),
    "po: no translation": ("translate", po('msgid "one"\n'), "bad.po", "expected a msgstr for the last msgid"),
    "po: another charset": ("translate", po('msgid "one"\nmsgstr "un"\n', "KOI8-R"), "bad.po", "got b'KOI8-R'"),
    "po: nothing translated": ("translate", po('msgid "one"\nmsgstr ""\n'), "bad.po", "expected at least one pair"),
    "po: a string that does not end": ("translate", po('msgid "one\n'), "bad.po", "expected msgid"),
    "mo: another magic": ("translate", mo(magic=7), "bad.mo", "expected a .mo catalogue"),
    "mo: a short file": ("translate", text("bad.mo", b"\xde\x12\x04\x95"), "bad.mo", "expected a .mo catalogue"),
    "mo: a table beyond": ("translate", mo(table=9999), "bad.mo", "expected tables of 1 messages"),
    "mo: a string beyond": ("translate", mo(strings=((3, 44), (999, 47))), "bad.mo", "expected strings within"),
    "mo: another revision": ("translate", mo(revision=9 << 16), "bad.mo", "expected revision 0 or 1"),
    "mo: not UTF-8": ("translate", mo(data=b"one\xff\xff\xff"), "bad.mo", "expected UTF-8"),
    "text: no file": ("lm", text("other.txt", ""), "bad.txt", "expected a folder or a file of text"),
    "text: an empty file": ("lm", text("bad.txt", ""), "bad.txt", "got an empty file"),
    "text: one line": ("lm", text("bad.txt", "one line\n"), "bad.txt", "expected at least 2 lines"),
    "text: not UTF-8": ("lm", text("bad.txt", b"a line\n" * 50 + b"\xff\n"), "bad.txt", "line 51: expected UTF-8"),
    "text: a pipe": ("lm", lambda folder: os.mkfifo(folder / "bad.txt"), "bad.txt", "expected a folder or a file"),
    "text: a folder of nothing": ("lm", empty("bad"), "bad", "expected files that end in .txt"),
    "text: other suffixes": ("lm", several(empty("bad"), text("bad/a.doc", "x")), "bad", "expected files that end in"),
    "text: empty files": ("lm", several(empty("bad"), text("bad/a.txt", "")), "bad", "that end in"),
    "text: a bad file in a folder": (
        "lm",
        several(empty("bad"), *(text(f"bad/{n}.txt", b"\xfe" if n == 3 else b"some words\n") for n in range(9))),
        "bad",
        "3.txt, line 1: expected UTF-8",
    ),
    "prose: no file": ("bert", text("other.txt", ""), "bad.txt", "expected"),
    "prose: an empty file": ("bert", text("bad.txt", ""), "bad.txt", "got an empty file"),
    "prose: blank lines": ("bert", text("bad.txt", "\n\n \n"), "bad.txt", "expected"),
    "prose: not UTF-8": ("bert", text("bad.txt", b"One. Two.\n\xff\n"), "bad.txt", "line 2: expected UTF-8"),
    "prose: one document": ("bert", text("bad.txt", "One. Two.\n"), "bad.txt", "expected at least 2 documents"),
    "prose: single sentences": ("bert", text("bad.txt", "One.\n\n" * 30), "bad.txt", "of several sentences"),
    "prose: a folder of nothing": ("bert", empty("bad"), "bad", "expected"),
    "labels: no file": ("classify", text("other.tsv", ""), "bad.tsv", "which is not a file"),
    "labels: an empty file": ("classify", text("bad.tsv", ""), "bad.tsv", "got an empty file"),
    "labels: one column": ("classify", text("bad.tsv", "a\tx\nb\n"), "bad.tsv", "line 2: expected 2 columns"),
    "labels: three columns": ("classify", text("bad.tsv", "a\tx\ty\n"), "bad.tsv", "line 1: expected 2 columns"),
    "labels: no label": ("classify", text("bad.tsv", "a\tx\n\ty\n"), "bad.tsv", "line 2: expected a label"),
    "labels: no text": ("classify", text("bad.tsv", "a\tx\nb\t\n"), "bad.tsv", "line 2: expected a text"),
    "labels: one class": ("classify", text("bad.tsv", "a\tx\na\ty\n"), "bad.tsv", "expected at least 2 classes"),
    "labels: not UTF-8": ("classify", text("bad.tsv", b"a\tx\nb\t\xff\n"), "bad.tsv", "line 2: expected UTF-8"),
    "labels: a folder": ("classify", empty("bad"), "bad", "which is not a file"),
    "images: nothing": ("vision", text("other", ""), "bad", "expected a folder of images, got nothing"),
    "images: a file": ("vision", text("bad", "x"), "bad", "expected a folder of images, got a file"),
    "images: an empty folder": ("vision", empty("bad"), "bad", "expected IDX files"),
    "idx: no labels": ("vision", idx({IDX[1]: None}), "bad", f"{IDX[1]}: expected this file"),
    "idx: another magic": ("vision", idx({IDX[0]: b"PK\3\4" + bytes(20)}), "bad", f"{IDX[0]}: expected IDX's"),
    "idx: a short header": ("vision", idx({IDX[0]: bytes([0, 0, 8, 3, 0])}), "bad", f"{IDX[0]}: expected a header"),
    "idx: a short body": ("vision", idx({IDX[0]: idx_images(8, body=b"x")}), "bad", f"{IDX[0]}: expected 128 bytes"),
    "idx: a long body": ("vision", idx({IDX[0]: idx_images(8, body=bytes(999))}), "bad", "got more"),
    "idx: no images": ("vision", idx({IDX[0]: idx_images(0)}), "bad", f"{IDX[0]}: expected at least one image"),
    "idx: a bomb": ("vision", idx({IDX[0]: idx_images(2**31, 2**15, b"")}), "bad", f"{IDX[0]}: expected"),
    "idx: fewer labels": ("vision", idx({IDX[1]: idx_labels(0, 1)}), "bad", f"{IDX[1]}: expected 8 labels"),
    "idx: one class": (
        "vision",
        idx({IDX[1]: idx_labels(*[1] * 8)}),
        "bad",
        f"{IDX[1]}: expected labels of at least 2",
    ),
    "idx: an unknown class": ("vision", idx({IDX[3]: idx_labels(*[5] * 8)}), "bad", f"{IDX[3]}, record 1: expected"),
    "idx: other sizes": ("vision", idx({IDX[2]: idx_images(8, 5)}), "bad", f"{IDX[2]}: expected images of 4×4"),
    "idx: half a gzip": ("vision", idx({IDX[0]: lambda data: gzip.compress(data)[:-9]}), "bad", "a whole gzip file"),
    "idx: no gzip": ("vision", idx({IDX[0]: lambda data: data}), "bad", f"{IDX[0]}.gz: expected a whole gzip file"),
    "cifar: half a record": ("vision", cifar(bytes(3072)), "bad", "data_batch_5.bin: expected records of 3073"),
    "cifar: an unknown class": ("vision", cifar(bytes([10]) + bytes(3072)), "bad", "data_batch_5.bin, record 1"),
    "cifar: pickles": ("vision", several(empty("bad"), text("bad/data_batch_1", "x")), "bad", "got Python's pickles"),
    "pictures: one class": ("vision", pictures(("a/1.png", (4, 4))), "bad", "each of at least 2 classes"),
    "pictures: a class of none": ("vision", pictures(*TWO, ("c/x.txt", b"x")), "bad", "c: expected PNG or JPEG files"),
    "pictures: not a picture": ("vision", pictures(*TWO, ("b/2.jpg", b"x")), "bad", "2.jpg: expected a PNG or JPEG"),
    "pictures: half a picture": (
        "vision",
        pictures(*TWO, ("b/2.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")),
        "bad",
        "2.png: expected a PNG or JPEG",
    ),
    "pictures: other sizes": ("vision", pictures(*TWO, ("b/2.png", (5, 4))), "bad", "2.png: expected 4×4"),
    "pictures: a bomb": ("vision", png, "bad", "2.png: expected a picture of a sensible size"),
    "pictures: an unknown class": (
        "vision",
        pictures(*((f"train/{name}", size) for name, size in TWO), ("test/c/1.png", (4, 4))),
        "bad",
        "c: expected a class of the training images",
    ),
}


def test_there_are_fifty():
    assert len(CASES) >= 50
    assert {recipe for recipe, *_ in CASES.values()} == {"translate", "lm", "bert", "classify", "vision"}


@pytest.fixture
def regard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


@pytest.mark.parametrize("case", CASES)
def test_bad_data_is_one_line_and_leaves_the_folder_as_it_was(case, regard, tmp_path):
    recipe, make, data, message = CASES[case]
    make(tmp_path)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    done = regard("train", recipe, "--data", data, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("regard: error: ")
    assert data in done.stderr, "the file is named"
    assert message in done.stderr
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_damaged_tokens_of_a_run_are_named(regard, tmp_path):
    """What is in the run's own data folder is checked like a user's."""
    (tmp_path / "labels.tsv").write_text("".join(f"{n % 2}\ttext number {n} of some\n" for n in range(80)))
    words = ["--vocabulary-size", "80", "--embedding-dim", "16", "--num-heads", "2", "--steps", "1", "--device", "cpu"]
    done = regard("train", "classify", "--data", "labels.tsv", *words, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = Path(tmp_path / "run/data/train.npz")
    good = path.read_bytes()
    for bad in (b"", good[:50], good[:-50], np.random.default_rng(0).bytes(len(good))):
        path.write_bytes(bad)
        done = regard("train", "resume", "run", "--steps", "2", cwd=tmp_path)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "run/data/train.npz: expected" in done.stderr
