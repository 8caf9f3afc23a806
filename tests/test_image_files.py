"""Labelled images from files: IDX, CIFAR-10 and folders of pictures, read as they are or refused by name."""

import hashlib
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_files import idx, random_bytes, write_idx, write_pictures
from regard.training.data.held_out import chance, split
from regard.training.data.images import CIFAR10, CIFAR_TRAIN, FASHION, IDX, read_images, read_test


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_come_as_they_are(tmp_path, zipped):
    images = read_images(write_idx(tmp_path, zipped=zipped))
    # Those to validate with are chosen by a hash of their numbers, some of each class.
    kept = sorted(set.union(*(set(split(range(label, 12, 3), str, test=False)[1]) for label in range(3))))
    pictures = torch.from_numpy(random_bytes(12, 8, 8))[:, None]
    assert images.validation.labels.tolist() == [number % 3 for number in kept]
    assert torch.equal(images.validation.images, pictures[kept])
    assert torch.equal(images.train.images, pictures[[number for number in range(12) if number not in kept]])
    assert images.train.images.dtype == torch.uint8
    assert images.test.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert images.class_names == ("0", "1", "2")
    assert not images.mirrored
    assert images.name == tmp_path.name


def test_the_plain_file_is_read_where_both_are(tmp_path):
    write_idx(tmp_path)
    (tmp_path / f"{IDX[0]}.gz").write_bytes(b"nothing")
    assert len(read_images(tmp_path).train.labels) == 8


IDX_FAULTS = {
    "magic": (0, lambda _: b"\x00\x00\x09\x03" + bytes(12), "expected IDX's 00 00 08 03 at its start, got 00 00 09 03"),
    "labels for images": (0, lambda _: idx(np.zeros(12, np.uint8)), "at its start, got 00 00 08 01"),
    "empty file": (1, lambda _: b"", "at its start, got $"),
    "half a header": (0, lambda data: data[:9], "expected a header of 16 bytes, got 9"),
    "no images": (0, lambda _: idx(np.zeros((0, 8, 8), np.uint8)), "at least one image and one pixel"),
    "no width": (2, lambda _: idx(np.zeros((6, 8, 0), np.uint8)), "at least one image and one pixel"),
    "cut short": (2, lambda data: data[:-5], r"expected 384 bytes after the header, \(6, 8, 8\), got 379"),
    "too long": (3, lambda data: data + b"\x00", r"expected 6 bytes after the header, \(6,\), got more"),
    "claims the sky": (
        0,
        lambda data: data[:4] + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1) + data[16:],
        "expected 79228162458924105385300197375 bytes after the header, .*, got 768",
    ),
    "too few labels": (1, lambda _: idx(np.arange(11, dtype=np.uint8) % 3), "expected 12 labels, as .* got 11"),
    "one class": (1, lambda _: idx(np.full(12, 4, np.uint8)), "expected labels of at least 2 classes, got only 4"),
    "beyond": (
        3,
        lambda _: idx(np.array([0, 1, 2, 0, 7, 9], np.uint8)),
        "record 5: expected a label from 0 to 2, got 7",
    ),
    "other size": (
        2,
        lambda _: idx(np.zeros((6, 8, 9), np.uint8)),
        "expected images of 8×8, as train-images-idx3-ubyte, got images of 8×9",
    ),
}


@pytest.mark.parametrize("fault", IDX_FAULTS)
def test_bad_idx_files_are_named(tmp_path, fault):
    at, change, message = IDX_FAULTS[fault]
    path = write_idx(tmp_path) / IDX[at]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        read_images(tmp_path)
    assert IDX[at] in str(error.value)


def test_every_cut_of_a_zipped_file_is_named(tmp_path):
    path = write_idx(tmp_path, zipped=True) / f"{IDX[0]}.gz"
    whole = path.read_bytes()
    for length in (0, 1, 10, 30, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=IDX[0]):
            read_images(tmp_path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ValueError, match="expected a whole gzip file"):
        read_images(tmp_path)


def test_a_missing_file_of_a_set_is_named(tmp_path):
    (write_idx(tmp_path) / IDX[3]).unlink()
    with pytest.raises(ValueError, match=f"{IDX[3]}: expected this file next to the others"):
        read_images(tmp_path)


