"""One shard, from its images to a finished, read-back file: what a worker of a conversion does."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Format, ShardSpec, ShardWriter
from shardkit.conversion.space import as_failure
from shardkit.errors import BadImage, ConversionFailed, Problem
from shardkit.files import has_sha256, published, sha256_of, sync, write_atomically
from shardkit.index import INDEX_DIRECTORY, Index, IndexPart, save_index
from shardkit.indexing import index_shard
from shardkit.manifest import ShardEntry
from shardkit.pool import Meter
from shardkit.recipe import NOTES, Recipe
from shardkit.record import NO_LABEL, Record, dump_json, load_json
from shardkit.registry import get_format
from shardkit.sources.imagefolder import ImageFolder


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard to be made; all that a worker process needs to know."""

    split: str
    number: int
    folder: Path
    """Where the shard is put."""
    part: Path
    """The folder for the shard's part of the index and of the manifest."""
    format: str
    recipe: Recipe
    source: ImageFolder
    meta: dict[str, Any]
    software: dict[str, str]
    """Versions of all that can change a byte of it."""
    keep: bool
    """Whether the shard is wanted although some of its images are bad."""
    threads: int = 1
    """Images prepared at the same time: more than one if there are fewer shards than processors."""

    @property
    def path(self) -> Path:
        """The shard's file."""
        return self.folder / f"shard-{self.number:06d}{get_format(self.format).suffix}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that decides the shard's bytes."""
        digest = hashlib.sha256(dump_json([self.format, self.number, self.meta, self.software]))
        digest.update(dump_json([self.recipe.describe(), list(self.source.entries)]))
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """What a finished shard adds to the manifest."""

    entry: ShardEntry | None
    """None if nothing was written, because images are bad and the shard is not wanted then."""
    bad: list[Problem]
    fields: dict[str, int]
    labels: dict[int, int]
    """Label to the number of its records; without the unlabelled ones."""
    notes: dict[str, int]


class Built(NamedTuple):
    """A shard that is there."""

    result: ShardResult
    kept: bool
    """Whether an earlier run had made it, and it is still as it was."""


def build_shard(task: ShardTask) -> Built:
    """Make the shard of ``task``, and save its part of the index and its result beside it.

    Raises:
        ConversionFailed: If it cannot be written, or reads back other than it was written.
    """
    try:
        done = load_result(task)
        if done is not None and _is_sound(task, done):
            meter = Meter()
            meter.add(images=len(task.source))
            meter.flush()
            return Built(done, kept=True)
        with task.recipe.at_work(), published(task.path) as temporary:
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
    """Return the result of a shard that an earlier run made of the same, or None.

    The shard is there, and has the right size; nothing more is looked at.
    """
    try:
        value = load_json((task.part / "result.json").read_bytes())
        if value["made_of"] != task.digest:
            return None
        result = ShardResult(
            entry=ShardEntry(**value["entry"]),
            bad=[Problem(**problem) for problem in value["bad"]],
            fields=value["fields"],
            labels={int(label): count for label, count in value["labels"].items()},
            notes=value["notes"],
        )
        size = task.path.stat().st_size
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return result if result.entry and size == result.entry.bytes else None


