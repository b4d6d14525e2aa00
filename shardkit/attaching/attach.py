"""Attach archives of other programs: index them where they are, and write nothing next to them.

The dataset has the manifest, index and readers of any other one; only its shards are elsewhere. A
record has the key, label and fields that a conversion without shuffling would give it.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from shardkit._version import __version__
from shardkit.contracts import AttachableSource, Entry, Located, Range, Scan, Source
from shardkit.conversion.assemble import Assembly
from shardkit.conversion.build_all import Builder, Processes
from shardkit.conversion.engine import Work, publishing, run
from shardkit.conversion.fingerprint import COMMAND, ConversionFingerprint
from shardkit.conversion.staging import StagingDirectory, open_staging, refuse_overlap
from shardkit.conversion.task import ShardResult, Task, finish_part, new_part
from shardkit.dataset.index import Index, IndexPart, save_index
from shardkit.dataset.index_builder import ShardRecords, join_indexed
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    AttachedManifest,
    AttachedShard,
    ShardEntry,
    save_manifest,
)
from shardkit.dataset.opened import OpenedDirectory, remember
from shardkit.errors import BadImage, BadImages, ConversionFailed, Problem, UsageError, setting
from shardkit.kinds.field import describe_schema
from shardkit.options import changed, option, require_valid, takes
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import (
    LABEL,
    Record,
    dump_json,
)
from shardkit.registry import DEFAULT_ATTACHED, open_source
from shardkit.sources.webdataset import WebDatasetOptions
from shardkit.system.files import (
    as_text,
    sha256_of,
)
from shardkit.system.formatting import amount
from shardkit.system.pool import Meter, Progress
from shardkit.system.safe_paths import exists
from shardkit.system.text import printable

_READ_ROWS = 64
_READ_BYTES = 64 << 20
"""Records held in memory together, and their bytes."""

_HASHED_ROWS = 4096
"""Entries of the source hashed at a time."""

CHECKS = ("header", "decode")
"""Depths of the validation of images."""


@dataclass(frozen=True, kw_only=True)
class Attached:
    """Result of attaching archives."""

    manifest: AttachedManifest
    kept: int = 0
    """Archives whose index was kept from an earlier run."""
    unchanged: bool = False
    """Whether the directory already held the result, so nothing was written."""
    remembered: bool = True
    """Whether readers of this user follow the manifest without ``root``."""


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """Options of `attach` other than those of the source.

    Raises:
        UsageError: If one is unknown, or a folder is missing.
    """

    check: str = option("header", help="Depth of image validation.", choices=CHECKS)
    on_error: str = option(
        "fail",
        help="fail: list all findings and write nothing. skip: leave bad samples out and record "
        "each.",
        choices=("fail", "skip"),
    )
    quick: bool = option(
        False, help="Identify archives by size and modification time instead of SHA-256."
    )
    force: bool = option(False, help="Replace the dataset in INDEX_DIR and index everything again.")

    def __post_init__(self) -> None:
        require_valid(self)


@takes(WebDatasetOptions, AttachOptions, Processes)
def attach(
    own: WebDatasetOptions,
    options: AttachOptions,
    processes: Processes,
    archives: str | Path | Source,
    target: str | Path,
) -> Attached:
    """Index tar archives of samples in place, as a dataset in ``target`` that reads them there.

    Nothing is written next to the archives. Rows are in the order of the archives, as after a
    conversion without shuffling. Repeat the call to resume an interrupted one, or to add archives:
    those that have the same size and modification time as before are not read again.

    Args:
        archives: A tar file, a folder of them, or names with ``{000..999}``, ``*`` or ``?``; or an
            opened source of the kind ``ffcv``, ``hdf5``, ``litdata``, ``lmdb``, ``mds`` or ``zip``,
            which has its own options in place of ``grouping`` to ``classes``.
        target: A directory that is new, empty, or holds the result of an earlier call.

    Returns:
        The manifest of the dataset, and how much of an earlier one was kept.

    Raises:
        UsageError: If an option is invalid, archives are missing or compressed, or ``target``
            cannot be used.
        BadImages: If archives are damaged or samples are bad, and ``on_error`` is ``fail``.
        ConversionFailed: If writing fails, or an archive changes meanwhile.
    """
    source = archives
    given = changed(own)
    if isinstance(source, str | Path):
        source = open_source(DEFAULT_ATTACHED, source, **given)
    elif given:
        raise UsageError(f"{', '.join(given)}", remedy=f"give these options to the source {source}")
    return attach_source(source, target, options, processes)


def attach_source(
    source: Source, target: str | Path, options: AttachOptions, processes: Processes
) -> Attached:
    """Attach the files of a `shardkit.contracts.AttachableSource`; see `attach`.

    Raises:
        UsageError: If the source cannot be attached, or as `attach`.
    """
    if not isinstance(source, AttachableSource):
        raise UsageError(f"a source of kind {source.kind} cannot be attached", remedy="convert it")
    target = Path(target)
    old = None if options.force else _attached_before(target)
    scan = source.scan(old.classes if old else None)
    refuse_overlap(scan.source, target)
    plan = _plan(source, scan, target, options)
    if old:
        _require_same(old, plan, target)
    builder = Builder(**vars(processes))
    if builder.on_progress:
        builder.on_progress(Progress(total=sum(len(task.source) for task in plan.tasks)))
    attached = None
    with (
        open_staging(target, force=options.force or old is not None) as staging,
        publishing(staging, _fingerprint(plan), force=options.force) as is_needed,
    ):
        if is_needed:
            attached = _make(plan, staging, old, builder)
    if attached is None:  # an earlier run was killed while publishing; archives may differ since
        return attach_source(source, target, options, processes)
    return replace(attached, remembered=remember(target, attached.manifest))


@dataclass(frozen=True, kw_only=True)
class _ArchiveTask(Task):
    """One archive to index."""

    entry_type = AttachedShard

    archive: str
    """Its name in the manifest."""
    path: Path
    quick: bool

    @property
    def name(self) -> str:
        """The name of the archive."""
        return self.archive

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the images, and of what the index depends on."""
        digest = sha256(dump_json([self.name, self.meta, self.recipe.describe(), self.quick]))
        entries = self.source.entries
        for start in range(0, len(entries), _HASHED_ROWS):
            digest.update(dump_json([*entries[start : start + _HASHED_ROWS]]))
        return digest.hexdigest()

    @property
    def meta(self) -> dict[str, Any]:
        """The values on which the index depends, named as in the metadata of a shard."""
        classes = self.schema[LABEL].classes if LABEL in self.schema else None
        return {"schema": describe_schema(self.schema), "classes": classes}

    def is_current(self, entry: ShardEntry) -> bool:
        """Return whether the archive has the size and modification time of its entry."""
        return isinstance(entry, AttachedShard) and (entry.bytes, entry.modified) == _stamp(
            self.path
        )

    def is_intact(self, entry: ShardEntry) -> bool:
        """Return whether `is_current` still holds: the content is not read again."""
        return self.is_current(entry)

    def make(self) -> ShardResult:
        """Index the archive."""
        before = _stamp(self.path)
        notes: Counter[str] = Counter()
        bad: list[Problem] = []
        with new_part(self) as part:
            try:
                with ThreadPoolExecutor(1) as aside:  # hashing needs no GIL
                    digest = None if self.quick else aside.submit(sha256_of, self.path)
                    names = save_index(_index_records(self, notes, bad), part, self.schema)
            except BadImage as error:
                raise ConversionFailed(
                    f"{self.path} cannot be read: {error.problem}", remedy=error.remedy
                ) from error
            if _stamp(self.path) != before:
                raise ConversionFailed(
                    f"{self.path} changed while it was indexed;", remedy="rerun the command"
                )
            shard = AttachedShard(
                name=self.name,
                bytes=before[0],
                sha256=digest.result() if digest else "",
                rows=len(self.source) - len(bad),
                modified=before[1],
                notes=dict(sorted(notes.items())),
            )
            result = ShardResult(entry=shard, bad=bad, notes=shard.notes)
            finish_part(part, self, result, names)
        return result


