"""The files of fields that were changed after a conversion, for `verify --against` and `repair`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Images
from shardkit.conversion.field_source import LayerSource
from shardkit.conversion.field_table import TableValues, is_table
from shardkit.conversion.field_values import FieldValues, FileValues
from shardkit.dataset.manifest import Layer
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import CorruptDataset
from shardkit.recipe import Recipe
from shardkit.verification.record_comparison import SourceComparison
from shardkit.verification.shard_check import ShardCheck


class Sources(NamedTuple):
    """The sources that a user named, divided by what was made from them."""

    base: Any
    """Those of the conversion; None without any."""
    layers: Mapping[str, Images]
    """The rows of each layer whose file was named, by its split, such as ``val/layers/000001``."""


def divide_sources(splits: Mapping[str, OpenedDataset], given: Any) -> Sources:
    """Find the files that the fields of layers were made from, by their names.

    Args:
        splits: The dataset of each split.
        given: A source, or a list of these.

    Raises:
        UsageError: If a file cannot be read, or lacks a column.
        CorruptDataset: If a layer is damaged, or describes no source.
    """
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    base, layers = list[Any](), dict[str, Images]()
    first = next(iter(splits.values()))
    named = [(layer, _described(first, layer)) for layer in first.manifest.layers if layer.files]
    for item in items:
        made = [
            (layer, described)
            for layer, described in named
            if _is_file(item, first) and described.get("name") == Path(item).absolute().name
        ]
        if not made:
            base.append(item)
        for layer, described in made:
            layers |= _images(splits, layer, Path(item), described)
    if not layers:
        return Sources(given, layers)
    return Sources(base if len(base) > 1 else next(iter(base), None), layers)


def _is_file(item: Any, dataset: OpenedDataset) -> bool:
    """Return whether a source is a file of the kinds that fields are made from, or their folder."""
    if not isinstance(item, (str, Path)):
        return False
    path = Path(item)
    if dataset.split and path.is_dir():
        return (path / f"{dataset.split}.npy").is_file()
    return (is_table(path) or path.suffix == ".npy") and path.is_file()


def _described(dataset: OpenedDataset, layer: Layer) -> Mapping[str, Any]:
    """Return the description of the values of a layer; empty for those of several providers."""
    try:
        values = dataset.layer(layer).manifest.source.get("values")
    except CorruptDataset:  # found by the check of its files
        return {}
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], dict):
        return values[0]
    return {}


def _images(
    splits: Mapping[str, OpenedDataset], layer: Layer, path: Path, described: Mapping[str, Any]
) -> Mapping[str, Images]:
    datasets = {f"{dataset.prefix}{layer.folder}": dataset for dataset in splits.values()}
    fields, key = described.get("fields"), described.get("key")
    if not isinstance(fields, str) or not isinstance(key, str | None):
        raise CorruptDataset(f"{path}: the layer {layer.name} describes no source")
    values: FieldValues
    if is_table(path):
        values = TableValues(path, list(datasets.values()), key, [fields], keep_classes=True)
    else:
        values = FileValues(path, fields, list(datasets.values()))
    return LayerSource(datasets, [values]).scan().splits


def compared_with(task: ShardCheck, images: Images) -> ShardCheck:
    """Return the check of a shard of a layer that also compares it with its file.

    Args:
        task: The check.
        images: The rows of the layer.
    """
    entries: Sequence[Any] = images.entries[task.start : task.start + task.entry.rows]
    against = SourceComparison(
        source=images.source,
        split=images.split,
        entries=list(entries),
        recipe=Recipe.restored(task.meta["recipe"]),
        schema=task.schema,
        changed=(),
        exact=True,
    )
    return replace(task, against=against)
