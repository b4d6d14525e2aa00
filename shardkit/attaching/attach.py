"""Attach archives from other programs: index them where they are, and write nothing next to them.

The dataset has the manifest, index and readers of any other one; only its shards are elsewhere. A
record has the key, label and fields that a conversion without shuffling would give it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardkit._version import __version__
from shardkit.attaching.permission import remember
from shardkit.attaching.tasks import ArchiveTask, FolderTask, IndexTask, by_folder
from shardkit.contracts import AttachableSource, Entry, Images, Scan, Source
from shardkit.conversion.assemble import Assembly, save_manifests
from shardkit.conversion.build_all import Builder, Processes
from shardkit.conversion.engine import Work, run
from shardkit.conversion.fingerprint import COMMAND, ConversionFingerprint
from shardkit.conversion.staging import StagingDirectory, open_staging, refuse_overlap
from shardkit.conversion.task import ShardResult
from shardkit.dataset.index import TIMES, Index
from shardkit.dataset.manifest import MANIFEST_NAME, AttachedManifest
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import BadImages, Problem, ShardkitError, UsageError, setting
from shardkit.options import changed, option, require_valid, takes
from shardkit.recipe import Recipe
from shardkit.registry import DEFAULT_ATTACHED, get_source, is_source, open_source
from shardkit.sources.together import Together
from shardkit.sources.webdataset import WebDatasetOptions
from shardkit.system.files import as_name, as_text
from shardkit.system.npy import save_npy
from shardkit.system.pool import Progress
from shardkit.system.safe_paths import exists
from shardkit.system.text import amount, name_list, printable

CHECKS = ("header", "decode")
"""Depths of the validation of images."""


@dataclass(frozen=True, kw_only=True)
class Attached:
    """Result of attaching archives."""

    manifests: dict[str, AttachedManifest]
    """Split name, or "" without splits, to the manifest of its dataset."""
    kept: int = 0
    """Number of archives or class folders whose index was kept from an earlier run."""
    unchanged: bool = False
    """Whether the directory already contained the result, so nothing was written."""
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
    source_options: WebDatasetOptions,
    options: AttachOptions,
    processes: Processes,
    archives: str | Path | Source,
    target: str | Path,
) -> Attached:
    """Index tar archives of samples where they are, as a dataset in ``target``.

    Nothing is written next to the archives. Rows are in the order of the archives, as after a
    conversion without shuffling. Repeat the call to resume an interrupted one, or to add archives.
    Archives with the same size and modification time as before are not read again.

    Args:
        archives: A tar file, a folder of them, or a pattern with ``{000..999}``, ``*`` or ``?``; or
            an opened source of kind ``ffcv``, ``hdf5``, ``litdata``, ``lmdb``, ``mds`` or ``zip``,
            which has its own options instead of ``grouping`` to ``classes``.
        target: A directory that is new, is empty, or contains the result of an earlier call.

    Returns:
        The manifest of the dataset, and how much of an earlier one was kept.

    Raises:
        UsageError: If an option is invalid, archives are missing or compressed, or ``target``
            cannot be used.
        BadImages: If archives are damaged or samples are bad, and ``on_error`` is ``fail``.
        ConversionFailed: If writing fails, or an archive changes meanwhile.
    """
    source = archives
    names = changed(source_options)
    if isinstance(source, str | Path):
        source = open_source(DEFAULT_ATTACHED, source, **names)
    elif names:
        raise UsageError(f"{', '.join(names)}", remedy=f"set these options in the source {source}")
    loose = _has_whole_files(source)
    if not (loose or isinstance(source, AttachableSource)):
        if isinstance(source, Together) and get_source(source.kind).attaching:
            raise UsageError(
                f"{source} has splits ({name_list(source.members)})",
                remedy=f"convert it, or choose the images of one split with {setting('image')}",
            )
        raise UsageError(f"a source of kind {source.kind} cannot be attached", remedy="convert it")
    target = Path(target)
    old = {} if options.force else _attached_before(target)
    labels = None if loose else next((manifest.classes for manifest in old.values()), None)
    scan = source.scan(labels)
    refuse_overlap(scan.source, target)
    plan = _plan(source, scan, target, options, loose=loose)
    for name in plan.splits.keys() & old.keys():
        _require_same(old[name], plan, name, target)
    builder = Builder(**vars(processes))
    builder.expect(sum(map(len, scan.splits.values())))
    attached = None
    with (
        open_staging(target, force=options.force or bool(old)) as staging,
        staging.publishing(_fingerprint(plan), force=options.force) as is_needed,
    ):
        if is_needed:
            attached = _make(plan, staging, old, builder)
    if attached is None:  # an earlier run was killed while publishing; archives may differ since
        return attach(source, target, **vars(options), **vars(processes))
    marks = [
        remember(target / as_name(name), manifest) for name, manifest in attached.manifests.items()
    ]
    return replace(attached, remembered=all(marks))


def is_current(source: Source, scan: Scan, target: Path) -> bool:
    """Return whether a directory holds what `attach` would make of a folder of files."""
    try:
        old = _attached_before(target)
    except ShardkitError:
        return False
    plan = _plan(source, scan, target, AttachOptions(), loose=True)
    if list(old) != list(plan.splits):
        return False
    for name, split in plan.splits.items():
        work = Work(name, target / as_name(name), split.tasks)
        manifest = old[name]
        _keep(work, manifest, work.folder)
        same = (manifest.classes, manifest.source, manifest.recipe, manifest.software) == (
            scan.classes,
            split.source,
            plan.recipe.describe(),
            {"shardkit": __version__},
        )
        if not same or not len(split.tasks) == len(manifest.shards) == len(work.results):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class _SplitPlan:
    """The archives of a split, or of all if there are no splits."""

    source: dict[str, Any]
    """Description for the manifest."""
    folder: str
    """The folder of all archives, for the manifest."""
    tasks: Sequence[IndexTask]


@dataclass(frozen=True, kw_only=True)
class _AttachPlan:
    """All archives, and what they are made into."""

    scan: Scan
    options: AttachOptions
    recipe: Recipe
    raw_shape: tuple[int, int, int] | None
    loose: bool
    """Whether the archives are folders of files."""
    splits: dict[str, _SplitPlan] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        """The noun for inputs in messages."""
        return "files" if self.loose else "archives"


def _attached_before(target: Path) -> dict[str, AttachedManifest]:
    """Return the manifest of each split of an attached dataset in ``target``, if there is one."""
    if not exists(target / MANIFEST_NAME):
        return {}
    manifests = OpenedDirectory(target).manifests()
    attached = {
        n: manifest for n, manifest in manifests.items() if isinstance(manifest, AttachedManifest)
    }
    return attached if len(attached) == len(manifests) else {}


def _has_whole_files(source: Source) -> bool:
    """Return whether each image is a file of its own, on this machine."""
    attaching = get_source(source.kind).attaching if is_source(source.kind) else None
    if attaching is None or not attaching.whole_files:
        return False
    if not source.paths():
        raise UsageError(f"{source} is in an object store", remedy="convert it")
    return True


def _plan(
    source: Source, scan: Scan, target: Path, options: AttachOptions, *, loose: bool
) -> _AttachPlan:
    if len(scan.splits) > 1 and not loose:
        raise UsageError(
            f"{source} has splits ({', '.join(scan.splits)})",
            remedy="convert it, which creates a dataset for each",
        )
    if options.quick and loose:
        raise UsageError(
            f"{setting('quick', True)} is only for archives",
            remedy="leave it out",
        )
    # Raw pixels have no header to check, and stay as they are.
    raw_shape = source.raw_shape if isinstance(source, AttachableSource) else None
    recipe = Recipe(check=options.check, copy=raw_shape is not None)
    plan = _AttachPlan(scan=scan, options=options, recipe=recipe, raw_shape=raw_shape, loose=loose)
    for name, images in scan.splits.items():
        results = StagingDirectory(target).state / "parts" / as_name(name)
        if isinstance(source, AttachableSource):
            folder, relative, tasks = _archive_tasks(source, images, target, plan, results)
        else:
            folder, relative, tasks = _folder_tasks(source, images, target, plan, results)
        if relative:  # as the user wrote it
            folder = os.path.relpath(folder, os.path.realpath(target / as_name(name)))
        origin = {"kind": source.kind, "images": len(images), "order": "folder"}
        plan.splits[name] = _SplitPlan(
            source={**source.describe(name), **origin, "limit": None, "seed": None},
            folder=as_text(folder),
            tasks=tasks,
        )
    return plan


def _archive_tasks(
    source: AttachableSource, images: Images, target: Path, plan: _AttachPlan, results: Path
) -> tuple[str, bool, list[IndexTask]]:
    """Return the folder of all archives, whether it was given as relative, and their tasks."""
    files = source.by_file(images)
    real = [os.path.realpath(path) for path, _ in files]
    folder = os.path.commonpath([os.path.dirname(path) for path in real])
    names = [as_text(os.path.relpath(path, folder)) for path in real]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(
            f"{source} lists {printable(twice[0])} twice, through links to the same file"
        )
    archives = zip(names, map(Path, real), (entries for _, entries in files), strict=True)
    tasks = _index_tasks(ArchiveTask, archives, target, plan, results)
    return folder, not files[0][0].is_absolute(), tasks


def _folder_tasks(
    source: Source, images: Images, target: Path, plan: _AttachPlan, results: Path
) -> tuple[str, bool, list[IndexTask]]:
    """Return the folder of all files, whether it was given as relative, and a task per class."""
    root = source.locate(images.split, Entry("", "", 0, 0, 0))
    folder = os.path.realpath(root)
    folders = ((name, Path(folder), members) for name, members in by_folder(images).items())
    tasks = _index_tasks(FolderTask, folders, target, plan, results)
    return folder, not os.path.isabs(root), tasks


def _index_tasks(
    task: type[IndexTask],
    archives: Iterable[tuple[str, Path, Images]],
    target: Path,
    plan: _AttachPlan,
    results: Path,
) -> list[IndexTask]:
    """Return a task for each archive or class folder, given its name, path and images."""
    return [
        task(
            folder=target,
            path=path,
            archive=name,
            source=images,
            schema=plan.scan.schema,
            recipe=plan.recipe,
            result_folder=results / _digest(name),
            quick=plan.options.quick,
        )
        for name, path, images in archives
    ]


def _option(name: str) -> str:
    """Return the name of the option for a setting in the manifest."""
    return name.replace("_dataset", "s")


def _require_same(old: AttachedManifest, plan: _AttachPlan, name: str, target: Path) -> None:
    """Refuse to update a dataset with other options, or without some of its archives."""
    new = plan.splits[name]
    then, now = ({**source, "name": 0, "images": 0} for source in (old.source, new.source))
    differ = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    differ += ["check"] * (old.recipe != plan.recipe.describe())
    if old.shards and not plan.loose and plan.options.quick != (not old.shards[0].sha256):
        differ.append("quick")
    if differ:
        raise UsageError(
            f"{target} contains an attached dataset that was created with a different "
            f"{setting(_option(differ[0]))};",
            remedy=f"{setting('force', True)} replaces it",
        )
    lacking = sorted({shard.name for shard in old.shards} - {task.name for task in new.tasks})
    if lacking and not plan.loose:
        raise UsageError(
            f"{target} also indexes {amount(len(lacking), 'archive')} that you did not list, such "
            f"as {printable(lacking[0])};",
            remedy=f"list all archives, or use {setting('force', True)} to leave these out",
        )


def _fingerprint(plan: _AttachPlan) -> ConversionFingerprint:
    """Return what the index of each archive depends on.

    The archives themselves may change before the next run: it compares the index with them.
    """
    settings = {f"--{name}": value for name, value in asdict(plan.options).items()}
    del settings["--force"], settings["--on_error"]
    for split in plan.splits.values():
        for name in split.source.keys() - {"name", "images"}:
            settings[f"--{_option(name)}"] = split.source[name]
    return ConversionFingerprint(
        settings={
            **settings,
            COMMAND: "attach",
            "the version of shardkit": __version__,
            "classes": plan.scan.classes and list(plan.scan.classes),
            "the folder of the archives": [split.folder for split in plan.splits.values()],
        },
        on_error=plan.options.on_error,
    )


def _make(
    plan: _AttachPlan,
    staging: StagingDirectory,
    old: Mapping[str, AttachedManifest],
    builder: Builder,
) -> Attached:
    """Index the archives, and write the files of the dataset unless it has not changed."""
    works = {}
    for name, split in plan.splits.items():
        works[name] = work = Work(
            name,
            staging.dataset / as_name(name),
            split.tasks,
            problems=plan.scan.problems.get(name, ()),
            ignored=plan.scan.ignored.get(name, ()),
        )
        if name in old:
            _keep(work, old[name], staging.target / as_name(name))
    results = [result for work in works.values() for result in work.results.values()]
    kept = len(results)
    if builder.on_progress:
        rows = sum(result.entry.rows for result in results if result.entry)
        builder.on_progress(Progress(images=rows))
    kept += sum(built.kept for _, built in run([*works.values()], builder))
    _require_good(works, plan, staging)
    manifests = {name: _finish(work, plan) for name, work in works.items()}
    if {name: manifest.digest for name, manifest in manifests.items()} == {
        name: manifest.base.digest for name, manifest in old.items()
    }:
        staging.discard()
        return Attached(manifests=dict(old), kept=kept, unchanged=True)
    if any(manifest.layers for manifest in old.values()):
        staging.discard()
        raise UsageError(
            f"{staging.target} has fields that were added later and that new {plan.noun} lack: "
            f"attach all {plan.noun} in another directory, and add the fields there"
        )
    save_manifests(manifests, staging.dataset)
    return Attached(manifests=manifests, kept=kept)


def _finish(work: Work[IndexTask], plan: _AttachPlan) -> AttachedManifest:
    """Write the files of a split's dataset but the manifest, and return that."""
    split = plan.splits[work.split]
    (work.folder / TIMES).parent.mkdir(parents=True, exist_ok=True)
    if plan.loose:
        save_npy(work.folder / TIMES, np.fromiter(_times(work), np.int64))
    assembly = Assembly(
        folder=work.folder,
        format=split.source["kind"],
        schema=plan.scan.schema,
        raw_shape=plan.raw_shape,
        recipe=plan.recipe.describe(),
        source=split.source,
        software={"shardkit": __version__},
        archives=split.folder,
        others=[TIMES] * plan.loose,
    )
    return cast(AttachedManifest, assembly.finish([work.group()]))


