"""Checkpoints of a run: there whole or not at all, checked before they are used, and never a pickle.

    checkpoints/
      step-00000100/
        part-00000-of-00002.safetensors    what the first process wrote: its shards, its share of what all hold alike
        part-00001-of-00002.safetensors
        manifest.json                      where every tensor lies, every file's size and SHA-256, the run's note
      .step-00000105-3f2a9c1e/             what a killed save left; the next save removes it

Everything is written beside, flushed to the disk, the manifest last, and then renamed: a kill at any moment leaves the
checkpoints that were there. torch.distributed.checkpoint plans who writes and who reads which part of which tensor, and
carries errors to all processes. The storage is our own: its usual one keeps a pickle, and its safetensors one makes a
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
BESIDE = re.compile(r"\.(step-(\d{8,}))-([0-9a-f]{8}|old)")
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


def save(folder: Path, step: int, tensors: dict[str, Tensor], note: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of a step, then remove all older ones but the newest `keep` - 1 that look whole.

    With a process group, all its processes call this and see one folder. Plain tensors are the same on all of them, or
    have a name of their own; DTensors are written shard by shard. The note is the first process's. What fails on one
    process raises on all, and leaves the checkpoints that were there.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.training import store
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (5, 10, 15):
    ...     path = store.save(folder, step, {"weight": torch.ones(2) * step}, {"step": step}, keep=2)
    >>> path.name, sorted(one.name for one in folder.iterdir())
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
    """The newest checkpoint that is whole, every byte of it, and a sentence for each newer one that is not.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.training import store
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (5, 10):
    ...     path = store.save(folder, step, {"weight": torch.ones(2)}, {}, keep=2)
    >>> (path / "manifest.json").unlink()
    >>> found, skipped = store.newest(folder)
    >>> found.name
    'step-00000005'
    >>> skipped[0].replace(str(folder), "checkpoints")
    "Skipped checkpoints/step-00000010/manifest.json: expected a checkpoint's manifest, got no such file."
    """
    skipped: list[str] = []
    for path, finished in _listed(Path(folder)):
        try:
            if not finished:
                refuse(path, "a checkpoint", "what a save that was stopped left")
            _check(path, slice(None))
            return path, skipped
        except CheckpointError as error:
            skipped.append(f"Skipped {error}.")
    return None, skipped


def load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill tensors in place with what a checkpoint holds under their names, and give its note.

    With a process group, all its processes call this. Shards need not be those that were saved: the number of
    processes may be another one. The checkpoint may hold more names than are asked for.

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
        refuse(path, "the same checkpoint on all processes", "another one on some")
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
    """Checkpoints and what is left of them, newest first, and whether they were finished.

    One that was being replaced when its save was killed counts as long as nothing has its name."""
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    found = []
    for name in names:
        if whole := NAMED.fullmatch(name):
            found.append((int(whole[1]), True, name))
        elif left := BESIDE.fullmatch(name):
            replaced = left[3] == "old"
            if not (replaced and left[1] in names):
                found.append((int(left[2]), replaced, name))
    return ((folder / name, finished) for _, finished, name in sorted(found, reverse=True))


def _tidy(folder: Path) -> None:
    """Remove what killed saves left; a checkpoint that was being replaced gets its name back if nothing has it."""
    for entry in folder.iterdir():
        if left := BESIDE.fullmatch(entry.name):
            target = folder / left[1]
            if left[3] == "old" and not os.path.lexists(target):
                os.rename(entry, target)
            else:
                _remove(entry)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Remove what is older than a step and not among the newest `keep` - 1 that look whole.

    Later ones are left alone: the run went back behind them because they are damaged, and it will replace them."""
    kept, gone = 0, []
    for path, _ in _listed(folder):
        number = NAMED.fullmatch(path.name)
        if number is None or int(number[1]) >= step:
            continue
        if kept < keep - 1 and _looks_whole(path):
            kept += 1
        else:
            # A kill in the midst of removing must leave nothing half-removed under a checkpoint's name.
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
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Manifests


