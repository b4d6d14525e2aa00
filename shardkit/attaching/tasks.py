"""Index one archive, or one folder of files, for `shardkit.attaching.attach`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from shardkit.attaching.loose_files import Folder, Unlike
from shardkit.contracts import AttachableSource, Entry, Images, Located, PackedEntries, Range
from shardkit.conversion.task import ShardResult, Task, finish_result, new_result
from shardkit.dataset.index import Index, IndexSegment, as_rows, pack_row, save_index
from shardkit.dataset.index_builder import ShardRecords, join_indexed
from shardkit.dataset.manifest import AttachedShard, ShardEntry
from shardkit.errors import BadImage, ConversionFailed, Problem
from shardkit.kinds.field import describe_schema
from shardkit.pipeline import convert_record
from shardkit.record import LABEL, Record, dump_json, image_kind
from shardkit.system.files import sha256_of
from shardkit.system.pool import Meter

_READ_ROWS = 64
_READ_BYTES = 64 << 20
"""Records held in memory together, and their bytes."""

_HASHED_ROWS = 4096
"""Entries of the source hashed at a time."""


@dataclass(frozen=True, kw_only=True)
class IndexTask(Task):
    """One archive or folder to index."""

    entry_type = AttachedShard

    archive: str
    """Its name in the manifest."""
    path: Path
    """The archive, or the folder that the paths of images are relative to."""
    quick: bool = False

    @property
    def name(self) -> str:
        """Its name in the manifest."""
        return self.archive

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the images, and of what the index depends on."""
        digest = sha256(dump_json([self.name, self.meta, self.recipe.describe(), self.quick]))
        entries = self.source.entries
        for start in range(0, len(entries), _HASHED_ROWS):
            digest.update(dump_json([*entries[start : start + _HASHED_ROWS]]))
        return digest.hexdigest()

    @property
    def meta(self) -> dict[str, Any]:
        """The values on which the index depends, named as in the metadata of a shard."""
        classes = self.schema[LABEL].classes if LABEL in self.schema else None
        return {"schema": describe_schema(self.schema), "classes": classes}

    def listed(self, entry: Entry) -> tuple[object, ...]:
        """Return what identifies an image: other archives may change its key."""
        return entry.key, entry.path, entry.label

    def indexed(self, index: Index, rows: range) -> Iterator[tuple[object, ...]]:
        """Yield what `listed` would return for the images of rows."""
        for segment in index.segments(rows):
            yield from zip(segment.keys, segment.paths, segment.rows["label"].tolist(), strict=True)


@dataclass(frozen=True, kw_only=True)
class ArchiveTask(IndexTask):
    """One archive to index."""

    def is_current(self, entry: ShardEntry) -> bool:
        """Return whether the archive has the size and modification time of its entry."""
        return isinstance(entry, AttachedShard) and (entry.bytes, entry.modified) == _stamp(
            self.path
        )

    def is_intact(self, entry: ShardEntry) -> bool:
        """Return whether `is_current` still holds: the content is not read again."""
        return self.is_current(entry)

    def make(self) -> ShardResult:
        """Index the archive."""
        before = _stamp(self.path)
        notes: Counter[str] = Counter()
        bad: list[Problem] = []
        with new_result(self) as folder:
            try:
                with ThreadPoolExecutor(1) as aside:  # hashing needs no GIL
                    digest = None if self.quick else aside.submit(sha256_of, self.path)
                    names = save_index(_index_records(self, notes, bad), folder, self.schema)
            except BadImage as error:
                raise ConversionFailed(
                    f"{self.path} cannot be read: {error.problem}", remedy=error.remedy
                ) from error
            if _stamp(self.path) != before:
                raise ConversionFailed(
                    f"{self.path} changed while it was indexed;", remedy="rerun the command"
                )
            shard = AttachedShard(
                name=self.name,
                bytes=before[0],
                sha256=digest.result() if digest else "",
                rows=len(self.source) - len(bad),
                modified=before[1],
                notes=dict(sorted(notes.items())),
            )
            result = ShardResult(entry=shard, bad=bad, notes=shard.notes)
            finish_result(folder, self, result, names)
        return result


def by_folder(images: Images) -> dict[str, Images]:
    """Return the images of each class folder, or of all if there are none, by its name."""
    groups = groupby(images.entries, lambda entry: "/" in entry.path and entry.path.split("/")[0])
    return {top or "files": images.of(PackedEntries(members)) for top, members in groups}


