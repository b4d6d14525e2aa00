"""Convert a source to a published dataset, or write nothing at all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import PartedSource, Scan, Source
from shardkit.conversion.assemble import file_entry, save_manifests, save_report
from shardkit.conversion.build import (
    Built,
    ShardResult,
    ShardTask,
    build_shard,
    load_facts_part,
    load_part,
    load_result,
)
from shardkit.conversion.disk import DiskReservation, as_failure
from shardkit.conversion.exclude import exclude_listed
from shardkit.conversion.finished import finished
from shardkit.conversion.jobs import (
    load_plan,
    require_done,
    require_same_software,
    save_plan,
    shard_task,
)
from shardkit.conversion.options import (
    parse_bytes,
    parse_color,
    parse_size,
    refuse_without_resize,
)
from shardkit.conversion.parted_scan import Listed, ListTask, list_part, scan_in_parts
from shardkit.conversion.plan import (
    DEFAULT_SHARD_BYTES,
    ConvertOptions,
    Plan,
    SplitPlan,
    make_plan,
    seed_of,
)
from shardkit.conversion.recipe import TOO_SMALL, Recipe
from shardkit.conversion.staging import StagingDirectory, check_target, clear_trash, open_staging
from shardkit.conversion.store_jobs import (
    StoredPlan,
    local_folder,
    publish,
    receive_results,
    require_free,
    send_plan,
)
from shardkit.conversion.upload import require_access, upload
from shardkit.dataset.facts import FACT
from shardkit.dataset.index import Index, IndexPart, save_index
from shardkit.dataset.manifest import (
    FACTS_NAME,
    FieldEntry,
    Manifest,
    ShardEntry,
    load_manifest,
)
from shardkit.dataset.reports import IGNORED, SKIPPED
from shardkit.errors import BadImages, DiskFull, Problem, UsageError
from shardkit.record import Field
from shardkit.registry import DEFAULT_SOURCE, get_source
from shardkit.sources.divided import divided
from shardkit.sources.samples import Samples
from shardkit.stores.urls import as_url
from shardkit.system.files import as_name, sync
from shardkit.system.npy import NpyWriter
from shardkit.system.pool import Progress, Report, run_on, run_tasks
from shardkit.system.text import quoted


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Result of a conversion."""

    plan: Plan
    """Images and shards of each split."""
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """Split name, or "" without splits, to the manifest of its dataset; empty after a dry run."""
    reused_shards: int = 0
    """Shards that an earlier, interrupted run had finished."""
    unchanged: bool = False
    """Whether the target already held the result, so nothing was written."""
    jobs: int = 0
    """Tasks that ``plan_only`` left for `shardkit work`."""


@dataclass
class Work:
    """One split in progress."""

    plan: SplitPlan
    folder: Path
    tasks: list[ShardTask]
    first: int = 0
    """Number of the first shard."""
    entries: dict[int, ShardEntry | None] = field(default_factory=dict)
    """The finished shards by number; None if bad images prevented it."""
    bad: list[Problem] = field(default_factory=list)
    fields: Counter[str] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, task: ShardTask, result: ShardResult) -> None:
        """Add a finished shard. The counts of each shard, of thousands of labels, are not kept."""
        self.entries[task.number] = result.entry
        self.bad += result.bad
        self.fields.update(result.fields)
        self.labels.update(result.labels)
        self.notes.update(result.notes)

    def bytes_of(self, task: ShardTask) -> int:
        """Return the approximate bytes of a shard on disk."""
        return self.plan.shard_bytes[task.number - self.first]


