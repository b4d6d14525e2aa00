"""Build one shard: prepare its images, write the file and read it back."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardkit.codecs.image_type import RGB, ImageType
from shardkit.codecs.limits import pixels_up_to
from shardkit.contracts import Images, ReadTogether, ShardSpec, ShardWriter
from shardkit.conversion.bulk import Prepared, read_ordinary
from shardkit.conversion.observers import Observed, get_observer
from shardkit.conversion.task import FEWER, ShardResult, Task, save_result
from shardkit.dataset.index import IndexSegment, join_segments
from shardkit.dataset.index_builder import ShardRange, index_shard
from shardkit.dataset.located import EncodedImage
from shardkit.dataset.manifest import ShardEntry
from shardkit.errors import BadImage, ConversionFailed, Problem, UsageError
from shardkit.kinds.field import Schema, describe_schema
from shardkit.pipeline import convert_record, stores_unchanged
from shardkit.recipe import Recipe
from shardkit.record import IMAGE, LABEL, NO_LABEL, Record, checksums, dump_json, image_kind
from shardkit.registry import get_format
from shardkit.system.files import has_sha256, published, sha256_of, sync
from shardkit.system.pool import Meter, Team, team
from shardkit.system.safe_paths import UNFIT, status_of
from shardkit.system.text import quoted
from shardkit.system.text_hashes import TextHashes

if TYPE_CHECKING:
    from shardkit.record_columns import RecordColumns


@dataclass(frozen=True, kw_only=True)
class ShardTask(Task):
    """One shard to build."""

    split: str
    number: int
    format: str
    meta: dict[str, Any]
    software: dict[str, str]
    """Versions of all libraries that can change its bytes."""
    keep: bool
    """Whether to keep the shard if some of its images are bad."""
    observer: str = ""
    """The file of an `shardkit.conversion.task.Observer` of the images; "" for none."""

    @property
    def name(self) -> str:
        """The name of the shard's file."""
        return f"shard-{self.number:06d}{get_format(self.format).suffix}"

    @property
    def path(self) -> Path:
        """The shard's file."""
        return self.folder / self.name

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the shard's bytes."""
        digest = hashlib.sha256(dump_json([self.format, self.number, self.meta, self.software]))
        digest.update(dump_json([self.recipe.describe(), self.source.digest()]))
        return digest.hexdigest()

    def is_current(self, entry: ShardEntry) -> bool:
        """Return whether the file is there, with its size."""
        try:
            return status_of(self.folder, self.name).st_size == entry.bytes
        except UNFIT:
            return False

    def is_intact(self, entry: ShardEntry) -> bool:
        """Return whether the file has its SHA-256."""
        return has_sha256(self.path, entry.sha256)

    def require_same_machine(self) -> None:
        """Refuse to build it with other versions of libraries than planned."""
        here = get_format(self.format).software()
        differ = [
            f"{name} is {here.get(name, 'absent')}, and {planned} was planned"
            for name, planned in self.software.items()
            if here.get(name) != planned
        ]
        if differ:
            raise UsageError(
                f"{socket.gethostname()} would write different bytes: {'; '.join(differ)}",
                remedy="Install the planned versions there.",
            )

    def make(self) -> ShardResult:
        """Build the shard, read it back and compare it with the input."""
        try:
            with published(self.path) as temporary:
                result, segment, observed = _write(self, temporary)
        except _UnwantedError as unwanted:
            return unwanted.result
        save_result(self, result, segment, observed)
        return result


class _UnwantedError(Exception):
    """Bad images prevent the shard; its file is removed."""

    def __init__(self, result: ShardResult) -> None:
        super().__init__()
        self.result = result


_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 256
"""Limits of a chunk in bytes and images: large enough that passing it on costs little, small enough
for the CPU cache. `Source.chunk_bytes` is the limit if several processes share the chunks."""


class _Tally:
    """Counters of what a shard, or a chunk of it, stores."""

    def __init__(self) -> None:
        self.bad: list[Problem] = []
        self.notes: Counter[str] = Counter()
        self.keys: list[str] = []
        self.checksums: list[int] = []
        self.observed: list[Observed] = []
        """The results of an observer, chunk by chunk."""

    def add(self, other: _Tally) -> None:
        self.bad += other.bad
        self.notes.update(other.notes)
        self.keys += other.keys
        self.checksums += other.checksums
        self.observed += other.observed


