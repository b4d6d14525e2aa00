"""Reads of whole files that notice changes since the scan."""

from __future__ import annotations

import errno
import os
import stat

from shardkit.codecs.image import image_field_of
from shardkit.errors import BadImage, ConversionFailed
from shardkit.system.files import as_name
from shardkit.system.safe_paths import parts_of

_LARGE = 1 << 20
"""Size in bytes above which a file's header is checked before the rest is read."""

_OF_A_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EIO),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EBADMSG),
    getattr(errno, "EUCLEAN", errno.EIO),
}
"""Errors of reads that may concern a single file, such as a bad sector. Others, such as a server
that does not answer or too many open files, concern all, and no image may be left out for them."""

CHANGED = "it changed since the scan"


def require_inside(name: str) -> None:
    """Raise BadImage for an entry's name that leads out of its source: a plan may be anybody's."""
    try:
        parts_of(as_name(name))
    except ValueError as error:
        raise BadImage("its name is not a plain path below the source") from error


def read_file(path: str, size: int, stamp: int, *, image: bool = True) -> bytes:
    """Return the content of a file whose size and modification time are those of the scan.

    ``stamp`` is in nanoseconds. If ``image``, the content must be an image. It raises `BadImage` if
    the file has changed or cannot be read; `ConversionFailed` if its folder is gone, too: then the
    source is not mounted, or was moved.
    """
    try:
        # Creating a file object would take as long as reading.
        descriptor = open_at_once(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            # A plan may state any size: never reserve more memory than the file has bytes.
            expected = min(size, status.st_size)
            data = _content(descriptor, expected, image) if stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    except OSError as error:
        require_machine(error, path)
        folder = os.path.dirname(path)
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and _is_gone(folder):
            raise ConversionFailed(
                f"{folder} is missing or empty, and had images when they were listed. "
                "Mount or restore it, then rerun"
            ) from error
        raise BadImage(f"it cannot be read: {error.strerror or error}") from error
    if status.st_mtime_ns != stamp or len(data) != size:
        raise BadImage(CHANGED)
    return data


def _is_gone(folder: str) -> bool:
    """Return whether a folder does not exist, or is empty, as a mount point without its disk."""
    try:
        with os.scandir(folder or ".") as entries:
            return next(entries, None) is None
    except OSError:
        return True


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


def require_machine(error: OSError, path: str) -> None:
    """Raise the error of a read unless this file alone is the cause: others would fail too."""
    if error.errno == errno.ENOMEM:
        raise MemoryError(f"{path}: {error.strerror}") from error
    if error.errno is not None and error.errno not in _OF_A_FILE:
        raise OSError(error.errno, error.strerror, path) from error
