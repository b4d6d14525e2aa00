"""Attach archives of other programs: index them where they are, and write nothing next to them.

The dataset has the manifest, index and readers of any other one; only its shards are elsewhere. A
record has the key, label and fields that a conversion without shuffling would give it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from shardkit._version import __version__
from shardkit.contracts import AttachableSource, Images, Range, Scan, Source
from shardkit.conversion.assemble import file_entry, save_report
from shardkit.conversion.disk import as_failure
from shardkit.conversion.fingerprint import ConversionFingerprint
from shardkit.conversion.recipe import Recipe
from shardkit.conversion.staging import StagingDirectory, open_staging, refuse_overlap
from shardkit.conversion.trusted import Trust
from shardkit.dataset.attached import remember
from shardkit.dataset.index import Index, IndexPart, join_parts, save_index
from shardkit.dataset.index_builder import IndexedRecords, ShardRecords, join_indexed
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    AttachedManifest,
    AttachedShard,
    FieldEntry,
    load_any_manifest,
    save_manifest,
)
from shardkit.dataset.reports import IGNORED, SKIPPED
from shardkit.errors import BadImage, BadImages, ConversionFailed, Problem, UsageError
from shardkit.record import (
    ABSENT,
    IMAGE,
    LABEL,
    LABEL_FIELD,
    META_FIELD,
    STORED_KINDS,
    Record,
    Schema,
    describe_schema,
    dump_json,
    load_json,
)
from shardkit.registry import ATTACHED_SOURCE, get_source
from shardkit.system.files import (
    as_text,
    has_sha256,
    read_small,
    sha256_of,
    sync,
    write_atomically,
)
from shardkit.system.pool import Meter, Progress, Report, run_tasks
from shardkit.system.text import printable

_READ_ROWS = 64
"""Records held in memory together."""

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


def attach(  # noqa: PLR0913 - the options of the command, each with its own meaning
    archives: str | Path | Source,
    target: str | Path,
    *,
    grouping: str | None = None,
    image: str | None = None,
    label: str | None = None,
    keep: str | None = None,
    classes: str | None = None,
    check: str = "header",
    on_error: str = "fail",
    quick: bool = False,
    trust: str | None = None,
    force: bool = False,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Attached:
    """Index tar archives of samples in place, as a dataset in ``target`` that reads them there.

    Nothing is written next to the archives. Rows are in the order of the archives, as after a
    conversion without shuffling. Repeat the call to resume an interrupted one, or to add archives:
    those that have the same size and modification time as before are not read again.

    Args:
        archives: A tar file, a folder of them, or names with ``{000..999}``, ``*`` or ``?``; or an
            opened source of the kind ``hdf5`` or ``lmdb``, which has its own options in place of
            ``grouping`` to ``classes``.
        target: A directory that is new, empty, or holds the result of an earlier call.
        grouping: Rule that divides names of members: None is at the first dot; ``huggingface``;
            or ``basename``.
        image: Suffix of the image; None takes the only one of an image.
        label: Where the label is: a suffix, ``json:/PATH``, ``folder`` or ``none``.
        keep: More fields, as ``NAME=SUFFIX[:KIND][?],...``.
        classes: A text file with a class name in each line.
        check: Depth of image validation: ``header`` or ``decode``.
        on_error: ``fail`` writes nothing if anything is wrong with an archive; ``skip`` leaves bad
            samples out and records each.
        quick: Identify archives by size and modification time instead of SHA-256, which reads them
            completely.
        trust: Compare the index that ``energon``, ``dali`` or ``webshart`` has next to the archives
            with them; ``TOOL=DIR`` looks for it in DIR. Each difference is a finding.
        force: Replace any dataset in ``target``, and index everything again.
        workers: Number of processes.
        on_progress: Called with the work done since the last call.

    Returns:
        The manifest of the dataset, and how much of an earlier one was kept.

    Raises:
        UsageError: If an option is invalid, archives are missing or compressed, or ``target``
            cannot be used.
        BadImages: If archives are damaged or samples are bad, and ``on_error`` is ``fail``.
        ConversionFailed: If writing fails, or an archive changes meanwhile.
    """
    own = {"grouping": grouping, "image": image, "label": label, "keep": keep, "classes": classes}
    own = {name: value for name, value in own.items() if value is not None}
    if isinstance(archives, str | Path):
        source = get_source(ATTACHED_SOURCE).open(archives, **own)
    elif own:
        raise UsageError(f"{', '.join(own)}: give these options to the source {archives}")
    else:
        source = archives
    options = AttachOptions(check=check, on_error=on_error, quick=quick, trust=trust, force=force)
    return attach_source(source, target, options, workers=workers, on_progress=on_progress)


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """Options of `attach` other than those of the source.

    Raises:
        UsageError: If one is unknown, or a folder is missing.
    """

    check: str = "header"
    on_error: str = "fail"
    quick: bool = False
    trust: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise UsageError(f"check={self.check!r} is unknown; choose from {', '.join(CHECKS)}")
        if self.on_error not in ("fail", "skip"):
            raise UsageError(f"on_error={self.on_error!r} is neither 'fail' nor 'skip'")
        if self.trust:
            Trust.parse(self.trust)


def attach_source(
    source: Any,
    target: str | Path,
    options: AttachOptions,
    *,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Attached:
    """Attach the files of a `shardkit.contracts.AttachableSource`; see `attach`.

    Raises:
        UsageError: If the source cannot be attached, or as `attach`.
    """
    if not hasattr(source, "located"):
        raise UsageError(f"a source of kind {source.kind} cannot be attached: convert it")
    if options.trust and source.kind != ATTACHED_SOURCE:
        raise UsageError(f"a source of kind {source.kind} has no indexes to compare: omit trust")
    target = Path(target)
    old = None if options.force else _attached_before(target)
    scan = source.scan(old.classes if old else None)
    refuse_overlap(scan.source, target)
    work = _plan(source, scan, target, options)
    if old:
        _require_same(old, work, target)
    if options.trust:
        (images,) = scan.splits.values()
        archives = [path for path, _ in source.by_file(images)]
        found = Trust.parse(options.trust).compare(archives, workers=workers)
        scan.problems.setdefault("", []).extend(found)
    if on_progress:
        on_progress(Progress(total=sum(len(task.images) for task in work.tasks)))
    with open_staging(target, force=options.force or old is not None) as staging:
        try:
            staging.start(work.fingerprint(), force=options.force)
            if staging.is_ready:
                staging.publish()
                made = None
            else:
                made = _carry_out(work, staging, old, workers, on_progress)
        except OSError as error:
            raise as_failure(error, target) from error
    if made is None:  # an earlier run was killed while publishing; archives may differ since
        return attach_source(source, target, options, workers=workers, on_progress=on_progress)
    return replace(made, remembered=remember(target, made.manifest))


@dataclass(frozen=True, kw_only=True)
class _ArchiveTask:
    """One archive to index, with everything that a worker process needs."""

    path: Path
    name: str
    """Its name in the manifest."""
    images: Images
    schema: Schema
    recipe: Recipe
    part: Path
    """Folder for the archive's part of the index."""
    quick: bool

    @property
    def meta(self) -> dict[str, Any]:
        """What the index depends on, as the metadata of a shard state it."""
        classes = self.schema[LABEL].classes if LABEL in self.schema else None
        return {"schema": describe_schema(self.schema), "classes": classes}


