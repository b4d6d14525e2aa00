"""A local folder with files of object stores, named by their SHA-256 and shared by processes.

A file is fetched under a temporary name, verified, synced and renamed. So what has its final name
is right, whenever a process is killed, a hit is one `open`, and no list says what is there. The
lock of an unfinished file decides who fetches it. Locks belong to open files, so they end with
their process.

A folder may have been filled by somebody else, such as by an unpacked archive. So each file is
compared with its SHA-256 once for each user, whose own folder remembers that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import CorruptDataset, CorruptShard, ShardkitError, UsageError
from shardkit.system.files import has_sha256, read_small, sha256_of, sync, write_atomically
from shardkit.system.safe_paths import make_folder, opened, remove, require_no_link
from shardkit.system.user_files import state_folder

_TAG = "CACHEDIR.TAG"
"""Marks a folder as a cache, for us and for backup programs (bford.info/cachedir)."""
_TAGGED = b"Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache of shardkit.\n"

_SHARD = re.compile(r"[0-9a-f]{64}")
_SHARED = "SHARDKIT_STORE_SHARED_CACHE"
"""Variable that allows a cache that other users can write, if it is 1."""

_LONGEST_RECORD = 16 << 20
"""Bytes of the list of compared files at which it starts again."""

_compared: dict[Path, set[str]] = {}
"""The files that were compared with their SHA-256, as `_identity` states them, by cache."""

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
"""Bytes of a request, few enough for its time limit on a slow link."""

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

        CorruptDataset if a manifest states another text than a SHA-256, such as a path.
        """
        if not _SHARD.fullmatch(sha256):
            raise CorruptDataset(f"the manifest is damaged: {sha256[:80]!r} is not a SHA-256")
        return self.folder / "shards" / sha256

    def dataset(self, name: str) -> Path:
        """Return the folder of a dataset's manifest and index."""
        return self.folder / "datasets" / name

    def make_folder(self, path: Path) -> None:
        """Create a folder in the cache, unless it exists; OSError if its path has a link."""
        make_folder(self.folder, os.path.relpath(path, self.folder), _mode(0o777))

    def unusable(self, error: OSError) -> ShardkitError:
        """Return the error that a file in the cache cannot be read or written."""
        file = f" ({error.filename})" if error.filename else ""
        return ShardkitError(
            f"the cache {self.folder} cannot be used: {error.strerror}{file}",
            remedy="Free some space, set a smaller cache_limit, or choose another folder.",
        )

    def holds(self, descriptor: int, sha256: str) -> bool:
        """Return whether this process knows that an open file has that SHA-256."""
        return _identity(descriptor, sha256) in _compared.get(self.folder, ())

    def accept(self, descriptor: int, sha256: str) -> None:
        """Remember, in this process, that an open file was compared with its SHA-256."""
        _compared.setdefault(self.folder, set()).add(_identity(descriptor, sha256))

    def _is_right(self, path: Path, sha256: str) -> bool:
        """Return whether the file at ``path`` has that SHA-256; compare it once for each user."""
        with contextlib.suppress(OSError), _opened(path, os.O_RDONLY) as descriptor:
            if self.holds(descriptor, sha256):
                return True
            with contextlib.suppress(OSError):
                lines = read_small(self._record).decode("ascii", "replace").split("\n")
                _compared.setdefault(self.folder, set()).update(lines)
            if self.holds(descriptor, sha256):
                return True
            status = os.fstat(descriptor)
            if _is_private(status) and has_sha256(path, sha256, self.folder):
                self._note(descriptor, sha256)
                return True
        return False

    @property
    def _record(self) -> Path:
        """The user's own file, which states the files that were compared."""
        name = hashlib.sha256(os.fsencode(os.path.realpath(self.folder))).hexdigest()
        return state_folder() / "caches" / name

    def _note(self, descriptor: int, sha256: str) -> None:
        """Remember that an open file has that SHA-256, if the user's folder can be written."""
        self.accept(descriptor, sha256)
        line = f"{_identity(descriptor, sha256)}\n".encode()
        with contextlib.suppress(OSError):
            self._record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            record = os.open(self._record, flags, 0o600)
            try:
                if os.fstat(record).st_size > _LONGEST_RECORD:
                    os.ftruncate(record, 0)
                os.write(record, line)
            finally:
                os.close(record)

    def fetch(self, file: RemoteFile, path: Path, fill: Fill) -> None:
        """Create the file at ``path`` unless it is there; only one process fetches it.

        The folder of ``path`` exists. ``fill`` is called again if the content differs; CorruptShard
        if it differs every time. ShardkitError if the process that fetches it stops, or ``fill``
        raises.
        """
        if self._is_right(path, file.sha256):
            return
        is_right = partial(self._is_right, path, file.sha256)
        with exclusive(_part(path), is_right, _mode(0o666)) as descriptor:
            if descriptor is not None:
                self._complete(descriptor, file, path, fill)

    def _complete(self, descriptor: int, file: RemoteFile, path: Path, fill: Fill) -> None:
        """Fetch a file whose lock we hold."""
        temporary = _part(path)
        try:
            if self._is_right(path, file.sha256):  # completed between our check and our lock
                temporary.unlink()
                return
            self._reserve(descriptor, file.size, path)
            for _ in range(_ATTEMPTS):
                fill(descriptor)
                if (
                    os.fstat(descriptor).st_size == file.size
                    and sha256_of(temporary) == file.sha256
                ):
                    break
            else:
                raise CorruptShard(
                    f"{file.url}/{file.name} differs from the manifest: its SHA-256 does not match",
                    remedy="Upload the dataset again.",
                )
            os.fsync(descriptor)
            self._note(descriptor, file.sha256)  # those who wait need not compare it
            os.rename(temporary, path)
            sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _reserve(self, descriptor: int, size: int, path: Path) -> None:
        """Give the file its size, which counts from then on."""
        os.ftruncate(descriptor, 0)
        if path.parent == self.folder / "shards":
            self._make_room(size, _part(path), lambda: os.ftruncate(descriptor, size))
        else:
            os.ftruncate(descriptor, size)

    def _make_room(self, size: int, kept: Path, reserve: Callable[[], None]) -> None:
        """Evict shards until so many bytes fit, then reserve them; nobody else does meanwhile.

        The file ``kept``, to which they will belong, stays.

        Nothing but shards in this cache is ever removed: regular files named by a SHA-256. One
        that is being fetched or handed to a reader is locked, and stays. A reader keeps what it has
        open.
        """
        while True:
            with _opened(self.folder / "lock", os.O_RDWR | os.O_CREAT, _mode(0o666)) as room:
                fcntl.flock(room, fcntl.LOCK_EX)
                shards = sorted(self._shards(), reverse=True)
                needed = size + sum(length for _, length, name in shards if name == kept.name)
                shards = [length for length in shards if length[2] != kept.name]
                used = sum(length for _, length, _ in shards)
                limit = sys.maxsize if self.limit is None else self.limit
                while shards and used + needed > limit:
                    _, freed, victim = shards.pop()
                    used -= freed if self._evict(victim) else 0
                # The others are being fetched or handed over. Only one goes beyond the limit.
                if used <= limit:
                    reserve()
                    return
            time.sleep(_POLL_SECONDS)

    def _shards(self) -> Iterator[tuple[int, int, str]]:
        """Yield the time of last use, size and name of each shard, also of unfinished ones."""
        with opened(self.folder, "shards") as folder, os.scandir(folder) as entries:
            for entry in entries:
                name, _, kind = entry.name.partition(".")
                if _SHARD.fullmatch(name) and kind in ("", "part"):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            used = max(status.st_atime_ns, status.st_mtime_ns)
                            yield used, status.st_size, entry.name

    def _evict(self, name: str) -> bool:
        """Remove a shard unless it is being fetched or handed to a reader; return whether it is."""
        try:
            with _opened(self.folder / "shards" / name, os.O_RDONLY) as descriptor:
                if not _lock(descriptor):
                    return False
                remove(self.folder, f"shards/{name}")
        except FileNotFoundError:
            pass
        return True


