"""Check one shard for `shardkit verify`.

One pass over the shard hashes 2 MiB at a time, and compares the records there with the index while
they are in the CPU cache. Only records that differ, and shards that do not open, are read again to
explain the damage.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.dataset.handles import ShardFile
from shardkit.dataset.index import (
    HEAD,
    ROW,
    Index,
    IndexPart,
    Rows,
    checksum,
)
from shardkit.dataset.index_builder import (
    FilePiece,
    IndexedRecord,
    ShardRecords,
    difference,
    open_records,
)
from shardkit.dataset.manifest import MANIFEST_NAME, ShardEntry
from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.kinds.field import Schema
from shardkit.record import IMAGE
from shardkit.registry import get_format
from shardkit.system.files import FileSha256, as_name, sha256_of
from shardkit.system.pool import Meter
from shardkit.system.safe_paths import UNFIT
from shardkit.system.urls import as_local
from shardkit.verification.decoding import decoding_fault, range_fault
from shardkit.verification.record_comparison import (
    ComparisonResult,
    RecordComparison,
    SourceComparison,
)

_RUN_BYTES = 7 << 18
_RUN_ROWS = 4096
"""Bytes of images, and records, compared with the index at a time; they stay in the CPU cache."""

_TAIL = 4096
"""Bytes after an image that most often contain its metadata."""

MOST_FINDINGS = 10_000
"""Maximum damaged records reported per shard: a small file may state millions of rows, and each
finding takes memory."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece of damage, or one difference from the source."""

    file: str
    """The damaged file, relative to the verified directory."""
    reason: str
    key: str | None = None
    """Key of the damaged record; None if the damage is not in one record."""
    path: str | None = None
    """The record's source path."""
    row: int | None = None
    """The record's row in its dataset."""
    source: bool = False
    """Whether the source differs; the dataset may be unchanged."""
    as_stored: bool = False
    """Whether the record has the bytes that the conversion stored: the image was already bad."""
    unread: bool = False
    """Whether the file could not be read, so that nothing is known about its content."""
    receipt: bool = False
    """Whether it differs from a receipt; it may be undamaged."""

    @classmethod
    def of_error(cls, file: str, error: OSError) -> Finding:
        """Return the finding for a file that could not be read."""
        reason = f"it cannot be read: {error.strerror or error}; run the same command again"
        return cls(file=file, reason=reason, unread=True)


@dataclass(frozen=True, kw_only=True)
class ShardCheck:
    """One shard to check: the task of a worker process."""

    folder: Path
    """Folder of the shard."""
    prefix: str
    """Prefix of file names in findings: the folder of the store, or ""."""
    entry: ShardEntry
    format: str
    start: int
    """The shard's first row in the dataset."""
    index: Index
    """The index of the store."""
    decode: bool
    raw_shape: tuple[int, int, int] | None
    schema: Schema
    """The fields of all records."""
    meta: dict[str, Any]
    """Expected metadata of the shard."""
    against: SourceComparison | None = None
    """The source to compare the records with, in addition to the index."""

    @property
    def path(self) -> Path:
        """The shard's file."""
        return self.folder / as_name(self.entry.name)

    @property
    def file(self) -> str:
        """The name of the shard in findings."""
        return self.prefix + self.entry.name


class CheckedShard(NamedTuple):
    """The result of checking one shard."""

    findings: list[Finding]
    """All damage to its records and structure, not including a wrong SHA-256."""
    records: int
    """Number of records read."""
    sha256: str
    compared: ComparisonResult | None
    """Result of the comparison with the source, if requested."""