def convert(  # noqa: PLR0913 - the options of the command, each with its own meaning
    source: str | Path | Source | Any,
    target: str | Path,
    *,
    to: str,
    schema: Mapping[str, Field | str] | None = None,
    fields: Sequence[str] | None = None,
    resize: int | tuple[int, int] | str | None = None,
    resize_mode: str | None = None,
    filter: str = "bicubic",  # noqa: A002 - the name of the option
    resizer: str = "pillow",
    dct_scaling: bool = False,
    enlarge: bool = False,
    encode: str = "keep",
    quality: int | None = None,
    background: str | tuple[int, int, int] = "white",
    orient: bool = False,
    check: str = "decode",
    tolerate_damage: bool = False,
    on_error: str = "fail",
    class_order: str = "plain",
    splits: bool | None = None,
    val: float = 0.0,
    test: float = 0.0,
    stratify: bool = False,
    group: str | None = None,
    exclude: str | Path | Sequence[str | Path] = (),
    shard_size: int | str = DEFAULT_SHARD_BYTES,
    shard_samples: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    limit: int | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    force: bool = False,
    dry_run: bool = False,
    staging: str | Path | None = None,
    plan_only: bool = False,
    facts: bool = False,
    on_progress: Report | None = None,
) -> Converted:
    """Convert a folder of images to a dataset, or to one dataset for each split.

    The options are those of ``shardkit convert``. Repeat an interrupted call to resume it:
    finished shards are kept. The result does not depend on interruptions or on ``workers``.
    Repeating a finished call does nothing.

    Args:
        source: A folder with one folder for each class, or images alone, or splits of either; or
            another `shardkit.contracts.Source`; or samples: a sequence or iterable, such as a
            PyTorch dataset, of dicts, `shardkit.Sample` objects or tuples of images (bytes, paths,
            PIL images), arrays, tensors, numbers and texts. An iterable is read once, into a
            temporary file.
        target: A directory that is new, empty, or (with ``force``) holds a dataset to replace. The
            old dataset stays intact until the new one is ready. Or a URL in an object store
            (``s3://``, ``gs://``, ``az://``) where no dataset is yet, with ``staging``.
        to: Storage format: ``lmdb``, ``hdf5`` or ``webdataset``.
        schema: Fields of samples by name, each a `shardkit.Field` or a kind; others follow from the
            first sample.
        fields: Names of the values of samples that are tuples; image and label for two of them.
        resize: Pixels of the side that ``resize_mode`` selects, or height and width as a pair or
            as ``"HxW"``. None keeps the size.
        resize_mode: ``shorter`` or ``longer`` side, ``crop``, ``pad`` or ``stretch``. None is
            ``shorter`` for a number and ``crop`` for height and width.
        filter: ``bicubic``, ``bilinear``, ``lanczos`` or ``box``; all are antialiased.
        resizer: ``pillow``, or ``torch``: faster for large folders, values differ by 1 or 2.
        dct_scaling: Decode large JPEGs at reduced size: faster, but not exact.
        enlarge: Allow images to become larger than they are.
        encode: ``keep`` changes an image's encoding only if its pixels change; ``jpeg``, ``png``
            and ``webp`` encode all images; ``raw`` stores pixels of one size.
        quality: JPEG and WebP quality, 1 to 100. If given, all of these images are re-encoded.
        background: Color under transparent pixels and around padded images, by name or as RGB.
        orient: Apply the EXIF orientation even if nothing else changes.
        check: Depth of image validation: ``decode``, ``header`` or ``none``.
        tolerate_damage: Store damaged JPEGs that Pillow can decode.
        on_error: ``fail`` writes nothing if any image is bad; ``skip`` leaves bad images out.
        class_order: Label order: ``plain`` (as in torchvision), ``natural``, or the path of a file
            with one class per line.
        splits: Whether the folders of ``source`` are splits. None decides by their names.
        val: Share of the images to divide off as a split ``val``, such as 0.1; the others are
            ``train``. Sides depend on paths and ``seed``: see `shardkit.split`.
        test: Share of the images to divide off as a split ``test``.
        stratify: Whether to divide each class by itself.
        group: ``folder`` or a column: images of one folder, or with one value, get one side.
        exclude: Text files of keys or paths, one per line, of images to leave out; if the source
            has splits, each is ``"SPLIT=FILE"``. `shardkit.report` writes such lists.
        shard_size: Approximate bytes of images in a shard, as a number or as ``"256MiB"``.
        shard_samples: Images in a shard, instead of ``shard_size``.
        shuffle: Store images in random order instead of the source's. None does so unless the
            source is a dataset.
        seed: Seed of the random order.
        limit: Convert only this many images of each split.
        workers: Number of processes.
        executor: Builds the shards instead of ``workers``, one per call: any executor whose
            processes see the paths of ``source`` and ``target``, such as that of a Dask client.
        force: Replace a dataset in ``target``, or discard another unfinished conversion.
        dry_run: Check and plan, but write nothing.
        staging: A local folder for a conversion to a URL, used like ``target``: the dataset is
            built there, then uploaded. It remains there; remove it when you like.
        plan_only: Write only the plan into ``target``, for ``shardkit work`` and
            ``shardkit commit``. ``workers`` or ``executor`` list a folder of images, in memory that
            does not grow with it.
        facts: Whether to also measure the images for `shardkit.report`, as ``facts.npy``, which is
            not part of the dataset.
        on_progress: Called with the work done since the last call.

    Returns:
        The plan and the manifests of the datasets; no manifests after a dry run.

    Raises:
        UsageError: If an option is invalid, ``target`` cannot be used, or it holds an unfinished
            conversion of something else.
        BadImages: If images are bad and ``on_error`` is ``fail``. Shards without bad images are
            kept for the next run.
        DiskFull: If the disk lacks space.
        ConversionFailed: If writing fails.
    """
    box, default_mode = parse_size(resize)
    if box is None:
        refuse_without_resize(
            resize_mode=resize_mode,
            filter_=filter,
            resizer=resizer,
            dct_scaling=dct_scaling,
            enlarge=enlarge,
        )
    recipe = Recipe(
        resize=box,
        resize_mode=resize_mode or default_mode,
        filter=filter,
        resizer=resizer,
        dct_scaling=dct_scaling,
        enlarge=enlarge,
        encode=encode,
        quality=quality,
        background=parse_color(background),
        orient=orient,
        check=check,
        tolerate_damage=tolerate_damage,
    )
    options = ConvertOptions(
        to=to,
        recipe=recipe,
        shard_bytes=parse_bytes(shard_size),
        shard_samples=shard_samples,
        shuffle=shuffle,
        seed=seed,
        limit=limit,
        on_error=on_error,
    )
    url = as_url(target)
    if (url is None) != (staging is None) and not (url and plan_only and not dry_run):
        raise UsageError(
            f"{target} is local; staging is for conversions to a URL"
            if url is None
            else f"{url} is written from a local copy of the dataset; name a folder for it: "
            "--staging DIR"
        )
    target = target if staging is None or (plan_only and not dry_run) else staging
    if not isinstance(source, (str, Path)) and not hasattr(source, "scan"):
        source = Samples(source, schema=schema, fields=fields)
    elif schema is not None or fields is not None:
        raise UsageError("schema and fields are options of samples")
    if isinstance(source, (str, Path)):
        source = get_source(DEFAULT_SOURCE).open(source, class_order=class_order, splits=splits)
    elif class_order != "plain" or splits is not None:
        raise UsageError("class_order and splits are options of image folders")
    source = divided(source, val=val, test=test, stratify=stratify, group=group, seed=seed)
    lists = [exclude] if isinstance(exclude, (str, Path)) else exclude
    if plan_only and not dry_run:
        if url is not None:
            require_free(url)
            executor = None  # which does not see the local folder
        in_parts = hasattr(source, "parts") and not lists
        images: Any = source if in_parts else exclude_listed(source.scan(), lists)
        with nullcontext(Path(target)) if url is None else local_folder(staging) as folder:
            builder = Builder(workers, executor, on_progress)
            planned = plan_jobs(images, folder, options, builder, force=force)
            if url is not None:
                send_plan(folder, url, force=force)
        return planned
    scan = exclude_listed(source.scan(), lists)
    if dry_run:
        return Converted(plan=plan_scan(scan, target, options, force=force))
    if url is not None:
        require_access(url)
    made = convert_scan(
        scan,
        target,
        options,
        force=force,
        workers=workers,
        executor=executor,
        facts=facts,
        on_progress=on_progress,
    )
    if url is not None and upload(target, url):
        made = replace(made, unchanged=False)
    return made


