"""Checkpoints of a run: written atomically, verified before they are loaded, and without pickle.

    checkpoints/
      step-00000100/
        part-00000-of-00002.safetensors    tensors that rank 0 wrote: its shards, and its part of replicated tensors
        part-00001-of-00002.safetensors
        manifest.json                      the file of every tensor, the size and SHA-256 of every file, the run's note
      .step-00000105-3f2a9c1e/             temporary folder of a killed save; the next save removes it

A checkpoint is written to a temporary folder, the manifest last, fsynced, and renamed: a kill at any moment leaves the
earlier checkpoints intact. `core.files.write_folder` does not serve here: all processes write into the folder, files
are fsynced before the rename, and a checkpoint whose replacement was killed gets its name back.

torch.distributed.checkpoint plans which process writes and reads which part of which tensor, and passes errors to all
processes. We use storage classes of our own: torch's default writes a pickle, and its safetensors storage makes a
second copy of all tensors in memory and refuses tied weights.
"""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load as planned_load
from torch.distributed.checkpoint.state_dict_saver import save as planned_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import DTYPES, check_file, open_safetensors, parse_json, read_text, refuse

T = TypeVar("T")

VERSION = 1
MANIFEST = "manifest.json"
NAMED = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.(step-(\d{8,}))-([0-9a-f]{8}|old)")
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


