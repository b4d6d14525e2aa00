"""Reads of whole files that notice changes since the scan."""

from __future__ import annotations

import errno
import os
import stat

from shardkit.errors import BadImage
from shardkit.sources.images import image_field_of
from shardkit.sources.inputs import CHANGED

_LARGE = 1 << 20
"""Size in bytes above which a file's header is checked before the rest is read."""


def read_file(path: str, size: int, stamp: int, *, image: bool = True) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        size: Its size in the scan.
        stamp: Its modification time in the scan, in nanoseconds.
        image: Whether it must be an image.

    Raises:
        BadImage: If it cannot be read, or changed since the scan.
    """
    try:
        # Creating a file object would take as long as reading.
        descriptor = open_at_once(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor)
            data = _content(descriptor, size, image) if stat.S_ISREG(found.st_mode) else b""
        finally:
            os.close(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    except OSError as error:
        require_machine(error)
        raise BadImage(f"it cannot be read: {error.strerror or error}") from error
    if found.st_mtime_ns != stamp or len(data) != size:
        raise BadImage(CHANGED)
    return data


def _content(descriptor: int, expected: int, image: bool) -> bytes:
    """Return the content of a file, or one byte more than expected if it has grown."""
    if image and expected > _LARGE:
        with open(descriptor, "rb", closefd=False) as file:
            image_field_of(file)  # raises before so much is read
        os.lseek(descriptor, 0, os.SEEK_SET)
    data = os.read(descriptor, expected + 1)
    while len(data) < expected and (more := os.read(descriptor, expected + 1 - len(data))):
        data += more
    return data


def open_at_once(path: str, flags: int) -> int:
    """Open a file; if it is a pipe, do not wait for the other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def require_machine(error: OSError) -> None:
    """Raise ``error`` if the file is not the cause: all other files would fail too."""
    if error.errno == errno.ENOMEM:
        raise MemoryError(f"{error.filename}: {error.strerror}") from error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise error
