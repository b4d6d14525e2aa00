"""Web servers: the bytes that they have, or a named error."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

import pytest
from clocks import Clock
from refusals import refused
from table import for_each

from shardkit import ShardkitError
from shardkit.errors import CorruptShard, UsageError
from shardkit.remote import client
from shardkit.remote import store as store_module
from shardkit.remote.store import Missing, open_store
from shardkit.remote.web import WebServer

CONTENT = bytes(range(256)) * 8

Handler = http.server.BaseHTTPRequestHandler


@dataclass
class Server:
    """A server on this machine."""

    address: str
    answers: list[Callable[[Handler], None]] = field(default_factory=list)
    """The next answers; then `serve_ranges`."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers of each request."""


def serve_ranges(handler: Handler) -> None:
    """Answer as a server of files."""
    body, stated = CONTENT, handler.headers.get("Range")
    if handler.path.endswith("none"):
        handler.send_error(404, "a secret")
        return
    if stated:
        start, end = map(int, stated.removeprefix("bytes=").split("-"))
        if start >= len(CONTENT):
            handler.send_error(416)
            return
        body = CONTENT[start : end + 1]
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/2048")
    else:
        handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("ETag", '"1"')
    handler.send_header("Last-Modified", "Thu, 01 Jan 1970 00:00:07 GMT")
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body)


def status(code: int, **headers: str) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.send_response(code, "a secret")
        for name, value in {"Content_Length": "0", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    return answer


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    class Answers(Handler):
        def do_GET(self) -> None:  # noqa: N802
            made.requests.append((self.command, self.path, dict(self.headers)))
            (made.answers.pop(0) if made.answers else serve_ranges)(self)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        made = Server(f"127.0.0.1:{running.server_address[1]}")
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        running.shutdown()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    monkeypatch.setenv("SHARDKIT_STORE_TIMEOUT", "5")
    return WebServer(f"http://{server.address}/data")


def test_files_are_read_despite_faults(store: WebServer, server: Server) -> None:
    def truncated(handler: Handler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 3-99/2048")
        handler.send_header("Content-Length", "97")
        handler.end_headers()
        handler.wfile.write(b"short")

    def dropped(handler: Handler) -> None:
        handler.close_connection = True

    other = status(206, Content_Range="bytes 0-99/2048")
    server.answers += [status(503), truncated, dropped, status(429), other]

    assert store.read("a b%#é.tar", 3, 100) == CONTENT[3:100]
    assert server.requests[-1][1] == "/data/a%20b%25%23%C3%A9.tar"
    assert len(server.requests) == 6
    assert store.get("x", 4096) == CONTENT
    assert store.get("none", 4096) is None
    assert store.version("x") == (2048, 7 * 10**9 + crc32(b'"1"') % 10**9)
    assert {method for method, *_ in server.requests} == {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (status(200, Content_Length="97"), ()),
        (status(403), ("403",)),
        (status(404), ()),
        (status(400), ("400",)),
        (status(304), ("304",)),
    ],
)
def test_what_cannot_be_read_is_named(
    store: WebServer, server: Server, answer: Callable[[Handler], None], message: tuple[str, ...]
) -> None:
    server.answers.append(answer)
    with refused(ShardkitError, *message) as error:
        store.read("x", 3, 100)
    assert "secret" not in str(error.value)
    assert len(server.requests) == 1


def test_wrong_sizes_are_named(store: WebServer, server: Server) -> None:
    def sizeless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True

    with refused(CorruptShard, "2048"):
        store.read("x", 2000, 2100)
    with refused(CorruptShard, "3000"):
        store.read("x", 3000, 3100)
    with refused(ShardkitError, "2,048", "100"):
        store.get("x", 100)
    server.answers.append(sizeless)
    with refused(UsageError):
        store.get("x", 100)
    with refused(UsageError):
        store.delete("x")


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_DEADLINE", 0.05)
    with refused(ShardkitError):
        WebServer("http://127.0.0.1:1/data").get("x", 100)


@for_each("url", ["http://127.0.0.1:1/data", "s3://data/x"])
def test_a_connection_that_no_server_takes_is_tried_for_a_few_requests(url: str) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
            patch.setenv(f"AWS_{name}", "x")
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        patch.setenv("SHARDKIT_STORE_TIMEOUT", "1")
        patch.setattr(client, "_RETRIES", 0)
        patch.setattr(store_module, "time", clock)
        open_store.cache_clear()
        with refused(ShardkitError, url):
            open_store(url).get("a", 100)
        open_store.cache_clear()
    assert 1 < clock.now < 10


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_followed(store: WebServer, server: Server, code: int) -> None:
    with serving() as other:
        moved = status(code, Location=f"http://{other.address}/there")
        server.answers += [moved, moved, status(code, Location="/here")]
        assert store.version("x")[0] == 2048
        assert store.read("x", 3, 100) == CONTENT[3:100]
        assert [each[:2] for each in other.requests] == [("HEAD", "/there"), ("GET", "/there")]
        assert store.read("x", 3, 100) == CONTENT[3:100]
        assert server.requests[-1][1] == "/here"


@pytest.mark.parametrize(
    ("head", "method", "arguments"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", "read", (0, 10)),
        (b"HTTP/1.1 206 P\r\nTransfer-Encoding: chunked\r\n\r\n", "read", (0, 10)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", "get", (1 << 20,)),
    ],
)
def test_a_server_that_sends_a_byte_now_and_then_is_too_slow(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    head: bytes,
    method: str,
    arguments: tuple[int, ...],
) -> None:
    over = threading.Event()

    def drip(handler: Handler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(head)
            while not over.wait(0.02):
                handler.wfile.write(b"1")

    server.answers += [drip]
    monkeypatch.setenv("SHARDKIT_STORE_TIMEOUT", "0.2")
    monkeypatch.setattr(client, "_RETRIES", 0)
    monkeypatch.setattr(store_module, "_DEADLINE", 0)
    try:
        with refused(ShardkitError, server.address):
            getattr(WebServer(f"http://{server.address}/data"), method)("x", *arguments)
    finally:
        over.set()


def test_the_content_of_a_redirect_is_not_read(store: WebServer, server: Server) -> None:
    over = threading.Event()

    def endless(handler: Handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/here")
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not over.wait(0.001):
                handler.wfile.write(bytes(1 << 16))

    server.answers += [endless]
    try:
        assert store.read("x", 3, 100) == CONTENT[3:100]
    finally:
        over.set()


def test_an_endless_redirect_ends(
    store: WebServer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_DEADLINE", 0)
    server.answers += [status(302, Location="/data/x")] * 200
    with refused(ShardkitError, "redirects"):
        store.read("x", 0, 10)


def test_missing_files_are_no_damage(store: WebServer) -> None:
    with pytest.raises(Missing):
        store.read("none", 0, 10)
