"""Image files that a table or annotations name, all below one folder."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import Field, Record, describe_schema, load_schema
from shardkit.sources.image_files import read_file, require_machine
from shardkit.sources.images import image_record
from shardkit.sources.kept import Kept, value_of, with_fields
from shardkit.sources.labels import LabelValues
from shardkit.sources.listing import ListedSource, Listing
from shardkit.system.files import as_name, as_text, require_local
from shardkit.system.safe_paths import parts_of
from shardkit.system.text import quoted

_TOO_DEEP = "its values are nested too deeply"

_ELSEWHERE = "elsewhere"
"""The description of a folder that is not below that of the list: the user names it again."""


class NamedSource(ListedSource):
    """A list of image files below a folder, with the values of each.

    An `Entry.values` is a JSON object with the value of each field; of a file, its name, size and
    modification time.

    Args:
        pattern: The file or folder with the list; perhaps with ``@ROOT``.
        root: The folder; None means that of ``pattern``.
        options: As for `ListedSource`.
    """

    def __init__(
        self, pattern: str | Path, root: str | Path | None, options: Mapping[str, Any]
    ) -> None:
        require_local(pattern)
        text = str(pattern)
        if root is None and "@" in text and not os.path.lexists(text):
            text, _, root = text.rpartition("@")
        folder = text if os.path.isdir(text) else os.path.dirname(text) or "."
        self._root = str(folder if root is None else root)
        require_local(self._root)
        if not os.path.isdir(self._root):
            raise UsageError(f"the folder {self._root} with the images does not exist")
        inside = _path_below(folder, self._root)
        place = {"root": _ELSEWHERE if inside is None else inside} if inside != "." else {}
        super().__init__(text, {**place, **options})
        self._schema: dict[str, Field] = {}
        """Fields other than image and label; complete after a scan."""
        self._files: Sequence[Kept] = ()
        """Those that are files of their own."""
        self._numbers: dict[str, tuple[int, ...]] = {}
        """The label of each code in the values of ``labels`` and ``boxes``; complete after a
        scan."""

    def _describe(self, **options: Any) -> None:
        """Add options to the description; see `ListedSource`."""
        self._options |= {name: value for name, value in options.items() if value is not None}

    def _settle(
        self, schema: Mapping[str, Field], numbers: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Set the fields that a scan found, and describe them for reads without a scan."""
        self._schema, self._numbers = dict(schema), dict(numbers or {})
        self._describe(
            fields=describe_schema(schema) or None,
            numbers={name: list(each) for name, each in self._numbers.items()} or None,
        )

    def _restore(self, described: Mapping[str, Any]) -> None:
        """Set the fields that a description states."""
        try:
            self._schema = load_schema(described.get("fields", ()), None)
            numbers = described.get("numbers", {})
            self._numbers = {name: tuple(map(int, each)) for name, each in numbers.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"the description of {self} is damaged: {error}") from error

    def _known(self, name: str) -> Sequence[str] | None:
        """Return the classes of a field, if an earlier scan or conversion found some."""
        return self._schema[name].classes if name in self._schema else None

    def paths(self) -> Sequence[Path]:
        """Return the list and the folder."""
        return [self.pattern, Path(self._root)]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the path of an image file."""
        return self._path(entry.path)

    def files(self, split: str, entries: Sequence[Entry]) -> Sequence[bytes] | None:
        """Return the file of each image, if records have no other fields."""
        if self._schema:
            return None
        prefix = os.fsencode(os.path.join(self._root, ""))
        return [prefix + entry.path.encode("utf-8", "surrogateescape") for entry in entries]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image file, with its values."""
        data = read_file(self._path(entry.path), entry.bytes, entry.stamp)
        record = image_record(entry, data)
        if not self._schema:
            return record
        try:
            values = self._values(json.loads(entry.values))
        except RecursionError as error:
            raise BadImage(_TOO_DEEP) from error
        for kept in self._files:
            if kept.name in values:
                name, size, stamp = values[kept.name]
                content = read_file(self._path(name), size, stamp, image=False)
                values[kept.name] = value_of(kept, self._schema[kept.name], content)
        return with_fields(record, self._schema, values)

    def _values(self, stated: dict[str, Any]) -> dict[str, Any]:
        """Return the value of each field from those of an entry, with labels for codes."""
        for name, numbers in self._numbers.items():
            value = stated[name]
            if name == "labels":
                stated[name] = [numbers[code] for code in value]
            else:
                stated[name] = [[*box[:4], *(numbers[code] for code in box[4:])] for box in value]
        return stated

    def _path(self, name: str) -> str:
        return os.path.join(self._root, "") + as_name(name)


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _as_json(values: Mapping[str, Any]) -> str:
    return _ENCODER.encode(values) if values else ""


def find_root(path: Path, described: Mapping[str, Any]) -> Path | None:
    """Return the folder of a dataset's images, which its manifest describes.

    Raises:
        UsageError: If the manifest does not name a folder below that of the list.
    """
    name = described.get("root", ".")
    if name == "." or ("@" in str(path) and not os.path.lexists(path)):
        return None
    folder = path if path.is_dir() else path.parent
    root = folder / as_name(str(name))
    if name == _ELSEWHERE or _path_below(folder, root) != name:
        raise UsageError(
            f"the images of the dataset are not below the folder of {path}: name their folder, "
            f"too, as {path}@ROOT"
        )
    return root


