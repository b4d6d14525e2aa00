"""Append the images of a source to a dataset (`shardkit append`), in one step for readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.changes.appended_source import open_appended
from shardkit.changes.combine import manifests_of, open_splits
from shardkit.changes.extend import Extension
from shardkit.changes.new_images import new_images, require_alike
from shardkit.conversion.build_all import Builder, Processes
from shardkit.conversion.disk import as_failure
from shardkit.conversion.plan import ConvertOptions
from shardkit.conversion.staging import check_target, finish_interrupted, refuse_overlap
from shardkit.conversion.typed import with_types
from shardkit.dataset.manifest import Manifest
from shardkit.kinds.field import Field
from shardkit.options import option, require_valid, same_option, takes
from shardkit.system.temporary import TemporaryFolder, full_disk_named


@dataclass(frozen=True, kw_only=True)
class Appended:
    """The result of `append`."""

    manifests: dict[str, Manifest]
    """Split name, or "" without splits, to the manifest of its dataset."""
    images: int
    """Number of images appended."""
    left_out: list[str]
    """Paths of images that were already in the dataset; with splits, each starts with its split."""


@dataclass(frozen=True, kw_only=True)
class AppendOptions:
    """The options of `append`."""

    skip_existing: bool = option(
        False,
        help="Leave out images whose path or key is already in DATASET, such as the old images "
        "of a folder that has grown.",
    )
    missing: str = option(
        "fail",
        help="fail: append nothing if SRC lacks fields of DATASET. skip: append the images "
        "without these fields.",
        choices=("fail", "skip"),
    )
    on_error: str = same_option(ConvertOptions, "on_error")
    shard_size: int | str = same_option(ConvertOptions, "shard_size")
    shard_samples: int | None = same_option(ConvertOptions, "shard_samples")
    force: bool = option(False, help="Discard the work of a different unfinished run.")
    schema: Mapping[str, Field | str] | None = option(
        None,
        help="Fields of Python samples that differ from those of the dataset, such as a label "
        "with new classes after the existing ones.",
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

    Without ``skip_existing``, it is an error if the dataset already contains an image, or its
    conversion left it out. Content is not compared, except for sizes if the dataset stores images
    unchanged.

    Args:
        directory: The dataset, perhaps of splits.
        source: A path of the same kind as that of the dataset, read with the same options; Python
            samples with keys of their own; or a source of any kind with the same splits as the
            dataset.

    Raises:
        UsageError: If there is no dataset, or ``source`` does not match it.
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
        opened = open_appended(
            directory, source, datasets, missing=options.missing, schema=options.schema
        )
        refuse_overlap(opened, directory)
        temporary = TemporaryFolder()  # for the list of images, while the plan is used
        first = next(iter(datasets.values())).manifest
        with full_disk_named():
            lister = replace(builder, on_progress=None)
            scan = lister.scan(opened, temporary.path, first.classes)
        scan = with_types(scan, first.fields_by_name)
        require_alike(directory, datasets, scan, missing=options.missing)
        new = new_images(directory, datasets, scan, skip_existing=options.skip_existing)
        if new.images or any(new.scan.problems.values()):
            shards = ConvertOptions(
                to=first.format,
                shard_size=options.shard_size,
                shard_samples=options.shard_samples,
                on_error=options.on_error,
            )
            extension = Extension.planned(datasets, new.scan, shards, builder)
            extension.publish(directory, force=options.force)
    except OSError as error:
        raise as_failure(error, directory) from error
    after = manifests_of(open_splits(directory))
    before = sum(dataset.manifest.rows for dataset in datasets.values())
    images = sum(manifest.rows for manifest in after.values()) - before
    return Appended(manifests=after, images=images, left_out=sorted(new.left_out))
