"""The source of the images to append: what a path or samples mean for an existing dataset."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.contracts import Source
from shardkit.dataset.opened import OpenedDataset, is_dataset
from shardkit.dataset.source import DatasetSource
from shardkit.errors import UsageError
from shardkit.kinds.field import Field
from shardkit.record import LABEL
from shardkit.registry import get_source
from shardkit.sources.divided import Divided
from shardkit.sources.opening import SampleOptions, wrapped_as
from shardkit.sources.samples import Samples


def open_appended(
    directory: Path,
    source: Any,
    datasets: Mapping[str, OpenedDataset],
    *,
    missing: str,
    schema: Mapping[str, Field | str] | None,
) -> Source:
    """Open a path as the source that the dataset was first made from, or Python samples.

    If that was divided into splits, so is this one, unless it has folders for these splits.
    """
    if not isinstance(source, (str, Path, Source)):
        return _samples(source, datasets, missing=missing, schema=schema)
    if schema is not None:
        raise UsageError("schema is only for Python samples")
    if isinstance(source, Source):
        return source
    described = first_sources(datasets)
    kind = {str(description.get("kind")) for description in described.values()}.pop()
    if is_dataset(source) and kind != DatasetSource.kind:
        return DatasetSource(source)
    if kind == DatasetSource.kind and os.path.exists(source) and not is_dataset(source):
        raise UsageError(
            f"{directory} is a copy of a dataset, so {source} must be a dataset, too",
            remedy="convert it with the same options, and append the new dataset",
        )
    find = partial(get_source(kind).find, Path(source))
    try:
        opened = wrapped_as(described, find)
        if isinstance(opened, Divided) and (opened.stratified or _has_folders(source, datasets)):
            return find(described)  # a stratified division could move images of the dataset
    except UsageError as error:
        raise UsageError(
            f"{directory} was created with `convert {kind}`, but {error.problem}",
            remedy=error.remedy,
        ) from error
    return opened


def _samples(
    samples: Any,
    datasets: Mapping[str, OpenedDataset],
    *,
    missing: str,
    schema: Mapping[str, Field | str] | None,
) -> Source:
    """Return Python samples with the fields of the dataset, divided as that was."""
    manifests = [dataset.manifest for dataset in datasets.values()]
    manifest = manifests[0]
    described = first_sources(datasets)
    names = next(iter(described.values())).get("fields")
    fields: dict[str, Field | str] = {**manifest.fields_by_name}
    classes = tuple(getattr(samples, "classes", None) or ())
    label = manifest.fields_by_name.get(LABEL)
    if label is not None and classes != (label.classes or ())[: len(classes)]:
        fields[LABEL] = replace(label, classes=classes)  # which the numbers of their labels mean
    fields.update(schema or {})
    opened = Samples(samples, SampleOptions(schema=fields, fields=names))
    rows = sum(manifest.rows + len(manifest.skipped) for manifest in manifests)
    optional = manifest.fields_by_name if missing == "skip" else manifest.lacking
    opened = opened.after(rows, with_keys=True, optional=optional)
    return wrapped_as(described, lambda _: opened)


def _has_folders(source: str | Path, names: Collection[str]) -> bool:
    """Return whether all folders in a folder have some of these names."""
    folders = {path.name for path in Path(source).glob("*") if path.is_dir()}
    return bool(folders) and folders <= set(names)


def first_sources(datasets: Mapping[str, OpenedDataset]) -> dict[str, dict[str, Any]]:
    """Return what the manifests state about the source that the dataset was first made from."""
    return {split: dataset.parts[0].manifest.source for split, dataset in datasets.items()}
