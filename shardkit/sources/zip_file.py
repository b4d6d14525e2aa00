"""Zip archives: what they contain, and their members by name and offset.

`zipfile` reads the directory at the end of an archive. Members are read here. Source: PKWARE's
APPNOTE.TXT, 6.3.10.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from shardkit.codecs.foreign import UnreadImage
from shardkit.codecs.image import image_field_of
from shardkit.contracts import Entry
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.sources.folders import (
    MAX_BYTES,
    TOO_LARGE,
    Finder,
    SourceFolder,
    below,
    claims_image,
    is_split_name,
    why_left_out,
)
from shardkit.sources.images import open_at_once, require_machine
from shardkit.sources.inputs import OpenedFile, reading, refusing
from shardkit.sources.recognize import Overview
from shardkit.system.files import as_text

_MOST_DIRECTORY = 1 << 29
"""Bytes of the largest directory that is read: that of about five million images."""

_MOST_PARTS = 100
"""Folders in a name: each takes memory."""

_MOST_RATIO = 1100
"""Maximum of unpacked bytes for each packed one; Deflate reaches 1,032."""

_HEAD = 1 << 20
"""Bytes that tell whether a member is an image."""

_ENCRYPTED = 1
"""Bit of a member's flags."""

_UTF8 = 1 << 11
"""Bit of a member's flags: its name is UTF-8."""

_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard"}

_LOCAL = struct.Struct("<4s4xH16xHH")
"""The header of a member: signature, compression, length of name and of extra fields."""

_UNSAFE = re.compile(r"/|[A-Za-z]:|\\\\|(?:.*/)?\.\.(?:/|\Z)|.*\0", re.DOTALL)
"""Start of a name that is absolute, leads upwards, or has a zero byte."""


class Member(NamedTuple):
    """A file in an archive."""

    size: int
    checksum: int
    offset: int
    """Where its header is."""
    packed: str
    """Its compressed size, as `Entry.values`; "" if it is stored as it is."""
    why: str
    """Why it cannot be read; "" if it can."""


_Folder = dict[str, "_Folder | Member"]


class Directory(NamedTuple):
    """All members of an archive."""

    top: _Folder
    refused: list[Problem]
    """Members whose names are not plain paths."""


def directory_of(path: str) -> Directory:
    """Return the members of an archive, read once in each process."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a file", remedy="pass one zip archive")
        return _read_directory(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        require_machine(error, path)
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


@lru_cache(maxsize=3)  # such as of three splits
def _read_directory(path: str, *_: int) -> Directory:
    try:
        with _Bounded(path, opener=open_at_once) as file, ZipFile(file) as archive:
            infos = archive.infolist()
    except NotImplementedError as error:
        raise UsageError(f"{path} cannot be read: {error}", remedy="unpack it") from error
    except (ValueError, BadZipFile, struct.error, OverflowError, EOFError) as error:
        with open(path, "rb", opener=open_at_once) as start:
            is_cut = start.read(4) == b"PK\3\4"
        if not is_cut:
            raise UsageError(f"{path} is not a zip archive") from error
        raise UsageError(
            f"{path} is truncated or damaged ({error})", remedy="copy or download it again"
        ) from error
    if any(info.volume for info in infos):
        raise UsageError(
            f"{path} is part of a split archive", remedy="join it with `zip -s 0 IN --out OUT`"
        )
    if sum(info.compress_size for info in infos) > os.path.getsize(path):
        raise UsageError(
            f"{path} lists more data than it contains: it is truncated, or members overlap"
        )
    directory = Directory({}, [])
    names = [_name(info) for info in infos]
    has_folders = any("/" in name for name in names)
    for name, info in zip(names, infos, strict=True):
        _add(directory, name if has_folders else name.replace("\\", "/"), member_in(info))
    return directory


class _Bounded(io.FileIO):
    """A file of which `zipfile` does not read as much as the end of an archive may ask for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_DIRECTORY:
            raise BadZipFile(f"its directory has over {_MOST_DIRECTORY:,} bytes")
        return super().read(size) or b""


