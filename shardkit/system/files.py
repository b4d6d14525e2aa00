"""Durable file writes (write, sync, rename), guarded reads, and disk space.

Only this module decides what "on disk" means.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from shardkit.errors import ShardkitError, UsageError
from shardkit.system.safe_paths import UNFIT, Unfit, naming, open_plain, opened

_BLOCK = 1 << 20
"""Bytes written in one call, unless a single piece is larger."""

_HASHED = 1 << 21
"""Bytes hashed at a time: few enough to stay in the CPU cache."""

SMALL_BYTES = 64 << 20
"""Maximum file size for `read_small`: a manifest of 200,000 shards is smaller."""

_NEW = os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to create a file: fails if the name exists, even as a link."""

_OLD = 600
"""Age in seconds after which a temporary result counts as abandoned."""

_PIECES = 512
"""Pieces written in one call; Linux allows twice as many."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; a crash leaves either all of it or the previous content."""
    with published_file(path) as file:
        file.write(content)


def write_together(contents: Mapping[Path, bytes], old: Iterable[Path]) -> None:
    """Write files that belong together, and remove ``old`` ones that do not belong to them.

    A crash leaves some or all of the new files, or of those before, but never some of both.
    """
    before = {*contents, *old}
    with contextlib.ExitStack() as written:
        for path, content in contents.items():
            remove_leftovers(path)
            file = written.enter_context(published_file(path))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for path in before:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in before}:
            sync(folder)


def write_result(path: Path, content: bytes) -> None:
    """Write a file that the user requested, atomically.

    ShardkitError if it cannot be written, most often because the disk is full.
    """
    try:
        remove_leftovers(path)
        write_atomically(path, content)
    except OSError as error:
        raise ShardkitError(f"{path} cannot be written: {error.strerror or error}") from error


def require_own_output(path: Path, option: str, mark: str) -> None:
    """Refuse an output file that cannot be written, or that another program wrote.

    The error names ``option``. ``mark`` is text such as "made by shardkit bench" in the first KiB
    of each file of that command.
    """
    if path.is_dir():
        why = "this is a folder; name a file in it"
    elif not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        why = f"the folder {path.parent} does not exist or cannot be written"
    elif path.exists() and not _starts_with(path, mark.encode()):
        command = mark.removeprefix("made by ")
        why = f"{command} did not write this file; choose another name, or remove it"
    else:
        return
    raise UsageError(f"{option} {path}: {why}")


def _starts_with(path: Path, mark: bytes) -> bool:
    """Return whether a file is empty, or has a mark in its first KiB."""
    if not path.is_file():  # a device
        return False
    with open(path, "rb") as file:
        head = file.read(1024)
    return not head or mark in head


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on exit, sync it and rename it to ``path``.

    The block creates the file. Its name is random, so nobody can plant a file there. If the block
    raises, the file is removed and ``path`` keeps its content. A kill leaves the file behind: a
    conversion removes all that are in its work folder or in the dataset that it replaces, and
    `remove_leftovers` those of the same path that `published_file` made.
    """
    # Names are limited to 255 bytes; the start is enough to recognize the file.
    temporary = path.with_name(f".{_start_of(path)}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def published_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes ``path`` on exit, as for `published`.

    It is locked meanwhile, which tells it from those of processes that were killed.
    """
    with contextlib.ExitStack() as held, published(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | _NEW, 0o666)
        file = held.enter_context(open(descriptor, "wb"))
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield file
        file.flush()


def _start_of(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:200])


def is_temporary(name: str) -> bool:
    """Return whether a file has a name that only `published` gives, so that it may be removed."""
    return re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", name.rpartition("/")[2], re.DOTALL) is not None


def remove_leftovers(path: Path) -> None:
    """Remove this user's files that a killed `published_file` left.

    On a file system without locks, these are the ones that are ten minutes old or older.
    """
    pattern = re.compile(re.escape(f".{_start_of(path)}.") + r"[0-9a-f]{16}\.tmp")
    for entry in os.scandir(path.parent):
        if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError), open_regular(Path(entry.path)) as file:
                status = os.fstat(file.fileno())
                if status.st_uid == os.geteuid() and _is_abandoned(file.fileno(), status):
                    os.unlink(entry.path)


