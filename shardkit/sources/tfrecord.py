"""TFRecord files of tf.train.Example as a source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Entry, Range, SourceKind
from shardkit.errors import CHANGED, BadImage, UsageError, setting
from shardkit.options import option, same_option
from shardkit.record import NO_LABEL
from shardkit.sources.column_source import Cells, ColumnSource, RowFile, row_files
from shardkit.sources.columns import Column, ColumnOptions, plain_column
from shardkit.sources.inputs import MAX_IMAGE_BYTES, OpenedFile, find_files, reading
from shardkit.sources.kept import kind_of_bytes
from shardkit.sources.labels import Value
from shardkit.sources.recognize import having, require_one_split
from shardkit.sources.tfrecord_file import (
    CHECKSUM,
    HEADER,
    Feature,
    Read,
    RecordSpan,
    features,
    length_of,
    masked,
    records,
)
from shardkit.system.text import quoted

_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")

_FIRST = 8
"""Records that show which features there are."""


@dataclass(frozen=True, kw_only=True)
class TFRecordOptions(ColumnOptions):
    """The options of this source."""

    label: str | None = same_option(
        ColumnOptions, "label", shown="the one with a common name, such as image/class/label"
    )
    label_offset: int = option(
        0,
        help="Number to add to integer labels; -1 if they start at 1.",
        metavar="N",
        store=lambda offset: offset or None,
    )
    keep: str | None = same_option(ColumnOptions, "keep", shown="none")


class TFRecord(ColumnSource):
    """TFRecord files, each record a tf.train.Example with an encoded image.

    Files that end in ``.gz`` are unpacked to a temporary file. Every checksum is compared. Images
    are named by file and position, or by a feature.

    The first records show which columns, called features, there are.
    """

    kind = "tfrecord"
    rows_are = "records"
    is_stamped = False
    options: TFRecordOptions

    def __init__(self, pattern: str | Path, options: TFRecordOptions) -> None:
        require_one_split(pattern, _SUFFIXES)
        inputs = find_files(pattern, _SUFFIXES)
        files = row_files(inputs, _SUFFIXES)
        super().__init__(pattern, options, files, _columns(inputs.paths[0]))
        self.others = inputs.others

    def image_words(self) -> str:
        """Return what images are."""
        return "encoded images"

    def rows(self, file: RowFile, view: OpenedFile) -> Iterator[Cells]:
        """Yield the records of a file."""
        for record in records(view):
            yield _Example(record, view.read, record.start)

    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return a record, after comparing both checksums."""
        length = length_of(view, entry.place)
        if length > MAX_IMAGE_BYTES:
            raise BadImage(f"its record has {length:,} bytes; the limit is {MAX_IMAGE_BYTES:,}")
        data = view.read(entry.place + HEADER.size, length + CHECKSUM.size)
        if length + CHECKSUM.size != len(data):
            raise BadImage("the file is truncated")
        (checksum,) = CHECKSUM.unpack_from(data, length)
        if checksum != entry.stamp:
            raise BadImage(CHANGED)
        if masked(data[:length]) != checksum:
            raise BadImage("its record does not match its checksum")
        return _Example(RecordSpan(entry.place, 0, length, checksum), _reader(data), 0)

    def label_of(self, cells: Cells) -> Value:
        """Return the label of a record; integers with the offset."""
        label = super().label_of(cells)
        if not isinstance(label, int) or label == NO_LABEL:
            return label
        offset = self.options.label_offset
        if label + offset < 0:
            raise BadImage(
                f"its label {label} becomes negative with {setting('label_offset', offset)}"
            )
        return label + offset

    def label_words(self) -> str:
        """Return the feature of labels, and the offset."""
        offset = self.options.label_offset
        return super().label_words() + (f" {offset:+}" if offset and self.label.name else "")


