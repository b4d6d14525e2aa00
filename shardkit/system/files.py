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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from shardkit.errors import UsageError
from shardkit.system.safe_paths import UNFIT, Unfit, naming, open_plain, opened, split_path

_BLOCK = 1 << 20
"""Bytes written in one call, unless a single buffer is larger."""

_HASHED = 1 << 21
"""Bytes hashed at a time: few enough to stay in the CPU cache."""

SMALL_BYTES = 64 << 20
"""Maximum file size for `read_small`: a manifest of 200,000 shards is smaller."""

_NEW = os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to create a file: fails if the name exists, even as a link."""

_PIECES = 512
"""Buffers written in one call; Linux allows twice as many."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; a crash leaves either all of it or the previous content."""
    with published_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on exit, sync it and rename it to ``path``.

    The block creates the file. Its name is random, so nobody can plant a file there. If the block
    raises, the file is removed and ``path`` keeps its content. A kill leaves the file behind: a
    conversion removes all that are in its work folder or in the dataset that it replaces, and
    `shardkit.system.user_files` those of the same path that `published_file` made.
    """
    # Names are limited to 255 bytes; the start is enough to recognize the file.
    temporary = path.with_name(f".{start_of(path)}.{secrets.token_hex(8)}.tmp")
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


def start_of(path: Path) -> str:
    """Return the start of a file's name that the names of its temporary files have."""
    return os.fsdecode(os.fsencode(path.name)[:200])


def is_temporary(name: str) -> bool:
    """Return whether a file has a name that only `published` gives, so that it may be removed."""
    return re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", name.rpartition("/")[2], re.DOTALL) is not None


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


def split_text_path(text: str) -> tuple[str, ...]:
    """Return the parts of a plain path below a folder, given as `as_text` returns it.

    ValueError if it is no such path: see `shardkit.system.safe_paths.split_path`.
    """
    return split_path(as_name(text))


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

        Return the bytes hashed last, in the CPU cache and valid until the next call; and its
        offset.
        """
        data = self._view[:0]
        while (missing := end - self._hashed) > 0:
            with naming(self._path):
                data = self._view[: self._file.readinto(self._view[:missing])]
            if not data:
                break
            self._digest.update(data)
            self._hashed += len(data)
        return data, self._hashed - len(data)

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
    remaining = memoryview(content)
    while remaining:  # a disk that is nearly full accepts only a part
        remaining = remaining[os.write(descriptor, remaining) :]


class Appender:
    """Appends buffers to a file, several in each system call and without copying them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.size = 0
        """Bytes appended, including those not written yet."""

    def append(self, *buffers: bytes) -> None:
        """Append ``buffers`` in order; `flush` writes them at the latest."""
        size = sum(map(len, buffers))
        self._waiting += buffers
        self._waiting_bytes += size
        self.size += size
        if self._waiting_bytes >= _BLOCK or len(self._waiting) >= _PIECES:
            self.flush()

    def flush(self) -> None:
        """Write all pending buffers."""
        for start in range(0, len(self._waiting), _PIECES):
            self._write(self._waiting[start : start + _PIECES])
        self._waiting.clear()
        self._waiting_bytes = 0

    def _write(self, buffers: Sequence[bytes]) -> None:
        written = os.writev(self._descriptor, buffers)
        tail = memoryview(b"".join(buffers))[written:] if written < sum(map(len, buffers)) else b""
        write_all(self._descriptor, tail)


def overlap(first: Path, second: Path) -> bool:
    """Return whether two paths are one, or one contains the other."""
    first, second = (Path(os.path.realpath(path)) for path in (first, second))
    return first.is_relative_to(second) or second.is_relative_to(first)


def require_local(path: str | Path) -> None:
    """Refuse a URL, which would otherwise name a local folder such as ``s3:``."""
    if url := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", str(path), re.DOTALL):
        raise UsageError(
            f"{url[1]}://{url[2]} is a URL; only local paths are supported here",
            remedy="Download or mount the data, then pass the local folder.",
            where=f"{url[1]}://{url[2]}",
        )


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
