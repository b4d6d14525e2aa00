"""TFRecord files of tf.train.Example as a source."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Entry, Range, SourceKind, SourceOptions
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.kinds.packing import with_fields
from shardkit.options import option
from shardkit.record import NO_LABEL, Record
from shardkit.sources.driver import FileSource, Listing, Row
from shardkit.sources.image_files import CHANGED
from shardkit.sources.images import image_record, is_image
from shardkit.sources.inputs import (
    MAX_IMAGE_BYTES,
    OpenedFile,
    file_at,
    limited,
    place,
    reading,
    stem,
)
from shardkit.sources.kept import Kept, kind_of_bytes, parse_keep, value_of
from shardkit.sources.labels import Value, classes_option, label_of, read_classes
from shardkit.sources.recognize import having
from shardkit.sources.tf_example import Feature, Read, features
from shardkit.sources.tfrecord_file import CHECKSUM, HEADER, length_of, masked, records
from shardkit.system.text import name_list, quoted

_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")

_LABELS = ("image/class/label", "label", "class", "label/class")
"""Usual names of the feature with the label."""


@dataclass(frozen=True, kw_only=True)
class TFRecordOptions(SourceOptions):
    """The options of this source."""

    image: str | None = option(
        None, help="Feature with the image.", metavar="FEATURE", shown="the one that is an image"
    )
    label: str | None = option(
        None,
        help="Feature with the label, one integer or text; none: no labels.",
        metavar="FEATURE",
        shown="image/class/label, label or class",
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
    keep: str | None = option(
        None,
        help="More fields to keep, such as caption=text,boxes=image/boxes:json. Records "
        "may lack those with ?.",
        metavar="NAME=FEATURE[:KIND][?],...",
    )
    classes: str | None = classes_option()


class TFRecord(FileSource):
    """TFRecord files, each record a tf.train.Example with an encoded image.

    Files that end in ``.gz`` are unpacked to a temporary file. Every checksum is compared. Images
    are named by file and position, or by a feature.

    Args:
        pattern: A file, a folder, or names with ``{000..999}``, ``*`` or ``?``.
        options: The options. Without ``image``, the image is the only feature that is one in the
            first record; without ``label``, the label has a usual name there.
    """

    kind = "tfrecord"

    def __init__(self, pattern: str | Path, options: TFRecordOptions) -> None:
        super().__init__(pattern, options, _SUFFIXES)
        self.class_names = read_classes(options.classes)
        self._keep = parse_keep(options.keep)
        image = options.image
        label = options.label
        if image is None or label is None or self._keep:
            image, label = self._infer(image, label)
        self._image = image
        self._label = label
        self._name = options.name
        self._offset = options.label_offset
        self.settle(image=image, label=label)

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
            kept.name: _kept(kept, self.schema[kept.name], by_name[kept.source], data)
            for kept in self._keep
            if kept.source in by_name
        }
        return with_fields(record, self.schema, values) if values else record

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the records of all files, in order."""
        (listing,) = listings.values()
        unused: set[str] = set()
        self.list_files(listing, functools.partial(self._list, listing, unused))
        return {
            "files": f"{len(self.inputs.paths):,}, with {len(listing):,} records",
            "image": f"the feature {self._image}",
            "label": f"the feature {self._label}" + (f" {self._offset:+}" if self._offset else ""),
            **{kept.name: f"{kept.source}: {self.schema[kept.name]}" for kept in self._keep},
            "unused": ", ".join(sorted(unused)) or "no feature",
        }

    def _list(self, listing: Listing, unused: set[str], number: int, view: OpenedFile) -> None:
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
            kept_ones = {kept.source for kept in self._keep}
            unused |= by_name.keys() - {self._image, self._label, self._name, *kept_ones}
            spot = place(number, record.offset)
            listing.add(Row(path, listing.code(value), image.length, record.stamp, spot))

    def _value(self, view: OpenedFile, by_name: Mapping[str, Feature]) -> Value | None:
        """Return the label of a record; None if labels are not read."""
        if self._label == "none":
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

    def _infer(self, image: str | None, label: str | None) -> tuple[str, str]:
        """Return the names of the features for image and label, from the first record.

        This also gives the fields to keep their kinds.
        """
        for path in self.inputs.paths:
            try:
                with reading(path) as view:
                    for record in records(view):
                        end = record.start + record.length
                        return self._infer_from(
                            view, features(view.read, record.start, end), image, label
                        )
            except BadImage as error:
                raise UsageError(f"{path}: {error.problem}", remedy=error.remedy) from error
        raise UsageError(f"there are no records in {self.inputs.paths[0]}")

    def _infer_from(
        self, view: OpenedFile, by_name: Mapping[str, Feature], image: str | None, label: str | None
    ) -> tuple[str, str]:
        self.schema = {
            kept.name: kept.field(_kind_of(view, by_name.get(kept.source))) for kept in self._keep
        }
        label = label or next((name for name in _LABELS if name in by_name), "none")
        return image or _image_feature(view, by_name, self.inputs.paths[0]), label


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


def _kind_of(view: OpenedFile, feature: Feature | None) -> str:
    """Return the kind of field for a feature, from its value in the first record."""
    if feature is None or feature.kind == "empty":
        return "bytes"
    if feature.kind == "bytes":
        if len(feature.ranges) != 1:
            return "bytes"
        head = view.read(feature.ranges[0].offset, min(4096, feature.ranges[0].length))
        return kind_of_bytes(head)
    count = len(feature.numbers) + sum(values.length // 4 for values in feature.floats)
    if count != 1:
        return "json"
    return "int64" if feature.kind == "int64" else "float64"


def _kept(kept: Kept, field: Field, feature: Feature, data: bytes) -> Any:
    """Return the value of a field to keep."""
    if feature.kind == "bytes":
        place = _only(kept.source, feature)
        return value_of(kept, field, data[place.offset : place.offset + place.length])
    numbers = _numbers(feature, _reader(data))
    if field.kind == "array":
        return np.array(numbers, np.float32 if feature.kind == "float" else np.int64)
    if field.kind == "json":
        return numbers
    if len(numbers) != 1:
        raise BadImage(f"its feature {quoted(kept.source)} has {len(numbers)} values, not one")
    return numbers[0]


def _numbers(feature: Feature, read: Read) -> list[Any]:
    floats = (np.frombuffer(read(*place), "<f4").tolist() for place in feature.floats)
    return [*feature.numbers, *itertools.chain.from_iterable(floats)]


def _image_feature(view: OpenedFile, by_name: Mapping[str, Feature], path: str) -> str:
    images = [
        name
        for name, feature in by_name.items()
        if feature.ranges and is_image(view.read(feature.ranges[0].offset, 4096))
    ]
    if len(images) != 1:
        listed = name_list(f"{name} ({feature.kind})" for name, feature in sorted(by_name.items()))
        count = "several features are" if images else "no feature is"
        raise UsageError(
            f"{count} an image in the first record of {path}",
            remedy=f"choose one with {setting('image')}. It has {listed or 'no features'}",
        )
    return images[0]


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
