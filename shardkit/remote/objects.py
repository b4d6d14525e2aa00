"""Work of the helper process on whole objects: list, compare, copy, write and delete them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from shardkit.errors import CorruptDataset, ShardkitError, setting
from shardkit.remote.store import Exists, Missing, Store, open_store
from shardkit.system.files import sha256_of

_CONNECTIONS = 32
"""Requests at a time: each waits for the store most of its time."""

_MOST_BYTES = 1 << 30
_ATTEMPTS = 3


def sizes(url: str) -> dict[str, int]:
    """Return the size of each object below a URL, by name."""
    return open_store(url).sizes()


def put(url: str, name: str, file: Path, sha256: str) -> None:
    """Write a file as an object."""
    open_store(url).put(name, file, sha256)


def create(url: str, name: str, content: bytes) -> bool:
    """Write an object unless it exists with other content; return whether it has this content."""
    try:
        open_store(url).create(name, content)
    except Exists:
        return False
    return True


def send(url: str, folder: Path, names: Sequence[str]) -> None:
    """Write files of a folder as objects of the same names, with their SHA-256."""
    store = open_store(url)
    _for_each(names, lambda name: store.put(name, folder / name, sha256_of(folder / name)))


def receive(url: str, folder: Path, names: Sequence[str]) -> list[str]:
    """Copy objects that `send` wrote into a private folder; return the names of missing ones.

    CorruptDataset if an object differs from its SHA-256, three times.
    """
    store = open_store(url)
    missing = []

    def copy(name: str) -> None:
        try:
            content = _read(store, name)
        except Missing:
            missing.append(name)
            return
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        except OSError as error:
            raise ShardkitError(
                f"{folder} cannot be written: {error.strerror}",
                remedy=f"Choose another one with {setting('staging')}.",
            ) from error

    _for_each(names, copy)
    return missing


def _read(store: Store, name: str) -> bytes:
    for _ in range(_ATTEMPTS):
        digest = store.digest(name)
        content = store.get(name, _MOST_BYTES)
        if content is not None and sha256(content).hexdigest() == digest:
            return content
    raise CorruptDataset(
        f"{store.url}/{name} does not match the SHA-256 that was stored with it;",
        remedy="plan again with --force",
    )


def digests(url: str, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 that was stored with each object; leave out missing ones."""
    store = open_store(url)
    stored = {}

    def ask(name: str) -> None:
        with contextlib.suppress(Missing):
            stored[name] = store.digest(name)

    _for_each(names, ask)
    return stored


def delete(url: str, names: Sequence[str]) -> None:
    """Delete objects, those that exist."""
    _for_each(names, open_store(url).delete)


def _for_each(names: Sequence[str], work: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        try:
            for done in [threads.submit(work, name) for name in names]:
                done.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
