"""Files and folders are written to a temporary name and renamed atomically: a reader never finds half of one."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def naming(target: Path, beside: Path | None = None) -> Iterator[None]:
    """Let an OSError name the file that is written: a full disk is told to a write, which knows no name, and a file in
    the temporary folder `beside` is named as it will be in `target`.

    >>> from regard.core.files import naming
    >>> try:
    ...     with naming(Path("run/metrics.jsonl")):
    ...         raise OSError(28, "No space left on device")
    ... except OSError as error:
    ...     print(error.filename)
    run/metrics.jsonl
    """
    try:
        yield
    except OSError as error:
        name = Path(str(error.filename)) if error.filename is not None else None
        if error.errno is None or (name is not None and (beside is None or not name.is_relative_to(beside))):
            raise
        inside = target if name is None or beside is None else target / name.relative_to(beside)
        raise OSError(error.errno, error.strerror, str(inside)) from error


def write(path: str | Path, produce: Callable[[Path], object]) -> Path:
    """Let `produce` write a temporary file next to `path`, then rename it into place; leave nothing on failure."""
    target = Path(path)
    beside = target.with_name(f".{target.stem}-{uuid4().hex[:8]}{target.suffix}")
    try:
        with naming(target, beside):
            produce(beside)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file atomically."""
    return write(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_folder(path: str | Path, produce: Callable[[Path], object]) -> Path:
    """Let `produce` fill a temporary folder next to `path`, then rename it into place; leave nothing on failure.

    A folder that `path` was before stays until the new one is complete.
    """
    target = Path(path).resolve()
    beside, former = (target.with_name(f".{target.name}-{uuid4().hex[:8]}{end}") for end in ("", "-former"))
    beside.mkdir(parents=True)
    try:
        with naming(target, beside):
            produce(beside)
        if target.exists():
            os.replace(target, former)
        os.replace(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    if former.exists():
        shutil.rmtree(former)
    return Path(path)


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Write a matplotlib figure; the suffix chooses the format, and an unknown one is refused before any work."""
    target = Path(path)
    formats = figure.canvas.get_supported_filetypes()
    if target.suffix[1:].lower() not in formats:
        raise ValueError(f"path: expected a picture file ({', '.join(sorted(formats))}), got {str(path)!r}")
    if not target.parent.is_dir():
        raise ValueError(f"path: expected an existing folder, got {str(target.parent)!r}")
    return write(target, lambda beside: figure.savefig(beside))