@dataclass(frozen=True, kw_only=True)
class _AttachPlan:
    """All archives, and what they are made into."""

    scan: Scan
    options: AttachOptions
    recipe: Recipe
    source: dict[str, Any]
    """Description for the manifest."""
    folder: str
    """The folder of all archives, for the manifest."""
    raw_shape: tuple[int, int, int] | None
    tasks: list[_ArchiveTask]


def _attached_before(target: Path) -> AttachedManifest | None:
    """Return the manifest of an attached dataset in ``target``; None if there is none."""
    if not exists(target / MANIFEST_NAME):
        return None
    manifest = OpenedDirectory(target).manifest
    return manifest if isinstance(manifest, AttachedManifest) else None


def _plan(
    source: AttachableSource, scan: Scan, target: Path, options: AttachOptions
) -> _AttachPlan:
    if len(scan.splits) > 1:
        raise UsageError(
            f"{source} has splits ({', '.join(scan.splits)})", remedy="convert it, one dataset each"
        )
    (images,) = scan.splits.values()
    files = source.by_file(images)
    real = [os.path.realpath(path) for path, _ in files]
    folder = os.path.commonpath([os.path.dirname(path) for path in real])
    names = [as_text(os.path.relpath(path, folder)) for path in real]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"{source} names {printable(twice[0])} twice, by links to one file")
    place = folder
    if not files[0][0].is_absolute():  # as the user wrote it
        place = os.path.relpath(folder, os.path.realpath(target))
    # Raw pixels have no header to check, and stay as they are.
    recipe = Recipe(check=options.check, copy=source.raw_shape is not None)
    tasks = [
        _ArchiveTask(
            folder=target,
            path=Path(path),
            archive=name,
            source=some,
            schema=scan.schema,
            recipe=recipe,
            part=StagingDirectory(target).state / "parts" / _digest(name),
            quick=options.quick,
        )
        for path, name, (_, some) in zip(real, names, files, strict=True)
    ]
    return _AttachPlan(
        scan=scan,
        options=options,
        recipe=recipe,
        source={
            **source.describe(""),
            "kind": source.kind,
            "images": len(images),
            "limit": None,
            "order": "folder",
            "seed": None,
        },
        folder=as_text(place),
        raw_shape=source.raw_shape,
        tasks=tasks,
    )


