"""A server in a thread of this process, for the live page in a notebook.

The page is in a frame of the notebook's page, whose address the server does not know. Any page may frame it, but
only with its address, which has the token; without it there is no page to frame.
"""

import threading
import time
from collections.abc import Sequence

from regard.core.extras import needed_for
from regard.explorer.catalog import Entry
from regard.explorer.guard import Place
from regard.explorer.requests import input_json
from regard.explorer.session import Session
from regard.explorer.subject import Input

with needed_for("the explorer"):
    from regard.explorer.server import Explorer, listen, serving

PATIENCE = 30.0
"""Seconds in which a server starts."""


class Background:
    """The explorer's server on a free port of the loopback address, until `close` or the end of this process.

    >>> import urllib.request
    >>> entry = Entry(name="mine", title="mine", kind="text", example=None)
    >>> server = Background(Session(), [entry], "mine", None)
    >>> "regard-token" in urllib.request.urlopen(server.url).read().decode()
    True
    >>> server.close()
    """

    def __init__(self, session: Session, entries: Sequence[Entry], name: str, chosen: Input | None) -> None:
        self._socket = listen("127.0.0.1", 0)
        place = Place(host="127.0.0.1", port=self._socket.getsockname()[1], framed=True)
        self._explorer = Explorer(session, place, lambda: entries)
        self._explorer.start = {"model": name} | ({} if chosen is None else {"input": input_json(chosen)})
        self.url = place.url(self._explorer.token)
        """The page's address, token included."""
        self._server = serving(self._explorer.app())
        options = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=options, name="regard-view", daemon=True)
        self._thread.start()
        begun = time.monotonic()
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() - begun > PATIENCE:
                raise RuntimeError("view: expected a server that starts, got none; without live=True there is none")
            time.sleep(0.01)

    def close(self) -> None:
        """End the server; computations stop at their next check."""
        self._server.should_exit = True
        self._thread.join(10)
        self._explorer.close()
        self._socket.close()
