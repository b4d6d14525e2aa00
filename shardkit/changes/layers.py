"""Publish a dataset with other layers: its files are linked, and the manifest describes all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.changes.combine import link_file, manifests_of
from shardkit.contracts import Scan
from shardkit.conversion.assemble import save_manifests
from shardkit.conversion.fingerprint import COMMAND, ConversionFingerprint
from shardkit.conversion.plan import ConvertOptions, Plan, make_plan
from shardkit.conversion.staging import StagingDirectory, open_staging
from shardkit.dataset.index_reader import IndexReader
from shardkit.dataset.manifest import (
    FACTS_NAME,
    LAYERS,
    MANIFEST_NAME,
    BaseEntry,
    FieldEntry,
    FileEntry,
    Layer,
    Layering,
    Manifest,
    load_manifest,
    save_manifest,
)
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.errors import ConversionFailed, UsageError
from shardkit.record import LABEL, META_FIELD, image_field
from shardkit.system.files import as_name, sha256_of
from shardkit.system.safe_paths import is_file

_LAST = 999_999
"""The last number of a layer: names have six digits."""


def next_name(manifest: Manifest) -> str:
    """Return the name of the next layer of a dataset."""
    last = max((int(layer.name) for layer in manifest.layers), default=0)
    if last == _LAST:
        raise UsageError(
            f"the dataset already has {last} layers, the maximum",
            remedy="create a new dataset from it with `shardkit convert dataset`",
        )
    return f"{last + 1:06d}"


def is_last_change(manifest: Manifest, operation: str, fields: Sequence[str]) -> bool:
    """Return whether the last change, which can be undone, was of this kind."""
    if not manifest.can_undo:
        return False
    last = manifest.layers[-1]
    return last.operation == operation and last.fields == tuple(fields)


def change_request(
    datasets: Mapping[str, OpenedDataset],
    operation: str,
    fields: Sequence[str],
    *,
    again: bool = False,
) -> ConversionFingerprint:
    """Return everything that determines a change, besides the values."""
    states = []
    for dataset in datasets.values():
        layers = dataset.manifest.layers[: -1 if again else None]
        entries = [[layer.name, layer.operation, *layer.fields, layer.digest] for layer in layers]
        states.append([dataset.manifest.base.digest, entries])
    settings: dict[str, Any] = {
        COMMAND: "fields",
        "the change": operation,
        "the fields to change": list(fields),
        "the dataset": states,
    }
    return ConversionFingerprint(settings)


LayersOf = Callable[[str, Manifest], tuple[Sequence[Layer], int]]
"""Returns the layers after a change, given the split and its manifest before, and the number of
layers to which `shardkit.fields.undo` returns."""


class Publication(NamedTuple):
    """A change of a dataset, which is replaced in one step."""

    directory: Path
    datasets: Mapping[str, OpenedDataset]
    request: ConversionFingerprint
    """Everything that determines the result."""
    force: bool = False
    """Whether to discard another unfinished run."""

    def run(self, make: Callable[[StagingDirectory], dict[str, Manifest]]) -> dict[str, Manifest]:
        """Publish what ``make`` builds, whose manifests it returns by split."""
        directory = self.directory
        with (
            open_staging(directory, force=True) as staging,
            staging.publishing(self.request, force=self.force) as is_needed,
        ):
            if manifests_of(OpenedDirectory(directory).splits) != manifests_of(self.datasets):
                raise UsageError(
                    f"another process has changed {directory}", remedy="rerun the command"
                )
            if is_needed:
                save_manifests(make(staging), staging.dataset)
        return OpenedDirectory(directory).manifests()

    def run_layers(
        self, layers_of: LayersOf, make: Callable[[StagingDirectory], None] | None = None
    ) -> dict[str, Manifest]:
        """Publish the dataset with other layers, after ``make`` has built new ones."""

        def linked(staging: StagingDirectory) -> dict[str, Manifest]:
            if make is None:
                staging.prune(())
            else:
                make(staging)
            manifests = {}
            for split, dataset in self.datasets.items():
                layers, before = layers_of(split, dataset.manifest)
                folder = staging.folder_of(split)
                _link_files(dataset, layers, folder)
                manifests[split] = described(dataset.manifest.base, layers, before, folder)
            return manifests

        return self.run(linked)


def _link_files(dataset: OpenedDataset, layers: Sequence[Layer], folder: Path) -> None:
    """Link the files of a dataset, and those of its layers that remain."""
    IndexReader(dataset, verify=True).complete()
    kept = {entry.name for layer in layers for entry in layer.files}
    layered = [entry for entry in dataset.manifest.layer_files if entry.name in kept]
    base = dataset.manifest.base
    for entry in (*base.entries, *layered):
        goal = folder / as_name(entry.name)
        goal.parent.mkdir(parents=True, exist_ok=True)
        link_file(dataset.path, entry.name, goal, entry.bytes)
    if is_file(dataset.path, FACTS_NAME):
        link_file(dataset.path, FACTS_NAME, folder / FACTS_NAME)


def with_layer(manifest: Manifest, layer: Layer) -> tuple[Sequence[Layer], int]:
    """Return the layers of a dataset and one more; files that no field needs are left out."""
    layers = needed_layers(manifest)
    return [*layers, layer], len(layers)


def needed_layers(manifest: Manifest) -> list[Layer]:
    """Return the layers of a dataset; files that no field needs are left out."""
    providers = manifest.layering.providers if manifest.layering else {}
    needed = {provider.name for provider in providers.values() if provider is not None}
    return [
        layer if layer.name in needed else replace(layer, files=(), digest="")
        for layer in manifest.layers
    ]


def needed_stores(dataset: OpenedDataset) -> list[OpenedDataset]:
    """Return the stores that fields come from, after that of the conversion."""
    used = {dataset.store_of(name).folder for name in dataset.manifest.fields_by_name}
    return [store for store in dataset.stores if store.folder in {"", *used}]


def joined(
    dataset: OpenedDataset, base: Manifest, others: Sequence[Manifest], folder: Path
) -> Manifest:
    """Save the manifests of stores that are longer than those of a dataset, but the first.

    ``base`` is the new manifest of the store of its conversion, and ``others`` are those of its
    other `needed_stores`. Return the manifest with all fields.
    """
    longer = dict[str, Layer]()
    for store, manifest in zip(needed_stores(dataset)[1:], others, strict=True):
        assert store.layer is not None
        path = folder / store.folder
        require_same_rows(base, manifest)
        save_manifest(manifest, path)
        layer = as_layer(manifest, path, store.layer.operation)
        longer[layer.name] = replace(layer, request=store.layer.request)
    layers = [longer.get(layer.name, layer) for layer in needed_layers(dataset.manifest)]
    return described(base, layers, len(layers), folder)


_MOST_ROWS = 1 << 16
"""Maximum rows of a shard of small values: building one takes about 1.5 KB of memory for each."""


def plan_layers(scan: Scan, options: ConvertOptions) -> Plan:
    """Return the plan of layers, whose rows are in the order of the scan."""
    plan = make_plan(scan, options, sorted_already=True)
    if any(len(split.source) > _MOST_ROWS * split.shards for split in plan.splits):
        fewer = replace(options, shard_samples=_MOST_ROWS)
        plan = make_plan(scan, fewer, sorted_already=True)
    return plan


def described(base: Manifest, layers: Sequence[Layer], before: int, folder: Path) -> Manifest:
    """Return the manifest of a dataset with layers, whose files are in ``folder``.

    ``base`` is the manifest before any change, ``before`` as `Layering.before`.
    """
    if not layers:
        return base
    state = BaseEntry(**{item.name: getattr(base, item.name) for item in fields_of(BaseEntry)})
    layering = Layering(base=state, layers=tuple(layers), before=before)
    used = {layer.name: layer for layer in layering.providers.values() if layer is not None}
    loaded = {name: load_manifest(folder / layer.folder) for name, layer in used.items()}
    entries = dict[str, FieldEntry]()
    stored = dict[str, int]()
    homes = {
        name: base if layer is None else loaded[layer.name]
        for name, layer in layering.providers.items()
    }
    for name, home in homes.items():
        (entries[name],) = (entry for entry in home.schema if entry.name == name)
        stored |= {key: home.fields[key] for key in home.fields if _is_of(key, name, home)}
    label = homes.get(LABEL)
    opened = OpenedDataset(folder)
    opened.manifest = replace(
        base,
        schema=tuple(entries.values()),
        fields=dict(sorted({META_FIELD: base.rows, **stored}.items())),
        classes=None if label is None else label.classes,
        class_counts=None if label is None else label.class_counts,
        layering=layering,
    )
    return replace(opened.manifest, content_digest=opened.index.content_digest())


def _is_of(stored: str, name: str, manifest: Manifest) -> bool:
    """Return whether a stored name of records is that of a field."""
    field = manifest.fields_by_name[name]
    if not field.type.is_picture:
        return stored == field.stored_name(name)
    return image_field([stored], name) is not None


def as_layer(manifest: Manifest, folder: Path, operation: str) -> Layer:
    """Return the entry of a layer, given its manifest and its folder."""
    path = folder / MANIFEST_NAME
    name = f"{LAYERS}/{folder.name}"
    manifest_entry = FileEntry(
        name=MANIFEST_NAME, bytes=path.stat().st_size, sha256=sha256_of(path)
    )
    entries = (manifest_entry, *manifest.entries)
    return Layer(
        name=folder.name,
        operation=operation,
        fields=tuple(manifest.fields_by_name),
        digest=manifest.digest,
        request="",
        files=tuple(
            FileEntry(name=f"{name}/{entry.name}", bytes=entry.bytes, sha256=entry.sha256)
            for entry in entries
        ),
    )


def require_same_rows(manifest: Manifest, layer: Manifest) -> None:
    """Refuse a layer whose keys are not those of the dataset."""
    if manifest.keys_digests != layer.keys_digests:
        raise ConversionFailed(
            "the rows of the new fields do not match the dataset: it changed, or the memory of "
            "this machine is faulty"
        )
