"""Build one shard: prepare its images, write the file and read it back."""

from __future__ import annotations

import hashlib
import itertools
import math
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.contracts import Images, ShardSpec, ShardWriter
from shardkit.conversion.disk import as_failure
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.index import INDEX_DIRECTORY, Index, IndexPart, save_index
from shardkit.dataset.index_builder import index_shard
from shardkit.dataset.manifest import ShardEntry
from shardkit.errors import BadImage, ConversionFailed, Problem
from shardkit.record import NO_LABEL, Record, dump_json, load_json
from shardkit.registry import get_format
from shardkit.system.files import (
    has_sha256,
    published,
    read_small,
    sha256_of,
    sync,
    write_atomically,
)
from shardkit.system.pool import Meter, Team, team
from shardkit.system.safe_paths import status_of


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard to build, with everything that a worker process needs."""

    split: str
    number: int
    folder: Path
    """Folder of the finished shard."""
    part: Path
    """Folder for the shard's part of the index and of the manifest."""
    format: str
    recipe: Recipe
    source: Images
    meta: dict[str, Any]
    software: dict[str, str]
    """Versions of all libraries that can change its bytes."""
    keep: bool
    """Whether to keep the shard if some of its images are bad."""
    workers: int = 1
    """Processes that work on it; more than one if fewer shards than workers are left."""

    @property
    def path(self) -> Path:
        """The shard's file."""
        return self.folder / f"shard-{self.number:06d}{get_format(self.format).suffix}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the shard's bytes."""
        digest = hashlib.sha256(dump_json([self.format, self.number, self.meta, self.software]))
        digest.update(dump_json([self.recipe.describe(), list(self.source.entries)]))
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """What a finished shard adds to the manifest."""

    entry: ShardEntry | None
    """None if bad images prevented the shard."""
    bad: list[Problem]
    fields: dict[str, int]
    labels: dict[int, int]
    """Label to its number of records, without unlabelled records."""
    notes: dict[str, int]


class Built(NamedTuple):
    """The outcome of building a shard."""

    result: ShardResult
    kept: bool
    """Whether an earlier run built it, and it is intact."""


def build_shard(task: ShardTask) -> Built:
    """Build the shard of ``task``, and save its part of the index and its result.

    Raises:
        ConversionFailed: If it cannot be written, or differs from the input when read back.
    """
    try:
        done = load_result(task)
        if done is not None and _is_sound(task, done):
            meter = Meter()
            meter.add(images=len(task.source))
            meter.flush()
            return Built(done, kept=True)
        with published(task.path) as temporary:
            result, part = _write(task, temporary)
        _save_part(task, result, part)
    except _UnwantedError as unwanted:
        return Built(unwanted.result, kept=False)
    except OSError as error:
        raise as_failure(error, task.folder) from error
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise ConversionFailed(f"{error}: memory ran out. {_FEWER}") from error
    return Built(result, kept=False)


_FEWER = "Give the same command again with fewer --workers: the shards that are done are kept."


def load_result(task: ShardTask) -> ShardResult | None:
    """Return the result of a shard that an earlier run built from the same input, or None.

    This checks only that the shard exists and has the right size.
    """
    try:
        value = load_json(read_small(task.part / "result.json"))
        if value["made_of"] != task.digest:
            return None
        result = ShardResult(
            entry=ShardEntry(**value["entry"]),
            bad=[Problem(**problem) for problem in value["bad"]],
            fields=value["fields"],
            labels={int(label): count for label, count in value["labels"].items()},
            notes=value["notes"],
        )
        size = status_of(task.folder, task.path.name).st_size
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return result if result.entry and size == result.entry.bytes else None


