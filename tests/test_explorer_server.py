"""The explorer's server on a real socket: what it answers, whom it refuses, and that it lives on."""

import gzip
import json
import socket
import threading
import time
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import pytest
import torch

import explored

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from regard.explorer.catalog import catalog
from regard.explorer.frames import read_frames
from regard.explorer.guard import Place, is_loopback
from regard.explorer.server import PAGE, Explorer, listen, serving
from regard.explorer.session import Session

TEXT = {"model": "model", "input": {"text": "a b c"}}


class Slow(torch.nn.Module):
    """A module around which a model's passes are counted and take their time."""

    def __init__(self):
        super().__init__()
        self.passes, self.seconds = 0, 0.0

    def hook(self, module, args):
        self.passes += 1
        time.sleep(self.seconds)


@contextmanager
def served(host="127.0.0.1", **changes):
    """A server of a small model, in a thread."""
    model, pace = explored.decoder(num_layers=4), Slow()
    model.register_forward_pre_hook(pace.hook)
    opened = listen("127.0.0.1", 0)
    place = Place(host=host, port=opened.getsockname()[1])
    explorer = Explorer(Session({"model": model}, **changes), place, catalog)
    server = serving(explorer.app())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    explorer.pace = pace
    try:
        yield explorer
    finally:
        server.should_exit = True
        thread.join(10)
        explorer.close()
        opened.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def explorer():
    with served() as running:
        yield running


def ask(explorer, path, body=b"", method="POST", headers=None, token=None, host=None):
    """The status, headers and body of an answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Host": host or f"127.0.0.1:{explorer.place.port}", "X-Regard-Token": token or explorer.token}
    with closing(HTTPConnection("127.0.0.1", explorer.place.port, timeout=30)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**sent, **(headers or {})}.items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(content)))
        connection.endheaders(content)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def alive(explorer):
    status, _, content = ask(explorer, "/api/run", TEXT)
    return status == 200 and next(read_frames(content))[0]["type"] == "run"


def error_of(answer):
    status, _, content = answer
    return status, json.loads(content)["error"]


def new_run(explorer):
    return next(read_frames(ask(explorer, "/api/run", TEXT)[2]))[0]["run"]


def test_the_page_has_the_token_and_may_load_nothing_from_elsewhere(explorer):
    status, headers, content = ask(explorer, "/", method="GET", token="none")
    assert status == 200
    assert f'<meta name="regard-token" content="{explorer.token}">' in content.decode()
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers
    status, headers, content = ask(explorer, "/page/main.js", method="GET", token="none")
    assert (status, headers["Content-Type" if "Content-Type" in headers else "content-type"]) == (
        200,
        "text/javascript; charset=utf-8",
    )
    assert headers["content-security-policy"] == policy


def test_the_page_is_sent_compressed_where_a_browser_takes_it(explorer):
    for path in ("/", "/page/main.js", "/page/style.css", "/page/vendor/uplot.js"):
        plain = ask(explorer, path, method="GET")[2]
        _, headers, content = ask(explorer, path, method="GET", headers={"Accept-Encoding": "gzip, br"})
        assert headers["content-encoding"] == "gzip"
        assert gzip.decompress(content) == plain
    files = [file for file in PAGE.rglob("*.*") if file.suffix in (".js", ".css", ".html")]
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) <= 150_000


def test_every_call_answers(explorer):
    run = new_run(explorer)
    place = {"run": run, "layer": 1}
    for name, body in {
        "models": {},
        "why": {**place, "head": 0, "query": 2, "key": 1},
        "top": {"run": run, "position": 1},
        "cost": place,
    }.items():
        status, headers, content = ask(explorer, f"/api/{name}", body)
        assert (status, headers["content-type"]) == (200, "application/json"), content
        json.loads(content)
    for name, body, kinds in (
        ("head", {**place, "head": "mean"}, {"head"}),
        ("scores", {**place, "head": 1}, {"scores"}),
        ("rollout", {"run": run}, {"rollout"}),
        ("effects", {"run": run}, {"progress", "effects"}),
        ("generate", {"run": run, "steps": 3}, {"step", "run", "layer", "strongest", "labels", "done", "statistics"}),
    ):
        status, headers, content = ask(explorer, f"/api/{name}", body)
        assert (status, headers["content-type"]) == (200, "application/octet-stream"), content
        assert {header["type"] for header, _ in read_frames(content)} == kinds
    status, _, content = ask(explorer, "/api/export", {"run": run, "full": True})
    assert (status, content[:15]) == (200, b"<!doctype html>")


def calls(explorer):
    """The paths of all calls, whatever is added to them."""
    paths = [route.path for route in explorer.routes if route.path.startswith("/api/")]
    assert len(paths) == len(explorer.routes) - 2 >= 13  # besides the page and its files
    return paths


@pytest.mark.parametrize("token", ["wrong", "", "é", "x" * 9000])
def test_without_the_token_nothing_is_computed(explorer, token):
    before = explorer.pace.passes
    headers = {"X-Regard-Token": token.encode("latin-1")}
    for path in calls(explorer):
        status, reason = error_of(ask(explorer, path, TEXT, headers=headers))
        assert (status, reason) == (403, "token: expected the page's token, got another"), path
    assert explorer.pace.passes == before
    assert alive(explorer)


def test_every_call_is_guarded_and_bounded(explorer):
    """Those of the lab's page, too."""
    before = explorer.pace.passes
    for path in calls(explorer):
        assert ask(explorer, path, TEXT, method="GET")[0] == 405
        for headers, host in (
            ({"Origin": "https://evil.example"}, None),
            ({"Origin": "null"}, None),
            ({}, "evil.example"),
        ):
            status, answered, _ = ask(explorer, path, TEXT, headers=headers, host=host)
            assert status == 403, path
            assert answered["content-security-policy"].startswith("default-src 'none'")
        most = 8 * 2**20 if path == "/api/run" else 2**20
        status, reason = error_of(ask(explorer, path, b" " * (most + 1)))
        assert (status, reason) == (413, f"body: expected at most {most:,} bytes, got more"), path
        assert error_of(ask(explorer, path, b"{"))[0] == 400
    assert explorer.pace.passes == before
    assert alive(explorer)


