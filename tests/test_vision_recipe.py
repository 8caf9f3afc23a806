"""The vision recipe: which files are read and refused, what glyphs are, what a batch is, that models learn from it."""

import gzip
import hashlib
import json
import struct
import zlib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import regard as rg
from regard.models.vision import local
from regard.training.data import glyphs as glyphs_module
from regard.training.data.draws import draws as drawn
from regard.training.data.glyphs import CHARACTERS, FACES, glyphs
from regard.training.data.held_out import chance
from regard.training.data.images import CIFAR10, CIFAR_TRAIN, FASHION, IDX, Images, Split, pixels, read_images
from regard.training.recipes import vision
from regard.training.recipes.vision import Options, Vision, build, erased, shifted

SMALL = {"patch_size": 7, "embedding_dim": 16, "num_heads": 2, "num_layers": (1,)}


def draws(seed, epoch, indices, count):
    return torch.from_numpy(drawn(seed, epoch, indices, count)).float()


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx(values: np.ndarray, *, axes: int | None = None, sizes: tuple[int, ...] | None = None) -> bytes:
    sizes = sizes or values.shape
    return bytes([0, 0, 8, axes or values.ndim]) + struct.pack(f">{len(sizes)}I", *sizes) + values.tobytes()


def write_idx(
    folder: Path, train: int = 12, test: int = 6, side: int = 8, classes: int = 3, zipped: bool = False
) -> Path:
    folder.mkdir(exist_ok=True)
    contents = (
        random_bytes(train, side, side),
        np.arange(train, dtype=np.uint8) % classes,
        random_bytes(test, side, side, seed=1),
        np.arange(test, dtype=np.uint8) % classes,
    )
    for name, content in zip(IDX, contents, strict=True):
        data = idx(content)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_come_as_they_are(tmp_path, zipped):
    images = read_images(write_idx(tmp_path, zipped=zipped))
    assert torch.equal(images.train.images[:, 0], torch.from_numpy(random_bytes(12, 8, 8)))
    assert images.train.images.shape == (12, 1, 8, 8)
    assert images.train.images.dtype == torch.uint8
    assert images.test.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert images.class_names == ("0", "1", "2")
    assert not images.mirrored
    assert images.name == tmp_path.name


def test_the_plain_file_is_read_where_both_are(tmp_path):
    write_idx(tmp_path)
    (tmp_path / f"{IDX[0]}.gz").write_bytes(b"nothing")
    assert len(read_images(tmp_path).train.labels) == 12


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
    images = read_images(write_cifar(tmp_path))
    third = torch.from_numpy(random_bytes(4, 3073, seed=2))[:, 1:].view(4, 3, 32, 32)
    assert torch.equal(images.train.images[8:12], third)
    assert images.train.labels[8:12].tolist() == [2, 1, 2, 3]
    assert (len(images.train.labels), len(images.test.labels)) == (20, 4)
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
    images = read_images(write_sprites(tmp_path))
    second = torch.from_numpy(random_bytes(2, 1024, 3, seed=1)).view(2, 32, 32, 3).permute(0, 3, 1, 2)
    assert torch.equal(images.train.images[2:4], second)
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


def write_pictures(folder: Path, counts: dict[str, int], mode: str = "L", suffix: str = "png") -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new(mode, (6, 4), label * 40 + number).save(folder / name / f"{number:02}.{suffix}")
    return folder


def test_pictures_are_held_out_by_their_names_in_every_class_that_has_two(tmp_path):
    (write_pictures(tmp_path, {"cat": 12, "dog": 2, "owl": 1}) / "cat" / "notes.txt").write_text("not a picture")
    images = read_images(tmp_path)
    assert images.class_names == ("cat", "dog", "owl")
    assert images.test.labels.tolist() == [0, 1]
    assert images.test.images[0, 0, 0, 0] == min(range(12), key=lambda number: chance(f"cat/{number:02}.png"))
    assert images.train.labels.tolist() == [0] * 11 + [1, 2]
    assert images.train.images.shape == (13, 1, 4, 6)


def test_train_and_test_folders_are_taken_as_they_are(tmp_path):
    write_pictures(tmp_path / "train", {"cat": 3, "dog": 3}, mode="RGB", suffix="jpg")
    write_pictures(tmp_path / "test", {"dog": 2}, mode="L")
    images = read_images(tmp_path)
    assert images.train.images.shape == (6, 3, 4, 6)
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


