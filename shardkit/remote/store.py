"""The base of clients of object stores: requests are repeated, errors are one line."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from shardkit.errors import CorruptShard, ShardkitError, UsageError, located
from shardkit.system.late import load
from shardkit.system.urls import WRITABLE

_TIMEOUT = "30"
"""Default seconds for one request, with its body."""

_DEADLINE = 120.0
"""Seconds after which a request is not repeated: clients do not repeat errors within a body, accept
our check of its length, or wait for a server that restarts."""

_CONNECTIONS = 4
"""Times of one request for which a connection is tried that no server takes."""

ATTEMPTS = 3
"""Reads of a range before an early end counts as damage: not all clients compare lengths."""

_CLIENTS = {
    **dict.fromkeys(("az", "gs", "s3"), "shardkit.remote.client:ObjectStore"),
    **dict.fromkeys(("http", "https"), "shardkit.remote.web:WebServer"),
}

_Answer = TypeVar("_Answer")


def timeout() -> float:
    """Return the seconds for one request; UsageError if the environment states something else."""
    seconds = os.environ.get("SHARDKIT_STORE_TIMEOUT", _TIMEOUT)
    try:
        return float(seconds)
    except ValueError:
        raise UsageError(
            f"SHARDKIT_STORE_TIMEOUT={seconds!r} must be a number of seconds"
        ) from None


class Exists(Exception):
    """The object to create exists, with other content."""


class Missing(UsageError):
    """An object does not exist."""


class Listed(NamedTuple):
    """An object in a listing."""

    name: str
    size: int
    stamp: int
    """Time and ETag as one number, as `Store.version` returns it."""


class Store(ABC):
    """The objects below a URL. Threads may share it; forked processes may not.

    Every method raises `ShardkitError` with the reason and the remedy in one line, and without the
    server's own text, which may quote credentials.
    """

    errors: tuple[type[Exception], ...]
    """Exceptions of the client."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read(self, name: str, start: int, end: int) -> memoryview:
        """Return the bytes of an object from ``start`` to ``end``, which it must have."""
        for _ in range(ATTEMPTS):
            data = self._repeated(name, lambda: self._range(name, start, end))
            if len(data) == end - start:
                return data
        fault = f"ends at byte {start + len(data)}" if data else f"ends before byte {start}"
        raise CorruptShard(f"{self.url}/{name} {fault}, which is too early")

    def get(self, name: str, most: int) -> bytes | None:
        """Return the content of an object of at most ``most`` bytes; None if it does not exist."""
        try:
            return self._repeated(name, lambda: self._content(name, most))
        except Missing:
            return None

    @abstractmethod
    def digest(self, name: str) -> str:
        """Return the SHA-256 that `put` stored with an object, or ""."""

    @abstractmethod
    def version(self, name: str) -> tuple[int, int]:
        """Return the size of an object, and a time in nanoseconds that is its version."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the objects directly below the URL, not in folders."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the size of each object below the URL, by name."""

    def folders(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the objects directly in a folder."""
        raise self._unlisted()

    def listing(self, folder: str, *, deep: bool) -> Iterator[list[Listed]]:
        """Yield the objects in a folder, perhaps also below it, some at a time."""
        raise self._unlisted()

    def whole(self, name: str, size: int, stamp: int) -> bytes | None:
        """Return the content of an object; None if it is not the version that was listed.

        Missing if there is no such object.
        """
        raise self._unlisted()

    def _unlisted(self) -> UsageError:
        return UsageError(
            f"{self.url}: folders of images are read from {', '.join(WRITABLE)} and local paths;",
            remedy="copy this one to a local folder",
        )

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Write an object that does not exist yet.

        Exists if its content differs. If it is the same, an earlier attempt wrote it.
        """

    @abstractmethod
    def put(self, name: str, file: Path, sha256: str) -> None:
        """Write a file as an object, in parts."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Replace methods that a store without lists, or for reading only, lacks."""
        raise UsageError(f"{self.url} can only be read;", remedy=f"write to {', '.join(WRITABLE)}")

    @abstractmethod
    def _range(self, name: str, start: int, end: int) -> memoryview: ...

    @abstractmethod
    def _content(self, name: str, most: int) -> bytes:
        """Return the content of an object, after `_require_small`."""

    def _require_small(self, name: str, size: int, most: int) -> None:
        if size > most:
            raise ShardkitError(f"{self.url}/{name} has {size:,} bytes, more than {most:,}")

    @abstractmethod
    def _is_transient(self, error: Exception) -> bool: ...

    @abstractmethod
    def _error(self, name: str, error: Exception) -> ShardkitError: ...

    def _is_unreachable(self, error: Exception) -> bool:
        """Return whether no server took the connection."""
        return isinstance(error, ConnectionRefusedError)

    def _repeated(self, name: str, ask: Callable[[], _Answer]) -> _Answer:
        """Ask until it succeeds or the time is over. Writes may be repeated, too."""
        start = time.monotonic()
        pause = 0.1
        while True:
            with self._named(name):
                try:
                    return ask()
                except self.errors as error:
                    patience = _DEADLINE
                    if self._is_unreachable(error):
                        patience = min(patience, _CONNECTIONS * timeout())
                    if time.monotonic() > start + patience or not self._is_transient(error):
                        raise
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Turn an error of the client into one line that names the object."""
        with located(self.url):
            try:
                yield
            except (ShardkitError, Exists):
                raise
            except FileNotFoundError as error:
                raise self._missing(name, error) from None
            except self.errors as error:
                raise self._error(name, error) from None

    def _missing(self, name: str, error: Exception) -> ShardkitError:
        return Missing(f"{self.url} contains no {name}")


@lru_cache(maxsize=64)
def open_store(url: str) -> Store:
    """Return the store of a URL; one client for each serves all threads.

    ImportError if a package is missing.
    """
    store: Store = load(_CLIENTS[url.partition(":")[0]])(url)
    return store