@dataclass(frozen=True, kw_only=True)
class FolderTask(IndexTask):
    """A class folder of files to index, or a folder without classes."""

    def listed(self, entry: Entry) -> tuple[object, ...]:
        """Return also size and time."""
        return *super().listed(entry), entry.bytes, entry.stamp

    def indexed(self, index: Index, rows: range) -> Iterator[tuple[object, ...]]:
        """Yield also sizes and times."""
        sizes = (
            size for segment in index.segments(rows) for size in segment.rows["length"].tolist()
        )
        times = index.times()[rows.start : rows.stop].tolist()
        for texts, size, time in zip(super().indexed(index, rows), sizes, times, strict=True):
            yield *texts, size, time

    def is_current(self, entry: ShardEntry) -> bool:
        """Return True: `digest` covers names, sizes and times."""
        return True

    def is_intact(self, entry: ShardEntry) -> bool:
        """Return True, as `is_current`."""
        return True

    def make(self) -> ShardResult:
        """Index the files."""
        notes: Counter[str] = Counter()
        bad: list[Problem] = []
        sizes: list[int] = []
        with new_result(self) as folder:
            names = save_index(self._index(notes, bad, sizes), folder, self.schema)
            shard = AttachedShard(
                name=self.name,
                bytes=sum(sizes),
                sha256="",
                rows=len(sizes),
                modified=0,
                notes=dict(sorted(notes.items())),
            )
            result = ShardResult(entry=shard, bad=bad, notes=shard.notes)
            finish_result(folder, self, result, names)
        return result

    def _index(
        self, notes: Counter[str], bad: list[Problem], sizes: list[int]
    ) -> Iterator[IndexSegment]:
        """Yield the index in segments; count notes, and add bad images and the sizes of others."""
        entries = self.source.entries
        meter = Meter()
        for start in range(0, len(entries), _READ_ROWS):
            batch = entries[start : start + _READ_ROWS]
            packed: list[bytes] = []
            good: list[Entry] = []
            with Folder(self.path) as folder:
                for entry in batch:
                    try:
                        packed.append(self._row(entry, folder, notes))
                        good.append(entry)
                    except (BadImage, Unlike) as error:
                        reason = f"it {error}" if isinstance(error, Unlike) else error.stated
                        bad.append(Problem(path=entry.path, reason=reason))
            sizes += [entry.bytes for entry in good]
            size = sum(entry.bytes for entry in batch)
            meter.add(images=len(batch), size=size, bad=len(batch) - len(good))
            keys = [entry.key for entry in good]
            yield IndexSegment(as_rows(packed), keys, [entry.path for entry in good])
        meter.flush()

    def _row(self, entry: Entry, folder: Folder, notes: Counter[str]) -> bytes:
        """Return the row of an image, which readers find where it was read."""
        folder.open(entry.path, entry.bytes, entry.stamp)  # raises for a link, which `read` follows
        read = self.source.source.read(self.source.split, entry)
        record, noted = convert_record(self.recipe, read, self.schema)
        name = record.image_field
        if name is None or record.fields[name] != read.fields.get(name):
            raise BadImage("it cannot be read in place", remedy="convert it")
        notes.update(dict.fromkeys(noted, 1))
        meta = record.meta
        return pack_row(
            offset=0,
            image=record.fields[name],
            label=record.label,
            size=(int(meta["width"]), int(meta["height"])),
            field=image_kind(name),
        )


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _index_records(
    task: ArchiveTask, notes: Counter[str], bad: list[Problem]
) -> Iterator[IndexSegment]:
    """Yield the index of an archive in segments; count its notes and add its bad images."""
    source = cast(AttachableSource, task.source.source)
    entries = task.source.entries
    meter = Meter()
    pairs = zip(entries, source.located(task.source.split, entries), strict=True)
    for batch in _batches(pairs):
        records = _Records(task.meta)
        for entry, located in batch:
            try:
                if isinstance(located, BadImage):
                    raise located
                record, noted = convert_record(task.recipe, located.record, task.schema)
            except BadImage as error:
                bad.append(Problem(path=entry.path, reason=error.stated))
                continue
            notes.update(dict.fromkeys(noted, 1))
            records.add(record, located.offsets)
        with ShardRecords(records, task.path) as indexed:
            yield join_indexed([indexed.index(range(len(records)))], task.schema)
        size = sum(entry.bytes for entry, _ in batch)
        meter.add(images=len(batch), size=size, bad=len(batch) - len(records))
    meter.flush()


def _batches(
    pairs: Iterable[tuple[Entry, Located | BadImage]],
) -> Iterator[list[tuple[Entry, Located | BadImage]]]:
    """Yield images and their records, at most `_READ_ROWS` or about `_READ_BYTES` at a time."""
    batch = []
    size = 0
    for entry, located in pairs:
        batch.append((entry, located))
        size += entry.bytes
        if len(batch) == _READ_ROWS or size >= _READ_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


class _Records:
    """Records in memory as a `shardkit.contracts.ShardReader`: the index is built from readers."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self.meta = meta
        self._records: list[Record] = []
        self._ranges: list[dict[str, Range]] = []

    def add(self, record: Record, offsets: Mapping[str, int]) -> None:
        self._records.append(record)
        fields = record.fields
        ranges = {name: Range(start, len(fields[name])) for name, start in offsets.items()}
        self._ranges.append(ranges)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, rows: Sequence[int]) -> list[Record]:
        return [self._records[row] for row in rows]

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        return self._ranges

    def close(self) -> None:
        pass
