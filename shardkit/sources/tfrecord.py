"""TFRecord files of tf.train.Example as a source."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Entry, Range, SourceKind
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field
from shardkit.kinds.packing import with_fields
from shardkit.options import option, same_option
from shardkit.record import NO_LABEL, Record
from shardkit.sources.columns import NONE, Column, ColumnOptions, Columns
from shardkit.sources.driver import FileSource, Listing, Row
from shardkit.sources.image_files import CHANGED
from shardkit.sources.images import image_record
from shardkit.sources.inputs import (
    MAX_IMAGE_BYTES,
    OpenedFile,
    file_at,
    limited,
    place,
    reading,
    stem,
)
from shardkit.sources.kept import Kept, kind_of_bytes
from shardkit.sources.labels import Value, label_of, read_classes
from shardkit.sources.recognize import having
from shardkit.sources.tf_example import Feature, Read, features
from shardkit.sources.tfrecord_file import CHECKSUM, HEADER, length_of, masked, records
from shardkit.system.text import quoted

_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")

_FIRST = 8
"""Records that show which features there are."""


@dataclass(frozen=True, kw_only=True)
class TFRecordOptions(ColumnOptions):
    """The options of this source."""

    label: str | None = same_option(
        ColumnOptions, "label", shown="the one of a usual name, such as image/class/label"
    )
    label_offset: int = option(
        0,
        help="Number to add to integer labels; -1 if they start at 1.",
        metavar="N",
        store=lambda offset: offset or None,
    )
    name: str | None = option(
        None,
        help="Feature with the image's name.",
        metavar="FEATURE",
        shown="file and position",
        stored="image_name",
    )
    keep: str | None = same_option(ColumnOptions, "keep", shown="none")


class TFRecord(FileSource):
    """TFRecord files, each record a tf.train.Example with an encoded image.

    Files that end in ``.gz`` are unpacked to a temporary file. Every checksum is compared. Images
    are named by file and position, or by a feature.

    Args:
        pattern: A file, a folder, or names with ``{000..999}``, ``*`` or ``?``.
        options: The options. The first records show which columns, called features, there are.
    """

    kind = "tfrecord"

    def __init__(self, pattern: str | Path, options: TFRecordOptions) -> None:
        super().__init__(pattern, options, _SUFFIXES)
        self.class_names = read_classes(options.classes)
        path = self.inputs.paths[0]
        self._chosen = Columns(path, self._columns(path), options, eager=False)
        self._keep = self._chosen.keep
        self.schema = self._chosen.schema
        self._image = self._chosen.image
        self._label = self._chosen.label
        self._name = options.name
        self._offset = options.label_offset
        self.settle(image=self._image, label=self._label or NONE)

    def _columns(self, path: str) -> list[Column]:
        """Return the features of the first records of a file as columns."""
        columns: dict[str, Column] = {}
        wrong: list[BadImage] = []  # reading names these records
        try:
            with reading(path) as view:
                for record in itertools.islice(records(view), _FIRST):
                    try:
                        found = features(view.read, record.start, record.start + record.length)
                    except BadImage as error:
                        wrong.append(error)
                        continue
                    for name, feature in sorted(found.items()):
                        if name not in columns or not columns[name].holds:
                            columns[name] = _column(name, feature, view)
        except BadImage as error:  # the end of what can be read of the file
            wrong.append(error)
        if not columns and wrong:
            raise UsageError(f"{path}: {wrong[0].problem}", remedy=wrong[0].remedy) from wrong[0]
        if not columns:
            raise UsageError(f"there are no records with features in {path}")
        return [*columns.values()]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image, after comparing both checksums."""
        path, offset = file_at(self.inputs.paths, entry.place)
        with reading(path) as view:
            length = length_of(view, offset)
            if length > MAX_IMAGE_BYTES:
                raise BadImage(f"its record has {length:,} bytes; the limit is {MAX_IMAGE_BYTES:,}")
            data = view.read(offset + HEADER.size, length + CHECKSUM.size)
        if length + CHECKSUM.size != len(data):
            raise BadImage("the file is truncated")
        (checksum,) = CHECKSUM.unpack_from(data, length)
        if checksum != entry.stamp:
            raise BadImage(CHANGED)
        if masked(data[:length]) != checksum:
            raise BadImage("its record does not match its checksum")
        by_name = features(_reader(data), 0, length)
        image = _only(self._image, by_name.get(self._image))
        record = image_record(entry, data[image.offset : image.offset + image.length])
        values = {
            kept.name: self._kept(kept, by_name[kept.source], data)
            for kept in self._keep
            if kept.source in by_name
        }
        return with_fields(record, self.schema, values) if values else record

    def _kept(self, kept: Kept, feature: Feature, data: bytes) -> Any:
        """Return the value of a field to keep."""
        if feature.kind == "bytes":
            place = _only(kept.source, feature)
            return self._chosen.value(kept, data[place.offset : place.offset + place.length])
        numbers = _numbers(feature, _reader(data))
        if self.schema[kept.name].kind != "number":
            dtype = np.float32 if feature.kind == "float" else np.int64
            return self._chosen.value(kept, np.array(numbers, dtype))
        if len(numbers) != 1:
            raise BadImage(f"its feature {quoted(kept.source)} has {len(numbers)} values, not one")
        return numbers[0]

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the records of all files, in order."""
        (listing,) = listings.values()
        self.list_files(listing, functools.partial(self._list, listing))
        self.notes += self._chosen.notes
        offset = f" {self._offset:+}" if self._offset else ""
        understood = self._chosen.describe("encoded images", self._name)
        return {
            "files": f"{len(self.inputs.paths):,}, with {len(listing):,} records",
            **understood,
            "label": understood["label"] + offset * bool(self._label),
        }

    def _list(self, listing: Listing, number: int, view: OpenedFile) -> None:
        folder = stem(self.inputs.names[number], (".gz",))
        folder = stem(folder, _SUFFIXES)
        for row, record in enumerate(limited(self.inputs.paths[number], records(view))):
            path = f"{folder}/{row:08d}"
            try:
                by_name = features(view.read, record.start, record.start + record.length)
                image = _only(self._image, by_name.get(self._image))
                value = self._value(view, by_name)
                for kept in self._keep:
                    if kept.source not in by_name and not kept.optional:
                        raise BadImage(
                            f"its record has no feature {quoted(kept.source)}; {kept.source}? "
                            "accepts it"
                        )
                if self._name is not None:
                    path = _text(view, self._name, by_name.get(self._name)).strip("/") or path
            except BadImage as error:
                listing.blame(path, str(error))
                continue
            spot = place(number, record.offset)
            listing.add(Row(path, listing.code(value), image.length, record.stamp, spot))

    def _value(self, view: OpenedFile, by_name: Mapping[str, Feature]) -> Value | None:
        """Return the label of a record; None if labels are not read."""
        if not self._label:
            return None
        feature = by_name.get(self._label)
        if feature is None or feature.kind == "bytes":
            return label_of(_text(view, self._label, feature), self._label)
        numbers = _numbers(feature, view.read)
        if len(numbers) > 1:
            raise BadImage(f"its feature {self._label} has {len(numbers)} values, not one")
        label = label_of(numbers[0] if numbers else None, self._label)
        if not isinstance(label, int) or label == NO_LABEL:
            return label
        if label + self._offset < 0:
            raise BadImage(f"its label {label} is negative after label_offset={self._offset}")
        return label + self._offset


def _reader(data: bytes) -> Any:
    return lambda offset, length: data[offset : offset + length]


def _only(name: str, feature: Feature | None) -> Range:
    """Return the range of a feature that must be one value of bytes."""
    if feature is None:
        raise BadImage(f"its record has no feature {quoted(name)}")
    if feature.kind != "bytes" or len(feature.ranges) != 1:
        count = (
            f"{len(feature.ranges)} values of bytes" if feature.kind == "bytes" else feature.kind
        )
        raise BadImage(f"its feature {quoted(name)} has {count}, not one value of bytes")
    return feature.ranges[0]


def _text(view: OpenedFile, name: str, feature: Feature | None) -> str:
    place = _only(name, feature)
    if place.length > 4096:
        raise BadImage(f"its feature {quoted(name)} has {place.length} bytes, too many for a text")
    return view.read(place.offset, place.length).decode("utf-8", "surrogateescape")


def _column(name: str, feature: Feature, view: OpenedFile) -> Column:
    """Return a feature as a column, from its value in one record."""
    if feature.kind == "bytes" and len(feature.ranges) == 1:
        head = view.read(feature.ranges[0].offset, min(4096, feature.ranges[0].length))
        kind = kind_of_bytes(head)
        return Column(name, kind, kind, field=Field(kind))
    if feature.kind in ("bytes", "empty"):
        return Column(name, feature.kind, "", why=f"it has {len(feature.ranges)} values")
    count = len(feature.numbers) + sum(values.length // 4 for values in feature.floats)
    if count != 1:
        return Column(name, f"{feature.kind} {count}", "json", field=Field("json"))
    is_integer = feature.kind == "int64"
    field = Field("number", "int64" if is_integer else "float64")
    return Column(name, feature.kind, "integer" if is_integer else "float", field=field)


def _numbers(feature: Feature, read: Read) -> list[Any]:
    floats = (np.frombuffer(read(*place), "<f4").tolist() for place in feature.floats)
    return [*feature.numbers, *itertools.chain.from_iterable(floats)]


SOURCE = SourceKind(
    name=TFRecord.kind,
    title="Convert TFRecord files of tf.train.Example.",
    help="""Convert the images in TFRecord files to a dataset in DST.

    SRC is a file, a folder of .tfrecord files, or quoted names with {00000..01023}, * or ?. Each
    record must be a tf.train.Example. Its checksums are compared. Files that end in .gz are
    unpacked to a temporary file, once in each process.

    \b
    Examples:
      shardkit convert tfrecord 'train-*' dataset --to lmdb --dry-run
      shardkit convert tfrecord 'train-*' dataset --to lmdb --image image/encoded \\
        --label image/class/label --label-offset -1 --classes names.txt
    """,
    options=TFRecordOptions,
    of_files=True,
    recognize=having(
        "*.tfrecord", "*.tfrecord-*", "*.tfrecords", suffixes=(".tfrecord", ".tfrecords")
    ),
    source=TFRecord,
)
