"""A folder of image files as a source: class folders, or images alone, or splits of either."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from shardkit.codecs.image import SNIFF_BYTES, sniff
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import LABEL_FIELD, META_FIELD, NO_LABEL, Record, dump_json, make_keys

SPLIT_NAMES = frozenset(
    ("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval")
)
"""A source whose folders all have one of these names, in any case, holds splits."""

_SUFFIXES = "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm"
IMAGE_SUFFIXES = frozenset(f".{name}" for name in _SUFFIXES.split())
"""A file with one of these suffixes claims to be an image: if it is none, that is an error. A file
with another suffix is an image if its content is one, and is otherwise left out and reported."""


MAX_BYTES = 0x7FFFF000
"""The size of the largest image file: Linux reads no more at once."""

NO_FILE = "neither a file nor a folder"
LEADS_NOWHERE = "the link leads nowhere"
UNREADABLE_FOLDER = "the folder cannot be read"
"""Reasons, or how one begins, for which a scan leaves out what it cannot list as an image."""

_LARGE = 1 << 20
"""Bytes of a file from which on its beginning is looked at before the rest is read."""


class Entry(NamedTuple):
    """One image file, as the scan found it."""

    path: str
    """Relative to the source's folder, with ``/`` between its parts."""
    key: str
    label: int
    bytes: int
    mtime_ns: int


class ImageFolder:
    """Image files as a `shardkit.contracts.Source`; each record has its image, label and path.

    Reading a file that cannot be read, changed its size since the scan, or is no image, raises
    `BadImage`.
    """

    def __init__(self, root: Path, entries: Sequence[Entry]) -> None:
        self.root = root
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows``: same order, duplicates and all."""
        for row in rows:
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} is not in {self.root}, which has {len(self)} images")
        return [self._record(self.entries[row]) for row in rows]

    def take(self, rows: Iterable[int]) -> ImageFolder:
        """Return a source of the given rows alone, in their order."""
        return ImageFolder(self.root, [self.entries[row] for row in rows])

    def _record(self, entry: Entry) -> Record:
        data = _read(self.root / entry.path, entry)
        fields = {_kind_of(data): data, META_FIELD: dump_json({"path": entry.path})}
        if entry.label != NO_LABEL:
            fields[LABEL_FIELD] = b"%d" % entry.label
        return Record(entry.key, fields)


def _read(path: Path, entry: Entry) -> bytes:
    """Return the content of an image file, whatever stands in its place by now."""
    if entry.bytes > MAX_BYTES:
        raise BadImage(f"it has {entry.bytes} bytes, more than {MAX_BYTES}")
    try:
        with _open(path) as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and entry.bytes > _LARGE:
                _kind_of(file.peek(SNIFF_BYTES))  # before so much is read
            # One byte more than there should be, and not all: it may be growing.
            data = file.read(entry.bytes + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        _require_machine(error)
        raise BadImage(f"it cannot be read: {error.strerror or error}") from error
    if found.st_mtime_ns != entry.mtime_ns or len(data) != entry.bytes:
        raise BadImage("it changed since the scan")
    return data


def _open(path: Path) -> BufferedReader:
    return open(path, "rb", opener=_at_once)


def _at_once(path: str, flags: int) -> int:
    """Open a file, without waiting for the other end if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _require_machine(error: OSError) -> None:
    """Raise ``error`` if it is no fault of the file: it would leave out all other files, too."""
    if error.errno == errno.ENOMEM:
        raise MemoryError(f"{error.filename}: {error.strerror}") from error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise error


def _kind_of(head: bytes) -> str:
    kind = sniff(head[:SNIFF_BYTES])
    if kind is None:
        raise BadImage("it is empty" if not head else "its content is not an image")
    return kind


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What an image folder holds."""

    root: Path
    splits: dict[str, ImageFolder]
    """The split's name to its images; the name "" stands for a folder without splits."""
    classes: tuple[str, ...] | None
    """Class names in the order of their labels, common to all splits; None if unlabelled."""
    ignored: dict[str, list[Problem]] = field(default_factory=dict)
    """For each split, what is in the folder and is no image of it, with the reason."""
    problems: dict[str, list[Problem]] = field(default_factory=dict)
    """For each split, what claims to be an image or a folder of images and cannot be opened."""