def test_random_numbers_are_even_and_their_own():
    numbers = draws(seed=3, epoch=1, indices=range(20_000), count=5)
    assert numbers.dtype == torch.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert (numbers.mean(0) - 0.5).abs().max() < 0.01
    assert (torch.histc(numbers, 10) / numbers.numel() - 0.1).abs().max() < 0.005
    assert (torch.corrcoef(numbers.T) - torch.eye(5)).abs().max() < 0.03
    assert (torch.corrcoef(torch.stack([numbers[1:, 0], numbers[:-1, 0]]))[0, 1]).abs() < 0.03
    for other in (draws(4, 1, range(20_000), 5), draws(3, 2, range(20_000), 5), draws(1, 3, range(20_000), 5)):
        assert (numbers == other).float().mean() < 1e-3
    shuffled = torch.randperm(20_000)
    assert torch.equal(draws(3, 1, shuffled.numpy(), 5), numbers[shuffled])


def test_glyphs_depend_on_split_seed_and_index_alone(monkeypatch):
    images, labels = glyphs("train", 40, seed=5)
    monkeypatch.setattr(glyphs_module, "TOGETHER", 7)
    again = glyphs("train", 90, seed=5)
    assert torch.equal(again.images[:40], images)
    assert torch.equal(again.labels[:40], labels)
    for other in (glyphs("test", 40, seed=5), glyphs("train", 40, seed=6)):
        assert all(not torch.equal(image, other_image) for image, other_image in zip(images, other.images, strict=True))
    assert not torch.equal(images[0], again.images[36])


def test_glyphs_are_legible_and_their_typefaces_held_out():
    assert not set(FACES["train"]) & set(FACES["test"])
    images, labels = glyphs("train", 720, size=32)
    assert images.shape == (720, 1, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.bincount().tolist() == [20] * len(CHARACTERS)
    means = pixels(images).view(20, 36, -1).mean(0)
    nearest = torch.cdist(pixels(glyphs("train", 360, size=32, seed=1).images).flatten(1), means).argmin(1)
    assert (nearest == torch.arange(360) % 36).float().mean() > 0.4
    for name in FACES:
        ink = glyphs_module._rendered(FACES[name])
        assert ink.sum((2, 3)).min() > 100
        assert ink[:, :, 0].max() == ink[:, :, -1].max() == ink[..., 0].max() == ink[..., -1].max() == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split": "valid", "count": 1}, "split: expected train or test, got 'valid'"),
        ({"split": "train", "count": 0}, "count: expected a whole number of at least 1, got 0"),
        ({"split": "train", "count": 1, "size": 4}, "size: expected a whole number of at least 8, got 4"),
    ],
)
def test_bad_glyphs_say_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        glyphs(**arguments)


def test_shifts_are_padded_crops_and_mirrors():
    images = torch.from_numpy(random_bytes(49, 3, 6, 7))
    padded = F.pad(images, (3, 3, 3, 3))
    steps = torch.arange(7)
    many = torch.cartesian_prod(steps, steps)
    numbers = torch.cat([(many + 0.5) / 7, torch.full((49, 1), 0.9)], 1)
    moved = shifted(images, numbers, 3, flip=False)
    for at, (down, across) in enumerate(many.tolist()):
        assert torch.equal(moved[at], padded[at, :, down : down + 6, across : across + 7])
    assert torch.equal(shifted(images, numbers * 0 + 0.5, 3, flip=True), images)
    assert torch.equal(shifted(images, numbers * 0 + 0.5, 0, flip=False), images)
    mirrored = shifted(images, torch.tensor([[0.5, 0.5, 0.1]]).expand(49, 3), 3, flip=True)
    assert torch.equal(mirrored, images.flip(-1))


