"""SIGINT and SIGTERM ask a run to stop after its step; a second one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """What was asked."""

    asked: str | None = None


@contextmanager
def listening() -> Iterator[Signals]:
    """Within this, signals are noted instead of obeyed; those that are ignored, as in a background job, stay so.

    >>> import os, signal
    >>> from regard.training.signals import listening
    >>> with listening() as signals:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     signals.asked
    'SIGTERM'
    """
    found = Signals()
    if threading.current_thread() is not threading.main_thread():  # where Python gives none
        yield found
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def note(number: int, frame: FrameType | None) -> None:
        found.asked = signal.Signals(number).name
        for one, handler in before.items():
            signal.signal(one, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield found
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
