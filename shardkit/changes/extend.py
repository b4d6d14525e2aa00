"""Extend a dataset and its layers by new shards: each provides some fields of the new images."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardkit.changes.combine import Shape, common_schema, link_stores, shape_of
from shardkit.changes.layers import joined, needed_stores, plan_layers
from shardkit.contracts import Images, Original, Scan
from shardkit.conversion.build import ShardTask
from shardkit.conversion.build_all import Builder
from shardkit.conversion.engine import Work, build, parts_of, prepare, require_good, run
from shardkit.conversion.plan import ConvertOptions, Plan
from shardkit.conversion.staging import StagingDirectory
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.parts import with_changed
from shardkit.kinds.field import Field, Schema
from shardkit.pipeline import at_work, convert_record
from shardkit.recipe import Recipe
from shardkit.record import LABEL, LABEL_FIELD, NO_LABEL, Record
from shardkit.sources.wrapper import SomeFields


class Provided(SomeFields):
    """The fields of new images that a dataset, or one of its layers, has.

    Args:
        scan: The scan of the images.
        names: The names of the wanted fields.
        splits: The split of the images for each of this one's, if they differ.
        recipe: What to do with the images first, since wanted fields follow them.
        labels: The new label of each label; None keeps them.
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

        Raises:
            BadImage: If the recipe cannot be applied.
        """
        if self._recipe is not None:
            with at_work(self._recipe):
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

    Args:
        scan: The new images.
        manifest: The manifest of the dataset.
    """
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


def joint_schema(work: Work[ShardTask], plan: Plan, dataset: OpenedDataset) -> Schema:
    """Return the schema of a dataset with new shards.

    Raises:
        UsageError: If these do not go with it.
    """
    split = plan.split(work.split)
    raw_shape = plan.options.recipe.raw_shape
    shape = Shape(work.folder, plan.options.to, split.recipe, raw_shape, plan.scan.schema)
    return common_schema([shape_of(dataset), shape])


def extended(work: Work[ShardTask], plan: Plan, dataset: OpenedDataset) -> Manifest:
    """Link the shards of a dataset next to new ones, and write the other files of both.

    Args:
        work: The new shards, in the folder of the new dataset.
        plan: Their plan.
        dataset: The dataset, without layers.

    Returns:
        The manifest to save with them.
    """
    new = parts_of(work, plan, first=len(dataset.manifest.shards))
    return link_stores([dataset], work.folder, joint_schema(work, plan, dataset), new)


@dataclass(frozen=True)
class Extension:
    """New images of a dataset: each store gets shards with those of its fields."""

    datasets: Mapping[str, OpenedDataset]
    """The dataset of each split."""
    plan: Plan
    """The plan of the images, for the shards of the conversion."""
    scan: Scan
    """The images with all fields."""
    builder: Builder

    def make(self, staging: StagingDirectory) -> dict[str, Manifest]:
        """Build the new shards, link the others, and return the manifest of each split."""
        old = {split: dataset.base for split, dataset in self.datasets.items()}
        works = [
            prepare(split, self.plan, staging, first=len(old[split.name].manifest.shards))
            for split in self.plan.splits
        ]
        for work in works:
            joint_schema(work, self.plan, old[work.split])  # before any work
        build(works, self.plan, staging, self.builder)
        bases = {work.split: extended(work, self.plan, old[work.split]) for work in works}
        longer: dict[str, list[Manifest]] = {split: [] for split in self.datasets}
        for stores in zip(*map(needed_stores, self.datasets.values()), strict=True):
            if stores[0].layer is not None:
                for split, manifest in self._extended(stores, bases, staging).items():
                    longer[split].append(manifest)
        return {
            split: joined(dataset, bases[split], longer[split], staging.dataset / split)
            for split, dataset in self.datasets.items()
        }

    def _extended(
        self,
        stores: Sequence[OpenedDataset],
        bases: Mapping[str, Manifest],
        staging: StagingDirectory,
    ) -> dict[str, Manifest]:
        """Build new shards of the stores of a layer, and return the manifest for each split."""
        plan = self._plan_store(stores, bases)
        works = [
            prepare(part, plan, staging, first=len(store.manifest.shards))
            for part, store in zip(plan.splits, stores, strict=True)
        ]
        for _ in run(works, replace(self.builder, on_progress=None)):
            pass
        require_good(works, plan, staging)
        manifests = [extended(work, plan, store) for work, store in zip(works, stores, strict=True)]
        return dict(zip(self.datasets, manifests, strict=True))

    def _plan_store(self, stores: Sequence[OpenedDataset], bases: Mapping[str, Manifest]) -> Plan:
        """Return the plan of the new rows of a layer: those of the images that were built."""
        dataset = next(iter(self.datasets.values()))
        scan = self.scan
        layer = stores[0].manifest
        fields = dict(layer.fields_by_name)
        names = [name for name in fields if dataset.store_of(name) is stores[0]]
        classes = layer.classes
        recipe = None
        if LABEL in names and scan.classes is not None:
            fields[LABEL], classes = Field("label", classes=scan.classes), scan.classes
        if any(fields[name].type.follows for name in names):
            recipe = self.plan.options.recipe
        parts = {store.split: split for store, split in zip(stores, self.datasets, strict=True)}
        source = Provided(scan, names, parts, recipe)
        splits = {}
        for split, part in zip(self.plan.splits, parts, strict=True):
            bad = {problem.path for problem in bases[split.name].skipped}
            paths = enumerate(split.source.paths()) if bad else ()
            good = [row for row, path in paths if path not in bad]
            images = split.source.take(good) if bad else split.source
            splits[part] = Images(source, part, images.entries)
        layer_scan = Scan(
            source=source,
            splits=splits,
            classes=classes,
            fields=fields,
            known=False,
            records=True,
            exact_sizes=False,
        )
        return without_empty_shards(plan_layers(layer_scan, ConvertOptions(to=layer.format)))


def without_empty_shards(plan: Plan) -> Plan:
    """Return a plan without shards for splits that get no images."""
    return replace(
        plan,
        splits=tuple(
            split if len(split.source) else replace(split, cuts=(0,), shard_bytes=())
            for split in plan.splits
        ),
    )
