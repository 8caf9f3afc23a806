"""Storage of checkpoints for torch.distributed.checkpoint, which plans who writes and reads which part of what tensor.

torch's default storage writes a pickle, and its safetensors storage makes a second copy of all tensors in memory and
refuses tied weights.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
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
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import DTYPES, open_safetensors, refuse
from regard.checkpoints.writing import KINDS, header, raw
from regard.training.checkpoint_folders import MANIFEST, VERSION, check, prune, sealed, sync, tidy


class Writer(StorageWriter):
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
            sync(self.folder.parent)
        tidy(self.folder)
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
            file.write(sealed(json.dumps(fields)[1:]))
            file.flush()
            os.fsync(file.fileno())
        check(self.temporary, slice(0))
        sync(self.temporary)
        if os.path.lexists(self.target):
            os.rename(self.target, self.folder / f".{self.target.name}-old")
        os.rename(self.temporary, self.target)
        sync(self.folder)
        tidy(self.folder)
        prune(self.folder, self.step, self.keep)

    def give_up(self) -> None:
        """Remove the temporary folder of a save that failed."""
        if self.first:
            with suppress(OSError):
                tidy(self.folder)


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
    named = [(_key(item), _data(item).properties.dtype, _data(item).chunk.sizes) for item in items]
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        written = (raw(planner.resolve_data(item)) for item in items)  # type: ignore[arg-type]
        pieces: Iterator[bytes | memoryview] = chain([header(named)], written)
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return size, digest.hexdigest()


class Reader(StorageReader):
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


def metadata_of(path: Path, manifest: dict[str, Any]) -> Metadata:
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
