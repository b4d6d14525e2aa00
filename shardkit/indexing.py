"""From a finished shard to its part of the index, by reading every record of it.

The same function serves a conversion (which thereby reads back what it wrote), `shardkit index` and
`shardkit verify`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.contracts import Format, Range, ShardReader
from shardkit.errors import CorruptShard
from shardkit.formats.ranges import reads_its_ranges
from shardkit.index import ROW, IndexPart, Rows, make_row
from shardkit.record import Record

_READ_ROWS = 64
"""Records read at a time: their bytes are in memory together."""


def index_shard(
    storage: Format, path: Path, see: Callable[[Record], None] | None = None
) -> IndexPart:
    """Return the index of the shard at ``path``, from its content alone.

    Args:
        storage: The shard's format.
        path: The shard.
        see: Called with each record, in order.

    Raises:
        CorruptShard: If the shard is not whole, or a record is not as `ShardRecords.read` wants it.
    """
    part = IndexPart(np.zeros(0, ROW), [], [])
    rows: list[Rows] = [part.rows]
    with open_records(storage, path) as records:
        for start in range(0, len(records), _READ_ROWS):
            for record, row, source in records.read(range(start, len(records))[:_READ_ROWS]):
                if see:
                    see(record)
                rows.append(row)
                part.keys.append(record.key)
                part.paths.append(source)
    return part._replace(rows=np.concatenate(rows))


class IndexedRecord(NamedTuple):
    """A record, with what the index has to say of it."""

    record: Record
    row: Rows
    """Its row of the index, shape (1,)."""
    path: str
    """Its source path."""


class ShardRecords:
    """The records of a shard, read through its format and held against its ranges."""

    def __init__(self, reader: ShardReader, path: Path, descriptor: int) -> None:
        self._reader = reader
        self._ranges = reader.ranges()
        self._path = path
        self._descriptor = descriptor
        # A reader that reads by its ranges is held against them by reading.
        self._compares = not reads_its_ranges(reader)

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the shard says of itself."""
        return self._reader.meta

    def read(self, rows: Sequence[int]) -> list[IndexedRecord]:
        """Return the records of ``rows``.

        Raises:
            CorruptShard: If a record has no image, its label or metadata cannot be read, or its
                range does not hold what the format's reader gives.
        """
        try:
            records = self._reader.read(rows)
            return [self._index(record, row) for row, record in zip(rows, records, strict=True)]
        except (ValueError, KeyError, TypeError, OverflowError, OSError) as error:
            raise CorruptShard(
                f"{self._path} is damaged: {error!r} in rows {list(rows)}"
            ) from error

    def _at(self, range_: Range) -> bytes:
        return os.pread(self._descriptor, range_.length, range_.offset)

    def _index(self, record: Record, row: int) -> IndexedRecord:
        name = record.image_field
        if name is None:
            raise CorruptShard(f"{self._path} is damaged: record {record.key!r} has no image")
        image, meta = record.fields[name], record.meta
        range_ = self._ranges[row].get(name)
        if self._compares and range_ and self._at(range_) != image:
            raise CorruptShard(
                f"{self._path} is damaged: record {record.key!r} is not at byte {range_.offset}"
            )
        made = make_row(
            offset=range_.offset if range_ else -1,
            image=image,
            label=record.label,
            size=(int(meta["width"]), int(meta["height"])),
            field=name,
        )
        return IndexedRecord(record, made, _path(meta))


def _path(meta: dict[str, Any]) -> str:
    """Return the source path that a record's metadata give.

    Raises:
        ValueError: If it is none that a file can have.
    """
    path = meta["path"]
    if not isinstance(path, str):
        raise ValueError(f"the path {path!r:.40} is not text")
    path.encode("utf-8", "surrogateescape")  # of a lone surrogate no bytes can be made
    return path


@contextlib.contextmanager
def open_records(storage: Format, path: Path) -> Iterator[ShardRecords]:
    """Open the shard at ``path`` to read its records.

    Raises:
        CorruptShard: If it is not a whole shard of its format.
    """
    reader = storage.read(path)
    try:
        with path.open("rb", buffering=0) as file:
            yield ShardRecords(reader, path, file.fileno())
    finally:
        reader.close()
