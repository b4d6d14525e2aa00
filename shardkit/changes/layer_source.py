"""The files of fields that were changed after a conversion, for `verify --against` and `repair`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkit.changes.field_source import LayerSource
from shardkit.changes.field_table import TableValues, is_table
from shardkit.changes.field_values import FieldValues, FileValues
from shardkit.contracts import Images
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import CorruptDataset


def images_of(
    item: Any, datasets: Mapping[str, OpenedDataset], described: Mapping[str, Any]
) -> Mapping[str, Images]:
    """Return the rows of a layer, by its split, if a file has their values.

    Raises:
        UsageError: If the file cannot be read, or lacks a column.
        CorruptDataset: If the description is damaged.
    """
    values = described.get("values")
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], dict):
        return {}  # of several providers
    value = values[0]
    first = next(iter(datasets.values()))
    if not _is_file(item, first) or value.get("name") != Path(item).absolute().name:
        return {}
    return LayerSource(datasets, [_values(Path(item), datasets, value)]).scan().splits


def _is_file(item: Any, dataset: OpenedDataset) -> bool:
    """Return whether a source is a file of the kinds that fields are made from, or their folder."""
    if not isinstance(item, (str, Path)):
        return False
    path = Path(item)
    if dataset.split and path.is_dir():
        return (path / f"{dataset.split}.npy").is_file()
    return (is_table(path) or path.suffix == ".npy") and path.is_file()


def _values(
    path: Path, datasets: Mapping[str, OpenedDataset], described: Mapping[str, Any]
) -> FieldValues:
    """Return the values in a file."""
    fields = described.get("fields")
    key = described.get("key")
    if not isinstance(fields, str) or not isinstance(key, str | None):
        split = next(iter(datasets))
        raise CorruptDataset(f"{path}: the layer {split.rpartition('/')[2]} describes no source")
    if is_table(path):
        return TableValues(path, list(datasets.values()), key, [fields], keep_classes=True)
    return FileValues(path, fields, list(datasets.values()))
