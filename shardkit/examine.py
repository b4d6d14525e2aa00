"""One shard under examination: what `shardkit verify` does to each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.compare import Against, Compared, Comparison
from shardkit.decode import decode_stored
from shardkit.errors import BadImage, CorruptDataset, CorruptShard
from shardkit.files import sha256_of
from shardkit.handles import ShardFile
from shardkit.index import HEAD, INDEX_DIRECTORY, ROWS_NAME, Index, IndexPart, checksum
from shardkit.indexing import IndexedRecord, ShardRecords, open_records
from shardkit.manifest import MANIFEST_NAME, ShardEntry
from shardkit.pool import Meter
from shardkit.registry import get_format
from shardkit.shardset import StoredImage


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as it should be."""

    file: str
    """The damaged file, relative to the directory that was verified."""
    reason: str
    key: str | None = None
    """Key of the damaged record; None if the damage is not in one record."""
    path: str | None = None
    """The record's source path."""
    row: int | None = None
    """The record's row in its dataset."""
    source: bool = False
    """Whether it is the source that differs; the dataset may be as it was written."""


@dataclass(frozen=True, kw_only=True)
class ExamineTask:
    """One shard to be checked; all that a worker process needs to know."""

    directory: Path
    prefix: str
    """What stands in front of the names of files in findings: the split's name, and a slash."""
    entry: ShardEntry
    format: str
    start: int
    """The shard's first row."""
    rows: int
    """Rows of the whole dataset."""
    decode: bool
    raw_shape: tuple[int, int, int] | None
    meta: dict[str, Any]
    """What the shard must say of itself."""
    against: Against | None = None
    """What the records are to be compared with beside the index."""

    @property
    def split(self) -> str:
        """The split, or "" where there are none."""
        return self.prefix.removesuffix("/")


class Examined(NamedTuple):
    """What was found in one shard."""

    findings: list[Finding]
    """All damage to its records and its structure; not that its content as a whole is another."""
    records: int
    """Records that were read."""
    sha256: str
    compared: Compared | None
    """What came of the comparison with the source, if there was one."""


def examine_shard(task: ExamineTask) -> Examined:
    """Return all damage of one shard."""
    path = task.directory / task.entry.name
    findings: list[Finding] = []
    try:
        sha256 = sha256_of(path)
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
        return Examined([_shard_finding(task, reason)], 0, task.entry.sha256, None)
    index = _stored_index(task)
    comparison = Comparison(task.against) if task.against else None
    compared = comparison.result if comparison else None
    try:
        with open_records(get_format(task.format), path) as records:
            if len(records) != task.entry.rows:
                reason = f"it has {len(records)} records; the manifest says {task.entry.rows}"
                findings.append(_shard_finding(task, reason))
            sound = sha256 == task.entry.sha256
            findings += _check_meta(task, records.meta, sound=sound)
            findings += _Records(task, index, sound, comparison).check(records)
            return Examined(findings, len(records), sha256, compared)
    except CorruptShard as error:
        findings.append(_shard_finding(task, str(error)))
        return Examined(findings + _check_ranges(task, index), 0, sha256, compared)


def _stored_index(task: ExamineTask) -> IndexPart | None:
    """Return the shard's part of the stored index, or None if that is damaged itself."""
    index = Index(task.directory, task.rows)
    part = slice(task.start, task.start + task.entry.rows)
    try:
        return IndexPart(np.array(index.rows()[part]), index.keys()[part], index.paths()[part])
    except (CorruptDataset, ValueError):
        return None


def _check_meta(task: ExamineTask, meta: Mapping[str, Any], *, sound: bool) -> list[Finding]:
    """Hold what the shard says of itself against the manifest, whose digest anybody can make."""
    wrong = [name for name, value in task.meta.items() if meta.get(name) != value]
    if not wrong:
        return []
    reason = f"{task.entry.name} was made with another {', another '.join(wrong)}"
    file = MANIFEST_NAME if sound else task.entry.name
    return [Finding(file=task.prefix + file, reason=reason)]