def _is_sound(task: ShardTask, result: ShardResult) -> bool:
    """Return whether a shard and its part of the index still have the bytes written."""
    try:
        files = load_json(read_small(task.part / "result.json"))["part"]
        return (
            result.entry is not None
            and has_sha256(task.path, result.entry.sha256)
            and all(
                has_sha256(task.part / name, digest, task.part) for name, digest in files.items()
            )
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def load_part(task: ShardTask, rows: int) -> IndexPart:
    """Return a finished shard's part of the index."""
    index = Index(task.part, rows)
    return IndexPart(index.rows(), list(index.keys()), list(index.paths()))


class _UnwantedError(Exception):
    """Bad images prevent the shard; its file is removed."""

    def __init__(self, result: ShardResult) -> None:
        super().__init__()
        self.result = result


_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 256
"""Limits of a chunk in bytes and images: large enough that passing it on costs little."""


class _Tally:
    """Counters of what a shard stores."""

    def __init__(self) -> None:
        self.bad: list[Problem] = []
        self.fields: Counter[str] = Counter()
        self.labels: Counter[int] = Counter()
        self.notes: Counter[str] = Counter()
        self.checksums: list[int] = []

    def stored(self, prepared: _Prepared) -> None:
        self.checksums.append(prepared.checksum)
        for name in prepared.fields:
            self.fields[name] += 1
        if prepared.label != NO_LABEL:
            self.labels[prepared.label] += 1
        for name in prepared.notes:
            self.notes[name] += 1


def _write(task: ShardTask, path: Path) -> tuple[ShardResult, IndexPart]:
    storage = get_format(task.format)
    spec = ShardSpec(meta={**task.meta, "shard": task.number}, raw_shape=task.recipe.raw_shape)
    tally = _Tally()
    chunks = list(_chunks(task))
    with team(min(task.workers, len(chunks))) as workers:
        writer = storage.write(path, spec)
        try:
            _write_records(task, chunks, workers, writer, tally)
            if tally.bad and not task.keep:
                raise _UnwantedError(_result(tally, None))
            writer.close()
        except BaseException:
            writer.abort()
            raise
        # Sync and hash, which needs no GIL, while the records are compared. `published` syncs
        # again, which then takes no time.
        with ThreadPoolExecutor(1) as aside:
            sha256 = aside.submit(_synced_sha256, path)
            part = _read_back(task.format, path, tally.checksums, workers)
    entry = ShardEntry(
        name=task.path.name,
        rows=len(tally.checksums),
        bytes=path.stat().st_size,
        sha256=sha256.result(),
    )
    return _result(tally, entry), part


def _synced_sha256(path: Path) -> str:
    sync(path)
    return sha256_of(path)


def _write_records(
    task: ShardTask, chunks: list[_Chunk], workers: Team, writer: ShardWriter, tally: _Tally
) -> None:
    meter = Meter()
    for chunk, records in zip(chunks, workers.map_in_order(_prepare_all, chunks), strict=True):
        bad = len(tally.bad)
        for prepared in records:
            if isinstance(prepared, Problem):
                tally.bad.append(prepared)
            elif task.keep or not tally.bad:
                writer.write(Record(prepared.key, prepared.fields))
                tally.stored(prepared)
        size = sum(entry.bytes for entry in chunk.source.entries)
        meter.add(images=len(records), size=size, bad=len(tally.bad) - bad)
    meter.flush()


class _Chunk(NamedTuple):
    """Images that one process prepares at a time."""

    source: Images
    recipe: Recipe


class _Prepared(NamedTuple):
    """A record to store, and what the tally counts of it."""

    key: str
    fields: Mapping[str, bytes]
    checksum: int
    label: int
    notes: list[str]


def _chunks(task: ShardTask) -> Iterator[_Chunk]:
    """Divide the images of a shard into chunks; a single image may exceed the limit."""
    raw_bytes = math.prod(task.recipe.raw_shape or (0,))
    start = size = 0
    for row, entry in enumerate(task.source.entries):
        size += max(entry.bytes, raw_bytes)
        if row > start and (size > _CHUNK_BYTES or row - start == _CHUNK_ROWS):
            yield _Chunk(task.source.take(range(start, row)), task.recipe)
            start, size = row, max(entry.bytes, raw_bytes)
    yield _Chunk(task.source.take(range(start, len(task.source))), task.recipe)


def _prepare_all(chunk: _Chunk) -> list[_Prepared | Problem]:
    """Return each record to store, or the problem with its image, in order."""
    rows = range(len(chunk.source))
    with chunk.recipe.at_work():
        return [_prepare(chunk.source, chunk.recipe, row) for row in rows]


def _prepare(source: Images, recipe: Recipe, row: int) -> _Prepared | Problem:
    try:
        (record,) = source.read([row])
        record, notes = recipe.apply_with_notes(record)
    except BadImage as error:
        return Problem(path=source.entries[row].path, reason=str(error))
    except MemoryError:  # the image is not to blame, and must not be left out for it
        raise ConversionFailed(f"memory ran out at {source.locate(row)}. {_FEWER}") from None
    return _Prepared(record.key, record.fields, _checksum(record), record.label, list(notes))


class _WrittenPart(NamedTuple):
    """Neighboring rows of a finished shard, and the checksums of the records written there."""

    format: str
    path: Path
    rows: slice
    checksums: list[int]


def _read_back(format_: str, path: Path, checksums: list[int], workers: Team) -> IndexPart:
    """Return the shard's part of the index, after comparing each record with the one written."""
    count = min(workers.ready, 1 + len(checksums) // _CHUNK_ROWS)
    cuts = [len(checksums) * number // count for number in range(count)]
    parts = [
        _WrittenPart(format_, path, slice(start, stop), checksums[start:stop])
        for start, stop in itertools.pairwise([*cuts, None])
    ]
    found = workers.map_at_once(_compare, parts)
    part = IndexPart(
        np.concatenate([each.rows for each in found]),
        [key for each in found for key in each.keys],
        [source for each in found for source in each.paths],
    )
    if len(part.keys) != len(checksums):
        raise ConversionFailed(f"{path} lost records: it has {len(part.keys)} of {len(checksums)}")
    return part


def _compare(part: _WrittenPart) -> IndexPart:
    """Return the index of a part of a shard, after comparing its records."""
    expected = iter(part.checksums)

    def compare(record: Record) -> None:
        if _checksum(record) != next(expected, None):
            raise ConversionFailed(
                f"{part.path} reads back other than it was written, at record {record.key!r}: "
                "the memory of this machine is faulty, or a library in it"
            )

    return index_shard(get_format(part.format), part.path, compare, part.rows)


def _checksum(record: Record) -> int:
    """Return the CRC-32 of a record's key, field names and fields."""
    total = zlib.crc32(record.key.encode())
    for name in sorted(record.fields):
        total = zlib.crc32(record.fields[name], zlib.crc32(name.encode(), total))
    return total


def _save_part(task: ShardTask, result: ShardResult, part: IndexPart) -> None:
    """Save the index and the result of a finished shard; the result, last, marks it as done."""
    shutil.rmtree(task.part, ignore_errors=True)
    task.part.mkdir(parents=True)
    digests = {}
    for name in save_index([part], task.part):
        sync(task.part / name)
        digests[name] = sha256_of(task.part / name)
    sync(task.part / INDEX_DIRECTORY)
    value = {"made_of": task.digest, "part": digests, **asdict(result)}
    write_atomically(task.part / "result.json", dump_json(value))


def _result(tally: _Tally, entry: ShardEntry | None) -> ShardResult:
    return ShardResult(
        entry=entry,
        bad=tally.bad,
        fields=dict(sorted(tally.fields.items())),
        labels=dict(sorted(tally.labels.items())),
        notes=dict(sorted(tally.notes.items())),
    )
