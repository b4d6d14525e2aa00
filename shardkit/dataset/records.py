"""Whole records of a dataset, each compared with the index when read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.index_builder import IndexedRecord, difference, open_records
from shardkit.dataset.other_fields import read_intact
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import CorruptShard
from shardkit.kinds.packing import with_fields
from shardkit.record import (
    ABSENT,
    IMAGE,
    LABEL,
    LABEL_FIELD,
    META_FIELD,
    NO_LABEL,
    Record,
    dump_json,
    image_field,
)
from shardkit.registry import get_format


def intact_records(
    shards: ShardSet, rows: npt.NDArray[np.int64]
) -> Iterator[tuple[Record, str] | None]:
    """Yield the records of rows with their paths, if they equal the index.

    It yields None for others and for layers, which `record_of` reads.
    """
    files = shards.files
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(files.numbers(rows)) != 0)) + 1
    for run in np.split(rows, cuts):
        shard, first = files.locate(int(run[0]))
        records: Sequence[Record] = ()
        if shards.dataset.is_store and shards.manifest.shards[shard].holds_records:
            read = partial(open_records, get_format(shards.manifest.format))
            segment = shards.segment(range(int(run[0]), int(run[-1]) + 1))
            inside = range(first, first + len(run))
            work = partial(read_intact, rows=inside, segment=segment)
            records = files.reader(shard, read, "records").call(work)
        if not records or any(map(shards.shape_fault, records)):
            yield from repeat(None, len(run))
        else:
            yield from zip(records, segment.paths, strict=True)


def record_of(shards: ShardSet, row: int) -> Record:
    """Return the record of a row with all its fields, after comparing them with the index.

    Raises CorruptRecord if the record or its index is damaged, CorruptDataset if the dataset was
    replaced.
    """
    if not shards.dataset.is_store:
        return _layered(shards, row)
    shard, position = shards.files.locate(row)
    if not shards.manifest.shards[shard].holds_records:
        return _assembled(shards, row)
    storage = get_format(shards.manifest.format)
    shards.files.complete_path(shard)  # a missing shard is not a damaged record
    stored: IndexedRecord
    try:
        reader = shards.files.reader(shard, partial(open_records, storage), "records")
        (stored,) = reader.read([position])
        segment = shards.segment(range(row, row + 1))
        reason = difference(stored, 0, segment)[0] or shards.shape_fault(stored.record)
    except (CorruptShard, IndexError) as error:
        reason = str(error)
    if reason:
        raise shards.corrupt(row, int(shards.entries.read(np.array([row]))["offset"][0]), reason)
    return stored.record


def _layered(shards: ShardSet, row: int) -> Record:
    """Return the record of a row with the fields of all layers."""
    homes = {name: shards.home(name) for name in ("", *shards.schema)}
    records = {home: record_of(home, row) for home in homes.values()}
    described = {home: record.meta for home, record in records.items()}
    changed = shards.manifest.base.fields_by_name
    meta = {name: value for name, value in described[homes[""]].items() if name not in changed}
    fields: dict[str, bytes] = {}
    for name, field in shards.schema.items():
        stored_fields = records[homes[name]].fields
        described_here = described[homes[name]]
        stored = field.stored_name(name) or image_field(stored_fields, name)
        if stored is not None and stored in stored_fields:
            fields[stored] = stored_fields[stored]
        if name in described_here:
            meta[name] = described_here[name]
    return Record(shards.keys[row], {**fields, META_FIELD: dump_json(meta)})


def _assembled(shards: ShardSet, row: int) -> Record:
    """Return the record that a conversion of an attached archive would store."""
    rows = np.array([row])
    fields: dict[str, bytes] = {}
    meta: dict[str, Any] = {"path": shards.paths[row]}
    values: dict[str, Any] = {}
    for name, field in shards.schema.items():
        if name == LABEL:
            if (label := int(shards.labels_of(rows)[0])) != NO_LABEL:
                fields[LABEL_FIELD] = b"%d" % label
            continue
        if not field.type.stored_apart:
            if (value := shards.values(name, rows).value(0)) is not None:
                values[name] = value
            continue
        located = shards.find(rows, name)
        kind = located.fields[0]
        if kind == ABSENT:
            continue
        stored = field.stored_name(name) or (kind if name == IMAGE else f"{name}.{kind}")
        fields[stored] = bytes(located.read(0, memoryview(bytearray(located.lengths[0]))).data)
        if field.type.is_picture:
            size = {"width": located.widths[0], "height": located.heights[0]}
            meta |= size if name == IMAGE else {name: size}
    record = Record(shards.keys[row], {**fields, META_FIELD: dump_json(meta)})
    return with_fields(record, shards.schema, values)
