"""Build one shard: prepare its images, write the file and read it back."""

from __future__ import annotations

import bisect
import errno
import hashlib
import itertools
import math
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs.measures import MEASURES
from shardkit.contracts import Images, ShardSpec, ShardWriter
from shardkit.conversion.bulk import Prepared, read_ordinary
from shardkit.conversion.disk import as_failure
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.facts import FACT, Facts, measure_images
from shardkit.dataset.index import INDEX_DIRECTORY, Index, IndexPart, join_parts, save_index
from shardkit.dataset.index_builder import ShardPart, index_shard
from shardkit.dataset.located import EncodedImage
from shardkit.dataset.manifest import FACTS_NAME, ShardEntry
from shardkit.errors import BadImage, ConversionFailed, Problem
from shardkit.record import (
    IMAGE,
    LABEL,
    NO_LABEL,
    Record,
    Schema,
    checksums,
    describe_schema,
    dump_json,
    load_json,
)
from shardkit.registry import get_format
from shardkit.system.files import (
    has_sha256,
    published,
    read_small,
    sha256_of,
    sync,
    write_atomically,
)
from shardkit.system.npy import StoredValues, save_npy
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
    schema: Schema
    """The fields of all records."""
    source: Images
    meta: dict[str, Any]
    software: dict[str, str]
    """Versions of all libraries that can change its bytes."""
    keep: bool
    """Whether to keep the shard if some of its images are bad."""
    workers: int = 1
    """Processes that work on it; more than one if fewer shards than workers are left."""
    facts: bool = False
    """Whether to measure the images too, for `load_facts_part`."""

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
    """Number of records of each label; unlabeled records are not counted."""
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
            result, part, facts = _write(task, temporary)
        _save_part(task, result, part, facts)
    except _UnwantedError as unwanted:
        return Built(unwanted.result, kept=False)
    except OSError as error:
        raise as_failure(error, task.folder) from error
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise ConversionFailed(f"{error}: memory ran out. {_FEWER}") from error
    return Built(result, kept=False)


_FEWER = "Rerun the same command with fewer --workers: finished shards are kept."


def load_result(task: ShardTask) -> ShardResult | None:
    """Return the result of a shard that an earlier run built from the same input, or None.

    This checks only that the shard exists and has the right size.
    """
    result = saved_result(task)
    try:
        size = status_of(task.folder, task.path.name).st_size
    except OSError:
        return None
    return result if result and result.entry and size == result.entry.bytes else None


