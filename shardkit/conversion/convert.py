"""Convert a source to a published dataset, or write nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.contracts import PartedSource, Scan, Source
from shardkit.conversion.build import load_result
from shardkit.conversion.build_all import Builder, build, collect, prepare, require_good
from shardkit.conversion.disk import as_failure
from shardkit.conversion.exclude import exclude_listed
from shardkit.conversion.finished import finished
from shardkit.conversion.jobs import load_plan, save_plan
from shardkit.conversion.manifests import finish
from shardkit.conversion.options import parse_bytes, parse_color, parse_size, refuse_without_resize
from shardkit.conversion.parted_scan import scan_in_parts
from shardkit.conversion.plan import DEFAULT_SHARD_BYTES, ConvertOptions, Plan, make_plan, seed_of
from shardkit.conversion.recipe import Recipe
from shardkit.conversion.staging import (
    StagingDirectory,
    check_target,
    clear_trash,
    open_staging,
    refuse_overlap,
)
from shardkit.conversion.store_jobs import (
    StoredPlan,
    local_folder,
    publish,
    receive_results,
    require_free,
    send_plan,
)
from shardkit.conversion.upload import require_vacant, upload
from shardkit.dataset.manifest import Manifest, load_manifest
from shardkit.errors import DiskFull, UsageError
from shardkit.record import Field
from shardkit.registry import DEFAULT_SOURCE, get_source
from shardkit.sources.divided import divided
from shardkit.sources.samples import Samples
from shardkit.stores.urls import as_url
from shardkit.system.files import as_name
from shardkit.system.pool import Progress, Report


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
    plan_only = plan_only and not dry_run
    if (url is None) != (staging is None) and not (url and plan_only):
        raise UsageError(
            f"{target} is local; staging is for conversions to a URL"
            if url is None
            else f"{url} is written from a local copy of the dataset; name a folder for it: "
            "--staging DIR"
        )
    target = target if staging is None or plan_only else staging
    source = _as_source(source, schema, fields, class_order=class_order, splits=splits)
    source = divided(source, val=val, test=test, stratify=stratify, group=group, seed=seed)
    if url is not None and not dry_run:  # before a long scan
        if plan_only and executor is not None:
            raise UsageError(f"{url} is planned by this machine alone: leave the cluster out")
        if plan_only:
            require_free(url)
        else:
            require_vacant(url, Path(target))
    lists = [exclude] if isinstance(exclude, (str, Path)) else exclude
    if plan_only:
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


def _as_source(
    source: Any,
    schema: Mapping[str, Field | str] | None,
    fields: Sequence[str] | None,
    *,
    class_order: str,
    splits: bool | None,
) -> Source:
    """Return the source that the arguments of `convert` name."""
    is_folder = isinstance(source, (str, Path))
    if not is_folder and (class_order != "plain" or splits is not None):
        raise UsageError("class_order and splits are options of image folders")
    if not is_folder and not hasattr(source, "scan"):
        return Samples(source, schema=schema, fields=fields)
    if schema is not None or fields is not None:
        raise UsageError("schema and fields are options of samples")
    if not is_folder:
        opened: Source = source
        return opened
    return get_source(DEFAULT_SOURCE).open(source, class_order=class_order, splits=splits)


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
                collect(works, staging)
                require_good(works, plan, staging)
            else:
                kept = build(works, plan, staging, builder)
        except DiskFull as error:
            if not any(load_result(task) for work in works for task in work.tasks):
                staging.discard()  # the user may choose another disk
            raise DiskFull(f"{error}{plan.large_files()}") from error
        finish(works, plan, staging)
    staging.publish()
    return kept
