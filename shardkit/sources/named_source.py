"""Image files that a table or annotations name, as a source.

All small values of a record travel in its `Entry.values`, so the list is parsed once. A resumed
conversion compares them, and labels, with the earlier run.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Scan, SourceOptions, recorded
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Schema, describe_schema, load_schema
from shardkit.options import option
from shardkit.record import Record
from shardkit.sources.driver import ListedSource
from shardkit.sources.images import image_record
from shardkit.sources.kept import Kept, value_of
from shardkit.sources.named_files import FOLLOWED, TOO_DEEP, NamedFile, Names, ZipNames, path_below
from shardkit.sources.zip_file import file_of, zip_folder
from shardkit.system.files import as_name, require_local
from shardkit.system.text import fault

_ELSEWHERE = "elsewhere"
"""The description of a folder that is not below that of the list: the user names it again."""


@dataclass(frozen=True, kw_only=True)
class NamedOptions(SourceOptions):
    """Options of sources that name files."""

    follow_links: bool = option(
        False,
        help="Also follow links that lead out of the folder, such as those in a Hugging Face Hub "
        "cache.",
    )
    list_name: str | None = recorded("name")
    """The name of a dataset's list, to find it in a folder; None once it is found."""
    place: str | None = recorded("root")
    """The folder of the images, relative to that of the list; None for that folder itself."""
    fields: Any = recorded("fields")
    """The fields that a scan found, as `describe_schema` returns them."""
    numbers: Mapping[str, Sequence[int]] | None = recorded("numbers")
    """The label of each code in the values of ``labels`` and ``boxes``."""


