"""Extend a dataset and its layers by new shards: each provides some fields of the new images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.changes.combine import Shape, common_schema, link_stores, shape_of
from shardkit.changes.layers import Publication, joined, needed_stores, plan_layers
from shardkit.changes.provided import Provided, scan_of_base
from shardkit.contracts import Images, Scan
from shardkit.conversion.build_all import Builder
from shardkit.conversion.engine import ShardWork, build, dataset_parts, prepare, require_good, run
from shardkit.conversion.fingerprint import COMMAND
from shardkit.conversion.plan import ConvertOptions, Plan, make_plan
from shardkit.conversion.staging import StagingDirectory
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.opened import OpenedDataset
from shardkit.kinds.field import Field, Schema
from shardkit.record import LABEL


def joint_schema(work: ShardWork, plan: Plan, dataset: OpenedDataset) -> Schema:
    """Return the schema of a dataset with new shards; UsageError if these do not go with it."""
    split = plan.split(work.split)
    raw_shape = plan.options.recipe.raw_shape
    shape = Shape(work.folder, plan.options.to, split.recipe, raw_shape, plan.scan.schema)
    return common_schema([shape_of(dataset), shape])


def extended(work: ShardWork, plan: Plan, dataset: OpenedDataset) -> Manifest:
    """Link the shards of a dataset next to new ones, and write the other files of both.

    The new shards are in the folder of the new dataset; the dataset has no layers. Return the
    manifest to save with them.
    """
    new = dataset_parts(work, plan, first=len(dataset.manifest.shards))
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

    @classmethod
    def planned(
        cls,
        datasets: Mapping[str, OpenedDataset],
        scan: Scan,
        options: ConvertOptions,
        builder: Builder,
    ) -> Extension:
        """Return the extension by the images of a scan, converted like the dataset.

        The scan has its splits and fields. ``options`` are those of the new shards, but for recipe
        and order.
        """
        first = next(iter(datasets.values()))
        of_base = scan_of_base(scan, first.manifest)
        if not of_base.originals:
            seed = first.parts[0].manifest.source.get("seed")
            recipe = first.manifest.made_with
            options = replace(options, recipe=recipe, shuffle=seed is not None, seed=seed or 0)
        return cls(datasets, _without_empty_shards(make_plan(of_base, options)), scan, builder)

    def publish(self, directory: Path, *, force: bool) -> None:
        """Replace the dataset in a directory by the longer one.

        ``force`` discards another unfinished run.
        """
        self.builder.expect(sum(map(len, self.scan.splits.values())))
        planned = self.plan.fingerprint()
        digests = [dataset.manifest.digest for dataset in self.datasets.values()]
        settings = {**planned.settings, COMMAND: "append", "the dataset": digests}
        request = replace(planned, settings=settings)
        Publication(directory, self.datasets, request, force).run(self._make)

    def _make(self, staging: StagingDirectory) -> dict[str, Manifest]:
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
            split: joined(dataset, bases[split], longer[split], staging.folder_of(split))
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
            prepare(split, plan, staging, first=len(store.manifest.shards))
            for split, store in zip(plan.splits, stores, strict=True)
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
        split_of = {store.split: split for store, split in zip(stores, self.datasets, strict=True)}
        source = Provided(scan, names, split_of, recipe)
        splits = {}
        for split, name in zip(self.plan.splits, split_of, strict=True):
            bad = {problem.path for problem in bases[split.name].skipped}
            paths = enumerate(split.source.paths()) if bad else ()
            good = [row for row, path in paths if path not in bad]
            images = split.source.take(good) if bad else split.source
            splits[name] = Images(source, name, images.entries)
        layer_scan = Scan(
            source=source,
            splits=splits,
            classes=classes,
            fields=fields,
            known=False,
            records=True,
            exact_sizes=False,
        )
        return _without_empty_shards(plan_layers(layer_scan, ConvertOptions(to=layer.format)))


def _without_empty_shards(plan: Plan) -> Plan:
    """Return a plan without shards for splits that get no images."""
    return replace(
        plan,
        splits=tuple(
            split if len(split.source) else replace(split, cuts=(0,), shard_bytes=())
            for split in plan.splits
        ),
    )
