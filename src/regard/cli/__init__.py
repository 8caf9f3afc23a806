"""The command line: parse, call, print.

Results go to standard output, progress and errors to standard error. Exit codes: 0 all is well, 1 a law is broken or a
goal is missed, 2 something the user can put right, 130 interrupted.
"""

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
            from regard.cli.commands import Abort, UsageError, app
        try:
            code = app(sys.argv[1:] or ["--help"], prog_name="regard", standalone_mode=False)
            sys.stdout.flush()
        except UsageError as error:
            code = _fail(error.format_message())  # type: ignore[attr-defined]
        except Abort:
            code = 130
    except BrokenPipeError:  # the reader has seen enough: `regard cost | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except ValueError as error:
        code = _fail(str(error))
    except OSError as error:
        code = _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        print("regard: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the program while modules are imported: there an exception can be swallowed or change its type."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in a script's background job, or somebody else's
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
