"""Tensors by name from untrusted files: safetensors, PyTorch's .bin, and folders with shards of them.

Names and shapes are checked before any number is read. An inconsistent file raises CheckpointError with its path, what
was expected and what it has. Files are memory-mapped: the bytes of a tensor are read when they are used, and writing to
a tensor never changes its file.
"""

import io
import json
import math
import mmap
import pickletools
import re
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.checkpoints.errors import CheckpointError

Shape = tuple[int, ...]

MOST_JSON_BYTES = 32 * 2**20
MOST_JSON_VALUES = 1_000_000
"""Parsed JSON takes many times the memory of its text, so values are counted first; large indices have 200,000."""
MOST_OPCODES = 1_000_000
"""The most opcodes of the pickle in a .bin file; a tensor takes about thirty."""
MOST_AXES = 16

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# All names that the pickle of a state dict needs; any other is refused before torch unpickles it.
STATE_DICT_GLOBALS = re.compile(
    r"collections OrderedDict|torch(\.storage|\.cuda)? \w*Storage|torch\.nn\.parameter Parameter|torch Size"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter)|torch (b?float|u?int|bool)\w*"
)


class Source:
    """The tensors of one file or folder, read by name.

    `shapes` has the shape of every tensor by name, checked against the file; `read` gives one tensor. `metadata` is the
    rest of the file's header.
    """

    def __init__(self, path: Path, shapes: dict[str, Shape], metadata: dict[str, Any] | None = None) -> None:
        self.path = path
        self.shapes = shapes
        self.metadata = metadata or {}

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, in the dtype that it is stored in."""
        if name not in self.shapes:
            refuse(self.path, "a tensor of the file", f"{name!r}")
        return self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        raise NotImplementedError


def refuse(path: Path, expected: str, got: str) -> NoReturn:
    """Raise CheckpointError for a file."""
    raise CheckpointError(f"{path}: expected {expected}, got {got}")


def check_file(path: str | Path, expected: str) -> Path:
    """The path, if it is that of a regular file that is not empty. Checked before opening, since a pipe would block.

    >>> check_file("nowhere.safetensors", "a safetensors file")
    Traceback (most recent call last):
    regard.checkpoints.errors.CheckpointError: nowhere.safetensors: expected a safetensors file, got no such file
    """
    path = Path(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        refuse(path, expected, "no such file")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected {expected}, got {error}") from error
    if stat.S_ISDIR(status.st_mode):
        refuse(path, expected, "a folder")
    if not stat.S_ISREG(status.st_mode):
        refuse(path, expected, "something that is not a regular file")
    if status.st_size == 0:
        refuse(path, expected, "an empty file")
    return path


def map_file(path: str | Path, expected: str) -> mmap.mmap:
    """A file, memory-mapped. Writing to the map changes a private copy, never the file."""
    path = check_file(path, expected)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected {expected}, got {error}") from error


def read_text(path: str | Path, most_bytes: int = MOST_JSON_BYTES, expected: str = "a text file") -> str:
    """The text of a UTF-8 file of at most `most_bytes`."""
    path = check_file(path, expected)
    size = path.stat().st_size
    if size > most_bytes:
        refuse(path, f"{expected} of at most {most_bytes:,} bytes", f"{size:,}")
    try:
        with path.open("rb") as file:
            data = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path}: expected {expected}, got {error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected UTF-8 text, got {error}") from error


def read_json(path: str | Path, most_bytes: int = MOST_JSON_BYTES, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a file, limited in size, values and depth. With `unique`, a repeated key is refused."""
    return parse_json(read_text(path, most_bytes, "a JSON file"), Path(path), unique)


def read_json_list(path: str | Path) -> list[Any]:
    """The JSON list in a file, with the limits of `read_json`."""
    values = _parse(read_text(path, expected="a JSON file"), Path(path))
    if not isinstance(values, list):
        refuse(Path(path), "a JSON list", type(values).__name__)
    return values