def _name(info: ZipInfo) -> str:
    """Return the name of a member. Without a flag, macOS writes UTF-8, and Windows code page 437.

    Old .NET writes backslashes; no other name from Windows has one. Nor does one from Unix, unless
    an archive without folders is of old .NET, too, copied by a program that names another system.
    """
    name = info.orig_filename
    if not info.flag_bits & _UTF8:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return name.replace("\\", "/") if info.create_system == 0 else name


def member_in(info: ZipInfo) -> Member:
    """Return the member that a directory describes."""
    packed = str(info.compress_size) if info.compress_type != ZIP_STORED else ""
    return Member(info.file_size, info.CRC, info.header_offset, packed, _why(info))


def _why(info: ZipInfo) -> str:
    """Return why a member cannot be read."""
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted: unpack the archive with its password and convert the folder"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "it is a symbolic link: convert the unpacked folder, or add the file itself"
    if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        how = _METHODS.get(info.compress_type, f"method {info.compress_type}")
        return f"it is compressed with {how}, not Deflate: unpack the archive and convert it"
    if info.file_size > MAX_BYTES:
        return TOO_LARGE
    ratio = 1 if info.compress_type == ZIP_STORED else _MOST_RATIO
    if info.file_size > ratio * info.compress_size:
        return f"its listed size is {info.file_size:,} bytes, but {info.compress_size:,} are stored"
    return ""


def _add(directory: Directory, name: str, member: Member) -> None:
    """Add a member or a folder."""
    *folders, last = names = [item for item in name.split("/") if item not in ("", ".")] or [""]
    why = "its name is not a plain path in the archive" * bool(_UNSAFE.match(name))
    folder = directory.top
    if len(names) > _MOST_PARTS:
        why = f"its name has over {_MOST_PARTS} parts"
    for folder_name in names if name.endswith("/") else folders:
        inner = {} if why or not folder_name else folder.setdefault(folder_name, {})
        if isinstance(inner, Member):
            why = "a part of its name is a file in the archive"
        else:
            folder = inner
    if not why and last and not name.endswith("/"):
        other = folder.setdefault(last, member)
        if isinstance(other, Member) and other is not member:
            folder[last] = member._replace(why="the archive has two members with this name")
        elif other is not member:
            why = "a folder in the archive has the same name"
    if why:
        directory.refused.append(Problem(path=name, reason=why))


class ZipFolder(SourceFolder):
    """A folder in a zip archive; ``below`` is "" or ends with a slash."""

    def __init__(self, path: str, below: str = "") -> None:
        self.path = path
        self.below = below
        self.name = as_text(posixpath.basename(below.rstrip("/")) or Path(path).resolve().name)

    def __str__(self) -> str:
        return f"{self.path}/{self.below}".rstrip("/")

    def local(self) -> Sequence[Path]:
        """Return nothing: it is no folder."""
        return ()

    def inner(self, folder: str) -> ZipFolder:
        """Return a folder in this one."""
        return ZipFolder(self.path, f"{self.below}{folder}/") if folder else self

    def content(self, path: str = "") -> _Folder | Member | None:
        """Return what is at a path; None for nothing."""
        node: _Folder | Member | None = directory_of(self.path).top
        for folder_name in f"{self.below}{path}".split("/"):
            if folder_name not in ("", "."):
                node = node.get(folder_name) if isinstance(node, dict) else None
        return node

    def member(self, path: str = "") -> Member:
        """Return the file at a path; BadImage if there is none that can be read."""
        member = self.content(path)
        if not isinstance(member, Member):
            raise BadImage("it is not a file in the archive")
        if member.why:
            raise BadImage(member.why)
        return member

    def listed(self, path: str = "") -> _Folder:
        """Return what a folder contains."""
        content = self.content(path)
        return content if isinstance(content, dict) else {}

    def folders(self) -> list[str]:
        """Return the sorted names of the folders in it that are data."""
        listed = self.listed().items()
        return sorted(n for n, item in listed if isinstance(item, dict) and not why_left_out(n))

    def names(self) -> list[str]:
        """Return the names of all files and folders in it."""
        return [*self.listed()]

    def has(self, name: str) -> bool:
        """Return whether it has a file of that name."""
        return isinstance(self.content(name), Member)

    def finder(self) -> Finder:
        """Return what walks the folder."""
        return _Walk(self)

    def locate(self, path: str) -> str:
        """Return archive and name of a member."""
        return f"{self.path}/{self.below}{path}"

    def read(self, entry: Entry, path: str) -> bytes:
        """Return the content of a member."""
        with reading(self.path) as view:
            return read_member(view, member_of(entry))[0]

    def members(self, folder: str = "") -> Iterator[tuple[str, Member]]:
        """Yield path and member of all files in a folder and below, sorted."""
        for name, item in sorted(self.listed(folder).items(), key=lambda item: item[0]):
            path = below(folder, name)
            if isinstance(item, Member):
                yield path, item
            else:
                yield from self.members(path)

    def unwrapped(self) -> ZipFolder:
        """Return the folder with the data: this, or the only one in it, if that has folders."""
        folders = self.folders()
        if len(folders) == 1 and not is_split_name(folders[0]):
            inner = self.inner(folders[0])
            if inner.folders() and not any(map(_is_image, self.names())):
                return inner.unwrapped()
        return self

    def outside(self) -> Iterator[Problem]:
        """Yield what is next to the folder and those around it."""
        around = ZipFolder(self.path)
        for folder_name in self.below.split("/")[:-1]:
            for name in sorted({*around.names()} - {folder_name}):
                why = why_left_out(name) or "outside the only folder"
                yield Problem(path=f"{around.below}{name}", reason=why)
            around = around.inner(folder_name)