def plan_jobs(
    source: PartedSource | Scan,
    target: Path,
    options: ConvertOptions,
    builder: Builder,
    *,
    force: bool,
) -> Converted:
    """Write the plan for jobs into ``target``; see `convert`.

    Args:
        source: The images, or a source to list in parts: then no process holds all of its images.
        target: The directory, which all jobs share.
        options: The options.
        builder: Lists the parts.
        force: Replace a dataset in ``target``, or discard another unfinished conversion.
    """
    refuse_overlap(source.source if isinstance(source, Scan) else source, target)
    with open_staging(target, force=force) as staging:
        try:
            with staging.scratch() as folder:
                if isinstance(source, Scan):
                    plan = make_plan(source, options)
                else:
                    order = partial(seed_of, options=options)
                    scan = scan_in_parts(source, folder, order, builder.list_parts)
                    plan = make_plan(scan, options, sorted_already=True)
                jobs = save_plan(plan, Path(str(plan.scan.source)), staging, force=force)
        except OSError as error:
            raise as_failure(error, target) from error
    return Converted(plan=load_plan(target), jobs=jobs)


def plan_scan(
    scan: Scan, target: str | Path, options: ConvertOptions, *, force: bool = False
) -> Plan:
    """Check the target and return the plan that `convert_scan` would carry out; read no image.

    Raises:
        UsageError: If ``target`` cannot be used.
    """
    refuse_overlap(scan.source, Path(target))
    check_target(Path(target), force=force)
    return make_plan(scan, options)


