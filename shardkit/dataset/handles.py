"""The process-wide pool of open shards. Only this module handles forks.

Readers get a handle from the pool for each call and never keep it. So pickled objects hold no
handles, child processes open their own, and the number of open files stays limited.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from shardkit.errors import CorruptShard, ShardkitError
from shardkit.system import compiled
from shardkit.system.safe_paths import UNFIT, naming, open_plain, opened

MAX_OPEN = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 16), 4096)
"""Maximum open shards per process: a quarter of its file descriptor limit."""

_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""The flag to read only cached data; 0 if the platform lacks it."""

REMEDY = "Restore it from a copy, or from the source with `shardkit repair`."
"""Remedy for a shard that was replaced by another file."""

_Handle = TypeVar("_Handle")
_Read = TypeVar("_Read")
_Result = TypeVar("_Result")


class ShardFile:
    """A shard open for reading byte ranges; closed when its last reference goes.

    Any number of threads may read at once, since ``pread`` uses no shared position. Raises
    CorruptShard if the file is missing, or its size differs from the manifest.
    """

    def __init__(
        self, path: Path, size: int, root: Path | None = None, *, remedy: str = REMEDY
    ) -> None:
        """Open the file; ``size`` is from the manifest.

        Links below ``root``, the dataset, are refused; by default the file's own folder. ``remedy``
        is for the message about another file.
        """
        self._path = path
        self._size = size
        self.descriptor = -1
        """The open file; closed with this object."""
        try:
            # O_NONBLOCK: opening a pipe in the file's place must not block.
            top = root or path.parent
            with opened(top, path.parent.relative_to(top)) as folder:
                flags = os.O_RDONLY | os.O_NONBLOCK
                self.descriptor = open_plain(path, flags, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ShardkitError(
                    f"the shard {path} cannot be opened: too many files are open",
                    remedy="Read fewer shards at once, or raise the limit (`ulimit -n`).",
                ) from error
            if not isinstance(error, UNFIT):
                raise
            raise CorruptShard(
                f"the shard {path} cannot be opened: {error.strerror}", where=path
            ) from error
        with naming(path):
            status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptShard(f"the shard {path} is not a file", remedy=remedy, where=path)
        if status.st_size != size:
            raise CorruptShard(
                f"the shard {path} has {status.st_size} bytes; the manifest lists {size}",
                remedy=remedy,
                where=path,
            )
        os.set_blocking(self.descriptor, True)
        self.modified = status.st_mtime_ns
        """Time of the last modification when it was opened, in nanoseconds."""

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    @cached_property
    def map(self) -> Any:
        """The mapped file for the compiled module; None without one or if it cannot be mapped.

        Python never touches its pages: if the file is truncated, they raise SIGBUS. Where address
        space is limited (``ulimit -v``), it is left to those who cannot do without.
        """
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return None
        return compiled.map_file(self.descriptor, self._size)

    def touch(self) -> None:
        """Note that the file is used, in its time of access."""
        with contextlib.suppress(OSError):  # of another user
            os.utime(self.descriptor, ns=(time.time_ns(), self.modified))

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more, so that closing it frees its space."""
        return os.fstat(self.descriptor).st_nlink == 0

    def read_cached(self, offset: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` if all of it is in the page cache; return whether it was.

        This spares a cached batch the readahead calls, which take a sixth of its reading time.
        """
        if not _NOWAIT or not 0 <= offset <= self._size - len(buffer):
            return False
        try:
            return os.preadv(self.descriptor, [buffer], offset, _NOWAIT) == len(buffer)
        except OSError:  # not cached, or not supported by this file system
            return False

    def announce(self, offset: int, length: int) -> None:
        """Issue readahead for a range; a cold batch then takes a third of the time."""
        if hasattr(os, "posix_fadvise") and 0 <= offset < self._size:
            with contextlib.suppress(OSError):  # only advice; the read reports errors
                os.posix_fadvise(self.descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on; CorruptShard if there are fewer."""
        self._require_within(offset, length)  # before allocating memory
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on; CorruptShard if there are fewer."""
        self._require_within(offset, len(buffer))
        done = 0
        while done < len(buffer):  # a network file system may return a part
            try:
                count = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                error.filename = os.fspath(self._path)
                raise
            if not count:
                self._fail_within(offset, len(buffer), os.fstat(self.descriptor).st_size)
            done += count

    def read_ranges(self, length: int, offsets: Sequence[int]) -> bytes:
        """Return the ranges of ``length`` bytes at ``offsets``, concatenated.

        Raises CorruptShard if the file ends before one.
        """
        read = os.pread
        descriptor = self.descriptor
        try:
            content = b"".join([read(descriptor, length, offset) for offset in offsets])
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise
        if len(content) != length * len(offsets):
            raise CorruptShard(
                f"{self._path} is truncated: it ends before byte {max(offsets) + length}"
            )
        return content

    def _require_within(self, offset: int, length: int) -> None:
        if not 0 <= offset <= self._size - length:  # preadv reads offset -1 at the file's position
            self._fail_within(offset, length, self._size)

    def _fail_within(self, offset: int, length: int, size: int) -> NoReturn:
        raise CorruptShard(
            f"{self._path} ends at byte {size}, but the record has {length} bytes at {offset}"
        )


class _Reads(Protocol[_Read]):
    """The reader that a `LockedReader` locks."""

    def read(self, rows: Sequence[int]) -> list[_Read]: ...
    def close(self) -> None: ...


class LockedReader(Generic[_Read]):
    """A shard that is open in a reader, such as its format's, for one thread at a time."""

    def __init__(self, reader: _Reads[_Read]) -> None:
        self._reader = reader
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._reader.close()

    def read(self, rows: Sequence[int]) -> list[_Read]:
        """Return the records of ``rows`` in that order, including duplicates."""
        return self.call(lambda reader: reader.read(rows))

    def call(self, work: Callable[[Any], _Result]) -> _Result:
        """Return the result of ``work`` with the reader."""
        with self._lock:
            return work(self._reader)


class _Pool:
    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], object] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[object, ...], open_it: Callable[[], _Handle]) -> _Handle:
        """Return the handle of ``key``, opening it if needed.

        An evicted handle stays open until its last reference goes.
        """
        with self._lock:
            handle: Any = self._open.get(key)
            if handle is None:
                handle = self._open[key] = open_it()
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(key)
            return handle  # type: ignore[no-any-return]

    def drop(self, key: tuple[object, ...]) -> None:
        """Drop the handle of ``key``, if any."""
        with self._lock:
            self._open.pop(key, None)

    def has(self, key: tuple[object, ...]) -> bool:
        """Return whether the handle of ``key`` is open."""
        return key in self._open

    def drop_removed(self) -> None:
        """Drop all files that were removed."""
        with self._lock:
            for key, handle in [*self._open.items()]:
                if isinstance(handle, ShardFile) and handle.is_removed:
                    self._open.pop(key)

    def reset(self) -> None:
        """Drop all handles and the lock in a forked child: a lost thread may hold the lock."""
        self.__init__()  # type: ignore[misc]