def scan_imagefolder(
    root: str | Path, *, class_order: str = "plain", splits: bool | None = None
) -> Scan:
    """Find the images below ``root``, and their classes.

    Each folder directly in ``root`` is a class, and each folder below it belongs to it. A folder
    with images and no folders gives images without labels. Symbolic links are followed; below a
    class, no folder is entered twice.

    Args:
        root: The folder.
        class_order: ``plain`` sorts class names as torchvision does, ``natural`` sorts numbers in
            them by value, anything else is a text file with one class name in each line, which
            may name classes that have no folder.
        splits: Whether the folders in ``root`` are splits, each to be scanned as a folder of its
            own. None decides: if all are named like splits (`SPLIT_NAMES`) and one has folders;
            if that holds for several of them and not for all, it is an error.

    Returns:
        The images of each split in the order of labels and paths.

    Raises:
        UsageError: If the folder is missing, unreadable or without images, the file of
            ``class_order`` does not name each class once, or ``splits`` has to be given.
    """
    root = Path(root)
    folders = _top_folders(root)
    if splits is None:
        splits = _are_splits(folders)
    if splits:
        finders = {folder.name: _Finder(folder) for folder in folders}
    else:
        finders = {"": _Finder(root)}
    for finder in finders.values():
        finder.find_classes()
    found = {name for finder in finders.values() for name in finder.classes}
    ordered = _ordered(found, class_order)  # a wrong order is an error without classes, too
    classes = ordered if found else None
    sources = {name: finder.collect(classes or ()) for name, finder in finders.items()}
    problems = {name: finder.problems for name, finder in finders.items()}
    if not any(len(source) for source in sources.values()) and not any(problems.values()):
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UsageError(
            f"there are no images in {root}: no file has image content, or one of {kinds}"
        )
    if splits:
        _note_loose_files(root, finders)
    return Scan(
        root=root,
        splits=sources,
        classes=classes,
        ignored={name: finder.ignored for name, finder in finders.items()},
        problems=problems,
    )


def _top_folders(root: Path) -> list[Path]:
    try:
        return sorted(
            (path for path in root.iterdir() if not path.name.startswith(".") and path.is_dir()),
            key=lambda path: path.name,
        )
    except FileNotFoundError:
        raise UsageError(f"the source folder {root} does not exist") from None
    except NotADirectoryError:
        raise UsageError(f"the source {root} is a file, not a folder of images") from None
    except OSError as error:
        raise UsageError(f"the source folder {root} cannot be read: {error.strerror}") from error


def _are_splits(folders: Sequence[Path]) -> bool:
    named = [folder for folder in folders if folder.name.lower() in SPLIT_NAMES]
    inner = [folder for folder in named if _top_folders(folder)]
    if len(named) == len(folders):
        return bool(inner)
    if len(inner) > 1:
        other = next(folder for folder in folders if folder not in named)
        raise UsageError(
            f"{named[0].parent}: {', '.join(folder.name for folder in inner)} look like splits, "
            f"and {other.name} does not; say --splits or --no-splits"
        )
    return False


def _note_loose_files(root: Path, finders: dict[str, _Finder]) -> None:
    """Report files beside the folders of splits with the first of them."""
    first = next(iter(finders.values()))
    for item in sorted(os.scandir(root), key=lambda item: item.name):
        if item.name not in finders:
            first.ignored.append(Problem(path=item.name, reason="outside of any split"))


