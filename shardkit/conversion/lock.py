"""Lock a work folder, so only one process writes there; the lock ends with the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from shardkit.conversion.disk import as_failure
from shardkit.errors import UsageError
from shardkit.record import dump_json, load_json
from shardkit.system.files import read_small
from shardkit.system.safe_paths import (
    LinkRefused,
    move,
    open_plain,
    opened,
    remove,
    status_of,
    walk,
)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems without locks: some network mounts and FUSE."""

_REFUSALS = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO),
    *(errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Errors of a folder that cannot be written; any other error means that the disk fails."""


@contextlib.contextmanager
def locked(folder: Path, check: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of ``folder`` within the block; create the folder if it does not exist.

    If the file system has no locks, a file names the process instead. A killed process leaves it
    behind. A later process on the same machine removes it; on another machine, the user must.

    Args:
        folder: The folder. The holder may remove it, and with it the lock.
        check: Called before each attempt; raises if the work cannot be done.

    Raises:
        UsageError: If another process holds the lock, or the folder cannot be written.
        ConversionFailed: If the disk is full or fails.
    """
    release = None
    while release is None:  # another process may remove the lock between check and attempt
        check()
        try:
            release = _take(folder.parent, folder.name)
        except LinkRefused as error:
            raise _unusable(folder, error) from error
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise as_failure(error, folder.parent) from error
            reason = error.strerror
            raise UsageError(f"{folder.parent} cannot be written: {reason}") from error
    try:
        _refuse_planted(folder)
        yield
    finally:
        release()


def _refuse_planted(folder: Path) -> None:
    """Refuse a work folder with links or pipes, which shardkit never creates.

    The formats' libraries open files there by path, and would follow links.
    """
    try:
        for _ in walk(folder.parent, folder.name):
            pass
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the work folder {folder} cannot be used: {error.filename}: {error.strerror}. Remove "
        f"{folder} (if it is a link, only the link) and start over."
    )


def _take(target: Path, work: str) -> Callable[[], None] | None:
    """Return a function that releases the lock, or None if the lock was removed meanwhile."""
    target.mkdir(parents=True, exist_ok=True)
    name = f"{work}/lock"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(target / work)
        with opened(target, work) as folder:
            # Opened for writing, so users with read-only access cannot hold the lock.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
            descriptor = open_plain(target / name, flags, 0o622, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), status_of(target, name)):
            return lambda: os.close(descriptor)
    except FileNotFoundError:
        pass
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"another conversion is writing into {target}") from None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NO_LOCKS:
            raise
        return _own(target, f"{work}/owner")
    os.close(descriptor)
    return None


def _own(target: Path, owner: str) -> Callable[[], None] | None:
    """Write this process's name to the file ``owner``, unless it names a running process."""
    path = target / owner
    try:
        with opened(target, str(Path(owner).parent)) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = open_plain(path, flags, 0o644, dir_fd=folder)
    except FileExistsError:
        _remove(target, owner, require_dead(target, owner))
        return None
    name = dump_json({"machine": socket.gethostname(), "process": os.getpid()})
    with open(descriptor, "wb") as file:
        file.write(name)
    return lambda: _remove(target, owner, name)


def _remove(target: Path, owner: str, name: bytes) -> None:
    """Remove the file if it still has this content; another process may have replaced it."""
    aside = f"{owner}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        move(target, owner, aside)
        if read_small(target / aside, root=target) == name:
            remove(target, aside)
        else:
            move(target, aside, owner)


def require_dead(target: Path, owner: str) -> bytes:
    """Return the content of an owner file; refuse if its process runs or cannot be checked."""
    path = target / owner
    content = b""
    try:
        content = read_small(target / owner, root=target)
        value = load_json(content)
        machine, process = str(value["machine"]), int(value["process"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        machine, process = "an unknown machine", -1
    if machine == socket.gethostname() and process > 0:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return content
        except (PermissionError, OverflowError):
            pass  # it runs as another user, or no process can have this ID
    raise UsageError(
        f"another conversion is writing into {path.parent.parent}: process {process} on {machine}. "
        f"This file system has no locks. If that process no longer runs, remove {path}."
    )
