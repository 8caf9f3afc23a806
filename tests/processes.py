"""Commands in processes of their own, none of which outlives its test.

After PATIENCE seconds a process is killed: reading from it ends, and its exit code, -9, says what happened. The
seconds are longer on a machine that has more to do than cores.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 30


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`python …`, with pipes for what the options do not name."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *arguments], **{**pipes, **options}) as child:
        ended = threading.Event()
        threading.Thread(target=_watch, args=(child, ended), daemon=True).start()
        try:
            yield child
        finally:
            ended.set()
            child.kill()


def finished(*arguments: str, given: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """`python …` to its end."""
    with started(*arguments, **options) as child:
        out, err = child.communicate(given)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def _watch(child: subprocess.Popen[str], ended: threading.Event) -> None:
    began = time.monotonic()
    while not ended.wait(1):
        waiting = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        if time.monotonic() - began > PATIENCE * waiting:
            child.kill()
            return
