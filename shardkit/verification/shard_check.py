"""Check one shard for `shardkit verify`.

One pass over the shard hashes 2 MiB at a time, and compares the records there with the index while
they are in the CPU cache. Only records that differ, and shards that do not open, are read again to
explain the damage.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.dataset.handles import ShardFile
from shardkit.dataset.index import HEAD, IndexSegment, checksum
from shardkit.dataset.index_builder import FileWindow, ShardRecords, difference, open_records
from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.record import IMAGE
from shardkit.registry import get_format
from shardkit.system.files import FileSha256
from shardkit.system.late import load
from shardkit.system.pool import Meter
from shardkit.system.safe_paths import UNFIT
from shardkit.verification.decoding import decoding_fault, range_fault
from shardkit.verification.findings import CheckedShard, Finding, ShardCheck
from shardkit.verification.record_comparison import ComparisonResult, RecordComparison

_RUN_BYTES = 7 << 18
_RUN_ROWS = 4096
"""Bytes of images, and records, compared with the index at a time; they stay in the CPU cache."""

_ATTACHED = "shardkit.attaching.check:check_attached"
_OTHERS = "shardkit.dataset.other_fields:equal_others"
"""Checks an archive, or the files of a folder."""

_TAIL = 4096
"""Bytes after an image that most often contain its metadata."""

MOST_FINDINGS = 10_000
"""Maximum damaged records reported per shard: a small file may state millions of rows, and each
finding takes memory."""


class Checks:
    """How the files of a dataset are checked: where they are. Others inherit from this class.

    It is pickled to worker processes. ``location`` is the path or URL of the dataset, ``root`` the
    folder of an attached dataset's archives, if the user named it.
    """

    def __init__(self, location: str, root: Path | None = None) -> None:
        self.location = str(Path(location))
        self.root = root

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Provide a local directory with all files; those of shards may lack their content."""
        yield Path(self.location)

    def check(self, task: ShardCheck) -> CheckedShard:
        """Find all damage of one shard."""
        try:
            check = _check_records if task.entry.holds_records else load(_ATTACHED)
            checked: CheckedShard = check(task)
            return checked
        except UNFIT as error:
            finding = task.finding(f"it cannot be read: {error.strerror}")
        except OSError as error:
            finding = Finding.of_error(task.file, error)
        return CheckedShard([finding], 0, task.entry.sha256, None)

    def stored_digests(self, tasks: Sequence[ShardCheck]) -> list[Finding]:
        """Return the shards that need not be read to see that their SHA-256 is wrong."""
        return []


def _check_records(task: ShardCheck) -> CheckedShard:
    """Find all damage of a shard of a conversion, and hash it in the same pass."""
    index: IndexSegment | None = None
    with suppress(CorruptDataset, ValueError):  # found by the check of the index
        index = task.index.segment(slice(task.start, task.start + task.entry.rows))
    findings = list[Finding]()
    compared = None
    count = 0
    with FileSha256(task.path) as digest:
        try:
            with open_records(get_format(task.format), task.path) as records:
                equal = _equal_to_index(task, records, index, digest)
                intact = digest.hexdigest() == task.entry.sha256
                if len(records) != task.entry.rows:
                    reason = f"it has {len(records)} records; the manifest lists {task.entry.rows}"
                    findings.append(task.finding(reason))
                # The digest of a manifest may be forged: compare what its shards state, too.
                meta = records.meta
                if wrong := [name for name in task.meta if meta.get(name) != task.meta[name]]:
                    reason = f"{task.entry.name} differs from the manifest in {', '.join(wrong)}"
                    findings.append(task.of_manifest(reason) if intact else task.finding(reason))
                unknown = np.flatnonzero(~equal).tolist()
                others, compared = _check_each(task, records, unknown, index, intact=intact)
                findings += others
                count = len(records)
        except CorruptShard as error:
            findings.append(task.finding(str(error)))
            findings += [] if index is None else check_ranges(task, [index])
        return CheckedShard(findings, count, digest.hexdigest(), compared)


