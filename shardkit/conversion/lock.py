"""One conversion at a time in one place: a lock that ends with the process, wherever possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from shardkit.conversion.space import as_failure
from shardkit.errors import UsageError
from shardkit.record import dump_json

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What file systems without locks answer: some network mounts and FUSE."""

_REFUSALS = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)
"""What is said of a place in which nothing can be written; all else is a disk that fails."""


@contextlib.contextmanager
def locked(folder: Path, look: Callable[[], object]) -> Iterator[None]:
    """Hold the one lock of ``folder``, which is made if need be, while the block runs.

    Where the file system has no locks, a file names the process instead. It is left behind by a
    kill, and then taken over on the same machine, but not on another, which cannot know.

    Args:
        folder: The folder. Its holder may remove it, and with it the lock.
        look: Called before each try; it raises where there is nothing to be done there.

    Raises:
        UsageError: If another process holds it, or the folder cannot be written.
        ConversionFailed: If the disk is full, or fails.
    """
    release = None
    while release is None:  # another holder may remove the lock between the look and the try
        look()
        try:
            release = _take(folder)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise as_failure(error, folder.parent) from error
            reason = error.strerror
            raise UsageError(f"{folder.parent} cannot be written: {reason}") from error
    try:
        yield
    finally:
        release()


def _take(folder: Path) -> Callable[[], None] | None:
    """Return what releases the lock, or None if it was removed meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return lambda: os.close(descriptor)
    except FileNotFoundError:
        pass
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"another conversion is writing into {folder.parent}") from None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NO_LOCKS:
            raise
        return _own(folder / "owner")
    os.close(descriptor)
    return None


def _own(path: Path) -> Callable[[], None] | None:
    """Put this process's name to ``path``, unless a living one's stands there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        _remove(path, _require_dead(path))
        return None
    name = dump_json({"machine": socket.gethostname(), "process": os.getpid()})
    with open(descriptor, "wb") as file:
        file.write(name)
    return lambda: _remove(path, name)


def _remove(path: Path, name: bytes) -> None:
    """Remove the file if it bears that name; another process may have put its own there."""
    aside = path.with_name(f"{path.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if aside.read_bytes() == name:
            aside.unlink()
        else:
            aside.rename(path)


def _require_dead(path: Path) -> bytes:
    """Return what the file says; refuse if its process lives, or nothing can be known of it."""
    content = b""
    try:
        content = path.read_bytes()
        owner = json.loads(content)
        machine, process = str(owner["machine"]), int(owner["process"])
    except (OSError, ValueError, TypeError, KeyError):
        machine, process = "an unknown machine", -1
    if machine == socket.gethostname() and process > 0:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return content
        except PermissionError:
            pass  # it is another user's, and lives
    raise UsageError(
        f"another conversion is writing into {path.parent.parent}: process {process} on {machine}. "
        f"If it no longer runs, remove {path}: this file system has no locks that could tell."
    )
