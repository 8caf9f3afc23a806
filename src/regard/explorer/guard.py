"""Who may call the explorer's server, and what its page may do: checked before anything is read.

A page of another site can send requests to this machine, also through a name of its own that resolves here; it cannot
choose their Host and Origin.
"""

import ipaddress
import socket
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from regard.core.extras import needed_for

with needed_for("the explorer"):
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'"
)
FRAMING = {"Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'", "X-Frame-Options": "DENY"}
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the server is, and what requests may call it."""

    host: str
    port: int
    framed: bool = False
    """Whether other pages may show the page in a frame: a notebook."""

    @property
    def headers(self) -> dict[str, str]:
        """The security headers of every answer."""
        return HEADERS if self.framed else HEADERS | FRAMING

    @property
    def open(self) -> bool:
        """Whether the page needs no token: nobody but this machine's browser can read it, or show it in a frame."""
        return self.loopback and not self.framed

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @cached_property
    def names(self) -> frozenset[str]:
        """The values of Host that are its own."""
        names = {"127.0.0.1", "localhost", "[::1]", _bracketed(self.host)}
        if not self.loopback:
            names |= _names_of_this_machine(self.host)
        # Browsers leave out the default port.
        return frozenset(f"{name}:{self.port}" for name in names) | (frozenset(names) if self.port == 80 else set())

    def url(self, token: str) -> str:
        """What to open in a browser, with the token where the page itself needs it."""
        name = _bracketed(self.host) if self.host not in ("0.0.0.0", "::") else socket.gethostname()
        return f"http://{name}:{self.port}/" + ("" if self.open else f"?token={token}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()


def _names_of_this_machine(host: str) -> set[str]:
    """The names and addresses by which others reach a server on all addresses."""
    names = {socket.gethostname().lower(), socket.getfqdn().lower()}
    for name in [*names, host]:
        try:
            names |= {_bracketed(str(entry[4][0])) for entry in socket.getaddrinfo(name, None)}
        except OSError:
            continue
    return names


class Guard:
    """Refuses foreign requests before anything reads them, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, place: Place) -> None:
        self.app, self.place = app, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                more = [
                    (name.lower().encode(), value.encode())
                    for name, value in self.place.headers.items()
                    if name.lower().encode() not in names
                ]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        reason = self._foreign(scope)
        app = self.app if reason is None else refusal(403, reason)
        await app(scope, receive, guarded)

    def _foreign(self, scope: Scope) -> str | None:
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self.place.names:
            return "host: expected this server's own name, got another"
        origins = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"origin"]
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return "origin: expected this server's own page, got another"
        return None


def refusal(status: int, reason: str) -> JSONResponse:
    """The answer to a request that is refused."""
    # What is left of a refused request's body is not read: the connection ends.
    headers = {"Connection": "close"} if status in (403, 413) else None
    return JSONResponse({"error": reason}, status_code=status, headers=headers)
