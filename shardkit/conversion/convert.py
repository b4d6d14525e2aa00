"""Convert a source to a published dataset, or write nothing at all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from shardkit.contracts import PartedSource, Scan, Source, Target, scan_source
from shardkit.conversion.assemble import save_manifests
from shardkit.conversion.build_all import Builder
from shardkit.conversion.engine import Build, build, finish, prepare
from shardkit.conversion.finished import finished
from shardkit.conversion.plan import ConvertOptions, Plan, make_plan, seed_of
from shardkit.conversion.staging import (
    StagingDirectory,
    check_target,
    clear_trash,
    open_staging,
    refuse_overlap,
)
from shardkit.conversion.task import load_result
from shardkit.dataset.manifest import FACTS_NAME, MANIFEST_NAME, Manifest
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import DiskFull, UsageError, located, setting
from shardkit.options import changed, group, option, takes
from shardkit.recipe import Recipe, RecipeOptions
from shardkit.sources.imagefolder import FolderOptions
from shardkit.sources.opening import DivisionOptions, Exclusion, SampleOptions, open_given
from shardkit.system.late import load
from shardkit.system.safe_paths import is_file
from shardkit.system.temporary import TemporaryFolder, full_disk_named
from shardkit.system.text import amount
from shardkit.system.urls import STORES, scheme_and_path

_TARGETS = {
    "": "shardkit.conversion.convert:Directory",
    **dict.fromkeys(STORES, "shardkit.remote.upload:UploadTarget"),
}
"""The targets that publish datasets, by the scheme of the URL."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Result of a conversion."""

    plan: Plan | None
    """Shards of each split; None from a `commit` that was already done. It lists no images once
    they are converted."""
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """Split name, or "" without splits, to the manifest of its dataset; empty after `plan_jobs`."""
    reused_shards: int = 0
    """Number of shards that an earlier, interrupted run had finished."""
    unchanged: bool = False
    """Whether the target already contained the result, so nothing was written."""
    jobs: int = 0
    """Number of tasks that `plan_jobs` left for `shardkit work`."""

    def __repr__(self) -> str:
        """Return the size of each dataset: a plan and manifests would fill the screen."""
        sizes = {
            split: f"{amount(m.rows, 'image')}, {amount(len(m.classes or ()), 'class')}"
            for split, m in self.manifests.items()
        }
        return f"Converted({sizes.get('', sizes)})"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Permission to replace files, and the folder in which a dataset for a URL is built."""

    HEADING: ClassVar[str] = "Running"

    force: bool = option(
        False,
        help="Replace the dataset in DST once the new one is ready; discard a different "
        "unfinished conversion.",
    )
    staging: str | Path | None = option(
        None,
        help="If DST is a URL (s3://, gs://, az://): build the dataset in DIR, then upload it. "
        "Optional for a plan of jobs.",
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `convert`, `plan_conversion` and `plan_jobs`."""

    shards: ConvertOptions = group(ConvertOptions)
    images: RecipeOptions = group(RecipeOptions)
    folder: FolderOptions = group(FolderOptions)
    samples: SampleOptions = group(SampleOptions)
    division: DivisionOptions = group(DivisionOptions)
    exclusion: Exclusion = group(Exclusion)
    builder: Builder = group(Builder)
    placement: Placement = group(Placement)

    def open(self, source: Any, recipe: Recipe | None) -> Request:
        """Return the options of the conversion of a source, and that source.

        A ``recipe`` replaces `images`.
        """
        image_recipe = Recipe(**vars(self.images))
        if recipe is not None and (names := changed(image_recipe)):
            raise UsageError(
                f"recipe and {', '.join(names)} cannot be combined", remedy="choose one"
            )
        options = replace(self.shards, recipe=recipe or image_recipe)
        opened = open_given(
            source, self.folder, self.samples, (self.division, self.exclusion), options.seed
        )
        return Request(opened, options, self.builder, self.placement)


@takes(Asked)
def convert(
    options: Asked, source: str | Path | Any, target: str | Path, *, recipe: Recipe | None = None
) -> Converted:
    """Convert a folder of images to a dataset, or to one dataset per split.

    The options are those of ``shardkit convert``. Repeat an interrupted call to resume it:
    finished shards are kept. The result does not depend on interruptions or on ``workers``.
    Repeating a finished call does nothing.

    Args:
        source: A folder, or its URL in an object store, with one folder per class, or only images,
            or splits of either; or another `shardkit.contracts.Source`; or samples: a sequence or
            iterable, such as a PyTorch dataset, of tuples or dicts (perhaps with a ``key``) of
            images (bytes, paths, PIL images), arrays, tensors, numbers and texts. An iterable is
            read once, into a temporary file.
        target: A directory that is new, is empty, or (with ``force``) contains a dataset to
            replace. The old dataset stays intact until the new one is ready. Or, with ``staging``,
            a URL in an object store (``s3://``, ``gs://``, ``az://``) that contains no dataset yet.
        recipe: The image options, as one object instead of keywords.

    Returns:
        The plan and the manifests of the datasets.

    Raises:
        UsageError: If an option is invalid, ``target`` cannot be used, or it holds an unfinished
            conversion of something else.
        BadImages: If images are bad and ``on_error`` is ``fail``. Shards without bad images are
            kept for the next run.
        DiskFull: If the disk lacks space.
        ConversionFailed: If writing fails.
    """
    request = options.open(source, recipe)
    opened = open_target(target, request.placement)
    opened.prepare()  # before a long scan
    converted = _convert(request, opened.folder)
    if opened.publish():
        converted = replace(converted, unchanged=False)
    return converted