def test_a_foreign_host_is_refused(explorer):
    port = explorer.place.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"localhost.evil.example:{port}"):
        for path, method in (("/", "GET"), ("/api/models", "POST"), ("/page/main.js", "GET")):
            status, reason = error_of(ask(explorer, path, {}, method=method, host=host))
            assert (status, reason) == (403, "host: expected this server's own name, got another"), host
    for host in (f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert ask(explorer, "/api/models", {}, host=host)[0] == 200


def test_a_foreign_origin_is_refused(explorer):
    port = explorer.place.port
    for origin in ("https://evil.example", "null", f"https://127.0.0.1:{port}", f"http://localhost:{port}", "file://"):
        status, reason = error_of(ask(explorer, "/api/models", {}, headers={"Origin": origin}))
        assert (status, reason) == (403, "origin: expected this server's own page, got another"), origin
    assert ask(explorer, "/api/models", {}, headers={"Origin": f"http://127.0.0.1:{port}"})[0] == 200


def raw(explorer, content):
    """The first bytes of the answer to bytes."""
    with socket.create_connection(("127.0.0.1", explorer.place.port), timeout=10) as connection:
        connection.sendall(content)
        return connection.recv(4096)


def test_two_hosts_or_none_are_refused(explorer):
    host_line = f"Host: 127.0.0.1:{explorer.place.port}\r\n".encode()
    assert b" 200 " in raw(explorer, b"GET / HTTP/1.1\r\n" + host_line + b"\r\n")
    for lines in (b"", host_line + b"Host: evil.example\r\n"):
        for version in (b"1.0", b"1.1"):
            answer = raw(explorer, b"GET / HTTP/" + version + b"\r\n" + lines + b"\r\n")
            assert answer.split(b" ")[1] in (b"400", b"403")
    assert alive(explorer)


@pytest.mark.parametrize(
    "content", [b"\0" * 100, b"GET\r\n\r\n", b"POST /api/run HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"\x16\x03\x01"]
)
def test_what_is_no_request_does_no_harm(explorer, content):
    with socket.create_connection(("127.0.0.1", explorer.place.port), timeout=10) as connection:
        connection.sendall(content)
    assert alive(explorer)


DEEP = b"[" * 200_000
BODIES = {
    "no JSON": (b"{", "body: expected JSON"),
    "empty": (b"", "body: expected JSON"),
    "bytes": (b"\xff\xfe\0", "body: expected JSON"),
    "deep": (DEEP, "body: expected JSON"),
    "long number": (b'{"layer": ' + b"9" * 10_000 + b"}", "body: expected JSON"),
    "list": (b"[]", "body: expected a JSON object, got list"),
    "null": (b"null", "body: expected a JSON object, got NoneType"),
    "nothing": (b"{}", ""),
    "types": (b'{"run": [], "layer": "0", "head": {}, "row": null, "query": true, "key": 1.5, "steps": []}', ""),
    "surrogate": (b'{"run": "\\ud800", "model": "\\ud800", "layer": 0, "head": 0, "input": {"text": "\\ud800"}}', ""),
    "huge": (b'{"run": "9999", "layer": 1e308, "head": 99999999999999999999, "steps": -5, "row": -1}', ""),
}


@pytest.mark.parametrize("name", ["run", "head", "scores", "why", "top", "cost", "effects", "generate", "export"])
@pytest.mark.parametrize("kind", BODIES)
def test_a_broken_body_is_one_error(explorer, name, kind, capfd):
    content, reason = BODIES[kind]
    status, error = error_of(ask(explorer, f"/api/{name}", content))
    assert status == 400
    assert error.startswith(reason)
    assert "\n" not in error
    assert capfd.readouterr().err == ""


def test_what_a_run_does_not_have_is_one_error(explorer):
    run = new_run(explorer)
    for name, body, reason in (
        ("head", {"run": "99", "layer": 0, "head": 0}, "run: expected a recent run"),
        ("head", {"run": run, "layer": 4, "head": 0}, "layer: expected 0 to 3, got 4"),
        ("head", {"run": run, "layer": 0, "head": 4}, "head: expected 0 to 3, got 4"),
        ("scores", {"run": run, "layer": 0, "head": 7}, "head: expected 0 to 3, got 7"),
        ("why", {"run": run, "layer": 0, "head": 0, "query": 3, "key": 0}, "query: expected 0 to 2, got 3"),
        ("top", {"run": run, "position": 3}, "position: expected 0 to 2, got 3"),
        ("generate", {"run": run, "steps": 65}, "steps: expected a whole number from 1 to 64, got 65"),
        ("run", {**TEXT, "model": "nosuch"}, "nosuch: expected a folder with config.json"),
        ("run", {**TEXT, "input": {"text": "a " * 3000}}, "input: expected at most"),
        ("run", {**TEXT, "changes": [{"layers": [9], "silence": True}]}, "layers: expected some of those that ran"),
        ("run", {**TEXT, "changes": [{"heads": [9], "silence": True}]}, "heads: expected whole numbers"),
        ("run", {**TEXT, "changes": [{"hide": [50]}]}, "hide: expected positions of the 3 keys"),
    ):
        status, error = error_of(ask(explorer, f"/api/{name}", body))
        assert status == 400, name
        assert error.startswith(reason), error
    assert alive(explorer)


def test_a_body_is_bounded_while_it_is_read(explorer):
    """Its length need not be what it says, or be said at all."""
    lines = f"POST /api/head HTTP/1.1\r\nHost: 127.0.0.1:{explorer.place.port}\r\nX-Regard-Token: {explorer.token}\r\n"
    status, error = error_of(ask(explorer, "/api/head", b"x" * (2**20 + 1)))
    assert (status, error) == (413, "body: expected at most 1,048,576 bytes, got more")
    with socket.create_connection(("127.0.0.1", explorer.place.port), timeout=10) as connection:
        connection.sendall(f"{lines}Transfer-Encoding: chunked\r\n\r\n".encode())
        part = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        sent = 0
        try:
            while sent < 64 * 2**20:
                connection.sendall(part)
                sent += 65536
        except OSError:
            pass  # it hangs up
        assert sent < 64 * 2**20
    with socket.create_connection(("127.0.0.1", explorer.place.port), timeout=10) as connection:
        connection.sendall(f"{lines}Content-Length: 999999999999\r\n\r\n{{".encode())  # and the rest never comes
    assert alive(explorer)


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server.py",
        "/page/..%2fserver.py",
        "/page/%2e%2e/server.py",
        "/page/vendor/../../server.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/%00",
        "/page/" + "a" * 3000,
        "/page/",
        "/page/vendor",
        "/page/..\\server.py",
        "/server.py",
        "/api",
        "/api/nosuch",
    ],
)
def test_only_files_of_the_page_are_served(explorer, path):
    status, headers, content = ask(explorer, path, method="GET")
    assert status in (404, 405)
    assert b"import" not in content
    assert "content-security-policy" in headers


