"""Rows with named columns: a format gives columns and rows; all else of its source is here.

That is the choice of columns, labels, names, fields to keep, problems, the description, and records
for conversions and for attached files. A format is a subclass of `ColumnSource`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.contracts import Entry, Images, Located, SourceOptions
from shardkit.errors import BadImage, Problem, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.record import FOREIGN_FIELD, NO_LABEL, Record
from shardkit.sources.columns import NONE, Column, ColumnOptions, Columns, label_in
from shardkit.sources.driver import ListedSource, Listing, Row, images_by_file
from shardkit.sources.images import has_image_suffix, image_record, pixel_record, raw_record
from shardkit.sources.inputs import (
    InputFiles,
    OpenedFile,
    file_at,
    limited,
    place,
    place_of,
    reading,
    scanning,
    stem,
)
from shardkit.sources.kept import Kept
from shardkit.sources.labels import Value, read_classes
from shardkit.sources.unpacking import packing_of
from shardkit.system.text import name_list, quoted

_CONVERT = "convert it with `shardkit convert`"


class RowFile(NamedTuple):
    """A file of rows."""

    path: str
    name: str
    """A short name, for problems."""
    folder: str
    """The start of its images' names; "" numbers all images of a split instead."""
    split: str = ""
    size: int | None = None
    """Its unpacked size, if that is known."""


def row_files(inputs: InputFiles, suffixes: Sequence[str]) -> list[RowFile]:
    """Return the files that a user named, whose images are named after them."""
    names = [stem(stem(name, (".gz",)), suffixes) for name in inputs.names]
    return [*map(RowFile, inputs.paths, inputs.names, names)]


class Cells:
    """The values of one row, each read when it is used.

    Methods raise `BadImage` if a value cannot be read.
    """

    place: int = 0
    """Offset or row number, for `ColumnSource.row`."""
    suffix: str = ""
    """Suffix of the image's name."""
    values: str = ""
    """As `Entry.values`."""
    stamp: int | None = None
    """As `Entry.stamp`; None means the time of the file."""

    def has(self, name: str) -> bool:
        """Return whether the row has a value in a column."""
        return True

    def size(self, name: str) -> int:
        """Return the bytes of the image in a column, to list it."""
        raise NotImplementedError

    def value(self, column: Column) -> Any:
        """Return a value: bytes, as stored, also of text and JSON; a number; or an array.

        None if it is missing.
        """
        raise NotImplementedError

    def offset(self, name: str) -> int | None:
        """Return where the file has a value as it is; None if it does not."""
        return None


class Known(Cells):
    """A row whose values were read before, such as by a library.

    ``size`` is that of the image in bytes; None if it has none, and ``why`` states the reason.
    """

    def __init__(
        self,
        at: int,
        values: Mapping[str | None, Any],
        size: int | None = None,
        suffix: str = "",
        why: str = "",
    ) -> None:
        self.place = at
        self.suffix = suffix
        self._values = values
        self._size = size
        self._why = why

    def size(self, name: str) -> int:
        """Return the size that is known."""
        if self._size is None:
            raise BadImage(self._why)
        return self._size

    def value(self, column: Column) -> Any:
        """Return a value; None for one that was not read."""
        return self._values.get(column.name)


