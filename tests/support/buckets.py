"""An S3 server for tests: moto on the loopback, behind a proxy that counts and spoils answers."""

from __future__ import annotations

import contextlib
import html
import http.client
import http.server
import logging
import random
import re
import socketserver
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

BUCKET = "bucket"
SECRET = "a-secret-that-appears-nowhere"

FAULTS = ("busy", "reset", "short", "wrong", "stall", "expired")

_SIGNED = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=0"
"""moto checks no signature, but anonymous requests may not replace objects."""

_ERRORS = {
    "busy": (503, "SlowDown", ""),
    "expired": (400, "ExpiredToken", ""),
    "denied": (403, "AccessDenied", ""),
    "unsigned": (403, "SignatureDoesNotMatch", ""),
    "region": (400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
}
"""Status, code and more of an answer. All repeat the secret, as a careless server might."""


@dataclass
class Bucket:
    """A bucket, the requests that it answered, and the faults that it shall have."""

    address: str
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of its clients."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    rates: dict[str, float] = field(default_factory=dict)
    """Probability of each fault."""
    planned: dict[str, list[str]] = field(default_factory=dict)
    """Faults of the next answers with an object's content, by the object's name."""
    edit: Callable[[bytes], bytes] | None = None
    """Changes listings."""
    payers: set[str] = field(default_factory=set)
    """Values of the header that states who pays for a request."""
    at_once: int = 0
    """Requests that are answered at present."""
    most_at_once: int = 0
    stalled: float = 2.0
    """Seconds of a stall."""
    random: random.Random = field(default_factory=lambda: random.Random(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, method: str) -> Counter[str]:
        """Return the number of requests by the object's name."""
        found = (path for each, path in self.requests if each == method)
        return Counter(path.partition("?")[0].rpartition("/")[2] for path in found)

    def names(self) -> list[str]:
        """Return the names of all objects, sorted."""
        listed = html.unescape(self.ask("GET", "").decode())
        return re.findall("<Key>(.*?)</Key>", listed, re.DOTALL)

    def clear(self) -> None:
        """Remove all objects, requests and faults."""
        self.rates, self.planned, self.edit, self.stalled = {}, {}, None, 2.0
        for name in self.names():
            self.ask("DELETE", quote(name))
        self.requests.clear()
        self.random.seed(1)

    def fault(self, method: str, path: str) -> str:
        with self.lock:
            planned = self.planned.get(path.partition("?")[0].rpartition("/")[2])
            if planned and method == "GET":
                return planned.pop(0)
            drawn = self.random.random()
        for name, rate in self.rates.items():
            drawn -= rate
            if drawn < 0:
                return name
        return ""

    def put(self, name: str, content: bytes) -> None:
        self.ask("PUT", name, content)

    def ask(self, method: str, name: str, content: bytes | None = None) -> bytes:
        """Send a request past the client under test; return the body."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=20)) as server:
            headers = {"Authorization": _SIGNED, "x-amz-acl": "public-read"}
            server.request(method, f"/{BUCKET}/{name}", content, headers)
            answer = server.getresponse()
            assert answer.status < 300, answer.status
            return answer.read()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, *_: object) -> None:
        """Be silent about clients that are killed."""


@contextlib.contextmanager
def running() -> Iterator[Bucket]:
    """Run a server with an empty bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it prints each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    bucket = Bucket("{}:{}".format(*server.get_host_and_port()))
    proxy = _Server(("127.0.0.1", 0), _handler(bucket))
    threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
    bucket.environment = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
        "GOOGLE_BASE_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
        "GOOGLE_BEARER_TOKEN": SECRET,
        "SHARDKIT_STORE_TIMEOUT": "1",
    }
    try:
        request = urllib.request.Request(f"http://{bucket.address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=20).close()
        yield bucket
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()


def upload_by_hand(bucket: Bucket, folder: Path, prefix: str) -> None:
    """Copy a dataset into the bucket without shardkit."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            bucket.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


def _as_s3(name: str, value: str) -> tuple[str, str]:
    """Return a header of Google's XML API as S3's: that API differs in the names of headers."""
    name = name.lower()
    if name == "x-goog-if-generation-match":
        return "if-none-match", "*"
    return name.replace("x-goog-", "x-amz-"), value


def _handler(bucket: Bucket) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            with bucket.lock:
                bucket.at_once += 1
                bucket.most_at_once = max(bucket.most_at_once, bucket.at_once)
            try:
                self._answer()
            finally:
                with bucket.lock:
                    bucket.at_once -= 1

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if bucket.edit is not None:  # each page is the first one
                self.path = re.sub("continuation-token=[^&]*&", "", self.path)
            bucket.requests.append((self.command, self.path))
            bucket.payers.add(self.headers.get("x-amz-request-payer", ""))
            fault = bucket.fault(self.command, self.path)
            if fault == "stall":
                time.sleep(bucket.stalled)
            if fault == "reset":
                self.close_connection = True
                self.connection.close()
                return
            if fault in _ERRORS:
                status, code, more = _ERRORS[fault]
                text = f"<Error><Code>{code}</Code><Message>{SECRET}</Message>{more}</Error>"
                self._send(status, text.encode())
                return
            with contextlib.closing(
                http.client.HTTPConnection(bucket.address, timeout=20)
            ) as server:
                headers = dict(map(_as_s3, *zip(*self.headers.items(), strict=True)))
                if not headers.get("authorization", "").startswith("AWS4"):
                    headers["authorization"] = _SIGNED
                server.request(self.command, self.path, content, headers)
                answer = server.getresponse()
                body = answer.read()
            data = self.command == "GET" and answer.status < 300 and "list-type" not in self.path
            if fault == "wrong" and data and body:
                place = len(body) // 2
                body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
            if bucket.edit is not None and "list-type" in self.path:
                body = bucket.edit(body)
            self._send(answer.status, body, answer.headers, cut=fault == "short" and data)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass  # noqa: N815

        def _send(
            self,
            status: int,
            body: bytes,
            headers: http.client.HTTPMessage | None = None,
            *,
            cut: bool = False,
        ) -> None:
            self.send_response_only(status)
            stated = str(len(body))
            for name, value in headers.items() if headers else ():
                if name.lower() == "content-length" and self.command == "HEAD":
                    stated = value
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
                if name.lower().startswith("x-amz-meta-"):
                    self.send_header(name.lower().replace("x-amz-", "x-goog-"), value)
            self.send_header("Content-Length", stated)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return Handler