def convert_scan(  # noqa: PLR0913 - see `convert`
    scan: Scan,
    target: str | Path,
    options: ConvertOptions,
    *,
    force: bool = False,
    workers: int = 1,
    executor: Executor | None = None,
    facts: bool = False,
    on_progress: Report | None = None,
) -> Converted:
    """Convert the images of a scan; see `convert`, which scans the source first."""
    target = Path(target)
    refuse_overlap(scan.source, target)
    plan = make_plan(scan, options)
    if not force and (existing := finished(plan, target)):
        clear_trash(target)
        kept = sum(len(manifest.shards) for manifest in existing.values())
        return Converted(plan=plan, manifests=existing, reused_shards=kept, unchanged=True)
    if on_progress:
        on_progress(Progress(total=sum(len(split.source) for split in plan.splits)))
    return _carry_out(plan, target, Builder(workers, executor, on_progress, facts), force=force)


def commit(
    target: str | Path, *, force: bool = False, staging: str | Path | None = None
) -> Converted:
    """Publish the dataset whose shards `shardkit work` built; reads no image and no shard.

    Args:
        target: The directory or URL for which ``convert(plan_only=True)`` wrote a plan.
        force: Replace a dataset in the directory.
        staging: For a URL, the folder for index and manifest; None is the temporary folder.

    Raises:
        UsageError: If there is no plan, or ``target`` cannot be used.
        ConversionFailed: If shards are missing. The message names their tasks.
        ShardkitError: If the store cannot be used.
    """
    if as_url(target) is None:
        if staging is not None:
            raise UsageError(f"{target} is local; --staging is for a URL")
        return _carry_out(load_plan(Path(target)), Path(target), None, force=force)
    if force:
        raise UsageError(f"{target}: --force replaces only local datasets; plan for another URL")
    plan = StoredPlan.found(str(target))
    with local_folder(staging) as folder:
        receive_results(plan, folder)
        made = _carry_out(load_plan(folder), folder, None, force=False)
        publish(plan, folder)
    return made