def _is_image(name: str) -> bool:
    return claims_image(name) and not why_left_out(name)


class _Walk(Finder):
    """Walks a folder in an archive."""

    def __init__(self, folder: ZipFolder) -> None:
        super().__init__()
        self._folder = folder

    def files(self, top: str, *, recurse: bool) -> Iterator[tuple[str, int, int]]:
        """Yield path, size and checksum of each image below ``top``, and report all else."""
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            inner = []
            for name, item in sorted(self._folder.listed(folder).items(), key=lambda item: item[0]):
                path = below(folder, name)
                if reason := why_left_out(name):
                    self.ignore(path, reason)
                elif isinstance(item, dict):
                    inner.append(path)
                elif item.why:
                    may_be_image = claims_image(path) or "." not in name
                    report = self.blame if may_be_image else self.ignore
                    report(path, item.why)
                elif claims_image(path) or self._has_image(path, item):
                    yield path, item.size, item.checksum
            if recurse:
                waiting += reversed(inner)

    def _has_image(self, path: str, member: Member) -> bool:
        try:
            image_field_of(io.BytesIO(head_of(self._folder.path, member)))
        except UnreadImage:
            return True  # reading it says so
        except BadImage:
            self.ignore(path, "not an image")
            return False
        return True


def head_of(path: str, member: Member) -> bytes:
    """Return the start of a member."""
    with reading(path) as view:
        return read_head(view, member, _HEAD)


def read_head(view: OpenedFile, member: Member, most: int) -> bytes:
    """Return at most so many bytes of a member's start, which nothing has checked."""
    most = min(member.size, most)
    data = view.read(_start(view, member), int(member.packed or most))
    return _inflated(data, most) if member.packed else data


def enter_member(view: OpenedFile, member: Member) -> None:
    """Go on with the content of a member; see `OpenedFile.enter`."""
    packed = int(member.packed or member.size)
    view.enter(_start(view, member), packed, bool(member.packed), member.size)


def _start(view: OpenedFile, member: Member) -> int:
    """Return where the content of a member starts."""
    head = view.read(member.offset, _LOCAL.size).ljust(_LOCAL.size)
    signature, method, name, extra = _LOCAL.unpack(head)
    if signature != b"PK\3\4" or method != (ZIP_DEFLATED if member.packed else ZIP_STORED):
        raise BadImage("the archive does not contain this member: it is damaged or has changed")
    return member.offset + _LOCAL.size + int(name) + int(extra)


