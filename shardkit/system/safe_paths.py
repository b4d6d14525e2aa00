"""Paths inside an untrusted folder, resolved without following symbolic links.

These functions open, move and remove files one path component at a time, starting from an open
directory. So neither ``..`` in a name nor a planted link can lead outside the folder. The folder's
own path comes from the user and may contain links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NO_PATH = (errno.ELOOP, errno.ENAMETOOLONG)
"""Errors of paths that can never name a file, such as a link to itself."""

_DEEPEST = 64
"""Maximum nesting of folders below a work folder; no version of shardkit makes more than six."""


class Unfit(OSError):
    """Something that a dataset never contains, such as a pipe in the place of a file."""


class LinkRefused(Unfit):
    """A symbolic link inside a dataset, which could lead outside it."""


UNFIT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, Unfit)
"""Errors that describe the content of a folder: only these can mean that a dataset is damaged.

Any other `OSError`, such as EIO, EMFILE or EACCES, says nothing about the content.
"""


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an `OSError` of the block name ``path`` instead of nothing, a number or a part of it."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_PATH and not isinstance(error, Unfit):
            raise Unfit(error.errno, error.strerror, os.fspath(path)) from error
        if "/" not in str(error.filename):
            error.filename = os.fspath(path)
        raise


def split_path(name: str | PurePath) -> tuple[str, ...]:
    """Return the components of a plain relative path.

    ValueError if the path is absolute, contains ``..``, or has an impossible component.
    """
    names = tuple(os.fsdecode(os.fsencode(name)).split("/"))
    if any(item in ("", ".", "..") or "\0" in item or len(item) > 255 for item in names):
        raise ValueError(f"the name {os.fspath(name)!r} is not a plain relative path")
    return names


@contextlib.contextmanager
def opened(root: Path, name: str | PurePath = "") -> Iterator[int]:
    """Open the folder ``name`` below ``root``, or ``root`` itself, and yield its file descriptor.

    LinkRefused if a component of ``name`` is a symbolic link.
    """
    try:
        descriptor = os.open(root, _FOLDER)
    except OSError as error:
        if error.errno not in NO_PATH:
            raise
        raise Unfit(error.errno, error.strerror, str(root)) from error
    path = Path(root)
    try:
        for folder_name in split_path(name) if str(name) not in ("", ".") else ():
            path /= folder_name
            # Forgotten before it is closed: a signal handler that raises in between must not have
            # it closed twice, which could close a file that another thread just opened.
            above = descriptor
            descriptor = open_plain(path, _FOLDER, dir_fd=descriptor)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def open_plain(path: Path, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
    """Open ``path`` like `os.open`; LinkRefused if its last component is a symbolic link."""
    name = path if dir_fd is None else path.name
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            require_no_link(path, dir_fd=dir_fd)
        if error.errno == errno.ENXIO:  # a socket
            raise Unfit(error.errno, "it is not a file", str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None


def require_no_link(path: Path, *, dir_fd: int | None = None) -> None:
    """Raise LinkRefused if the last component of ``path`` is a symbolic link."""
    name = path if dir_fd is None else path.name
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), naming(path):
        if stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise _link(path)


def _link(path: Path) -> LinkRefused:
    return LinkRefused(
        errno.ELOOP, "it is a symbolic link; a dataset must not contain any", str(path)
    )


def is_file(root: Path, name: str) -> bool:
    """Return whether ``name`` below ``root`` is a regular file; OSError if that is not known."""
    try:
        return stat.S_ISREG(status_of(root, name).st_mode)
    except UNFIT:
        return False


def exists(path: Path) -> bool:
    """Return whether ``path`` exists, perhaps as a link; `os.path.lexists` hides errors."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno not in NO_PATH:
            raise
        return False
    return True


def status_of(root: Path, name: str) -> os.stat_result:
    """Return the status of ``name`` below ``root``, without following links.

    LinkRefused if it, or a folder on the way, is a symbolic link.
    """
    with naming(root / name), _parent(root, name) as (folder, last):
        require_no_link(root / name, dir_fd=folder)
        return os.stat(last, dir_fd=folder, follow_symlinks=False)


def remove(root: Path, name: str) -> None:
    """Remove the file ``name`` below ``root``, if it exists."""
    with (
        contextlib.suppress(FileNotFoundError),
        naming(root / name),
        _parent(root, name) as (folder, last),
    ):
        os.unlink(last, dir_fd=folder)