def open_cache(folder: str | os.PathLike[str], limit: int | None) -> Cache:
    """Return the cache in ``folder``, which is new, empty, or a cache already.

    UsageError if it holds other files, which a cache could be mistaken to own.
    """
    root = Path(folder).expanduser().absolute()
    try:
        if not (root / _TAG).is_file() and root.exists() and _others(root):
            raise UsageError(
                f"cache={root} contains other files ({', '.join(_others(root)[:3])});",
                remedy="choose a new or empty folder",
            )
        root.parent.mkdir(parents=True, exist_ok=True)
        for path in (root, root / "shards", root / "datasets"):
            with contextlib.suppress(FileExistsError):
                path.mkdir(_mode(0o777))
            _require_private(root, path)
        if not (root / _TAG).is_file():
            write_atomically(root / _TAG, _TAGGED)
        if read_small(root / _TAG) != _TAGGED:
            raise UsageError(
                f"cache={root} is the cache of another program;", remedy="choose a new folder"
            )
    except OSError as error:
        raise UsageError(f"cache={root} cannot be used: {error.strerror}") from error
    return Cache(root, limit)


def _require_private(cache: Path, folder: Path) -> None:
    """Refuse a folder of a cache whose files other users, or the maker of a link, could replace."""
    if folder != cache:
        require_no_link(folder)
    if not _is_private(os.stat(folder)):
        raise UsageError(
            f"cache={cache}: another user owns or can write {folder}, and could replace what "
            "you read",
            remedy=f"Choose another folder; or, if it is yours, run `chmod -R go-w {cache}`; or "
            f"set {_SHARED}=1 if you trust everyone who can write it",
        )