def parse_json(text: str, path: Path, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a text, limited in values and depth; `path` is for the error message."""
    values = _parse(text, path, unique)
    if not isinstance(values, dict):
        refuse(path, "a JSON object", type(values).__name__)
    return values


def _parse(text: str, path: Path, unique: bool = False) -> Any:
    nested = text.count("[") + text.count("{")
    values = nested + text.count(",") + text.count(":")
    if nested > 1_000 + len(text) // 16:
        refuse(path, "JSON that is not mostly brackets", f"{nested:,} lists and objects in {len(text):,} characters")
    if values > MOST_JSON_VALUES:
        refuse(path, f"at most {MOST_JSON_VALUES:,} JSON values", f"about {values:,}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) < len(items):
            twice = next(name for name, times in Counter(name for name, _ in items).items() if times > 1)
            refuse(path, "every key once", f"{_short(twice)} twice")
        return values

    try:
        return json.loads(text, object_pairs_hook=pairs if unique else None)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{path}: expected JSON, got values nested too deeply") from error
    except ValueError as error:  # invalid JSON, or a number with thousands of digits
        raise CheckpointError(f"{path}: expected JSON, got {error}") from error


def count_elements(shape: Any, path: Path, name: str) -> int:
    """The number of elements of a shape; raises CheckpointError for a shape that torch cannot represent."""
    if not isinstance(shape, list | tuple) or len(shape) > MOST_AXES:
        refuse(path, f"a shape of at most {MOST_AXES} axes for {name!r}", _short(shape))
    if any(type(n) is not int or not 0 <= n < 2**62 for n in shape):
        refuse(path, f"a shape of whole numbers for {name!r}", _short(shape))
    # Also with an axis of 0 the other axes must not overflow: torch multiplies them for strides.
    if math.prod(max(n, 1) for n in shape) >= 2**62:
        refuse(path, f"a shape that fits a file for {name!r}", _short(shape))
    return math.prod(shape)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


# safetensors: eight bytes of header length, a JSON header, then the data without gaps.


class _Safetensors(Source):
    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        spans: dict[str, tuple[torch.dtype, Shape, int]],
        metadata: dict[str, Any],
    ) -> None:
        super().__init__(path, {name: shape for name, (_, shape, _) in spans.items()}, metadata)
        self._data = data
        self._spans = spans

    def _tensor(self, name: str) -> Tensor:
        dtype, shape, begin = self._spans[name]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if begin % dtype.itemsize:  # torch would read unaligned numbers, but not every CPU can
            copied = bytearray(self._data[begin : begin + count * dtype.itemsize])
            return torch.frombuffer(copied, dtype=dtype).reshape(shape)
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=begin).reshape(shape)


def open_safetensors(path: str | Path) -> Source:
    """A safetensors file.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = tempfile.mkdtemp()
    >>> save_file({"weight": torch.ones(2, 3)}, f"{folder}/model.safetensors")
    >>> source = open_safetensors(f"{folder}/model.safetensors")
    >>> source.shapes, source.read("weight").sum()
    ({'weight': (2, 3)}, tensor(6.))
    """
    path = Path(path)
    data = map_file(path, "a safetensors file")
    header, start = _safetensors_header(data, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        refuse(path, "an object as __metadata__", _short(metadata))
    spans = {}
    used = []
    for name, entry in header.items():
        dtype, shape, begin, end = _safetensors_entry(entry, path, name)
        spans[name] = (dtype, shape, start + begin)
        used.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(used):
        if begin != reached:
            refuse(path, f"{name!r} to begin where the tensor before it ends, at {reached:,}", f"{begin:,}")
        reached = end
    if reached != len(data) - start:
        refuse(path, f"{reached:,} bytes of data, as the header says", f"{len(data) - start:,}")
    return _Safetensors(path, data, spans, metadata)


def _safetensors_header(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], int]:
    """The header, and the offset at which the data begins."""
    if len(data) < 8:
        refuse(path, "a safetensors file of at least 8 bytes", f"{len(data)}")
    (length,) = struct.unpack_from("<Q", data)
    most = min(MOST_JSON_BYTES, len(data) - 8)
    if length > most:
        refuse(path, f"a header of at most {most:,} bytes", f"{length:,}")
    try:
        text = data[8 : 8 + length].decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected UTF-8 text as header, got {error}") from error
    return parse_json(text, path, unique=True), 8 + length


def _safetensors_entry(entry: Any, path: Path, name: str) -> tuple[torch.dtype, Shape, int, int]:
    """Dtype, shape, begin and end of one tensor, after a check that they agree."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        refuse(path, f"dtype, shape and data_offsets for {name!r}", _short(entry))
    kind = entry["dtype"]
    if not isinstance(kind, str) or kind not in DTYPES:
        refuse(path, f"a type among {', '.join(DTYPES)} for {name!r}", _short(kind))
    size = count_elements(entry["shape"], path, name) * DTYPES[kind].itemsize
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int or n < 0 for n in offsets):
        refuse(path, f"two offsets for {name!r}", _short(offsets))
    begin, end = offsets
    if end - begin != size:
        refuse(path, f"{size:,} bytes for {name!r}, {kind} {entry['shape']}", f"offsets {_short(offsets)}")
    return DTYPES[kind], tuple(entry["shape"]), begin, end


