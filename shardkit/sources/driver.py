"""The driver of sources in files: splits, labels, keys, problems, descriptions and reopening.

A source has options, `ListedSource.list_images` and `read`.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import (
    Entry,
    Images,
    PackedEntries,
    Scan,
    Source,
    SourceOptions,
    StoredEntries,
)
from shardkit.errors import Problem, UsageError, setting
from shardkit.kinds.field import Schema, default_schema
from shardkit.kinds.packing import with_fields
from shardkit.options import option
from shardkit.record import NO_LABEL, Record, make_keys, plain_key, stem_of
from shardkit.sources.inputs import MAX_IMAGE_BYTES, OpenedFile, find_files, place_of, scanning
from shardkit.sources.labels import Labels, LabelValues, Value
from shardkit.sources.row_log import RowLog
from shardkit.system.files import as_text
from shardkit.system.text import name_list, quoted
from shardkit.system.text_hashes import TextHashes

_MOST_PROBLEMS = 1 << 16
"""Maximum problems to name; a file of a few KB may unpack to millions."""

_TWICE = (
    "another row also names it; list all of its boxes, labels and captions in one row, or join the "
    f"rows of a table with {setting('join_rows', True)}"
)


class Row(NamedTuple):
    """One image that a source lists; see `Entry`, which the driver makes of it."""

    path: str
    """Its name in the split."""
    code: int
    """The code of its label: see `Listing.code`."""
    bytes: int
    stamp: int
    place: int = 0
    values: str = ""
    """Either all images have some, or none."""


class Listing:
    """The images of one split, while a source lists them.

    Rows and problems are logged, since the names of all images may not fit in memory. Of rows with
    one path, the first is an image, and the others are problems.

    Args:
        labels: The labels of all splits.
    """

    def __init__(self, labels: LabelValues) -> None:
        self.labels = labels
        self.ignored: list[Problem] = []
        self._log = RowLog()
        self._hashes = TextHashes()
        """Hashes of names, and of paths without suffix."""
        self._rows = self._problems = 0
        self._counts = array("q")
        """The rows in each chunk of the log."""
        self._names: _Names | None = None
        """Only while nothing was added to the log since."""

    def __len__(self) -> int:
        return self._rows - len(self._resolve().left_out)

    @property
    def logged(self) -> int:
        """The number of rows so far, with those that are problems."""
        return self._rows + self._problems

    def code(self, label: Value | None, *, is_name: bool = False) -> int:
        """Return the code of a label; `NO_LABEL` for None, if the source has no labels.

        Args:
            label: The label.
            is_name: Whether it is a name for sure, such as a folder's.
        """
        if label is None:
            return NO_LABEL
        return self.labels.code_of_name(str(label)) if is_name else self.labels.code(label)

    def add(self, row: Row) -> None:
        """Add an image; one whose path is already listed, or that is too large, is a problem."""
        self._add(row, row)

    def add_named(self, row: Row, name: str, where: str) -> None:
        """Add an image that a list names; a file may be named only once, also by `blame_named`.

        Args:
            row: The image.
            name: Its name in the list.
            where: Where the list names it.
        """
        if name != row.path:
            self._hashes.add(name)
        self._add(row, (*row, name, where))

    def blame(self, path: str, reason: str) -> None:
        """Report an image or file that cannot be listed."""
        self._problems += 1
        self._append((path, reason, None))

    def blame_named(self, name: str, reason: str, where: str) -> None:
        """Report a file that cannot be listed by its name, or the second time by ``where``."""
        self._problems += 1
        self._hashes.add(name)
        self._append((name, reason, where))

    def blame_rest(self, name: str, reason: str) -> None:
        """Report a file that cannot be read to its end.

        The path differs from a folder of the file's images: those listed are good.
        """
        self._append((f"{name} (rest)", reason))

    def ignore(self, path: str, reason: str) -> None:
        """Report something that is not used."""
        self.ignored.append(Problem(path=path, reason=reason))

    def problems(self) -> list[Problem]:
        """Return the problems; the last one counts those that are not named."""
        return self._resolve().all_problems()

    def entries(self, labels: Labels) -> Sequence[Entry]:
        """Return the images; those of a long listing are read from the log when they are used."""
        names = self._resolve()

        def load(chunk: int) -> list[Entry]:
            return [
                Entry(row[0], names.key(row[0]), labels.of(row[1]), *row[2:6])
                for position, row in enumerate(self._log.chunk(chunk), self._log.start(chunk))
                if len(row) >= _ROW and position not in names.left_out
            ]

        if self._log.chunks == 1:
            return PackedEntries(load(0))
        counts = self._counts[:]
        for position in names.left_out:
            counts[self._log.chunk_of(position)] -= 1
        return StoredEntries(load, [0, *accumulate(counts)])

    def _add(self, row: Row, logged: Sequence[Any]) -> None:
        stem = stem_of(row.path)
        self._hashes.add(stem)
        if stem != row.path:
            self._hashes.add(row.path)
        self._rows += 1
        self._append(logged)

    def _append(self, logged: Sequence[Any]) -> None:
        if self._log.chunks > len(self._counts):
            self._counts.append(0)
        self._counts[-1] += len(logged) >= _ROW
        self._log.append(logged)
        self._names = None

    def _resolve(self) -> _Names:
        if self._names is None:
            self._names = _Names(self._hashes.repeated(), self._log)
        return self._names


_ROW = len(Row._fields)
"""Length of a row in a log; that of one named by a list is larger, those of problems are smaller.
"""


class _Names:
    """Which rows of a log are images, and their keys. Only names that are alike are in memory.

    ``alike`` are the hashes of names that repeat; those of other names may be among them.
    """

    def __init__(self, alike: set[int], log: RowLog) -> None:
        self.left_out: set[int] = set()
        """Positions in the log of rows that are problems."""
        self._problems: list[Problem] = []
        self._bad = 0
        self._alike = alike
        self._listed: dict[str, None] = {}
        self._blamed: set[str] = set()
        for position, row in enumerate(log):
            if len(row) >= _ROW:
                self._add(position, *row)
            elif len(row) == 2:
                self._problems.append(Problem(path=row[0], reason=row[1]))
            elif row[2] is None:
                self._blame(row[0], row[1])
            else:
                self._blame_named(*row)
        self._keys = dict(zip(self._listed, make_keys(self._listed), strict=True))

    def key(self, path: str) -> str:
        """Return the key of an image."""
        return self._keys.get(path) or plain_key(path)

    def all_problems(self) -> list[Problem]:
        """Return the problems; the last one counts those that are not named."""
        unlisted = self._bad - _MOST_PROBLEMS
        if unlisted <= 0:
            return self._problems
        summary = Problem(path=f"(and {unlisted:,} more)", reason="not listed: too many")
        return [*self._problems, summary]

    def _add(self, position: int, path: str, *values: Any) -> None:
        _, size, _, _, _, *named = values
        if path in self._listed or (named and path in self._blamed):
            if named:
                self._blame_named(named[0], _TWICE, named[1])
            else:
                self._blame(f"{path} (again)", "another image has the same name")
        elif size > MAX_IMAGE_BYTES:
            self._blame(path, f"it is larger than the limit of {MAX_IMAGE_BYTES:,} bytes")
        else:
            if self._alike and (hash(path) in self._alike or hash(stem_of(path)) in self._alike):
                self._listed[path] = None
            return
        self.left_out.add(position)

    def _blame_named(self, name: str, reason: str, where: str) -> None:
        if name in self._listed or name in self._blamed:
            self._blame(where, f"{quoted(name)}: {reason}")
        else:
            if hash(name) in self._alike:
                self._blamed.add(name)
            self._blame(name, f"{reason} ({where})")

    def _blame(self, path: str, reason: str) -> None:
        self._bad += 1
        if self._bad <= _MOST_PROBLEMS:
            self._problems.append(Problem(path=path, reason=reason))


class ListedSource(Source):
    """All of a source in files but its content.

    Args:
        path: The path that the user gave.
        options: The options, perhaps restored from a manifest.
    """

    def __init__(self, path: str | Path, options: SourceOptions) -> None:
        self.path = Path(path)
        self.options = options
        self.splits: Mapping[str, Any] = {"": ""}
        """The splits by name, with what the source needs to list them."""
        self.class_names: Sequence[str] | bool | None = None
        """Class names that the user or the source gives: see `LabelValues.assign`."""
        self.schema: Schema = {}
        """Fields other than image and label; complete after a scan."""
        self.exact_sizes = True
        """As `Scan.exact_sizes`."""
        self.notes: list[str] = []
        """As `Scan.notes`, of the latest scan."""

    def __str__(self) -> str:
        return str(self.path)

    def paths(self) -> Sequence[Path]:
        """Return the path."""
        return [self.path]

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the last part of the path, and the options."""
        return {"name": as_text(self.path.resolve().name), **self.options.describe()}

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of each split, in order.

        Raises:
            UsageError: If a file cannot be read, labels are out of range, or there are neither
                images nor problems.
        """
        labels = LabelValues()
        self.notes = []
        listings = {name: Listing(labels) for name in self.splits}
        understood = self.list_images(listings)
        assigned = labels.assign(classes, self.class_names)
        if len(labels):
            column = f"{understood['label']}: " if "label" in understood else ""
            understood = {**understood, "label": column + assigned.words}
        if not any(len(listing) or listing.problems() for listing in listings.values()):
            raise UsageError(f"{self} contains no images")
        return Scan(
            source=self,
            splits={
                name: Images(self, name, listing.entries(assigned))
                for name, listing in listings.items()
            },
            classes=assigned.classes,
            ignored={name: listing.ignored for name, listing in listings.items()},
            problems={name: listing.problems() for name, listing in listings.items()},
            understood=understood,
            notes=self.notes,
            fields={**default_schema(assigned.classes), **self.schema} if self.schema else None,
            exact_sizes=self.exact_sizes,
        )

    @abstractmethod
    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """Add the images of each split to its listing, in order.

        Returns:
            How the source was understood; see `Scan.understood`. To ``label``, where labels are,
            the driver adds how they were read.

        Raises:
            UsageError: If it cannot be listed.
        """

    def complete(self, record: Record, values: Mapping[str, Any]) -> Record:
        """Return a record with values of `schema`; BadImage if one is not of its field."""
        return with_fields(record, self.schema, values)

    def settle(self, **values: Any) -> None:
        """Replace options by what the source chose or recorded, for descriptions and reads."""
        self.options = replace(self.options, **values)


class FileSource(ListedSource):
    """A source made of all files that match a pattern; an `Entry.place` is file and offset.

    Args:
        pattern: A file, a folder, or names with ``{000..999}``, ``*`` or ``?``.
        options: As for `ListedSource`.
        suffixes: Suffixes of the files to use in a folder.
    """

    def __init__(
        self, pattern: str | Path, options: SourceOptions, suffixes: Sequence[str]
    ) -> None:
        super().__init__(pattern, options)
        self.inputs = find_files(pattern, suffixes)

    def paths(self) -> Sequence[Path]:
        """Return the files."""
        return [Path(path) for path in self.inputs.paths]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file of an image, and the offset of its record."""
        number, offset = place_of(entry.place)
        return f"{self.inputs.paths[number]} at byte {offset}"

    def list_files(self, listing: Listing, scan: Callable[[int, OpenedFile], None]) -> None:
        """Call ``scan`` with the number of each file and the file, to list its images.

        A file that cannot be read to its end is a problem; its images until then are good.
        """
        listing.ignored += self.inputs.others
        for number, path in enumerate(self.inputs.paths):
            if reason := scanning(path, partial(scan, number)):
                listing.blame_rest(self.inputs.names[number], reason)

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each file with its images, in order; see `AttachableSource`."""
        return images_by_file(self.paths(), images)


def images_by_file(paths: Sequence[Path], images: Images) -> Sequence[tuple[Path, Images]]:
    """Return each file with its images, which follow one another in the order of the files."""
    counts = Counter(place_of(entry.place)[0] for entry in images.entries)
    ends = [0, *accumulate(counts[number] for number in range(len(paths)))]
    return [
        (path, images.of(images.entries[start:end]))
        for path, (start, end) in zip(paths, pairwise(ends), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class SplitOptions(SourceOptions):
    """The options of sources that have these two splits; see `split_names`."""

    split: str | None = option(
        None,
        help="Convert only this split.",
        metavar="train|test",
        shown="both, one dataset for each",
    )


def split_names(chosen: str | None, names: Sequence[str]) -> dict[str, str]:
    """Return the name of each split in the dataset, and in the source: "" if one was chosen."""
    if chosen is None:
        return {name: name for name in names}
    if chosen not in names:
        raise UsageError(
            f"{setting('split', chosen)} is unknown;", remedy=f"choose from {name_list(names)}"
        )
    return {"": chosen}