def _option(name: str) -> str:
    """Return the name of the option for a setting in the manifest."""
    return name.replace("_dataset", "s")


def _require_same(old: AttachedManifest, plan: _AttachPlan, target: Path) -> None:
    """Refuse to update a dataset with other options, or without some of its archives."""
    then, now = ({**source, "name": 0, "images": 0} for source in (old.source, plan.source))
    differ = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    differ += ["check"] * (old.recipe != plan.recipe.describe())
    if old.shards and plan.options.quick != (not old.shards[0].sha256):
        differ.append("quick")
    if differ:
        raise UsageError(
            f"{target} holds an attached dataset, made with another {setting(_option(differ[0]))};",
            remedy=f"{setting('force', True)} replaces it",
        )
    lacking = sorted({shard.name for shard in old.shards} - {task.name for task in plan.tasks})
    if lacking:
        raise UsageError(
            f"{target} also has {amount(len(lacking), 'archive')} that you did not name, such "
            f"as {printable(lacking[0])};",
            remedy=f"name all, or use {setting('force', True)} to leave them out",
        )


def _fingerprint(plan: _AttachPlan) -> ConversionFingerprint:
    """Return what the index of each archive depends on.

    The archives themselves may change before the next run: it compares each part with them.
    """
    settings = {f"--{name}": value for name, value in asdict(plan.options).items()}
    del settings["--force"], settings["--on_error"]
    for name in plan.source.keys() - {"name", "images"}:
        settings[f"--{_option(name)}"] = plan.source[name]
    return ConversionFingerprint(
        settings={
            **settings,
            COMMAND: "attach",
            "the version of shardkit": __version__,
            "classes": plan.scan.classes and list(plan.scan.classes),
            "the folder of the archives": plan.folder,
        },
        images={},
        files={},
        on_error=plan.options.on_error,
    )


def _make(
    plan: _AttachPlan, staging: StagingDirectory, old: AttachedManifest | None, builder: Builder
) -> Attached:
    """Index the archives, and write the files of the dataset unless it has not changed."""
    (split,) = plan.scan.splits
    work = Work(
        split,
        staging.dataset,
        plan.tasks,
        problems=plan.scan.problems.get(split, ()),
        ignored=plan.scan.ignored.get(split, ()),
    )
    if old:
        _keep(work, old, staging.target)
    kept = len(work.results)
    if builder.on_progress:
        rows = sum(result.entry.rows for result in work.results.values() if result.entry)
        builder.on_progress(Progress(images=rows))
    kept += sum(built.kept for _, built in run([work], builder))
    _require_good(work, plan.options, staging)
    manifest = cast(
        AttachedManifest,
        Assembly(
            folder=staging.dataset,
            format=plan.source["kind"],
            schema=plan.scan.schema,
            raw_shape=plan.raw_shape,
            recipe=plan.recipe.describe(),
            source=plan.source,
            software={"shardkit": __version__},
            archives=plan.folder,
        ).finish([work.piece()]),
    )
    if old and manifest.digest == old.base.digest:
        staging.discard()
        return Attached(manifest=old, kept=kept, unchanged=True)
    if old and old.layers:
        staging.discard()
        raise UsageError(
            f"{staging.target} has fields that were added later, which new archives lack: attach "
            "all archives to another directory, and add the fields there"
        )
    save_manifest(manifest, staging.dataset)
    return Attached(manifest=manifest, kept=kept)


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _digest(name: str) -> str:
    return sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _keep(work: Work[_ArchiveTask], old: AttachedManifest, target: Path) -> None:
    """Add the results of archives that have not changed since the earlier dataset was made."""
    tasks = {task.name: task for task in work.tasks}
    skipped = {problem.path: problem for problem in old.skipped}
    start = 0
    for shard in old.shards:
        task = tasks[shard.name]
        rows = range(start, start + shard.rows)
        start = rows.stop
        index = Index(target, old.rows, task.schema)
        if task.is_current(shard):
            bad = [skipped[e.path] for e in task.source.entries if e.path in skipped]
            if _has_images(index, rows, task, {problem.path for problem in bad}):
                work.results[task.part] = ShardResult(entry=shard, bad=bad, notes=shard.notes)
                work.indexes[task.part] = index, rows


