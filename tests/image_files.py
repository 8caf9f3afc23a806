"""Small image files for tests: IDX files, and folders of pictures by class."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from regard.training.data.images import IDX


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


def write_pictures(folder: Path, counts: dict[str, int], mode: str = "L", suffix: str = "png") -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new(mode, (6, 4), label * 40 + number).save(folder / name / f"{number:02}.{suffix}")
    return folder
