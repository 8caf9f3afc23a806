"""Commands in separate processes, none of which outlives its test.

After PATIENCE seconds a process is killed: reading from it ends, and its exit code is -9. On an overloaded machine the
patience is longer.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 60
FORKS = """
import contextlib, io, json, os, sys, traceback
import torch
for line in sys.stdin:
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        answer = None
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                scope = {}
                exec(json.loads(line), scope)
                answer = scope.get("answer")
        except BaseException:
            answer = traceback.format_exc()
        with open(write, "w") as out:
            json.dump([answer, sorted(sys.modules)], out)
        os._exit(0)
    os.close(write)
    with open(read) as done:
        print(done.read(), flush=True)
    os.wait()
"""
"""Runs each line, code as JSON, in a separate fork; prints its `answer` and its modules."""


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start `python …`, with pipes for the standard streams that the options do not name."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *arguments], **{**pipes, **options}) as child:
        ended = threading.Event()
        threading.Thread(target=_watch, args=(child, ended), daemon=True).start()
        try:
            yield child
        finally:
            ended.set()
            child.kill()


def finished(*arguments: str, typed: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python …` to its end, with `typed` as its standard input."""
    with started(*arguments, **options) as child:
        out, err = child.communicate(typed)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def _watch(child: subprocess.Popen[str], ended: threading.Event) -> None:
    began = time.monotonic()
    while not ended.wait(1):
        waiting = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        if time.monotonic() - began > PATIENCE * waiting:
            child.kill()
            return


@contextmanager
def forks(before: str = "") -> Iterator[Callable[[str], tuple[Any, set[str]]]]:
    """Run code in forks of one process that has run `before` and imported torch. The function that it yields returns
    `answer` and the imported modules."""
    command = [sys.executable, "-c", before + FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        lines, answers = parent.stdin, parent.stdout

        def run(code: str) -> tuple[Any, set[str]]:
            print(json.dumps(code), file=lines, flush=True)
            answer, modules = json.loads(answers.readline())
            return answer, set(modules)

        yield run
        lines.close()
