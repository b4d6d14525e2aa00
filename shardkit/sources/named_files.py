"""Files below a folder, or in a zip archive, that a table or annotations name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.errors import CHANGED, BadImage, Problem, UsageError, setting
from shardkit.record import NO_LABEL
from shardkit.sources.driver import Listing, Row
from shardkit.sources.folders import below, why_left_out
from shardkit.sources.images import has_image_suffix, read_file, require_machine
from shardkit.sources.inputs import reading
from shardkit.sources.zip_file import ZipFolder, directory_of, head_of, read_member
from shardkit.system.files import as_name, as_text, read_small, split_text_path
from shardkit.system.text import fault, quoted
from shardkit.system.text_hashes import TextHashes

FOLLOWED = setting("follow_links", True)
TOO_DEEP = "its values are nested too deeply"


class NamedFile(NamedTuple):
    """A file that a list names."""

    name: str
    size: int
    stamp: int
    """Its modification time in nanoseconds; in an archive, its CRC-32."""


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _as_json(values: Mapping[str, Any]) -> str:
    return _ENCODER.encode(values) if values else ""


def path_below(folder: str | Path, root: str | Path) -> str | None:
    """Return the path from one folder to another below it, or None."""
    top = os.path.realpath(folder)
    real = os.path.realpath(root)
    return as_text(os.path.relpath(real, top)) if is_below(real, top) else None


def is_below(real: str, top: str) -> bool:
    """Return whether a real path is another one, or below it."""
    return real == top or real.startswith(os.path.join(top, ""))


def corners(numbers: object, order: str) -> list[float]:
    """Return left, top, right and bottom of a box in the order ``xyxy`` or ``xywh``.

    It raises BadImage if it is not four numbers.
    """
    if (
        not isinstance(numbers, list)
        or len(numbers) != 4
        or not all(
            isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
        )
    ):
        raise BadImage(f"a box must be four numbers, not {quoted(numbers)}")
    left, top, right, bottom = numbers
    return [left, top, left + right, top + bottom] if order == "xywh" else numbers


def names_in(path: Path) -> list[str]:
    """Return the names in a list, one in each line."""
    try:
        lines = read_small(path).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {fault(error)}") from error
    return [line.strip() for line in lines if line.strip()]


class Names:
    """The files below a folder that a list names, while it is scanned.

    Names are relative to the folder and must stay below it, also through links, unless
    ``follows_links``.
    """

    def __init__(self, root: str, *, follows_links: bool = False) -> None:
        self.root = root
        self._follows_links = follows_links
        self._prefix = os.path.join(root, "")
        self._top = os.path.realpath(root)
        self._folders: set[str] = set()
        """Folders that are below the root."""
        self._used = TextHashes()

    def find(self, name: object) -> NamedFile:
        """Return a file by its name in the list; BadImage if it is not below the folder."""
        if not isinstance(name, str) or not name:
            raise BadImage("its file name is not text" if name else "it has no file name")
        file = self.status(name[2:] if name.startswith("./") else name)
        self._used.add(file.name)
        return file

    def has(self, name: str) -> bool:
        """Return whether there is a file or folder of that name."""
        return os.path.lexists(self._prefix + as_name(name))

    def read(self, file: NamedFile, *, image: bool = True) -> bytes:
        """Return the content of a file; BadImage if it changed, or is not below the folder.

        If ``image``, it must be an image.
        """
        self.status(file.name)
        return read_file(self._prefix + as_name(file.name), file.size, file.stamp, image=image)

    def head(self, name: str, size: int) -> bytes:
        """Return the start of a file; OSError or BadImage if it cannot be read."""
        self.status(name)
        with open(self._prefix + as_name(name), "rb") as file:
            return file.read(size)

    def status(self, plain: str) -> NamedFile:
        """Return a file by its plain name; BadImage if it is not below the folder."""
        folder, _, last = plain.rpartition("/")
        try:
            is_checked = folder in self._folders and not plain.startswith("/")
            if not is_checked or last in ("", ".", "..") or "\0" in last:
                split_text_path(plain)
                self._enter(folder)
            path = self._prefix + as_name(plain)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                self._require_below(path)
                status = os.stat(path)
        except BadImage:
            raise
        except ValueError as error:
            raise _not_plain(plain) from error
        except OSError as error:
            require_machine(error, path)
            raise BadImage(f"it cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise BadImage("it is not a file")
        return NamedFile(plain, status.st_size, status.st_mtime_ns)

    def _enter(self, folder: str) -> None:
        if folder:
            self._require_below(self._prefix + as_name(folder))
        self._folders.add(folder)

    def _require_below(self, path: str) -> None:
        if not self._follows_links and not is_below(os.path.realpath(path), self._top):
            raise BadImage(
                "it is below a link that points outside the root folder",
                remedy=f"if you trust its links, add {FOLLOWED}",
            )

    def images(self, folder: str = "") -> Iterator[str]:
        """Yield the images in a folder and below it, by suffix, sorted, as paths below the root.

        What may not be entered is yielded itself, so that `find` says why.
        """
        waiting = [folder]
        seen = set()
        while waiting:
            inside = waiting.pop()
            path = self._prefix + as_name(inside)
            try:
                identity = os.stat(path)[1:3]
                items = sorted(os.scandir(path), key=lambda item: item.name)
            except OSError:
                yield inside
                continue
            if identity in seen:
                continue
            seen.add(identity)
            inner = []
            for item in items:
                name = as_text(item.name)
                path = below(inside, name)
                if why_left_out(name):
                    continue
                if os.path.isdir(item.path) if item.is_symlink() else item.is_dir():
                    if self._may_enter(item):
                        inner.append(path)
                    else:
                        yield path
                elif has_image_suffix(name):
                    yield path
            waiting += reversed(inner)

    def _may_enter(self, item: os.DirEntry[str]) -> bool:
        is_inside = not item.is_symlink() or is_below(os.path.realpath(item.path), self._top)
        return is_inside or self._follows_links

    def unused(self, lists: Sequence[str]) -> Iterator[Problem]:
        """Yield all files below the folder that are not named, except for the lists."""
        for path in lists:
            self._used.add(path_below(self._top, path) or "")
        for name, _ in self._walk():
            self._used.add(name)
        alone = self._used.single()  # a file that is named occurs once more than in the folder
        for name, problem in self._walk():
            if problem or hash(name) in alone:
                yield Problem(path=name, reason=problem or "not in the list")

    def _walk(self) -> Iterator[tuple[str, str]]:
        """Yield each file that must be named, and "", or a folder and why it cannot be read."""
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                items = sorted(os.scandir(self._prefix + as_name(folder)), key=lambda e: e.name)
            except OSError as error:
                require_machine(error, self._prefix + as_name(folder))
                yield folder, f"the folder cannot be read: {error.strerror}"
                continue
            inner = []
            for item in items:
                name = f"{folder}/{as_text(item.name)}" if folder else as_text(item.name)
                if item.is_dir(follow_symlinks=False):
                    inner.append(name)
                elif not (item.is_symlink() and self._leads_to_used(name)):
                    yield name, ""
            waiting += reversed(inner)

    def _leads_to_used(self, link: str) -> bool:
        return any(f"{folder}/".startswith(f"{link}/") for folder in self._folders)


class ZipNames(Names):
    """The files in an archive, or in a folder of one."""

    def __init__(self, folder: ZipFolder) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def has(self, name: str) -> bool:
        """Return whether there is a file or folder of that name."""
        return self._folder.content(name) is not None

    def status(self, plain: str) -> NamedFile:
        """Return a member by its plain name; BadImage if there is none that can be read."""
        try:
            split_text_path(plain)
        except ValueError as error:
            raise _not_plain(plain) from error
        member = self._folder.member(plain)
        return NamedFile(plain, member.size, member.checksum)

    def read(self, file: NamedFile, *, image: bool = True) -> bytes:
        """Return the content of a member; BadImage if it changed or is damaged."""
        if self.status(file.name) != file:
            raise BadImage(CHANGED)
        with reading(self._folder.path) as view:
            return read_member(view, self._folder.member(file.name), image=image)[0]

    def head(self, name: str, size: int) -> bytes:
        """Return the start of a member."""
        return head_of(self._folder.path, self._folder.member(name))[:size]

    def images(self, folder: str = "") -> Iterator[str]:
        """Yield the images in a folder and below it, by suffix, sorted."""
        for path, _ in self._folder.members(folder):
            if has_image_suffix(path) and not any(map(why_left_out, path.split("/"))):
                yield path

    def _walk(self) -> Iterator[tuple[str, str]]:
        yield from ((path, "") for path, _ in self._folder.members())
        for problem in directory_of(self._folder.path).refused:
            yield problem.path, problem.reason


def _not_plain(name: str) -> BadImage:
    remedy = f"; make it relative to {setting('root')}" if name.startswith("/") else ""
    return BadImage(f"its name is not a plain path inside the root folder{remedy}")


class NamedListing:
    """Adds the files that a list names to the listing of a split."""

    def __init__(self, listing: Listing, names: Names) -> None:
        self.names = names
        self._listing = listing

    def add_file(
        self,
        row: str,
        name: object,
        place: int,
        values: Mapping[str, Any] | str,
        code: int = NO_LABEL,
    ) -> None:
        """Add an image by the name of its file; a file that cannot be used is a problem.

        ``row`` is where the list names it, for messages; ``code`` as in `Row`, ``place`` as in
        `Entry`. ``values`` of its other fields may be JSON; there are none if no image has any.
        """
        try:
            text = values if isinstance(values, str) else _as_json(values)
            file = self.names.find(name)
        except BadImage as error:
            self.blame_row(row, name, error.stated)
        except RecursionError:
            self.blame_row(row, name, TOO_DEEP)
        else:
            image = Row(file.name, code, file.size, file.stamp, place, text)
            self._listing.add_named(image, str(name), row)

    def blame_row(self, row: str, name: object, reason: str) -> None:
        """Report a row of the list, by its file: rows may get other numbers when some are fixed."""
        if isinstance(name, str) and name:
            self._listing.blame_named(name, reason, row)
        else:
            self._listing.blame(row, f"{quoted(name)}: {reason}" if name else reason)
