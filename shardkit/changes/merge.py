"""Merge datasets into a new one (`shardkit merge`), by linking their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from shardkit.changes.combine import (
    common_schema,
    link_stores,
    manifests_of,
    open_splits,
    shape_of,
    splits_in_words,
)
from shardkit.changes.layers import joined, needed_stores
from shardkit.conversion.assemble import save_manifests
from shardkit.conversion.fingerprint import COMMAND, ConversionFingerprint
from shardkit.conversion.staging import StagingDirectory, clear_trash, open_staging
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.system.files import overlap


def merge(
    datasets: Sequence[str | Path], target: str | Path, *, force: bool = False
) -> dict[str, Manifest]:
    """Merge datasets, or their splits of the same name, into one, without reading records.

    Rows are in the order of the datasets. Shards are hard links to those of the datasets, or copies
    where the file system cannot link. The datasets must have the same format, recipe and fields, no
    key in common, and the same classes; some may lack the last classes of the others. Repeating a
    finished call does nothing.

    Args:
        datasets: Two or more datasets.
        target: A directory that is new, is empty, or (with ``force``) contains a dataset to
            replace.
        force: Replace a dataset in ``target``.

    Returns:
        The manifest of each split; "" without splits.

    Raises:
        UsageError: If a dataset or ``target`` cannot be used, or records would have to change.
        CorruptDataset: If a manifest or an index is damaged, or a shard has the wrong size.
        ConversionFailed: If writing fails.
    """
    paths = [Path(path) for path in datasets]
    target = Path(target)
    if isinstance(datasets, str) or len(paths) < 2:
        raise UsageError("merge requires a list of at least two datasets")
    for path in paths:
        if overlap(target, path):
            raise UsageError(f"{target} and {path} overlap;", remedy="choose another directory")
    opened = [open_splits(path) for path in paths]
    for path, splits in zip(paths, opened, strict=True):
        if splits.keys() != opened[0].keys():
            raise UsageError(
                f"{paths[0]} has {splits_in_words(opened[0])}, but {path} has "
                f"{splits_in_words(splits)};",
                remedy="merge datasets with the same splits, or single splits",
            )
    merged = {split: [splits[split] for splits in opened] for split in opened[0]}
    inputs = list(chain.from_iterable(merged.values()))
    common_schema([shape_of(dataset) for dataset in inputs])
    _require_same_layers(inputs)
    common_schema([shape_of(dataset.base) for dataset in inputs])
    if len({dataset.manifest.digest for dataset in inputs}) < len(inputs):
        raise UsageError("two of the datasets are the same")
    if not force and _is_merged(target, merged):
        clear_trash(target)
        return manifests_of(open_splits(target))
    with (
        open_staging(target, force=force) as staging,
        staging.publishing(_fingerprint(merged), force=force) as is_needed,
    ):
        if is_needed:
            staging.prune(())
            try:
                _make(merged, staging)
            except (UsageError, CorruptDataset):
                staging.discard()
                raise
    return manifests_of(open_splits(target))


def _make(merged: Mapping[str, Sequence[OpenedDataset]], staging: StagingDirectory) -> None:
    """Link the shards of all splits, and write the files of the merged dataset."""
    manifests = {}
    for split, datasets in merged.items():
        folder = staging.folder_of(split)
        base, *others = (
            link_stores(stores, folder / stores[0].folder, common_schema([*map(shape_of, stores)]))
            for stores in zip(*map(needed_stores, datasets), strict=True)
        )
        manifests[split] = joined(datasets[0], base, others, folder)
    save_manifests(manifests, staging.dataset)


def _require_same_layers(datasets: Sequence[OpenedDataset]) -> None:
    """Refuse datasets whose fields are in other layers than those of the first one."""
    first, *others = datasets
    for other in others:
        if _stored_fields(other) != _stored_fields(first):
            layered = first if other.is_store else other
            raise UsageError(
                f"fields of {layered.path} were changed after the conversion, but those of "
                f"{(first if layered is other else other).path} were not, or not in the same "
                "layers",
                remedy="merge copies created with `shardkit convert dataset`",
            )


def _stored_fields(dataset: OpenedDataset) -> list[list[str]]:
    """Return the fields that each store provides."""
    names = dataset.manifest.fields_by_name
    return [
        [name for name in names if dataset.store_of(name) is store]
        for store in needed_stores(dataset)
    ]


def _is_merged(target: Path, merged: Mapping[str, Sequence[OpenedDataset]]) -> bool:
    """Return whether an earlier run has merged the same shards."""
    try:
        existing = {} if StagingDirectory(target).is_ready else open_splits(target)
        return existing.keys() == merged.keys() and all(
            _stored_fields(existing[split]) == _stored_fields(datasets[0])
            and _shards([existing[split]]) == _shards(datasets)
            for split, datasets in merged.items()
        )
    except ShardkitError:
        return False


def _shards(datasets: Sequence[OpenedDataset]) -> list[list[str]]:
    """Return the digests of the shards of each store, over all datasets."""
    return [
        [shard.sha256 for store in stores for shard in store.manifest.shards]
        for stores in zip(*map(needed_stores, datasets), strict=True)
    ]


def _fingerprint(merged: Mapping[str, Sequence[OpenedDataset]]) -> ConversionFingerprint:
    settings: dict[str, object] = {COMMAND: "merge"} | {
        f"the datasets{f' of {split}' if split else ''}": [
            dataset.manifest.digest for dataset in datasets
        ]
        for split, datasets in merged.items()
    }
    return ConversionFingerprint(settings)
