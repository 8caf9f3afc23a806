"""The log of a run: metrics.jsonl, with a line for each step and each evaluation, and TensorBoard files."""

import json
import os
from pathlib import Path
from typing import Any

from regard.core.files import write_text

FILE = "metrics.jsonl"


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, in order. A last line that a kill cut short is left out.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard.training.metrics import read_metrics
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\\n{"step": 2, "lo')
    ...     read_metrics(folder)
    [{'step': 1, 'loss': 2.5}]
    """
    path = Path(folder) / FILE
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class Metrics:
    """The open log files of a run that continues after `step`. Records of later steps, which are computed again after
    a kill, are removed."""

    def __init__(self, folder: Path, step: int) -> None:
        kept = [record for record in read_metrics(folder) if record["step"] <= step]
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._board = _board(folder / "tensorboard", step)

    def add(self, values: dict[str, Any]) -> None:
        """Write a record."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board is not None:
            shown = values.get("evaluation") or {name: values[name] for name in values if name != "step"}
            kind = "evaluation" if "evaluation" in values else "training"
            for name, value in shown.items():
                self._board.add_scalar(f"{kind}/{name}", value, values["step"])

    def flush(self) -> None:
        """Write everything to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path, step: int) -> Any:
    """TensorBoard's writer, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