class RowSource(ListedSource):
    """Files of rows, in order, each row an image with values.

    An `Entry.place` is file and `Cells.place`.
    """

    rows_are = "rows"
    """Rows in this format's words."""
    is_stamped = True
    """Whether `Entry.stamp` is the time of the file."""

    def __init__(self, path: str | Path, options: SourceOptions, inputs: Sequence[RowFile]) -> None:
        super().__init__(path, options)
        self.inputs = inputs
        self.splits = {file.split: file.split for file in inputs}
        self.others: Sequence[Problem] = ()
        """Files next to these that are not used."""
        self.image = Column("", "", "image")
        """The column of images."""
        self.keep: Sequence[Kept] = ()

    @abstractmethod
    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return one row, perhaps of anybody's plan; BadImage if it is missing or changed.

        ``entry.place`` is `Cells.place`.
        """

    def column_of(self, name: str) -> Column:
        """Return a column to keep."""
        raise NotImplementedError

    def fit(self, kept: Kept, value: Any) -> Any:
        """Return what a field stores for a value; BadImage if it is not a value of the field."""
        raise NotImplementedError

    def paths(self) -> Sequence[Path]:
        """Return the files."""
        return [Path(file.path) for file in self.inputs]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file, and the number or offset of a row."""
        number, at = place_of(entry.place)
        return f"{self.inputs[number].path} at {self.rows_are.removesuffix('s')} {at}"

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        return self.record(entry)

    def record(self, entry: Entry, *, in_place: bool = False) -> Record:
        """Return the record of an image; pixels are a PNG file, or as the file has them."""
        with self._reading(entry) as view:
            return self._record(entry, self._row(view, entry), in_place=in_place)

    def _reading(self, entry: Entry, *, ahead: bool = False) -> AbstractContextManager[OpenedFile]:
        path, _ = file_at([file.path for file in self.inputs], entry.place)
        unpacked_size = self.inputs[place_of(entry.place)[0]].size
        stamp = entry.stamp if self.is_stamped else None
        return reading(path, stamp, ahead=ahead, unpacked_size=unpacked_size)

    def _row(self, view: OpenedFile, entry: Entry) -> Cells:
        number, at = place_of(entry.place)
        return self.row(self.inputs[number], view, entry._replace(place=at))

    def _record(self, entry: Entry, cells: Cells, *, in_place: bool = False) -> Record:
        """Return the record of an image; pixels become a PNG file, or stay as they are."""
        image = cells.value(self.image)
        if not isinstance(image, np.ndarray):
            record = image_record(entry, image)
        elif in_place:
            record = raw_record(entry, image.tobytes(), *image.shape[:2])
        else:
            record = pixel_record(entry, image)
        values = {}
        for kept in self.keep:
            value = cells.value(self.column_of(kept.source)) if cells.has(kept.source) else None
            if value is not None:
                values[kept.name] = self.fit(kept, value)
            elif not kept.optional:
                raise _lacks(kept.source)
        return self.complete(record, values) if values else record

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each file with its images; UsageError if it lacks a record's bytes as they are."""
        for file in self.inputs:
            if packing_of(file.path):
                raise UsageError(
                    f"{file.path} is compressed, so its images cannot be read in place",
                    remedy=f"{_CONVERT}, or unpack it",
                )
        if not self.is_in_place(self.image, self.image.field):
            raise UsageError(f"column {self.image} cannot be read in place", remedy=_CONVERT)
        for kept in self.keep:
            column = self.column_of(kept.source)
            field = self.schema[kept.name]
            is_same = self.is_in_place(column, field)
            if field.type.stored_apart and not is_same:
                raise UsageError(
                    f"column {column} cannot be read in place",
                    remedy=f"{_CONVERT}, or leave it out with {setting('keep')}",
                )
        return images_by_file(self.paths(), images)

    def is_in_place(self, column: Column, field: Field) -> bool:
        """Return whether the files have the values of a column as a field does."""
        is_stated = column.holds != "array" or field.dtype is not None
        return field == column.field and not column.why and is_stated

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one file, with the offsets of its values."""
        if entries:
            with self._reading(entries[0], ahead=True) as view:
                for entry in entries:
                    try:
                        yield self._located(view, entry)
                    except BadImage as error:
                        yield error

    def _located(self, view: OpenedFile, entry: Entry) -> Located:
        cells = self._row(view, entry)
        types = {kept: self.schema[kept.name].type for kept in self.keep if cells.has(kept.source)}
        apart = [kept for kept, type_ in types.items() if type_.stored_apart]
        places = {}
        for name in (self.image.name, *(kept.source for kept in apart)):
            offset = cells.offset(name)
            if offset is None:  # before it is read: it may be one large hole
                raise BadImage(f"its {name or 'image'} is not stored as one byte range")
            places[name] = offset
        record = self._record(entry, cells, in_place=True)
        offsets = {record.image_field or FOREIGN_FIELD: places[self.image.name]}
        for kept in apart:
            name = types[kept].stored_in(record.fields, kept.name) or kept.name
            offsets[name] = places[kept.source]
        for name, offset in offsets.items():
            data = record.fields[name]
            if view.read(offset, len(data)) != data:
                raise BadImage(f"its {name} is not stored unchanged")
        return Located(record, offsets)


class ColumnSource(RowSource):
    """Files of rows with named columns."""

    images: Sequence[str] = ("image", "bytes")
    """Content of columns that may be images."""
    is_eager = False
    """Whether all columns are kept by default; see `Columns`."""

    def __init__(
        self,
        path: str | Path,
        options: ColumnOptions,
        inputs: Sequence[RowFile],
        columns: Iterable[Column],
    ) -> None:
        super().__init__(path, options, inputs)
        chosen = Columns(path, columns, options, images=self.images, eager=self.is_eager)
        self.chosen = chosen
        self.image = chosen.column(chosen.image)
        self.label = chosen.column(chosen.label)
        self.keep = chosen.keep
        self.schema = chosen.schema
        self.exact_sizes = not self.image.why
        self.class_names = read_classes(options.classes) or self.label.field.classes
        if options.name is not None and options.name not in chosen:
            raise UsageError(
                f"{path} has no column {quoted(options.name)}; it has {name_list(chosen)}"
            )
        self.name = options.name
        self.settle(image=chosen.image, label=chosen.label or NONE)

    def column_of(self, name: str) -> Column:
        """Return a column; one that holds nothing if there is none, such as without labels."""
        return self.chosen.column(name)

    def fit(self, kept: Kept, value: Any) -> Any:
        """Return what a field stores for a value; see `Columns.value`."""
        return self.chosen.value(kept, value)

    @abstractmethod
    def rows(self, file: RowFile, view: OpenedFile) -> Iterator[Cells]:
        """Yield the rows of a file, in order; BadImage if it cannot be read further."""

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the rows of all files, in order.

        A file that cannot be read to its end is a problem; its rows until then are good.
        """
        next(iter(listings.values())).ignored += self.others
        for number, file in enumerate(self.inputs):
            listing = listings[file.split]
            if reason := scanning(file.path, partial(self._list, listing, number), file.size):
                listing.blame_rest(file.name, reason)
        self.notes += self.chosen.notes
        count = sum(map(len, listings.values()))
        files = f"{len(self.inputs):,}, containing {count:,} {self.rows_are}"
        understood = self.chosen.describe(self.image_words(), self.name)
        return {"files": files, **understood, "label": self.label_words()}

    def image_words(self) -> str:
        """Return what the column of images holds, for the user to check."""
        return f"{self.image.type}{self.image.why and f', {self.image.why}'}"

    def label_words(self) -> str:
        """Return where labels are, for the user to check."""
        return self.label.name or "no column"

    def label_of(self, cells: Cells) -> Value:
        """Return the label of a row; "" if it is missing."""
        if not cells.has(self.label.name):
            raise BadImage(f"its row has no {self.label.name}")
        return label_in(self.label, cells.value(self.label))

    def _list(self, listing: Listing, number: int, view: OpenedFile) -> None:
        file = self.inputs[number]
        for position, cells in enumerate(limited(file.path, self.rows(file, view))):
            name = f"{listing.logged:08d}"
            if file.folder:
                name = f"{file.folder}/{position:08d}"
            try:
                name = self._name_of(cells) or name
                size = cells.size(self.image.name)
                code = listing.code(self.label_of(cells)) if self.label.name else NO_LABEL
                for kept in self.keep:
                    if not (kept.optional or cells.has(kept.source)):
                        raise _lacks(kept.source)
            except BadImage as error:
                listing.blame(name, error.stated)
                continue
            stamp = view.stamp if cells.stamp is None else cells.stamp
            spot = place(number, cells.place)
            name += "" if has_image_suffix(name) else cells.suffix
            listing.add(Row(name, code, size, stamp, spot, cells.values))

    def _name_of(self, cells: Cells) -> str:
        """Return the name that a row has in a column, or ""."""
        if self.name is None:
            return ""
        column = self.column_of(self.name)
        return str(label_in(column, cells.value(column))).strip("/")


def _lacks(name: str) -> BadImage:
    return BadImage(f"its row has no {name}; to allow this, write {name}?")