@takes(Asked)
def plan_conversion(
    options: Asked, source: str | Path | Any, target: str | Path, *, recipe: Recipe | None = None
) -> Plan:
    """Return the plan that `convert` would carry out; read no image and write nothing.

    Args:
        source: See `convert`, as for all arguments.
        target: A directory or URL.
        recipe: The image options, as one object instead of keywords.

    Raises:
        UsageError: If an option is invalid or ``target`` cannot be used.
    """
    request = options.open(source, recipe)
    folder = open_target(target, request.placement).folder
    scan = scan_source(request.source)
    refuse_overlap(scan.source, folder)
    with located(folder):
        check_target(folder, force=request.placement.force)
    return make_plan(scan, request.options)


def open_target(target: str | Path, placement: Placement) -> Target:
    """Return where a conversion publishes its dataset."""
    scheme, path = scheme_and_path(target)
    opened: Target = load(_TARGETS[scheme])(path, placement.staging)
    return opened


class Directory(Target):
    """A directory of this machine, in which the dataset is also built."""

    def __init__(self, path: str, staging: str | Path | None) -> None:
        if staging is not None:
            raise UsageError(
                f"{path} is local;", remedy=f"{setting('staging')} is for conversions to a URL"
            )
        self.folder = Path(path)

    def prepare(self) -> None:
        """Do nothing: `open_staging` checks it."""

    def publish(self) -> bool:
        """Return False: `publish_plan` has published the dataset."""
        return False


class Request(NamedTuple):
    """The arguments of `convert`, read."""

    source: Source
    options: ConvertOptions
    builder: Builder
    placement: Placement


def plan_source(source: Source, options: ConvertOptions, builder: Builder, folder: Path) -> Plan:
    """Return the plan of a conversion.

    If the source has parts, no process holds all of its images. ``folder`` is empty, receives
    files, and must remain while the plan is used.
    """
    if not isinstance(source, PartedSource) or source.in_order:
        return make_plan(builder.scan(source, folder), options)
    scan = builder.scan(source, folder, seed_of=partial(seed_of, options=options))
    return make_plan(scan, options, sorted_already=True)


def convert_scan(
    scan: Scan,
    target: str | Path,
    options: ConvertOptions,
    builder: Builder | None = None,
    *,
    force: bool = False,
) -> Converted:
    """Convert the images of a scan; see `convert`, which scans the source first."""
    target = Path(target)
    builder = builder or Builder()
    refuse_overlap(scan.source, target)
    plan = make_plan(scan, options)
    if not force and (unchanged := _finished(plan, target)):
        return unchanged
    with open_staging(target, force=force) as staging:
        return publish_plan(plan, staging, builder, force=force)


def _convert(request: Request, target: Path) -> Converted:
    """Convert the images of a source, listed in parts if possible."""
    source, options, builder, placement = request
    force = placement.force
    if not isinstance(source, PartedSource):
        return convert_scan(scan_source(source), target, options, builder, force=force)
    refuse_overlap(source, target)
    lister = replace(builder, on_progress=None)
    make = partial(plan_source, source, options)
    if is_file(target, MANIFEST_NAME) and not force:
        # A finished run is recognized without writing to the target. Other machines cannot list
        # into a temporary folder of this one.
        temporary = TemporaryFolder()
        with full_disk_named():
            plan = make(replace(lister, executor=None), temporary.path)
        if unchanged := _finished(plan, target):
            return unchanged
    with open_staging(target, force=force) as staging, staging.scratch() as folder:
        return publish_plan(make(lister, folder), staging, builder, force=force)


def _finished(plan: Plan, target: Path) -> Converted | None:
    """Return the datasets in ``target`` if they are the result of a plan."""
    existing = finished(plan, target)
    if not existing:
        return None
    clear_trash(target)
    kept = sum(len(manifest.shards) for manifest in existing.values())
    plan = _without_images(plan, target)
    return Converted(plan=plan, manifests=existing, reused_shards=kept, unchanged=True)


def publish_plan(
    plan: Plan,
    staging: StagingDirectory,
    builder: Builder,
    *,
    force: bool,
    make: Build = build,
) -> Converted:
    """Build the shards with ``make``, and publish the dataset."""
    reused = sum(split.shards for split in plan.splits)
    builder.expect(sum(len(split.source) for split in plan.splits))
    with staging.publishing(plan.fingerprint(), force=force) as is_needed:
        if is_needed:
            reused = _make(plan, staging, builder, make)
    committed = OpenedDirectory(staging.target).manifests()
    manifests = {split.name: committed[split.name] for split in plan.splits}
    plan = _without_images(plan, staging.target)
    return Converted(plan=plan, manifests=manifests, reused_shards=reused)


def _without_images(plan: Plan, target: Path) -> Plan:
    """Return a plan that reads nothing from the staging directory, which is gone."""
    splits = {name: images.of(()) for name, images in plan.scan.splits.items()}
    ignored = {name: dataset.ignored for name, dataset in OpenedDirectory(target).splits.items()}
    return replace(
        plan,
        scan=replace(plan.scan, splits=splits, ignored=ignored),
        splits=tuple(replace(split, source=splits[split.name]) for split in plan.splits),
    )


def _make(plan: Plan, staging: StagingDirectory, builder: Builder, make: Build) -> int:
    """Make the dataset, and return the number of shards kept from an earlier run."""
    observer = FACTS_NAME if builder.facts else ""
    works = [prepare(split, plan, staging, observer=observer) for split in plan.splits]
    try:
        kept = make(works, plan, staging, builder)
    except DiskFull as error:
        if not any(load_result(task) for work in works for task in work.tasks):
            staging.discard()  # the user may choose another disk
        raise DiskFull(error.problem, remedy=f"{error.remedy}{plan.large_files()}") from error
    manifests = {}
    for work in works:
        manifests[work.split] = finish(work, plan)
    save_manifests(manifests, staging.dataset)
    return kept