def saved_result(task: ShardTask) -> ShardResult | None:
    """Return the saved result of a shard built from the same input, or None; ignore the shard."""
    try:
        value = load_json(read_small(task.part / "result.json"))
        if value["made_of"] != task.digest:
            return None
        return ShardResult(
            entry=ShardEntry(**value["entry"]),
            bad=[Problem(**problem) for problem in value["bad"]],
            fields=value["fields"],
            labels={int(label): count for label, count in value["labels"].items()},
            notes=value["notes"],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


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
    return Index(task.part, rows).part(task.schema)


def load_facts_part(task: ShardTask, rows: int) -> Facts:
    """Return the facts of a finished shard; all zero if it was built without."""
    try:
        return StoredValues(task.part / FACTS_NAME, FACT, rows)[:]
    except (OSError, ValueError):
        return np.zeros(rows, FACT)


class _UnwantedError(Exception):
    """Bad images prevent the shard; its file is removed."""

    def __init__(self, result: ShardResult) -> None:
        super().__init__()
        self.result = result


_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 256
"""Limits of a chunk in bytes and images: large enough that passing it on costs little."""


class _Tally:
    """Counters of what a shard, or a chunk of it, stores."""

    def __init__(self) -> None:
        self.bad: list[Problem] = []
        self.fields: Counter[str] = Counter()
        self.labels: Counter[int] = Counter()
        self.notes: Counter[str] = Counter()
        self.checksums: list[int] = []
        self.facts: list[Facts] = []
        """Of records, chunk by chunk; empty unless they are wanted."""

    def count(self, record: Record, notes: Iterable[str]) -> None:
        for name in record.fields:
            self.fields[name] += 1
        for name in notes:
            self.notes[name] += 1
        if (label := record.label) != NO_LABEL:
            self.labels[label] += 1

    def add(self, other: _Tally) -> None:
        self.bad += other.bad
        self.fields.update(other.fields)
        self.labels.update(other.labels)
        self.notes.update(other.notes)
        self.checksums += other.checksums
        self.facts += other.facts


def _write(task: ShardTask, path: Path) -> tuple[ShardResult, IndexPart, list[Facts]]:
    storage = get_format(task.format)
    spec = ShardSpec(meta={**task.meta, "shard": task.number}, raw_shape=task.recipe.raw_shape)
    tally = _Tally()
    chunks = list(_chunks(task))
    with team(min(task.workers, len(chunks))) as workers:
        writer = storage.write(path, spec)
        try:
            starts = _write_records(task, chunks, workers, writer, tally)
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
            part = _read_back(task, path, tally.checksums, starts, workers)
    entry = ShardEntry(
        name=task.path.name,
        rows=len(tally.checksums),
        bytes=path.stat().st_size,
        sha256=sha256.result(),
    )
    return _result(tally, entry), part, tally.facts


def _synced_sha256(path: Path) -> str:
    sync(path)
    return sha256_of(path)


def _write_records(
    task: ShardTask, chunks: list[_Chunk], workers: Team, writer: ShardWriter, tally: _Tally
) -> list[_Start]:
    """Write all chunks; return where in the file they start, if they are pieces of it."""
    pieces = get_format(task.format).pieces
    starts: list[_Start] = []
    meter = Meter()
    for chunk, prepared in zip(chunks, workers.map_in_order(_prepare, chunks), strict=True):
        if task.keep or not (tally.bad or prepared.tally.bad):
            for record in prepared.records:
                writer.write(record)
            if pieces:
                offset = pieces.append(writer, prepared.encoded)
                starts.append(_Start(len(tally.checksums), offset))
        tally.add(prepared.tally)
        size = sum(entry.bytes for entry in chunk.source.entries)
        meter.add(images=len(chunk.source), size=size, bad=len(prepared.tally.bad))
    meter.flush()
    return starts


class _Start(NamedTuple):
    """The first record of a chunk in the shard's file."""

    row: int
    offset: int


class _Chunk(NamedTuple):
    """Images that one process prepares at a time."""

    source: Images
    recipe: Recipe
    schema: Schema
    format: str
    facts: bool

    @property
    def spec(self) -> ShardSpec:
        """What the encoding of records depends on."""
        meta = {"schema": describe_schema(self.schema)}
        return ShardSpec(meta=meta, raw_shape=self.recipe.raw_shape)


class _Prepared(NamedTuple):
    """The records of a chunk, encoded if the format has `Pieces`, and their counters."""

    records: list[Record]
    encoded: list[bytes]
    tally: _Tally


def _chunks(task: ShardTask) -> Iterator[_Chunk]:
    """Divide the images of a shard into chunks; a single image may exceed the limit."""
    raw_bytes = math.prod(task.recipe.raw_shape or (0,))
    source = task.source.of(list(task.source.entries))  # unpacked once
    start = size = 0
    for row, entry in enumerate(source.entries):
        size += max(entry.bytes, raw_bytes)
        if row > start and (size > _CHUNK_BYTES or row - start == _CHUNK_ROWS):
            part = source.take(range(start, row))
            yield _Chunk(part, task.recipe, task.schema, task.format, task.facts)
            start, size = row, max(entry.bytes, raw_bytes)
    rest = source.take(range(start, len(source)))
    yield _Chunk(rest, task.recipe, task.schema, task.format, task.facts)


def _prepare(chunk: _Chunk) -> _Prepared:
    """Read, check and convert the images of a chunk."""
    source, recipe = chunk.source, chunk.recipe
    records: list[Record] = []
    rows: list[int] = []
    measures = np.zeros(len(source), MEASURES) if chunk.facts else None
    tally = _Tally()
    with recipe.at_work():
        plain = chunk.schema.keys() <= {IMAGE, LABEL}
        ordinary = read_ordinary(source, recipe, measures) if plain else [None] * len(source)
        for row in range(len(source)):
            try:
                record, notes = ordinary[row] or _read(chunk, row)
            except BadImage as error:
                tally.bad.append(Problem(path=source.entries[row].path, reason=str(error)))
            except MemoryError:  # the image is not to blame, and must not be left out for it
                raise ConversionFailed(
                    f"memory ran out at {source.locate(row)}. {_FEWER}"
                ) from None
            else:
                records.append(record)
                rows.append(row)
                tally.count(record, notes)
    tally.checksums += checksums(records)
    if measures is not None:
        tally.facts.append(measure_images(lambda number: _image(records[number]), measures[rows]))
    pieces = get_format(chunk.format).pieces
    if pieces is None:
        return _Prepared(records, [], tally)
    return _Prepared([], pieces.encode(records, chunk.spec), tally)


def _read(chunk: _Chunk, row: int) -> Prepared:
    """Read, check and convert one record."""
    (record,) = chunk.source.read([row])
    return chunk.recipe.apply_with_notes(record, chunk.schema)


def _image(record: Record) -> EncodedImage | None:
    """Return the image of a record as readers of the dataset will find it, if it has one."""
    if (field := record.image_field) is None:
        return None
    meta = record.meta
    return EncodedImage(record.fields[field], field, NO_LABEL, meta["width"], meta["height"])


class _WrittenPart(NamedTuple):
    """Neighboring records of a finished shard, and their checksums from before the writing."""

    format: str
    path: Path
    part: ShardPart
    checksums: list[int]


def _read_back(
    task: ShardTask, path: Path, checksums: list[int], starts: list[_Start], workers: Team
) -> IndexPart:
    """Return the shard's part of the index, after comparing each record with the one written."""
    count = min(workers.ready, 1 + len(checksums) // _CHUNK_ROWS)
    parts = [
        _WrittenPart(task.format, path, part, checksums[rows])
        for rows, part in _divide(len(checksums), count, starts)
    ]
    found = workers.map_at_once(_compare, parts)
    index = join_parts(found, task.schema)
    if len(set(index.keys)) != len(checksums):
        raise ConversionFailed(
            f"{path} lost records: it has {len(set(index.keys))} of {len(checksums)}"
        )
    return index


def _divide(rows: int, count: int, starts: list[_Start]) -> Iterator[tuple[slice, ShardPart]]:
    """Divide the rows of a shard into at most ``count`` parts, at ``starts`` if there are any."""
    cuts = [rows * number // count for number in range(count)]
    if not starts:
        for start, stop in itertools.pairwise([*cuts, None]):
            yield slice(start, stop), ShardPart(slice(start, stop))
        return
    nearest = [min(bisect.bisect_left(starts, (cut,)), len(starts) - 1) for cut in cuts[1:]]
    chosen = [_Start(0, 0), *(starts[number] for number in sorted({*nearest} - {0}))]
    for (first, start), (last, stop) in itertools.pairwise([*chosen, (None, None)]):
        yield slice(first, last), ShardPart(start=start or 0, stop=stop)


def _compare(written: _WrittenPart) -> IndexPart:
    """Return the index of a part of a shard, after comparing its records."""
    expected = iter(written.checksums)

    def compare(keys: Sequence[str], found: Sequence[int]) -> None:
        for key, checksum in zip(keys, found, strict=True):
            if checksum != next(expected, None):
                raise ConversionFailed(
                    f"{written.path} reads back other than it was written, at record {key!r}: "
                    "the memory of this machine is faulty, or a library in it"
                )

    return index_shard(get_format(written.format), written.path, compare, written.part)


def _save_part(task: ShardTask, result: ShardResult, part: IndexPart, facts: list[Facts]) -> None:
    """Save index, facts and result of a finished shard; the result, last, marks it as done."""
    task.part.parent.mkdir(parents=True, exist_ok=True)
    new = task.part.with_name(f".{task.part.name}.{secrets.token_hex(8)}")
    new.mkdir()
    digests = {}
    if facts:
        measured = np.concatenate(facts)
        measured["checksum"] = np.where(measured["version"], part.rows["checksum"], 0)
        save_npy(new / FACTS_NAME, measured)
    for name in (*save_index([part], new, task.schema), *([FACTS_NAME] if facts else [])):
        sync(new / name)
        digests[name] = sha256_of(new / name)
    for folder in {(new / name).parent for name in digests} | {new / INDEX_DIRECTORY}:
        sync(folder)
    value = {"made_of": task.digest, "part": digests, **asdict(result)}
    write_atomically(new / "result.json", dump_json(value))
    while True:  # another job may build the same shard, and save the same part
        shutil.rmtree(task.part, ignore_errors=True)
        try:
            new.rename(task.part)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    sync(task.part.parent)


def _result(tally: _Tally, entry: ShardEntry | None) -> ShardResult:
    return ShardResult(
        entry=entry,
        bad=tally.bad,
        fields=dict(sorted(tally.fields.items())),
        labels=dict(sorted(tally.labels.items())),
        notes=dict(sorted(tally.notes.items())),
    )
