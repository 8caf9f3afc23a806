"""The command line: parse, call, print.

Results go to standard output, progress and errors to standard error. Exit codes: 0 success, 1 a law is broken or a goal
is missed, 2 an error that the user can fix, 130 interrupted.
"""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def main() -> None:
    """Run the command line: `regard`, or `python -m regard`."""
    try:
        with leaving_at_once():
            from regard.commands.commands import app
        code = app(sys.argv[1:] or ["--help"], prog_name="regard", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        code = _code(error)
    if code == 130:
        print("regard: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _code(error: BaseException) -> int:
    """The exit code for the exception that ended a command, after printing a line about it; bugs of ours are raised."""
    if _is_interrupt(error):
        return 130
    if isinstance(error, ModuleNotFoundError):
        from regard.core.extras import explanation

        if (sentence := explanation(error, "this command")) is None:
            raise error
        return _fail(sentence)
    from regard.commands.commands import Abort, UsageError

    if isinstance(error, Abort):
        return 130
    if isinstance(error, BrokenPipeError):  # the reader has stopped reading: `regard cost | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, UsageError):
        from regard.commands.usage import sentence as usage_error

        return _fail(usage_error(error))
    if isinstance(error, ValueError):
        return _fail(str(error))
    if isinstance(error, FileExistsError) and error.filename:  # from `mkdir`
        return _fail(f"{error.filename}: expected a folder, got a file")
    if isinstance(error, OSError):
        full = error.filename is None and error.errno in (errno.ENOSPC, errno.EFBIG)
        place = f"{error.filename}: " if error.filename is not None else _unwritten() if full else ""
        return _fail(f"{place}{error.strerror}" if error.strerror else str(error))
    raise error


def _unwritten() -> str:
    """What a full disk without a file's name is: standard output, if it cannot be written. Python must not try it again
    at its end."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "standard output: "
    return ""


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception was caused by Ctrl-C: a library may have raised another while handling it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C exit at once while modules are imported, where its exception may be swallowed or replaced."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in a background job, or another handler
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: Any) -> None:
    os.write(2, b"regard: interrupted\n")
    os._exit(130)


def _fail(message: str) -> int:
    print(f"regard: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
