"""The log of a run: metrics.jsonl, with a line for each step and each evaluation, and other loggers beside it.

A logger is what has `log` and `close`: metrics.jsonl, TensorBoard's file, Weights & Biases, and those that `train` is
called with. The first two are written without buffers: a full disk is an error of the write that meets it, which names
the file, and nothing is left to be written when the process ends.
"""

import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from regard.core.files import naming, write_text
from regard.training import run_file
from regard.training.fingerprint import digest
from regard.training.settings import Settings

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


class Logger(Protocol):
    """What gets the numbers of a run, in rank 0. A step that is computed again after a kill is logged again.

    >>> from regard.training.metrics import Logger
    >>> class Printed:
    ...     def log(self, step, values, kind):
    ...         print(step, kind, values["loss"])
    ...     def close(self):
    ...         pass
    >>> logger: Logger = Printed()
    >>> logger.log(3, {"loss": 0.5}, "training")
    3 training 0.5
    """

    def log(self, step: int, values: Mapping[str, float], kind: Literal["training", "evaluation", "test"]) -> None:
        """The numbers of a step, those of an evaluation after it, or those of the test at the end."""

    def close(self) -> None:
        """The run has ended, or was stopped."""


def check_loggers(settings: Settings) -> None:
    """Raise ValueError for a logger whose package is missing, before any work.

    >>> check_loggers(Settings(batch_size=8))
    """
    if settings.wandb and find_spec("wandb") is None:
        raise ValueError("wandb: expected its package, got none: pip install wandb")


class Metrics:
    """The loggers of a run that continues after `step`. Records of later steps, which are computed again after a kill,
    are removed from metrics.jsonl, and the test, which is measured at the end."""

    def __init__(self, folder: Path, step: int, loggers: Sequence[Logger] = (), *, wandb: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = _Lines(folder, step)
        self._loggers: list[Logger] = [self._lines, *loggers]
        if (board := _board(folder / "tensorboard", step)) is not None:
            self._loggers.append(board)
        if wandb:
            self._loggers.append(_WeightsAndBiases(folder))

    def log(self, step: int, values: Mapping[str, float], kind: Literal["training", "evaluation", "test"]) -> None:
        """Tell all loggers."""
        for logger in self._loggers:
            logger.log(step, values, kind)

    def flush(self) -> None:
        """Write metrics.jsonl to the disk."""
        self._lines.flush()

    def close(self) -> None:
        """Close all loggers, also if one of them cannot."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close)


class _Lines:
    """metrics.jsonl."""

    def __init__(self, folder: Path, step: int) -> None:
        kept = [record for record in read_metrics(folder) if record["step"] <= step and "test" not in record]
        write_text(folder / FILE, "".join(map(_line, kept)))
        self._file = _Log(folder / FILE)
        self.flush, self.close = self._file.flush, self._file.close

    def log(self, step: int, values: Mapping[str, float], kind: str) -> None:
        record = {"step": step, **(values if kind == "training" else {kind: values})}
        self._file.write(_line(record).encode())


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
    """A file of TensorBoard's events. torch's writer has a thread, whose errors could not be caught."""

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

    def log(self, step: int, values: Mapping[str, float], kind: str) -> None:
        """Write the numbers of a step."""
        value_of = self._summaries.Summary.Value
        rows = [value_of(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
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


class _WeightsAndBiases:
    """A run of Weights & Biases in the folder wandb/: offline, unless WANDB_MODE says otherwise. `wandb sync` uploads
    it. A resumed run has the same id."""

    def __init__(self, folder: Path) -> None:
        import wandb

        values = run_file.read(folder)
        begun = folder / "environment.json"  # tells the run from others, and stays when it resumes
        self._run = wandb.init(
            project=f"regard-{values.get('task', 'training')}",
            name=folder.resolve().name,
            id=digest(str(folder.resolve()), begun.read_text(encoding="utf-8") if begun.exists() else "")[:16],
            resume="allow",
            dir=folder,
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=values,
            settings=wandb.Settings(console="off"),  # what a command prints stays its own
        )

    def log(self, step: int, values: Mapping[str, float], kind: str) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