# PyTorch's .bin: a pickle and storages in a zip archive or, before 2020, one after the other in a plain file.


class _Loaded(Source):
    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        super().__init__(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self._tensors = tensors

    def _tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def open_bin(path: str | Path) -> Source:
    """A state dict written by torch.save. Its pickle may contain only tensors, and no code of it runs.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> torch.save({"weight": torch.ones(2, 3)}, f"{folder}/pytorch_model.bin")
    >>> open_bin(f"{folder}/pytorch_model.bin").shapes
    {'weight': (2, 3)}
    """
    path = Path(path)
    data = map_file(path, "a .bin file")
    zipped = data[:4] == b"PK\x03\x04"
    # The pickle is read twice. The first time nothing is built: whatever a state dict does not need, or would take more
    # memory than the file, is refused. The second time torch loads it with weights_only.
    if zipped:
        _check_archive(path, len(data))
    else:
        _check_pickles(data, 5, path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: expected a state dict, got {_short(first)}") from error
    return _Loaded(path, _check_state(state, len(data), path))


def _check_archive(path: Path, size: int) -> None:
    """Refuse an archive that is compressed (it may expand to any size), claims too many bytes, or repeats a name."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                refuse(path, "an archive without compression", "a compressed one")
            if any(entry.compress_size != entry.file_size for entry in entries):
                refuse(path, "records whose two sizes agree", "a record whose sizes differ")
            if sum(entry.file_size for entry in entries) > size:
                refuse(path, f"records of at most {size:,} bytes", "more")
            names = [entry.filename for entry in entries]
            pickles = [name for name in names if name.endswith(".pkl")]
            if len(set(names)) < len(names) or len(pickles) != 1 or not pickles[0].endswith("/data.pkl"):
                refuse(path, "an archive with one pickle, data.pkl", f"{_short(pickles)}")
            pickled = archive.read(pickles[0])
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises many kinds of errors for a damaged archive
        raise CheckpointError(f"{path}: expected an archive as torch.save writes it, got {error}") from error
    _check_pickles(io.BytesIO(pickled), 1, path)


def _check_pickles(file: Any, count: int, path: Path) -> None:
    """Parse `count` pickles without running them; refuse whatever a state dict does not need."""
    opcodes = 0
    try:
        for _ in range(count):
            for opcode, argument, _ in pickletools.genops(file):
                opcodes += 1
                if opcodes > MOST_OPCODES:
                    refuse(path, f"a pickle of at most {MOST_OPCODES:,} steps", "more")
                if opcode.name == "PROTO" and argument != 2:
                    refuse(path, "pickle protocol 2, as torch.save writes it", f"{argument}")
                if opcode.name == "GLOBAL" and not STATE_DICT_GLOBALS.fullmatch(str(argument)):
                    refuse(path, "a pickle of tensors only", f"one that wants {_short(argument)}")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: expected a pickle as torch.save writes it, got {_short(str(error))}") from error


def _check_state(state: Any, size: int, path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, after a check that each fits its storage and all storages fit the file."""
    if not isinstance(state, dict):
        refuse(path, "a state dict", type(state).__name__)
    storages = {}
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            refuse(path, "tensors by name", f"{_short(name)}: {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            refuse(path, f"a dense CPU tensor for {name!r}", f"{tensor.layout} on {tensor.device}")
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        elements = count_elements(tuple(tensor.shape), path, name)
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if elements else -1
        most = storage.nbytes() // tensor.itemsize
        # With a stride of 0 a few bytes could claim any size.
        if elements > most or tensor.storage_offset() + last >= most:
            refuse(path, f"at most the {most:,} numbers that are stored for {name!r}", f"{_short(tuple(tensor.shape))}")
        tensors[name] = tensor.detach()
    if sum(storages.values()) > size:
        refuse(path, f"storages of at most the file's {size:,} bytes", f"{sum(storages.values()):,}")
    return tensors


# Folders in Hugging Face's layout.


class _Shards(Source):
    def __init__(self, path: Path, shards: Iterable[Source]) -> None:
        self._of: dict[str, Source] = {}
        for shard in shards:
            for name in shard.shapes:
                if name in self._of:
                    refuse(shard.path, f"{name!r} in one shard only", f"it in {self._of[name].path.name} too")
                self._of[name] = shard
        super().__init__(path, {name: shard.shapes[name] for name, shard in self._of.items()})

    def _tensor(self, name: str) -> Tensor:
        return self._of[name].read(name)


OPENERS = {"model.safetensors": open_safetensors, "pytorch_model.bin": open_bin}


def open_folder(folder: str | Path) -> Source:
    """The weights of a folder: model.safetensors, otherwise pytorch_model.bin, as one file or as shards with an index.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = tempfile.mkdtemp()
    >>> save_file({"weight": torch.ones(2, 3)}, f"{folder}/model.safetensors")
    >>> open_folder(folder).shapes
    {'weight': (2, 3)}
    """
    folder = Path(folder)
    if not folder.is_dir():
        refuse(folder, "a folder with weights", "a file" if folder.exists() else "no such folder")
    for name, opener in OPENERS.items():
        if (folder / name).exists():
            return opener(folder / name)
        index = folder / f"{name}.index.json"
        if index.exists():
            return _open_shards(index, name)
    wanted = " or ".join(f"{name}[.index.json]" for name in OPENERS)
    there = sorted(entry.name for entry in folder.iterdir())
    refuse(folder, wanted, ", ".join(there[:8]) + (" …" if len(there) > 8 else "") if there else "an empty folder")


def _open_shards(index: Path, whole: str) -> Source:
    """The shards that an index lists: files in the same folder, each with the tensors that the index says it has."""
    placed = read_json(index, unique=True).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        refuse(index, "a weight_map of tensors to shards", _short(placed))
    shards: dict[str, Source] = {}
    for name, shard in placed.items():
        if (
            not isinstance(shard, str)
            or not re.fullmatch(r"[^/\\:\0]+", shard)
            or not shard.endswith(Path(whole).suffix)
        ):
            refuse(index, f"a {Path(whole).suffix} file beside the index for {name!r}", _short(shard))
        if shard not in shards:
            shards[shard] = OPENERS[whole](index.parent / shard)
        if name not in shards[shard].shapes:
            refuse(index.parent / shard, f"{name!r}, as the index says", f"{len(shards[shard].shapes)} other tensors")
    return _Shards(index, shards.values())