def _write(task: ShardTask, path: Path) -> tuple[ShardResult, IndexSegment, dict[str, Observed]]:
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
            if keys := repeated_keys(tally.keys):
                raise repeated_key(keys)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        # Sync and hash, which needs no GIL, while the records are compared. `published` syncs
        # again, which then takes no time.
        with ThreadPoolExecutor(1) as aside:
            sha256 = aside.submit(_synced_sha256, path)
            segment = _read_back(task, path, tally.checksums, starts, workers)
    entry = ShardEntry(
        name=task.name,
        rows=len(tally.checksums),
        bytes=path.stat().st_size,
        sha256=sha256.result(),
    )
    observed = {}
    if task.observer:
        observed[task.observer] = np.concatenate(tally.observed)
        get_observer(task.observer).bind(observed[task.observer], segment.rows["checksum"])
    return _result(tally, entry), segment, observed


def repeated_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys of several records, which readers of tar files would take for one.

    It holds only keys whose hashes are equal.
    """
    hashes = TextHashes()
    hashes.add_all(keys)
    alike = hashes.repeated()
    counts = Counter(key for key in keys if hash(key) in alike) if alike else Counter[str]()
    return [key for key, count in counts.items() if count > 1]


def repeated_key(keys: Sequence[str]) -> UsageError:
    """Return the error that records have the same keys."""
    others = f" ({len(keys):,} keys do)" if len(keys) > 1 else ""
    return UsageError(
        f"the key {quoted(keys[0])} occurs more than once{others};",
        remedy="use a different key for each record",
    )


def _synced_sha256(path: Path) -> str:
    sync(path)
    return sha256_of(path)


def _write_records(
    task: ShardTask, chunks: list[_Chunk], workers: Team, writer: ShardWriter, tally: _Tally
) -> list[_Start]:
    """Write all chunks; return where in the file they start, if these are chunks of it."""
    storage = get_format(task.format)
    encoding = storage.chunks
    starts: list[_Start] = []
    meter = Meter()
    if task.workers == 1:  # else each process reads its own chunk ahead: see `_prepare`
        task.source.ahead()
    for chunk, prepared in zip(chunks, workers.map_in_order(_prepare, chunks), strict=True):
        # After a bad image, the rest is only examined, to name all bad images at once.
        if task.keep or not (tally.bad or prepared.tally.bad):
            with _named_failures():
                storage.write_all(writer, prepared.records)
            if encoding:
                offset = encoding.append(writer, prepared.encoded)
                starts.append(_Start(len(tally.checksums), offset))
        tally.add(prepared.tally)
        size = sum(chunk.source.numbers("bytes"))
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
    observer: str
    is_apart: bool
    """Whether its process does not know the next one."""
    spec: ShardSpec
    """The values on which the encoding of records depends."""


class _Prepared(NamedTuple):
    """The records of a chunk, encoded if the format has `Chunks`, and their counters."""

    records: list[Record] | RecordColumns
    encoded: list[bytes]
    tally: _Tally


def _chunks(task: ShardTask) -> Iterator[_Chunk]:
    """Divide the images of a shard into chunks; a single image may exceed the limit."""
    raw_bytes = math.prod(task.recipe.raw_shape or (0,))
    is_apart = task.workers > 1
    most = task.source.source.chunk_bytes if is_apart else _CHUNK_BYTES
    source = task.source.packed()
    shape = task.recipe.raw_shape
    meta = {"schema": describe_schema(task.schema), "raw_shape": shape}
    spec = ShardSpec(meta=meta, raw_shape=shape)
    starts = [0]
    size = 0
    for row, stored in enumerate(source.numbers("bytes")):
        size += max(stored, raw_bytes)  # a small file may have many pixels
        if row > starts[-1] and (size > most or row - starts[-1] == _CHUNK_ROWS):
            starts.append(row)
            size = max(stored, raw_bytes)
    for start, stop in itertools.pairwise([*starts, len(source)]):
        inside = source.of(source.entries[start:stop])
        same = task.recipe, task.schema, task.format, task.observer, is_apart, spec
        yield _Chunk(inside, *same)


def _prepare(chunk: _Chunk) -> _Prepared:
    """Read, check and convert the images of a chunk."""
    source = chunk.source
    recipe = chunk.recipe
    if chunk.is_apart:
        source.ahead()
    records: list[Record] = []
    rows: list[int] = []
    observer = get_observer(chunk.observer) if chunk.observer else None
    measuring = None
    if observer is not None:
        measuring = np.zeros(len(source), observer.measures), observer.waves
    tally = _Tally()
    ordinary: Sequence[Prepared | None] = [None] * len(source)
    together: ReadTogether = [None] * len(source)
    with suppress(MemoryError):  # one by one, they need less
        if chunk.schema.keys() <= {IMAGE, LABEL}:
            ordinary = read_ordinary(source, recipe, measuring)
        together = source.read_together()
    whole = None
    if not isinstance(together, list) and stores_unchanged(recipe, chunk.schema, together):
        whole = together
        rows = [*range(len(source))]
        tally.keys += whole.keys
    for row in range(len(source) if whole is None else 0):
        try:
            record, notes = ordinary[row] or _read(chunk, row, together[row])
        except BadImage as error:
            tally.bad.append(Problem(path=source.entries[row].path, reason=error.stated))
        except MemoryError as error:  # the image is not to blame, and must not be left out
            why = f" ({error})" if str(error) else ""
            raise ConversionFailed(
                f"memory ran out at {source.locate(row)}{why}", remedy=FEWER
            ) from None
        else:
            records.append(record)
            rows.append(row)
            tally.keys.append(record.key)
            if notes:
                tally.notes.update([*notes])  # not their values
    prepared = records if whole is None else whole
    tally.checksums += checksums(prepared)
    if observer is not None and measuring is not None:
        pixels = chunk.schema[IMAGE].image_type if IMAGE in chunk.schema else RGB
        read = partial(_image_at, prepared, pixels)
        tally.observed.append(observer.observe(read, measuring[0][rows]))
    encoding = get_format(chunk.format).chunks
    if encoding is None:
        return _Prepared(prepared, [], tally)
    with _named_failures():
        return _Prepared([], encoding.encode(prepared, chunk.spec), tally)


@contextmanager
def _named_failures() -> Iterator[None]:
    """Name a record that its format cannot store, such as one of a dataset of another program."""
    try:
        yield
    except ValueError as error:
        raise ConversionFailed(
            f"{error}", remedy="choose another format, or leave it out"
        ) from error


def _read(chunk: _Chunk, row: int, record: Record | None) -> Prepared:
    """Read a record, unless it was read together with others, check and convert it."""
    if record is None:
        # Sources compare annotations with the image's size.
        with pixels_up_to(chunk.recipe.max_pixels):
            (record,) = chunk.source.read([row])
    return convert_record(chunk.recipe, record, chunk.schema)


def _image_at(records: Sequence[Record], pixels: ImageType, number: int) -> EncodedImage | None:
    """Return the image of a record as readers of the dataset will find it, if it has one."""
    record = records[number]
    if (field := record.image_field) is None:
        return None
    meta = record.meta
    size = meta["width"], meta["height"]
    return EncodedImage(record.fields[field], image_kind(field), NO_LABEL, *size, pixels)


class _WrittenRange(NamedTuple):
    """Neighboring records of a finished shard, and their checksums from before the writing."""

    format: str
    path: Path
    range_: ShardRange
    checksums: list[int]


def _read_back(
    task: ShardTask, path: Path, checksums: list[int], starts: list[_Start], workers: Team
) -> IndexSegment:
    """Return the shard's segment of the index, after comparing each record with the one written."""
    count = min(workers.ready, 1 + len(checksums) // _CHUNK_ROWS)
    ranges = [
        _WrittenRange(task.format, path, range_, checksums[rows])
        for rows, range_ in _divide(len(checksums), count, starts)
    ]
    index = join_segments(workers.map_at_once(_compare, ranges), task.schema)
    if len(set(index.keys)) != len(checksums):
        raise ConversionFailed(
            f"{path} lost records: it has {len(set(index.keys))} of {len(checksums)}"
        )
    return index


def _divide(rows: int, count: int, starts: list[_Start]) -> Iterator[tuple[slice, ShardRange]]:
    """Divide the rows of a shard into at most ``count`` ranges, at ``starts`` if there are any."""
    cuts = [rows * number // count for number in range(count)]
    if not starts:
        for start, stop in itertools.pairwise([*cuts, None]):
            yield slice(start, stop), ShardRange(slice(start, stop))
        return
    nearest = [min(bisect.bisect_left(starts, (cut,)), len(starts) - 1) for cut in cuts[1:]]
    chosen = [_Start(0, 0), *(starts[number] for number in sorted({*nearest} - {0}))]
    for (first, start), (last, stop) in itertools.pairwise([*chosen, (None, None)]):
        yield slice(first, last), ShardRange(start=start or 0, stop=stop)


def _compare(written: _WrittenRange) -> IndexSegment:
    """Return the index of a range of a shard, after comparing its records."""
    expected = iter(written.checksums)

    def compare(keys: Sequence[str], checksums: Sequence[int]) -> None:
        for key, checksum in zip(keys, checksums, strict=True):
            if checksum != next(expected, None):
                raise ConversionFailed(
                    f"{written.path} differs from what was written, at record {key!r}: the memory "
                    "of this machine, or a library, is faulty"
                )

    return index_shard(get_format(written.format), written.path, compare, written.range_)


def _result(tally: _Tally, entry: ShardEntry | None) -> ShardResult:
    return ShardResult(entry=entry, bad=tally.bad, notes=dict(sorted(tally.notes.items())))
