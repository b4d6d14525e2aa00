"""Open shards, one pool for the process, and the only file that knows that a process can fork.

A reader asks the pool each time and holds what it got only during the call. So nothing that is
pickled holds a handle, a child opens its own, and no more files stay open than the pool and the
batches being read need.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from shardkit.contracts import ShardReader
from shardkit.errors import CorruptShard, ShardkitError
from shardkit.record import Record

MAX_OPEN = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 16), 4096)
"""Shards kept open in a process: a quarter of the descriptors that it may have."""

_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""The flag that asks for what is in memory only; 0 where there is none."""

_REMEDY = "Restore it from a copy, or from the source with `shardkit repair`."

_Handle = TypeVar("_Handle")


class ShardFile:
    """A shard as a file of byte ranges, open for reading; closed when nobody holds it any more.

    ``pread`` shares no position, so that any number of threads may read at once.

    Raises:
        CorruptShard: If the file is missing or has not the size that the manifest gives.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._descriptor = -1
        try:
            # Without waiting for somebody to write into a pipe that stands in its place.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ShardkitError(
                    f"the shard {path} cannot be opened: too many files are open. Read fewer "
                    "shards at once, or raise the limit (`ulimit -n`)."
                ) from error
            raise CorruptShard(f"the shard {path} cannot be opened: {error.strerror}") from error
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptShard(f"the shard {path} is not a file. {_REMEDY}")
        if found.st_size != size:
            raise CorruptShard(
                f"the shard {path} has {found.st_size} bytes; the manifest says {size}. {_REMEDY}"
            )
        os.set_blocking(self._descriptor, True)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read_cached(self, offset: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` if the kernel has all of it in memory, and tell whether it had.

        So a warm batch is spared being announced, which takes a sixth as long as reading it.
        """
        if not _NOWAIT or not 0 <= offset <= self._size - len(buffer):
            return False
        try:
            return os.preadv(self._descriptor, [buffer], offset, _NOWAIT) == len(buffer)
        except OSError:  # it is not, or this filesystem cannot tell
            return False

    def announce(self, offset: int, length: int) -> None:
        """Tell the kernel what will be read: a cold batch then takes a third of the time."""
        if hasattr(os, "posix_fadvise") and 0 <= offset < self._size:
            with contextlib.suppress(OSError):  # it is advice; reading says what is wrong
                os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on.

        Raises:
            CorruptShard: If the file has fewer, or the device cannot read them.
        """
        self._require_within(offset, length)  # before memory is taken for what cannot be there
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Raises:
            CorruptShard: If the file has fewer, or the device cannot read them.
        """
        self._require_within(offset, len(buffer))
        found = 0
        while found < len(buffer):  # a network filesystem may give a part, and then the rest
            try:
                part = os.preadv(self._descriptor, [buffer[found:]], offset + found)
            except OSError as error:
                raise CorruptShard(
                    f"the shard {self._path} cannot be read at byte {offset + found}: "
                    f"{error.strerror}"
                ) from error
            if not part:
                raise CorruptShard(
                    f"the shard {self._path} ends at byte {offset + found}, "
                    f"in a record of {len(buffer)} bytes at {offset}"
                )
            found += part

    def pieces(self, length: int, offsets: Sequence[int]) -> bytes:
        """Return pieces of one length, one after the other.

        Raises:
            CorruptShard: If the file ends before one, or the device cannot read it.
        """
        read, descriptor = os.pread, self._descriptor
        try:
            found = b"".join([read(descriptor, length, offset) for offset in offsets])
        except OSError as error:
            raise CorruptShard(f"{self._path} cannot be read: {error.strerror}") from error
        if len(found) != length * len(offsets):
            raise CorruptShard(f"{self._path} was cut: it ends before byte {max(offsets) + length}")
        return found

    def _require_within(self, offset: int, length: int) -> None:
        if not 0 <= offset <= self._size - length:  # to the kernel, -1 is where others read
            raise CorruptShard(
                f"the shard {self._path} has no {length} bytes at {offset}: it ends at byte "
                f"{self._size}"
            )


class LockedReader:
    """A shard that its format's own library reads, for one thread at a time; closed like a file."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._reader.close()

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows``: same order, duplicates and all."""
        with self._lock:
            return self._reader.read(rows)


class _Pool:
    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], object] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[object, ...], open_it: Callable[[], _Handle]) -> _Handle:
        """Return what is open under ``key``, opening it if need be.

        What is evicted stays open until its last holder lets it go.
        """
        with self._lock:
            handle = self._open.get(key)
            if handle is None:
                handle = self._open[key] = open_it()
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(key)
            return cast(_Handle, handle)

    def drop(self, key: tuple[object, ...]) -> None:
        """Forget what is open under ``key``, if anything is."""
        with self._lock:
            self._open.pop(key, None)

    def reset(self) -> None:
        """Forget everything: in a forked child, whose lock may be held by a thread it lacks."""
        self.__init__()  # type: ignore[misc]


_POOL = _Pool()
os.register_at_fork(after_in_child=_POOL.reset)


def shard_file(path: Path, size: int, identity: str) -> ShardFile:
    """Return the shard at ``path``, open as a file.

    Args:
        path: The shard.
        size: Its size in bytes, from the manifest.
        identity: Its SHA-256, from the manifest: a shard written anew in the same place is another.

    Raises:
        CorruptShard: If it is missing or of another size.
    """
    return _POOL.get((path, identity), lambda: ShardFile(path, size))


def forget(path: Path, identity: str) -> None:
    """Open the shard at ``path`` anew at its next use."""
    _POOL.drop((path, identity))
    _POOL.drop((path, identity, "library"))


def shard_reader(path: Path, identity: str, read: Callable[[Path], ShardReader]) -> LockedReader:
    """Return the shard at ``path``, open through its format's library.

    Args:
        path: The shard.
        identity: Its SHA-256, from the manifest.
        read: The format's way to open it.

    Raises:
        CorruptShard: If it is not a whole shard of its format.
    """
    return _POOL.get((path, identity, "library"), lambda: LockedReader(read(path)))
