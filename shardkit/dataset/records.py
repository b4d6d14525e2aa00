"""Whole records of a dataset, each compared with the index when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.contracts import PackedEntries, ReadTogether
from shardkit.dataset.index_builder import IndexedRecord, difference, open_records
from shardkit.dataset.other_fields import read_intact
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import CorruptDataset, CorruptShard
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
from shardkit.record_columns import RecordColumns, label_column
from shardkit.registry import get_format


def intact_records(shards: ShardSet, entries: PackedEntries) -> ReadTogether:
    """Return the records of entries; None for each that is not intact, for `record_of` to explain.

    Neighbors are compared with the index at once.
    """
    keys = entries.keys()
    paths = entries.paths()
    labels = entries.numbers("label")
    try:
        runs = [*_runs(shards, np.array(entries.numbers("place"), np.int64))]
    except (CorruptDataset, KeyError, IndexError):
        return [None] * len(keys)
    records = runs[0].records
    if isinstance(records, RecordColumns) and (records.keys, runs[0].paths) == (keys, paths):
        return _relabeled(records, labels)
    return [
        labeled(stored[0], label) if stored and (stored[0].key, stored[1]) == names else None
        for stored, names, label in zip(
            chain.from_iterable(map(_Run.rows, runs)),
            zip(keys, paths, strict=True),
            labels,
            strict=True,
        )
    ]


def _relabeled(records: RecordColumns, labels: Sequence[int]) -> RecordColumns:
    """Return records with the labels that their entries state, where they state one."""
    entry_labels = label_column(labels)
    stored_labels = records.values(LABEL_FIELD)
    if stored_labels == entry_labels or not any(entry_labels):
        return records
    merged = [new or old for new, old in zip(entry_labels, stored_labels, strict=True)]
    return RecordColumns(records.keys, {**dict(records.columns), LABEL_FIELD: merged})


def labeled(record: Record, label: int) -> Record:
    """Return a record with the label that its entry states, if it states one."""
    if label in (NO_LABEL, record.label):
        return record
    return Record(record.key, {**record.fields, LABEL_FIELD: b"%d" % label})


class _Run(NamedTuple):
    """Neighboring rows of a shard."""

    length: int
    records: Sequence[Record]
    """Empty if one differs from the index, and for layers: `record_of` reads them."""
    paths: Sequence[str]

    def rows(self) -> Iterable[tuple[Record, str] | None]:
        """Return record and path of each row."""
        return zip(self.records, self.paths, strict=True) if self.records else [None] * self.length


def _runs(shards: ShardSet, rows: npt.NDArray[np.int64]) -> Iterator[_Run]:
    """Yield the records of rows, if they equal the index."""
    files = shards.files
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(files.numbers(rows)) != 0)) + 1
    for run in np.split(rows, cuts):
        shard, first = files.locate(int(run[0]))
        records: Sequence[Record] = ()
        paths: Sequence[str] = ()
        if shards.dataset.is_store and shards.manifest.shards[shard].holds_records:
            read = partial(open_records, get_format(shards.manifest.format))
            segment = shards.segment(range(int(run[0]), int(run[-1]) + 1))
            inside = range(first, first + len(run))
            work = partial(read_intact, rows=inside, segment=segment)
            records = files.reader(shard, read, "records").call(work)
            paths = segment.paths
        yield _Run(len(run), () if _have_faults(shards, records) else records, paths)


def _have_faults(shards: ShardSet, records: Sequence[Record]) -> bool:
    """Return whether one of some records has a `ShardSet.shape_fault`."""
    if not isinstance(records, RecordColumns):
        return any(map(shards.shape_fault, records))
    for name, values in records.columns:
        faults = [shards.shape_fault(Record("a", {name: data})) for data in (b"", b"0")]
        if any(faults):  # the manifest states its size
            lengths = {len(value): value for value in values if value is not None}
            samples = (Record("a", {name: value}) for value in lengths.values())
            if any(map(shards.shape_fault, samples)):
                return True
    return False


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