def _times(work: Work[IndexTask]) -> Iterator[int]:
    """Yield the modification time of each image that was indexed."""
    for task in work.tasks:
        bad = {problem.path for problem in work.results[task.result_folder].bad}
        yield from (entry.stamp for entry in task.source.entries if entry.path not in bad)


def _digest(name: str) -> str:
    return sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _keep(work: Work[IndexTask], old: AttachedManifest, target: Path) -> None:
    """Add the results of archives that have not changed since the earlier dataset was made."""
    tasks = {task.name: task for task in work.tasks}
    skipped = {problem.path: problem for problem in old.skipped}
    start = 0
    for shard in old.shards:
        rows = range(start, start + shard.rows)
        start = rows.stop
        task = tasks.get(shard.name)
        if task is not None and task.is_current(shard):
            index = Index(target, old.rows, task.schema)
            bad = [skipped[e.path] for e in task.source.entries if e.path in skipped]
            if bad and isinstance(task, FolderTask):
                continue  # one may be another file now
            listed = (task.listed(e) for e in task.source.entries if e.path not in skipped)
            indexed = task.indexed(index, rows)
            if all(first == second for first, second in zip_longest(listed, indexed)):
                work.results[task.result_folder] = ShardResult(
                    entry=shard, bad=bad, notes=shard.notes
                )
                work.indexes[task.result_folder] = index, rows


def _require_good(
    works: Mapping[str, Work[IndexTask]], plan: _AttachPlan, staging: StagingDirectory
) -> None:
    """Raise if something is wrong with an archive, and may not or cannot be left out."""
    skipped = [
        Problem(path=f"{name}/{problem.path}" if name else problem.path, reason=problem.message)
        for name, work in works.items()
        for problem in work.skipped
    ]
    rows = sum(shard.rows for work in works.values() for shard in work.shards)
    if not skipped or (plan.options.on_error == "skip" and rows):
        return
    if not rows:
        staging.discard()  # other options may find samples
    count = f"{len(skipped)} finding{'s' if len(skipped) > 1 else ''}"
    remedy = (
        f"Fix the {plan.noun}, or leave these out with {setting('on_error', 'skip')}"
        if rows
        else f"No good sample is left: fix the {plan.noun} or the options"
    )
    error = BadImages(f"{count} in the {plan.noun}; no dataset was written", remedy=remedy)
    error.problems = tuple(skipped)
    error.where = str(plan.scan.source)
    raise error
