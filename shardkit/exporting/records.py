"""The records of a dataset in order, each compared with the index, and the names of their files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from shardkit.codecs.image import encode
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.columns import columns_of
from shardkit.dataset.index import apart_of
from shardkit.dataset.index_builder import IndexedRecord, open_records
from shardkit.dataset.index_reader import IndexReader
from shardkit.dataset.manifest import AttachedManifest
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import CorruptShard, UsageError
from shardkit.record import (
    IMAGE,
    IMAGE_FIELDS,
    LABEL,
    NO_LABEL,
    STORED_APART,
    Field,
    Record,
    image_field,
    is_raw,
)
from shardkit.registry import DEFAULT_SOURCE, get_format
from shardkit.system.pool import Progress, Report
from shardkit.system.text import quoted

_READ_ROWS = 64
"""Records held in memory at a time."""

_SUFFIXES = {
    "jpg": ("jpg", "jpeg", "jpe", "jfif"),
    "tiff": ("tif", "tiff"),
    "ppm": ("ppm", "pgm", "pbm", "pnm"),
}
"""Suffixes of files by kind of image; of the others, the kind itself."""

_KNOWN = {suffix for kind in IMAGE_FIELDS for suffix in _SUFFIXES.get(kind, (kind,))}

_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""Numbers that records state as texts."""


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """One dataset, or split, to export.

    Raises:
        UsageError: If it stores raw pixels, without ``raw_as_png``.
    """

    shards: ShardSet
    split: str
    """The split, or "" without splits."""
    raw_as_png: bool = False
    """Whether to encode raw pixels as PNG files."""
    report: Report | None = None

    def __post_init__(self) -> None:
        if self.shards.manifest.raw_shape and not self.raw_as_png:
            raise UsageError(
                f"{self.shards.directory} stores raw pixels, not the files of its source; "
                "--raw-as-png exports them as PNG files of the same pixels"
            )

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

        Raises:
            CorruptShard: If the shard is damaged, or a record differs from the index.
        """
        manifest, path = self.shards.manifest, self.shards.files.path(shard)
        start = sum(each.rows for each in manifest.shards[:shard])
        count = manifest.shards[shard].rows
        if isinstance(manifest, AttachedManifest):
            for row in range(start, start + count):
                yield self.shards.record(row)
                if self.report:
                    self.report(Progress(images=1))
            return
        with open_records(get_format(manifest.format), path) as records:
            if len(records) != count:
                raise CorruptShard(f"{path} has {len(records)} records; the manifest says {count}")
            for first in range(0, count, _READ_ROWS):
                rows = range(first, min(first + _READ_ROWS, count))
                for row, found in zip(rows, records.read(rows), strict=True):
                    if not self._is_indexed(found, start + row):
                        raise CorruptShard(
                            f"record {quoted(found.record.key)} in {path} differs from the index; "
                            f"for details, run `shardkit verify {self.shards.directory}`"
                        )
                    yield self._without_raw(found.record)
                if self.report:
                    self.report(Progress(images=len(rows)))

    def _is_indexed(self, found: IndexedRecord, row: int) -> bool:
        """Return whether a record is the one in the index at a row."""
        packed: dict[str, Any] = {IMAGE: found.packed}
        if found.others:
            packed |= found.others.entries | found.others.values
        return found.path == self.shards.paths[row] and all(
            packed[name] == value
            for name, value in {
                **{name: entries[row].tobytes() for name, entries in self._entries.items()},
                **{name: column.packed(row) for name, column in self._columns.items()},
            }.items()
        )

    @cached_property
    def _entries(self) -> dict[str, Any]:
        index = IndexReader(self.shards.directory, self.shards.manifest, verify=True)
        return {name: index.rows(name) for name in (IMAGE, *apart_of(self.shards.schema))}

    @cached_property
    def _columns(self) -> dict[str, Any]:
        index = IndexReader(self.shards.directory, self.shards.manifest, verify=True)
        return {
            name: index.column(name, field, lacking=name in self.shards.manifest.lacking).whole()
            for name, field in columns_of(self.shards.schema).items()
        }

    def _without_raw(self, record: Record) -> Record:
        if not any(map(is_raw, record.fields)):
            return record
        fields = {}
        for name, content in record.fields.items():
            if is_raw(name):
                pixels = np.frombuffer(content, np.uint8).reshape(self.shards.manifest.raw_shape)
                fields[name.removesuffix("raw") + "png"] = encode(Image.fromarray(pixels), "png", 0)
            else:
                fields[name] = content
        return replace(record, fields=fields)

    @cached_property
    def _keeps_names(self) -> bool:
        """Whether images are the files of a folder, whose names are right by definition."""
        manifest = self.shards.manifest
        kept = Recipe.restored(manifest.recipe).keeps_bytes
        return kept and manifest.source.get("kind") == DEFAULT_SOURCE

    def file_name(self, record: Record, stored: str) -> str:
        """Return the file name of a field's bytes: the source path, with the suffix of its content.

        Args:
            record: The record.
            stored: The stored name of the field.
        """
        path = record.meta["path"]
        kind = stored.rpartition(".")[2]
        if self._keeps_names and stored in IMAGE_FIELDS:
            return str(path)
        before, dot, suffix = path.rpartition(".")
        if dot and "/" not in suffix and before.rpartition("/")[2]:
            if suffix.lower() in _SUFFIXES.get(kind, (kind,)):
                return str(path)
            if suffix.lower() in _KNOWN:
                path = before
        return f"{path}.{kind}"

    def class_name(self, record: Record) -> str | None:
        """Return the class of a record, or None."""
        return None if record.label == NO_LABEL else self.classes[record.label]

    def stored_bytes(self, record: Record, name: str) -> tuple[str, bytes] | None:
        """Return the stored name and the bytes of an image, mask, array or bytes; None without."""
        field = self.shards.schema[name]
        if field.kind in ("image", "mask"):
            stored = image_field(record.fields, name)
        else:
            stored = field.stored_name(name)
        if stored is None or stored not in record.fields:
            return None
        return stored, record.fields[stored]

    def value(self, record: Record, name: str) -> Any:
        """Return the value of a small field as JSON has it, with names of classes, or None."""
        field = self.shards.schema[name]
        if field.kind == "text":
            content = record.fields.get(str(field.stored_name(name)))
            return None if content is None else content.decode()
        value = record.meta.get(name)
        if value is None:
            return None
        if field.kind == "number":
            return _NUMBERS[value] if isinstance(value, str) else value
        names = field.classes if field.kind in ("label", "labels", "boxes") else None
        if field.kind == "boxes" and names:
            value = [[*box[:4], names[box[4]]] for box in value]
        elif names:
            value = [names[label] for label in value] if field.kind == "labels" else names[value]
        return value


def is_apart(field: Field) -> bool:
    """Return whether a field has bytes of its own, for which a file can stand."""
    return field.kind in STORED_APART