def _is_abandoned(descriptor: int, status: os.stat_result) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return time.time() - status.st_mtime > _OLD
    return True


def move_into(path: Path, folder: Path, name: str) -> None:
    """Sync a file and move it to ``name`` in a dataset's folder, where it replaces a file."""
    sync(path)
    with opened(folder) as descriptor:
        os.replace(path, name, dst_dir_fd=descriptor)
        os.fsync(descriptor)


def exchange(folder: Path, name: str, other: str) -> None:
    """Exchange two entries of a folder in one step, by Linux's renameat2(2).

    OSError if one does not exist, or the system or file system cannot exchange them.
    """
    call = getattr(_C, "renameat2", None)
    if call is None:  # pragma: no cover - an old C library
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(folder))
    names = os.fsencode(name), os.fsencode(other)
    with opened(folder) as descriptor:
        if call(descriptor, names[0], descriptor, names[1], _RENAME_EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder / name))


_RENAME_EXCHANGE = 2  # <linux/fs.h>


def sync(path: Path) -> None:
    """Wait until the content of the file or directory ``path`` is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, root: Path | None = None) -> io.FileIO:
    """Open a dataset's file for reading, unbuffered; only a regular file is accepted.

    Otherwise a pipe could hang the reader, an endless device fill memory, and a link lead out of
    the dataset.

    LinkRefused if the file, or a folder between it and ``root`` (by default its own folder), is a
    symbolic link; OSError if it cannot be opened, or is not a regular file.
    """
    if root is None or path.parent == root:
        return _open_regular(path, None)
    with opened(root, path.parent.relative_to(root)) as folder:
        return _open_regular(path, folder)


def _open_regular(path: Path, folder: int | None) -> io.FileIO:
    def opener(_: str, flags: int) -> int:
        descriptor = open_plain(path, flags | os.O_NONBLOCK, dir_fd=folder)
        try:
            with naming(path):
                mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise Unfit(errno.EINVAL, "it is not a file", os.fspath(path))
            os.set_blocking(descriptor, True)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    # Opened by FileIO, which then closes it even if a signal handler raises.
    return io.FileIO(path, "rb", opener=opener)


def read_small(path: Path, most: int = SMALL_BYTES, *, root: Path | None = None) -> bytes:
    """Return the content of an untrusted file of at most ``most`` bytes.

    ``root`` is as for `open_regular`. OSError if it cannot be opened, is not a regular file, or is
    larger.
    """
    with naming(path), io.BufferedReader(open_regular(path, root)) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise Unfit(errno.EFBIG, f"it is larger than {most:,} bytes", os.fspath(path))
    return content


def as_text(name: str) -> str:
    """Return the text that datasets store for a file name of the `os` module.

    The name is decoded as UTF-8 in any locale; other bytes become lone surrogates.
    """
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")


def as_name(text: str) -> str:
    """Return the `os` module's file name for ``text`` from `as_text`.

    ValueError if no file can have that name.
    """
    return text if text.isascii() else os.fsdecode(text.encode("utf-8", "surrogateescape"))


class FileSha256:
    """The SHA-256 of a dataset's file, computed in steps.

    `open_regular` opens the file. OSError if it cannot be opened or, in any method, read.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self._path = path
        self._file = open_regular(path, root)
        self._digest = hashlib.sha256()
        self._view = memoryview(bytearray(_HASHED))
        self._hashed = 0

    def __enter__(self) -> FileSha256:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def advance(self, end: int) -> tuple[memoryview, int]:
        """Hash the file up to the offset ``end``, unless it is hashed already.

        Return the piece hashed last, in the CPU cache and valid until the next call; and its
        offset.
        """
        piece = self._view[:0]
        while (missing := end - self._hashed) > 0:
            with naming(self._path):
                piece = self._view[: self._file.readinto(self._view[:missing])]
            if not piece:
                break
            self._digest.update(piece)
            self._hashed += len(piece)
        return piece, self._hashed - len(piece)

    def hexdigest(self) -> str:
        """Hash the rest of the file and return its hexadecimal SHA-256."""
        self.advance(sys.maxsize)
        return self._digest.hexdigest()


