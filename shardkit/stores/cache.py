"""A local folder with files of object stores, named by their SHA-256 and shared by processes.

A file is fetched under a temporary name, verified, synced and renamed. So what has its final name
is right, whenever a process is killed. Locks belong to open files, so they end with their process.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import CorruptDataset, CorruptShard, ShardkitError, UsageError
from shardkit.system.files import read_small, sha256_of, sync, write_atomically

_TAG = "CACHEDIR.TAG"
"""Marks a folder as a cache, for us and for backup programs (bford.info/cachedir)."""
_TAGGED = b"Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache of shardkit.\n"

_SHARD = re.compile(r"[0-9a-f]{64}")
_POLL_SECONDS = 0.02
_STALLED_SECONDS = 300.0
"""Seconds without progress after which another process that fetches the same file counts as
stopped: more than a failing request may take."""
_ATTEMPTS = 3
"""Fetches of one file before other content than expected counts as damage."""


class RemoteFile(NamedTuple):
    """A file in an object store."""

    url: str
    """The folder's URL."""
    name: str
    size: int
    sha256: str = ""
    """Empty if unknown."""


BLOCK = 4 << 20
"""Bytes of a block, for shards of which only a part is fetched."""


def count_blocks(size: int) -> int:
    """Return the number of blocks of a shard."""
    return -(-size // BLOCK)


FillBlocks = Callable[[int, Iterable[list[int]], Callable[[int], None]], None]
"""Writes the blocks of some numbers to an open descriptor, and marks those that are complete."""

Fill = Callable[[int], None]
"""Writes the content of a file to an open descriptor."""


@dataclass(frozen=True)
class Cache:
    """A cache folder; make it with `open_cache`."""

    folder: Path
    limit: int | None = None
    """Maximum bytes of all shards, exceeded by one at most; None means no limit."""

    def shard(self, sha256: str) -> Path:
        """Return the path of a shard.

        Raises:
            CorruptDataset: If a manifest states another text than a SHA-256, such as a path.
        """
        if not _SHARD.fullmatch(sha256):
            raise CorruptDataset(f"the manifest is damaged: {sha256[:80]!r} is not a SHA-256")
        return self.folder / "shards" / sha256

    def blocks(self, sha256: str) -> Path:
        """Return the path of a shard of which only some blocks are here.

        It has a byte for each block at its end: 1 if the block is here. The others are holes.
        """
        return self.shard(sha256).with_suffix(".blocks")

    def dataset(self, name: str) -> Path:
        """Return the folder of a dataset's manifest and index."""
        return self.folder / "datasets" / name

    def fetch(self, file: RemoteFile, path: Path, fill: Fill) -> None:
        """Create the file at ``path`` unless it exists; only one process fetches it.

        Args:
            file: What is fetched.
            path: Where, in a folder that exists.
            fill: Called again if the content differs.

        Raises:
            CorruptShard: If the content differs every time.
            ShardkitError: If the process that fetches it stops, or ``fill`` raises.
        """
        with exclusive(_part(path), path.exists) as descriptor:
            if descriptor is not None:
                self._complete(descriptor, file, path, fill)

    def has_blocks(self, file: RemoteFile, numbers: Sequence[int]) -> bool:
        """Return whether some blocks of a shard are here."""
        path, count = self.blocks(file.sha256), count_blocks(file.size)
        with contextlib.suppress(FileNotFoundError), _opened(path, os.O_RDONLY) as blocks:
            here = os.pread(blocks, count, file.size)
            return len(here) == count and all(here[number] for number in numbers)
        return False

    def fetch_blocks(
        self, file: RemoteFile, wanted: Sequence[int], more: Iterable[list[int]], fill: FillBlocks
    ) -> None:
        """Fetch the blocks of a shard that are not in the cache; only one process does at a time.

        The limit is exceeded by what is fetched at a time, at most. Nothing is verified here.

        Args:
            file: The shard.
            wanted: Blocks, ascending. Once all are here, this waits for no other process.
            more: Other blocks, which become known while these are fetched.
            fill: Called with the blocks that are missing.
        """
        path, count = self.blocks(file.sha256), count_blocks(file.size)
        with exclusive(path, lambda: self.has_blocks(file, wanted)) as descriptor:
            if descriptor is None:
                return
            if os.fstat(descriptor).st_size != file.size + count:
                os.ftruncate(descriptor, file.size + count)
            here = bytearray(os.pread(descriptor, count, file.size))

            def missing() -> Iterator[list[int]]:
                for numbers in itertools.chain([wanted], more):
                    if found := [number for number in numbers if not here[number]]:
                        for number in found:
                            here[number] = 1
                        self._make_room(len(found) * BLOCK, path, lambda: None)
                        yield found

            def mark(number: int) -> None:
                # Not synced: checksums of records also find what a power failure took away.
                os.pwrite(descriptor, b"\1", file.size + number)

            fill(descriptor, missing(), mark)

    def _complete(self, descriptor: int, file: RemoteFile, path: Path, fill: Fill) -> None:
        """Fetch a file whose lock we hold."""
        part = _part(path)
        try:
            if path.exists():  # completed between our check and our lock
                part.unlink()
                return
            self._reserve(descriptor, file.size, path)
            for _ in range(_ATTEMPTS):
                fill(descriptor)
                if os.fstat(descriptor).st_size == file.size and sha256_of(part) == file.sha256:
                    break
            else:
                raise CorruptShard(
                    f"{file.url}/{file.name} differs from the manifest: its SHA-256 does not "
                    "match. Upload the dataset again."
                )
            os.fsync(descriptor)
            os.rename(part, path)
            sync(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _reserve(self, descriptor: int, size: int, path: Path) -> None:
        """Give the file its size, which counts from then on."""
        os.ftruncate(descriptor, 0)
        if path.parent == self.folder / "shards":
            self._make_room(size, _part(path), lambda: os.ftruncate(descriptor, size))
        else:
            os.ftruncate(descriptor, size)

    def _make_room(self, size: int, own: Path, reserve: Callable[[], None]) -> None:
        """Evict shards until so many bytes fit, then reserve them; nobody else does meanwhile.

        The file ``own``, to which they will belong, stays.

        Nothing but shards in this cache is ever removed: regular files named by a SHA-256. One
        that is being fetched or handed to a reader is locked, and stays. A reader keeps what it has
        open.
        """
        while True:
            with _opened(self.folder / "lock", os.O_RDWR | os.O_CREAT) as room:
                fcntl.flock(room, fcntl.LOCK_EX)
                shards = sorted(self._shards(), reverse=True)
                needed = size + sum(each for _, each, path in shards if path == own)
                shards = [each for each in shards if each[2] != own]
                used = sum(each for _, each, _ in shards)
                limit = sys.maxsize if self.limit is None else self.limit
                while shards and used + needed > limit:
                    _, freed, victim = shards.pop()
                    used -= freed if _evict(victim) else 0
                # The others are being fetched or handed over. Only one goes beyond the limit.
                if used <= limit:
                    reserve()
                    return
            time.sleep(_POLL_SECONDS)

    def _shards(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the time of last use, size and path of each shard, also of unfinished ones."""
        for entry in os.scandir(self.folder / "shards"):
            name, _, kind = entry.name.partition(".")
            if _SHARD.fullmatch(name) and kind in ("", "part", "blocks"):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        size = status.st_blocks * 512 if kind == "blocks" else status.st_size
                        yield status.st_mtime_ns, size, Path(entry.path)


def open_cache(folder: str | os.PathLike[str], limit: int | None) -> Cache:
    """Return the cache in ``folder``, which is new, empty, or a cache already.

    Raises:
        UsageError: If it holds other files, which a cache could be mistaken to own, or cannot be
            written.
    """
    place = Path(folder).expanduser().absolute()
    try:
        for each in (place / "shards", place / "datasets"):
            if not (place / _TAG).is_file() and place.exists() and _others(place):
                raise UsageError(
                    f"cache={place} holds other files ({', '.join(_others(place)[:3])}); choose a "
                    "new or empty folder"
                )
            each.mkdir(parents=True, exist_ok=True)
        if not (place / _TAG).is_file():
            write_atomically(place / _TAG, _TAGGED)
        if read_small(place / _TAG) != _TAGGED:
            raise UsageError(f"cache={place} is the cache of another program; choose a new folder")
    except OSError as error:
        raise UsageError(f"cache={place} cannot be used: {error.strerror}") from error
    return Cache(place, limit)


def _others(place: Path) -> list[str]:
    """Return the entries of a folder that are not those of a cache that is just being created."""
    own = ("shards", "datasets")
    return sorted(each for each in os.listdir(place) if each not in own and _TAG not in each)


@contextlib.contextmanager
def exclusive(path: Path, done: Callable[[], bool] = lambda: False) -> Iterator[int | None]:
    """Open or create a file and lock it, when no other process has; yield None if ``done()``.

    Raises:
        ShardkitError: If the process that has it makes no progress.
    """
    seen, since = -1, time.monotonic()
    while not done():
        with _opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
            if _lock(descriptor):
                if _is_at(descriptor, path):
                    yield descriptor
                    return
                continue  # it was renamed or removed meanwhile
            if (blocks := os.fstat(descriptor).st_blocks) != seen:
                seen, since = blocks, time.monotonic()
        if time.monotonic() - since > _STALLED_SECONDS:
            raise ShardkitError(
                f"the process that fetches {path} makes no progress; end it and retry"
            )
        time.sleep(_POLL_SECONDS)
    yield None


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def pin(path: Path) -> int | None:
    """Lock a shard against eviction; return the open descriptor, or None if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if _lock(descriptor, fcntl.LOCK_SH) and _is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def _evict(path: Path) -> bool:
    """Remove a shard, unless it is being fetched or handed to a reader; return whether it is."""
    try:
        with _opened(path, os.O_RDONLY) as descriptor:
            if not _lock(descriptor):
                return False
            path.unlink()
    except FileNotFoundError:
        pass
    return True


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
