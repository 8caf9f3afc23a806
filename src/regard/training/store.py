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
processes; the storage that it writes to is ours (storage.py).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as planned_load
from torch.distributed.checkpoint.state_dict_saver import save as planned_save

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import refuse
from regard.training.checkpoint_folders import check, listed, read_manifest
from regard.training.storage import Reader, Writer, metadata_of

T = TypeVar("T")


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
    writer = Writer(Path(folder), step, note, keep)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            planned_save(dict(tensors), storage_writer=writer, planner=planner)
    except CheckpointException as failed:
        together(writer.give_up)
        error = _cause(failed)
        if isinstance(error, OSError):
            error = OSError(error.errno, f"checkpoint of step {step}: {error.strerror or error}", str(folder))
        raise error from failed
    return writer.target


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose checksums are right, and a sentence for each newer checkpoint that is damaged; None
    if there is no checkpoint. CheckpointError, with all reasons, if there are checkpoints and none is good.

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
    damaged: list[str] = []
    for path, finished in listed(Path(folder)):
        if not finished:
            skipped.append(
                f"Skipped {path}: expected a checkpoint, got the temporary folder of a save that was killed."
            )
            continue
        try:
            check(path, slice(None))
            return path, skipped
        except CheckpointError as error:
            damaged.append(str(error))
            skipped.append(f"Skipped {error}.")
    if damaged:
        refuse(Path(folder), "a checkpoint that can be loaded", f"none: {'; '.join(damaged)}")
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
        manifest.update(check(path, slice(rank, None, world)))
        _compare(path, metadata_of(path, manifest), tensors)
        return manifest["sha256"]

    if len(set(together(ready))) > 1:
        refuse(path, "the same checkpoint on all processes", "different checkpoints")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            planned_load(dict(tensors), storage_reader=Reader(path, metadata_of(path, manifest)), planner=planner)
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
    return read_manifest(Path(path))["note"]


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


# Processes


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def together(work: Callable[[], T]) -> list[T]:
    """Run `work` on every process. Returns the results of all; an error on one process is raised on all.

    >>> from regard.training.store import together
    >>> together(lambda: 7)
    [7]
    """
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
