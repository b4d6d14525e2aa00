"""Work of the helper process for readers: fetch files of an object store into a cache."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from shardkit.errors import ShardkitError, UsageError
from shardkit.remote.cache import BLOCK, Cache, RemoteFile, exclusive, pin
from shardkit.remote.store import Missing, Store, open_store
from shardkit.system.files import sync

_CONNECTIONS = 8
"""Requests at a time."""

_ATTEMPTS = 3
"""Copies of an object that changes meanwhile."""

_pinned: dict[str, list[int]] = {}
"""Descriptors of shards that are being handed to a thread of the reader, by SHA-256."""

_requested: set[RemoteFile] = set()

_lock = threading.Lock()

_requests = ThreadPoolExecutor(_CONNECTIONS)

_turn = threading.Lock()
"""Held while a file is requested. So files do not share the link: one is complete
early, and is verified and read while the next one is fetched."""


def get(url: str, name: str, most: int) -> bytes | None:
    """Return a small object, or None if it does not exist."""
    return open_store(url).get(name, most)


def fetch_file(cache: Cache, file: RemoteFile, path: Path) -> None:
    """Fetch a file into the cache, unless it is there."""
    try:
        cache.fetch(file, path, partial(_fill, open_store(file.url), file))
    except OSError as error:
        raise cache.unusable(error) from error


def shard(cache: Cache, file: RemoteFile) -> None:
    """Fetch a shard unless it is in the cache, and keep it there until `release`.

    Otherwise other processes could evict it again and again before the reader opens it.
    """
    path = cache.shard(file.sha256)
    pinned = None
    while pinned is None:
        fetch_file(cache, file, path)
        pinned = pin(path)
    _pinned.setdefault(file.sha256, []).append(pinned)


def release(sha256: str) -> None:
    """Let a shard be evicted that was handed over."""
    os.close(_pinned[sha256].pop())


def ahead(cache: Cache, file: RemoteFile) -> None:
    """Fetch a shard unless that is being done or fails: the reader will then see the error."""
    with _lock:
        if file in _requested:
            return
        _requested.add(file)
    try:
        fetch_file(cache, file, cache.shard(file.sha256))
    finally:
        with _lock:
            _requested.discard(file)


def download(url: str, name: str, path: Path) -> None:
    """Write an object of any content over the file ``path``, whose size it must have."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        file = RemoteFile(url, name, os.fstat(descriptor).st_size)
        _fill(open_store(url), file, descriptor)
    finally:
        os.close(descriptor)


def names(url: str) -> list[str]:
    """Return the names of the objects directly below a URL."""
    return open_store(url).names()


def copy(url: str, name: str, path: Path) -> int:
    """Copy an object to a file, unless the file is its copy; return the bytes fetched.

    The modification time of a copy states the version. UsageError if there is no such object, or
    access is denied; ShardkitError if it changes meanwhile.
    """
    store = open_store(url)
    temporary = path.with_name(f".{path.name}.part")
    try:
        for _ in range(_ATTEMPTS):
            size, stamp = version = store.version(name)
            with exclusive(temporary, partial(_is_copy, path, version)) as descriptor:
                if descriptor is None:
                    return 0
                with contextlib.ExitStack() as unfinished:
                    unfinished.callback(temporary.unlink)
                    if _is_copy(path, version):  # completed between our check and our lock
                        return 0
                    os.truncate(descriptor, 0)
                    _fill(store, RemoteFile(url, name, size), descriptor)
                    if store.version(name) == version:
                        os.utime(descriptor, ns=(stamp, stamp))
                        os.fsync(descriptor)
                        os.rename(temporary, path)
                        unfinished.pop_all()
                        sync(path.parent)
                        return size
    except Missing:
        raise UsageError(
            f"{url} contains no {name};", remedy="pass files, not a folder, as in x-{000..999}.tar"
        ) from None
    except OSError as error:
        raise ShardkitError(
            f"{path} cannot be written: {error.strerror}",
            remedy="Free some space or choose another folder.",
        ) from error
    raise ShardkitError(
        f"{url}/{name} is changing while it is being read;",
        remedy="retry when its upload is complete",
    )


def _is_copy(path: Path, version: tuple[int, int]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        return stat.S_ISREG(status.st_mode) and version == (status.st_size, status.st_mtime_ns)
    return False


def _fill(store: Store, file: RemoteFile, descriptor: int) -> None:
    """Write the content of an object to a file, by several requests at a time."""

    def fill(start: int) -> None:
        data = store.read(file.name, start, min(start + BLOCK, file.size))
        while data:
            written = os.pwrite(descriptor, data, start)
            start = start + written
            data = data[written:]

    waiting: deque[Future[None]] = deque()
    try:
        with _turn:
            for start in range(0, file.size, BLOCK):  # a manifest may state any size
                waiting.append(_requests.submit(fill, start))
                if len(waiting) >= _CONNECTIONS:
                    waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
    finally:
        for request in waiting:
            request.cancel()
        wait(waiting)  # they write to the descriptor