def _sealed(text: str) -> bytes:
    """The manifest whose fields, all but the first one, are this text: the first one is the checksum of the rest."""
    rest = text.encode()
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, if it is as it was written."""
    file = path / MANIFEST
    if not path.is_dir():
        refuse(path, "a checkpoint's folder", "a file" if path.exists() else "no such folder")
    text = read_text(file, expected="a checkpoint's manifest")
    if text.encode() != _sealed(text[len(_sealed("")) :]):
        refuse(file, "what was written", "something else: its checksum differs")
    found = parse_json(text, file)
    if found.get("version") != VERSION:
        refuse(file, f"version {VERSION}", f"{found.get('version')!r:.40}")
    if not all(isinstance(found.get(name), dict) for name in ("files", "tensors", "note")):
        refuse(file, "files, tensors and a note", f"{', '.join(found)[:80]}")
    return found


def _check(path: Path, hashed: slice) -> dict[str, Any]:
    """The manifest of a checkpoint that has the files it says, of the sizes it says; checksums of some of them."""
    manifest = _manifest(path)
    try:
        for name, said in manifest["files"].items():
            size = check_file(path / name, "a part of the checkpoint").stat().st_size
            if size != said["bytes"]:
                refuse(path / name, f"{said['bytes']:,} bytes", f"{size:,}")
        for name in sorted({entry.name for entry in path.iterdir()} - manifest["files"].keys() - {MANIFEST}):
            refuse(path / name, "nothing but the checkpoint's files", "a file that is not one of them")
        for name, said in list(manifest["files"].items())[hashed]:
            with (path / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != said["sha256"]:
                refuse(path / name, "what was written", "something else: its checksum differs")
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
    """Refuse a checkpoint that lacks some of the tensors, or has them in another shape or type; all at once."""
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
    """What torch.distributed.checkpoint wants to know of a checkpoint; a place is a file and a name in it."""
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
    """Do something on every process and give what came of it on each; what fails on one raises on all."""
    found: Any
    try:
        found = work()
    except Exception as error:
        found = error
    results = [found]
    if _grouped():
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, found)
    for one in results:
        if isinstance(one, Exception):
            raise one
    return results


def _cause(failed: CheckpointException) -> BaseException:
    """What went wrong on the first process where something did; a full disk before all else."""
    errors = [error for error, _ in failed.failures.values()]
    return next((error for error in errors if isinstance(error, OSError)), errors[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks that there is one process alone, or that processes have names of their own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled|Detected mismatched keys", UserWarning)
        yield


# Storage


class _Writer(StorageWriter):
    """Where torch.distributed.checkpoint writes: a folder beside, renamed at the end."""

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
        beside = f".{self.target.name}-{uuid4().hex[:8]}"
        (self.folder / beside).mkdir()
        self.beside = self.folder / beside
        return [
            replace(plan, storage_data=(beside, f"part-{rank:05d}-of-{len(plans):05d}.safetensors"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        beside, file = plan.storage_data
        results = []
        if plan.items:
            size, digest = _write_part(self.folder / beside / file, plan.items, planner)
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
        with open(self.beside / MANIFEST, "xb") as file:
            file.write(_sealed(json.dumps(fields)[1:]))
            file.flush()
            os.fsync(file.fileno())
        _check(self.beside, slice(0))
        _sync(self.beside)
        if os.path.lexists(self.target):
            os.rename(self.target, self.folder / f".{self.target.name}-old")
        os.rename(self.beside, self.target)
        _sync(self.folder)
        _tidy(self.folder)
        _prune(self.folder, self.step, self.keep)

    def give_up(self) -> None:
        """Leave nothing of a save that failed."""
        if self.first:
            with suppress(OSError):
                _tidy(self.folder)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "the plan has tensors only"
    return item.tensor_data


def _key(item: WriteItem) -> str:
    """The name of a tensor in its file; a shard's says which part it is."""
    data = _data(item)
    if data.chunk.sizes == data.size:
        return item.index.fqn
    spans = (f"{begin}:{begin + size}" for begin, size in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
    return f"{item.index.fqn}[{', '.join(spans)}]"


def _write_part(path: Path, items: list[WriteItem], planner: SavePlanner) -> tuple[int, str]:
    """Write tensors as a safetensors file, one at a time; gives its size and SHA-256."""
    # The widest numbers first, so that all begin at a multiple of their size.
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
    """A tensor's bytes, without a copy where it lies in one piece on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class _Reader(StorageReader):
    """Where torch.distributed.checkpoint reads: the mapped files of a checkpoint."""

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
