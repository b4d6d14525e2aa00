"""How files come to be: written beside, synced, renamed; and how they are measured.

The only place that decides what "on disk" means.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkit.errors import ShardkitError

_BLOCK = 1 << 20
"""Bytes read at a time to hash: the loop costs nothing, and they fit into the cache."""

_PIECES = 512
"""Pieces written in one call; Linux takes twice as many."""


def write_atomically(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content``; after a crash it holds all of it, or what it held before."""
    with published(path) as temporary:
        temporary.write_bytes(content)


def write_result(path: Path, content: bytes) -> None:
    """Write what a user asked for in a file, as `write_atomically` does.

    Raises:
        ShardkitError: If it cannot be written: the disk is full, most often.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ShardkitError(f"{path} cannot be written: {error.strerror or error}") from error


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


def open_regular(path: Path) -> io.FileIO:
    """Open a file for reading, unbuffered; what is no file is refused, and not waited for.

    A pipe in the place of a file would otherwise hang, and a device without end take all memory.

    Raises:
        OSError: If it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))
        os.set_blocking(descriptor, True)
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the file's content, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def has_sha256(path: Path, sha256: str) -> bool:
    """Tell whether a file is there, can be read, and has that SHA-256."""
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at the descriptor's position.

    Raises:
        OSError: If the disk is full or fails; a part may be written then.
    """
    rest = memoryview(content)
    while rest:  # a disk that is nearly full takes a part, and then says so
        rest = rest[os.write(descriptor, rest) :]


class Appender:
    """Appends pieces to a file: a few together in one call, and none of them copied before it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.size = 0
        """Bytes appended, whether written yet or not."""

    def append(self, *pieces: bytes) -> None:
        """Append ``pieces`` in their order; they are written by `flush` at the latest.

        Raises:
            OSError: If the disk is full or fails.
        """
        size = sum(map(len, pieces))
        self._waiting += pieces
        self._waiting_bytes += size
        self.size += size
        if self._waiting_bytes >= _BLOCK or len(self._waiting) >= _PIECES:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting.

        Raises:
            OSError: If the disk is full or fails.
        """
        for start in range(0, len(self._waiting), _PIECES):
            self._write(self._waiting[start : start + _PIECES])
        self._waiting.clear()
        self._waiting_bytes = 0

    def _write(self, pieces: Sequence[bytes]) -> None:
        written = os.writev(self._descriptor, pieces)
        rest = memoryview(b"".join(pieces))[written:] if written < sum(map(len, pieces)) else b""
        write_all(self._descriptor, rest)


def free_bytes(path: Path) -> int:
    """Return the bytes that may still be written to the filesystem of ``path``, or above it."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class Reservation:
    """Disk space held by a file without a name, so that a kill gives it back.

    Where the file system cannot reserve, it holds nothing. (``os.posix_fallocate`` would then write
    into each block: of a large reservation, for hours.)

    Raises:
        OSError: With ``ENOSPC`` or ``EDQUOT`` if there is less.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            _allocate(self._file.fileno(), size)
        except BaseException:
            self.close()
            raise

    def shrink(self, size: int) -> None:
        """Give back all but ``size`` bytes."""
        if os.fstat(self._file.fileno()).st_size > size:
            self._file.truncate(size)

    def close(self) -> None:
        """Give back all."""
        self._file.close()


def _allocate(descriptor: int, size: int) -> None:
    """Have the file system allocate ``size`` bytes, if it can, by Linux's fallocate(2)."""
    allocate = sys.platform == "linux" and getattr(_C, "fallocate64", None)
    if not allocate or size <= 0:
        return
    offset = ctypes.c_int64
    if allocate(ctypes.c_int(descriptor), ctypes.c_int(0), offset(0), offset(size)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))


_C = ctypes.CDLL(None, use_errno=True)
