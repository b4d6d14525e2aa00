"""Extend a dataset and its layers by new shards: each provides some fields of the new images."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Images, Original, Scan, Source
from shardkit.conversion.build import ShardTask
from shardkit.conversion.build_all import Builder
from shardkit.conversion.combine import Shape, common_schema, in_several, link_shards, shape_of
from shardkit.conversion.engine import Work, assembly, parts_of, prepare, require_good, run
from shardkit.conversion.layers import (
    as_layer,
    described,
    needed_layers,
    plan_layers,
    require_same_rows,
)
from shardkit.conversion.plan import Plan
from shardkit.conversion.staging import StagingDirectory
from shardkit.dataset.manifest import Layer, Manifest, save_manifest
from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.parts import entries_of, source_of, with_changed
from shardkit.errors import Problem
from shardkit.kinds.field import Field, Schema
from shardkit.recipe import Recipe
from shardkit.record import IMAGE, LABEL, LABEL_FIELD, META_FIELD, NO_LABEL, Record, dump_json


@dataclass(frozen=True)
class Provided(Source):
    """The images of a source with some of their fields."""

    source: Source
    schema: Schema
    """All fields of the images."""
    names: Collection[str]
    """The names of the wanted fields."""
    splits: Mapping[str, str]
    """The split of ``source`` for each of this one's."""
    recipe: Recipe | None = None
    """What to do with the images first, since wanted fields follow them."""
    labels: Sequence[int] | None = None
    """The new label of each label; None keeps them."""

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the source."""
        return self.source.kind

    def __str__(self) -> str:
        return str(self.source)

    def paths(self) -> Sequence[Path]:
        """Return the paths of the source."""
        return self.source.paths()

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of the source."""
        return self.source.scan(classes)

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the description of the source, with the names of the other fields."""
        others = self.schema.keys() - self.names
        described = self.source.describe(self.splits[split])
        return with_changed(described, others, "")

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image with the wanted fields alone.

        Raises:
            BadImage: As for `Source.read`, or if the recipe cannot be applied.
        """
        record = self.source.read(self.splits[split], entry)
        if self.recipe is not None:
            with self.recipe.at_work():
                record = self.recipe.apply(record, self.schema)
        record = with_fields(record, self.schema, self.names)
        if self.labels is None or record.label == NO_LABEL:
            return record
        label = b"%d" % self.labels[record.label]
        return Record(record.key, {**record.fields, LABEL_FIELD: label})

    def locate(self, split: str, entry: Entry) -> str:
        """Return the location of an image."""
        return self.source.locate(self.splits[split], entry)

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a split as the conversion listed them."""
        return self.source.relist(scan, split, skipped)

    def ahead(self, split: str, entries: Sequence[Entry]) -> None:
        """Start to read images; see `shardkit.contracts.Source.ahead`."""
        self.source.ahead(self.splits[split], entries)

    def only(self, entries: Sequence[Entry]) -> Source:
        """Return a source with these images alone, if they are in memory."""
        return replace(self, source=self.source.only(entries))

    @classmethod
    def of(cls, scan: Scan, names: Collection[str], labels: Sequence[int] | None = None) -> Scan:
        """Return a scan with some of its fields."""
        source = cls(scan.source, scan.schema, names, {s: s for s in scan.splits}, labels=labels)
        return replace(
            scan,
            source=source,
            splits={split: replace(images, source=source) for split, images in scan.splits.items()},
            originals={
                split: _without(original, scan.schema.keys() - names)
                for split, original in scan.originals.items()
            },
            exact_sizes=False,
        )


def _without(original: Original, names: Collection[str]) -> Original:
    """Return what a dataset states of its conversion, for a copy without some fields."""
    parts = [part._replace(source=with_changed(part.source, names, "")) for part in original.parts]
    return original._replace(parts=parts)


def with_fields(record: Record, schema: Schema, names: Collection[str]) -> Record:
    """Return a record with some of its fields.

    Args:
        record: The record.
        schema: All its fields.
        names: The names of the wanted ones.
    """
    fields = {
        stored: content
        for stored, content in record.fields.items()
        if _field_of(stored, schema) in names
    }
    meta = record.meta
    facts = meta.keys() - schema.keys() if IMAGE in names else {"path"}
    kept = {name: value for name, value in meta.items() if name in facts or name in names}
    return Record(record.key, {**fields, META_FIELD: dump_json(kept)})


def _field_of(stored: str, schema: Schema) -> str:
    """Return the field that a stored name is of; the metadata are of none."""
    for name, field in schema.items():
        if stored == field.stored_name(name):
            return name
    return "" if stored == META_FIELD else stored.rpartition(".")[0] or IMAGE


def scan_of_base(scan: Scan, manifest: Manifest) -> Scan:
    """Return a scan with the fields that the shards of a dataset have, not its layers.

    Args:
        scan: The new images.
        manifest: The manifest of the dataset.
    """
    fields, classes = dict(manifest.base.fields_by_name), manifest.base.classes
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
        Provided.of(scan, scan.schema.keys() & fields.keys(), labels),
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
    pieces, entries = parts_of(work, plan, first=len(dataset.manifest.shards))
    combined = replace(
        assembly(work, plan),
        schema=joint_schema(work, plan, dataset),
        source=source_of([*entries_of(dataset.manifest), *entries]),
    )
    repeated = partial(in_several, [dataset.path, work.folder])
    return combined.finish([link_shards(dataset, work.folder), *pieces], repeated)


@dataclass(frozen=True)
class Extension:
    """New images of a dataset with layers."""

    datasets: Mapping[str, OpenedDataset]
    """The dataset of each split."""
    plan: Plan
    """The plan of the images, whose shards are built."""
    scan: Scan
    """The images with all fields."""

    def layers(
        self, bases: Mapping[str, Manifest], staging: StagingDirectory, builder: Builder
    ) -> dict[str, Manifest]:
        """Build the fields that layers provide, and return the manifest of each split.

        Args:
            bases: The manifests of the extended splits without layers.
            staging: The staging directory.
            builder: How to build.
        """
        first = next(iter(self.datasets.values())).manifest
        layers: dict[str, list[Layer]] = {split: [] for split in self.datasets}
        for number, layer in enumerate(needed_layers(first)):
            new = self._extended(number, bases, staging, builder) if layer.files else {}
            for split, dataset in self.datasets.items():
                old = needed_layers(dataset.manifest)[number]
                layers[split].append(new.get(split, old))
        return {
            split: described(base, layers[split], len(layers[split]), staging.dataset / split)
            for split, base in bases.items()
        }

    def _extended(
        self,
        number: int,
        bases: Mapping[str, Manifest],
        staging: StagingDirectory,
        builder: Builder,
    ) -> dict[str, Layer]:
        """Build the new shards of a layer of each split, and return the extended layers."""
        old = {split: dataset.manifest.layers[number] for split, dataset in self.datasets.items()}
        opened = {split: self.datasets[split].layer(layer) for split, layer in old.items()}
        plan = self._plan_layer(number, opened, bases)
        works = [
            prepare(part, plan, staging, first=len(dataset.manifest.shards))
            for part, dataset in zip(plan.splits, opened.values(), strict=True)
        ]
        for _ in run(works, replace(builder, on_progress=None)):
            pass
        require_good(works, plan, staging)
        layers = {}
        for work, (split, dataset) in zip(works, opened.items(), strict=True):
            manifest = extended(work, plan, dataset)
            require_same_rows(bases[split], manifest)
            save_manifest(manifest, work.folder)
            layer = as_layer(manifest, work.folder, old[split].operation)
            layers[split] = replace(layer, request=old[split].request)
        return layers

    def _plan_layer(
        self, number: int, opened: Mapping[str, OpenedDataset], bases: Mapping[str, Manifest]
    ) -> Plan:
        """Return the plan of the new rows of a layer: those of the images that were built."""
        dataset = next(iter(self.datasets.values())).manifest
        layer, scan = next(iter(opened.values())).manifest, self.scan
        changed = dataset.layers[number]
        names = [name for name in changed.fields if dataset.layer_of(name) == changed]
        fields, classes, recipe = dict(layer.fields_by_name), layer.classes, None
        if LABEL in names and scan.classes is not None:
            fields[LABEL], classes = Field("label", classes=scan.classes), scan.classes
        if any(fields[name].type.follows for name in names):
            recipe = self.plan.options.recipe
        parts = {part.split: split for split, part in opened.items()}
        source = Provided(scan.source, scan.schema, names, parts, recipe)
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
        return without_empty_shards(plan_layers(layer_scan, layer.format))


def without_empty_shards(plan: Plan) -> Plan:
    """Return a plan without shards for splits that get no images."""
    return replace(
        plan,
        splits=tuple(
            split if len(split.source) else replace(split, cuts=(0,), shard_bytes=())
            for split in plan.splits
        ),
    )
