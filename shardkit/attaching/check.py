"""Check archives and files from other programs against their index, for `shardkit verify`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from shardkit.attaching.loose_files import Folder, Unlike, difference
from shardkit.attaching.tasks import by_folder
from shardkit.dataset.index import HEAD, Index, IndexSegment, Rows, checksum
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import CorruptDataset, CorruptShard, UsageError
from shardkit.record import IMAGE
from shardkit.registry import get_source
from shardkit.system.files import sha256_of
from shardkit.system.pool import Meter
from shardkit.verification.decoding import range_fault
from shardkit.verification.findings import CheckedShard, Finding, ShardCheck
from shardkit.verification.shard_check import MOST_FINDINGS, check_ranges

_AT_ONCE = 64
"""Files that are checked before their folders are closed."""


class _Row(NamedTuple):
    """A row of the index."""

    number: int
    key: str
    path: str
    entry: Rows
    """Of shape ()."""
    modified: int

    @property
    def size(self) -> int:
        """The size of its file in bytes."""
        return int(self.entry["length"])

    def finding(self, prefix: str, reason: str, *, source: bool = False) -> Finding:
        """Return a finding about its file."""
        return Finding(
            file=prefix + self.path,
            reason=reason,
            key=self.key,
            path=self.path,
            row=self.number,
            source=source,
        )


def _rows(index: Index, rows: range) -> Iterator[_Row]:
    """Yield rows of an index until one cannot be read, which the check of the index finds."""
    try:
        times = index.times()
        start = rows.start
        for segment in index.segments(rows):
            stop = start + len(segment.rows)
            stored = times[start:stop].tolist()
            yield from map(
                _Row, range(start, stop), segment.keys, segment.paths, segment.rows, stored
            )
            start = stop
    except (CorruptDataset, ValueError):
        return


def check_listing(dataset: OpenedDataset) -> tuple[list[Finding], set[str]]:
    """Compare names, sizes and times of all images in the folder with the index.

    Return changed, missing and new files, and the names of the shards whose files can be checked.
    """
    manifest = dataset.manifest
    try:
        source = get_source(manifest.format).find(dataset.shards_folder, {"": manifest.source})
        scan = source.scan(manifest.classes)
        (images,) = scan.splits.values()
        folders = by_folder(images)
    except UsageError as error:
        return [Finding(file=dataset.prefix or ".", reason=str(error))], set()
    skipped = {problem.path for problem in manifest.skipped}
    unlisted = {problem.path: problem.reason for problem in scan.problems[""]}
    findings = []
    start = 0
    for shard in manifest.shards:
        entries = folders.pop(shard.name).entries if shard.name in folders else ()
        listed = {entry.path: (entry.bytes, entry.stamp) for entry in entries}
        for row in _rows(dataset.index, range(start, start + shard.rows)):
            if row.path in listed:
                reason = difference(*listed.pop(row.path), row.size, row.modified)
            else:
                reason = unlisted.pop(row.path, "is missing")
            if reason:
                findings.append(row.finding(dataset.prefix, f"it {reason}", source=True))
        findings += _new(listed.keys() - skipped, dataset.prefix)
        start += shard.rows
    for images in folders.values():
        findings += _new({*images.paths()} - skipped, dataset.prefix)
    findings += _new(unlisted.keys() - skipped, dataset.prefix)
    return findings, {shard.name for shard in manifest.shards}


def _new(paths: Iterable[str], prefix: str) -> list[Finding]:
    return [
        Finding(file=prefix + path, reason="it is new: the index does not list it", source=True)
        for path in sorted(paths)
    ]


def check_attached(task: ShardCheck) -> CheckedShard:
    """Find all damage of an archive with any number of records, or of the files of a folder."""
    if task.loose:
        return _check_folder(task)
    sha256 = sha256_of(task.path, task.folder) if task.entry.sha256 else ""
    rows = 0

    def segments() -> Iterator[IndexSegment]:
        nonlocal rows
        with suppress(CorruptDataset, ValueError):  # found by the check of the index
            for segment in task.index.segments(range(task.start, task.start + task.entry.rows)):
                rows += len(segment.rows)
                yield segment

    findings = check_ranges(task, segments())
    return CheckedShard(findings, rows, sha256, None)


def _check_folder(task: ShardCheck) -> CheckedShard:
    """Compare the files of a folder with the index."""
    findings = []
    meter = Meter()
    rows = _rows(task.index, range(task.start, task.start + task.entry.rows))
    count = 0
    while batch := list(islice(rows, _AT_ONCE)):
        with Folder(task.folder) as folder:
            for row in batch:
                finding = _check(task, row, folder)
                if finding is not None:
                    findings.append(finding)
                meter.add(images=1, size=row.size, bad=finding is not None)
        count += len(batch)
        if len(findings) >= MOST_FINDINGS:
            reason = f"it has {MOST_FINDINGS:,} findings; files after row {count} were not checked"
            findings.append(Finding(file=task.file, reason=reason))
            break
    meter.flush()
    return CheckedShard(findings, count, task.entry.sha256, None)


def _check(task: ShardCheck, row: _Row, folder: Folder) -> Finding | None:
    """Return what is wrong with a file, or None."""
    try:
        data = folder.open(row.path, row.size, row.modified).read(0, row.size)
    except (Unlike, CorruptShard) as error:
        return row.finding(task.prefix, f"it {error}", source=True)
    except OSError as error:
        return Finding.of_error(task.prefix + row.path, error)
    if row.entry["offset"]:
        return row.finding(task.prefix, "it does not start at the byte in the index")
    if checksum(row.entry.tobytes()[HEAD], data) != row.entry["checksum"]:
        return row.finding(task.prefix, "it has changed: its checksum does not match")
    reason = range_fault(data, row.entry, task.schema[IMAGE], None) if task.decode else ""
    return row.finding(task.prefix, reason) if reason else None
