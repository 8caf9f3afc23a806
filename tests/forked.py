"""Commands in real processes that start at once: forks of a process that has imported torch and the training code.

A fork can be killed, limited and interrupted like any process, and ends like one. Its parent has computed nothing, so
that there are no threads that a fork would lack.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PARENT = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import regard.commands.train, regard.training.curves, regard.training.loop, regard.training.runs
from tensorboard.compat.proto import event_pb2
from regard.training.recipes import bert, classify, lm, translate, vision
regard.training.loop.write_curves = lambda *_: None  # most of the time of a small run
print("ready", flush=True)
asked = None
for line in sys.stdin:
    asked = json.loads(line)
    if "poll" in asked:
        child, status = os.waitpid(asked["poll"], os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if child else "running", flush=True)
        asked = None
        continue
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    asked = None
if asked is not None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(descriptor, target)
    os.chdir(asked["cwd"])
    os.environ.update(asked["environment"])
    exec(asked["code"])
"""
COMMAND = """
{before}
sys.argv = ["regard", *{words!r}]
from regard.commands import main
main()
"""


class Child:
    """A fork: its process id and its output."""

    def __init__(self, parent: "Forks", pid: int, out: Path) -> None:
        self.parent, self.pid, self.out = parent, pid, out
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and (answer := self.parent.ask({"poll": self.pid})) != "running":
            self.returncode = int(answer)
        return self.returncode

    def wait(self, timeout: float = 120) -> int:
        """Wait for its end; subprocess.TimeoutExpired after `timeout` seconds."""
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.out.read_text() if self.out.exists() else ""


class Forks:
    """The parent of the forks."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lock = process, threading.Lock()
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, request: dict[str, object]) -> str:
        assert self.process.stdin is not None
        with self.lock:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return self._line()

    def run(self, code: str, out: Path, *, cwd: Path, environment: dict[str, str] | None = None) -> Child:
        """Run code in a fork, whose output goes to the file `out`."""
        request = {"code": code, "out": str(out), "cwd": str(cwd), "environment": environment or {}}
        return Child(self, int(self.ask(request)), out)

    def ranks(self, count: int, code: str, folder: Path) -> list[str]:
        """Run code in `count` forks, the ranks of a process group; returns what each of them printed."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        children = []
        for rank in range(count):
            environment = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            out = folder / f"rank-{rank}-of-{count}-{port}.txt"
            children.append(self.run(code, out, cwd=folder, environment=environment))
        while None in (codes := [child.poll() for child in children]) and not any(codes):
            time.sleep(0.02)
        for child in children:
            if child.poll() is None:  # it waits for one that has failed
                os.kill(child.pid, signal.SIGKILL)
        assert not any(codes), "\n".join(child.text for child in children)[-4000:]
        return [child.text for child in children]

    def regard(self, words: Sequence[str], out: Path, *, cwd: Path, before: str = "") -> Child:
        """Run `regard …` in a fork, after the code `before`."""
        return self.run(COMMAND.format(before=before, words=[*map(str, words)]), out, cwd=cwd)


@contextmanager
def forks() -> Iterator[Forks]:
    """Start the parent of forks."""
    command = [sys.executable, "-c", PARENT]
    folder = str(Path(__file__).parent)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            yield Forks(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
