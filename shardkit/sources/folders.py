"""Where the files of a folder source are: on this machine, or elsewhere.

A folder lists and reads files, and knows nothing of classes, splits and records.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from shardkit.codecs.foreign import UnreadImage
from shardkit.codecs.image import image_field_of
from shardkit.contracts import Entry
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.sources.images import IMAGE_SUFFIXES, open_at_once, read_file, require_machine
from shardkit.system.files import as_name, as_text, require_local
from shardkit.system.late import load
from shardkit.system.urls import STORES, scheme_and_path

MAX_BYTES = 0x7FFFF000
"""Maximum size of an image file: Linux reads no more at once."""

NO_FILE = "neither a file nor a folder"
BROKEN_LINK = "a broken link"
TOO_LARGE = f"it is larger than the limit of {MAX_BYTES:,} bytes"
UNREADABLE_FOLDER = "the folder cannot be read"
"""Reasons (or the start of one) for which a scan cannot list a path as an image."""

_OF_SYSTEMS = frozenset(
    (
        *("__macosx", "icon\r", "@eadir", "@tmp", "@recycle", "#recycle", "#snapshot"),
        *("lost+found", "@recently-snapshot", "$recycle.bin", "system volume information"),
        *("__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini"),
    )
)
"""Names, in lower case, of what macOS, network storage, Windows, file systems and Python create."""

_STORED = ("utf-8", "surrogateescape")
"""Encoding of names in datasets, whatever the locale."""

_OPENERS = {
    "": "shardkit.sources.folders:open_local",
    **dict.fromkeys(STORES, "shardkit.remote.bucket_folder:BucketFolder"),
}
"""Functions that open a folder, by the scheme of its URL."""


_SPLIT = re.compile(
    r"(?:train|training|val|valid|validation|test|testing|dev|eval)"
    r"(?:[_ -]?(?:set|data|images?|imgs?|\d{1,4}))?",
    re.IGNORECASE,
)


def is_split_name(name: str) -> bool:
    """Return whether folders of this name are splits: train, Test, val2017, test_images."""
    return _SPLIT.fullmatch(name) is not None


def open_folder(path: str | Path) -> SourceFolder:
    """Return the folder at a path or URL, which must not have credentials."""
    scheme, location = scheme_and_path(path)
    opened: SourceFolder = load(_OPENERS[scheme])(location)
    return opened


class SourceFolder(ABC):
    """A folder with files. Paths are relative to it, with ``/`` between parts.

    It is pickled to worker processes.
    """

    chunk_bytes: int = 1 << 20
    """As `shardkit.contracts.Source.chunk_bytes`."""

    name: str
    """Name of the folder, for manifests: no path and no URL."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the path or URL, for messages."""

    @abstractmethod
    def local(self) -> Sequence[Path]:
        """Return the folder, if it is local."""

    @abstractmethod
    def inner(self, folder: str) -> SourceFolder:
        """Return a folder directly in this one."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the sorted names of the folders in it that are data: see `why_left_out`.

        It raises UsageError if the folder is missing or cannot be read.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files and folders in it."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether it has a file of that name."""

    @abstractmethod
    def finder(self) -> Finder:
        """Return what lists the images."""

    @abstractmethod
    def locate(self, path: str) -> str:
        """Return the path or URL of a file."""

    @abstractmethod
    def read(self, entry: Entry, path: str) -> bytes:
        """Return a file's content; BadImage if unreadable, or changed since it was listed."""

    def ahead(self, entries: Sequence[Entry], folder: str) -> None:
        """Start to read files of an inner folder or "", in this order, in bounded memory."""
        return

    def paths(self, names: Sequence[str]) -> Sequence[bytes] | None:
        """Return the path of each file for the `os` module; None if they are not local."""
        return None


class Finder(ABC):
    """Lists the images of a folder, and reports everything else."""

    def __init__(self) -> None:
        self.ignored: list[Problem] = []
        self.problems: list[Problem] = []

    @abstractmethod
    def files(self, top: str, *, recurse: bool) -> Iterator[tuple[str, int, int]]:
        """Yield path, size and stamp of each image in a folder, files before subfolders."""

    def ignore(self, path: str, reason: str) -> None:
        """Report a file that is not an image."""
        self.ignored.append(Problem(path=path, reason=reason))

    def blame(self, path: str, reason: str) -> None:
        """Report an image or folder that cannot be listed."""
        self.problems.append(Problem(path=path, reason=reason))


def claims_image(path: str) -> bool:
    """Return whether a file has the suffix of an image."""
    _, dot, suffix = path.rpartition(".")
    return (dot + suffix).lower() in IMAGE_SUFFIXES


def below(folder: str, path: str) -> str:
    """Return the path of what is in a folder; either may be ""."""
    return f"{folder}/{path}" if folder and path else folder or path


