"""Temporary files that last as long as an object of this process."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit.errors import DiskFull


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Name the folder for temporary files if the disk that has it is full.

    Raises:
        DiskFull: If it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = tempfile.gettempdir()
        raise DiskFull(
            f"the disk of {folder}, the folder for temporary files, is full: free some space, or "
            "set TMPDIR to another folder, and rerun"
        ) from error


class TemporaryFolder:
    """A folder below that for temporary files (``TMPDIR``), readable by its user only.

    It is removed with the last reference in the process that made it.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="shardkit-"))
        """The folder."""
        weakref.finalize(self, _remove, self.path, os.getpid())


class TemporaryBytes:
    """Bytes in an unnamed file, which ends with the last reference, or with the process."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.size = 0
        """The number of bytes."""

    def append(self, data: bytes) -> None:
        """Add bytes at the end.

        Raises:
            DiskFull: If they do not fit.
        """
        view = memoryview(data)
        with full_disk_named():
            while view:
                written = os.pwrite(self._file, view, self.size)
                self.size += written
                view = view[written:]

    def read(self, offset: int, size: int) -> bytes:
        """Return some bytes, or fewer at the end; several threads may call it at once."""
        return os.pread(self._file, size, offset)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)