def test_fashion_mnist_is_known_by_its_labels(tmp_path, monkeypatch):
    write_idx(tmp_path, classes=10, train=20, test=10)
    labels = (np.arange(20, dtype=np.uint8) % 10).tobytes()
    monkeypatch.setattr("regard.training.data.images.FASHION_LABELS", hashlib.sha256(labels).hexdigest())
    images = read_images(tmp_path)
    assert (images.name, images.class_names, images.mirrored) == ("Fashion-MNIST", FASHION, True)


def write_cifar(folder: Path) -> Path:
    for at, name in enumerate((*CIFAR_TRAIN, "test_batch")):
        rows = random_bytes(4, 3073, seed=at)
        rows[:, 0] = [at, 1, 2, 3]
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


def test_cifars_binary_files(tmp_path):
    images = read_images(write_cifar(tmp_path), test=write_cifar(tmp_path))
    rows = torch.cat([torch.from_numpy(random_bytes(4, 3073, seed=number)) for number in range(5)])
    everything = torch.cat([images.train.images, images.validation.images])
    assert sorted(map(bytes, everything.flatten(1).numpy())) == sorted(map(bytes, rows[:, 1:].contiguous().numpy()))
    assert torch.equal(images.test.images, torch.from_numpy(random_bytes(4, 3073, seed=5))[:, 1:].view(4, 3, 32, 32))
    assert images.test.labels.tolist() == [5, 1, 2, 3]
    assert (len(images.train.labels), len(images.validation.labels)) == (17, 3)
    assert (images.class_names, images.mirrored) == (CIFAR10, True)


def test_bad_cifar_files_are_named(tmp_path):
    path = write_cifar(tmp_path) / "data_batch_4.bin"
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "expected records of 3073 bytes, got a file of 12291"),
        (b"", "expected records of 3073 bytes, got a file of 0"),
        (whole[:3073] + b"\x0a" + whole[3074:], "record 2: expected a label from 0 to 9, got 10"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"data_batch_4\.bin.*{message}"):
            read_images(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"data_batch_4\.bin: expected this file"):
        read_images(tmp_path)