def _carry_out(plan: Plan, target: Path, builder: Builder | None, *, force: bool) -> Converted:
    """Build and publish the dataset. Without a builder, all shards must be built already."""
    with open_staging(target, force=force) as staging:
        try:
            reused = _build_and_publish(plan, staging, builder, force=force)
        except OSError as error:
            raise as_failure(error, target) from error
    names = [split.name for split in plan.splits]
    manifests = {name: load_manifest(target / as_name(name)) for name in names}
    return Converted(plan=plan, manifests=manifests, reused_shards=reused)


def _build_and_publish(
    plan: Plan, staging: StagingDirectory, builder: Builder | None, *, force: bool
) -> int:
    """Return the number of shards kept from an earlier run."""
    staging.start(plan.fingerprint(), force=force)
    kept = sum(split.shards for split in plan.splits)
    if not staging.is_ready:
        works = [prepare(split, plan, staging) for split in plan.splits]
        try:
            if builder is None:
                kept = 0
                _collect(works, staging)
                _require_good(works, plan, staging)
            else:
                kept = build(works, plan, staging, builder)
        except DiskFull as error:
            if not any(load_result(task) for work in works for task in work.tasks):
                staging.discard()  # the user may choose another disk
            raise DiskFull(f"{error}{plan.large_files()}") from error
        _finish(works, plan, staging)
    staging.publish()
    return kept


def refuse_overlap(source: Source, target: Path) -> None:
    """Refuse a target that contains the source, or is in it.

    Raises:
        UsageError: If it does, or is.
    """
    place = Path(os.path.realpath(target))
    for path in source.paths():
        root = Path(os.path.realpath(path))
        if place != root and root not in place.parents and place not in root.parents:
            continue
        raise UsageError(
            f"{target} and the source {path} overlap: choose a directory outside of it, or a "
            "smaller source folder (for tables and annotations: --root)"
        )


def prepare(
    split: SplitPlan,
    plan: Plan,
    staging: StagingDirectory,
    above: Path | None = None,
    first: int = 0,
) -> Work:
    """Return the work to build the shards of a split.

    Args:
        split: The plan of the split.
        plan: The plan.
        staging: The staging directory.
        above: Folder for the folder of the split; None is that of the dataset.
        first: Number of the first shard.
    """
    folder = (above or staging.dataset) / as_name(split.name)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [
        replace(
            shard_task(plan, split, first + number, split.shard_source(number), staging),
            folder=folder,
        )
        for number in range(split.shards)
    ]
    return Work(split, folder, tasks, first)


@dataclass(frozen=True)
class Builder:
    """Where shards are built: in worker processes, or by an executor."""

    workers: int
    executor: Executor | None
    report: Report | None
    facts: bool = False
    """Whether images are measured on the way."""

    def run(
        self, done: list[ShardTask], tasks: list[ShardTask]
    ) -> Iterator[tuple[ShardTask, Built]]:
        """Build all shards; yield them as they are finished.

        Args:
            done: Tasks that an earlier run seems to have finished.
            tasks: The others.
        """
        if self.facts:
            tasks = [replace(task, facts=True) for task in tasks]
        if self.executor is None:
            tasks = done + _spread(tasks, self.workers)
            yield from run_tasks(build_shard, tasks, workers=self.workers, on_progress=self.report)
            return
        for task, built in run_on(self.executor, _build_elsewhere, done + tasks):
            if self.report is not None:
                size = sum(task.source.sizes())
                self.report(Progress(len(task.source), size, len(built.result.bad)))
            yield task, built

    def list_parts(self, tasks: Sequence[ListTask]) -> Iterator[tuple[ListTask, Listed]]:
        """List the parts of a source; the first here, since other processes take time to start."""
        done = images = 0
        for task, listed in run_tasks(list_part, tasks, workers=1, on_progress=self.report):
            yield task, listed
            done += 1
            images += listed.images
            if images > _FEW:
                break
        if self.executor is None:
            run = run_tasks(list_part, tasks[done:], workers=self.workers, on_progress=self.report)
        else:
            run = run_on(self.executor, list_part, tasks[done:])
        yield from run


_FEW = 100_000
"""Images that one process lists before others are started."""


