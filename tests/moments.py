"""Interrupt a command at many moments of its life, the same ones each time.

The command runs in this process. At every so many calls of Python functions, and at the calls of those named, the
process is copied (fork) and the copy gets SIGINT there, as from Ctrl-C. What each copy says and its exit code are
printed as JSON: `python tests/moments.py 40000 run_engine -- check elu --law weights`.
"""

import json
import os
import signal
import sys
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

PATIENCE = 5
"""Seconds of the processor after which a copy that goes on in spite of its interrupt is ended."""


class Moments:
    """Counts calls, makes copies, and keeps how each of them ended."""

    def __init__(self, every: int, names: list[str]) -> None:
        self.every, self.names, self.calls = every, names, 0
        self.endings: list[dict[str, Any]] = []
        self.is_copy = self.due = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.calls += 1
            self.due = self.due or self.calls % self.every == 0
            code = frame.f_code
            # Python itself drops an exception that is raised while it closes a generator, or in what it calls when it
            # collects garbage: the next call serves.
            if code.co_name in self.names or (self.due and not code.co_flags & CO_GENERATOR and not _collecting(frame)):
                self.due = False
                self._interrupt(f"call {self.calls}, {code.co_name} in {code.co_filename}")

    def _interrupt(self, moment: str) -> None:
        reader, writer = os.pipe()
        copy = os.fork()
        if copy == 0:
            sys.setprofile(None)
            self.is_copy = True
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            signal.setitimer(signal.ITIMER_PROF, PATIENCE)
            os.kill(os.getpid(), signal.SIGINT)
            return
        os.close(writer)
        with open(reader, encoding="utf-8") as output:
            text = output.read()
        _, status = os.waitpid(copy, 0)
        self.endings.append({"moment": moment, "code": os.waitstatus_to_exitcode(status), "said": text})


def _collecting(frame: FrameType | None) -> bool:
    """Whether a frame is within a callback of the garbage collector (hypothesis times it by one)."""
    while frame is not None:
        if frame.f_code.co_name == "gc_callback":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    end = sys.argv.index("--")
    moments = Moments(int(sys.argv[1]), sys.argv[2:end])
    import hypothesis  # noqa: F401  -- not under test, and most of the calls (tests/test_imports.py interrupts torch's)
    import torch  # noqa: F401

    from regard.commands import main

    sys.argv = ["regard", *sys.argv[end + 1 :]]
    sys.setprofile(moments)
    try:
        main()
    except SystemExit as ended:
        sys.setprofile(None)
        if moments.is_copy:
            raise
        print(json.dumps({"code": ended.code, "endings": moments.endings}))


if __name__ == "__main__":
    main()
