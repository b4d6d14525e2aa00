"""Lock a work folder, so only one process writes there; the lock ends with the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from shardkit.conversion.disk import as_failure
from shardkit.errors import UsageError
from shardkit.record import dump_json, load_json
from shardkit.system.files import read_small
from shardkit.system.safe_paths import (
    UNFIT,
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

    ``check`` is called before each attempt and raises if the work cannot be done. The holder may
    remove the folder, and with it the lock. UsageError if another process holds the lock.
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
    except UNFIT as error:
        raise _unusable(folder, error) from error
    except OSError as error:
        raise as_failure(error, folder.parent) from error


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the work folder {folder} cannot be used: {error.filename}: {error.strerror}",
        remedy=f"Remove {folder} (if it is a link, only the link) and start over.",
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
        owner = f"{work}/owner"
        if claim(target, owner):
            return lambda: _remove(target, owner, _this_process())
        require_dead(target, owner)
        return None
    os.close(descriptor)
    return None


def _remove(target: Path, owner: str, name: bytes) -> None:
    """Remove the file if it still has this content; another process may have replaced it."""
    aside = f"{owner}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        move(target, owner, aside)
        if read_small(target / aside, root=target) == name:
            remove(target, aside)
        else:
            move(target, aside, owner)


def claim(target: Path, owner: str) -> bool:
    """Write this process's name to the new file ``owner``; return whether it was new.

    A file that names a process of this machine that no longer runs is replaced.
    """
    while True:
        try:
            _create(target, owner, _this_process())
        except FileExistsError:
            content, machine, process = _owner(target, owner)
            if not _is_gone(machine, process):
                return False
            _remove(target, owner, content)
        else:
            return True


def _create(target: Path, owner: str, content: bytes) -> None:
    """Create the file ``owner`` with its content in one step, so that a kill leaves none empty."""
    aside = f"{owner}-{os.getpid()}-{threading.get_native_id()}"
    names = Path(aside).name, Path(owner).name
    with opened(target, str(Path(owner).parent)) as folder:
        _write(target / aside, content, folder)
        try:
            os.link(*names, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, *_NO_LOCKS):
                raise
            _write(target / owner, content, folder)  # a file system without hard links
        finally:
            os.unlink(names[0], dir_fd=folder)


def _write(path: Path, content: bytes, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(open_plain(path, flags, 0o644, dir_fd=folder), "wb") as file:
        file.write(content)


def _this_process() -> bytes:
    return dump_json({"machine": socket.gethostname(), "process": os.getpid()})


def _owner(target: Path, owner: str) -> tuple[bytes, str, int]:
    """Return the content of an owner file, and the machine and process that it names."""
    content = b""
    try:
        content = read_small(target / owner, root=target)
        value = load_json(content)
        return content, str(value["machine"]), int(value["process"])
    except (*UNFIT, ValueError, TypeError, KeyError, OverflowError):
        return content, "an unknown machine", -1


def _is_gone(machine: str, process: int) -> bool:
    """Return whether a process ran on this machine, and no longer does."""
    if machine != socket.gethostname() or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass  # it runs as another user, or no process can have this ID
    return False


def require_dead(target: Path, owner: str) -> bytes:
    """Return the content of an owner file; refuse if its process runs or cannot be checked."""
    path = target / owner
    content, machine, process = _owner(target, owner)
    if _is_gone(machine, process):
        return content
    raise UsageError(
        f"another conversion is writing into {path.parent.parent}: process {process} on "
        f"{machine}. This file system has no locks",
        remedy=f"If that process is no longer running, remove {path}.",
    )