def test_erased_rectangles_have_every_place_and_size():
    numbers = draws(0, 0, range(3000), 4)
    gone = erased(torch.ones(3000, 2, 10, 20), numbers, 0.5) == 0
    assert torch.equal(gone[:, 0], gone[:, 1])
    rows, columns = gone[:, 0].any(2), gone[:, 0].any(1)
    assert torch.equal(gone[:, 0], rows[:, :, None] & columns[:, None])
    assert rows.sum(1).max() == 5
    assert columns.sum(1).max() == 10
    assert rows.any(0).all()
    assert columns.any(0).all()
    assert ((rows.int().diff(dim=1).abs().sum(1)) <= 2).all()
    assert not (erased(torch.ones(9, 1, 8, 8), numbers[:9] * 0, 1.0) == 0).any()


def tiny(count: int = 24, mirrored: bool = False) -> Images:
    pictures = torch.from_numpy(random_bytes(count, 1, 8, 8))
    labels = torch.arange(count) % 3
    return Images(
        name="tiny",
        train=Split(pictures, labels),
        test=Split(pictures[:10], labels[:10]),
        class_names=("a", "b", "c"),
        mirrored=mirrored,
    )


def make(images: Images | None = None, seed: int = 1, **options) -> Vision:
    small = Options(**{"patch_size": 4, "embedding_dim": 16, "num_heads": 2, "num_layers": (1,), **options})
    data = images or tiny()
    torch.manual_seed(seed)
    return Vision(vision._model(small, data), data, small, seed)


@pytest.mark.parametrize("options", [{}, {"mixup": 0.4, "erase": 0.5}])
def test_an_example_does_not_know_its_neighbours(options):
    task = make(tiny(mirrored=True), **options)
    whole = task.batch([4, 9, 2, 7], epoch=3)
    for at, index in enumerate([4, 9, 2, 7]):
        alone = task.batch([index], epoch=3)
        assert alone.keys() == whole.keys()
        assert all(torch.equal(alone[name][0], whole[name][at]) for name in whole)
    assert not torch.equal(task.batch([4], epoch=4)["draws"], whole["draws"][:1])
    assert not torch.equal(make(seed=2).batch([4], epoch=3)["draws"][:, :9], whole["draws"][:1, :9])


def test_totals_are_sums_of_what_the_formula_says():
    task = make(label_smoothing=0.2, shift=1)
    model, batch = task.model.double().eval(), task.batch([0, 5, 6], epoch=0)
    assert task.counts(batch) == {"classes": 3}
    images = pixels(shifted(batch["images"], batch["draws"][:, 2:5], 1, flip=False), torch.float64)
    logs = model(images).log_softmax(-1)
    target = 0.8 * F.one_hot(batch["labels"], 3).double() + 0.2 / 3
    assert task.totals(model, batch)["classes"].item() == pytest.approx(-(target * logs).sum().item(), abs=1e-12)
    apart = sum(task.totals(model, task.batch([index], epoch=0))["classes"].item() for index in (0, 5, 6))
    assert task.totals(model, batch)["classes"].item() == pytest.approx(apart, abs=1e-10)


def test_mixup_mixes_images_and_targets_alike():
    task = make(mixup=0.5, shift=0, label_smoothing=0.0)
    model, batch = task.model.double().eval(), task.batch([0, 5, 6], epoch=0)
    partners = (batch["draws"][:, 0] * 24).long()
    assert torch.equal(batch["other images"], task.images.train.images[partners])
    assert torch.equal(batch["other labels"], task.images.train.labels[partners])
    share = batch["draws"][:, 1].double() * 0.5
    assert share.max() <= 0.5
    both = pixels(batch["images"], torch.float64), pixels(batch["other images"], torch.float64)
    logits = model(both[0] + share[:, None, None, None] * (both[1] - both[0]))
    targets = F.one_hot(batch["labels"], 3) * (1 - share[:, None])
    targets = targets + F.one_hot(batch["other labels"], 3) * share[:, None]
    expected = -(targets * logits.log_softmax(-1)).sum()
    assert task.totals(model, batch)["classes"].item() == pytest.approx(expected.item(), abs=1e-6)


def test_images_are_mirrored_where_that_is_known_to_be_right():
    for images, flip, expected in ((tiny(), None, False), (tiny(mirrored=True), None, True), (tiny(), True, True)):
        assert make(images, flip=flip).flip is expected
    assert not make(tiny(mirrored=True), flip=False).flip