def _build_elsewhere(task: ShardTask) -> Built:
    """Build a shard on a machine that may have other libraries."""
    require_same_software(task)
    return build_shard(task)


def _collect(works: list[Work], staging: StagingDirectory) -> None:
    """Load the results of all shards, which jobs have built.

    Raises:
        ConversionFailed: If shards are missing.
    """
    tasks = [(work, task) for work in works for task in work.tasks]
    missing = []
    for number, (work, task) in enumerate(tasks):
        if (result := load_result(task)) is None:
            missing.append(number)
        else:
            work.add(task, result)
    require_done(missing, len(tasks), staging.target)
    staging.prune({task.path for _, task in tasks})


def build(works: list[Work], plan: Plan, staging: StagingDirectory, builder: Builder) -> int:
    """Build all shards; return the number of shards kept from an earlier run.

    Raises:
        BadImages: If images are bad, and may not or cannot be left out.
        DiskFull: If the disk lacks space.
    """
    of_split = {work.plan.name: work for work in works}
    done, tasks = _divide([task for work in works for task in work.tasks])
    staging.prune({task.path for task in done})
    needs = [0] * len(done) + [of_split[t.split].bytes_of(t) for t in tasks]
    recipe = plan.options.recipe
    ahead, copies = builder.workers, plan.storage.copies
    space = DiskReservation(staging.folder, needs, ahead=ahead, copies=copies)
    kept = 0
    kept_as_it_is = recipe.keeps_bytes and plan.scan.exact_sizes
    with space.reserved(exact=kept_as_it_is or recipe.raw_shape is not None):
        try:
            for task, built in builder.run(done, tasks):
                of_split[task.split].add(task, built.result)
                kept += built.kept
                entry = built.result.entry
                space.release(entry.bytes if entry and not built.kept else 0)
        except DiskFull as error:
            raise DiskFull(f"{error} {space.need()}") from error
    _require_good(works, plan, staging)
    return kept


def _divide(tasks: list[ShardTask]) -> tuple[list[ShardTask], list[ShardTask]]:
    """Return the tasks that an earlier run seems to have finished, and the others."""
    done: list[ShardTask] = []
    others: list[ShardTask] = []
    for task in tasks:
        (done if load_result(task) else others).append(task)
    return done, others