def remove_empty(root: Path, name: str) -> None:
    """Remove the folder ``name`` below ``root``, if it exists and is empty."""
    with contextlib.suppress(OSError), _parent(root, name) as (folder, last):
        os.rmdir(last, dir_fd=folder)


def remove_tree(root: Path, name: str) -> None:
    """Remove the folder ``name`` below ``root`` and its content; of a link, only the link."""
    with (
        contextlib.suppress(FileNotFoundError),
        naming(root / name),
        _parent(root, name) as (folder, _),
    ):
        _remove_tree(folder, root / name, _DEEPEST)


def _remove_tree(folder: int, path: Path, deepest: int) -> None:
    if not stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(path.name, dir_fd=folder)
        return
    if not deepest:
        raise Unfit(errno.ELOOP, "its folders are nested too deeply", str(path))
    descriptor = open_plain(path, _FOLDER, dir_fd=folder)
    try:
        for name in os.listdir(descriptor):
            _remove_tree(descriptor, path / name, deepest - 1)
    finally:
        os.close(descriptor)
    os.rmdir(path.name, dir_fd=folder)


def move(root: Path, name: str, goal: str) -> None:
    """Rename ``name`` to ``goal``, both below ``root``, replacing a file there."""
    with (
        naming(root / name),
        _parent(root, name) as (source, old),
        _parent(root, goal) as (target, new),
    ):
        os.replace(old, new, src_dir_fd=source, dst_dir_fd=target)


def make_folder(root: Path, name: str, mode: int = 0o777) -> None:
    """Create the folder ``name`` below ``root``, and its parents, unless they exist."""
    for end in range(1, len(folders := split_path(name)) + 1):
        above = "/".join(folders[: end - 1])
        with (
            contextlib.suppress(FileExistsError),
            naming(root / name),
            opened(root, above) as folder,
        ):
            os.mkdir(folders[end - 1], mode, dir_fd=folder)
    with opened(root, name):
        pass


def walk(root: Path, name: str = "", *, any_kind: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the path below ``root`` of everything in ``name``, and whether each is a folder.

    LinkRefused at a symbolic link, and OSError at anything but a file or folder, unless
    ``any_kind``; OSError also if folders are nested too deeply.
    """
    yield from _walk(root, name, _DEEPEST, any_kind)


def _walk(root: Path, name: str, deepest: int, any_kind: bool) -> Iterator[tuple[str, bool]]:
    with naming(root / name), opened(root, name) as folder:
        names = sorted(os.listdir(folder))
        kinds = [os.stat(child, dir_fd=folder, follow_symlinks=False).st_mode for child in names]
    for child, kind in zip(names, kinds, strict=True):
        below = f"{name}/{child}" if name else child
        if stat.S_ISLNK(kind) and not any_kind:
            raise _link(root / below)
        if not (any_kind or stat.S_ISDIR(kind) or stat.S_ISREG(kind)) or not deepest:
            raise Unfit(errno.EINVAL, "it is neither a file nor a folder", str(root / below))
        yield below, stat.S_ISDIR(kind)
        if stat.S_ISDIR(kind):
            yield from _walk(root, below, deepest - 1, any_kind)


def require_removable(root: Path, names: Iterable[str]) -> None:
    """Check that all files can be removed, before any of them is.

    LinkRefused if a file, or a folder on the way, is a symbolic link; PermissionError if this user
    may not remove one of them; OSError if one of the names is not a file.
    """
    folders: dict[str, list[str]] = {}
    for name in names:
        above, _, last = name.rpartition("/")
        folders.setdefault(above, []).append(last)
    for above, files in folders.items():
        with contextlib.suppress(FileNotFoundError), opened(root, above) as folder:
            _require_removable(root / above, folder, files)


def _require_removable(path: Path, folder: int, names: Iterable[str]) -> None:
    with naming(path):
        status = os.fstat(folder)
    effective = os.access in os.supports_effective_ids
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=effective):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    free = not status.st_mode & stat.S_ISVTX or os.geteuid() in (0, status.st_uid)
    for name in names:
        require_no_link(path / name, dir_fd=folder)
        with contextlib.suppress(FileNotFoundError), naming(path / name):
            entry = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(entry.st_mode):
                raise OSError(errno.EISDIR, "it is a folder, not a file", str(path / name))
            if not free and entry.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(path / name))


@contextlib.contextmanager
def _parent(root: Path, name: str) -> Iterator[tuple[int, str]]:
    """Open the parent folder of ``name``; yield its file descriptor and the last component."""
    above, _, last = name.rpartition("/")
    split_path(name)
    with opened(root, above) as folder:
        yield folder, last
