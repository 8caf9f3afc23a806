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
processes; the storage that it writes to is ours (storage.py). A process hashes the file that it writes, and of the
files of a checkpoint that is loaded its share: with more processes, each hashes less.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
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
from regard.training.parallel import grouped, share
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
    with _quiet():
        return _save(folder, step, tensors, note, keep, None)


def _save(folder: Path, step: int, tensors: dict[str, Tensor], note: dict[str, Any], keep: int, group: Any) -> Path:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    writer = Writer(Path(folder), step, note, keep)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        planned_save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as failed:
        together(writer.give_up, group)
        error = _cause(failed)
        if isinstance(error, OSError):
            error = OSError(error.errno, f"checkpoint of step {step}: {error.strerror or error}", str(folder))
        raise error from failed
    return writer.target


class Saver:
    """Saves the checkpoints of a run while it goes on: the tensors are copied, and a thread writes the copies.

    All processes use it, as a context. A save waits for the one before it; an error of a save is raised by the next
    call, on all processes. At the end the last save is waited for, also if there was an error, but not after Ctrl-C:
    then it may be left unfinished, like that of a killed process.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.training import store
    >>> weight, folder = torch.ones(2), Path(tempfile.mkdtemp())
    >>> with store.Saver(folder, keep=2) as saver:
    ...     saver.save(5, {"weight": weight}, {"step": 5})
    ...     _ = weight.zero_()  # training goes on
    >>> store.load(store.newest(folder)[0], {"weight": weight}), weight
    ({'step': 5}, tensor([1., 1.]))
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Saver":
        # Training talks in the default group at the same time.
        self._group = dist.new_group(backend="gloo") if grouped() else None
        self._stack.enter_context(_quiet())  # for all threads: filters of warnings are not a thread's own
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._stack:
            if kind is None:
                self.wait()
            elif issubclass(kind, Exception) and self._thread is not None:
                self._thread.join()

    def save(self, step: int, tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        """Save a step's checkpoint as the function `save` does, when the one before it is written."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=self._write, args=(step, copies, note), daemon=True)
        self._thread.start()

    def _write(self, step: int, tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        try:
            _save(self._folder, step, tensors, note, self._keep, self._group)
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether a save has failed; `wait` raises its error."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until the last save is on the disk; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose checksums are right, and a sentence for each newer checkpoint that is damaged; None
    if there is no checkpoint. CheckpointError, with all reasons, if there are checkpoints and none is good. With a
    process group, all its processes call this, and each hashes its share of the files.

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
    for path, finished in together(lambda: list(listed(Path(folder))))[0]:
        if not finished:
            skipped.append(
                f"Skipped {path}: expected a checkpoint, got the temporary folder of a save that was killed."
            )
            continue
        try:
            together(partial(check, path, share()))
            return path, skipped
        except CheckpointError as error:
            damaged.append(str(error))
            skipped.append(f"Skipped {error}.")
    if damaged:
        refuse(Path(folder), "a checkpoint that can be loaded", f"none: {'; '.join(damaged)}")
    return None, skipped


def load(path: Path, tensors: dict[str, Tensor], *, sound: bool = False) -> dict[str, Any]:
    """Load tensors from a checkpoint, in place and by name. Returns its note.

    With a process group, all its processes call this. The number of processes, and so the shards, may differ from those
    of the save. The checkpoint may have more tensors than are loaded. Its files are hashed, unless it is said to be
    `sound`, because `newest` has just hashed them.

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
        manifest.update(check(path, slice(0) if sound else share()))
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


def together(work: Callable[[], T], group: Any = None) -> list[T]:
    """Run `work` on every process (of a group, or all). Returns the results of all; an error on one process is raised
    on all.

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
    if grouped():
        results = [None] * dist.get_world_size(group)
        dist.all_gather_object(results, result, group)
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
