"""Input files of sources: which files a user named, and reads that notice changes."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardkit.contracts import Entry, Located, Range
from shardkit.errors import CHANGED, BadImage, ConversionFailed, Problem, UsageError
from shardkit.record import FOREIGN_FIELD, Record
from shardkit.sources.images import require_machine
from shardkit.sources.unpacking import DEFLATED, Unpacked, packing_of, unpacked
from shardkit.system.files import as_text, require_local

MAX_FILES = 1 << 19
"""Maximum files of a source: `place` leaves 19 bits for the file's number."""

MAX_IMAGE_BYTES = 0x7FFFF000
"""Maximum size of an image: Linux reads no more at once."""

_FREE_ROWS = 1 << 17
_Row = TypeVar("_Row")

_OFFSET_BITS = 44
_AHEAD = 1 << 14
_COMPARED = 1000
"""Images of a library to compare with their file at a time."""

_BRACES = re.compile(r"\{([^{}]*)\}")
SHARD_NUMBER = re.compile(r"-[0-9]+-of-[0-9]+\Z")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)\Z")


def place(number: int, offset: int) -> int:
    """Return the `Entry.place` for an offset in the file of that number."""
    return number << _OFFSET_BITS | offset


def place_of(value: int) -> tuple[int, int]:
    """Return the file's number and the offset of a `place`."""
    return value >> _OFFSET_BITS, value & ((1 << _OFFSET_BITS) - 1)


def file_at(paths: Sequence[str], value: int) -> tuple[str, int]:
    """Return the file and offset of a `place`; BadImage if it was removed since the scan."""
    number, offset = place_of(value)
    if not 0 <= number < len(paths):
        raise BadImage(CHANGED)
    return paths[number], offset


class InputFiles(NamedTuple):
    """The files that a user named, in order."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    """A short, unique name of each file, with ``/`` between parts."""
    others: tuple[Problem, ...]
    """Other files in a folder that the user named."""


def find_files(pattern: str | Path, suffixes: Sequence[str]) -> InputFiles:
    """Return the files of a path, a folder, or a pattern; each must exist, and be named once.

    A folder has files with one of ``suffixes``. A pattern has ``{000..999}``, ``{a,b}``, ``*``,
    ``?`` or ``[...]``.
    """
    require_local(pattern)
    text = str(pattern)
    others: tuple[Problem, ...] = ()
    if os.path.isdir(text):
        paths, others = _in_folder(Path(text), suffixes)
        if not paths:
            raise UsageError(f"{text} contains no file whose name ends in {', '.join(suffixes)}")
    elif os.path.lexists(text):
        paths = [text]
    else:
        paths = _matches(text)
    twice = sorted(name for name, count in Counter(paths).items() if count > 1)
    if twice:
        raise UsageError(f"{pattern} lists {len(twice)} files twice: {_examples(twice)}")
    if len(paths) > MAX_FILES:
        raise UsageError(f"{pattern} matches {len(paths)} files; the limit is {MAX_FILES}")
    for path in paths:
        if not os.path.isfile(path):
            raise UsageError(f"{path} is not a file")
    return InputFiles(tuple(paths), tuple(map(as_text, _short_names(paths))), others)


def _in_folder(folder: Path, suffixes: Sequence[str]) -> tuple[list[str], tuple[Problem, ...]]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be read: {error.strerror}") from error
    used = [
        name
        for name in names
        if SHARD_NUMBER.sub("", name).endswith(tuple(suffixes)) and name[0] != "."
    ]
    others = [
        Problem(path=as_text(name), reason=f"not {', '.join(suffixes)}")
        for name in names
        if name not in set(used)
    ]
    return [os.path.join(folder, name) for name in used], tuple(others)


def _matches(pattern: str) -> list[str]:
    paths = []
    missing = []
    for name in expand(pattern):
        if glob.has_magic(name):
            matches = sorted(glob.glob(name))
        else:
            matches = [name] if os.path.exists(name) else []
        paths += matches
        if not matches:
            missing.append(name)
    if missing and len(missing) + len(paths) == 1:
        raise UsageError(f"{missing[0]} does not exist")
    if missing:
        raise UsageError(f"{len(missing)} files of {pattern} are missing: {_examples(missing)}")
    return paths


def expand(pattern: str) -> list[str]:
    """Return the names that a pattern with braces stands for, as in a shell."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    span = _RANGE.match(match[1])
    if span:
        first = int(span[1])
        last = int(span[2])
        width = max(map(len, span.groups())) if "0" in (span[1][0], span[2][0]) else 0
        if last < first or last - first >= MAX_FILES:
            raise UsageError(f"{{{match[1]}}} in {pattern} is not a range such as 000..999")
        choices = [f"{number:0{width}d}" for number in range(first, last + 1)]
    elif "," in match[1]:
        choices = match[1].split(",")
    else:
        raise UsageError(f"{{{match[1]}}} in {pattern} is neither a range nor a list of names")
    rests = expand(pattern[match.end() :])
    if len(choices) * len(rests) > MAX_FILES:
        raise UsageError(f"{pattern} matches over {MAX_FILES} files")
    return [pattern[: match.start()] + choice + tail for choice in choices for tail in rests]