_POOL = _Pool()
os.register_at_fork(after_in_child=_POOL.reset)


def shard_file(
    path: Path, size: int, identity: str, root: Path | None = None, *, remedy: str = REMEDY
) -> ShardFile:
    """Return the shard at ``path``, open as a file.

    ``size`` in bytes and ``identity``, its SHA-256, are from the manifest: a rewritten shard has
    others. ``root`` and ``remedy`` are those of `ShardFile`. Raises CorruptShard if it is missing
    or of another size.
    """
    return _POOL.get((path, identity), lambda: ShardFile(path, size, root, remedy=remedy))


def is_open(path: Path, identity: str) -> bool:
    """Return whether the shard at ``path`` is open as a file."""
    return _POOL.has((path, identity))


def drop_removed() -> None:
    """Close all shards whose files were removed, once their readers are done."""
    _POOL.drop_removed()


def forget(path: Path, identity: str) -> None:
    """Reopen the shard at ``path`` at its next use."""
    _POOL.drop((path, identity))
    _POOL.drop((path, identity, "library"))
    _POOL.drop((path, identity, "records"))


def shard_reader(
    path: Path, identity: str, read: Callable[[Path], _Reads[_Read]], kind: str = "library"
) -> LockedReader[_Read]:
    """Return the shard at ``path``, open through a reader that ``read`` returns.

    ``identity`` is its SHA-256, from the manifest. ``kind`` is ``library`` for the reader of its
    format, or ``records``. Raises CorruptShard if it is not an intact shard of its format.
    """
    return _POOL.get((path, identity, kind), lambda: LockedReader(read(path)))
