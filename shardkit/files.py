"""How files come to be: written beside, synced, renamed; and how they are measured.

The only place that decides what "on disk" means.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 1 << 20
"""Bytes read at a time to hash: the loop costs nothing, and they fit into the cache."""


def write_atomically(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content``; after a crash it holds all of it, or what it held before."""
    with published(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on leaving, sync it and rename it to ``path``.

    If the block raises, the temporary file is removed and ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until what was written to the file or directory ``path`` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the file's content, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """Return the bytes that may still be written to the filesystem of ``path``, or above it."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
