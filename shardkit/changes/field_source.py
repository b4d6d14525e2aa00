"""The records of a layer: the rows of a dataset, with new fields alone."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit.changes.field_values import FieldValues, as_json
from shardkit.contracts import (
    Entry,
    Images,
    PackedEntries,
    ReadTogether,
    Scan,
    Source,
    StoredEntries,
    as_packed,
)
from shardkit.dataset.decode import decode_stored
from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.records import record_of
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage, CorruptDataset
from shardkit.kinds.field import Field
from shardkit.kinds.packing import pack_together
from shardkit.record import ABSENT, LABEL, META_FIELD, NO_LABEL, Record, dump_json
from shardkit.record_columns import RecordColumns, path_metas

_AT_ONCE = 4096
"""Rows listed at a time."""

_MANY = 1 << 15
"""Rows that are listed in memory."""


class LayerSource(Source):
    """New fields of the rows of a dataset, or of all its splits.

    ``datasets`` are the dataset of each split, by the split of the layer. No two of ``values`` have
    a field of the same name.
    """

    kind = "fields"

    def __init__(
        self, datasets: Mapping[str, OpenedDataset], values: Sequence[FieldValues]
    ) -> None:
        self._datasets = dict(datasets)
        self._values = list(values)
        counts = [dataset.manifest.rows for dataset in self._datasets.values()]
        self._starts = dict(zip(self._datasets, [0, *accumulate(counts)], strict=False))

    def __str__(self) -> str:
        return ", ".join(str(values.describe()["name"]) for values in self._values)

    def paths(self) -> Sequence[Path]:
        """Return nothing: the values may be next to the dataset."""
        return []

    @cached_property
    def schema(self) -> dict[str, Field]:
        """The new fields."""
        return {name: field for values in self._values for name, field in values.schema.items()}

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the rows of the dataset, in order."""
        label = self.schema.get(LABEL)
        return Scan(
            source=self,
            splits={split: Images(self, split, self._entries(split)) for split in self._datasets},
            classes=None if label is None else label.classes,
            fields=self.schema,
            known=False,
            understood={name: str(field) for name, field in self.schema.items()},
            records=True,
            exact_sizes=False,
        )

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the name of the values, and each provider's description."""
        described = [values.describe() for values in self._values]
        return {"name": str(self), "values": described}

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of a row with the new fields.

        BadImage if a value cannot be read, or is not one of its field.
        """
        found = [values.read(entry.place).items() for values in self._values]
        columns = {name: [value] for name, value in chain.from_iterable(found)}
        (record,) = self._records([entry.path], [entry.key], columns)
        return record

    def read_together(self, split: str, entries: Sequence[Entry]) -> ReadTogether:
        """Return the records of rows; none if a value does not fit its field."""
        packed = as_packed(entries)
        rows = packed.numbers("place")
        with contextlib.suppress(BadImage):  # `read` tells which one
            found = [values.read_together(rows) or {} for values in self._values]
            if all(found):
                columns = dict(chain.from_iterable(values.items() for values in found))
                return self._records(packed.paths(), packed.keys(), columns)
        return super().read_together(split, entries)

    def _records(
        self, paths: Sequence[str], keys: list[str], columns: Mapping[str, Sequence[Any]]
    ) -> RecordColumns:
        """Return the records of rows, given a value of each, or None, by field."""
        stored: dict[str, list[bytes | None]] = {}
        small: dict[str, Sequence[Any]] = {}
        for name, values in columns.items():
            field = self.schema[name]
            packed = pack_together(name, field, values)
            if (stored_name := field.stored_name(name)) is None:
                small[name] = packed
            else:
                stored[stored_name] = packed
        return RecordColumns(keys, {**stored, META_FIELD: _metadata(paths, small)})

    def locate(self, split: str, entry: Entry) -> str:
        """Return the row."""
        return f"{self}, for row {entry.place - self._starts[split]}"

    def only(self, entries: Sequence[Entry]) -> Source:
        """Return a source with the values of some rows, for a worker process."""
        rows = [entry.place for entry in entries]
        return LayerSource(self._datasets, [values.only(rows) for values in self._values])

    def _entries(self, split: str) -> Sequence[Entry]:
        index = self._datasets[split].index
        first = self._starts[split]
        count = self._datasets[split].manifest.rows
        keys = index.keys()
        paths = index.paths()
        starts = [*range(0, count, _AT_ONCE), count]

        def load(piece: int) -> PackedEntries:
            start, stop = starts[piece : piece + 2]
            rows = range(first + start, first + stop)
            texts = paths[start:stop], keys[start:stop]
            sizes, stamps = (
                np.sum([np.asarray(column, np.int64) for column in columns], 0)
                for columns in (
                    [values.sizes(rows) for values in self._values],
                    [values.stamps(rows) for values in self._values],
                )
            )
            return PackedEntries.of_columns(*texts, NO_LABEL, sizes, stamps, rows)

        if count <= _MANY:
            return PackedEntries.joined(map(load, range(len(starts) - 1)))
        return StoredEntries(load, starts)


def _metadata(paths: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[bytes | None]:
    """Return the metadata of rows as `dump_json` does, given values, or None, by name."""
    if not columns:
        return path_metas(paths)
    parts = []
    for name, values in sorted({**columns, "path": paths}.items()):
        start = f'"{name}":'
        parts.append(["" if value is None else start + as_json(value, _encode) for value in values])
    rows = "}\n{".join([",".join(filter(None, row)) for row in zip(*parts, strict=True)])
    return [*f"{{{rows}}}".encode().split(b"\n")]  # JSON has no line break


def _encode(value: object) -> str:
    return dump_json(value).decode()


class Samples:
    """The samples of a dataset as a function of `fields.add` receives them.

    Images are PIL images, arrays NumPy arrays; ``label`` is a number, and labels are names.
    """

    def __init__(self, datasets: Sequence[OpenedDataset]) -> None:
        self._sets = [ShardSet(dataset) for dataset in datasets]

    def __call__(self, row: int) -> dict[str, Any]:
        """Return the fields of a row of all splits, counted on, with ``key`` and ``path``.

        BadImage if the record is damaged.
        """
        for shards in self._sets:
            if row < len(shards):
                try:
                    return _sample(shards, row)
                except CorruptDataset as error:
                    raise BadImage(error.problem, remedy=error.remedy) from error
            row -= len(shards)
        raise IndexError(row)


def _sample(shards: ShardSet, row: int) -> dict[str, Any]:
    """Return the fields of a row."""
    record = record_of(shards, row)
    meta = record.meta
    sample: dict[str, Any] = {"key": record.key, "path": meta["path"]}
    for name, field in shards.schema.items():
        if name == LABEL:
            sample[name] = record.label
        elif field.type.is_picture:
            sample[name] = _picture(shards, row, name)
        elif field.type.stored_apart:
            stored = field.type.stored_in(record.fields, name)
            data = None if stored is None else record.fields[stored]
            sample[name] = None if data is None else field.type.load(field, data)
        else:
            sample[name] = field.type.in_record(record, meta, name)
    return sample


def _picture(shards: ShardSet, row: int, name: str) -> Any:
    """Return an image as PIL has it; None where the row lacks it."""
    located = shards.find(np.array([row]), name)
    if located.fields[0] == ABSENT:
        return None
    stored = located.read(0, memoryview(bytearray(located.lengths[0])))
    if not stored.pixels.is_rgb:
        return decode_stored(stored)
    if shards.schema[name].type.follows:
        return Image.open(io.BytesIO(stored.data))
    return Image.fromarray(decode_stored(stored))