class Checks:
    """How the files of a dataset are checked: where they are. Others inherit from this class.

    It is pickled to worker processes.

    Args:
        place: The path or URL of the dataset.
        root: The folder of an attached dataset's archives, if the user named it.
    """

    def __init__(self, place: str, root: Path | None = None) -> None:
        self.place = str(Path(as_local(place)))
        self.root = root

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Provide a local directory with all files; those of shards may lack their content."""
        yield Path(self.place)

    def check(self, task: ShardCheck) -> CheckedShard:
        """Find all damage of one shard."""
        return check_shard(task)

    def stored_digests(self, tasks: Sequence[ShardCheck]) -> list[Finding]:
        """Return the shards that need not be read to see that their SHA-256 is wrong."""
        return []


def check_shard(task: ShardCheck) -> CheckedShard:
    """Find all damage of one shard."""
    try:
        return _check(task)
    except UNFIT as error:
        reason = f"it cannot be read: {error.strerror}"
        return CheckedShard([_shard_finding(task, reason)], 0, task.entry.sha256, None)
    except OSError as error:
        finding = Finding.of_error(task.file, error)
        return CheckedShard([finding], 0, task.entry.sha256, None)


def _check(task: ShardCheck) -> CheckedShard:
    """Find all damage of one shard."""
    path = task.path
    if not task.entry.holds_records:
        return _check_attached(task)
    index = _stored_index(task)
    passed = _pass_over(task, path, index)
    sha256 = passed.sha256
    intact = passed.sha256 == task.entry.sha256
    if passed.records == task.entry.rows and len(passed.equal) and passed.equal.all():
        return CheckedShard(
            _check_meta(task, passed.meta, intact=intact), passed.records, sha256, None
        )
    findings = []
    comparison = RecordComparison(task.against) if task.against else None
    compared = comparison.result if comparison else None
    try:
        with open_records(get_format(task.format), path) as records:
            if len(records) != task.entry.rows:
                reason = f"it has {len(records)} records; the manifest says {task.entry.rows}"
                findings.append(_shard_finding(task, reason))
            findings += _check_meta(task, records.meta, intact=intact)
            findings += _Records(task, index, intact, comparison).check(records, passed.equal)
            return CheckedShard(findings, len(records), sha256, compared)
    except CorruptShard as error:
        findings.append(_shard_finding(task, str(error)))
        if index is not None:
            findings += _check_ranges(task, [index])
        return CheckedShard(findings, 0, sha256, compared)


def _check_attached(task: ShardCheck) -> CheckedShard:
    """Find all damage of an archive, which may have any number of records."""
    sha256 = sha256_of(task.path, task.folder) if task.entry.sha256 else ""
    rows = 0

    def parts() -> Iterator[IndexPart]:
        nonlocal rows
        with suppress(CorruptDataset, ValueError):  # found by the check of the index
            for part in task.index.pieces(range(task.start, task.start + task.entry.rows)):
                rows += len(part.rows)
                yield part

    findings = _check_ranges(task, parts())
    return CheckedShard(findings, rows, sha256, None)


class _Pass(NamedTuple):
    """Result of one pass over a shard's bytes."""

    sha256: str
    equal: npt.NDArray[np.bool_]
    """Whether each record is known to equal the index, and needs no other check; empty if it
    cannot be known."""
    records: int
    meta: Mapping[str, Any]


