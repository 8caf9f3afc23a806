"""SIGINT and SIGTERM ask a run to stop after the current step; a second signal ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """The signals so far."""

    asked: str | None = None
    """The name of the signal that asked to stop, if one did."""


@contextmanager
def listening() -> Iterator[Signals]:
    """Note signals instead of obeying them. A signal that is ignored, as in a background job, stays ignored.

    >>> import os, signal
    >>> from regard.training.signals import listening
    >>> with listening() as signals:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     signals.asked
    'SIGTERM'
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield signals
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        signals.asked = signal.Signals(number).name
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield signals
    finally:
        restore()