def _equal_to_index(
    task: ShardCheck, records: ShardRecords, index: IndexSegment | None, digest: FileSha256
) -> npt.NDArray[np.bool_]:
    """Return whether each record is known to be as the index says, and needs no other check.

    The records are hashed first, some at a time, so that they are in the CPU cache.
    """
    equal = np.zeros(len(records), np.bool_)
    count = min(len(records), task.entry.rows)
    if index is None or task.decode or task.against or not count:
        return equal
    step = min(max(1, _RUN_BYTES // (int(index.rows["length"].mean()) + 1)), _RUN_ROWS)
    meter = Meter()
    for start in range(0, count, step):
        rows = range(start, min(start + step, count))
        inside = slice(rows.start, rows.stop)
        stored = index.rows[inside]
        end = int((stored["offset"] + stored["length"]).max())
        window = FileWindow(*digest.advance(end + _TAIL))
        same, derived = records.index_known(rows, window, summed=False)
        for texts, expected in ((derived.keys, index.keys), (derived.paths, index.paths)):
            same &= np.fromiter(map(operator.eq, texts, expected[inside]), np.bool_, len(rows))
        # As numbers, entries are compared 20 times as fast.
        derived_numbers, stored_numbers = (
            entries.view(np.int64).reshape(len(rows), -1) for entries in (derived.rows, stored)
        )
        same &= (derived_numbers == stored_numbers).all(axis=1)
        if derived.entries or derived.values:
            same &= load(_OTHERS)(derived, index, rows)
        equal[inside] = same
        meter.add(images=int(same.sum()), size=int(stored["length"][same].sum(dtype=np.int64)))
    meter.flush()
    return equal


def _check_each(
    task: ShardCheck,
    records: ShardRecords,
    rows: Sequence[int],
    index: IndexSegment | None,
    *,
    intact: bool,
) -> tuple[list[Finding], ComparisonResult | None]:
    """Find all damaged or different records among ``rows``, and compare them with the source."""
    findings = list[Finding]()
    comparison = RecordComparison(task.against) if task.against else None
    meter = Meter()
    for row in rows:
        file = ""
        size = 0
        differs = False
        as_stored = False
        try:
            (indexed,) = records.read([row])
            size = int(indexed.row["length"][0])
            reason, index_file = difference(indexed, row, index)
            if reason and intact:  # so it is the index that is damaged
                file = index_file
            if not reason and task.decode:
                reason = decoding_fault(indexed.record, task.schema, task.raw_shape)
                as_stored = bool(reason) and (intact or index is not None)
            if not reason and comparison and row < task.entry.rows:
                reason = comparison.difference(indexed.record, row)
                differs = bool(reason)
        except CorruptShard as error:
            reason = str(error)
        if reason:
            finding = task.finding(reason, row, index, file)
            findings.append(replace(finding, source=differs, as_stored=as_stored))
        if len(findings) >= MOST_FINDINGS:
            findings.append(task.finding(_UNEXAMINED.format(row + 1)))
            break
        meter.add(images=1, size=size, bad=bool(reason))
    meter.flush()
    return findings, comparison.result if comparison else None


def check_ranges(task: ShardCheck, segments: Iterable[IndexSegment]) -> list[Finding]:
    """Find damaged records of a shard that its format cannot open, using the index alone."""
    file = ShardFile(task.path, task.path.stat().st_size, task.folder)
    findings = list[Finding]()
    meter = Meter()
    for row, segment, start, name in _fields(segments):
        entry = (segment.rows if name == IMAGE else segment.apart[name])[row - start]
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
            finding = task.finding(reason, row - start, segment)
            findings.append(replace(finding, row=task.start + row))
        meter.add(images=int(name == IMAGE), size=int(entry["length"]), bad=bool(reason))
        if len(findings) >= MOST_FINDINGS:
            findings.append(task.finding(_UNEXAMINED.format(row + 1)))
            break
    meter.flush()
    return findings


def _fields(segments: Iterable[IndexSegment]) -> Iterator[tuple[int, IndexSegment, int, str]]:
    """Yield each row of a shard, its segment, the segment's first row, and each field."""
    start = 0
    for segment in segments:
        rows = range(start, start + len(segment.rows))
        for row, name in itertools.product(rows, (IMAGE, *segment.apart)):
            yield row, segment, start, name
        start = rows.stop


_UNEXAMINED = f"it has {MOST_FINDINGS:,} damaged records; those after record {{}} were not checked"
