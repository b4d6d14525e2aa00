"""TFRecord files of tf.train.Example as a source."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Entry, Range, Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, UsageError
from shardkit.record import NO_LABEL, Field, Record
from shardkit.sources.images import image_record, is_image
from shardkit.sources.inputs import (
    CHANGED,
    View,
    find_files,
    place,
    place_of,
    reading,
    scanning,
    stem,
)
from shardkit.sources.kept import Kept, kind_of_bytes, parse_keep, value_of, with_fields
from shardkit.sources.labels import Value, read_classes
from shardkit.sources.listing import FileSource, Listing, scan_of
from shardkit.sources.tf_example import Feature, features
from shardkit.sources.tfrecord_file import CHECKSUM, HEADER, length_of, masked, records
from shardkit.system.text import quoted

_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")

_LABELS = ("image/class/label", "label", "class", "label/class")
"""Usual names of the feature with the label."""


class TFRecord(FileSource):
    """TFRecord files, each record a tf.train.Example with an encoded image.

    Files that end in ``.gz`` are unpacked to a temporary file. Every checksum is compared. Images
    are named by file and position, or by a feature.

    Args:
        pattern: A file, a folder, or names with ``{000..999}``, ``*`` or ``?``.
        image: The feature with the image; None takes the only one that is an image in the first
            record.
        label: The feature with the label, one integer or text; None takes a usual name, if the
            first record has one, and ``none`` reads no labels.
        label_offset: Number to add to integer labels: -1 for labels from 1 on.
        name: The feature with the image's name; None numbers the images of each file.
        keep: More fields, as ``NAME=FEATURE[:KIND][?]`` with commas between: ``caption=text:text``.
            A record may lack those with ``?``.
        classes: A text file with a class name in each line.
    """

    kind = "tfrecord"

    def __init__(  # noqa: PLR0913 - the options of its command
        self,
        pattern: str | Path,
        *,
        image: str | None = None,
        label: str | None = None,
        label_offset: int = 0,
        name: str | None = None,
        keep: str | None = None,
        classes: str | None = None,
        _reopened: bool = False,
    ) -> None:
        self._files = find_files(pattern, _SUFFIXES)
        self._names = read_classes(classes)
        self._reopened = _reopened
        self._keep = parse_keep(keep)
        self._schema: dict[str, Field] = {}
        if image is None or label is None or self._keep:
            image, label = self._infer(image, label)
        self._image, self._label, self._name = image, label, name
        self._offset = label_offset
        options = {
            "image": image,
            "label": label,
            "label_offset": label_offset or None,
            "image_name": name,
            "keep": keep,
            "class_names": True if classes or _reopened else None,
        }
        super().__init__(pattern, options)

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> TFRecord:
        """Open the files that a dataset was made from."""
        (options,) = described.values()
        return cls(
            path,
            image=options.get("image"),
            label=options.get("label"),
            label_offset=options.get("label_offset", 0),
            name=options.get("image_name"),
            keep=options.get("keep"),
            _reopened=bool(options.get("class_names")),
        )

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image, after comparing both checksums."""
        number, offset = place_of(entry.place)
        with reading(self._files.paths[number]) as view:
            length = length_of(view, offset)
            data = view.read(offset + HEADER.size, length + CHECKSUM.size)
        if length + CHECKSUM.size != len(data):
            raise BadImage("the file is truncated")
        (stated,) = CHECKSUM.unpack_from(data, length)
        if stated != entry.stamp:
            raise BadImage(CHANGED)
        if masked(data[:length]) != stated:
            raise BadImage("its record does not match its checksum")
        found = features(_reader(data), 0, length)
        image = _only(self._image, found.get(self._image))
        record = image_record(entry, data[image.offset : image.offset + image.length])
        values = {
            kept.name: _kept(kept, self._schema[kept.name], found[kept.source], data)
            for kept in self._keep
            if kept.source in found
        }
        return with_fields(record, self._schema, values) if values else record

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the records of all files, in order.

        Raises:
            UsageError: If there are no records, or labels are out of range.
        """
        listing = self._listing()
        unused: set[str] = set()
        for number, path in enumerate(self._files.paths):
            scan = functools.partial(self._list, number, listing, unused)
            if reason := scanning(path, scan):
                listing.blame_rest(self._files.names[number], reason)
        labels = listing.labels.assign(classes, self._names, reopened=self._reopened)
        understood = {
            "files": f"{len(self._files.paths):,}, with {len(listing):,} records",
            "image": f"the feature {self._image}",
            "label": f"the feature {self._label}: {listing.labels.describe()}"
            + (f", after adding {self._offset}" if self._offset else ""),
            **{kept.name: f"{kept.source}: {self._schema[kept.name]}" for kept in self._keep},
            "unused": ", ".join(sorted(unused)) or "no feature",
        }
        return scan_of(self, {"": listing}, labels, understood, more=self._schema)

    def _list(self, number: int, listing: Listing, unused: set[str], view: View) -> None:
        folder = stem(self._files.names[number], (".gz",))
        folder = stem(folder, _SUFFIXES)
        for row, record in enumerate(records(view)):
            path = f"{folder}/{row:08d}"
            try:
                found = features(view.read, record.start, record.start + record.length)
                image = _only(self._image, found.get(self._image))
                value = self._value(view, found)
                for kept in self._keep:
                    if kept.source not in found and not kept.optional:
                        raise BadImage(
                            f"its record has no feature {quoted(kept.source)}; {kept.source}? "
                            "accepts it"
                        )
                if self._name is not None:
                    path = _text(view, self._name, found.get(self._name)).strip("/") or path
            except BadImage as error:
                listing.blame(path, str(error))
                continue
            kept_ones = {kept.source for kept in self._keep}
            unused |= found.keys() - {self._image, self._label, self._name, *kept_ones}
            code = NO_LABEL if value is None else listing.labels.code(value)
            listing.add(path, code, image.length, record.stamp, place(number, record.offset))

    def _value(self, view: View, found: Mapping[str, Feature]) -> Value | None:
        """Return the label of a record; None if labels are not read."""
        if self._label == "none":
            return None
        feature = found.get(self._label)
        if feature is not None and feature.kind == "int64" and len(feature.numbers) == 1:
            return feature.numbers[0] + self._offset
        if feature is not None and feature.kind == "int64":
            raise BadImage(f"its feature {self._label} has {len(feature.numbers)} values, not one")
        return _text(view, self._label, feature)

    def _infer(self, image: str | None, label: str | None) -> tuple[str, str]:
        """Return the names of the features for image and label, from the first record.

        This also gives the fields to keep their kinds.
        """
        for path in self._files.paths:
            try:
                with reading(path) as view:
                    for record in records(view):
                        end = record.start + record.length
                        return self._infer_from(
                            view, features(view.read, record.start, end), image, label
                        )
            except BadImage as error:
                raise UsageError(f"{path}: {error}") from error
        raise UsageError(f"there are no records in {self._files.paths[0]}")

    def _infer_from(
        self, view: View, found: Mapping[str, Feature], image: str | None, label: str | None
    ) -> tuple[str, str]:
        self._schema = {
            kept.name: kept.field(_kind_of(view, found.get(kept.source))) for kept in self._keep
        }
        label = label or next((name for name in _LABELS if name in found), "none")
        return image or _image_feature(view, found, self._files.paths[0]), label


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


def _text(view: View, name: str, feature: Feature | None) -> str:
    found = _only(name, feature)
    if found.length > 4096:
        raise BadImage(f"its feature {quoted(name)} has {found.length} bytes, too many for a text")
    return view.read(found.offset, found.length).decode("utf-8", "surrogateescape")


def _kind_of(view: View, feature: Feature | None) -> str:
    """Return the kind of field for a feature, from its value in the first record."""
    if feature is None or feature.kind == "empty":
        return "bytes"
    if feature.kind == "bytes":
        if len(feature.ranges) != 1:
            return "bytes"
        head = view.read(feature.ranges[0].offset, min(4096, feature.ranges[0].length))
        return kind_of_bytes(head)
    count = len(feature.numbers) + sum(each.length // 4 for each in feature.floats)
    if count != 1:
        return "json"
    return "int64" if feature.kind == "int64" else "float64"


def _kept(kept: Kept, field: Field, feature: Feature, data: bytes) -> Any:
    """Return the value of a field to keep.

    Raises:
        BadImage: If the feature holds no value of the field.
    """
    if feature.kind == "bytes":
        found = _only(kept.source, feature)
        return value_of(kept, field, data[found.offset : found.offset + found.length])
    numbers: list[Any] = [*feature.numbers]
    for each in feature.floats:
        numbers += np.frombuffer(data, "<f4", each.length // 4, each.offset).tolist()
    if field.kind == "array":
        return np.array(numbers, np.float32 if feature.kind == "float" else np.int64)
    if field.kind == "json":
        return numbers
    if len(numbers) != 1:
        raise BadImage(f"its feature {quoted(kept.source)} has {len(numbers)} values, not one")
    return numbers[0]


def _image_feature(view: View, found: Mapping[str, Feature], path: str) -> str:
    images = [
        name
        for name, feature in found.items()
        if feature.ranges and is_image(view.read(feature.ranges[0].offset, 4096))
    ]
    if len(images) != 1:
        known = ", ".join(f"{name} ({feature.kind})" for name, feature in sorted(found.items()))
        count = "several features are" if images else "no feature is"
        raise UsageError(
            f"{count} an image in the first record of {path}: choose one with --image. It has "
            f"{known or 'no features'}"
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
    options=(
        SourceOption(
            flags="--image",
            metavar="FEATURE",
            help="Feature with the image.  [default: the one that is an image]",
        ),
        SourceOption(
            flags="--label",
            metavar="FEATURE",
            help="Feature with the label, one integer or text; none: no labels.  "
            "[default: image/class/label, label or class]",
        ),
        SourceOption(
            flags="--label-offset",
            default=0,
            type=int,
            metavar="N",
            help="Number to add to integer labels; -1 if they start at 1.",
        ),
        SourceOption(
            flags="--name",
            metavar="FEATURE",
            help="Feature with the image's name.  [default: file and position]",
        ),
        SourceOption(
            flags="--keep",
            metavar="NAME=FEATURE[:KIND][?],...",
            help="More fields to keep, such as caption=text,boxes=image/boxes:json. Records may "
            "lack those with ?.",
        ),
        SourceOption(
            flags="--classes",
            metavar="FILE",
            help="Class names, one per line: of label 0, 1, ..., or in the order of labels.",
        ),
    ),
    of_files=True,
    open=TFRecord,
    find=TFRecord.find,
)