def _pass_over(task: ShardCheck, path: Path, index: IndexPart | None) -> _Pass:
    """Hash a shard, and compare each part of it with the index while it is in the CPU cache."""
    meta: Mapping[str, Any] = {}
    count = 0
    parts: list[npt.NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    meter = Meter()
    with FileSha256(path) as digest:
        if index is not None and not task.decode and not task.against:
            # Whatever is wrong with the shard is found again, and reported.
            with suppress(CorruptShard), open_records(get_format(task.format), path) as records:
                meta = dict(records.meta)
                count = len(records)
                parts += [
                    _equal_to_index(records, rows, index, digest, meter)
                    for rows in _runs(index, min(count, task.entry.rows))
                ]
        meter.flush()
        return _Pass(digest.hexdigest(), np.concatenate(parts), count, meta)


def _runs(index: IndexPart, count: int) -> Iterator[range]:
    """Divide rows into runs whose images take about `_RUN_BYTES`."""
    mean = int(index.rows["length"].mean()) + 1 if count else 1
    step = min(max(1, _RUN_BYTES // mean), _RUN_ROWS)
    for start in range(0, count, step):
        yield range(start, min(start + step, count))


def _equal_to_index(
    records: ShardRecords, rows: range, index: IndexPart, digest: FileSha256, meter: Meter
) -> npt.NDArray[np.bool_]:
    """Return whether each record is known to be as the index says, after hashing them."""
    part = slice(rows.start, rows.stop)
    stored = index.rows[part]
    end = int((stored["offset"] + stored["length"]).max())
    piece = FilePiece(*digest.advance(end + _TAIL))
    equal, content = records.index_known(rows, piece, summed=False)
    for texts, indexed in ((content.keys, index.keys[part]), (content.paths, index.paths[part])):
        equal &= np.fromiter(map(operator.eq, texts, indexed), np.bool_, len(rows))
    same: npt.NDArray[np.bool_] = equal & (_words(content.rows) == _words(stored)).all(axis=1)
    meter.add(images=int(same.sum()), size=int(stored["length"][same].sum(dtype=np.int64)))
    return same


def _stored_index(task: ShardCheck) -> IndexPart | None:
    """Return the shard's part of the stored index, or None if the index is damaged."""
    try:
        return task.index.part(slice(task.start, task.start + task.entry.rows))
    except (CorruptDataset, ValueError):
        return None


def _check_meta(task: ShardCheck, meta: Mapping[str, Any], *, intact: bool) -> list[Finding]:
    """Compare the shard's metadata with the manifest, whose digest anybody can forge."""
    wrong = [name for name, value in task.meta.items() if meta.get(name) != value]
    if not wrong:
        return []
    reason = f"{task.entry.name} was made with another {', another '.join(wrong)}"
    file = MANIFEST_NAME if intact else task.entry.name
    return [Finding(file=task.prefix + file, reason=reason)]


def _words(rows: Rows) -> npt.NDArray[np.int64]:
    """Return rows as numbers, which are compared 20 times as fast."""
    return rows.view(np.int64).reshape(len(rows), ROW.itemsize // 8)


@dataclass(frozen=True)
class _Records:
    """The check of each record of a shard."""

    task: ShardCheck
    index: IndexPart | None
    intact: bool
    """Whether the shard is intact, so any file that differs from it is damaged."""
    comparison: RecordComparison | None

    def check(self, records: ShardRecords, equal: npt.NDArray[np.bool_]) -> list[Finding]:
        """Find all damaged or different records, among those not known to be ``equal``."""
        findings = []
        meter = Meter()
        with self.comparison.at_work() if self.comparison else nullcontext():
            for row in range(len(records)):
                if row < len(equal) and equal[row]:
                    continue
                file = self.task.entry.name
                size = 0
                differs = False
                as_stored = False
                try:
                    (indexed,) = records.read([row])
                    size = int(indexed.row["length"][0])
                    file, reason = self._look(indexed, row)
                    if not reason:
                        if self.task.decode:
                            reason = decoding_fault(
                                indexed.record, self.task.schema, self.task.raw_shape
                            )
                        as_stored = self.intact or self.index is not None
                    if not reason and self.comparison and row < self.task.entry.rows:
                        reason = self.comparison.difference(indexed.record, row)
                        differs = bool(reason)
                except CorruptShard as error:
                    reason = str(error)
                if reason:
                    finding = _record_finding(self.task, row, self.index, reason, file=file)
                    as_stored = as_stored and not differs
                    findings.append(replace(finding, source=differs, as_stored=as_stored))
                if len(findings) >= MOST_FINDINGS:
                    findings.append(_shard_finding(self.task, _UNEXAMINED.format(row + 1)))
                    break
                meter.add(images=1, size=size, bad=bool(reason))
        meter.flush()
        return findings

    def _look(self, indexed: IndexedRecord, row: int) -> tuple[str, str]:
        """Return the damaged file and the reason for a record; the reason is "" if it is intact."""
        reason, differs_in = difference(indexed, row, self.index)
        if reason:
            return differs_in if self.intact else self.task.entry.name, reason
        return self.task.entry.name, ""


def _check_ranges(task: ShardCheck, parts: Iterable[IndexPart]) -> list[Finding]:
    """Find damaged records of a shard that its format cannot open, using the index alone."""
    file = ShardFile(task.path, task.path.stat().st_size, task.folder)
    findings = list[Finding]()
    meter = Meter()
    for row, part, start, name in _fields(parts):
        entry = (part.rows if name == IMAGE else part.apart[name])[row - start]
        if entry["offset"] < 0:
            continue  # not stored as plain bytes
        try:
            data = file.read(int(entry["offset"]), int(entry["length"]))
            reason = ""
            if checksum(entry.tobytes()[HEAD], data) != entry["checksum"]:
                reason = "its checksum does not match"
            elif task.decode and name in task.schema:
                reason = range_fault(data, entry, task.schema[name], task.raw_shape)
        except (CorruptShard, OverflowError) as error:
            reason = str(error)
        if reason:
            finding = _record_finding(task, row - start, part, reason)
            findings.append(replace(finding, row=task.start + row))
        meter.add(images=int(name == IMAGE), size=int(entry["length"]), bad=bool(reason))
        if len(findings) >= MOST_FINDINGS:
            findings.append(_shard_finding(task, _UNEXAMINED.format(row + 1)))
            break
    meter.flush()
    return findings


def _fields(parts: Iterable[IndexPart]) -> Iterator[tuple[int, IndexPart, int, str]]:
    """Yield each row of a shard, the part that it is in, the part's first row, and each field."""
    start = 0
    for part in parts:
        rows = range(start, start + len(part.rows))
        for row, name in itertools.product(rows, (IMAGE, *part.apart)):
            yield row, part, start, name
        start = rows.stop


_UNEXAMINED = f"it has {MOST_FINDINGS:,} damaged records; those after record {{}} were not checked"


def _shard_finding(task: ShardCheck, reason: str) -> Finding:
    return Finding(file=task.file, reason=reason)


def _record_finding(
    task: ShardCheck, row: int, index: IndexPart | None, reason: str, *, file: str = ""
) -> Finding:
    known = index is not None and row < len(index.keys)
    return Finding(
        file=task.prefix + (file or task.entry.name),
        reason=reason,
        key=index.keys[row] if index and known else None,
        path=index.paths[row] if index and known else None,
        row=task.start + row,
    )
