"""GGUF files, versions 2 and 3: llama.cpp's format of metadata, tokenizer and quantized weights in one file.

The header is parsed here, and every count and length is checked against the bytes that are left: parsers that trust
them can be made to hang or to overflow (CVE-2025-53630, CVE-2026-7482). Tensors are dequantized to float32: F32, F16,
BF16, Q8_0, Q4_0 and Q4_1 by torch, which is several times faster than numpy, other quantizations by the `gguf` package.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import Shape, Source, count_elements, map_file, refuse
from regard.core.extras import needed_for

MOST_ITEMS = 2_000_000
"""The most strings and nested arrays in the metadata, which take several times their bytes in memory. The largest
vocabularies with their merges have about 800,000."""
MOST_DEPTH = 4
MOST_AXES = 4
CHUNK = 2**20
"""How many numbers numpy dequantizes at a time, so that its intermediate results stay small."""

# Type: name, numbers in a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class GgufFile(Source):
    """An open GGUF file: `metadata` by key, tensors by name.

    In `metadata`, arrays of numbers are numpy arrays, arrays of strings are lists.
    """

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        metadata: dict[str, Any],
        tensors: dict[str, tuple[int, Shape, int]],
    ) -> None:
        super().__init__(path, {name: shape for name, (_, shape, _) in tensors.items()})
        self.metadata = metadata
        self._data = data
        self._tensors = tensors

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, dequantized to float32."""
        return super().read(name)

    def _tensor(self, name: str) -> Tensor:
        kind, shape, offset = self._tensors[name]
        title, block, size = TYPES[kind]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape)
        if title in PLAIN:
            return torch.frombuffer(self._data, dtype=PLAIN[title], count=count, offset=offset).float().reshape(shape)
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=count // block * size, offset=offset)
        blocks = raw.view(-1, size)
        if title in ("Q4_0", "Q4_1", "Q8_0"):
            return dequantize(blocks, title).reshape(shape)
        return _dequantize_by_gguf(blocks, kind, block, self.path).reshape(shape)


def dequantize(blocks: Tensor, title: str) -> Tensor:
    """Blocks (N, bytes) of Q4_0, Q4_1 or Q8_0 as numbers (N, 32): each block has a scale, Q4_1 also a smallest value.

    >>> dequantize(torch.tensor([[0, 0x3C] + [2] * 32], dtype=torch.uint8), "Q8_0")[0, :3]
    tensor([2., 2., 2.])
    """
    out = torch.empty(len(blocks), 32)
    heads = 4 if title == "Q4_1" else 2
    scales = blocks[:, :heads].contiguous().view(torch.float16).float()
    body = blocks[:, heads:]
    if title == "Q8_0":
        out.copy_(body.view(torch.int8))
    else:
        out[:, :16].copy_(body & 15)
        out[:, 16:].copy_(body >> 4)
    if title == "Q4_0":
        out.sub_(8)
    out.mul_(scales[:, :1])
    return out.add_(scales[:, 1:]) if title == "Q4_1" else out


def _dequantize_by_gguf(blocks: Tensor, kind: int, block: int, path: Path) -> Tensor:
    try:
        import numpy as np
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise CheckpointError(
            f'{path}: expected the gguf package for {TYPES[kind][0]}, got none: pip install "regard[gguf]"'
        ) from error
    out = torch.empty(len(blocks), block)
    step = CHUNK // block
    try:
        # Scales may be infinite; numpy would warn where torch does not.
        with np.errstate(all="ignore"):
            for at in range(0, len(blocks), step):
                part = quants.dequantize(blocks[at : at + step].numpy(), GGMLQuantizationType(kind))
                out[at : at + step] = torch.from_numpy(part)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a quantization that gguf reads, got {TYPES[kind][0]}") from error
    return out


