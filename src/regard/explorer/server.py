"""The explorer's server: the page, and an API that only this page may call.

Other sites that the browser has open must not reach it: the Host and Origin of every request are checked (a foreign
name that resolves to this machine is refused), what computes needs a token that only the page knows, and the page may
load nothing from elsewhere. Bodies are bounded while they are read, models run in one thread, and a computation stops
when nobody waits for its answer any more.
"""

import asyncio
import gzip
import hmac
import secrets
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from regard.core.extras import needed_for
from regard.explorer import requests as asked
from regard.explorer.catalog import Entry, mechanisms_json
from regard.explorer.export import exported_page
from regard.explorer.frames import frame, json_text
from regard.explorer.guard import Guard, Place, refusal
from regard.explorer.pictures import picture_names
from regard.explorer.session import Session
from regard.explorer.streaming import Lanes, Stream
from regard.explorer.why import explain_weight

with needed_for("the explorer"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp

PAGE = Path(__file__).with_name("page")
KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
MOST_BODY = 2**20
MOST_PICTURE_BODY = 8 * 2**20
"""The most bytes of a request that may carry a picture."""
TOKEN_MARK = '<meta name="regard-token" content="">'
COOKIE = "regard_token"


class TooLongError(ValueError):
    """A body that is longer than allowed."""


class Explorer:
    """The routes of the server and what they share."""

    def __init__(self, session: Session, place: Place, entries: Callable[[], Sequence[Entry]], token: str = "") -> None:
        self.session, self.place, self.entries = session, place, entries
        self.token = token or secrets.token_urlsafe(24)
        self.start: dict[str, Any] = {}
        """The model and the input that the page begins with, if the command line named them."""
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="regard-model")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="regard-reader")
        """For what only reads a snapshot, also while a model runs."""
        self.measurer = ThreadPoolExecutor(1, thread_name_prefix="regard-lab")
        """For experiments of the lab, in processes of their own."""
        self.lanes = Lanes()
        streams = {
            "run": (self.run, self.worker),
            "effects": (self.effects, self.worker),
            "generate": (self.generate, self.worker),
            "experiment": (self.experiment, self.measurer),
        }
        values = {
            "models": self.models,
            "head": self.head,
            "scores": self.scores,
            "why": self.why,
            "top": self.top,
            "cost": self.cost,
            "lab": self.lab,
        }
        computed = {"rollout": self.rollout, "export": self.export}
        self.routes = [
            Route("/", self.index),
            Route("/page/{path:path}", self.page),
            *(
                Route(f"/api/{name}", self._streamed(name, call, executor), methods=["POST"])
                for name, (call, executor) in streams.items()
            ),
            *(
                Route(f"/api/{name}", self._answered(call, self.reader), methods=["POST"])
                for name, call in values.items()
            ),
            *(
                Route(f"/api/{name}", self._answered(call, self.worker), methods=["POST"])
                for name, call in computed.items()
            ),
        ]

    def close(self) -> None:
        """End its threads; what is computed now stops at its next check."""
        self.lanes.cancel()
        for executor in (self.worker, self.reader, self.measurer):
            executor.shutdown(wait=False, cancel_futures=True)

    def app(self) -> ASGIApp:
        """The ASGI application."""
        return Guard(Starlette(routes=self.routes, exception_handlers={Exception: _broken}), self.place)

    async def index(self, request: Request) -> Response:
        """The page, with the token in it."""
        shown = request.query_params.get("token") or request.cookies.get(COOKIE, "")
        if not self.place.open and not self._is_token(shown):
            return refusal(403, "token: expected the address that `regard view` printed, got another")
        page = (PAGE / "index.html").read_text(encoding="utf-8")
        page = page.replace(TOKEN_MARK, f'<meta name="regard-token" content="{escape(self.token)}">')
        response = packed(request, page.encode(), KINDS[".html"])
        if not self.place.loopback:
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
        return response

    async def page(self, request: Request) -> Response:
        """A file of the page's folder."""
        root = PAGE.resolve()
        try:
            file = (root / request.path_params["path"]).resolve()
            inside = file.is_relative_to(root) and file.is_file() and file.suffix in KINDS
        except (ValueError, OSError):  # a NUL, or a name that is too long
            inside = False
        if not inside:
            return refusal(404, "page: expected a file of the page, got another")
        return packed(request, file.read_bytes(), KINDS[file.suffix])

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    async def _body(self, request: Request, most: int) -> dict[str, Any]:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise TooLongError(f"body: expected at most {most:,} bytes, got more")
            parts.append(part)
        return asked.parsed(b"".join(parts))

    def _answered(
        self, call: Callable[[dict[str, Any]], Any], executor: ThreadPoolExecutor
    ) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if not self._is_token(request.headers.get("X-Regard-Token", "")):
                return refusal(403, "token: expected the page's token, got another")
            try:
                body = await self._body(request, MOST_BODY)
                result = await asyncio.get_running_loop().run_in_executor(executor, call, body)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return refusal(*refused(error))
            if isinstance(result, bytes):
                return Response(result, media_type="application/octet-stream")
            return Response(json_text(result), media_type="application/json")

        return answer

    def _streamed(
        self, name: str, call: Callable[[dict[str, Any]], Any], executor: ThreadPoolExecutor
    ) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Any:
            if not self._is_token(request.headers.get("X-Regard-Token", "")):
                return refusal(403, "token: expected the page's token, got another")
            try:
                body = await self._body(request, MOST_PICTURE_BODY if name == "run" else MOST_BODY)
                compute = call(body)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return refusal(*refused(error))
            lane = f"{name} {body.get('lane')!r}" if name != "run" or body.get("lane") else None
            return Stream(compute, executor, self.lanes, lane, refused)

        return answer

    def models(self, body: dict[str, Any]) -> Any:
        """The menu."""
        return {
            "models": [entry.to_json() for entry in self.entries()],
            "mechanisms": mechanisms_json(),
            "pictures": picture_names(),
            "start": self.start,
            "version": version("regard"),
        }

    def run(self, body: dict[str, Any]) -> Any:
        """A pass."""
        request = asked.run_request(body)
        return lambda emit, check: self.session.run(request, emit, check)

    def effects(self, body: dict[str, Any]) -> Any:
        """Every head silenced once."""
        self.session.snapshot(body.get("run"))
        return lambda emit, check: self.session.effects(body.get("run"), emit, check)

    def generate(self, body: dict[str, Any]) -> Any:
        """New tokens, step by step."""
        steps = asked.number_of(body, "steps", least=1, most=asked.MOST_STEPS)
        prefix = asked.numbers_of(body, "prefix") if body.get("prefix") else None
        self.session.snapshot(body.get("run"))
        return lambda emit, check: self.session.generate(body.get("run"), steps, prefix or (), emit, check)

    def lab(self, body: dict[str, Any]) -> Any:
        """The experiments of the lab."""
        with needed_for("the lab"):
            from regard.explorer.lab import lab_json, prepare
        self.measurer.submit(prepare)
        return lab_json()

    def experiment(self, body: dict[str, Any]) -> Any:
        """An experiment of the lab with the page's parameters."""
        with needed_for("the lab"):
            from regard.explorer.lab import asked_experiment, measured
        name, arguments = asked_experiment(body)
        return lambda emit, check: emit(frame(measured(name, arguments, check)))

    def cost(self, body: dict[str, Any]) -> Any:
        """What a head costs over the length."""
        head = asked.number_of(body, "head") if body.get("head") is not None else 0
        return self.session.cost(body.get("run"), asked.number_of(body, "layer"), head)

    def rollout(self, body: dict[str, Any]) -> bytes:
        """Attention rollout."""
        return self.session.rollout(body.get("run"))

    def export(self, body: dict[str, Any]) -> bytes:
        """A run as one HTML file."""
        return exported_page(self.session.snapshot(body.get("run")), full=asked.flag_of(body, "full")).encode()

    def head(self, body: dict[str, Any]) -> bytes:
        """The weights of a head."""
        return self.session.head(body.get("run"), asked.number_of(body, "layer"), _head(body), _window(body))

    def scores(self, body: dict[str, Any]) -> bytes:
        """The products of queries and keys of a head."""
        layer, head = asked.number_of(body, "layer"), asked.number_of(body, "head")
        return self.session.scores(body.get("run"), layer, head, _window(body))

    def why(self, body: dict[str, Any]) -> Any:
        """The numbers behind a weight."""
        layer, head, query, key = (asked.number_of(body, name) for name in ("layer", "head", "query", "key"))
        return explain_weight(self.session.snapshot(body.get("run")), layer, head, query, key, _window(body))

    def top(self, body: dict[str, Any]) -> Any:
        """The likeliest tokens at a position."""
        position = asked.number_of(body, "position")
        return {"position": position, "top": self.session.snapshot(body.get("run")).top(position)}