def why_left_out(name: str) -> str:
    """Return the reason if a file or folder of this name is never data; otherwise ""."""
    if name.startswith("."):
        return "hidden"
    return "of the system" if name.lower() in _OF_SYSTEMS else ""


def walk_order(path: str) -> list[tuple[bool, str]]:
    """Return a sort key that puts a folder's files before its subfolders, as a scan does."""
    *folders, name = path.split("/")
    return [*((True, folder) for folder in folders), (False, name)]


class LocalFolder(SourceFolder):
    """A folder of this machine."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._prefix = os.path.join(root, "")

    def __str__(self) -> str:
        return str(self.root)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the folder."""
        return as_text(self.root.resolve().name)

    def local(self) -> Sequence[Path]:
        """Return the folder."""
        return [self.root]

    def inner(self, folder: str) -> LocalFolder:
        """Return a folder in this one."""
        return LocalFolder(self.root / as_name(folder)) if folder else self

    def folders(self) -> list[str]:
        """Return the sorted names of the folders in it."""
        try:
            paths = [path for path in self.root.iterdir() if not why_left_out(path.name)]
            return sorted(as_text(path.name) for path in paths if path.is_dir())
        except FileNotFoundError:
            raise UsageError(f"the source folder {self} does not exist") from None
        except NotADirectoryError:
            raise UsageError(f"the source {self} is a file, not a folder") from None
        except OSError as error:
            raise UsageError(
                f"the source folder {self} cannot be read: {error.strerror}"
            ) from error

    def names(self) -> list[str]:
        """Return the names of all files and folders in it."""
        return [*map(as_text, os.listdir(self.root))]

    def has(self, name: str) -> bool:
        """Return whether it has a file of that name."""
        return (self.root / name).is_file()

    def finder(self) -> Finder:
        """Return what walks the folder."""
        return _Walk(self.root)

    def locate(self, path: str) -> str:
        """Return the path of a file."""
        return self._prefix + as_name(path)

    def read(self, entry: Entry, path: str) -> bytes:
        """Return the content of a file."""
        return read_file(self.locate(path), entry.bytes, entry.stamp)

    def paths(self, names: Sequence[str]) -> Sequence[bytes]:
        """Return the path of each file."""
        prefix = os.fsencode(self._prefix)
        return [prefix + name.encode(*_STORED) for name in names]


def open_local(path: str) -> SourceFolder:
    """Return a local folder; see `open_folder`."""
    require_local(path)
    return LocalFolder(path)


class _Walk(Finder):
    """Walks a local folder."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self._prefix = os.path.join(root, "")

    def files(self, top: str, *, recurse: bool) -> Iterator[tuple[str, int, int]]:
        """Yield path, size and time of each image below ``top``, and report everything else."""
        seen = {_identity(os.stat(self.root))} if top else set()
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            inner = []
            for name in self._list(folder, seen):
                path = f"{folder}/{name}" if folder else name
                if reason := why_left_out(name):
                    self.ignore(path, reason)
                    continue
                status = self._stat(path)
                if status is None:
                    continue  # reported
                if stat.S_ISDIR(status.st_mode):
                    inner.append(path)
                elif not stat.S_ISREG(status.st_mode):
                    report = self.blame if claims_image(path) else self.ignore
                    report(path, NO_FILE)
                elif claims_image(path) or self._is_image(path):
                    if status.st_size <= MAX_BYTES:
                        yield path, status.st_size, status.st_mtime_ns
                    else:
                        self.blame(path, TOO_LARGE)
            if recurse:
                waiting += reversed(inner)

    def _list(self, folder: str, seen: set[tuple[int, int]]) -> list[str]:
        """Return the sorted names in ``folder``; nothing for a folder that was listed before."""
        try:
            status = os.stat(self._at(folder))
            names = sorted(map(as_text, os.listdir(self._at(folder))))
        except OSError as error:
            require_machine(error, self._at(folder))
            self.blame(folder or ".", f"{UNREADABLE_FOLDER}: {error.strerror}")
            return []
        if _identity(status) in seen:
            self.ignore(folder, "a link to a folder that was already read")
            return []
        seen.add(_identity(status))
        return names

    def _at(self, path: str) -> str:
        return self._prefix + as_name(path)

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(self._at(path))
        except OSError as error:
            require_machine(error, self._at(path))
            dangling = error.errno == errno.ENOENT and os.path.islink(self._at(path))
            reason = BROKEN_LINK if dangling else f"{error.strerror}"
            report = self.blame if claims_image(path) else self.ignore
            report(path, reason)
            return None

    def _is_image(self, path: str) -> bool:
        try:
            with _open(self._at(path)) as file:
                image_field_of(file)
        except UnreadImage:
            return True  # reading it says so
        except BadImage:
            self.ignore(path, "not an image")
            return False
        except OSError as error:
            require_machine(error, self._at(path))
            self.ignore(path, f"cannot be read: {error.strerror}")
            return False
        return True


def _open(path: str) -> BufferedReader:
    return open(path, "rb", opener=open_at_once)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
