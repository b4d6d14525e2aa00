"""Merge the layers of a dataset into new shards, which erases replaced and removed values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import publish_plan
from shardkit.conversion.disk import as_failure
from shardkit.conversion.fields import Changed
from shardkit.conversion.plan import ConvertOptions, make_plan
from shardkit.conversion.staging import check_target, finish_interrupted, open_staging
from shardkit.dataset.opened import OpenedDirectory
from shardkit.dataset.source import DatasetSource
from shardkit.errors import UsageError
from shardkit.options import about, option, part, require_valid, same_option, takes
from shardkit.system.pool import Report


@dataclass(frozen=True, kw_only=True)
class CompactOptions:
    """The options of `compact_fields`."""

    shard_size: int | str = same_option(ConvertOptions, "shard_size")
    shard_samples: int | None = same_option(ConvertOptions, "shard_samples")
    workers: int = same_option(Builder, "workers")
    force: bool = option(False, help="Discard the work of another unfinished run.")
    on_progress: Report | None = same_option(Builder, "on_progress")

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(frozen=True)
class CompactArguments(CompactOptions):
    """The arguments of `compact_fields`."""

    directory: str | Path = field(metadata=about("The dataset, perhaps of splits."))


@takes(CompactArguments)
def compact_fields(arguments: CompactArguments) -> Changed:
    """Merge the layers of a dataset into new shards; the content digest stays the same.

    Values that were replaced or removed are erased, and no change can be undone any more. Readers
    see the old dataset until the new one replaces it in one step. Repeat an interrupted call to
    resume it. ``convert dataset`` does the same into another directory.

    Raises:
        UsageError: If there is no dataset, or it is attached.
        BadImages: If a record is damaged.
        CorruptDataset: If a manifest or an index is damaged.
        ConversionFailed: If writing fails.
    """
    directory = Path(arguments.directory)
    try:
        finish_interrupted(directory)
        opened = OpenedDirectory(directory)
        splits = opened.own_splits(
            f"{directory} reads archives of another program in place: merge its layers into a new "
            "dataset with `shardkit convert dataset`"
        )
        manifests = {name: dataset.manifest for name, dataset in splits.items()}
        if not any(manifest.layers for manifest in manifests.values()):
            return Changed(manifests=manifests, written=False)
        check_target(directory, force=True)
        options = ConvertOptions(
            to=next(iter(manifests.values())).format,
            shard_size=arguments.shard_size,
            shard_samples=arguments.shard_samples,
        )
        plan = make_plan(DatasetSource(directory).scan(), options)
        with open_staging(directory, force=True) as staging:
            if OpenedDirectory(directory).manifests() != manifests:
                raise UsageError(f"another process has changed {directory}: rerun the command")
            builder = part(arguments, Builder)
            converted = publish_plan(plan, staging, builder, force=arguments.force)
    except OSError as error:
        raise as_failure(error, directory) from error
    return Changed(manifests=converted.manifests)
