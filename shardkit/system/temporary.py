"""Temporary files that last as long as an object of this process."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardkit.errors import DiskFull
from shardkit.system.safe_paths import opened, remove_tree


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Raise DiskFull, naming the folder for temporary files, if the disk that has it is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = tempfile.gettempdir()
        raise DiskFull(
            f"the disk of {folder}, the folder for temporary files, is full",
            remedy="free some space, or set TMPDIR to another folder, and rerun",
        ) from error


class TemporaryFolder:
    """A folder below that for temporary files (``TMPDIR``), readable by its user only.

    It is removed at the end of a ``with`` block, or with the last reference in the process that
    made it. The next one removes those of killed processes. ``above`` is the folder to make it in,
    which exists.
    """

    def __init__(self, above: Path | None = None) -> None:
        self.path, descriptor = _claim(above or Path(tempfile.gettempdir()))
        """The folder."""
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid(), descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._finalizer()


def _claim(above: Path) -> tuple[Path, int]:
    """Create a folder; return it and its descriptor, whose lock lasts as long as the process.

    Folders of this user whose processes, on this machine, were killed are removed.
    """
    prefix = f"shardkit-{socket.gethostname()}-"
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{16}")
    for name in filter(pattern.fullmatch, os.listdir(above)):
        _remove_abandoned(above, name)
    while True:
        path = above / f"{prefix}{secrets.token_hex(8)}"
        path.mkdir(0o700)
        with suppress(FileNotFoundError):  # taken for abandoned before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):  # a file system without locks: nobody removes it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return path, descriptor


def _remove_abandoned(above: Path, name: str) -> None:
    """Remove a folder of this user, unless a process holds its lock."""
    with suppress(OSError), opened(above, name) as descriptor:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(above, name)


class TemporaryBytes:
    """Bytes in an unnamed file, which ends with the last reference, or with the process."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.size = 0
        """The number of bytes."""

    def append(self, data: bytes) -> None:
        """Add bytes at the end; DiskFull if they do not fit."""
        view = memoryview(data)
        with full_disk_named():
            while view:
                written = os.pwrite(self._file, view, self.size)
                self.size += written
                view = view[written:]

    def read(self, offset: int, size: int) -> bytes:
        """Return some bytes, or fewer at the end; several threads may call it at once."""
        return os.pread(self._file, size, offset)


def _remove(path: Path, process: int, descriptor: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
