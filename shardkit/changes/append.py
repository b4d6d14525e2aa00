"""Append the images of a source to a dataset (`shardkit append`), in one step for readers."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from shardkit.changes.combine import manifests_of, open_splits, splits_in_words
from shardkit.changes.extend import Extension, scan_of_base, without_empty_shards
from shardkit.changes.layers import Publication
from shardkit.contracts import Images, PartedSource, Scan, Source
from shardkit.conversion.build_all import Builder, Processes
from shardkit.conversion.disk import as_failure
from shardkit.conversion.fingerprint import COMMAND, ConversionFingerprint
from shardkit.conversion.parted_scan import scan_in_parts
from shardkit.conversion.plan import (
    ConvertOptions,
    Plan,
    make_plan,
)
from shardkit.conversion.staging import check_target, finish_interrupted, refuse_overlap
from shardkit.conversion.typed import with_types
from shardkit.dataset.index import Index
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.opened import OpenedDataset, is_dataset
from shardkit.dataset.reports import excluded_paths
from shardkit.dataset.source import DatasetSource
from shardkit.errors import UsageError
from shardkit.kinds.field import Field, Schema
from shardkit.options import option, require_valid, same_option, takes
from shardkit.record import LABEL
from shardkit.registry import get_source
from shardkit.sources.divided import Divided, is_divided
from shardkit.sources.opening import SampleOptions, wrapped_as
from shardkit.sources.samples import FIRST, Samples
from shardkit.system.pool import Progress
from shardkit.system.temporary import TemporaryFolder, full_disk_named
from shardkit.system.text import name_list, quoted
from shardkit.system.text_hashes import TextHashes

_NAMED = 3
"""Maximum images that a message names; it counts all."""


@dataclass(frozen=True, kw_only=True)
class Appended:
    """The result of `append`."""

    manifests: dict[str, Manifest]
    """Split name, or "" without splits, to the manifest of its dataset."""
    images: int
    """Number of images appended."""
    left_out: list[str]
    """Paths of images that the dataset had already; with splits, each starts with its split."""


@dataclass(frozen=True, kw_only=True)
class AppendOptions:
    """The options of `append`."""

    skip_existing: bool = option(
        False,
        help="Leave out images whose path or key is in DATASET already, such as the old ones of a "
        "folder that has grown.",
    )
    missing: str = option(
        "fail",
        help="fail: append nothing if SRC lacks fields of DATASET. skip: the new images lack them.",
        choices=("fail", "skip"),
    )
    on_error: str = same_option(ConvertOptions, "on_error")
    shard_size: int | str = same_option(ConvertOptions, "shard_size")
    shard_samples: int | None = same_option(ConvertOptions, "shard_samples")
    force: bool = option(False, help="Discard the work of another unfinished run.")
    schema: Mapping[str, Field | str] | None = option(
        None,
        help="Fields of Python samples that differ from those of the dataset: a label with its "
        "classes and the new ones.",
        is_keyword_only=True,
    )

    def __post_init__(self) -> None:
        require_valid(self)


@takes(AppendOptions, Processes)
def append(
    options: AppendOptions, processes: Processes, directory: str | Path, source: Any
) -> Appended:
    """Append images to a dataset, as new shards, with the recipe of the dataset.

    Existing rows keep their numbers and shards. The labels of new classes follow the existing ones.
    If the dataset was divided by ``val`` or ``test``, the same rule divides the new images.
    Readers see the old dataset until the new one replaces it in one step; loaders that have it open
    continue with the old one or report that it was replaced. Repeat an interrupted call to resume
    it. Repeating a finished call does nothing.

    An image that the dataset has already, or that its conversion left out, is an error without
    ``skip_existing``. Content is not compared, except for sizes if the dataset stores images
    unchanged.

    Args:
        directory: The dataset, perhaps of splits.
        source: A path of the same kind as that of the dataset, read with the same options; Python
            samples with keys of their own; or a source of any kind, with the splits of the dataset.

    Raises:
        UsageError: If there is no dataset, or ``source`` does not go with it.
        BadImages: If images are bad and ``on_error`` is ``fail``.
        CorruptDataset: If a manifest or an index is damaged, or a shard has the wrong size.
        ConversionFailed: If writing fails.
    """
    directory = Path(directory)
    builder = Builder(**vars(processes))
    try:
        finish_interrupted(directory)
        datasets = open_splits(directory)
        check_target(directory, force=True)
        opened = _open(
            directory,
            source,
            datasets,
            missing=options.missing,
            schema=options.schema,
        )
        refuse_overlap(opened, directory)
        temporary = TemporaryFolder()  # for the list of images, while the plan is used
        with full_disk_named():
            scan = _scan(opened, datasets, temporary.path, builder)
        first = next(iter(datasets.values())).manifest
        scan = with_types(scan, first.fields_by_name)
        _require_alike(directory, datasets, scan, missing=options.missing)
        new = _new_images(directory, datasets, scan, skip_existing=options.skip_existing)
        if new.images or any(new.scan.problems.values()):
            of_base = _with_originals(scan_of_base(new.scan, first), first)
            shards = ConvertOptions(
                to=first.format,
                shard_size=options.shard_size,
                shard_samples=options.shard_samples,
                on_error=options.on_error,
                **({} if of_base.originals else _way(next(iter(datasets.values())))),
            )
            plan = without_empty_shards(make_plan(of_base, shards))
            if builder.on_progress:
                builder.on_progress(Progress(total=new.images))
            extension = Extension(datasets, plan, new.scan, builder)
            request = _fingerprint(plan, datasets)
            Publication(directory, datasets, request, options.force).run(extension.make)
    except OSError as error:
        raise as_failure(error, directory) from error
    after = manifests_of(open_splits(directory))
    before = sum(dataset.manifest.rows for dataset in datasets.values())
    images = sum(manifest.rows for manifest in after.values()) - before
    return Appended(manifests=after, images=images, left_out=sorted(new.left_out))


def _with_originals(scan: Scan, manifest: Manifest) -> Scan:
    """Return a scan that states how its dataset was made, if the other one was made so, too."""
    originals = scan.originals.values()
    if all(original.recipe == manifest.recipe for original in originals):
        return scan
    return replace(scan, originals={})


def _open(
    directory: Path,
    source: Any,
    datasets: Mapping[str, OpenedDataset],
    *,
    missing: str,
    schema: Mapping[str, Field | str] | None,
) -> Source:
    """Open a path as the source that the dataset was first made from, or Python samples.

    If that was divided into splits, so is this one, unless it has folders for these splits.
    """
    if not isinstance(source, (str, Path, Source)):
        return _samples(source, datasets, missing=missing, schema=schema)
    if schema is not None:
        raise UsageError("schema is an option of samples")
    if isinstance(source, Source):
        return source
    described = _first_sources(datasets)
    kind = {str(description.get("kind")) for description in described.values()}.pop()
    if is_dataset(source) and kind != DatasetSource.kind:
        return DatasetSource(source)
    find = partial(get_source(kind).find, Path(source))
    try:
        opened = wrapped_as(described, find)
        if isinstance(opened, Divided) and (opened.stratified or _has_folders(source, datasets)):
            return find(described)  # a stratified division could move images of the dataset
    except UsageError as error:
        raise UsageError(
            f"{directory} was made with `convert {kind}`, and {error.problem}", remedy=error.remedy
        ) from error
    return opened


def _samples(
    samples: Any,
    datasets: Mapping[str, OpenedDataset],
    *,
    missing: str,
    schema: Mapping[str, Field | str] | None,
) -> Source:
    """Return Python samples with the fields of the dataset, divided as that was."""
    manifests = [dataset.manifest for dataset in datasets.values()]
    manifest = manifests[0]
    described = _first_sources(datasets)
    names = next(iter(described.values())).get("fields")
    fields: dict[str, Field | str] = {**manifest.fields_by_name}
    classes = tuple(getattr(samples, "classes", None) or ())
    label = manifest.fields_by_name.get(LABEL)
    if label is not None and classes != (label.classes or ())[: len(classes)]:
        fields[LABEL] = replace(label, classes=classes)  # which the numbers of their labels mean
    fields.update(schema or {})
    opened = Samples(samples, SampleOptions(schema=fields, fields=names))
    rows = sum(manifest.rows + len(manifest.skipped) for manifest in manifests)
    optional = manifest.fields_by_name if missing == "skip" else manifest.lacking
    opened = opened.after(rows, with_keys=True, optional=optional)
    return wrapped_as(described, lambda _: opened)


def _has_folders(source: str | Path, names: Collection[str]) -> bool:
    """Return whether all folders in a folder have some of these names."""
    folders = {path.name for path in Path(source).glob("*") if path.is_dir()}
    return bool(folders) and folders <= set(names)


def _way(dataset: OpenedDataset) -> dict[str, Any]:
    """Return the recipe of a dataset and the order of its rows, as options."""
    seed = dataset.parts[0].manifest.source.get("seed")
    return {"recipe": dataset.manifest.made_with, "shuffle": seed is not None, "seed": seed or 0}


@dataclass(frozen=True)
class _New:
    """The images of a source that a dataset lacks."""

    scan: Scan
    left_out: list[str]

    @property
    def images(self) -> int:
        return sum(map(len, self.scan.splits.values()))


def _scan(
    source: Source, datasets: Mapping[str, OpenedDataset], folder: Path, builder: Builder
) -> Scan:
    """Scan the source, in parts if possible, with the classes of the dataset."""
    classes = next(iter(datasets.values())).manifest.classes
    if not isinstance(source, PartedSource):
        return source.scan(classes)
    lister = replace(builder, on_progress=None)
    return scan_in_parts(source, folder, lambda _: None, lister.list_parts, classes)


def _new_images(
    directory: Path, datasets: Mapping[str, OpenedDataset], scan: Scan, *, skip_existing: bool
) -> _New:
    """Divide the images of a scan into new and existing ones."""
    source = scan.source
    splits = dict[str, Images]()
    left_out = list[str]()
    changed = list[str]()
    problems = dict(scan.problems)
    ignored = dict(scan.ignored)
    by_key = scan.records or source.kind == Samples.kind  # paths may be numbers of samples
    existing = _existing(datasets, scan)
    for split, dataset in datasets.items():
        manifest = dataset.manifest
        images = scan.splits.get(split, Images(source, split, ()))
        prefix = dataset.prefix
        sizes, keys = existing[split]
        bad = {problem.path for problem in manifest.skipped}
        bad |= excluded_paths(dataset.path, manifest.files) or set()
        exact = scan.exact_sizes and manifest.made_with.keeps_bytes
        rows = array("q")
        for row, entry in enumerate(images.entries):
            path = "" if by_key else entry.path
            if path not in sizes and entry.key not in keys and path not in bad:
                rows.append(row)
                continue
            left_out.append(prefix + (path or entry.key))
            if path and exact and sizes.get(path, entry.bytes) != entry.bytes:
                changed.append(prefix + entry.path)
        splits[split] = images if len(rows) == len(images) else images.take(rows)
        if skip_existing:
            problems[split] = [
                bad_file for bad_file in problems.get(split, ()) if bad_file.path not in bad
            ]
            ignored[split] = []  # most are those that the dataset lists already
    new = _New(replace(scan, splits=splits, problems=problems, ignored=ignored), left_out)
    if changed:
        raise UsageError(
            f"{len(changed)} images of {source} have the names of images in {directory} and "
            f"other content ({_some(changed)})",
            remedy="rename them, or convert everything again",
        )
    remedy = "skip_existing=True leaves these out"
    if source.kind == Samples.kind:
        remedy += "; give samples keys of their own (key=) to append others"
    if left_out and not skip_existing and (new.images or not _is_last(datasets, left_out, scan)):
        raise UsageError(
            f"{directory} already has {len(left_out)} of the images of {source} by path or key "
            f"({_some(left_out)}): {remedy}"
        )
    return new


def _existing(
    datasets: Mapping[str, OpenedDataset], scan: Scan
) -> dict[str, tuple[Mapping[str, int], Set[str]]]:
    """Return the sizes, by path, and the keys of all images of each split that a scan may name.

    If the dataset was divided, an image on any side is one of each: it must not be on two.
    """
    existing = dict[str, tuple[Mapping[str, int], Set[str]]]()
    is_one = is_divided(_first_sources(datasets))
    for group in [list(datasets)] if is_one else [[split] for split in datasets]:
        indexes = [Index(datasets[name].path, datasets[name].manifest.rows) for name in group]
        paths = TextHashes()
        keys = TextHashes()
        for split in group:
            for entry in scan.splits[split].entries if split in scan.splits else ():
                paths.add(entry.path)
                keys.add(entry.key)
        for piece in chain.from_iterable(index.pieces() for index in indexes):
            paths.add_all(piece.paths)
            keys.add_all(piece.keys)
        same_paths = paths.repeated()
        same_keys = keys.repeated()
        sizes = dict[str, int]()
        stored_keys = set[str]()
        some = indexes if same_paths or same_keys else ()
        for piece in chain.from_iterable(index.pieces() for index in some):
            lengths = zip(piece.paths, piece.rows["length"].tolist(), strict=True)
            sizes.update((path, size) for path, size in lengths if hash(path) in same_paths)
            stored_keys.update(key for key in piece.keys if hash(key) in same_keys)
        existing |= dict.fromkeys(group, (sizes, stored_keys))
    return existing


def _first_sources(datasets: Mapping[str, OpenedDataset]) -> dict[str, dict[str, Any]]:
    """Return what the manifests state about the source that the dataset was first made from."""
    return {split: dataset.parts[0].manifest.source for split, dataset in datasets.items()}


def _is_last(datasets: Mapping[str, OpenedDataset], left_out: list[str], scan: Scan) -> bool:
    """Return whether an earlier run has appended exactly these images."""
    count = 0
    for split, dataset in datasets.items():
        original = scan.originals.get(split)
        described = {**scan.source.describe(split), "kind": scan.source.kind}
        described.pop(FIRST, None)  # an earlier run has added to that number
        made = [part.source for part in original.parts] if original else [described]
        last = [part.manifest for part in dataset.parts[-len(made) :]]
        if len(last) < len(made) or not all(map(_states, last, made)):
            return False
        count += sum(part.rows + (0 if original else len(part.skipped)) for part in last)
    return count == len(left_out)


def _states(manifest: Manifest, source: Mapping[str, Any]) -> bool:
    return all(manifest.source.get(name) == value for name, value in source.items())


def _require_alike(
    directory: Path, datasets: Mapping[str, OpenedDataset], scan: Scan, *, missing: str
) -> None:
    """Refuse images whose splits or fields are not those of the dataset."""
    unknown = sorted(scan.splits.keys() - datasets.keys())
    if unknown and is_divided(_first_sources(datasets)):
        raise UsageError(
            f"{directory} was divided with --stratify, and dividing again would move images "
            "that it has",
            remedy=f"put the new images into folders {' and '.join(datasets)}",
        )
    if unknown:
        raise UsageError(
            f"{scan.source} has {splits_in_words(scan.splits)}, and {directory} has "
            f"{splits_in_words(datasets)};",
            remedy="append a source with folders or splits of these names",
        )
    manifest = next(iter(datasets.values())).manifest
    schema = manifest.fields_by_name
    is_empty = not any(map(len, scan.splits.values()))
    given = {
        name: field
        for name, field in scan.schema.items()
        if name in schema or name not in manifest.removed
    }
    lacking = [name for name in schema if name not in given and not (is_empty and name == LABEL)]
    if all(
        _fits(name, field, schema) or (is_empty and name == LABEL) for name, field in given.items()
    ):
        if not lacking or missing == "skip":
            return
        remedy = f"missing='skip' appends images without {' and '.join(lacking)}"
    else:
        remedy = "the fields of all records must be the same"
    before, now = (
        name_list(f"{name} ({field})" for name, field in fields.items())
        for fields in (schema, scan.schema)
    )
    raise UsageError(f"{scan.source} has the fields {now}, and {directory} has {before}: {remedy}")


def _fits(name: str, field: Field, schema: Schema) -> bool:
    """Return whether a field is one of a schema; the classes of labels may grow."""
    return name in schema and (name == LABEL or schema[name] == field)


def _fingerprint(plan: Plan, datasets: Mapping[str, OpenedDataset]) -> ConversionFingerprint:
    """Return everything that determines the result: also the dataset to append to."""
    planned = plan.fingerprint()
    digests = [dataset.manifest.digest for dataset in datasets.values()]
    changed = {COMMAND: "append", "the dataset": digests}
    return replace(planned, settings={**planned.settings, **changed})


def _some(names: list[str]) -> str:
    more = " ..." if len(names) > _NAMED else ""
    return ", ".join(quoted(name) for name in names[:_NAMED]) + more