@dataclass(frozen=True, kw_only=True)
class _Work:
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

    def fingerprint(self) -> ConversionFingerprint:
        """Return what the index of each archive depends on.

        The archives themselves may change before the next run: it compares each part with them.
        """
        settings = {f"--{name}": value for name, value in asdict(self.options).items()}
        del settings["--force"], settings["--on_error"], settings["--trust"]
        for name in self.source.keys() - {"name", "images"}:
            settings[_flag(name)] = self.source[name]
        return ConversionFingerprint(
            settings={
                **settings,
                "the version of shardkit": __version__,
                "classes": self.scan.classes and list(self.scan.classes),
                "the folder of the archives": self.folder,
            },
            images={},
            files={},
            on_error=self.options.on_error,
        )


class _Indexed(NamedTuple):
    """One indexed archive."""

    shard: AttachedShard
    part: IndexPart
    bad: list[Problem]


def _attached_before(target: Path) -> AttachedManifest | None:
    """Return the manifest of an attached dataset in ``target``; None if there is none."""
    if not os.path.lexists(target / MANIFEST_NAME):
        return None
    manifest = load_any_manifest(target)
    return manifest if isinstance(manifest, AttachedManifest) else None


def _plan(source: AttachableSource, scan: Scan, target: Path, options: AttachOptions) -> _Work:
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
            path=Path(path),
            name=name,
            images=some,
            schema=scan.schema,
            recipe=recipe,
            part=StagingDirectory(target).state / "parts" / _digest(name),
            quick=options.quick,
        )
        for path, name, (_, some) in zip(real, names, files, strict=True)
    ]
    return _Work(
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


def _flag(name: str) -> str:
    """Return the option for a setting in the manifest."""
    return f"--{name.replace('_dataset', 's')}"


def _require_same(old: AttachedManifest, work: _Work, target: Path) -> None:
    """Refuse to update a dataset with other options, or without some of its archives."""
    then, now = ({**source, "name": 0, "images": 0} for source in (old.source, work.source))
    differ = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    differ += ["check"] * (old.recipe != work.recipe.describe())
    if old.shards and work.options.quick != (not old.shards[0].sha256):
        differ.append("quick")
    if differ:
        raise UsageError(
            f"{target} holds an attached dataset, made with another {_flag(differ[0])}; --force "
            "replaces it"
        )
    lacking = sorted({shard.name for shard in old.shards} - {task.name for task in work.tasks})
    if lacking:
        raise UsageError(
            f"{target} also has {len(lacking)} archives that you did not name, such as "
            f"{printable(lacking[0])}; name all, or use --force to leave them out"
        )


def _carry_out(
    work: _Work,
    staging: StagingDirectory,
    old: AttachedManifest | None,
    workers: int,
    report: Report | None,
) -> Attached:
    found = _from_old(work, old, staging.target) if old else {}
    for task in work.tasks:
        if task.name not in found and (done := _load(task)):
            found[task.name] = done
    kept = len(found)
    if report:
        report(Progress(images=sum(len(each.part.keys) for each in found.values())))
    left = [task for task in work.tasks if task.name not in found]
    for task, shard_and_bad in run_tasks(_index, left, workers=workers, on_progress=report):
        part = Index(task.part, shard_and_bad[0].rows).part(task.schema)
        found[task.name] = _Indexed(shard_and_bad[0], part, shard_and_bad[1])
    manifest = _finish(work, [found[task.name] for task in work.tasks], staging)
    if old and manifest.digest == old.digest:
        staging.discard()
        return Attached(manifest=old, kept=kept, unchanged=True)
    save_manifest(manifest, staging.dataset)
    staging.publish()
    return Attached(manifest=manifest, kept=kept)


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _from_old(work: _Work, old: AttachedManifest, target: Path) -> dict[str, _Indexed]:
    """Return the parts of the earlier dataset whose archives have not changed, by name."""
    tasks = {task.name: task for task in work.tasks}
    left_out = {problem.path: problem for problem in old.skipped}
    index = Index(target, old.rows)
    found = {}
    start = 0
    for shard in old.shards:
        task, rows = tasks[shard.name], slice(start, start + shard.rows)
        start += shard.rows
        if (shard.bytes, shard.modified) == _stamp(task.path):
            part = index.part(task.schema, rows)
            bad = [left_out[e.path] for e in task.images.entries if e.path in left_out]
            if _fits(part, bad, task):
                found[shard.name] = _Indexed(shard, part, bad)
    return found


def _load(task: _ArchiveTask) -> _Indexed | None:
    """Return the result of an interrupted run, if its files are intact."""
    try:
        value = load_json(read_small(task.part / "result.json"))
        if not all(has_sha256(task.part / name, sha) for name, sha in value["part"].items()):
            return None
        shard, bad = AttachedShard(**value["shard"]), [Problem(**each) for each in value["bad"]]
        part = Index(task.part, shard.rows).part(task.schema)
        same = shard.name == task.name and (shard.bytes, shard.modified) == _stamp(task.path)
        return _Indexed(shard, part, bad) if same and _fits(part, bad, task) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _fits(part: IndexPart, bad: list[Problem], task: _ArchiveTask) -> bool:
    """Return whether a part has the records of an archive: other archives may change their keys."""
    left_out = {problem.path for problem in bad}
    listed = [(e.key, e.path, e.label) for e in task.images.entries if e.path not in left_out]
    return listed == [*zip(part.keys, part.paths, part.rows["label"].tolist(), strict=True)]


def _index(task: _ArchiveTask) -> tuple[AttachedShard, list[Problem]]:
    """Index an archive; save the index, then the result, which marks it as done."""
    before = _stamp(task.path)
    notes: Counter[str] = Counter()
    bad: list[Problem] = []
    try:
        with ThreadPoolExecutor(1) as aside:  # hashing needs no GIL
            sha256 = None if task.quick else aside.submit(sha256_of, task.path)
            part = _index_records(task, notes, bad)
    except BadImage as error:
        raise ConversionFailed(f"{task.path} cannot be read: {error}") from error
    if _stamp(task.path) != before:
        raise ConversionFailed(f"{task.path} changed while it was indexed; rerun the command")
    shard = AttachedShard(
        name=task.name,
        bytes=before[0],
        sha256=sha256.result() if sha256 else "",
        rows=len(part.keys),
        modified=before[1],
        notes=dict(sorted(notes.items())),
    )
    task.part.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name in save_index([part], task.part, task.schema):
        sync(task.part / name)
        digests[name] = sha256_of(task.part / name, task.part)
    value = {"shard": asdict(shard), "part": digests, "bad": [asdict(each) for each in bad]}
    write_atomically(task.part / "result.json", dump_json(value))
    return shard, bad


def _index_records(task: _ArchiveTask, notes: Counter[str], bad: list[Problem]) -> IndexPart:
    source, entries = cast(AttachableSource, task.images.source), list(task.images.entries)
    found: list[IndexedRecords] = []
    meter = Meter()
    pairs = zip(entries, source.located(task.images.split, entries), strict=True)
    while some := list(itertools.islice(pairs, _READ_ROWS)):
        records = _Records(task.meta)
        for entry, located in some:
            try:
                if isinstance(located, BadImage):
                    raise located
                record, noted = task.recipe.apply_with_notes(located.record, task.schema)
            except BadImage as error:
                bad.append(Problem(path=entry.path, reason=str(error)))
                continue
            notes.update(dict.fromkeys(noted, 1))
            records.add(record, located.offsets)
        with closing(ShardRecords(records, task.path)) as indexed:
            found.append(indexed.index(range(len(records))))
        size = sum(entry.bytes for entry, _ in some)
        meter.add(images=len(some), size=size, bad=len(some) - len(records))
    meter.flush()
    return join_indexed(found, task.schema)


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


def _finish(work: _Work, found: list[_Indexed], staging: StagingDirectory) -> AttachedManifest:
    """Write index and reports, and return the manifest.

    Raises:
        BadImages: If something is wrong with an archive, and may not or cannot be left out.
    """
    (split,) = work.scan.splits
    schema = work.scan.schema
    skipped = [*work.scan.problems.get(split, ()), *(bad for each in found for bad in each.bad)]
    skipped.sort(key=lambda problem: problem.path)
    rows = sum(each.shard.rows for each in found)
    if skipped and (work.options.on_error == "fail" or not rows):
        if not rows:
            staging.discard()  # other options may find samples
        count = f"{len(skipped)} finding{'s' if len(skipped) > 1 else ''}"
        remedy = (
            "Fix the archives, or leave these out with --on-error skip"
            if rows
            else "No good sample is left: fix the archives or the options"
        )
        error = BadImages(f"{count} in the archives; no dataset was written. {remedy}")
        error.problems = tuple(skipped)
        raise error
    ignored = work.scan.ignored.get(split, [])
    index = join_parts([each.part for each in found], schema)
    counts = index.counts(schema)
    folder = staging.dataset
    names = [
        *save_index([index], folder, schema),
        *save_report(SKIPPED, skipped, folder),
        *save_report(IGNORED, ignored, folder),
    ]
    labels = Counter(index.rows["label"].tolist())
    classes = work.scan.classes
    notes: Counter[str] = Counter()
    for each in found:
        notes.update(each.shard.notes)
    return AttachedManifest(
        format=work.source["kind"],
        rows=rows,
        shards=tuple(each.shard for each in found),
        files=tuple(file_entry(name, folder) for name in names),
        fields=_stored_names(index, schema),
        schema=tuple(FieldEntry.of(name, field, counts[name]) for name, field in schema.items()),
        classes=classes,
        class_counts=None if classes is None else tuple(labels[n] for n in range(len(classes))),
        raw_shape=work.raw_shape,
        recipe=work.recipe.describe(),
        source=work.source,
        notes=dict(sorted(notes.items())),
        skipped=tuple(skipped),
        ignored=dict(sorted(Counter(problem.reason for problem in ignored).items())),
        software={"shardkit": __version__},
        content_digest=Index(folder, rows).content_digest(
            schema, {name for name in schema if counts[name] < rows}
        ),
        folder=work.folder,
    )


def _stored_names(index: IndexPart, schema: Schema) -> dict[str, int]:
    """Return the number of records with each stored name, as a conversion would count them."""
    found = {META_FIELD: len(index.keys)}
    counts = index.counts(schema)
    for name, kind in schema.items():
        stored = kind.stored_name(name)
        if stored is not None:
            found[LABEL_FIELD if name == LABEL else stored] = counts[name]
        elif kind.kind in ("image", "mask"):
            entries = index.rows if name == IMAGE else index.apart[name]
            for code, count in enumerate(np.bincount(entries["field"]).tolist()):
                if count and STORED_KINDS[code] != ABSENT:
                    before = "" if name == IMAGE else f"{name}."
                    found[before + STORED_KINDS[code]] = count
    return {name: count for name, count in sorted(found.items()) if count}