def _spread(tasks: list[ShardTask], workers: int) -> list[ShardTask]:
    """Assign the processes that would be idle at the end to the last shards."""
    last = len(tasks) % workers
    whole = len(tasks) - last
    return tasks[:whole] + [
        replace(task, workers=workers // last + (position < workers % last))
        for position, task in enumerate(tasks[whole:])
    ]


def _require_good(works: list[Work], plan: Plan, staging: StagingDirectory) -> None:
    """Raise if images are bad, unless they may be left out and others remain."""
    problems = [
        Problem(path="/".join(filter(None, (work.plan.name, problem.path))), reason=problem.reason)
        for work in works
        for problem in _problems(work, plan)
    ]
    entries = [entry for work in works for entry in work.entries.values()]
    made = [entry for entry in entries if entry is not None and entry.rows]
    skip = plan.options.on_error == "skip"
    if not problems or (skip and made):
        return
    count = f"{len(problems)} bad file{'s' if len(problems) > 1 else ''}"
    small = sum(TOO_SMALL in problem.reason for problem in problems)
    if small:
        count += f", {small} of them too small ({TOO_SMALL} accepts these)"
    if skip or not made:
        staging.discard()
        remedy = "No good image is left." if skip else f"{_FIX}."
        message = f"{count}; nothing was written. {remedy}"
    else:
        staging.save_bad_files([problem.path for problem in problems])
        kept = f"{len(made)} shard{'s' if len(made) > 1 else ''} without bad files"
        message = (
            f"{count}; no dataset was written. {_FIX}: a rerun reuses {kept} unless files are "
            "removed, since each shard records the total number of images. (To give up, remove "
            f"{staging.folder}.)"
        )
    error = BadImages(f"{message} The first is {problems[0].path}: {problems[0].reason}")
    error.problems = tuple(problems)
    raise error


_FIX = "Fix bad files, or leave them out with --on-error skip"


def _problems(work: Work, plan: Plan) -> list[Problem]:
    found = [*plan.scan.problems.get(work.plan.name, ()), *work.bad]
    return sorted(found, key=lambda problem: problem.path)


def _finish(works: list[Work], plan: Plan, staging: StagingDirectory) -> None:
    """Write index, reports and manifests of all splits."""
    manifests = {work.plan.name: make_manifest(work, plan) for work in works}
    save_manifests(manifests, staging.dataset)


def make_manifest(work: Work, plan: Plan) -> Manifest:
    """Write index and reports of a split, next to its shards; return its manifest."""
    shards = [entry for task in work.tasks if (entry := work.entries[task.number]) is not None]
    skipped = _problems(work, plan)
    ignored = plan.scan.ignored.get(work.plan.name, [])
    classes, schema = plan.scan.classes, plan.scan.schema
    rows, counts = sum(entry.rows for entry in shards), Counter[str]()

    def parts() -> Iterator[IndexPart]:
        for task, entry in zip(work.tasks, shards, strict=True):
            part = load_part(task, entry.rows)
            counts.update(part.counts(schema))
            yield part

    names = [
        *save_index(parts(), work.folder, schema),
        *save_report(SKIPPED, skipped, work.folder),
        *save_report(IGNORED, ignored, work.folder),
    ]
    _save_facts(list(zip(work.tasks, shards, strict=True)), work.folder)
    index = Index(work.folder, rows)
    _require_distinct(index.keys())
    lacking = {name for name in schema if counts[name] < rows}
    return Manifest(
        format=plan.options.to,
        rows=rows,
        content_digest=index.content_digest(schema, lacking),
        shards=tuple(shards),
        files=tuple(file_entry(name, work.folder) for name in names),
        fields=dict(sorted(work.fields.items())),
        schema=tuple(FieldEntry.of(name, field, counts[name]) for name, field in schema.items()),
        classes=classes,
        class_counts=None
        if classes is None
        else tuple(work.labels[n] for n in range(len(classes))),
        raw_shape=plan.options.recipe.raw_shape,
        recipe=work.plan.meta["recipe"],
        source=work.plan.meta["source"],
        notes=dict(sorted(work.notes.items())),
        skipped=tuple(skipped),
        ignored=dict(sorted(Counter(problem.reason for problem in ignored).items())),
        software=plan.software,
    )


def _save_facts(shards: list[tuple[ShardTask, ShardEntry]], folder: Path) -> None:
    """Write the facts of a split next to its shards, if any were measured."""
    path = folder / FACTS_NAME
    if any((task.part / FACTS_NAME).exists() for task, _ in shards):
        with closing(NpyWriter(path, FACT)) as writer:
            for task, entry in shards:
                writer.append(load_facts_part(task, entry.rows))
        sync(path)


def _require_distinct(keys: Sequence[str]) -> None:
    """Refuse records of the same key, which readers of tar files would take for one.

    It holds the hashes of some of the keys at a time, and only keys whose hashes are equal.

    Raises:
        UsageError: If there are any.
    """
    passes, alike = 1 + len(keys) // _HASHES, set[int]()
    for number in range(passes):
        hashes = (value for value in map(hash, keys) if value % passes == number)
        values = np.fromiter(hashes, np.int64)
        values.sort()
        alike.update(values[1:][values[1:] == values[:-1]].tolist())
    found = Counter(key for key in keys if hash(key) in alike) if alike else Counter[str]()
    twice = [key for key, count in found.items() if count > 1]
    if twice:
        raise UsageError(
            f"{len(twice)} keys occur more than once ({', '.join(map(quoted, twice[:3]))}); give "
            "each record a key of its own"
        )


_HASHES = 1 << 24
"""Keys whose hashes are compared at a time: 128 MiB."""
