"""The sources that a user named, as `verify --against` and `repair` take them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shardkit.contracts import Scan, scan_source
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.opened import OpenedDataset, is_dataset
from shardkit.dataset.parts import changed_fields, how_made
from shardkit.errors import CorruptDataset, UsageError
from shardkit.registry import DATASET, open_source
from shardkit.sources.opening import OF_FIELDS, reopen
from shardkit.system.files import overlap
from shardkit.system.late import load
from shardkit.system.text import quoted
from shardkit.verification.source_match import (
    SourceMatch,
    StoredPart,
    match_part,
    require_files,
    stored_parts,
)

_READERS = {"fields": "shardkit.changes.layer_source:LayerFile"}
"""Readers of the source of a layer, by the kind that the manifest of the layer states.

It gets a source that a user named, a dataset with the layer, and the description of the source.
"""
_SOME_FIELDS = "shardkit.sources.wrapper:SomeFields"

_WITH_REMEDY = "shardkit.verification.other_source:with_remedy"


class NamedSource(Protocol):
    """A source that a user named, which may be that of a layer."""

    def is_source(self) -> bool:
        """Return whether it is, without reading it."""

    def scan(self, datasets: Mapping[str, OpenedDataset]) -> Scan:
        """Return the rows of the layer, given the dataset of each split, by that of the layer.

        UsageError if it cannot be read, or lacks a column; CorruptDataset if the description is
        damaged.
        """


class Sources:
    """The sources that a user named, divided by what was made from them.

    ``splits`` are the dataset of each split ("" without splits), ``named`` is one source or a list.
    """

    def __init__(self, splits: Mapping[str, OpenedDataset], named: Any) -> None:
        self._splits = splits
        self._layers = dict[str, NamedSource]()
        self._scans = dict[str, Scan]()
        items = list(named) if isinstance(named, (list, tuple)) else [named]
        others = [item for item in items if not self._is_of_layer(item)]
        self.base: Any = named
        """Sources of the conversion; None without any."""
        if len(others) < len(items):
            self.base = others if len(others) > 1 else next(iter(others), None)

    def _is_of_layer(self, item: Any) -> bool:
        """Return whether an item is the source of layers, and note of which."""
        dataset = next(iter(self._splits.values()))
        sources = dict[str, NamedSource]()
        for store in dataset.stores[1:]:
            with suppress(CorruptDataset, UsageError):  # found by the check of its manifest
                described = store.manifest.source
                if described["kind"] in _READERS:
                    source = load(_READERS[described["kind"]])(item, dataset, described)
                    if source.is_source():
                        sources[store.folder] = source
        self._layers |= sources
        return bool(sources)

    def of(self, store: OpenedDataset) -> list[SourceMatch]:
        """Find what the parts of a store were made from, as far as the user named it.

        CorruptDataset if a manifest does not state how its dataset was made; UsageError if a source
        cannot be read, or is another one.
        """
        folder = store.folder
        if not folder:
            return [match for match in self._matches if match.store.split == store.split]
        if folder not in self._layers:
            return []
        if folder not in self._scans:
            datasets = {f"{item.prefix}{folder}": item for item in self._splits.values()}
            self._scans[folder] = self._layers[folder].scan(datasets)
        nothing = StoredPart(None, None, frozenset())  # its rows are in order, whatever their paths
        return [match_part(store, 0, self._scans[folder], [nothing], ())]

    @cached_property
    def _matches(self) -> list[SourceMatch]:
        """The matches of all parts of the stores of the conversion.

        Several parts have one source each, in order, or one path for all.
        """
        if self.base is None:
            return []
        bases = {split: dataset.base for split, dataset in self._splits.items()}
        first = next(iter(bases.values()))
        count = max(len(dataset.parts) for dataset in bases.values())
        names = [part.manifest.source.get("name") for part in first.parts]
        remedy = (
            f"{first.top} has {count} parts, created from {', '.join(map(quoted, names))}: pass "
            "one source for each, in this order (in a command, repeat the option), or a single "
            "one for all"
        )
        is_one = count == 1 or isinstance(self.base, (str, Path))
        sources = [self.base] * count if is_one else list(self.base)
        if len(sources) != count:
            raise UsageError(f"{remedy}, not {len(sources)}; {OF_FIELDS}")
        stored = {split: stored_parts(dataset) for split, dataset in bases.items()}
        matches = list[SourceMatch]()
        for number, root in enumerate(sources):
            if is_dataset(root) and overlap(Path(root), first.top):
                raise UsageError(f"{root} is the dataset itself", remedy="pass its source")
            stores = [dataset for dataset in bases.values() if number < len(dataset.parts)]
            same = [other for other, source in enumerate(sources) if _is_same(source, root)]
            try:
                scan = _scan(root, {store.split: store.parts[number].manifest for store in stores})
                here = [
                    match_part(store, number, scan, stored[store.split], same) for store in stores
                ]
                require_files(here, scan)
            except UsageError as error:
                if count == 1:
                    raise load(_WITH_REMEDY)(error, root, names[0], first.top) from error.__cause__
                raise UsageError(
                    f"{remedy}. For part {number + 1}: {error.problem}",
                    remedy=error.remedy,
                    where=error.where,
                ) from error
            matches += here
        return matches


def _scan(root: Any, manifests: Mapping[str, Manifest]) -> Scan:
    """Scan the source that the manifests of splits describe, less the fields changed since."""
    for manifest in manifests.values():
        how_made(manifest)
    kinds = {manifest.source["kind"] for manifest in manifests.values()}
    classes = next((names for manifest in manifests.values() if (names := manifest.classes)), ())
    if len(kinds) != 1:
        raise UsageError(
            f"the splits have sources of different kinds: {sorted(kinds)}",
            remedy="check each separately",
        )
    (kind,) = kinds
    if is_dataset(root) and kind != DATASET:  # one with the same records
        return scan_source(open_source(DATASET, root), classes)
    described = {split: manifest.source for split, manifest in manifests.items()}
    schema = next(iter(manifests.values())).fields_by_name
    scan = scan_source(reopen(kind, root, described, schema), classes)
    changed = changed_fields(next(iter(described.values())))
    if changed.isdisjoint(scan.schema):
        return scan
    wrapped = load(_SOME_FIELDS)(scan, scan.schema.keys() - changed)
    narrowed: Scan = wrapped.narrowed(scan)
    return narrowed


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, (str, Path)) and isinstance(second, (str, Path)):
        return os.path.realpath(first) == os.path.realpath(second)
    return first is second