class _Header:
    """A cursor in the file that reads the next value and checks that it lies inside the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.items = data, path, 0, 0

    def room(self, size: int, what: str) -> None:
        left = len(self.data) - self.at
        if size > left:
            refuse(self.path, f"{what} in the {left:,} bytes that are left", f"{size:,}")

    def number(self, form: str) -> Any:
        self.room(struct.calcsize("<" + form), "a number")
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def count(self, smallest: int, what: str) -> int:
        """The number of entries that follow, each of at least `smallest` bytes."""
        count: int = self.number("Q")
        self.room(count * smallest, what)
        return count

    def budget(self, items: int) -> None:
        self.items += items
        if self.items > MOST_ITEMS:
            refuse(self.path, f"metadata of at most {MOST_ITEMS:,} strings and arrays", f"{self.items:,}")

    def strings(self, count: int) -> list[str]:
        """`count` strings, each a length and its bytes."""
        self.budget(count)
        data, at, end = self.data, self.at, len(self.data)
        length_of = struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_of(data, at)[0]
                if at > end:
                    refuse(self.path, "a string inside the file", f"one of {at - start:,} bytes")
                texts.append(data[start:at].decode())
        except struct.error:
            refuse(self.path, "a string", "the end of the file")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: expected UTF-8 strings, got {error}") from error
        self.at = at
        return texts

    def string(self) -> str:
        return self.strings(1)[0]

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(depth + 1)
        if kind not in NUMBERS:
            refuse(self.path, "a value of a known type, 0 to 12", f"{kind}")
        return self.number(NUMBERS[kind])

    def array(self, depth: int) -> Any:
        if depth > MOST_DEPTH:
            refuse(self.path, f"arrays at most {MOST_DEPTH} deep", "deeper ones")
        kind = self.number("I")
        if kind == STRING:
            return self.strings(self.count(8, "an array of strings"))
        if kind == ARRAY:
            count = self.count(12, "an array of arrays")
            self.budget(count)
            return [self.array(depth + 1) for _ in range(count)]
        if kind not in NUMBERS:
            refuse(self.path, "an array of a known type, 0 to 12", f"{kind}")
        with needed_for("a GGUF file"):
            import numpy as np

        dtype = np.dtype("<" + NUMBERS[kind]) if kind != 7 else np.dtype(bool)
        count = self.count(dtype.itemsize, "an array of numbers")
        numbers = np.frombuffer(self.data, dtype, count, self.at).copy() if count else np.empty(0, dtype)
        self.at += numbers.nbytes
        return numbers


def open_gguf(path: str | Path) -> GgufFile:
    """A GGUF file with its header read and checked.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "nothing.gguf")
    >>> path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    24
    >>> open_gguf(path).metadata
    {}
    """
    path = Path(path)
    data = map_file(path, "a GGUF file")
    header = _Header(data, path)
    if data[:4] != b"GGUF":
        refuse(path, "a GGUF file", f"one that begins with {data[:4]!r}")
    header.at = 4
    version = header.number("I")
    if version not in (2, 3):
        swapped = version.to_bytes(4, "big") in (b"\2\0\0\0", b"\3\0\0\0")
        refuse(path, "GGUF version 2 or 3", "big-endian numbers" if swapped else f"{version}")
    tensors = header.count(32, "tensors")
    keys = header.count(13, "metadata")
    header.budget(tensors + keys)
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = header.string()
        if key in metadata:
            refuse(path, "every key once", f"{key!r} twice")
        metadata[key] = header.value(header.number("I"))
    return GgufFile(path, data, metadata, _tensors(header, tensors, _alignment(metadata, path)))


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        refuse(path, "a power of two from 8 as general.alignment", f"{alignment!r:.80}")
    return alignment


def _tensors(header: _Header, count: int, alignment: int) -> dict[str, tuple[int, Shape, int]]:
    """Type, shape and offset of every tensor. Together they must fill the rest of the file without gaps."""
    path = header.path
    tensors = {}
    spans = []
    for _ in range(count):
        name = header.string()
        if name in tensors:
            refuse(path, "every tensor once", f"{name!r} twice")
        axes = header.number("I")
        if not 1 <= axes <= MOST_AXES:
            refuse(path, f"1 to {MOST_AXES} axes for {name!r}", f"{axes}")
        shape = tuple(header.number("Q") for _ in range(axes))[::-1]
        kind, offset = header.number("I"), header.number("Q")
        if kind not in TYPES:
            refuse(path, f"a known type for {name!r}", f"type {kind}")
        title, block, size = TYPES[kind]
        numbers = count_elements(shape, path, name)
        if shape[-1] % block:
            refuse(path, f"rows of a multiple of {block} numbers for {name!r}, {title}", f"{shape[-1]}")
        if offset % alignment:
            refuse(path, f"an offset in steps of {alignment} for {name!r}", f"{offset:,}")
        tensors[name] = (kind, shape, offset)
        spans.append((offset, offset + numbers // block * size, name))
    start = _round_up(header.at, alignment)
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            refuse(path, f"{name!r} to begin where the tensor before it ends, at {reached:,}", f"{begin:,}")
        if start + end > len(header.data):
            refuse(path, f"{name!r} inside the file's {len(header.data):,} bytes", f"its end at {start + end:,}")
        reached = _round_up(end, alignment)
    if len(header.data) - start > reached:
        refuse(path, f"{reached:,} bytes of data, as the header says", f"{len(header.data) - start:,}")
    return {name: (kind, shape, start + offset) for name, (kind, shape, offset) in tensors.items()}


def _round_up(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