class NamedSource(ListedSource):
    """A list of image files below a folder, with the values of each.

    An `Entry.values` is a JSON object with the value of each field; of a file, its name, size and
    modification time, or checksum in an archive.

    The path may end in ``@ROOT``. Without ``root``, the folder is that of the list, or that in the
    description.
    """

    options: NamedOptions
    reads_zip = False
    """Whether list and images may be in a zip archive."""

    def __init__(
        self, path: str | Path, options: NamedOptions, root: str | Path | None = None
    ) -> None:
        require_local(path)
        text = str(path)
        if root is None and "@" in text and not os.path.lexists(text):
            text, _, root = text.rpartition("@")
        text = _list_in(text, options.list_name) or text
        folder = text if self._is_folder(text) else os.path.dirname(text) or "."
        if root is None and options.place:
            root = _restored_root(text, folder, str(options.place))
        self.root = str(folder if root is None else root)
        require_local(self.root)
        self._archive = zip_folder(self.root) if self.reads_zip else None
        if not self._is_folder(self.root):
            if os.path.isfile(self.root):
                raise UsageError(
                    f"{self.root} is not a folder{' or zip archive' * self.reads_zip} of images",
                    remedy="unpack it, and pass the folder",
                )
            raise UsageError(f"the image folder {self.root} does not exist")
        super().__init__(text, options)
        self.settle(list_name=None)
        inside = path_below(folder, self.root)
        self.settle(place=_ELSEWHERE if inside is None else inside if inside != "." else None)
        self.numbers: dict[str, tuple[int, ...]] = {}
        """The label of each code in the values of ``labels`` and ``boxes``; complete after a
        scan."""
        self._inside: Names | None = None
        """Refuses files outside of the folder, while images are read."""
        self.kept_files: Sequence[Kept] = ()
        """Fields that are files of their own."""
        try:
            self.schema = load_schema(options.fields or (), None)
            numbers = options.numbers or {}
            self.numbers = {name: tuple(map(int, codes)) for name, codes in numbers.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"the description of {self} is damaged: {fault(error)}") from error

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images; UsageError if all are links that lead out of the folder."""
        scan = super().scan(classes)
        problems = [problem for listed in scan.problems.values() for problem in listed]
        only_links = all("follow_links" in problem.settings for problem in problems)
        if not any(map(len, scan.splits.values())) and only_links:
            error = UsageError(
                f"all images of {self} are links that point outside {self.root}, as in a cache of "
                "the Hugging Face Hub",
                remedy=f"if you trust these links, add {FOLLOWED}",
            )
            error.lacks = FOLLOWED
            raise error
        return scan

    def _is_folder(self, path: str) -> bool:
        archive = zip_folder(path) if self.reads_zip else None
        return os.path.isdir(path) or (archive is not None and bool(archive.listed()))

    def settle_fields(
        self, schema: Schema, numbers: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Set the fields that a scan found, and record them for reads without a scan."""
        self.schema = dict(schema)
        self.numbers = dict(numbers or {})
        stored = {name: list(labels) for name, labels in self.numbers.items()}
        self.settle(fields=describe_schema(schema) or None, numbers=stored or None)

    def names(self, folder: str | Path | None = None) -> Names:
        """Return what finds the files that a list names, in the folder of images or another."""
        if self._archive and folder is None:
            return ZipNames(self._archive)
        return Names(str(folder or self.root), follows_links=self.options.follow_links)

    def known_classes(self, name: str) -> Sequence[str] | None:
        """Return the classes of a field, if an earlier scan or conversion found some."""
        return self.schema[name].classes if name in self.schema else None

    def paths(self) -> Sequence[Path]:
        """Return the list and the folder."""
        return [file_of(self.path), file_of(self.root)]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the path of an image file."""
        return os.path.join(self.root, "") + as_name(entry.path)

    def files(self, split: str, entries: Sequence[Entry]) -> Sequence[bytes] | None:
        """Return the file of each image, if records have no other fields."""
        if self.schema or self._archive:
            return None
        try:
            for entry in entries:
                self.content.status(entry.path)
        except BadImage:
            return None  # `read` says which
        prefix = os.fsencode(os.path.join(self.root, ""))
        return [prefix + entry.path.encode("utf-8", "surrogateescape") for entry in entries]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image file, with its values."""
        data = self.content.read(NamedFile(entry.path, entry.bytes, entry.stamp))
        record = image_record(entry, data)
        if not self.schema:
            return record
        try:
            values = self.fit(self._values(json.loads(entry.values or "{}")), record)
            files = {
                kept.name: _found(values[kept.name])
                for kept in self.kept_files
                if kept.name in values
            }
        except BadImage:
            raise
        except RecursionError as error:
            raise BadImage(TOO_DEEP) from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise BadImage(
                f"its values in the list of images are damaged: {fault(error)}"
            ) from error
        for kept in self.kept_files:
            if kept.name in files:
                content = self.content.read(files[kept.name], image=False)
                values[kept.name] = self.value_of(kept, content, record)
        return self.complete(record, values)

    def fit(self, values: dict[str, Any], record: Record) -> dict[str, Any]:
        """Return the values of an image, as they fit its file; BadImage if they do not."""
        return values

    def value_of(self, kept: Kept, content: bytes, record: Record) -> Any:
        """Return the value in a file of a record's image.

        It raises BadImage if it is not a value of the field, or does not fit the image.
        """
        return value_of(kept, self.schema[kept.name], content)

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the value of each field from those of an entry, with labels for codes."""
        for name, numbers in self.numbers.items():
            value = values[name]
            if name == "labels":
                values[name] = [numbers[code] for code in value]
            else:
                values[name] = [[*box[:4], *(numbers[code] for code in box[4:])] for box in value]
        return values

    @property
    def content(self) -> Names:
        """The files that entries name, perhaps of anybody's plan, while images are read."""
        if self._inside is None:
            self._inside = self.names()
        return self._inside


def _list_in(folder: str, name: str | None) -> str:
    """Return the list of this name in a folder, or in the only one below it; "" otherwise."""
    if not isinstance(name, str) or name != os.path.basename(name) or not os.path.isdir(folder):
        return ""
    for inside in ("", "*"):
        found = glob.glob(os.path.join(glob.escape(folder), inside, glob.escape(name)))
        if len(found) == 1 and os.path.isfile(found[0]):
            return found[0]
    return ""


def _restored_root(path: str, folder: str, name: str) -> Path | None:
    """Return the folder of a dataset's images, which its manifest describes."""
    if name == ".":
        return None
    root = Path(folder) / as_name(name)
    if name == _ELSEWHERE or path_below(folder, root) != name:
        raise UsageError(
            f"the dataset's images are not in the folder of {path}",
            remedy=f"add their folder: {path}@ROOT",
        )
    return root


def _found(value: Any) -> NamedFile:
    """Return a file from the values of an entry."""
    name, size, stamp = value
    if (type(name), type(size), type(stamp)) != (str, int, int) or size < 0:
        raise ValueError("a file lacks its name, size or time")
    return NamedFile(name, size, stamp)
