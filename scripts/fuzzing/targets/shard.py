"""Common code of the three targets that parse a shard: the promises of a reader."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.fuzzing.material import shards
from scripts.fuzzing.target import SECRET, Target, broken
from shardkit.contracts import Format
from shardkit.dataset.index import IndexSegment, save_index
from shardkit.dataset.index_builder import index_shard
from shardkit.errors import CorruptShard
from shardkit.record import Record, checksums


class ShardTarget(Target):
    """A shard, indexed and read by a format's reader."""

    storage: Format
    allowed = (CorruptShard,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / f"shard{self.storage.suffix}"
        self.seeds = shards(self.storage, folder)

    def check(self, data: bytes) -> str:
        self.path.write_bytes(data)
        sums: list[int] = []
        try:
            part = index_shard(self.storage, self.path, lambda _, found: sums.extend(found))
        except CorruptShard:
            self._read_all(data)  # it may be whole all the same, and only lack images
            raise
        seen = self._read_all(data)
        self._check_index(data, part, seen)
        if checksums(seen) != sums:
            broken("reading again gives other records")
        return "read"

    def _check_index(self, data: bytes, part: IndexSegment, seen: list[Record]) -> None:
        if not len(part.rows) == len(part.keys) == len(part.paths) == len(seen):
            broken("the index has columns of different lengths")
        for row, record in zip(part.rows, seen, strict=True):
            image = record.fields.get(record.image_field or "", b"")
            start = int(row["offset"])
            if start >= 0 and data[start : start + int(row["length"])] != image:
                broken("an image is not where the index says", record.key)
        save_index([part], self.folder)

    def _read_all(self, data: bytes) -> list[Record]:
        reader = self.storage.read(self.path)
        try:
            dict(reader.meta)
            rows = range(min(len(reader), 2000))
            ranges = reader.ranges()
            found = reader.read(rows)
            if rows and reader.read([rows[-1], 0, 0]) != [found[-1], found[0], found[0]]:
                broken("the order of rows changes what is read")
        finally:
            reader.close()
        for record, where in zip(found, ranges, strict=False):
            for name, (start, length) in where.items():
                if data[start : start + length] != record.fields.get(name):
                    broken("a field is not where its range says", (record.key, name))
            if any(SECRET in value for value in record.fields.values()):
                broken("what stands outside of the file came out", record.key)
        if os.path.getsize(self.path) != len(data):
            broken("the file was changed")
        return found
