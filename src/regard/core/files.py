"""Files are written to a temporary name and renamed atomically, so that a reader never finds half a file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(path: str | Path, produce: Callable[[Path], object]) -> Path:
    """Let `produce` write a temporary file next to `path`, then rename it into place; leave nothing on failure."""
    target = Path(path)
    beside = target.with_name(f".{target.stem}-{uuid4().hex[:8]}{target.suffix}")
    try:
        produce(beside)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file atomically."""
    return write(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Write a matplotlib figure; the suffix chooses the format, and an unknown one is refused before any work."""
    target = Path(path)
    formats = figure.canvas.get_supported_filetypes()
    if target.suffix[1:].lower() not in formats:
        raise ValueError(f"path: expected a picture file ({', '.join(sorted(formats))}), got {str(path)!r}")
    if not target.parent.is_dir():
        raise ValueError(f"path: expected an existing folder, got {str(target.parent)!r}")
    return write(target, lambda beside: figure.savefig(beside))