def test_a_computation_stops_when_the_page_goes(explorer):
    run, pace = new_run(explorer), explorer.pace
    pace.seconds = 0.05
    try:
        before = pace.passes
        with socket.create_connection(("127.0.0.1", explorer.place.port), timeout=10) as connection:
            body = json.dumps({"run": run, "steps": 64}).encode()
            lines = f"POST /api/generate HTTP/1.1\r\nHost: 127.0.0.1:{explorer.place.port}\r\n"
            lines += f"X-Regard-Token: {explorer.token}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(lines.encode() + body)
            assert b" 200 " in connection.recv(4096)
        stopped = time.monotonic()
        pace.seconds = 0.0
        assert alive(explorer)
        assert time.monotonic() - stopped < 5
        assert pace.passes - before < 40
    finally:
        pace.seconds = 0.0


def test_the_newest_of_a_lane_takes_the_place_of_those_before_it(explorer):
    pace = explorer.pace
    pace.seconds = 0.3
    answers = {}

    def request(name):
        answers[name] = ask(explorer, "/api/run", {**TEXT, "lane": "main"})

    threads = [threading.Thread(target=request, args=(name,)) for name in "abc"]
    try:
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(20)
    finally:
        pace.seconds = 0.0
    assert [answers[name][0] for name in "abc"] == [409, 409, 200]
    assert error_of(answers["a"])[1] == "run: a newer one took its place"


