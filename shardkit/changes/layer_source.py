"""The files of fields that were changed after a conversion, for `verify --against` and `repair`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.changes.field_source import LayerSource
from shardkit.changes.field_table import TableValues, is_table
from shardkit.changes.field_values import FieldValues, FileValues
from shardkit.contracts import Scan
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import CorruptDataset


@dataclass(frozen=True)
class LayerFile:
    """A source that a user named, which may be that of a layer."""

    item: Any
    dataset: OpenedDataset
    """A dataset with the layer: that of any split."""
    described: Mapping[str, Any]

    @property
    def _value(self) -> Mapping[str, Any]:
        """The description of the file; empty for a layer with values of several providers."""
        values = self.described.get("values")
        if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], dict):
            return {}
        return values[0]

    def is_source(self) -> bool:
        """Return whether it has that name, and is a file of fields, or a folder of these."""
        if not isinstance(self.item, (str, Path)):
            return False
        path = Path(self.item)
        if self._value.get("name") != path.absolute().name:
            return False
        if self.dataset.split and path.is_dir():
            return (path / f"{self.dataset.split}.npy").is_file()
        return (is_table(path) or path.suffix == ".npy") and path.is_file()

    def scan(self, datasets: Mapping[str, OpenedDataset]) -> Scan:
        """Return the rows of the layer, by its split."""
        return LayerSource(datasets, [self._values(datasets)]).scan()

    def _values(self, datasets: Mapping[str, OpenedDataset]) -> FieldValues:
        path = Path(self.item)
        fields = self._value.get("fields")
        key = self._value.get("key")
        if not isinstance(fields, str) or not isinstance(key, str | None):
            layer = next(iter(datasets)).rpartition("/")[2]
            raise CorruptDataset(f"{path}: the layer {layer} describes no source")
        if is_table(path):
            return TableValues(path, list(datasets.values()), key, [fields], keep_classes=True)
        return FileValues(path, fields, list(datasets.values()))