def test_evaluation_is_over_all_test_images(monkeypatch):
    task = make()
    model = task.model.eval()
    with torch.no_grad():
        logits = model(pixels(task.images.test.images))
    labels = task.images.test.labels
    monkeypatch.setattr(vision, "TESTED", 4)
    results = task.evaluate(model)
    assert results["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert results["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert len(task.samples(model)) == 6
    assert task.samples(model)[0].startswith("a: classified as ")
    assert "24 training images of 8×8 pixels, 10 test images" in task.card().data
    assert task.watched[0] in results


@pytest.mark.parametrize("model", ["vit", "davit"])
def test_a_task_is_the_same_again(model, monkeypatch):
    monkeypatch.setattr(vision, "TRAIN_GLYPHS", 300)
    shape = {"patch_size": 7, "embedding_dim": 8, "num_heads": 1, "num_layers": (1,), "model": model}
    first, second = (build(Options(**shape), Path("unused"), seed=4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.images.train, second.images.train, strict=True))
    other = build(Options(**shape), Path("unused"), seed=5)
    assert not torch.equal(first.images.train.images, other.images.train.images)
    assert first.model.config.class_names == tuple(CHARACTERS)
    assert len(first.sizes()) == len(first.images.train.labels) == 300
    assert first.sizes()[0] == {"vit": 17, "davit": 16}[model]


@pytest.mark.parametrize("model", ["vit", "davit"])
def test_both_models_learn(model, tmp_path):
    folder = write_idx(tmp_path, train=60, test=12, side=12, classes=3)
    images = random_bytes(60, 12, 12)
    for label in range(3):
        images[label::3, 4 * label : 4 * label + 4] //= 8
    (folder / IDX[0]).write_bytes(idx(images))
    (folder / IDX[2]).write_bytes(idx(images[:12]))
    options = Options(
        data=str(folder),
        model=model,
        patch_size=4,
        embedding_dim=16,
        num_heads=2,
        num_layers=(1, 1) if model == "davit" else (2,),
        shift=0,
    )
    task = build(options, tmp_path, seed=0)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    before = task.evaluate(task.model.eval())["loss"]
    task.model.train()
    for epoch in range(40):
        batch = task.batch(range(60), epoch)
        (task.totals(task.model, batch)["classes"] / 60).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = task.evaluate(task.model.eval())
    assert results["accuracy"] == 1
    assert results["loss"] < before / 2


def test_options_become_the_models_config():
    images = replace(tiny(), train=Split(torch.zeros(4, 3, 28, 28, dtype=torch.uint8), torch.arange(4) % 3))
    options = Options(
        patch_size=7,
        embedding_dim=24,
        num_heads=4,
        num_kv_heads=2,
        num_layers=(3,),
        window_radius=1,
        mechanism="quadratic",
        head="mlp",
    )
    config = options.config(images)
    assert config == rg.VisionConfig(
        image_size=(28, 28), patch_size=7, num_channels=3, embedding_dim=24, num_layers=3, num_heads=4, num_kv_heads=2,
        window_radius=1, mechanism="quadratic", head="mlp", num_classes=3, class_names=("a", "b", "c"),
    )  # fmt: skip
    assert rg.VisionTransformer(config)(torch.zeros(2, 3, 28, 28)).shape == (2, 3)
    config = Options(
        model="davit", patch_size=2, embedding_dim=8, num_heads=2, num_layers=(1, 2, 1), window_size=5, dropout=0.1
    ).config(images)
    assert (config.embedding_dim, config.num_heads, config.num_layers) == ((8, 16, 32), (2, 4, 8), (1, 2, 1))
    assert (config.window_size, config.dropout) == (5, 0.1)
    assert [features.shape[-1] for features in rg.DaViT(config).features(torch.zeros(1, 3, 28, 28))] == [14, 7, 4]


BAD = {
    "model": ({"model": "resnet"}, "model: expected vit or davit, got 'resnet'"),
    "head": ({"head": "deep"}, "head: expected linear or mlp, got 'deep'"),
    "patch_size": ({"patch_size": 0}, "patch_size: expected at least 1, got 0"),
    "window": ({"window_radius": 0}, "window_radius: expected at least 1, got 0"),
    "a ViT's side": ({"window_size": 3}, "window_size: expected none for a ViT, got 3"),
    "a DaViT's radius": ({"model": "davit", "window_radius": 3}, "window_radius: expected none for a DaViT, got 3"),
    "num_layers": ({"num_layers": (2, 0)}, "num_layers: expected numbers of at least 1, like 4 or 1,2,1, got 2,0"),
    "no layers": ({"num_layers": (0,)}, "num_layers: expected numbers of at least 1"),
    "stages": ({"num_layers": (1, 2)}, "num_layers: expected one number for a ViT, got 1,2"),
    "dropout": ({"dropout": 1.0}, "dropout: expected at least 0 and below 1, got 1.0"),
    "smoothing": ({"label_smoothing": -0.1}, "label_smoothing: expected at least 0 and below 1"),
    "erase": ({"erase": 1.5}, "erase: expected 0 to 1.0, got 1.5"),
    "mixup": ({"mixup": 0.6}, "mixup: expected 0 to 0.5, got 0.6"),
    "shift": ({"shift": -1}, "shift: expected at least 0, got -1"),
    "mechanism": ({"mechanism": "magic"}, "mechanism: expected one of"),
    "size": ({"size": 32, "data": "somewhere"}, "size: expected none with data"),
    "small": ({"size": 4}, "size: expected at least 8, got 4"),
    "davit's head": ({"model": "davit", "head": "mlp"}, "head: expected linear for a DaViT, got mlp"),
    "davit's kv": ({"model": "davit", "num_kv_heads": 1}, "num_kv_heads: expected none for a DaViT, got 1"),
    "tuned head": ({"start": "run", "head": "mlp"}, "head: expected linear for fine-tuning, got mlp"),
    "tuned width": ({"start": "run", "embedding_dim": 8}, "embedding_dim: expected none when fine-tuning a model"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_say_so(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_every_option_has_a_sentence():
    assert all(field.metadata["help"].endswith(".") for field in fields(Options))


def test_options_that_do_not_fit_the_images_say_so(tmp_path):
    write_idx(tmp_path)
    with pytest.raises(ValueError, match=r"image_size: expected multiples of patch_size = \(3, 3\), got \(8, 8\)"):
        build(Options(data=str(tmp_path), patch_size=3), tmp_path, 0)
    with pytest.raises(ValueError, match=r"window_radius: expected none with Channel"):
        build(Options(data=str(tmp_path), patch_size=4, window_radius=1, mechanism="channel"), tmp_path, 0)


@pytest.mark.parametrize("model", ["vit", "davit"])
def test_fine_tuning_starts_from_what_was_learned(model, tmp_path):
    shape = {"patch_size": 4, "embedding_dim": 16, "num_heads": 2, "num_layers": (1,), "model": model}
    first = make(head="mlp" if model == "vit" else "linear", **shape)
    start = str(rg.save(first.model, tmp_path / "first"))
    data = write_idx(tmp_path / "data", side=8 if model == "davit" else 12, classes=5)
    task = build(Options(data=str(data), start=start, dropout=0.1), tmp_path, seed=0)
    config = task.model.config
    assert (config.num_classes, config.class_names, config.dropout) == (5, ("0", "1", "2", "3", "4"), 0.1)
    before, after = first.model.state_dict(), task.model.state_dict()
    kept = [name for name in after if not name.startswith("head") and name != "positions"]
    assert len(kept) > 10
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert not after["head.weight"].any()
    assert "hidden.weight" not in after
    assert task.totals(task.model.train(), task.batch(range(6), 0))["classes"].item() == pytest.approx(6 * np.log(5))
    other = build(Options(data=str(data), start=start, mechanism="elu"), tmp_path, seed=0)
    assert other.model.config.mechanism == rg.Elu()


def test_a_start_that_does_not_fit_says_so(tmp_path):
    data = write_pictures(tmp_path / "data", {"cat": 3, "dog": 3}, mode="RGB")
    start = rg.save(make().model, tmp_path / "grey")
    with pytest.raises(ValueError, match=r"from: expected a model for images of 3 channels, as data has, got .*for 1"):
        build(Options(data=str(data), start=str(start)), tmp_path, 0)
    decoder = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="from: expected a model of images, got Decoder"):
        build(Options(data=str(data), start=str(rg.save(decoder, tmp_path / "text"))), tmp_path, 0)


SIZES = {
    "image_size": (12, 20),
    "patch_size": 4,
    "embedding_dim": 16,
    "num_layers": 1,
    "num_heads": 4,
    "num_classes": 3,
}


def test_a_windowed_vit_sees_its_neighbours_and_the_class_token_everything():
    near = rg.VisionTransformer(rg.VisionConfig(**SIZES, window_radius=1)).eval()
    whole = rg.VisionTransformer(rg.VisionConfig(**SIZES)).eval()
    whole.load_state_dict(near.state_dict())
    images = torch.randn(1, 3, 12, 20)
    changed = images.clone()
    changed[:, :, :4, :4] += 1
    with torch.no_grad():
        moved = (near.features(images) != near.features(changed)).any(-1)[0]
        assert moved[0]
        assert moved[1:].view(3, 5).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
        by_hand = whole.features(images, local((3, 5), 1, torch.device("cpu")))
        assert torch.equal(near.features(images), by_hand)
        assert (near.features(images) - whole.features(images)).abs().max() > 1e-4
        wide = rg.VisionTransformer(rg.VisionConfig(**SIZES, window_radius=4)).eval()
        wide.load_state_dict(near.state_dict())
        torch.testing.assert_close(wide(images), whole(images))
        # A mask of the caller's is added, and a resized model has the window on its own grid.
        blind = rg.dense((torch.arange(16) == 0)[None])
        assert torch.equal(near.features(images, blind), whole.features(images, blind))
        assert near.resized((8, 8))(images[:, :, :8, :8]).isfinite().all()


def test_a_windowed_vit_comes_back_from_its_file(tmp_path):
    model = rg.VisionTransformer(
        rg.VisionConfig(**SIZES, window_radius=1, num_kv_heads=2, class_names=("x", "y", "z"))
    ).eval()
    back, images = rg.load(rg.save(model, tmp_path / "model")), torch.randn(2, 3, 12, 20)
    assert back.config == model.config
    with torch.no_grad():
        assert torch.equal(back(images), model(images))
    with pytest.raises(ValueError, match=r"huggingface|form"):
        rg.save(model, tmp_path / "theirs", layout="huggingface")


def test_class_names_go_to_hugging_faces_config_and_back(tmp_path):
    model = rg.VisionTransformer(rg.VisionConfig(**SIZES, class_names=("x", "y", "z")))
    folder = rg.save(model, tmp_path / "theirs", layout="huggingface")
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "x", "1": "y", "2": "z"}
    assert rg.load(folder).config.class_names == ("x", "y", "z")
    plain = rg.save(rg.VisionTransformer(rg.VisionConfig(**SIZES)), tmp_path / "plain", layout="huggingface")
    assert rg.load(plain).config.class_names == ()


def test_configs_check_names_and_windows():
    for config in (rg.VisionConfig(**SIZES), rg.DaViTConfig(num_classes=3)):
        with pytest.raises(ValueError, match="class_names: expected 3, one per class, or none, got 2"):
            replace(config, class_names=("x", "y"))
        with pytest.raises(ValueError, match="class_names: expected tuple"):
            replace(config, class_names=(1, 2, 3))
        named = replace(config, class_names=("x", "y", "z"))
        assert type(config).from_json(json.loads(json.dumps(named.to_json()))) == named
    for radius in (0, 1.5):
        with pytest.raises(ValueError, match="window_radius: expected"):
            rg.VisionConfig(**SIZES, window_radius=radius)
    with pytest.raises(ValueError, match="window_radius: expected none with Channel"):
        rg.VisionConfig(**SIZES, window_radius=1, mechanism="channel")


def test_a_davit_for_other_classes_begins_at_zero():
    config = rg.DaViTConfig(embedding_dim=(8, 16, 32, 32), num_heads=(1, 2, 4, 4), num_groups=(1, 2, 4, 4))
    model = rg.DaViT(config)
    tuned = model.with_classes(2, ("x", "y"))
    assert tuned.config == replace(config, num_classes=2, class_names=("x", "y"))
    assert tuned(torch.randn(1, 3, 32, 32)).tolist() == [[0.0, 0.0]]
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert tuned.with_classes(0).head is None
    assert rg.DaViT(tuned.config).load_state_dict(tuned.state_dict())
