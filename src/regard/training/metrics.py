"""The log of a run: metrics.jsonl, with a line for each step and each evaluation, and a TensorBoard file.

Both are written without buffers: a full disk is an error of the write that meets it, which names the file, and nothing
is left to be written when the process ends.
"""

import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.core.files import naming, write_text

FILE = "metrics.jsonl"


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, in order. A last line that a kill cut short is left out; null becomes NaN.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard.training.metrics import read_metrics
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "metrics.jsonl").write_text('{"step": 1, "loss": null}\\n{"step": 2, "lo')
    ...     read_metrics(folder)
    [{'step': 1, 'loss': nan}]
    """
    path = Path(folder) / FILE
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(with_nan(json.loads(line)))
        except ValueError:
            break
    return records


def without_nan(values: Any) -> Any:
    """Values for JSON, which has no NaN and no infinity: null in their place, in dicts too.

    >>> without_nan({"loss": math.nan, "evaluation": {"perplexity": math.inf, "accuracy": 0.5}})
    {'loss': None, 'evaluation': {'perplexity': None, 'accuracy': 0.5}}
    """
    if isinstance(values, Mapping):
        return {name: without_nan(value) for name, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def with_nan(values: Any) -> Any:
    """Numbers from JSON that `without_nan` wrote: NaN for null.

    >>> with_nan({"loss": None, "step": 3})
    {'loss': nan, 'step': 3}
    """
    if isinstance(values, Mapping):
        return {name: with_nan(value) for name, value in values.items()}
    return math.nan if values is None else values


class Metrics:
    """The open log files of a run that continues after `step`. Records of later steps, which are computed again after
    a kill, are removed."""

    def __init__(self, folder: Path, step: int) -> None:
        kept = [record for record in read_metrics(folder) if record["step"] <= step]
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, "".join(map(_line, kept)))
        self._file = _Log(folder / FILE)
        self._board = _board(folder / "tensorboard", step)

    def add(self, values: dict[str, Any]) -> None:
        """Write a record."""
        self._file.write(_line(values).encode())
        if self._board is not None:
            shown = values.get("evaluation") or {name: values[name] for name in values if name != "step"}
            kind = "evaluation" if "evaluation" in values else "training"
            self._board.add(values["step"], {f"{kind}/{name}": value for name, value in shown.items()})

    def flush(self) -> None:
        """Write everything to the disk."""
        self._file.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(without_nan(record), allow_nan=False) + "\n"


class _Log(io.RawIOBase):
    """A file that grows. A write is complete or raises an OSError that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = path.open("ab", buffering=0)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        with naming(self.path):
            while view:
                view = view[self._raw.write(view) or 0 :]
        return len(data)

    def flush(self) -> None:
        if not self._raw.closed:
            with naming(self.path):
                os.fsync(self._raw.fileno())

    def close(self) -> None:
        self._raw.close()


class _Board:
    """A file of TensorBoard's events. torch's writer has a thread, whose errors nobody could catch."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summaries = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._log = _Log(folder / name)
        self._records = RecordWriter(self._log)
        self._write(file_version="brain.Event:2")
        if step:  # what an earlier file has of later steps is computed again
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=step + 1, session_log=start)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step."""
        rows = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summaries.Summary(value=rows))

    def _write(self, **event: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **event).SerializeToString())

    def close(self) -> None:
        self._log.close()


def _board(folder: Path, step: int) -> _Board | None:
    """TensorBoard's file, if it is installed."""
    try:
        return _Board(folder, step)
    except ImportError:
        return None
