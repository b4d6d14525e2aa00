"""Rebuild damaged and missing files of a dataset from its source, byte for byte."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.conversion.build import ShardTask
from shardkit.conversion.staging import scratch_folder
from shardkit.conversion.task import carry_out, load_segment
from shardkit.dataset.manifest import FileEntry, ShardEntry
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.dataset.reports import IGNORED, SKIPPED, render_report
from shardkit.errors import CorruptDataset, Problem, UsageError
from shardkit.system.files import has_sha256, move_into, sha256_of
from shardkit.system.pool import Meter, Progress, Report, run_tasks
from shardkit.verification.findings import Finding
from shardkit.verification.named_sources import Sources
from shardkit.verification.reindex import rebuild_index
from shardkit.verification.source_match import SourceMatch, match_rows

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
        source: The folder, or the Python samples, that the dataset was created from; or a list of
            these, one per part, if it was merged or appended to, unless all parts have the same
            source.
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
    with scratch_folder(directory, lambda: _opened(directory)) as scratch:
        opened = _opened(directory)
        damaged = _find_damage(opened.stores, result, workers, on_progress)
        sources = Sources(opened.splits, source)
        for store, entries in damaged:  # first the rows that others are matched with
            _Repair(store, entries, result, scratch, workers, on_progress).run(sources.of(store))
    result.files.sort()
    result.findings.sort(key=lambda finding: finding.file)
    return result


def _opened(directory: Path) -> OpenedDirectory:
    """Return the dataset, or those of all splits."""
    return OpenedDirectory(directory).with_own_shards(
        f"{directory} is attached: shardkit did not write its files. Restore them from a "
        "copy; `shardkit attach --force` rebuilds the index"
    )


class _HashTask(NamedTuple):
    directory: Path
    prefix: str
    entry: FileEntry


def _is_intact(task: _HashTask) -> bool | Finding:
    """Return whether a file has its digest in the manifest, or that it cannot be read."""
    entry = task.entry
    meter = Meter()
    meter.add(images=entry.rows if isinstance(entry, ShardEntry) else 0, size=entry.bytes)
    meter.flush()
    try:
        return has_sha256(task.directory / entry.name, entry.sha256, task.directory)
    except OSError as error:
        finding = Finding.of_error(task.prefix + entry.name, error)
        more = "If that also fails, move the file away and run `shardkit repair` to rebuild it"
        return replace(finding, reason=f"{finding.reason}. {more}")


def _find_damage(
    stores: Sequence[OpenedDataset],
    result: Repaired,
    workers: int,
    on_progress: Report | None,
) -> list[tuple[OpenedDataset, list[FileEntry]]]:
    """Return the files of each store whose digest differs from the manifest, if there are any."""
    tasks = [
        _HashTask(store.path, store.prefix, entry)
        for store in stores
        for entry in store.manifest.entries
    ]
    if on_progress:
        rows = sum(entry.rows for store in stores for entry in store.manifest.shards)
        on_progress(Progress(total=rows))
    damaged: dict[str, list[FileEntry]] = {}
    for task, intact in run_tasks(_is_intact, tasks, workers=workers, on_progress=on_progress):
        if isinstance(intact, Finding):
            result.findings.append(intact)
        elif intact:
            result.intact += 1
        else:
            damaged.setdefault(task.prefix, []).append(task.entry)
    return [(store, damaged[store.prefix]) for store in stores if store.prefix in damaged]


@dataclass(frozen=True)
class _Repair:
    """The repair of one store."""

    store: OpenedDataset
    damaged: Sequence[FileEntry]
    result: Repaired
    scratch: Path
    workers: int
    on_progress: Report | None

    def run(self, matches: Sequence[SourceMatch]) -> None:
        """Rebuild damaged files: shards, then the index from the shards, then reports."""
        shards = {entry.name: entry for entry in self.damaged if isinstance(entry, ShardEntry)}
        for match in matches:
            if any(shard.name in shards for shard in match.part.manifest.shards):
                self._rebuild_shards(match, shards.keys())
        if not matches:
            manifest = self.store.manifest
            held = f"{', '.join(manifest.fields_by_name)} from {manifest.source.get('name')}"
            for shard in shards.values():
                self._fail(shard, f"it contains {held}: pass that source, too")
        if self._index:
            self._rebuild_index(self._index)
        for entry in self.damaged:
            if not isinstance(entry, ShardEntry) and not entry.is_of_index:
                self._rebuild_report(matches, entry)

    @property
    def _index(self) -> list[FileEntry]:
        """The damaged files of the index."""
        return [entry for entry in self.damaged if entry.is_of_index]

    def _rebuild_shards(self, match: SourceMatch, damaged: Collection[str]) -> None:
        part = match.part
        tasks = list(self._tasks(match, damaged))
        for task, built in run_tasks(
            carry_out, tasks, workers=self.workers, on_progress=self.on_progress
        ):
            shard = part.manifest.shards[task.number - part.first]
            if built.result.bad:
                problem = built.result.bad[0]
                reason = f"a file of the source is bad: {problem.path}: {problem.reason}"
                self._fail(shard, reason)
            elif built.result.entry is None or built.result.entry.sha256 != shard.sha256:
                self._fail(shard, self._why_other(match, task))
            else:
                self._put(task.path, shard)

    def _tasks(self, match: SourceMatch, damaged: Collection[str]) -> Iterator[ShardTask]:
        """Yield the tasks that rebuild the damaged shards whose files are all there."""
        manifest = match.part.manifest
        split = self.store.split
        rows, differences = match_rows(match)
        changed = match.changed & manifest.fields_by_name.keys()
        stop = 0
        for number, shard in enumerate(manifest.shards, match.part.first):
            span = slice(stop, stop := stop + shard.rows)
            if shard.name not in damaged:
                continue
            images = [entry for entry in rows[span] if entry is not None]
            if changed:
                self._fail(
                    shard,
                    f"it holds {', '.join(sorted(changed))}, changed after the conversion: name "
                    "the dataset that it was copied from",
                )
            elif len(images) == shard.rows:
                if match.keys:
                    keyed = zip(images, match.keys[span], strict=True)
                    images = [entry._replace(key=key) for entry, key in keyed]
                yield ShardTask(
                    split=split,
                    number=number,
                    folder=self.scratch,
                    result_folder=self.scratch / "parts" / split / f"{number:06d}",
                    format=manifest.format,
                    recipe=match.recipe,
                    schema=manifest.fields_by_name,
                    source=match.images.of(images),
                    meta=match.part.meta,
                    software=manifest.software,
                    keep=False,
                )
            elif rows and match.stored:
                pairs = zip(rows[span], match.stored[span], strict=True)
                missing = [path for entry, path in pairs if entry is None]
                names = _some_of(missing)
                self._fail(shard, f"the source lacks {len(missing)} of its files ({names})")
            else:
                self._fail(shard, differences[0].reason)

    def _why_other(self, match: SourceMatch, task: ShardTask) -> str:
        """Return why a rebuilt shard differs from the manifest."""
        reason = "the rebuilt file differs"
        changed = self._changed_images(match, task)
        if changed:
            reason += f" in {len(changed)} of its images ({_some_of(changed)})"
        if match.changed_software:
            versions = ", ".join(
                f"{name} was {then} and is now {now}"
                for name, (then, now) in match.changed_software.items()
            )
            return f"{reason}. It was written with other library versions: {versions}"
        return f"{reason}. The source has changed since the conversion"

    def _changed_images(self, match: SourceMatch, task: ShardTask) -> list[str]:
        """Return the files whose records differ from the index; empty if the index is damaged."""
        if self._index:
            return []
        part = match.part
        count = len(task.source)
        before = part.manifest.shards[: task.number - part.first]
        start = part.start + sum(shard.rows for shard in before)
        try:
            old = self.store.index.rows()[start : start + count]
            new = load_segment(task, count)
        except (CorruptDataset, ValueError):
            return []
        return [
            path
            for path, new_row, old_row in zip(new.paths, new.rows, old, strict=True)
            if new_row["checksum"] != old_row["checksum"]
        ]

    def _rebuild_index(self, entries: Sequence[FileEntry]) -> None:
        try:
            rebuild_index(self.store, self.scratch)
        except (CorruptDataset, UsageError) as error:
            for entry in entries:
                self._fail(entry, f"it cannot be rebuilt yet: {error}")
            return
        self.result.files += [self._name(entry) for entry in entries]

    def _rebuild_report(self, matches: Sequence[SourceMatch], entry: FileEntry) -> None:
        problems: dict[str, Sequence[Problem]] = {
            SKIPPED: self.store.manifest.skipped,
            IGNORED: [problem for match in matches for problem in match.ignored],
        }
        if entry.name not in problems:
            self._fail(entry, "this version of shardkit cannot rebuild it")
            return
        path = self.scratch / entry.name
        path.write_bytes(render_report(problems[entry.name]))
        if sha256_of(path) == entry.sha256:
            self._put(path, entry)
        else:
            self._fail(entry, "the source's other files have changed since the conversion")

    def _put(self, rebuilt: Path, entry: FileEntry) -> None:
        """Move a rebuilt shard or report into place."""
        target = self.store.path / entry.name
        if target.is_dir() and not target.is_symlink():
            self._fail(entry, f"it is a folder, not a file; remove {target}")
            return
        move_into(rebuilt, self.store.path, entry.name)
        self.result.files.append(self._name(entry))

    def _fail(self, entry: FileEntry, reason: str) -> None:
        self.result.findings.append(Finding(file=self._name(entry), reason=reason))

    def _name(self, entry: FileEntry) -> str:
        return self.store.prefix + entry.name


def _some_of(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_NAMED]) + (" ..." if len(paths) > _NAMED else "")