def save(folder: Path, step: int, tensors: dict[str, Tensor], note: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of a step, then remove older checkpoints except the newest `keep` - 1 that look complete.

    With a process group, all its processes call this with the same folder. Plain tensors are the same on all processes,
    or have different names; DTensors are written shard by shard. The note is that of rank 0. An error on one process
    is raised on all, and leaves the earlier checkpoints intact.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.training import store
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (5, 10, 15):
    ...     path = store.save(folder, step, {"weight": torch.ones(2) * step}, {"step": step}, keep=2)
    >>> path.name, sorted(entry.name for entry in folder.iterdir())
    ('step-00000015', ['step-00000010', 'step-00000015'])
    """
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    writer = _Writer(Path(folder), step, note, keep)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            planned_save(dict(tensors), storage_writer=writer, planner=planner)
    except CheckpointException as failed:
        _together(writer.give_up)
        error = _cause(failed)
        if isinstance(error, OSError):
            error = OSError(error.errno, f"checkpoint of step {step}: {error.strerror or error}", str(folder))
        raise error from failed
    return writer.target


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose checksums are right, and a sentence for each newer checkpoint that is damaged.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.training import store
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (5, 10):
    ...     path = store.save(folder, step, {"weight": torch.ones(2)}, {}, keep=2)
    >>> (path / "manifest.json").unlink()
    >>> path, skipped = store.newest(folder)
    >>> path.name
    'step-00000005'
    >>> skipped[0].replace(str(folder), "checkpoints")
    "Skipped checkpoints/step-00000010/manifest.json: expected a checkpoint's manifest, got no such file."
    """
    skipped: list[str] = []
    for path, finished in _listed(Path(folder)):
        try:
            if not finished:
                refuse(path, "a checkpoint", "the temporary folder of a save that was killed")
            _check(path, slice(None))
            return path, skipped
        except CheckpointError as error:
            skipped.append(f"Skipped {error}.")
    return None, skipped


def load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Load tensors from a checkpoint, in place and by name. Returns its note.

    With a process group, all its processes call this. The number of processes, and so the shards, may differ from those
    of the save. The checkpoint may have more tensors than are loaded.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.training import store
    >>> path = store.save(Path(tempfile.mkdtemp()), 5, {"weight": torch.ones(2)}, {"best": 0.5}, keep=1)
    >>> weight = torch.zeros(2)
    >>> store.load(path, {"weight": weight}), weight
    ({'best': 0.5}, tensor([1., 1.]))
    """
    path = Path(path)
    manifest: dict[str, Any] = {}

    def ready() -> str:
        rank, world = (dist.get_rank(), dist.get_world_size()) if _grouped() else (0, 1)
        manifest.update(_check(path, slice(rank, None, world)))
        _compare(path, _metadata(path, manifest), tensors)
        return manifest["sha256"]

    if len(set(_together(ready))) > 1:
        refuse(path, "the same checkpoint on all processes", "different checkpoints")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            planned_load(dict(tensors), storage_reader=_Reader(path, _metadata(path, manifest)), planner=planner)
    except CheckpointException as failed:
        error = _cause(failed)
        if isinstance(error, Exception):
            raise CheckpointError(f"{path}: expected tensors that can be read, got {error}") from failed
        raise error from failed
    return manifest["note"]


def read_note(path: Path) -> dict[str, Any]:
    """The note of a checkpoint.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.training import store
    >>> path = store.save(Path(tempfile.mkdtemp()), 5, {"weight": torch.ones(2)}, {"best": 0.5}, keep=1)
    >>> store.read_note(path)
    {'best': 0.5}
    """
    return _manifest(Path(path))["note"]


# Folders


def _listed(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Checkpoints and temporary folders of killed saves, newest first, each with whether it is complete.

    A checkpoint whose replacement was killed counts unless a checkpoint has its name."""
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    entries = []
    for name in names:
        if whole := NAMED.fullmatch(name):
            entries.append((int(whole[1]), True, name))
        elif left := TEMPORARY.fullmatch(name):
            replaced = left[3] == "old"
            if not (replaced and left[1] in names):
                entries.append((int(left[2]), replaced, name))
    return ((folder / name, finished) for _, finished, name in sorted(entries, reverse=True))


def _tidy(folder: Path) -> None:
    """Remove temporary folders of killed saves. A checkpoint whose replacement was killed gets its name back."""
    for entry in folder.iterdir():
        if left := TEMPORARY.fullmatch(entry.name):
            target = folder / left[1]
            if left[3] == "old" and not os.path.lexists(target):
                os.rename(entry, target)
            else:
                _remove(entry)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Remove checkpoints before a step that are not among the newest `keep` - 1 that look complete.

    Later checkpoints stay: the run resumed before them because they are damaged, and it will replace them."""
    kept, gone = 0, []
    for path, _ in _listed(folder):
        number = NAMED.fullmatch(path.name)
        if number is None or int(number[1]) >= step:
            continue
        if kept < keep - 1 and _looks_whole(path):
            kept += 1
        else:
            # Rename before removing, so that a kill leaves no half-removed checkpoint under a checkpoint's name.
            gone.append(path.with_name(f".{path.name}-{uuid4().hex[:8]}"))
            os.rename(path, gone[-1])
    if gone:
        _sync(folder)
    for path in gone:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(folder: Path) -> None:
    """Fsync a folder, so that renames in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Manifests


def _sealed(text: str) -> bytes:
    """A manifest's bytes: `text` has all fields but the first, which is the SHA-256 of the text."""
    rest = text.encode()
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError unless its checksum is right."""
    file = path / MANIFEST
    if not path.is_dir():
        refuse(path, "a checkpoint's folder", "a file" if path.exists() else "no such folder")
    text = read_text(file, expected="a checkpoint's manifest")
    if text.encode() != _sealed(text[len(_sealed("")) :]):
        refuse(file, "the checksum that was written", "another: the file is damaged")
    manifest = parse_json(text, file)
    if manifest.get("version") != VERSION:
        refuse(file, f"version {VERSION}", f"{manifest.get('version')!r:.40}")
    if not all(isinstance(manifest.get(name), dict) for name in ("files", "tensors", "note")):
        refuse(file, "files, tensors and a note", f"{', '.join(manifest)[:80]}")
    return manifest


def _check(path: Path, hashed: slice) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError unless it has exactly the manifest's files, with the right sizes
    and, for the files in the slice `hashed`, the right checksums."""
    manifest = _manifest(path)
    try:
        for name, expected in manifest["files"].items():
            size = check_file(path / name, "a part of the checkpoint").stat().st_size
            if size != expected["bytes"]:
                refuse(path / name, f"{expected['bytes']:,} bytes", f"{size:,}")
        for name in sorted({entry.name for entry in path.iterdir()} - manifest["files"].keys() - {MANIFEST}):
            refuse(path / name, "only the checkpoint's files", "another file")
        for name, expected in list(manifest["files"].items())[hashed]:
            with (path / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected["sha256"]:
                refuse(path / name, "the checksum that was written", "another: the file is damaged")
    except CheckpointError:
        raise
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected files that can be read, got {error}") from error
    return manifest


def _looks_whole(path: Path) -> bool:
    try:
        _check(path, slice(0))
    except CheckpointError:
        return False
    return True


def _compare(path: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks some of the tensors or has them with another shape or dtype; names all of them."""
    wrong = []
    for name, tensor in tensors.items():
        saved: Any = metadata.state_dict_metadata.get(name)
        if saved is None:
            wrong.append(f"no {name!r}")
        elif (saved.size, saved.properties.dtype) != (tensor.shape, tensor.dtype):
            there, here = _shown(saved.size, saved.properties.dtype), _shown(tensor.shape, tensor.dtype)
            wrong.append(f"{name!r} of {there} instead of {here}")
    if wrong:
        refuse(path, "the tensors of this run", "; ".join(wrong[:8]) + (f"; {len(wrong)} in all" if wrong[8:] else ""))


def _shown(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _metadata(path: Path, manifest: dict[str, Any]) -> Metadata:
    """The metadata that torch.distributed.checkpoint needs to read a checkpoint. A chunk's storage data is its file and
    its name there."""
    tensors: dict[str, Any] = {}
    places = {}
    try:
        for name, entry in manifest["tensors"].items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                places[MetadataIndex(name, offsets)] = (chunk["file"], chunk["name"])
                if chunk["file"] not in manifest["files"]:
                    refuse(path / MANIFEST, "tensors in the checkpoint's files", f"{name!r} in {chunk['file']!r:.80}")
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path / MANIFEST}: expected every tensor's type, shape and place, got {error}"
        ) from error
    return Metadata(tensors, storage_data=places)


# Processes


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _together(work: Callable[[], T]) -> list[T]:
    """Run `work` on every process. Returns the results of all; an error on one process is raised on all."""
    result: Any
    try:
        result = work()
    except Exception as error:
        result = error
    results = [result]
    if _grouped():
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
    for outcome in results:
        if isinstance(outcome, Exception):
            raise outcome
    return results


def _cause(failed: CheckpointException) -> BaseException:
    """The first process's error; an OSError (a full disk) of any process comes first."""
    errors = [error for error, _ in failed.failures.values()]
    return next((error for error in errors if isinstance(error, OSError)), errors[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about a single process, and about tensor names that differ between processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled|Detected mismatched keys", UserWarning)
        yield


# Storage


class _Writer(StorageWriter):
    """Storage that torch.distributed.checkpoint writes to: a temporary folder, renamed at the end."""

    def __init__(self, folder: Path, step: int, note: dict[str, Any], keep: int) -> None:
        self.folder, self.step, self.note, self.keep = folder, step, note, keep
        self.target = folder / f"step-{step:08d}"
        self.first = False

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.first = is_coordinator

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            dtype = item.tensor_data and item.tensor_data.properties.dtype
            if dtype not in KINDS:
                kinds = ", ".join(KINDS.values())
                raise ValueError(f"tensors: expected {kinds}, got {dtype or 'no tensor'} as {item.index.fqn!r}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        try:
            json.dumps(self.note)
        except (TypeError, ValueError) as error:
            raise ValueError(f"note: expected what JSON can hold, got {error}") from error
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            _sync(self.folder.parent)
        _tidy(self.folder)
        temporary = f".{self.target.name}-{uuid4().hex[:8]}"
        (self.folder / temporary).mkdir()
        self.temporary = self.folder / temporary
        return [
            replace(plan, storage_data=(temporary, f"part-{rank:05d}-of-{len(plans):05d}.safetensors"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        temporary, file = plan.storage_data
        results = []
        if plan.items:
            size, digest = _write_part(self.folder / temporary / file, plan.items, planner)
            for item in plan.items:
                place = {"file": file, "name": _key(item), "bytes": size, "sha256": digest}
                results.append(WriteResult(item.index, size, place))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        tensors = {}
        saved: dict[str, Any] = metadata.state_dict_metadata
        for name, entry in saved.items():
            chunks = []
            for chunk in entry.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": place["file"], "name": place["name"]}
                )
            tensors[name] = {"dtype": KINDS[entry.properties.dtype], "shape": entry.size, "chunks": chunks}
        fields = {
            "version": VERSION,
            "step": self.step,
            "note": self.note,
            "files": {place["file"]: {part: place[part] for part in ("bytes", "sha256")} for place in places.values()},
            "tensors": tensors,
        }
        with open(self.temporary / MANIFEST, "xb") as file:
            file.write(_sealed(json.dumps(fields)[1:]))
            file.flush()
            os.fsync(file.fileno())
        _check(self.temporary, slice(0))
        _sync(self.temporary)
        if os.path.lexists(self.target):
            os.rename(self.target, self.folder / f".{self.target.name}-old")
        os.rename(self.temporary, self.target)
        _sync(self.folder)
        _tidy(self.folder)
        _prune(self.folder, self.step, self.keep)

    def give_up(self) -> None:
        """Remove the temporary folder of a save that failed."""
        if self.first:
            with suppress(OSError):
                _tidy(self.folder)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "the plan has tensors only"
    return item.tensor_data


def _key(item: WriteItem) -> str:
    """The name of a tensor in its file; the name of a shard has its index ranges."""
    data = _data(item)
    if data.chunk.sizes == data.size:
        return item.index.fqn
    spans = (f"{begin}:{begin + size}" for begin, size in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
    return f"{item.index.fqn}[{', '.join(spans)}]"


def _write_part(path: Path, items: list[WriteItem], planner: SavePlanner) -> tuple[int, str]:
    """Write tensors to a safetensors file, one after another. Returns its size and SHA-256."""
    # The widest dtypes first, so that every tensor is aligned to its item size.
    items = sorted(items, key=lambda item: -_data(item).properties.dtype.itemsize)
    header, end = {}, 0
    for item in items:
        dtype, sizes = _data(item).properties.dtype, _data(item).chunk.sizes
        begin, end = end, end + math.prod(sizes) * dtype.itemsize
        header[_key(item)] = {"dtype": KINDS[dtype], "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        pieces: Iterator[bytes | memoryview] = chain(
            (len(text).to_bytes(8, "little"), text), (_bytes(planner.resolve_data(item)) for item in items)
        )
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return size, digest.hexdigest()


def _bytes(tensor: Any) -> memoryview:
    """A tensor's bytes, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class _Reader(StorageReader):
    """Storage that torch.distributed.checkpoint reads from: the memory-mapped files of a checkpoint."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path, self.metadata = path, metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            file, name = self.metadata.storage_data[item.storage_index]
            wanted.setdefault(file, []).append((name, item))
        for file, items in wanted.items():
            source = open_safetensors(self.path / file)
            for name, item in items:
                saved = source.read(name)
                for axis, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    saved = saved.narrow(axis, offset, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(saved)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