def sha256_of(path: Path, root: Path | None = None) -> str:
    """Return the hexadecimal SHA-256 of a dataset's file, opened by `open_regular`."""
    with FileSha256(path, root) as digest:
        return digest.hexdigest()


def has_sha256(path: Path, sha256: str, root: Path | None = None) -> bool:
    """Return whether a dataset's file is there and has that SHA-256.

    OSError if it cannot be read, which says nothing about its content.
    """
    try:
        return sha256_of(path, root) == sha256
    except UNFIT:
        return False


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at the file descriptor's position.

    OSError if the disk is full or fails, possibly after a partial write.
    """
    rest = memoryview(content)
    while rest:  # a disk that is nearly full accepts only a part
        rest = rest[os.write(descriptor, rest) :]


class Appender:
    """Appends pieces to a file, several in each system call and without copying them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.size = 0
        """Bytes appended, including those not written yet."""

    def append(self, *pieces: bytes) -> None:
        """Append ``pieces`` in order; `flush` writes them at the latest."""
        size = sum(map(len, pieces))
        self._waiting += pieces
        self._waiting_bytes += size
        self.size += size
        if self._waiting_bytes >= _BLOCK or len(self._waiting) >= _PIECES:
            self.flush()

    def flush(self) -> None:
        """Write all pending pieces."""
        for start in range(0, len(self._waiting), _PIECES):
            self._write(self._waiting[start : start + _PIECES])
        self._waiting.clear()
        self._waiting_bytes = 0

    def _write(self, pieces: Sequence[bytes]) -> None:
        written = os.writev(self._descriptor, pieces)
        rest = memoryview(b"".join(pieces))[written:] if written < sum(map(len, pieces)) else b""
        write_all(self._descriptor, rest)


def overlap(one: Path, other: Path) -> bool:
    """Return whether two paths are one, or one contains the other."""
    one, other = (Path(os.path.realpath(path)) for path in (one, other))
    return one.is_relative_to(other) or other.is_relative_to(one)


def require_local(path: str | Path) -> None:
    """Refuse a URL, which would otherwise name a local folder such as ``s3:``."""
    if url := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", str(path), re.DOTALL):
        raise UsageError(
            f"{url[1]}://{url[2]} is a URL; only local paths are supported here",
            remedy="Download or mount the data, then pass the local folder.",
            where=f"{url[1]}://{url[2]}",
        )


def state_folder() -> Path:
    """Return the folder for what shardkit remembers for this user, which may not exist yet."""
    state = os.environ.get("XDG_STATE_HOME", "")
    above = Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"))
    # A user without a home, as in some containers, remembers nothing.
    return above / "shardkit" if above.is_absolute() else Path("/nonexistent/shardkit")


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of ``path`` or of its nearest existing parent."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class Reservation:
    """Disk space reserved by an unnamed file, which the kernel frees if the process is killed.

    Reserves nothing if the file system cannot preallocate. (``os.posix_fallocate`` would then write
    to every block, which takes hours for a large reservation.)

    OSError with ``ENOSPC`` or ``EDQUOT`` if less space is free.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            _allocate(self._file.fileno(), size)
        except BaseException:
            self.close()
            raise

    def shrink(self, size: int) -> None:
        """Release all but ``size`` bytes."""
        if os.fstat(self._file.fileno()).st_size > size:
            self._file.truncate(size)

    def close(self) -> None:
        """Release all space."""
        self._file.close()


def _allocate(descriptor: int, size: int) -> None:
    """Allocate ``size`` bytes with Linux's fallocate(2), if the file system supports it."""
    allocate = sys.platform == "linux" and getattr(_C, "fallocate64", None)
    if not allocate or size <= 0:
        return
    offset = ctypes.c_int64
    if allocate(ctypes.c_int(descriptor), ctypes.c_int(0), offset(0), offset(size)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))


_C = ctypes.CDLL(None, use_errno=True)