def _path_below(folder: str | Path, root: str | Path) -> str | None:
    """Return the path from one folder to another below it, or None."""
    top, real = os.path.realpath(folder), os.path.realpath(root)
    return as_text(os.path.relpath(real, top)) if _is_below(real, top) else None


def _is_below(real: str, top: str) -> bool:
    return real == top or real.startswith(os.path.join(top, ""))


def corners(numbers: object, order: str) -> list[float]:
    """Return left, top, right and bottom of a box in the order ``xyxy`` or ``xywh``.

    Raises:
        BadImage: If it is not four numbers.
    """
    if (
        not isinstance(numbers, list)
        or len(numbers) != 4
        or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    ):
        raise BadImage(f"a box is four numbers, not {quoted(numbers)}")
    left, top, right, bottom = numbers
    return [left, top, left + right, top + bottom] if order == "xywh" else numbers


class Names:
    """The files below a folder that a list names, while it is scanned.

    Names are relative to the folder and must stay below it, also through links.
    """

    def __init__(self, root: str) -> None:
        self._prefix = os.path.join(root, "")
        self._top = os.path.realpath(root)
        self._folders: set[str] = set()
        """Folders that are below the root."""
        self._used: set[str] = set()

    def find(self, name: object) -> tuple[str, os.stat_result]:
        """Return the plain form of a name, and the status of its file.

        Raises:
            BadImage: If it names no file below the folder.
        """
        if not isinstance(name, str) or not name:
            raise BadImage("it has no file name that is a text" if name else "it has no file name")
        plain = name[2:] if name.startswith("./") else name
        folder, _, last = plain.rpartition("/")
        try:
            known = folder in self._folders and not plain.startswith("/")
            if not known or last in ("", ".", "..") or "\0" in last:
                parts_of(plain)
                self._enter(folder)
            path = self._prefix + as_name(plain)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                self._require_below(path)
                status = os.stat(path)
        except BadImage:
            raise
        except ValueError as error:
            remedy = "; name it relative to the folder (--root)" if plain.startswith("/") else ""
            raise BadImage(f"its name is not a plain path below the root folder{remedy}") from error
        except OSError as error:
            require_machine(error)
            raise BadImage(f"it cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise BadImage("it is not a file")
        self._used.add(plain)
        return plain, status

    def _enter(self, folder: str) -> None:
        if folder:
            self._require_below(self._prefix + as_name(folder))
        self._folders.add(folder)

    def _require_below(self, path: str) -> None:
        if not _is_below(os.path.realpath(path), self._top):
            raise BadImage("it is below a link that leads out of the root folder")

    def unused(self, lists: Sequence[str]) -> Iterator[Problem]:
        """Yield all files below the folder that are not named, except for the lists."""
        used = self._used.union(_path_below(self._top, path) or "" for path in lists)
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                found = sorted(os.scandir(self._prefix + as_name(folder)), key=lambda e: e.name)
            except OSError as error:
                yield Problem(path=folder, reason=f"the folder cannot be read: {error.strerror}")
                continue
            inner = []
            for each in found:
                name = f"{folder}/{as_text(each.name)}" if folder else as_text(each.name)
                if each.is_dir(follow_symlinks=False):
                    inner.append(name)
                elif name not in used and not (each.is_symlink() and self._leads_to_used(name)):
                    yield Problem(path=name, reason="not in the list")
            waiting += reversed(inner)

    def _leads_to_used(self, link: str) -> bool:
        return any(f"{folder}/".startswith(f"{link}/") for folder in self._folders)


class NamedListing(Listing):
    """The images of one split, which a list names."""

    def __init__(self, labels: LabelValues, names: Names) -> None:
        super().__init__(labels)
        self._names = names
        self._bad: set[str] = set()

    def add_file(
        self, row: str, name: object, code: int, place: int, values: Mapping[str, Any] | str
    ) -> None:
        """Add an image by the name of its file; a file that cannot be used is a problem.

        Args:
            row: Where the list names it, for messages.
            name: Its name.
            code: As for `Listing.add`.
            place: As `Entry.place`.
            values: The values of its other fields, perhaps as JSON; none if no image has any.
        """
        try:
            text = values if isinstance(values, str) else _as_json(values)
            plain, status = self._names.find(name)
            if plain in self or plain in self._bad:
                raise BadImage("another row names it, too")
        except BadImage as error:
            self.blame_row(row, name, str(error))
            return
        except RecursionError:
            self.blame_row(row, name, _TOO_DEEP)
            return
        self.add(plain, code, status.st_size, status.st_mtime_ns, place, text)

    def blame_row(self, row: str, name: object, reason: str) -> None:
        """Report a row of the list, by its file: rows may get other numbers when some are fixed."""
        known = isinstance(name, str) and name and name not in self and name not in self._bad
        if known:
            self._bad.add(str(name))
            self.blame(str(name), f"{reason} ({row})")
        else:
            self.blame(row, f"{quoted(name)}: {reason}" if name else reason)
