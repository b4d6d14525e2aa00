"""The fields of new images that a store of the dataset has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardkit.contracts import Original, Scan
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.parts import with_changed
from shardkit.kinds.field import Field
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import LABEL, LABEL_FIELD, NO_LABEL, Record
from shardkit.sources.wrapper import SomeFields


class Provided(SomeFields):
    """The fields of new images that a dataset, or one of its layers, has.

    ``splits`` are the split of the images for each of this one's, if they differ. The ``recipe`` is
    applied first, since wanted fields follow the images. ``labels`` are the new label of each
    label; None keeps them.
    """

    def __init__(
        self,
        scan: Scan,
        names: Collection[str],
        splits: Mapping[str, str] | None = None,
        recipe: Recipe | None = None,
        labels: Sequence[int] | None = None,
    ) -> None:
        super().__init__(scan, names)
        self._splits = splits
        self._recipe = recipe
        self._labels = labels

    def inner(self, split: str) -> str:
        """Return the split of the source that has the images of a split."""
        return split if self._splits is None else self._splits[split]

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the description of the source, with the names of the other fields."""
        return with_changed(super().describe(split), self.schema.keys() - self.names, "")

    def narrow(self, record: Record) -> Record:
        """Return a record with the wanted fields alone, and with its new label.

        BadImage if the recipe cannot be applied.
        """
        if self._recipe is not None:
            record = convert_record(self._recipe, record, self.schema).record
        record = super().narrow(record)
        if self._labels is None or record.label == NO_LABEL:
            return record
        label = b"%d" % self._labels[record.label]
        return Record(record.key, {**record.fields, LABEL_FIELD: label})

    @classmethod
    def of_base(cls, scan: Scan, names: Collection[str], labels: Sequence[int] | None) -> Scan:
        """Return a scan with the fields of a dataset without its layers."""
        others = scan.schema.keys() - names
        originals = {split: _without(its, others) for split, its in scan.originals.items()}
        return replace(cls(scan, names, labels=labels).narrowed(scan), originals=originals)


def _without(original: Original, names: Collection[str]) -> Original:
    """Return what a dataset states of its conversion, for a copy without some fields."""
    parts = [part._replace(source=with_changed(part.source, names, "")) for part in original.parts]
    return original._replace(parts=parts)


def scan_of_base(scan: Scan, manifest: Manifest) -> Scan:
    """Return a scan with the fields that the shards of a dataset have, not its layers.

    It states how its dataset was made if the other one was made so, too.
    """
    if any(original.recipe != manifest.recipe for original in scan.originals.values()):
        scan = replace(scan, originals={})
    fields = dict(manifest.base.fields_by_name)
    classes = manifest.base.classes
    labels = None
    if LABEL in fields and scan.classes is not None:
        joint = dict.fromkeys([*(classes or ()), *scan.classes])
        numbers = {name: label for label, name in enumerate(joint)}
        labels = [numbers[name] for name in scan.classes]
        classes = tuple(joint)
        fields[LABEL] = Field("label", classes=classes)
    if scan.schema.keys() <= fields.keys() and labels in (None, [*range(len(labels or ()))]):
        return replace(scan, fields=fields, classes=classes)
    return replace(
        Provided.of_base(scan, scan.schema.keys() & fields.keys(), labels),
        fields=fields,
        classes=classes,
    )