def _short_names(paths: Sequence[str]) -> list[str]:
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    top = os.path.commonpath([os.path.abspath(path) for path in paths])
    return [os.path.relpath(os.path.abspath(path), top) for path in paths]


def _examples(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def require_rows(path: str, count: int) -> None:
    """Refuse a file of a few KB that states many rows: each takes memory to list.

    It may have 131,072 rows, or one for each of its bytes if that is more.
    """
    most = _most_rows(path)
    if count > most:
        raise ConversionFailed(
            f"{path} has {count:,} rows or more, over the limit of {most:,} for a file of its size"
        )


def _most_rows(path: str) -> int:
    return max(_FREE_ROWS, os.path.getsize(path))


def limited(path: str, rows: Iterable[_Row]) -> Iterator[_Row]:
    """Yield the rows of a file, which may be compressed; see `require_rows`."""
    most = _most_rows(path)
    for count, row in enumerate(rows, 1):
        if count > most:
            require_rows(path, count)
        yield row


def stem(name: str, suffixes: Iterable[str]) -> str:
    """Return a file's name without the first of ``suffixes`` that it ends with."""
    for suffix in suffixes:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    return name


class OpenedFile:
    """The bytes of an input file, unpacked if it is compressed; BadImage if that fails.

    ``ahead`` is how many bytes to read at a time, ``stated`` the unpacked size, if known. Only
    regular files are opened: others raise OSError.
    """

    def __init__(self, path: str, *, ahead: int = 0, unpacked_size: int | None = None) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file", path)
            self.stamp = status.st_mtime_ns
            self._start = 0
            self.size = status.st_size
            if packing := packing_of(path):
                key = (path, status.st_mtime_ns, status.st_size)
                inside = Range(0, status.st_size)
                self._switch_to(unpacked(key, self._file, inside, packing, unpacked_size))
        except BaseException:
            self.close()
            raise
        self._ahead = ahead
        self._window = b""
        self._window_start = 0

    def __enter__(self) -> OpenedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)

    def enter(self, start: int, size: int, packed: bool, unpacked_size: int | None = None) -> None:
        """Go on with a range of the file, which may be compressed (DEFLATE) to ``size`` bytes.

        It raises BadImage if the range ends outside of the file, or cannot be unpacked.
        """
        if start + size > self.size:
            raise BadImage("the file is truncated")
        self._start = self._start + start
        self.size = size
        self._window = b""
        if packed:
            key = (self._path, self.stamp, start)
            inside = Range(self._start, size)
            self._switch_to(unpacked(key, self._file, inside, DEFLATED, unpacked_size))

    def _switch_to(self, content: Unpacked) -> None:
        # Forgotten before it is closed, as in `shardkit.system.safe_paths.opened`.
        packed, self._file = self._file, os.dup(content.file)
        os.close(packed)
        self._start = content.start
        self.size = content.size

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``, or fewer at the end of the file."""
        begin = offset - self._window_start
        if begin >= 0 and begin + length <= len(self._window):
            return self._window[begin : begin + length]
        length = max(0, min(length, self.size - offset))
        if length >= self._ahead:
            return self._pread(offset, length)
        self._window = self._pread(offset, min(self._ahead, self.size - offset))
        self._window_start = offset
        return self._window[:length]

    def _pread(self, offset: int, length: int) -> bytes:
        data = os.pread(self._file, length, self._start + offset)
        while len(data) < length:
            more = os.pread(self._file, length - len(data), self._start + offset + len(data))
            if not more:
                break
            data += more
        return data


@contextlib.contextmanager
def reading(
    path: str, stamp: int | None = None, *, ahead: bool = False, unpacked_size: int | None = None
) -> Iterator[OpenedFile]:
    """Open an input file for one image; errors of the file are raised as `BadImage`.

    ``stamp`` is its modification time in the scan; None does not compare it. ``ahead``: more images
    are read in the order of the file. ``unpacked_size`` is None if unknown.
    """
    try:
        with OpenedFile(path, ahead=_AHEAD if ahead else 0, unpacked_size=unpacked_size) as view:
            if stamp is not None and view.stamp != stamp:
                raise BadImage(CHANGED)
            yield view
    except OSError as error:
        require_machine(error, path)
        raise BadImage(f"{path} cannot be read: {error.strerror or error}") from error


def located_in(
    path: str,
    entries: Sequence[Entry],
    offsets: Callable[[Sequence[Entry]], list[int | None]],
    read: Callable[[Entry], Record],
) -> Iterator[Located | BadImage]:
    """Yield the record of each image of a file, after comparing it with the file's bytes.

    ``offsets`` returns where images are, None for one without an offset; ``read`` returns a record
    as the library reads it. BadImage is raised, not yielded, if the file cannot be read at all, or
    changed since the scan.
    """
    for start in range(0, len(entries), _COMPARED):
        chunk = entries[start : start + _COMPARED]
        starts = offsets(chunk)
        with reading(path, chunk[0].stamp) as view:
            for entry, offset in zip(chunk, starts, strict=True):
                try:
                    record = read(entry)
                    name = record.image_field or FOREIGN_FIELD
                    data = record.fields[name]
                    if offset is None or view.read(offset, len(data)) != data:
                        raise BadImage(
                            "its file does not contain its bytes unchanged, in one range"
                        )
                    yield Located(record, {name: offset})
                except BadImage as error:
                    yield error


@contextlib.contextmanager
def refusing(
    where: str | Path, error_type: type[UsageError | ConversionFailed] = UsageError
) -> Iterator[None]:
    """Raise another error for a `BadImage`: without what is at ``where``, there is no source."""
    try:
        yield
    except BadImage as error:
        raise error_type(f"{where}: {error.problem}", remedy=error.remedy) from error


def stamp_of(path: str) -> int:
    """Return a file's modification time, in nanoseconds; BadImage if it cannot be read."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        require_machine(error, path)
        raise BadImage(f"{path} cannot be read: {error.strerror}") from error


def scanning(
    path: str, scan: Callable[[OpenedFile], None], unpacked_size: int | None = None
) -> str:
    """Call ``scan`` with an input file; return the reason if it cannot be read, or "".

    ``unpacked_size`` is None if unknown.
    """
    try:
        with OpenedFile(path, ahead=_AHEAD, unpacked_size=unpacked_size) as view:
            scan(view)
    except BadImage as error:
        return error.stated
    except OSError as error:
        require_machine(error, path)
        return f"it cannot be read: {error.strerror or error}"
    return ""