def test_models_run_one_at_a_time_and_heads_are_read_meanwhile(explorer):
    run, pace = new_run(explorer), explorer.pace
    pace.seconds = 0.5
    slow = threading.Thread(target=ask, args=(explorer, "/api/run", TEXT))
    try:
        slow.start()
        time.sleep(0.1)
        begun = time.monotonic()
        assert ask(explorer, "/api/head", {"run": run, "layer": 0, "head": 0})[0] == 200
        assert time.monotonic() - begun < 0.3
    finally:
        slow.join(10)
        pace.seconds = 0.0


def test_a_failure_of_ours_is_an_answer_and_not_the_end(explorer, monkeypatch, capfd):
    def fail(*args, **more):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(explorer.session, "head", fail)
    status, error = error_of(ask(explorer, "/api/head", {"run": "1", "layer": 0, "head": 0}))
    assert (status, error) == (500, "the server failed: RuntimeError")
    assert "secret detail" in capfd.readouterr().err
    monkeypatch.setattr(explorer.session, "run", fail)
    assert error_of(ask(explorer, "/api/run", TEXT)) == (500, "the server failed: RuntimeError")
    monkeypatch.undo()
    assert alive(explorer)


def test_beyond_loopback_the_page_asks_for_the_token():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "a.b")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    with served(host="0.0.0.0", any_path=False) as explorer:
        assert explorer.place.url("T").endswith("/?token=T")
        for path in ("/", "/?token=wrong"):
            status, reason = error_of(ask(explorer, path, method="GET"))
            assert (status, reason.split(":")[0]) == (403, "token")
        status, headers, _ = ask(explorer, f"/?token={explorer.token}", method="GET")
        assert status == 200
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert ask(explorer, "/", method="GET", headers={"Cookie": cookie.split(";")[0]})[0] == 200
        assert ask(explorer, "/api/models", {}, host=f"evil.example:{explorer.place.port}")[0] == 403
        status, error = error_of(ask(explorer, "/api/run", {**TEXT, "model": "/"}))
        assert (status, error) == (400, "model: expected one of the menu, got '/'")


def test_a_port_in_use_is_one_error():
    with closing(listen("127.0.0.1", 0)) as opened:
        opened.listen()
        port = opened.getsockname()[1]
        with pytest.raises(ValueError, match=f"port: expected a free port of 127.0.0.1, got {port}: Address already"):
            listen("127.0.0.1", port)
    with pytest.raises(ValueError, match="host: expected"):
        listen("nosuch.invalid", 0)