def _is_sound(task: ShardTask, result: ShardResult) -> bool:
    """Tell whether a shard and its part of the index still have the bytes that were written."""
    try:
        files = load_json((task.part / "result.json").read_bytes())["part"]
        return (
            result.entry is not None
            and has_sha256(task.path, result.entry.sha256)
            and all(has_sha256(task.part / name, digest) for name, digest in files.items())
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def load_part(task: ShardTask, rows: int) -> IndexPart:
    """Return the part of the index of a finished shard."""
    index = Index(task.part, rows)
    return IndexPart(index.rows(), list(index.keys()), list(index.paths()))


class _UnwantedError(Exception):
    """The shard has bad images and is not wanted: its file is removed."""

    def __init__(self, result: ShardResult) -> None:
        super().__init__()
        self.result = result


class _Tally:
    """Counts what goes into a shard."""

    def __init__(self) -> None:
        self.bad: list[Problem] = []
        self.fields: Counter[str] = Counter()
        self.labels: Counter[int] = Counter()
        self.notes: Counter[str] = Counter()
        self.checksums: list[int] = []

    def stored(self, record: Record) -> None:
        self.checksums.append(_checksum(record))
        self.fields.update(record.fields.keys())
        if (label := record.label) != NO_LABEL:
            self.labels[label] += 1
        self.notes.update(record.meta.keys() & NOTES)


def _write(task: ShardTask, path: Path) -> tuple[ShardResult, IndexPart]:
    storage = get_format(task.format)
    spec = ShardSpec(meta={**task.meta, "shard": task.number}, raw_shape=task.recipe.raw_shape)
    path.unlink(missing_ok=True)
    tally = _Tally()
    writer = storage.write(path, spec)
    try:
        _write_records(task, writer, tally)
        if tally.bad and not task.keep:
            raise _UnwantedError(_result(tally, None))
        writer.close()
    except BaseException:
        writer.abort()
        raise
    # The disk, and the hash, which needs no GIL, are waited for while the records are compared.
    # `published` syncs again, which then takes no time; here it only begins sooner.
    with ThreadPoolExecutor(1) as aside:
        sha256 = aside.submit(_synced_sha256, path)
        part = _read_back(storage, path, tally.checksums)
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


def _write_records(task: ShardTask, writer: ShardWriter, tally: _Tally) -> None:
    meter = Meter()
    for entry, record in zip(task.source.entries, _prepared(task), strict=True):
        if isinstance(record, Problem):
            tally.bad.append(record)
        elif task.keep or not tally.bad:
            writer.write(record)
            tally.stored(record)
        meter.add(images=1, size=entry.bytes, bad=isinstance(record, Problem))
    meter.flush()


def _prepared(task: ShardTask) -> Iterator[Record | Problem]:
    """Give each record as it is to be stored, or what is wrong with its image, in order."""
    rows = range(len(task.source))
    if task.threads == 1:
        yield from (_prepare(task, row) for row in rows)
        return
    # Decoding, resizing and encoding release the GIL. Only a few images are ever waiting.
    with ThreadPoolExecutor(task.threads) as pool:
        waiting: deque[Future[Record | Problem]] = deque()
        for row in rows:
            waiting.append(pool.submit(_prepare, task, row))
            if len(waiting) > 2 * task.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _prepare(task: ShardTask, row: int) -> Record | Problem:
    try:
        (record,) = task.source.read([row])
        return task.recipe.apply(record)
    except BadImage as error:
        return Problem(path=task.source.entries[row].path, reason=str(error))
    except MemoryError:  # the image is not to blame, and must not be left out for it
        path = task.source.root / task.source.entries[row].path
        raise ConversionFailed(f"memory ran out at {path}. {_FEWER}") from None


def _read_back(storage: Format, path: Path, checksums: list[int]) -> IndexPart:
    """Return the shard's part of the index, having compared each record with what was written."""
    expected = iter(checksums)

    def compare(record: Record) -> None:
        if _checksum(record) != next(expected, None):
            raise ConversionFailed(
                f"{path} reads back other than it was written, at record {record.key!r}: "
                "the memory of this machine is faulty, or a library in it"
            )

    part = index_shard(storage, path, compare)
    if len(part.keys) != len(checksums):
        raise ConversionFailed(
            f"{path} lost records: {len(part.keys)} of {len(checksums)} are there"
        )
    return part


def _checksum(record: Record) -> int:
    """Return a CRC-32 of all that a record is."""
    total = zlib.crc32(record.key.encode())
    for name in sorted(record.fields):
        total = zlib.crc32(record.fields[name], zlib.crc32(name.encode(), total))
    return total


def _save_part(task: ShardTask, result: ShardResult, part: IndexPart) -> None:
    """Save what is known of a finished shard; its result, written last, says that it is."""
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
