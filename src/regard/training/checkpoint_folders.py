"""The folder of a run's checkpoints: what is in it, what may be removed, and manifests that say what is whole."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import check_file, parse_json, read_text, refuse

VERSION = 1
MANIFEST = "manifest.json"
NAMED = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.(step-(\d{8,}))-([0-9a-f]{8}|old)")


def listed(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Checkpoints and temporary folders of killed saves, newest first, each with whether it is complete.

    A checkpoint whose replacement was killed counts unless a checkpoint has its name. Other files are ignored."""
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return
    entries = []
    for name in names:
        if whole := NAMED.fullmatch(name):
            entries.append((int(whole[1]), True, name))
        elif left := TEMPORARY.fullmatch(name):
            replaced = left[3] == "old"
            if not (replaced and left[1] in names):
                entries.append((int(left[2]), replaced, name))
    yield from ((folder / name, finished) for _, finished, name in sorted(entries, reverse=True))


def tidy(folder: Path) -> None:
    """Remove temporary folders of killed saves. A checkpoint whose replacement was killed gets its name back."""
    for entry in folder.iterdir():
        if left := TEMPORARY.fullmatch(entry.name):
            target = folder / left[1]
            if left[3] == "old" and not os.path.lexists(target):
                os.rename(entry, target)
            else:
                _remove(entry)


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove checkpoints before a step that are not among the newest `keep` - 1 that look complete.

    Later checkpoints stay: the run resumed before them because they are damaged, and it will replace them."""
    kept, gone = 0, []
    for path, _ in listed(folder):
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
        sync(folder)
    for path in gone:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(folder: Path) -> None:
    """Fsync a folder, so that renames in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Manifests


def sealed(text: str) -> bytes:
    """A manifest's bytes: `text` has all fields but the first, which is the SHA-256 of the text."""
    rest = text.encode()
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError unless its checksum is right, OSError if it cannot be read."""
    file = path / MANIFEST
    if not path.is_dir():
        refuse(path, "a checkpoint's folder", "a file" if path.exists() else "no such folder")
    with _unwrapped():
        text = read_text(file, expected="a checkpoint's manifest")
    if text.encode() != sealed(text[len(sealed("")) :]):
        refuse(file, "the checksum that was written", "another: the file is damaged")
    manifest = parse_json(text, file)
    if manifest.get("version") != VERSION:
        refuse(file, f"version {VERSION}", f"{manifest.get('version')!r:.40}")
    if not all(isinstance(manifest.get(name), dict) for name in ("files", "tensors", "note")):
        refuse(file, "files, tensors and a note", f"{', '.join(manifest)[:80]}")
    return manifest


def check(path: Path, hashed: slice) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError unless it has the manifest's files, with the right sizes and, for
    the files in the slice `hashed` of their sorted names, the right checksums. Other files in its folder (a file
    manager's .DS_Store) are ignored. A file that is there and cannot be read is an OSError: it is not damage, and
    it must not be trained over."""
    manifest = read_manifest(path)
    try:
        for name, expected in manifest["files"].items():
            with _unwrapped():
                size = check_file(path / name, "a part of the checkpoint").stat().st_size
            if size != expected["bytes"]:
                refuse(path / name, f"{expected['bytes']:,} bytes", f"{size:,}")
        for name, expected in sorted(manifest["files"].items())[hashed]:
            with (path / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected["sha256"]:
                refuse(path / name, "the checksum that was written", "another: the file is damaged")
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected files that can be read, got {error}") from error
    return manifest


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the OSError that a CheckpointError was made of."""
    try:
        yield
    except CheckpointError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        # A new error: the cause itself would have a context whose cause it is.
        raise OSError(cause.errno, cause.strerror, cause.filename) from None


def _looks_whole(path: Path) -> bool:
    try:
        check(path, slice(0))
    except CheckpointError:
        return False
    return True