class _Example(Cells):
    """A record, which starts at ``start`` in the bytes that ``read`` returns.

    These are of the file, or of the record alone.
    """

    def __init__(self, record: RecordSpan, read: Read, start: int) -> None:
        self.place = record.offset
        self.stamp = record.stamp
        self._read = read
        self._span = start, start + record.length

    @cached_property
    def _features(self) -> dict[str, Feature]:
        return features(self._read, *self._span)

    def has(self, name: str) -> bool:
        return name in self._features

    def size(self, name: str) -> int:
        return _only(name, self._features.get(name)).length

    def value(self, column: Column) -> Any:
        feature = self._features.get(column.name)
        if feature is None or feature.kind not in ("int64", "float"):
            return self._read(*_only(column.name, feature))
        numbers = _numbers(feature, self._read)
        if column.holds == "json":
            return np.array(numbers, np.float32 if feature.kind == "float" else np.int64)
        if len(numbers) > 1:
            raise BadImage(f"its {quoted(column.name)} feature has {len(numbers)} values, not one")
        return numbers[0] if numbers else None


def _columns(path: str) -> list[Column]:
    """Return the features of the first records of a file as columns."""
    columns: dict[str, Column] = {}
    wrong: list[BadImage] = []  # reading names these records
    try:
        with reading(path) as view:
            for record in itertools.islice(records(view), _FIRST):
                try:
                    by_name = features(view.read, record.start, record.start + record.length)
                except BadImage as error:
                    wrong.append(error)
                    continue
                for name, feature in sorted(by_name.items()):
                    if name not in columns or not columns[name].holds:
                        columns[name] = _column(name, feature, view)
    except BadImage as error:  # the end of what can be read of the file
        wrong.append(error)
    if not columns and wrong:
        raise UsageError(f"{path}: {wrong[0].problem}", remedy=wrong[0].remedy) from wrong[0]
    if not columns:
        raise UsageError(f"{path} contains no records with features")
    return [*columns.values()]


def _reader(data: bytes) -> Any:
    return lambda offset, length: data[offset : offset + length]


def _only(name: str, feature: Feature | None) -> Range:
    """Return the range of a feature that must be one value of bytes."""
    if feature is None:
        raise BadImage(f"its record has no feature {quoted(name)}")
    if feature.kind != "bytes" or len(feature.ranges) != 1:
        count = f"{len(feature.ranges)} bytes values" if feature.kind == "bytes" else feature.kind
        raise BadImage(f"its {quoted(name)} feature has {count}, not one bytes value")
    return feature.ranges[0]


def _column(name: str, feature: Feature, view: OpenedFile) -> Column:
    """Return a feature as a column, from its value in one record."""
    if feature.kind == "bytes" and len(feature.ranges) == 1:
        head = view.read(feature.ranges[0].offset, min(4096, feature.ranges[0].length))
        kind = kind_of_bytes(head)
        return plain_column(name, kind, kind)
    if feature.kind in ("bytes", "empty"):
        return Column(name, feature.kind, "", why=f"it has {len(feature.ranges)} values")
    count = len(feature.numbers) + sum(values.length // 4 for values in feature.floats)
    if count != 1:
        return plain_column(name, f"{feature.kind} {count}", "json")
    return plain_column(name, feature.kind, "int64" if feature.kind == "int64" else "float64")


def _numbers(feature: Feature, read: Read) -> list[Any]:
    floats = (np.frombuffer(read(*span), "<f4").tolist() for span in feature.floats)
    return [*feature.numbers, *itertools.chain.from_iterable(floats)]


SOURCE = SourceKind(
    name=TFRecord.kind,
    title="Convert TFRecord files of tf.train.Example records.",
    help="""Convert the images in TFRecord files to a dataset in DST.

    SRC is a file, a folder of .tfrecord files, or a quoted pattern with {00000..01023}, * or ?.
    Each record must be a tf.train.Example. Its checksums are verified. Files that end in .gz are
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
        "*.tfrecord",
        "*.tfrecord-*",
        "*.tfrecords",
        suffixes=(".tfrecord", ".tfrecords"),
        shards=_SUFFIXES,
    ),
    source=TFRecord,
)