def packed(request: Request, content: bytes, kind: str) -> Response:
    """A file of the page, compressed where the browser takes that."""
    headers = {"Content-Type": kind, "Vary": "Accept-Encoding"}
    if "gzip" not in request.headers.get("Accept-Encoding", ""):
        return Response(content, headers=headers)
    return Response(_compressed(content), headers={**headers, "Content-Encoding": "gzip"})


@lru_cache(maxsize=128)
def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def _head(body: dict[str, Any]) -> int | str:
    head = body.get("head")
    return str(head) if head in ("mean", "max") else asked.number_of(body, "head")


def _window(body: dict[str, Any]) -> int | None:
    return asked.number_of(body, "window") if body.get("window") is not None else None


def refused(error: BaseException) -> tuple[int, str]:
    """The status and the sentence for an error: a user's mistake, or ours, which is also printed."""
    if isinstance(error, TooLongError):
        return 413, str(error)
    if isinstance(error, ValueError | ModuleNotFoundError):
        return 400, " ".join(str(error).split())[:600]
    traceback.print_exception(error, file=sys.stderr)
    return 500, f"the server failed: {type(error).__name__}"


async def _broken(request: Request, error: Exception) -> Response:
    return refusal(*refused(error))


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 is any free one. ValueError if there is none."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(kind, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except socket.gaierror as error:
        opened.close()
        raise ValueError(f"host: expected an address of this machine, got {host!r}: {error.strerror}") from None
    except OSError as error:
        opened.close()
        raise ValueError(f"port: expected a free port of {host}, got {port}: {error.strerror}") from None
    return opened


def serving(app: ASGIApp) -> "uvicorn.Server":
    """A server for the application."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=64,
            timeout_graceful_shutdown=1,
        )
    )
