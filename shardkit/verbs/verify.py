"""Verify: hold every byte of a dataset against what its manifest and its index promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardkit.codecs.image import decode
from shardkit.errors import BadImage, CorruptDataset, CorruptShard, UsageError
from shardkit.files import sha256_of
from shardkit.handles import ShardFile
from shardkit.index import HEAD, Index, IndexPart, checksum
from shardkit.indexing import IndexedRecord, ShardRecords, open_records
from shardkit.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    SplitsManifest,
    load_any_manifest,
    load_manifest,
)
from shardkit.pool import Progress, Report, report, run_tasks
from shardkit.registry import get_format

LEVELS = ("quick", "full", "decode")


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


@dataclass(kw_only=True)
class Verification:
    """What a verification found."""

    level: str
    datasets: int = 0
    shards: int = 0
    records: int = 0
    """Records that were read; none at the level ``quick``."""
    bytes: int = 0
    """Bytes of the shards."""
    findings: list[Finding] = field(default_factory=list)
    """All damage."""
    extras: list[str] = field(default_factory=list)
    """Files that do not belong to the dataset: no damage, but worth knowing."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.findings


def verify(
    directory: str | Path,
    level: str = "full",
    *,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Verification:
    """Check the dataset in ``directory``, or all of its splits.

    Args:
        directory: The dataset.
        level: ``quick`` checks manifests, presence and size of all files, and the index; ``full``
            also each shard's SHA-256 and each record against the index; ``decode`` also decodes
            each image.
        workers: Number of processes.
        on_progress: Called with what was done since the last call.

    Raises:
        UsageError: If there is no dataset, or its manifest is of a newer version.
    """
    directory = Path(directory)
    if level not in LEVELS:
        raise UsageError(f"--level {level!r} is unknown; known are {', '.join(LEVELS)}")
    result = Verification(level=level)
    tasks: list[_Task] = []
    for name, manifest in _manifests(directory, result):
        tasks += _check_files(directory, name, manifest, result)
    if level != "quick":
        for _, (findings, records) in run_tasks(
            _check_shard, tasks, workers=workers, on_progress=on_progress
        ):
            result.findings += findings
            result.records += records
    result.findings.sort(key=lambda finding: (finding.file, finding.row or -1))
    return result


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One shard to be checked; all that a worker process needs to know."""

    directory: Path
    prefix: str
    entry: ShardEntry
    format: str
    start: int
    """The shard's first row."""
    rows: int
    """Rows of the whole dataset."""
    twins: dict[str, str]
    """SHA-256 to name of all shards, to recognise one in the place of another."""
    decode: bool
    raw_shape: tuple[int, int, int] | None


def _manifests(directory: Path, result: Verification) -> Iterator[tuple[str, Manifest]]:
    """Give each dataset's prefix and manifest; damage to manifests becomes a finding."""
    try:
        top = load_any_manifest(directory)
    except CorruptDataset as error:
        result.findings.append(Finding(file=MANIFEST_NAME, reason=str(error)))
        return
    if isinstance(top, Manifest):
        yield "", top
        return
    yield from _split_manifests(directory, top, result)


def _split_manifests(
    directory: Path, top: SplitsManifest, result: Verification
) -> Iterator[tuple[str, Manifest]]:
    for split, digest in top.splits.items():
        name = f"{split}/{MANIFEST_NAME}"
        try:
            manifest = load_manifest(directory / split)
        except (CorruptDataset, UsageError) as error:
            result.findings.append(Finding(file=name, reason=str(error)))
            continue
        if manifest.digest != digest:
            reason = "it is not the manifest that was written with the other splits"
            result.findings.append(Finding(file=name, reason=reason))
        yield f"{split}/", manifest


def _check_files(
    directory: Path, prefix: str, manifest: Manifest, result: Verification
) -> list[_Task]:
    """Check presence and size of every file and the index; return the shards worth reading."""
    place = directory / prefix
    result.datasets += 1
    result.shards += len(manifest.shards)
    result.bytes += manifest.bytes

    def blame(name: str, reason: str) -> None:
        result.findings.append(Finding(file=prefix + name, reason=reason))

    present = []
    for entry in manifest.entries:
        path = place / entry.name
        if not path.is_file():
            blame(entry.name, "it is missing")
            continue
        if (found := path.stat().st_size) != entry.bytes:
            blame(entry.name, f"it has {found} bytes; the manifest says {entry.bytes}")
        elif not isinstance(entry, ShardEntry) and sha256_of(path) != entry.sha256:
            blame(entry.name, f"its content was changed; {_remedy(entry.name, place)}")
        if isinstance(entry, ShardEntry):
            present.append(entry.name)
    _check_index(place, manifest, blame)
    named = {entry.name for entry in manifest.entries} | {MANIFEST_NAME}
    result.extras += sorted(
        prefix + str(path.relative_to(place))
        for path in place.rglob("*")
        if path.is_file() and str(path.relative_to(place)) not in named
    )
    return list(_tasks(directory, prefix, manifest, result.level, set(present)))


def _remedy(name: str, place: Path) -> str:
    if name.startswith("index/"):
        return f"`shardkit index {place}` rebuilds the index from the shards"
    return "restore it from a copy"


def _check_index(place: Path, manifest: Manifest, blame: Callable[[str, str], None]) -> None:
    try:
        rows = Index(place, manifest.rows).rows()
    except CorruptDataset as error:
        blame("index/rows.npy", str(error))
        return
    if manifest.class_counts is not None:
        labels = rows["label"][rows["label"] >= 0]
        counts = np.bincount(labels, minlength=len(manifest.class_counts)).tolist()
        if counts != list(manifest.class_counts):
            blame("index/rows.npy", "its labels are not those that the manifest counts")


def _tasks(
    directory: Path, prefix: str, manifest: Manifest, level: str, present: set[str]
) -> Iterator[_Task]:
    start = 0
    twins = {shard.sha256: shard.name for shard in manifest.shards}
    for entry in manifest.shards:
        if entry.name in present:
            yield _Task(
                directory=directory / prefix,
                prefix=prefix,
                entry=entry,
                format=manifest.format,
                start=start,
                rows=manifest.rows,
                twins=twins,
                decode=level == "decode",
                raw_shape=manifest.raw_shape,
            )
        start += entry.rows


def _check_shard(task: _Task) -> tuple[list[Finding], int]:
    """Return all damage of one shard, and the number of records read."""
    path = task.directory / task.entry.name
    findings = []
    found = sha256_of(path)
    if found != task.entry.sha256:
        reason = "its SHA-256 is not the one in the manifest"
        if found in task.twins:
            reason += f": it holds what belongs into {task.twins[found]}"
        findings.append(_shard_finding(task, reason))
    index = _stored_index(task)
    try:
        with open_records(get_format(task.format), path) as records:
            if len(records) != task.entry.rows:
                reason = f"it has {len(records)} records; the manifest says {task.entry.rows}"
                findings.append(_shard_finding(task, reason))
            return findings + _check_records(task, records, index), len(records)
    except CorruptShard as error:
        findings.append(_shard_finding(task, str(error)))
        return findings + _check_ranges(task, index), 0


def _stored_index(task: _Task) -> IndexPart | None:
    """Return the shard's part of the stored index, or None if that is damaged itself."""
    index = Index(task.directory, task.rows)
    part = slice(task.start, task.start + task.entry.rows)
    try:
        return IndexPart(np.array(index.rows()[part]), index.keys()[part], index.paths()[part])
    except (CorruptDataset, ValueError):
        return None


def _check_records(task: _Task, records: ShardRecords, index: IndexPart | None) -> list[Finding]:
    findings = []
    for row in range(len(records)):
        try:
            (found,) = records.read([row])
            reason = _difference(found, row, index) or _undecodable(found, task)
            size = int(found.row["length"][0])
        except CorruptShard as error:
            reason, size = str(error), 0
        if reason:
            findings.append(_record_finding(task, row, index, reason))
        report(Progress(images=1, bytes=size, bad=bool(reason)))
    return findings


def _difference(found: IndexedRecord, row: int, index: IndexPart | None) -> str:
    """Return how a record differs from what the index says of it, or ""."""
    if index is None:
        return ""
    if row >= len(index.keys):
        return "the index does not know it"
    if found.record.key != index.keys[row] or found.path != index.paths[row]:
        return f"it is {found.record.key!r} from {found.path!r}"
    wrong = [
        name
        for name in ("checksum", "label", "length", "width", "height", "field", "offset")
        if found.row[name][0] != index.rows[name][row]
    ]
    return f"its {', '.join(wrong)} differ from the index" if wrong else ""


def _undecodable(found: IndexedRecord, task: _Task) -> str:
    """Return why an image does not give the pixels that it should, or ""."""
    field = found.record.image_field or ""
    width, height = int(found.row["width"][0]), int(found.row["height"][0])
    if not task.decode:
        return ""
    if field == "raw":
        expected = task.raw_shape and task.raw_shape[0] * task.raw_shape[1] * task.raw_shape[2]
        return "" if len(found.record.fields[field]) == expected else "it has not the one shape"
    try:
        shape = decode(found.record.fields[field], field).shape
    except BadImage as error:
        return str(error)
    return "" if shape == (height, width, 3) else f"it is {shape[1]} x {shape[0]} pixels"


def _check_ranges(task: _Task, index: IndexPart | None) -> list[Finding]:
    """Find the damaged records of a shard that its format cannot open, by the index alone."""
    if index is None:
        return []
    path = task.directory / task.entry.name
    file = ShardFile(path, path.stat().st_size)
    findings = []
    for row, entry in enumerate(index.rows):
        try:
            data = file.read(int(entry["offset"]), int(entry["length"]))
        except (CorruptShard, OverflowError, OSError) as error:
            findings.append(_record_finding(task, row, index, str(error)))
            continue
        if checksum(entry.tobytes()[HEAD], data) != entry["checksum"]:
            findings.append(_record_finding(task, row, index, "its checksum does not match"))
    return findings


def _shard_finding(task: _Task, reason: str) -> Finding:
    return Finding(file=task.prefix + task.entry.name, reason=reason)


def _record_finding(task: _Task, row: int, index: IndexPart | None, reason: str) -> Finding:
    known = index is not None and row < len(index.keys)
    return Finding(
        file=task.prefix + task.entry.name,
        reason=reason,
        key=index.keys[row] if index and known else None,
        path=index.paths[row] if index and known else None,
        row=task.start + row,
    )
