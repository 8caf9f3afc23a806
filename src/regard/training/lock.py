"""One writer for a run's folder: a lock that ends with its process, however the process ends.

The file .lock in the folder is locked by the operating system and says who writes. It is removed at the end; one that a
killed process leaves locks nothing. The lock is a POSIX lock (`lockf`), which forked workers do not inherit.
"""

import errno
import fcntl
import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from regard.core.files import naming
from regard.training.parallel import Place
from regard.training.store import together

LOCK = ".lock"
_folders: dict[tuple[int, Path], int] = {}
"""The thread that writes into a folder, by process and folder: the operating system locks out other processes only."""


@contextmanager
def one_writer(folder: str | Path) -> Iterator[None]:
    """Lock a folder; ValueError, with the name of the other, if another process or thread has locked it. The thread
    that has locked it may do so again.

    >>> import tempfile
    >>> from regard.training.lock import one_writer, writer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with one_writer(folder):
    ...         inside = writer(folder)
    ...     outside = writer(folder)
    >>> inside, outside
    ('this process', None)
    """
    path = Path(folder).resolve()
    key, thread = (os.getpid(), path), threading.get_ident()
    if _folders.get(key) == thread:
        yield
        return
    if key in _folders:
        _refuse(folder, "this process")
    within = os.open(path, os.O_RDONLY)  # the folder may be renamed while it is locked
    try:
        descriptor = _locked(path)
        if descriptor is None:
            _refuse(folder, _named(path))
        _folders[key] = thread
        try:
            yield
        finally:
            del _folders[key]
            with suppress(OSError):
                os.unlink(LOCK, dir_fd=within)
            os.close(descriptor)
    finally:
        os.close(within)


@contextmanager
def writing(folder: Path, place: Place) -> Iterator[None]:
    """Lock a folder for all processes of a run; all processes call this.

    >>> import tempfile, torch
    >>> from regard.training.lock import writing
    >>> from regard.training.parallel import Place
    >>> with tempfile.TemporaryDirectory() as folder, writing(Path(folder), Place(0, 1, torch.device("cpu"))):
    ...     (Path(folder) / ".lock").exists()
    True
    """
    with ExitStack() as stack:
        together(lambda: stack.enter_context(one_writer(folder)) if place.first else None)
        yield


def writer(folder: str | Path) -> str | None:
    """The process that writes into a folder, in words; None if there is no such process."""
    path = Path(folder).resolve()
    if (os.getpid(), path) in _folders:
        return "this process"
    if not (path / LOCK).is_file():
        return None
    descriptor = _locked(path)
    if descriptor is None:
        return _named(path)
    os.unlink(path / LOCK)
    os.close(descriptor)
    return None


def _locked(path: Path) -> int | None:
    """The descriptor of the locked file; None if another process has locked it."""
    file = path / LOCK
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                return None
            # Some network file systems have no locks; a run there is not worse off than without this file.
            warnings.warn(f"{file}: this file system has no locks ({error.strerror})", stacklevel=4)
        # The process that had the lock may have removed the file between the two calls.
        with suppress(FileNotFoundError):
            if os.stat(file).st_ino == os.fstat(descriptor).st_ino:
                break
        os.close(descriptor)
    words = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC).isoformat(timespec='seconds')}"
    with naming(file):
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{words}: {' '.join(sys.argv)[:400]}\n".encode("utf-8", "replace"))
    return descriptor


def _named(path: Path) -> str:
    """The process that has locked a folder, as it names itself."""
    with suppress(OSError):
        if text := (path / LOCK).read_text(encoding="utf-8", errors="replace").strip():
            return text
    return "another process"


def _refuse(folder: str | Path, name: str) -> NoReturn:
    raise ValueError(f"run: expected a folder that no other process writes, got {folder}, which is written by {name}")