def _has_images(index: Index, rows: range, task: _ArchiveTask, bad: Collection[str]) -> bool:
    """Return whether rows are the images of an archive: other archives may change their keys."""
    listed = ((e.key, e.path, e.label) for e in task.source.entries if e.path not in bad)
    indexed = (
        row
        for part in index.pieces(rows)
        for row in zip(part.keys, part.paths, part.rows["label"].tolist(), strict=True)
    )
    return all(one == other for one, other in itertools.zip_longest(listed, indexed))


def _index_records(
    task: _ArchiveTask, notes: Counter[str], bad: list[Problem]
) -> Iterator[IndexPart]:
    """Yield the index of an archive in parts; count its notes and add its bad images."""
    source = cast(AttachableSource, task.source.source)
    entries = task.source.entries
    meter = Meter()
    pairs = zip(entries, source.located(task.source.split, entries), strict=True)
    for some in _batches(pairs):
        records = _Records(task.meta)
        for entry, located in some:
            try:
                if isinstance(located, BadImage):
                    raise located
                record, noted = convert_record(task.recipe, located.record, task.schema)
            except BadImage as error:
                bad.append(Problem(path=entry.path, reason=str(error)))
                continue
            notes.update(dict.fromkeys(noted, 1))
            records.add(record, located.offsets)
        with ShardRecords(records, task.path) as indexed:
            yield join_indexed([indexed.index(range(len(records)))], task.schema)
        size = sum(entry.bytes for entry, _ in some)
        meter.add(images=len(some), size=size, bad=len(some) - len(records))
    meter.flush()


def _batches(
    pairs: Iterable[tuple[Entry, Located | BadImage]],
) -> Iterator[list[tuple[Entry, Located | BadImage]]]:
    """Yield images and their records, at most `_READ_ROWS` or about `_READ_BYTES` at a time."""
    some = []
    size = 0
    for entry, located in pairs:
        some.append((entry, located))
        size += entry.bytes
        if len(some) == _READ_ROWS or size >= _READ_BYTES:
            yield some
            some = []
            size = 0
    if some:
        yield some


class _Records:
    """Records in memory as a `shardkit.contracts.ShardReader`: the index is built from readers."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self.meta = meta
        self._records: list[Record] = []
        self._ranges: list[dict[str, Range]] = []

    def add(self, record: Record, offsets: Mapping[str, int]) -> None:
        self._records.append(record)
        fields = record.fields
        ranges = {name: Range(start, len(fields[name])) for name, start in offsets.items()}
        self._ranges.append(ranges)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, rows: Sequence[int]) -> list[Record]:
        return [self._records[row] for row in rows]

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        return self._ranges

    def close(self) -> None:
        pass


def _require_good(
    work: Work[_ArchiveTask], options: AttachOptions, staging: StagingDirectory
) -> None:
    """Raise if something is wrong with an archive, and may not or cannot be left out."""
    skipped = work.skipped
    rows = sum(shard.rows for shard in work.shards)
    if not skipped or (options.on_error == "skip" and rows):
        return
    if not rows:
        staging.discard()  # other options may find samples
    count = f"{len(skipped)} finding{'s' if len(skipped) > 1 else ''}"
    remedy = (
        f"Fix the archives, or leave these out with {setting('on_error', 'skip')}"
        if rows
        else "No good sample is left: fix the archives or the options"
    )
    error = BadImages(f"{count} in the archives; no dataset was written", remedy=remedy)
    error.problems = tuple(skipped)
    raise error
