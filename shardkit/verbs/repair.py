"""Repair: make what is damaged or missing of a dataset anew, from its source, to the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.conversion.build import ShardTask, build_shard, load_part
from shardkit.conversion.lock import locked
from shardkit.conversion.origin import Origin, find_origins, match_rows, scan_source
from shardkit.conversion.plan import shard_meta
from shardkit.conversion.reports import IGNORED, SKIPPED, render_report
from shardkit.conversion.space import as_failure
from shardkit.conversion.workplace import WORK_NAME
from shardkit.errors import CorruptDataset, Problem, ShardkitError, UsageError
from shardkit.examine import Finding
from shardkit.files import has_sha256, sha256_of, sync
from shardkit.index import INDEX_DIRECTORY, ROWS_NAME, Index
from shardkit.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShardEntry,
    SplitsManifest,
    load_any_manifest,
    load_manifest,
)
from shardkit.pool import Meter, Report, run_tasks
from shardkit.sources.imagefolder import ImageFolder
from shardkit.verbs.reindex import reindex

_NAMED = 3
"""Source files that a message names; it counts them all."""


@dataclass(kw_only=True)
class Repaired:
    """What a repair did."""

    files: list[str] = field(default_factory=list)
    """Files that were made anew; each has the digest that the manifest gives."""
    findings: list[Finding] = field(default_factory=list)
    """What could not be made anew, and why. Nothing of it was touched."""
    sound: int = 0
    """Files that needed nothing."""

    @property
    def ok(self) -> bool:
        """Whether all files have the digests that the manifest gives."""
        return not self.findings


def repair(
    directory: str | Path,
    source: str | Path,
    *,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Repaired:
    """Make the damaged and missing files of a dataset, or of all its splits, anew.

    A file is put in its place only if it has the digest that the manifest gives; sound files are
    not touched. Every file is read to find the damaged ones.

    Args:
        directory: The dataset. Its manifests must be whole: they say what is to be made.
        source: The folder that it was made from.
        workers: Number of processes.
        on_progress: Called with what was done since the last call.

    Raises:
        UsageError: If there is no dataset, ``source`` cannot be its source, or another conversion
            works there.
        CorruptDataset: If a manifest is damaged.
        ConversionFailed: If writing fails.
    """
    directory, source = Path(directory), Path(source)
    result = Repaired()
    with _scratch(directory) as scratch:
        manifests = _manifests(directory)
        damaged = _find_damage(directory, manifests, result, workers, on_progress)
        if not damaged:
            return result
        origins = find_origins(directory, manifests, scan_source(source, manifests))
        for split, entries in damaged.items():
            place = _Place(directory / split, split, manifests[split], result)
            _rebuild(place, origins[split], entries, scratch, (workers, on_progress))
    result.files.sort()
    result.findings.sort(key=lambda finding: finding.file)
    return result


def _manifests(directory: Path) -> dict[str, Manifest]:
    """Return split, or "", to its manifest."""
    top = load_any_manifest(directory)
    if isinstance(top, Manifest):
        return {"": top}
    manifests = {split: load_manifest(directory / split) for split in top.splits}
    for split, manifest in manifests.items():
        if manifest.digest != top.splits[split]:
            raise CorruptDataset(
                f"{directory / split / MANIFEST_NAME} is not the manifest that was written with "
                "the other splits. Restore the original, or convert again."
            )
    return manifests


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
        """Put a file that was made anew in its place."""
        target = self.folder / entry.name
        if target.is_dir() and not target.is_symlink():
            self.fail(entry, f"a folder stands in its place; remove {target}")
            return
        target.parent.mkdir(exist_ok=True)
        sync(made)
        made.replace(target)
        sync(target.parent)
        self.result.files.append(self.name(entry))


@dataclass(frozen=True)
class _HashTask:
    place: Path
    split: str
    entry: FileEntry


def _look(task: _HashTask) -> bool:
    """Tell whether a file has the content that the manifest says."""
    meter = Meter()
    rows = task.entry.rows if isinstance(task.entry, ShardEntry) else 0
    meter.add(images=rows, size=task.entry.bytes)
    meter.flush()
    return has_sha256(task.place / task.entry.name, task.entry.sha256)


def _find_damage(
    directory: Path,
    manifests: dict[str, Manifest],
    result: Repaired,
    workers: int,
    on_progress: Report | None,
) -> dict[str, list[FileEntry]]:
    """Return split to its files that are not as the manifest says."""
    tasks = [
        _HashTask(directory / split, split, entry)
        for split, manifest in manifests.items()
        for entry in manifest.entries
    ]
    damaged: dict[str, list[FileEntry]] = {}
    for task, sound in run_tasks(_look, tasks, workers=workers, on_progress=on_progress):
        result.sound += sound
        if not sound:
            damaged.setdefault(task.split, []).append(task.entry)
    return damaged


def _rebuild(
    place: _Place,
    origin: Origin,
    entries: Sequence[FileEntry],
    scratch: Path,
    how: tuple[int, Report | None],
) -> None:
    """Make files of one dataset anew: shards, then the index from the shards, then reports."""
    names = {entry.name for entry in entries}
    shards = [entry for entry in place.manifest.shards if entry.name in names]
    index = [entry for entry in entries if entry.name.startswith(f"{INDEX_DIRECTORY}/")]
    if shards:
        _rebuild_shards(place, origin, shards, scratch, how)
    if index:
        _rebuild_index(place, index)
    for entry in entries:
        if not isinstance(entry, ShardEntry) and entry not in index:
            _rebuild_report(place, origin, entry, scratch)


def _rebuild_shards(
    place: _Place,
    origin: Origin,
    shards: Sequence[ShardEntry],
    scratch: Path,
    how: tuple[int, Report | None],
) -> None:
    rows, unknown = match_rows(origin, "")
    damaged = {shard.name for shard in shards}
    of_number = dict(enumerate(place.manifest.shards))
    tasks = []
    start = 0
    starts = {}
    for number, shard in enumerate(place.manifest.shards):
        span = slice(start, start + shard.rows)
        starts[shard.name], start = start, span.stop
        if shard.name not in damaged:
            continue
        images = [entry for entry in rows[span] if entry is not None]
        if len(images) == shard.rows:
            if origin.keys:
                keyed = zip(images, origin.keys[span], strict=True)
                images = [entry._replace(key=key) for entry, key in keyed]
            source = ImageFolder(origin.images.root, images)
            tasks.append(_task(place, origin, number, source, scratch))
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
    place: _Place, origin: Origin, number: int, source: ImageFolder, scratch: Path
) -> ShardTask:
    manifest = place.manifest
    return ShardTask(
        split=place.split,
        number=number,
        folder=scratch,
        part=scratch / "parts" / place.split / f"{number:06d}",
        format=manifest.format,
        recipe=origin.recipe,
        source=source,
        meta=shard_meta(
            to=manifest.format,
            classes=manifest.classes,
            recipe=origin.recipe,
            source=manifest.source,
        ),
        software=manifest.software,
        keep=False,
    )


def _why_other(place: _Place, origin: Origin, task: ShardTask, start: int) -> str:
    """Return why a shard that was made anew is not the one that the manifest describes."""
    said = "made anew it is another file"
    changed = _changed_images(place, task, start)
    if changed:
        said += f": of {len(changed)} of its images ({_some(changed)})"
    if origin.changed_software:
        versions = ", ".join(
            f"{name} was {then} and is {now}"
            for name, (then, now) in origin.changed_software.items()
        )
        return f"{said}. It was written with other libraries: {versions}"
    return f"{said}. The source has changed since the conversion"


def _changed_images(place: _Place, task: ShardTask, start: int) -> list[str]:
    """Return the files that give other records than the index says; none if it is damaged."""
    count = len(task.source)
    try:
        (stated,) = (file for file in place.manifest.files if file.name == ROWS_NAME)
        if not has_sha256(place.folder / stated.name, stated.sha256):
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


def _rebuild_index(place: _Place, entries: Sequence[FileEntry]) -> None:
    try:
        reindex(place.folder)
    except (CorruptDataset, UsageError) as error:
        for entry in entries:
            place.fail(entry, f"it cannot be made anew yet: {error}")
        return
    place.result.files += [place.name(entry) for entry in entries]


def _rebuild_report(place: _Place, origin: Origin, entry: FileEntry, scratch: Path) -> None:
    """Make a report anew."""
    known: dict[str, Sequence[Problem]] = {
        SKIPPED: place.manifest.skipped,
        IGNORED: origin.ignored,
    }
    if entry.name not in known:
        place.fail(entry, "this version of shardkit does not know how it was made")
        return
    made = scratch / entry.name
    made.write_bytes(render_report(known[entry.name]))
    if sha256_of(made) == entry.sha256:
        place.put(made, entry)
    else:
        place.fail(entry, "what is not an image in the source has changed since the conversion")


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Give a folder to make files in, on the disk of the dataset; other writers are locked out."""
    work = _owner(directory) / WORK_NAME
    scratch = work / "repair"
    with locked(work, lambda: _manifests(directory)):
        others = {path.name for path in work.iterdir()} - {"lock", "owner", scratch.name}
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            yield scratch
        except OSError as error:
            raise as_failure(error, directory) from error
        finally:  # an unfinished conversion's work stays
            shutil.rmtree(scratch if others else work, ignore_errors=True)


def _owner(directory: Path) -> Path:
    """Return where a conversion would work that replaces ``directory``: for a split, above it."""
    parent = directory.absolute().parent
    try:
        top = load_any_manifest(parent)
    except ShardkitError:
        return directory
    is_split = isinstance(top, SplitsManifest) and directory.name in top.splits
    return parent if is_split else directory