def _is_private(status: os.stat_result) -> bool:
    """Return whether only this user, and root, can change a file; or whether others may."""
    if os.environ.get(_SHARED) == "1":
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _mode(mode: int) -> int:
    """Return the permissions of a new file: others may write only a cache that is shared."""
    return mode if os.environ.get(_SHARED) == "1" else mode & ~0o022


def _identity(descriptor: int, sha256: str) -> str:
    """Return a line that changes when another file, or another user's, takes the place of one."""
    status = os.fstat(descriptor)
    return " ".join(
        (
            sha256,
            f"inode {status.st_ino}",
            f"user {status.st_uid}",
            f"mode {status.st_mode:o}",
            f"modified {status.st_mtime_ns}",
        )
    )


def _others(folder: Path) -> list[str]:
    """Return the entries of a folder that are not those of a cache that is just being created."""
    folders = ("shards", "datasets")
    return sorted(name for name in os.listdir(folder) if name not in folders and _TAG not in name)


@contextlib.contextmanager
def exclusive(path: Path, done: Callable[[], bool], mode: int = 0o666) -> Iterator[int | None]:
    """Open or create a file and lock it, when no other process has; yield None if ``done()``.

    A file that has another name too, or wider permissions, is replaced: it may not be ours.
    ShardkitError if the process that has it makes no progress.
    """
    seen = -1
    since = time.monotonic()
    while not done():
        with _opened(path, os.O_RDWR | os.O_CREAT, mode) as descriptor:
            if _lock(descriptor):
                if _is_at(descriptor, path):
                    status = os.fstat(descriptor)
                    if status.st_nlink == 1 and not status.st_mode & 0o777 & ~mode:
                        yield descriptor
                        return
                    path.unlink()
                continue  # it was renamed or removed meanwhile
            if (blocks := os.fstat(descriptor).st_blocks) != seen:
                seen = blocks
                since = time.monotonic()
        if time.monotonic() - since > _STALLED_SECONDS:
            raise ShardkitError(
                f"the process that fetches {path} makes no progress;", remedy="end it and retry"
            )
        time.sleep(_POLL_SECONDS)
    yield None


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def pin(path: Path) -> int | None:
    """Lock a shard against eviction; return the open descriptor, or None if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if _lock(descriptor, fcntl.LOCK_SH) and _is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Open a regular file: a pipe would block, and a link lead elsewhere."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))
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
