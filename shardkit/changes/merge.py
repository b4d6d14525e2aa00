"""Merge datasets into a new one (`shardkit merge`), by linking their shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from shardkit.changes.combine import (
    common_schema,
    in_several,
    link_shards,
    load_splits,
    open_splits,
    shape_of,
)
from shardkit.changes.layers import as_layer, described, needed_layers, require_same_rows
from shardkit.conversion.assemble import Assembly, save_manifests
from shardkit.conversion.engine import publishing
from shardkit.conversion.fingerprint import COMMAND, ConversionFingerprint
from shardkit.conversion.staging import StagingDirectory, clear_trash, open_staging
from shardkit.dataset.manifest import Layer, Manifest, save_manifest
from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.parts import entries_of, source_of
from shardkit.errors import CorruptDataset, ShardkitError, UsageError
from shardkit.system.files import as_name, overlap
from shardkit.system.text import name_list


def merge(
    datasets: Sequence[str | Path], target: str | Path, *, force: bool = False
) -> dict[str, Manifest]:
    """Merge datasets, or their splits of the same name, into one, without reading a record.

    Rows follow one another in the order of the datasets. Shards are hard links to those of the
    datasets, or copies where the file system cannot link. The datasets must have the same format,
    recipe and fields, no key in common, and the same classes; some may lack the last classes of the
    others. Repeating a finished call does nothing.

    Args:
        datasets: Two or more datasets.
        target: A directory that is new, empty, or (with ``force``) holds a dataset to replace.
        force: Replace a dataset in ``target``.

    Returns:
        The manifest of each split; "" without splits.

    Raises:
        UsageError: If a dataset or ``target`` cannot be used, or records cannot stay as they are.
        CorruptDataset: If a manifest or an index is damaged, or a shard has the wrong size.
        ConversionFailed: If writing fails.
    """
    places = [Path(path) for path in datasets]
    target = Path(target)
    if isinstance(datasets, str) or len(places) < 2:
        raise UsageError("merge requires a list of at least two datasets")
    _refuse_overlap(places, target)
    opened = [open_splits(place) for place in places]
    for place, splits in zip(places, opened, strict=True):
        if splits.keys() != opened[0].keys():
            raise UsageError(
                f"{places[0]} has {_named(opened[0])}, {place} has {_named(splits)}; merge "
                "datasets with the same splits, or single splits"
            )
    merged = {split: [splits[split] for splits in opened] for split in opened[0]}
    parts = list(chain.from_iterable(merged.values()))
    common_schema([shape_of(dataset) for dataset in parts])
    _require_same_layers(parts)
    common_schema([shape_of(dataset.base) for dataset in parts])
    if len({dataset.manifest.digest for dataset in parts}) < len(parts):
        raise UsageError("two of the datasets are the same")
    if not force and _is_merged(target, merged):
        clear_trash(target)
        return load_splits(target)
    with (
        open_staging(target, force=force) as staging,
        publishing(staging, _fingerprint(merged), force=force) as is_needed,
    ):
        if is_needed:
            staging.prune(())
            try:
                _make(merged, staging)
            except (UsageError, CorruptDataset):
                staging.discard()
                raise
    return load_splits(target)


def _make(merged: Mapping[str, Sequence[OpenedDataset]], staging: StagingDirectory) -> None:
    """Link the shards of all splits, and write the files of the merged dataset."""
    manifests = {}
    for split, datasets in merged.items():
        folder = staging.dataset / as_name(split)
        first = datasets[0].manifest
        base = _linked([dataset.base for dataset in datasets], folder)
        extended = dict[str, Layer]()
        for used in zip(*map(_used_layers, datasets), strict=True):
            place = folder / used[0].folder
            opened = [d.layer(layer) for d, layer in zip(datasets, used, strict=True)]
            manifest = _linked(opened, place)
            require_same_rows(base, manifest)
            save_manifest(manifest, place)
            extended[used[0].name] = as_layer(manifest, place, used[0].operation)
        layers = [extended.get(layer.name, layer) for layer in needed_layers(first)]
        manifests[split] = described(base, layers, len(layers), folder)
    save_manifests(manifests, staging.dataset)


def _linked(datasets: Sequence[OpenedDataset], folder: Path) -> Manifest:
    """Link the shards of datasets without layers, and return the manifest of all."""
    pieces = []
    shards = 0
    for dataset in datasets:
        pieces.append(link_shards(dataset, folder, first=shards))
        shards += len(dataset.manifest.shards)
    first = datasets[0].manifest
    assembly = Assembly(
        folder=folder,
        format=first.format,
        schema=common_schema([shape_of(dataset) for dataset in datasets]),
        raw_shape=first.raw_shape,
        recipe=first.recipe,
        source=source_of([part for d in datasets for part in entries_of(d.manifest)]),
        software=datasets[-1].manifest.software,
    )
    return assembly.finish(pieces, partial(in_several, [dataset.path for dataset in datasets]))


def _require_same_layers(datasets: Sequence[OpenedDataset]) -> None:
    """Refuse datasets whose fields are in other layers than those of the first one."""
    first, *others = datasets
    for other in others:
        if _layers(other.manifest) != _layers(first.manifest):
            layered = other if other.manifest.layers else first
            raise UsageError(
                f"fields of {layered.path} were changed after the conversion, and those of "
                f"{(first if layered is other else other).path} were not, or in other layers: "
                "merge copies, as `shardkit convert dataset` makes them"
            )


def _used_layers(dataset: OpenedDataset) -> list[Layer]:
    """Return the layers that fields of a dataset come from."""
    return [layer for layer in needed_layers(dataset.manifest) if layer.files]


def _layers(manifest: Manifest) -> list[list[str]]:
    """Return the fields of each layer that some come from, and of the dataset itself."""
    sources = [None, *(layer for layer in needed_layers(manifest) if layer.files)]
    return [
        [name for name in manifest.fields_by_name if manifest.layer_of(name) == source]
        for source in sources
    ]


def _named(splits: Collection[str]) -> str:
    return "no splits" if "" in splits else f"the splits {name_list(splits)}"


def _refuse_overlap(places: Sequence[Path], target: Path) -> None:
    for place in places:
        if overlap(target, place):
            raise UsageError(f"{target} and {place} overlap; choose another directory")


def _is_merged(target: Path, merged: Mapping[str, Sequence[OpenedDataset]]) -> bool:
    """Return whether an earlier run has merged the same shards."""
    try:
        manifests = {} if StagingDirectory(target).is_ready else load_splits(target)
    except ShardkitError:
        return False
    return manifests.keys() == merged.keys() and all(
        [shard.sha256 for shard in manifests[split].shards]
        == [shard.sha256 for dataset in datasets for shard in dataset.manifest.shards]
        and _layers(manifests[split]) == _layers(datasets[0].manifest)
        and _layer_shards([manifests[split]]) == _layer_shards([d.manifest for d in datasets])
        for split, datasets in merged.items()
    )


def _layer_shards(manifests: Sequence[Manifest]) -> list[str]:
    return sorted(
        file.sha256
        for manifest in manifests
        for layer in needed_layers(manifest)
        for file in layer.files
        if file not in layer.index_files
    )


def _fingerprint(merged: Mapping[str, Sequence[OpenedDataset]]) -> ConversionFingerprint:
    settings: dict[str, object] = {COMMAND: "merge"} | {
        f"the datasets{f' of {split}' if split else ''}": [
            dataset.manifest.digest for dataset in datasets
        ]
        for split, datasets in merged.items()
    }
    return ConversionFingerprint(settings=settings, images={}, files={}, on_error="fail")