@dataclass(frozen=True)
class _Records:
    """The check of each record of a shard."""

    task: ExamineTask
    index: IndexPart | None
    sound: bool
    """Whether the shard is as it was written, so that what differs from it is damaged."""
    comparison: Comparison | None

    def check(self, records: ShardRecords) -> list[Finding]:
        """Return all that is wrong with the records."""
        findings = []
        meter = Meter()
        with self.comparison.at_work() if self.comparison else nullcontext():
            for row in range(len(records)):
                file, size, differs = self.task.entry.name, 0, False
                try:
                    (found,) = records.read([row])
                    size = int(found.row["length"][0])
                    file, reason = self._look(found, row)
                    if not reason and self.comparison and row < self.task.entry.rows:
                        reason = self.comparison.difference(found.record, row)
                        differs = bool(reason)
                except CorruptShard as error:
                    reason = str(error)
                if reason:
                    finding = _record_finding(self.task, row, self.index, reason, file=file)
                    findings.append(replace(finding, source=differs))
                meter.add(images=1, size=size, bad=bool(reason))
        meter.flush()
        return findings

    def _look(self, found: IndexedRecord, row: int) -> tuple[str, str]:
        """Return which file is wrong in a record, and how: "" if nothing is."""
        reason, differs_in = _difference(found, row, self.index)
        if reason:
            return differs_in if self.sound else self.task.entry.name, reason
        return self.task.entry.name, _undecodable(found, self.task)


def _difference(found: IndexedRecord, row: int, index: IndexPart | None) -> tuple[str, str]:
    """Return how a record differs from what the index says of it, and which file says so."""
    if index is None:
        return "", ""
    if row >= len(index.keys):
        return "the index does not know it", ROWS_NAME
    if found.path != index.paths[row]:
        return f"it is {found.record.key!r} from {found.path!r}", f"{INDEX_DIRECTORY}/paths.npy"
    if found.record.key != index.keys[row]:
        return f"it is {found.record.key!r} from {found.path!r}", f"{INDEX_DIRECTORY}/keys.npy"
    wrong = [
        name
        for name in ("checksum", "label", "length", "width", "height", "field", "offset")
        if found.row[name][0] != index.rows[name][row]
    ]
    if "checksum" in wrong:
        reason = "its image, label or size is not the one that was stored: the checksum differs"
        return reason, ROWS_NAME
    return f"the index has another {', another '.join(wrong)} for it" if wrong else "", ROWS_NAME


def _undecodable(found: IndexedRecord, task: ExamineTask) -> str:
    """Return why an image does not give the pixels that it should, or ""."""
    if not task.decode:
        return ""
    field = found.record.image_field or ""
    label, width, height = (int(found.row[name][0]) for name in ("label", "width", "height"))
    if field == "raw" and (height, width, 3) != task.raw_shape:
        return "it has not the one shape"
    try:
        decode_stored(StoredImage(found.record.fields[field], field, label, width, height))
    except BadImage as error:
        return str(error)
    return ""


def _check_ranges(task: ExamineTask, index: IndexPart | None) -> list[Finding]:
    """Find the damaged records of a shard that its format cannot open, by the index alone."""
    if index is None:
        return []
    path = task.directory / task.entry.name
    file = ShardFile(path, path.stat().st_size)
    findings = []
    for row, entry in enumerate(index.rows):
        if entry["offset"] < 0:
            continue  # only the format's library could read it
        try:
            data = file.read(int(entry["offset"]), int(entry["length"]))
        except (CorruptShard, OverflowError, OSError) as error:
            findings.append(_record_finding(task, row, index, str(error)))
            continue
        if checksum(entry.tobytes()[HEAD], data) != entry["checksum"]:
            findings.append(_record_finding(task, row, index, "its checksum does not match"))
    return findings


def _shard_finding(task: ExamineTask, reason: str) -> Finding:
    return Finding(file=task.prefix + task.entry.name, reason=reason)


def _record_finding(
    task: ExamineTask, row: int, index: IndexPart | None, reason: str, *, file: str = ""
) -> Finding:
    known = index is not None and row < len(index.keys)
    return Finding(
        file=task.prefix + (file or task.entry.name),
        reason=reason,
        key=index.keys[row] if index and known else None,
        path=index.paths[row] if index and known else None,
        row=task.start + row,
    )
