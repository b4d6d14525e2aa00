"""Files of a web server, read without credentials. Only helper processes import this.

A server may lead to another one only if the user allows it: otherwise it could make this machine
fetch what only this machine can reach.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import threading
import time
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPMessage,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
    InvalidURL,
)
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)
from zlib import crc32

from shardkit.errors import ShardkitError, UsageError
from shardkit.remote.store import Store, timeout

_REDIRECTS = "SHARDKIT_STORE_REDIRECTS"
"""Variable with the hosts that servers may redirect to, separated by commas."""

_PIECE = 1 << 18
_PORTS = {"http": 80, "https": 443}


class WebServer(Store):
    """The files below a URL of a web server, which must support ranges."""

    errors = (OSError, HTTPException)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._opener = build_opener(_Redirects(url), _Http(), _Https())

    def digest(self, name: str) -> str:
        """Return "": none is stored."""
        return ""

    def version(self, name: str) -> tuple[int, int]:
        """Return the size of a file, and a time in nanoseconds that is its version."""

        def ask() -> HTTPMessage:
            with self._ask(name, method="HEAD") as answer:
                headers: HTTPMessage = answer.headers
                return headers

        headers = self._repeated(name, ask)
        try:
            seconds = int(parsedate_to_datetime(headers["Last-Modified"]).timestamp())
        except (TypeError, ValueError, OverflowError):
            seconds = 0
        tag = str(headers["ETag"])
        return self._size(name, headers), seconds * 10**9 + crc32(tag.encode()) % 10**9

    names = sizes = create = put = delete = Store._refuse

    def _range(self, name: str, start: int, end: int) -> memoryview:
        try:
            answer = self._ask(name, {"Range": f"bytes={start}-{end - 1}"})
        except HTTPError as error:
            if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return memoryview(b"")  # the file ends before
            raise
        with answer:
            content_range = answer.headers.get("Content-Range", "")
            if answer.status != HTTPStatus.PARTIAL_CONTENT or not content_range.startswith(
                f"bytes {start}-"
            ):
                raise UsageError(
                    f"{self.url}: the server does not support ranges;", remedy="download it"
                )
            return memoryview(_body(answer, end - start))

    def _content(self, name: str, most: int) -> bytes:
        with self._ask(name) as answer:
            size = self._size(name, answer.headers)
            self._require_small(name, size, most)
            return _body(answer, size)

    def _ask(self, name: str, headers: dict[str, str] | None = None, method: str = "GET") -> Any:
        """Return the server's answer, whose content is not read yet."""
        path = quote(name.encode("utf-8", "surrogateescape"))
        url = f"{quote(self.url, safe='/:%[]')}/{path}"
        request = Request(url, headers=headers or {}, method=method)  # noqa: S310 - see `as_url`
        try:
            return self._opener.open(request, timeout=timeout())
        except HTTPError as error:
            error.close()
            raise

    def _size(self, name: str, headers: HTTPMessage) -> int:
        length = headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,18}", length):
            raise UsageError(f"{self.url}/{name}: the server does not state its size")
        return int(length)

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, HTTPError):
            return error.code in (408, 429) or error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
        return not isinstance(_cause(error), (InvalidURL, ssl.SSLCertVerificationError))

    def _is_unreachable(self, error: Exception) -> bool:
        return isinstance(_cause(error), (ConnectionRefusedError, socket.gaierror))

    def _error(self, name: str, error: Exception) -> ShardkitError:
        what = f"{self.url}/{name}".rstrip("/")
        if isinstance(error, HTTPError):
            reason = str(error.code)  # the server's own text may be anything
            if error.code in (404, 410):
                return self._missing(name, error)
            if error.code in (401, 403):
                return UsageError(
                    f"{what}: access is denied ({reason});", remedy="check that it is public"
                )
            return ShardkitError(f"{what} cannot be used: the server answers with status {reason}")
        cause = _cause(error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return UsageError(
                f"{what}: the server's certificate is not valid;",
                remedy="if you trust its issuer, set SSL_CERT_FILE to the certificate",
            )
        reason = f"{type(cause).__name__}: the server does not answer; check the network"
        return ShardkitError(f"{what} cannot be used: {reason}")


def _body(answer: Any, size: int) -> bytes:
    """Return the content of an answer, up to ``size`` bytes, within the time of one request."""
    end = time.monotonic() + timeout()
    data = bytearray()
    while len(data) < size and (piece := answer.read1(min(_PIECE, size - len(data)))):
        data += piece
        if time.monotonic() > end:
            raise TimeoutError
    if len(data) < size and answer.length:
        raise IncompleteRead(b"", answer.length)
    return bytes(data)


def _cause(error: Exception) -> Any:
    """Return what failed: urllib wraps the errors of a connection."""
    return getattr(error, "reason", None) or error


class _Answer(HTTPResponse):
    """An answer, for which a timer waits until it is closed."""

    late: threading.Timer | None = None

    def close(self) -> None:
        """Close the answer."""
        if self.late is not None:
            self.late.cancel()
        super().close()


class _Connection(HTTPConnection):
    """A connection that ends after a while, even if the server sends a byte now and then."""

    response_class = _Answer

    def connect(self) -> None:
        """Connect to the server; this starts the time of the request."""
        self._end = time.monotonic() + 3 * timeout()  # to connect, for the head, for the content
        self._late = threading.Timer(3 * timeout(), self._shut)
        self._late.daemon = True
        self._late.start()
        try:
            super().connect()
        except BaseException:
            self._late.cancel()
            raise
        self._socket = self.sock

    def getresponse(self) -> HTTPResponse:
        """Return the answer, whose head is complete."""
        try:
            answer = super().getresponse()
            assert isinstance(answer, _Answer)
            answer.late = self._late
            if time.monotonic() > self._end:  # a head that was cut off looks complete
                answer.close()
                raise TimeoutError
        except BaseException:
            self._late.cancel()
            raise
        return answer

    def _shut(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # it is closed, or not open yet
            # Not the method of encrypted sockets, which another thread may be reading.
            socket.socket.shutdown(getattr(self, "_socket", self.sock), socket.SHUT_RDWR)


class _Encrypted(_Connection, HTTPSConnection):
    """A connection to a server that proves its name."""


class _Http(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Encrypted, req)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects within a server, and to the hosts that the user allows."""

    def __init__(self, url: str) -> None:
        self._url = url

    def redirect_request(  # noqa: PLR0913, PLR0917 - urllib calls it
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """Return the request to follow with."""
        first, (scheme, host) = _server(self._url), _server(newurl)
        if not host or scheme not in _PORTS or (scheme, first[0]) == ("http", "https"):
            raise UsageError(f"{self._url}: the server redirects to an unencrypted or invalid URL")
        allowed = os.environ.get(_REDIRECTS, "").lower().split(",")
        if (scheme, host) != first and host not in allowed:
            raise UsageError(
                f"{self._url}: the server redirects to {host}",
                remedy=f"Use that host's URL instead; or if you trust it, set {_REDIRECTS}={host}",
            )
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            request.method = req.get_method()
            fp.close()  # else urllib reads all of its content, which may never end
        return request


def _server(url: str) -> tuple[str, str]:
    """Return the scheme of a URL, and its host with a port unless that is the usual one."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port in (None, _PORTS.get(parts.scheme)) else f":{parts.port}"
    except ValueError:
        return "", ""
    host = re.fullmatch(r"[a-z0-9._:-]{1,255}", parts.hostname or "")  # it will be in messages
    return parts.scheme, "" if host is None or "@" in parts.netloc else f"{host[0]}{port}"