def test_pickles_are_never_loaded(tmp_path):
    for name in CIFAR_TRAIN:
        (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(ValueError, match=r"data_batch_1: expected CIFAR-10's binary version .* pickles"):
        read_images(tmp_path)


def write_sprites(folder: Path) -> Path:
    for at, name in enumerate((*CIFAR_TRAIN, "test_batch")):
        Image.fromarray(random_bytes(2, 1024, 3, seed=at)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(list(range(10))))
    (folder / "test_lables.json").write_text("[3, 4]")
    return folder


def test_cifar_as_pictures_of_rows(tmp_path):
    write_sprites(tmp_path)
    (tmp_path / "train_lables.json").write_text("[0, 0, 1, 1, 2, 3, 4, 5, 6, 7]")
    images = read_images(tmp_path)
    second = torch.from_numpy(random_bytes(2, 1024, 3, seed=1)).view(2, 32, 32, 3).permute(0, 3, 1, 2)
    assert images.validation.labels.tolist() == [0, 1]
    assert images.train.labels.tolist() == list(range(8))
    assert [bool((images.train.images[1] == picture).all()) for picture in second].count(True) == 1
    assert images.test.labels.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "expected a list of 10 labels, one per image, got 1"),
        ("{}", "expected a list of 10 labels, one per image, got dict"),
        ("[1,", "expected JSON, got"),
        (json.dumps([*range(9), 10]), "record 10: expected a label from 0 to 9, got 10"),
        (json.dumps([*range(9), True]), "record 10: expected a label from 0 to 9, got True"),
        (json.dumps([5] * 10), "expected labels of at least 2 classes, got only 5"),
    ],
)
def test_bad_lists_of_labels_are_named(tmp_path, content, message):
    (write_sprites(tmp_path) / "train_lables.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_images(tmp_path)


def test_pictures_are_held_out_by_their_names_in_every_class_that_has_two(tmp_path):
    (write_pictures(tmp_path, {"cat": 12, "dog": 2, "owl": 1}) / "cat" / "notes.txt").write_text("not a picture")
    images = read_images(tmp_path)
    assert images.class_names == ("cat", "dog", "owl")
    assert images.validation.labels.tolist() == [0, 0, 1]
    assert images.test.labels.tolist() == [0]
    ranked = sorted(range(12), key=lambda number: chance(f"cat/{number:02}.png"))
    assert images.validation.images[:2, 0, 0, 0].tolist() == sorted(ranked[:2])
    assert images.test.images[0, 0, 0, 0] == ranked[2]
    assert images.train.labels.tolist() == [0] * 9 + [1, 2]
    assert images.train.images.shape == (11, 1, 4, 6)


def test_folders_to_validate_and_to_test_with(tmp_path):
    write_pictures(tmp_path / "data", {"cat": 12, "dog": 12})
    write_pictures(tmp_path / "more", {"dog": 3})
    images = read_images(tmp_path / "data", tmp_path / "more", tmp_path / "data")
    assert (len(images.train.labels), images.validation.labels.tolist(), len(images.test.labels)) == (24, [1] * 3, 24)
    images = read_images(tmp_path / "data", test=tmp_path / "more")
    assert (len(images.train.labels), len(images.validation.labels), len(images.test.labels)) == (18, 6, 3)
    for wrong, message in (
        (write_pictures(tmp_path / "a", {"cow": 3}), r"a/cow: expected a class of the training images \(cat, dog\)"),
        (
            write_idx(tmp_path / "b", classes=2),
            r"b: expected images of 4×6 and 1 channels, as those to train on, got 8×8",
        ),
        (write_idx(tmp_path / "c"), r"c, record 3: expected a label from 0 to 1, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            read_images(tmp_path / "data", wrong)
    like = images.train.images.expand(-1, 3, -1, -1)
    assert read_test(tmp_path / "more", images.class_names, like).images.shape == (3, 3, 4, 6)


def test_train_and_test_folders_are_taken_as_they_are(tmp_path):
    write_pictures(tmp_path / "train", {"cat": 3, "dog": 3}, mode="RGB", suffix="jpg")
    write_pictures(tmp_path / "test", {"dog": 2}, mode="L")
    images = read_images(tmp_path)
    assert images.train.images.shape == (4, 3, 4, 6)
    assert images.validation.labels.tolist() == [0, 1]
    assert images.test.labels.tolist() == [1, 1]
    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "wolf")
    with pytest.raises(ValueError, match=r"test/wolf: expected a class of the training images \(cat, dog\)"):
        read_images(tmp_path)


def spoil(path: Path, kind: str) -> None:
    if kind == "other size":
        Image.new("L", (6, 5)).save(path)
    elif kind == "cut":
        Image.fromarray(random_bytes(4, 6)).save(path)
        path.write_bytes(path.read_bytes()[:-30])
    elif kind == "text":
        path.write_text("no picture")
    elif kind == "bomb":
        header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
        chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + path.read_bytes()[33:])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other size", r"expected 4×6, as 00\.png is, got 5×6"),
        ("cut", "expected a PNG or JPEG picture"),
        ("text", "expected a PNG or JPEG picture"),
        ("bomb", "expected a picture of a sensible size"),
    ],
)
def test_bad_pictures_are_named(tmp_path, kind, message):
    write_pictures(tmp_path, {"cat": 3, "dog": 3})
    spoil(tmp_path / "dog" / "01.png", kind)
    with pytest.raises(ValueError, match=rf"dog/01\.png: {message}"):
        read_images(tmp_path)


def test_folders_that_hold_no_set_say_so(tmp_path):
    with pytest.raises(ValueError, match="nowhere: expected a folder of images, got nothing"):
        read_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected IDX files .* got none of them"):
        read_images(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="at least 2 classes, got cat"):
        read_images(tmp_path)
    (tmp_path / "dog").mkdir()
    with pytest.raises(ValueError, match="cat: expected PNG or JPEG files, got none"):
        read_images(tmp_path)
    for name in ("cat", "dog"):
        Image.new("L", (2, 2)).save(tmp_path / name / "one.png")
    with pytest.raises(ValueError, match="expected pictures to hold out"):
        read_images(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a folder of images, got a file"):
        read_images(tmp_path / "file")