def _inflated(data: bytes, most: int) -> bytes:
    """Return at most so many bytes of a compressed member."""
    try:
        return zlib.decompressobj(-15).decompress(data, most)
    except zlib.error as error:
        raise BadImage(f"it cannot be unpacked: {error}") from error


def member_of(entry: Entry) -> Member:
    """Return the member that an entry states; see `ZipImages`."""
    return Member(entry.bytes, entry.stamp, entry.place, entry.values, "")


def read_member(view: OpenedFile, member: Member, *, image: bool = True) -> tuple[bytes, int]:
    """Return the content of a member, compared with its size and checksum, and where it starts.

    If ``image``, a large one is not unpacked unless it starts like an image.
    """
    start = _start(view, member)
    data = view.read(start, int(member.packed or member.size))
    if member.packed:
        if image and member.size > _HEAD:
            image_field_of(io.BytesIO(_inflated(data, _HEAD)))  # or it may unpack to anything
        data = _inflated(data, member.size + 1)
    if len(data) != member.size or zlib.crc32(data) != member.checksum:
        raise BadImage(_OTHER)
    return data, start


_OTHER = "it does not match the archive's checksum: it is damaged or has changed"


def zip_folder(path: str | Path) -> ZipFolder | None:
    """Return what a path such as ``photos.zip/train`` leads to in an archive; None if in none."""
    path = Path(path)
    for top in (path, *path.parents) if ".zip" in str(path).lower() else ():
        if top.suffix.lower() == ".zip" and top.is_file():
            inside = path.relative_to(top).as_posix()
            return ZipFolder(str(top), "" if inside == "." else f"{inside}/")
    return None


def file_of(path: str | Path) -> Path:
    """Return the archive that a path leads into, or the path itself."""
    place = zip_folder(path)
    return Path(place.path if place else path)


def open_member(at: ZipFolder) -> io.RawIOBase:
    """Open the member at a path, unpacked to a temporary file; UsageError if it cannot be."""
    name = str(at)
    with refusing(name):
        member = at.member()
        view = OpenedFile(at.path, ahead=_HEAD)
        try:
            enter_member(view, member)
        except BaseException:
            view.close()
            raise
    return _Content(name, view, member)


class _Content(io.RawIOBase):
    """The content of a member, compared with its checksum when it is read to the end."""

    def __init__(self, name: str, view: OpenedFile, member: Member) -> None:
        self._name = name
        self._view = view
        self._expected = member.size, member.checksum
        self._at = 0
        self._checksum = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read on; UsageError at the end if the content is not that of the archive."""
        data = self._view.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        self._checksum = zlib.crc32(data, self._checksum)
        if not data and (self._at, self._checksum) != self._expected:
            raise UsageError(f"{self._name}: {_OTHER}")
        return len(data)

    def close(self) -> None:
        self._view.close()
        super().close()


def overview_of(path: Path) -> Overview | None:
    """Return the overview of what an archive contains; None if it is none that can be read."""
    folder = zip_folder(path)
    with contextlib.suppress(UsageError):
        return Inside(folder) if folder and directory_of(folder.path) else None
    return None


class Inside(Overview):
    """The content of an archive, as kinds of sources examine a folder."""

    def __init__(self, folder: ZipFolder, shown: Path | None = None) -> None:
        super().__init__(shown or Path(folder.path, folder.below))
        self.is_folder = True
        self._folder = folder

    def inner(self, folder: str) -> Overview:
        """Return the overview of a folder in the archive."""
        return Inside(self._folder.inner(folder))

    def has(self, *names: str) -> bool:
        """Return whether there are files or folders of all these names."""
        return all(self._folder.content(name) is not None for name in names)

    def ends(self, name: str = "", size: int = 1 << 16) -> bytes:
        """Return the start of a file."""
        member = self._folder.content(name)
        with contextlib.suppress(BadImage):
            return head_of(self._folder.path, member)[:size] if isinstance(member, Member) else b""
        return b""

    def _list(self, inside: str) -> tuple[list[str], list[str]]:
        folder = self._folder.inner(inside)
        files = [n for n in folder.names() if folder.has(n) and not why_left_out(n)]
        return folder.folders(), sorted(files)
