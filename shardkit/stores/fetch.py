"""What the helper process does for readers: fetch files of an object store into a cache."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shardkit.errors import ShardkitError
from shardkit.stores.cache import BLOCK, Cache, RemoteFile, pin
from shardkit.stores.client import PART, Store, open_store

_CONNECTIONS = 4
"""Requests at a time for one file."""

_LONGEST = 16 << 20
"""Maximum bytes of a request for neighboring blocks."""

_pinned: dict[str, list[int]] = {}
"""Descriptors of shards that are being handed to a thread of the reader, by SHA-256."""

_asked: set[RemoteFile] = set()
_lock = threading.Lock()


def get(url: str, name: str, most: int) -> bytes | None:
    """Return a small object, or None if it does not exist."""
    return open_store(url).get(name, most)


def fetch(cache: Cache, file: RemoteFile, path: Path) -> None:
    """Fetch a file into the cache, unless it is there."""
    try:
        cache.fetch(file, path, partial(_fill, open_store(file.url), file.name, file.size))
    except OSError as error:
        raise _unwritable(cache, error) from error


def _unwritable(cache: Cache, error: OSError) -> ShardkitError:
    return ShardkitError(
        f"the cache {cache.folder} cannot be written: {error.strerror}. Free some space, set a "
        "smaller cache_limit, or choose another folder."
    )


def shard(cache: Cache, file: RemoteFile) -> None:
    """Fetch a shard unless it is in the cache, and keep it there until `release`.

    Otherwise other processes could evict it again and again before the reader opens it.
    """
    path = cache.shard(file.sha256)
    while (pinned := pin(path)) is None:
        fetch(cache, file, path)
    _pinned.setdefault(file.sha256, []).append(pinned)


def release(sha256: str) -> None:
    """Let a shard be evicted that was handed over."""
    os.close(_pinned[sha256].pop())


def ahead(cache: Cache, file: RemoteFile) -> None:
    """Fetch a shard unless that is being done or fails: the reader will then see the error."""
    with _lock:
        if file in _asked:
            return
        _asked.add(file)
    try:
        fetch(cache, file, cache.shard(file.sha256))
    finally:
        with _lock:
            _asked.discard(file)


def blocks(cache: Cache, file: RemoteFile, numbers: list[int]) -> None:
    """Fetch the blocks of a shard that are not in the cache."""
    store = open_store(file.url)
    try:
        cache.fetch_blocks(file, numbers, partial(_fill_blocks, store, file))
    except OSError as error:
        raise _unwritable(cache, error) from error


def download(url: str, name: str, path: Path) -> None:
    """Write an object of any content over the file ``path``, whose size it must have."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _fill(open_store(url), name, os.fstat(descriptor).st_size, descriptor)
    finally:
        os.close(descriptor)


def _fill(store: Store, name: str, size: int, descriptor: int) -> None:
    """Write an object of a known size to a file, by requests for its parts."""
    parts = ((start, min(start + PART, size)) for start in range(0, size, PART))
    _fill_parts(store, name, parts, descriptor)


def _fill_blocks(store: Store, file: RemoteFile, descriptor: int, numbers: list[int]) -> None:
    """Write blocks to a file, by requests for one block or several neighbors."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        start, end = number * BLOCK, min((number + 1) * BLOCK, file.size)
        if parts and parts[-1][1] == start and end - parts[-1][0] <= _LONGEST:
            start = parts.pop()[0]
        parts.append((start, end))
    _fill_parts(store, file.name, parts, descriptor)


def _fill_parts(store: Store, name: str, parts: Iterable[tuple[int, int]], descriptor: int) -> None:
    def fill(start: int, end: int) -> None:
        data = store.read(name, start, end)
        while data:
            written = os.pwrite(descriptor, data, start)
            start, data = start + written, data[written:]

    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        waiting: deque[Future[None]] = deque()
        for part in parts:  # a manifest may state any size: not all at once
            waiting.append(threads.submit(fill, *part))
            if len(waiting) > _CONNECTIONS:
                waiting.popleft().result()
        for last in waiting:
            last.result()
