"""The records of a dataset in order, each compared with the index, and the names of their files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import decode, encode
from shardkit.codecs.image_type import ImageType, TypedPixels
from shardkit.dataset.index import Index, IndexSegment
from shardkit.dataset.index_builder import IndexedRecord, open_records
from shardkit.dataset.records import record_of
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage, CorruptShard, UsageError, setting
from shardkit.exporting.names import file_name
from shardkit.kinds.field import Field
from shardkit.record import (
    IMAGE,
    IMAGE_FIELDS,
    LABEL,
    NO_LABEL,
    PLANES,
    Record,
    image_name,
    is_planes,
    is_raw,
)
from shardkit.registry import DEFAULT_SOURCE, get_format
from shardkit.system.pool import Progress, Report
from shardkit.system.text import as_command, quoted

_READ_ROWS = 64
"""Records held in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """One dataset, or split, to export.

    UsageError if it stores raw pixels or planes, without ``raw_as_png``.
    """

    shards: ShardSet
    raw_as_png: bool = False
    """Whether to encode raw pixels and planes as PNG files, or as .npy files where PNG does not
    hold them."""
    report: Report | None = None

    def __post_init__(self) -> None:
        if self._stored_as and not self.raw_as_png:
            raise UsageError(
                f"{self.shards.directory} stores {self._stored_as}, not the files of its source;",
                remedy=f"{setting('raw_as_png', True)} exports them as PNG files of the same "
                "pixels",
            )

    @property
    def _stored_as(self) -> str:
        """Name of the images that it stores instead of files; "" if it stores files."""
        manifest = self.shards.manifest
        if manifest.raw_shape:
            return "raw pixels"
        return "planes" if any(map(is_planes, manifest.fields)) else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; none without labels."""
        return self.shards.manifest.classes or ()

    @cached_property
    def others(self) -> dict[str, Field]:
        """The fields but image and label."""
        return {
            name: field for name, field in self.shards.schema.items() if name not in (IMAGE, LABEL)
        }

    def records(self) -> Iterator[Record]:
        """Yield all records in order; see `of_shard`."""
        for shard in range(len(self.shards.manifest.shards)):
            yield from self.of_shard(shard)

    def of_shard(self, shard: int) -> Iterator[Record]:
        """Yield the records of a shard, after comparing each with the index.

        CorruptShard if the shard is damaged, or a record differs from the index.
        """
        manifest = self.shards.manifest
        path = self.shards.files.path(shard)
        count = manifest.shards[shard].rows
        start = int(self.shards.files.ends[shard]) - count
        if not (self.shards.dataset.is_store and manifest.shards[shard].holds_records):
            for row in range(start, start + count):
                yield self._as_files(record_of(self.shards, row))
                if self.report:
                    self.report(Progress(images=1))
            return
        with open_records(get_format(manifest.format), path) as records:
            if len(records) != count:
                raise CorruptShard(
                    f"{path} has {len(records)} records, but the manifest lists {count}"
                )
            for first in range(0, count, _READ_ROWS):
                rows = range(first, min(first + _READ_ROWS, count))
                segment = self._index.segment(slice(start + rows.start, start + rows.stop))
                for row, indexed in enumerate(records.read(rows)):
                    fault = self.shards.shape_fault(indexed.record)
                    if fault or not _is_indexed(indexed, segment, row):
                        raise CorruptShard(
                            f"record {quoted(indexed.record.key)} in {path}: "
                            f"{fault or 'it differs from the index'};",
                            remedy="for details, run "
                            f"{as_command('verify', self.shards.directory)}",
                        )
                    yield self._as_files(indexed.record)
                if self.report:
                    self.report(Progress(images=len(rows)))

    @cached_property
    def _index(self) -> Index:
        return self.shards.index.complete()

    def _as_files(self, record: Record) -> Record:
        if not self._stored_as:
            return record
        fields = {}
        for name, content in record.fields.items():
            image = name.rpartition(".")[0] or IMAGE
            if is_raw(name):
                pixels = self._raw(image, content)
            elif is_planes(name):
                pixels = self._finished(record.key, content)
            else:
                fields[name] = content
                continue
            kind = ImageType.of(pixels).lossless
            fields[image_name(image, kind)] = encode(pixels, kind)
        return replace(record, fields=fields)

    def _raw(self, image: str, content: bytes) -> TypedPixels:
        """Return the raw pixels of an image."""
        kind = self.shards.schema[image].image_type
        height, width, _ = self.shards.manifest.raw_shape or (0, 0, 0)
        return np.frombuffer(content, kind.values).reshape(height, width, kind.channels)

    def _finished(self, key: str, content: bytes) -> npt.NDArray[np.uint8]:
        try:
            return decode(content, PLANES)
        except BadImage as error:
            raise CorruptShard(
                f"record {quoted(key)} in {self.shards.directory}: {error.problem}",
                remedy=error.remedy,
            ) from error

    @cached_property
    def _keeps_names(self) -> bool:
        """Whether images are the files of a folder, whose names are right by definition."""
        manifest = self.shards.manifest
        kept = manifest.made_with.keeps_bytes
        return kept and manifest.source.get("kind") == DEFAULT_SOURCE

    def file_name(self, record: Record, stored: str) -> str:
        """Return the name of the file with a field's bytes; ``stored`` is the field's."""
        return file_name(record, stored, is_kept=self._keeps_names and stored in IMAGE_FIELDS)

    def class_name(self, record: Record) -> str | None:
        """Return the class of a record, or None."""
        return None if record.label == NO_LABEL else self.classes[record.label]

    def stored_bytes(self, record: Record, name: str) -> tuple[str, bytes] | None:
        """Return the stored name and the bytes of an image, mask, array or bytes; None without."""
        stored = self.shards.schema[name].type.stored_in(record.fields, name)
        return None if stored is None else (stored, record.fields[stored])

    def value(self, record: Record, name: str) -> Any:
        """Return the value of a small field as JSON has it, with names of classes, or None."""
        field = self.shards.schema[name]
        value = field.type.in_record(record, record.meta, name)
        return None if value is None else field.type.as_json(field, value)


def _is_indexed(indexed: IndexedRecord, segment: IndexSegment, row: int) -> bool:
    """Return whether a record is the one at a row of a part of the index."""
    packed: dict[str, Any] = {IMAGE: indexed.packed}
    if indexed.others:
        packed |= indexed.others.entries | indexed.others.values
    entries = {IMAGE: segment.rows, **segment.apart}
    return (
        indexed.path == segment.paths[row]
        and all(packed[name] == rows[row].tobytes() for name, rows in entries.items())
        and all(packed[name] == column.packed(row) for name, column in segment.columns.items())
    )
