"""Rebuild damaged and missing files of a dataset from its source, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.contracts import Images
from shardkit.conversion.build import ShardTask, build_shard, load_part
from shardkit.conversion.plan import shard_meta
from shardkit.conversion.staging import scratch_folder
from shardkit.dataset.index import INDEX_DIRECTORY, ROWS_NAME, Index
from shardkit.dataset.manifest import (
    AttachedManifest,
    FileEntry,
    Manifest,
    ShardEntry,
    load_any_manifest,
    manifests_of,
)
from shardkit.dataset.reports import IGNORED, SKIPPED, render_report
from shardkit.errors import CorruptDataset, Problem, UsageError
from shardkit.system.files import as_name, has_sha256, sha256_of, sync
from shardkit.system.pool import Meter, Report, run_tasks
from shardkit.system.safe_paths import opened
from shardkit.verification.reindex import rebuild_index
from shardkit.verification.shard_check import Finding
from shardkit.verification.source_match import SourceMatch, match_rows, match_sources

_NAMED = 3
"""Maximum source files that a message names; it counts all."""


@dataclass(kw_only=True)
class Repaired:
    """The result of a repair."""

    files: list[str] = field(default_factory=list)
    """Rebuilt files; each has its digest in the manifest."""
    findings: list[Finding] = field(default_factory=list)
    """Files that could not be rebuilt, and why. They were not touched."""
    intact: int = 0
    """Number of files that needed no repair."""

    @property
    def ok(self) -> bool:
        """Whether all files have their digests in the manifest."""
        return not self.findings


def repair(
    directory: str | Path,
    source: Any,
    *,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Repaired:
    """Rebuild the damaged and missing files of a dataset or of all its splits.

    Reads every file to find the damaged ones. A rebuilt file replaces the damaged one only if it
    has the digest in the manifest; intact files are not touched.

    Args:
        directory: The dataset. Its manifests must be intact.
        source: The folder, or the Python samples, that the dataset was made from; a list of these,
            one for each part, if it was merged or appended to, unless all are the same.
        workers: Number of processes.
        on_progress: Called with the progress since the last call.

    Raises:
        UsageError: If there is no dataset, ``source`` cannot be its source, or a conversion into
            the dataset is running.
        CorruptDataset: If a manifest is damaged.
        ConversionFailed: If writing fails.
    """
    directory = Path(directory)
    result = Repaired()
    with scratch_folder(directory, lambda: _manifests(directory)) as scratch:
        manifests = _manifests(directory)
        damaged = _find_damage(directory, manifests, result, workers, on_progress)
        if not damaged:
            return result
        origins = match_sources(directory, manifests, source)
        for split, entries in damaged.items():
            place = _Place(directory / as_name(split), split, manifests[split], result)
            parts = [each[split] for each in origins if split in each]
            _rebuild(place, parts, entries, scratch, (workers, on_progress))
    result.files.sort()
    result.findings.sort(key=lambda finding: finding.file)
    return result


def _manifests(directory: Path) -> dict[str, Manifest]:
    """Return the manifest of each split, or of the dataset as ""."""
    top = load_any_manifest(directory)
    if isinstance(top, AttachedManifest):
        raise UsageError(
            f"{directory} is attached: shardkit did not write its archives. Restore them from a "
            "copy; `shardkit attach --force` rebuilds the index"
        )
    return manifests_of(directory, top)


@dataclass(frozen=True)
class _Place:
    """One dataset under repair."""

    folder: Path
    split: str
    manifest: Manifest
    result: Repaired

    def name(self, entry: FileEntry) -> str:
        return f"{self.split}/{entry.name}" if self.split else entry.name

    def fail(self, entry: FileEntry, reason: str) -> None:
        self.result.findings.append(Finding(file=self.name(entry), reason=reason))

    def put(self, made: Path, entry: FileEntry) -> None:
        """Move a rebuilt shard or report into place."""
        target = self.folder / entry.name
        if target.is_dir() and not target.is_symlink():
            self.fail(entry, f"it is a folder, not a file; remove {target}")
            return
        sync(made)
        with opened(self.folder) as folder:
            os.replace(made, entry.name, dst_dir_fd=folder)
            os.fsync(folder)
        self.result.files.append(self.name(entry))


@dataclass(frozen=True)
class _HashTask:
    place: Path
    split: str
    entry: FileEntry


def _look(task: _HashTask) -> bool:
    """Return whether a file has its digest in the manifest."""
    meter = Meter()
    rows = task.entry.rows if isinstance(task.entry, ShardEntry) else 0
    meter.add(images=rows, size=task.entry.bytes)
    meter.flush()
    return has_sha256(task.place / task.entry.name, task.entry.sha256, task.place)


def _find_damage(
    directory: Path,
    manifests: dict[str, Manifest],
    result: Repaired,
    workers: int,
    on_progress: Report | None,
) -> dict[str, list[FileEntry]]:
    """Return the files of each split whose digest differs from the manifest."""
    tasks = [
        _HashTask(directory / as_name(split), split, entry)
        for split, manifest in manifests.items()
        for entry in manifest.entries
    ]
    damaged: dict[str, list[FileEntry]] = {}
    for task, intact in run_tasks(_look, tasks, workers=workers, on_progress=on_progress):
        result.intact += intact
        if not intact:
            damaged.setdefault(task.split, []).append(task.entry)
    return damaged


def _rebuild(
    place: _Place,
    origins: Sequence[SourceMatch],
    entries: Sequence[FileEntry],
    scratch: Path,
    how: tuple[int, Report | None],
) -> None:
    """Rebuild files of one dataset: shards, then the index from the shards, then reports."""
    names = {entry.name for entry in entries}
    index = [entry for entry in entries if entry.name.startswith(f"{INDEX_DIRECTORY}/")]
    for origin in origins:
        shards = [entry for entry in origin.part.manifest.shards if entry.name in names]
        if shards:
            _rebuild_shards(place, origin, shards, scratch, how)
    if index:
        _rebuild_index(place, index, scratch)
    for entry in entries:
        if not isinstance(entry, ShardEntry) and entry not in index:
            _rebuild_report(place, origins, entry, scratch)


def _rebuild_shards(
    place: _Place,
    origin: SourceMatch,
    shards: Sequence[ShardEntry],
    scratch: Path,
    how: tuple[int, Report | None],
) -> None:
    rows, unknown = match_rows(origin, "")
    damaged = {shard.name for shard in shards}
    part = origin.part
    of_number = dict(enumerate(part.manifest.shards, part.first))
    tasks = []
    start = 0
    starts = {}
    for number, shard in of_number.items():
        span = slice(start, start + shard.rows)
        starts[shard.name], start = part.start + start, span.stop
        if shard.name not in damaged:
            continue
        images = [entry for entry in rows[span] if entry is not None]
        if len(images) == shard.rows:
            if origin.keys:
                keyed = zip(images, origin.keys[span], strict=True)
                images = [entry._replace(key=key) for entry, key in keyed]
            tasks.append(_task(place, origin, number, origin.images.of(images), scratch))
        elif rows and origin.stored:
            pairs = zip(rows[span], origin.stored[span], strict=True)
            lost = [path for entry, path in pairs if entry is None]
            place.fail(shard, f"the source lacks {len(lost)} of its files ({_some(lost)})")
        else:
            place.fail(shard, unknown[0].reason)
    workers, on_progress = how
    for task, built in run_tasks(build_shard, tasks, workers=workers, on_progress=on_progress):
        entry = of_number[task.number]
        if built.result.bad:
            problem = built.result.bad[0]
            place.fail(entry, f"a file of the source is bad: {problem.path}: {problem.reason}")
        elif built.result.entry is None or built.result.entry.sha256 != entry.sha256:
            place.fail(entry, _why_other(place, origin, task, starts[entry.name]))
        else:
            place.put(task.path, entry)


def _task(
    place: _Place, origin: SourceMatch, number: int, source: Images, scratch: Path
) -> ShardTask:
    manifest = origin.part.manifest
    return ShardTask(
        split=place.split,
        number=number,
        folder=scratch,
        part=scratch / "parts" / place.split / f"{number:06d}",
        format=manifest.format,
        recipe=origin.recipe,
        schema=manifest.fields_by_name,
        source=source,
        meta=shard_meta(
            to=manifest.format,
            schema=manifest.fields_by_name,
            recipe=origin.recipe,
            source=manifest.source,
        ),
        software=manifest.software,
        keep=False,
    )


def _why_other(place: _Place, origin: SourceMatch, task: ShardTask, start: int) -> str:
    """Return why a rebuilt shard differs from the manifest."""
    said = "the rebuilt file differs"
    changed = _changed_images(place, task, start)
    if changed:
        said += f" in {len(changed)} of its images ({_some(changed)})"
    if origin.changed_software:
        versions = ", ".join(
            f"{name} was {then} and is {now}"
            for name, (then, now) in origin.changed_software.items()
        )
        return f"{said}. It was written with other library versions: {versions}"
    return f"{said}. The source has changed since the conversion"


def _changed_images(place: _Place, task: ShardTask, start: int) -> list[str]:
    """Return the files whose records differ from the index; empty if the index is damaged."""
    count = len(task.source)
    try:
        (stated,) = (file for file in place.manifest.files if file.name == ROWS_NAME)
        if not has_sha256(place.folder / stated.name, stated.sha256, place.folder):
            return []
        old = Index(place.folder, place.manifest.rows).rows()[start : start + count]
        new = load_part(task, count)
    except (CorruptDataset, ValueError, OSError):
        return []
    return [
        path
        for path, one, other in zip(new.paths, new.rows, old, strict=True)
        if one["checksum"] != other["checksum"]
    ]


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_NAMED]) + (" ..." if len(paths) > _NAMED else "")


def _rebuild_index(place: _Place, entries: Sequence[FileEntry], scratch: Path) -> None:
    try:
        rebuild_index(place.folder, scratch)
    except (CorruptDataset, UsageError) as error:
        for entry in entries:
            place.fail(entry, f"it cannot be rebuilt yet: {error}")
        return
    place.result.files += [place.name(entry) for entry in entries]


def _rebuild_report(
    place: _Place, origins: Sequence[SourceMatch], entry: FileEntry, scratch: Path
) -> None:
    """Rebuild a report."""
    known: dict[str, Sequence[Problem]] = {
        SKIPPED: place.manifest.skipped,
        IGNORED: [problem for origin in origins for problem in origin.ignored],
    }
    if entry.name not in known:
        place.fail(entry, "this version of shardkit cannot rebuild it")
        return
    made = scratch / entry.name
    made.write_bytes(render_report(known[entry.name]))
    if sha256_of(made) == entry.sha256:
        place.put(made, entry)
    else:
        place.fail(entry, "the source's other files have changed since the conversion")
