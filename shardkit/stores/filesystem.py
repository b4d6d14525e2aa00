"""Files of schemes that only fsspec knows, such as ``hf://`` and ``sftp://``, without its caches.

They can only be read. Only helper processes import this. fsspec's cache returned wrong bytes to
concurrent readers (filesystem_spec #639), and `s3fs` is not fork-safe (#914).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar
from zlib import crc32

from fsspec.core import url_to_fs

from shardkit.errors import ShardkitError, UsageError
from shardkit.stores.store import Store, timeout

_FINAL = (FileNotFoundError, ImportError, NotImplementedError, ValueError)
"""Errors that another attempt would not change."""

_VOLATILE = ("atime", "nlink", "time")
"""Properties of a file that may change although its content does not."""

_PACKAGES = {"smbclient": "smbprotocol"}
"""Names of packages that differ from those of their modules."""

_Answer = TypeVar("_Answer")


class FileSystem(Store):
    """A store that fsspec knows.

    Its file systems are not safe for threads. So each request has one to itself, and drops it with
    its connection if it fails.
    """

    errors = (Exception,)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._idle: deque[tuple[Any, str]] = deque()

    def digest(self, name: str) -> str:
        """Return "": none is stored."""
        return ""

    def version(self, name: str) -> tuple[int, int]:
        """Return the size of a file, and a checksum of everything that the store states of it."""
        info = self._repeated(name, lambda: self._ask(lambda fs, root: _info(fs, root, name)))
        properties = sorted((key, str(info[key])) for key in info if key not in _VOLATILE)
        return info["size"], crc32(repr(properties).encode())

    def names(self) -> list[str]:
        """Return the names of the files directly below the URL."""
        return [*self._sizes(maxdepth=1)]

    def sizes(self) -> dict[str, int]:
        """Return the size of each file below the URL, by name."""
        return self._sizes(maxdepth=None)

    def _sizes(self, maxdepth: int | None) -> dict[str, int]:
        def walk(fs: Any, root: str) -> dict[str, int]:
            fs.invalidate_cache()
            folders = [*fs.walk(root, maxdepth=maxdepth, on_error="raise", detail=True)]
            top = len(folders[0][0])  # of the URL itself, as the file system spells it
            return {
                f"{folder}/{name}"[top:].lstrip("/"): info["size"]
                for folder, _, files in folders
                for name, info in files.items()
            }

        return self._repeated("*", lambda: self._ask(walk))

    create = put = delete = Store._refuse

    def _range(self, name: str, start: int, end: int) -> memoryview:
        def read(fs: Any, root: str) -> memoryview:
            data = bytearray()
            with fs.open(f"{root}/{name}", "rb", cache_type="none") as file:
                file.seek(start)
                while len(data) < end - start and (more := file.read(end - start - len(data))):
                    data += more
            return memoryview(data)

        return self._ask(read)

    def _content(self, name: str, most: int) -> bytes:
        size = self._ask(lambda fs, root: _info(fs, root, name)["size"])
        self._require_small(name, size, most)
        return bytes(self._range(name, 0, size))

    def _ask(self, request: Callable[[Any, str], _Answer]) -> _Answer:
        """Return the answer to a request, in a thread: few file systems have a time limit."""
        answer: Future[_Answer] = Future()

        def run() -> None:
            try:
                try:
                    place = self._idle.pop()
                except IndexError:
                    place = url_to_fs(self.url, skip_instance_cache=True)
                result = request(*place)
            except BaseException as error:
                answer.set_exception(error)
            else:
                self._idle.append(place)
                answer.set_result(result)

        Thread(target=run, daemon=True).start()
        return answer.result(timeout())

    def _is_transient(self, error: Exception) -> bool:
        final = isinstance(error, _FINAL) or _is_denied(error) or 400 <= _status(error) < 500
        return not final

    def _error(self, name: str, error: Exception) -> ShardkitError:
        what, scheme = f"{self.url}/{name}".rstrip("/"), self.url.partition(":")[0]
        if isinstance(error, ImportError):
            module = str(getattr(error.__cause__ or error, "name", "")).partition(".")[0]
            return UsageError(
                f"{scheme}:// needs the package {module}: pip install "
                f"{_PACKAGES.get(module, module)}"
            )
        reason = " ".join(filter(None, (type(error).__name__, str(_status(error) or ""))))
        if _is_denied(error):
            return UsageError(
                f"{what}: access is denied ({reason}); give fsspec credentials, for example in "
                f"variables FSSPEC_{scheme.upper()}_..."
            )
        return ShardkitError(f"{what} cannot be used: {reason}")


def _info(fs: Any, root: str, name: str) -> dict[str, Any]:
    fs.invalidate_cache()
    info: dict[str, Any] = fs.info(f"{root}/{name}")
    if info["type"] == "directory":
        raise FileNotFoundError(name)
    return info


def _is_denied(error: Exception) -> bool:
    named = "Authentication" in type(error).__name__  # as paramiko's, which is no PermissionError
    return named or isinstance(error, PermissionError) or _status(error) in (401, 403)


def _status(error: Exception) -> int:
    """Return the HTTP status that an error states, or 0."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return status if isinstance(status, int) and status not in (408, 429) else 0
