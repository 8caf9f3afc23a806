"""Answers that are sent while they are computed, in one thread for all; what nobody waits for any more stops."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from regard.core.extras import needed_for
from regard.explorer.frames import frame

with needed_for("the explorer"):
    from starlette.responses import JSONResponse
    from starlette.types import Receive, Scope, Send

Emit = Callable[[bytes], None]
Check = Callable[[], None]
Compute = Callable[[Emit, Check], None]
Refused = Callable[[BaseException], tuple[int, str]]


class CancelledError(Exception):
    """Raised in a computation that nobody waits for any more."""


class Ticket:
    """A computation that can be cancelled."""

    def __init__(self) -> None:
        self._cancelled = Event()

    def cancel(self) -> None:
        """Let the computation stop at its next check."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise CancelledError after `cancel`."""
        if self._cancelled.is_set():
            raise CancelledError


class Lanes:
    """Lanes of computations: a newer computation stops those before it in its lane."""

    def __init__(self) -> None:
        self._newest: dict[str, Ticket] = {}
        self._all: set[Ticket] = set()

    def cancel(self) -> None:
        """Cancel all computations."""
        for ticket in list(self._all):
            ticket.cancel()

    def enter(self, lane: str | None) -> Ticket:
        """A new computation, which cancels the one before it in its lane."""
        ticket = Ticket()
        self._all.add(ticket)
        if lane is not None:
            if lane in self._newest:
                self._newest[lane].cancel()
            self._newest[lane] = ticket
        return ticket

    def leave(self, lane: str | None, ticket: Ticket) -> None:
        """A computation ended."""
        self._all.discard(ticket)
        if lane is not None and self._newest.get(lane) is ticket:
            del self._newest[lane]


class Stream:
    """An answer in frames: an ASGI application for one request, whose body has been read.

    An error before the first frame is an answer with its status; after it, the last frame says what went wrong.
    """

    def __init__(
        self, compute: Compute, worker: ThreadPoolExecutor, lanes: Lanes, lane: str | None, refused: Refused
    ) -> None:
        self.compute, self.worker, self.lanes, self.lane, self.refused = compute, worker, lanes, lane, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        ticket = self.lanes.enter(self.lane)

        def emit(content: bytes) -> None:
            ticket.check()
            loop.call_soon_threadsafe(parts.put_nowait, content)

        def work() -> None:
            last: BaseException | None = None
            try:
                ticket.check()
                self.compute(emit, ticket.check)
            except BaseException as error:  # sent to the page, or dropped with it
                last = error
            loop.call_soon_threadsafe(parts.put_nowait, last)

        self.worker.submit(work)
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await self._send(scope, receive, send, parts, gone)
        finally:
            ticket.cancel()
            gone.cancel()
            self.lanes.leave(self.lane, ticket)

    async def _send(self, scope: Scope, receive: Receive, send: Send, parts: Any, gone: "asyncio.Task[None]") -> None:
        begun = False
        while True:
            waiting = asyncio.create_task(parts.get())
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                return
            part = waiting.result()
            if isinstance(part, BaseException):
                cancelled = isinstance(part, CancelledError)
                status, reason = (409, "run: a newer one took its place") if cancelled else self.refused(part)
                if not begun:
                    await JSONResponse({"error": reason}, status_code=status)(scope, receive, send)
                    return
                part = frame({"type": "error", "error": reason})
                await send({"type": "http.response.body", "body": part, "more_body": False})
                return
            if not begun:
                begun = True
                headers = [(b"content-type", b"application/octet-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": part or b"", "more_body": part is not None})
            if part is None:
                return


async def _disconnected(receive: Receive) -> None:
    """Returns when the other side has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