class _Finder:
    """Walks one folder of classes, or of images alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes: list[str] = []
        self.ignored: list[Problem] = []
        self.problems: list[Problem] = []

    def find_classes(self) -> None:
        self.classes = [folder.name for folder in _top_folders(self.root)]

    def collect(self, classes: Sequence[str]) -> ImageFolder:
        """Return the images, by label and path."""
        files: list[tuple[str, int, int, int]] = []
        loose = list(self._files("", recurse=False))
        if self.classes:
            self.ignored += [*self.problems, *(_loose(path) for path, *_ in loose)]
            self.problems.clear()
        else:
            files += [(path, NO_LABEL, size, mtime) for path, size, mtime in loose]
        own = set(self.classes)
        for label, name in enumerate(classes):
            if name in own:
                found = self._files(name, recurse=True)
                files += [(path, label, size, mtime) for path, size, mtime in found]
        keys = make_keys(path for path, *_ in files)
        return ImageFolder(
            self.root,
            [
                Entry(path, key, label, size, mtime)
                for key, (path, label, size, mtime) in zip(keys, files, strict=True)
            ],
        )

    def _files(self, top: str, *, recurse: bool) -> Iterator[tuple[str, int, int]]:
        """Give path, size and time of the images below ``top``, and report everything else."""
        seen = {_identity(os.stat(self.root))} if top else set()
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            inner = []
            for name, path in self._list(folder, seen):
                status = self._stat(path)
                if name.startswith("."):
                    self._ignore(path, "hidden")
                elif status is None:
                    pass  # reported
                elif stat.S_ISDIR(status.st_mode):
                    inner.append(path)
                elif not stat.S_ISREG(status.st_mode):
                    report = self._blame if self._claims_image(path) else self._ignore
                    report(path, NO_FILE)
                elif self._claims_image(path) or self._is_image(path):
                    yield path, status.st_size, status.st_mtime_ns
            if recurse:
                waiting += reversed(inner)

    def _list(self, folder: str, seen: set[tuple[int, int]]) -> list[tuple[str, str]]:
        """Return name and path of what is in ``folder``, sorted; nothing the second time."""
        try:
            status = os.stat(self.root / folder)
            names = sorted(os.listdir(self.root / folder))
        except OSError as error:
            self._blame(folder or ".", f"{UNREADABLE_FOLDER}: {error.strerror}")
            return []
        if _identity(status) in seen:
            self._ignore(folder, "a link to a folder that was read already")
            return []
        seen.add(_identity(status))
        return [(name, f"{folder}/{name}" if folder else name) for name in names]

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(self.root / path)
        except OSError as error:
            dangling = error.errno == errno.ENOENT and os.path.islink(self.root / path)
            reason = LEADS_NOWHERE if dangling else f"{error.strerror}"
            if not path.rpartition("/")[2].startswith("."):
                report = self._blame if self._claims_image(path) else self._ignore
                report(path, reason)
            return None

    def _claims_image(self, path: str) -> bool:
        return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES

    def _is_image(self, path: str) -> bool:
        try:
            with _open(self.root / path) as file:
                head = file.read(SNIFF_BYTES)
        except OSError as error:
            _require_machine(error)
            self._ignore(path, f"cannot be read: {error.strerror}")
            return False
        if sniff(head) is None:
            self._ignore(path, "not an image")
            return False
        return True

    def _ignore(self, path: str, reason: str) -> None:
        self.ignored.append(Problem(path=path, reason=reason))

    def _blame(self, path: str, reason: str) -> None:
        self.problems.append(Problem(path=path, reason=reason))


def _loose(path: str) -> Problem:
    return Problem(path=path, reason="outside of any class folder")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _ordered(names: Iterable[str], class_order: str) -> tuple[str, ...]:
    if class_order == "plain":
        return tuple(sorted(names))
    if class_order == "natural":
        return tuple(sorted(names, key=natural))
    return _from_file(set(names), Path(class_order))


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key that takes digits in ``name`` by value: class2 before class10."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts if p], name


def _from_file(names: set[str], path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text("utf-8-sig", errors="surrogateescape").split("\n")
    except OSError as error:
        raise UsageError(
            f"--class-order is neither 'plain' nor 'natural' nor a readable file: {path}: "
            f"{error.strerror}"
        ) from error
    listed = [line.rstrip("\r") for line in lines if line.strip()]
    twice = sorted(name for name, count in Counter(listed).items() if count > 1)
    for what, wrong in (("lists twice", twice), ("lacks", sorted(names - set(listed)))):
        if wrong:
            some = ", ".join(map(repr, wrong[:5])) + (" ..." if len(wrong) > 5 else "")
            raise UsageError(
                f"the file of --class-order, {path}, {what} {len(wrong)} classes: {some}"
            )
    return tuple(listed)
