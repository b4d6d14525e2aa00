"""Match the rows of a dataset to the images of its source."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shardkit.contracts import Entry, Images, Scan
from shardkit.conversion.plan import as_stored, copying, software_of
from shardkit.dataset.index import string_files
from shardkit.dataset.manifest import MANIFEST_NAME, Manifest
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory, is_dataset
from shardkit.dataset.parts import Part, changed_fields
from shardkit.dataset.reports import EXCLUDED, excluded_paths
from shardkit.errors import CorruptDataset, Problem, UsageError
from shardkit.kinds.field import Schema
from shardkit.recipe import Recipe
from shardkit.record import LABEL
from shardkit.registry import DATASET, get_format, open_source
from shardkit.sources.opening import reopen
from shardkit.sources.wrapper import SomeFields
from shardkit.system.files import has_sha256, overlap
from shardkit.system.late import load
from shardkit.system.text import is_within, quoted
from shardkit.verification.shard_check import Finding


@dataclass(frozen=True, kw_only=True)
class SourceMatch:
    """The source of a part of a store, as far as it still exists."""

    store: OpenedDataset
    part: Part
    """The store, or the part of it that was made from the source."""
    images: Images
    """Images in row order, without bad ones that the conversion left out."""
    skipped: Images
    """Bad images that the conversion left out and that still exist."""
    left_out: int
    """Number of images in the source that do not belong in the dataset: bad, excluded or beyond the
    limit."""
    ignored: list[Problem]
    """Files that are not images, and images that were excluded, in the order in which the
    conversion reported them."""
    recipe: Recipe
    schema: Schema
    """The fields of all records."""
    changed: frozenset[str]
    """Names of those that did not come from the source."""
    changed_software: dict[str, tuple[str, str]]
    """Versions then and now of each changed library that affects the dataset's bytes."""
    exact: bool
    """Whether no library changed that affects image bytes (rather than the shards around them)."""
    stored: list[str] | None
    """Source path of each row; None if that part of the index is damaged."""
    keys: list[str] | None
    """Key of each row; None if that part of the index is damaged. A file that is gone may have made
    the key of another one longer."""
    findings: list[Finding]
    """Problems of the source as a whole."""


def scan_source(root: Any, manifests: Mapping[str, Manifest]) -> Scan:
    """Scan the source that the manifests of a dataset, or of its splits, describe.

    Args:
        root: The path of the source, or the samples.
        manifests: The manifest of each split, by name.

    Raises:
        UsageError: If ``root`` cannot be their source.
    """
    for manifest in manifests.values():
        how_made(manifest)
    kinds = {manifest.source["kind"] for manifest in manifests.values()}
    classes = [manifest.classes for manifest in manifests.values() if manifest.classes]
    if len(kinds) != 1:
        raise UsageError(f"the splits come from sources of different kinds: {sorted(kinds)}")
    (kind,) = kinds
    if is_dataset(root) and kind != DATASET:  # one with the same records
        return open_source(DATASET, root).scan(classes[0] if classes else ())
    described = {split: manifest.source for split, manifest in manifests.items()}
    schema = next(iter(manifests.values())).fields_by_name
    source = reopen(kind, root, described, schema)
    return _unchanged(source.scan(classes[0] if classes else ()), described)


def _unchanged(scan: Scan, described: Mapping[str, Mapping[str, Any]]) -> Scan:
    """Return a scan without the fields that were changed after the conversion."""
    changed = changed_fields(next(iter(described.values())))
    if changed.isdisjoint(scan.schema):
        return scan
    return SomeFields(scan, scan.schema.keys() - changed).narrowed(scan)


_READERS = {"fields": "shardkit.changes.layer_source:LayerFile"}
"""What reads the source of a layer, by the kind that the manifest of the layer states.

It gets a source that a user named, a dataset with the layer, and the description of the source.
"""


class NamedSource(Protocol):
    """A source that a user named, which may be that of a layer."""

    def is_source(self) -> bool:
        """Return whether it is, without reading it."""

    def scan(self, datasets: Mapping[str, OpenedDataset]) -> Scan:
        """Return the rows of the layer, given the dataset of each split, by that of the layer.

        Raises:
            UsageError: If it cannot be read, or lacks a column.
            CorruptDataset: If the description is damaged.
        """


class Sources:
    """The sources that a user named, divided by what was made from them.

    Args:
        splits: The dataset of each split, by name ("" without splits).
        named: A source, or a list of these.
    """

    def __init__(self, splits: Mapping[str, OpenedDataset], named: Any) -> None:
        self._splits = splits
        self._layers = dict[str, NamedSource]()
        self._scans = dict[str, Scan]()
        items = list(named) if isinstance(named, (list, tuple)) else [named]
        others = [item for item in items if not self._is_of_layer(item)]
        self.base = named if len(others) == len(items) else _one_or_all(others)
        """Those of the conversion; None without any."""

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

        Raises:
            CorruptDataset: If a manifest does not state how its dataset was made.
            UsageError: If a source cannot be read, or is another one.
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
        return [_match_part(store, 0, self._scans[folder], [nothing], ())]

    @cached_property
    def _matches(self) -> list[SourceMatch]:
        bases = {split: dataset.base for split, dataset in self._splits.items()}
        return [] if self.base is None else match_sources(bases, self.base)


def _one_or_all(items: list[Any]) -> Any:
    return items if len(items) > 1 else next(iter(items), None)


def match_sources(splits: Mapping[str, OpenedDataset], source: Any) -> list[SourceMatch]:
    """Find the source files of each part of a dataset, or of its splits.

    Args:
        splits: The store of the conversion of each split, by name ("" without splits).
        source: The source; for several parts, a source for each, or one path for all.

    Raises:
        CorruptDataset: If a manifest does not state how its dataset was made.
        UsageError: If there are more or fewer sources than parts, or one cannot be the source.
    """
    first = next(iter(splits.values()))
    count = max(len(dataset.parts) for dataset in splits.values())
    sources = [source]
    names = [part.manifest.source.get("name") for part in first.parts]
    remedy = (
        f"{first.top} has {count} parts, made from {', '.join(map(quoted, names))}: give one "
        "source for each, in this order (in a command, repeat the option), or a single one for all"
    )
    if count > 1:
        is_one = isinstance(source, (str, Path))
        sources = [source] * count if is_one else list(source)
        if len(sources) != count:
            raise UsageError(f"{remedy}; not {len(sources)}")
    stored = {split: stored_parts(dataset) for split, dataset in splits.items()}
    matches = list[SourceMatch]()
    for number, root in enumerate(sources):
        if is_dataset(root) and overlap(Path(root), first.top):
            raise UsageError(f"{root} is the dataset itself", remedy="name what it was made from")
        stores = [dataset for dataset in splits.values() if number < len(dataset.parts)]
        scan = scan_source(root, {store.split: store.parts[number].manifest for store in stores})
        same = [other for other, source in enumerate(sources) if _is_same(source, root)]
        try:
            here = [_match_part(store, number, scan, stored[store.split], same) for store in stores]
            _require_files(here, scan)
        except UsageError as error:
            if count == 1:
                raise
            raise UsageError(
                f"{remedy}. For part {number + 1}: {error.problem}", remedy=error.remedy
            ) from error
        matches += here
    return matches


@dataclass(frozen=True)
class StoredPart:
    """What the rows of a part are made from."""

    paths: list[str] | None
    """Path of each row; None if that part of the index is damaged."""
    keys: list[str] | None
    """Key of each row; None if that part of the index is damaged."""
    skipped: frozenset[str]
    """Paths of the bad files that the conversion left out."""

    def has(self, entry: Entry) -> bool:
        """Return whether ``append --skip-existing`` leaves an image out because of this part."""
        return (
            entry.path in self.path_set or entry.key in self._key_set or entry.path in self.skipped
        )

    @cached_property
    def path_set(self) -> frozenset[str]:
        """All paths."""
        return frozenset(self.paths or ())

    @cached_property
    def _key_set(self) -> frozenset[str]:
        return frozenset(self.keys or ())


def stored_parts(dataset: OpenedDataset) -> list[StoredPart]:
    """Return what the rows of each part of a dataset are made from."""
    paths, keys = (_stored_texts(dataset, name) for name in ("paths", "keys"))
    return [
        StoredPart(of_part, its_keys, frozenset(bad.path for bad in part.manifest.skipped))
        for of_part, its_keys, part in zip(paths, keys, dataset.parts, strict=True)
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (str, Path)) and isinstance(other, (str, Path)):
        return os.path.realpath(one) == os.path.realpath(other)
    return one is other


def _require_files(matches: Sequence[SourceMatch], scan: Scan) -> None:
    """Refuse a source with none of the files; note splits that the dataset does not have."""
    known = [match for match in matches if match.stored]
    top = matches[0].store.top
    if known and all(
        {entry.path for entry in match.images.entries}.isdisjoint(match.stored or ())
        for match in known
    ):  # otherwise there would be a finding for every file
        why = "is it the right folder?"
        if scan.classes is not None and all(
            match.part.manifest.classes is None for match in matches
        ):
            why = "it had no folders then, and folders are now taken for classes"
        is_part = any(len(match.store.parts) > 1 for match in matches)
        raise UsageError(
            f"{scan.source} contains none of the files that {'this part of ' * is_part}{top} was "
            f"made from; {why}"
        )
    names = OpenedDirectory(top).splits.keys()
    matches[0].findings.extend(
        Finding(file=split, reason="it is a split of the source but not of the dataset")
        for split in sorted(scan.splits.keys() - names)
        if len(scan.splits[split]) or scan.problems.get(split)
    )


def _match_part(
    store: OpenedDataset,
    number: int,
    scan: Scan,
    stored: Sequence[StoredPart],
    same: Collection[int],
) -> SourceMatch:
    """Find the source files of a part of a store.

    Args:
        store: The store.
        number: The number of the part.
        scan: Its source today.
        stored: The rows of all parts: earlier ones may be why images were left out.
        same: The numbers of the parts with the same source, this one too.
    """
    part = store.parts[number]
    here = stored[number]
    elsewhere = {
        path
        for other, texts in enumerate(stored)
        if other in same and other != number
        for path in texts.paths or ()
    }
    manifest = part.manifest
    split = store.split
    recipe, seed, limit = how_made(manifest)
    changed = changed_fields(manifest.source)
    if scan.records and manifest.source["kind"] != scan.source.kind:
        recipe = copying(Recipe(), scan)
        seed = None
        limit = None
        changed = frozenset()
    findings = []
    if split not in scan.splits and manifest.shards:
        findings.append(Finding(file=split, reason="the source does not have this split"))
    source = scan.splits.get(split, Images(scan.source, split, ()))
    if (
        LABEL not in changed
        and (manifest.classes is None) != (scan.classes is None)
        and len(source)
    ):
        reason = "only one of source and dataset has classes"
        findings.append(Finding(file=store.prefix + MANIFEST_NAME, reason=reason))
    bad = {problem.path for problem in manifest.skipped}
    findings += [
        Finding(file=store.prefix + problem.path, reason=f"in the source, {problem.reason}")
        for problem in scan.problems.get(split, ())
        if not is_within(problem.path, bad)
    ]
    listed = source.of(scan.source.relist(scan, split, manifest.skipped))
    if elsewhere:
        listed = _only(listed, lambda path: path not in elsewhere)
    if number:
        listed = listed.take(
            row
            for row, entry in enumerate(listed.entries)
            if entry.path in here.path_set or not any(texts.has(entry) for texts in stored[:number])
        )
    excluded = _excluded(store.path, manifest, listed.paths(), here.paths)
    if excluded:
        listed = _only(listed, lambda path: path not in excluded)
    if not scan.whole and here.paths is not None:
        chosen = bad.union(here.paths)
        listed = _only(listed, chosen.__contains__)
    rows = as_stored(listed, seed=seed, limit=limit)
    images = [entry for entry in rows.entries if not is_within(entry.path, bad)]
    storage = get_format(manifest.format)
    then = manifest.software
    now = software_of(storage, recipe)
    other_software = {
        name: (then.get(name, "absent"), now.get(name, "absent"))
        for name in sorted(then.keys() | now.keys())
        if then.get(name, "absent") != now.get(name, "absent")
    }
    return SourceMatch(
        store=store,
        part=part,
        images=source.of(images),
        skipped=source.of([entry for entry in source.entries if is_within(entry.path, bad)]),
        left_out=len(source) - len(elsewhere) - len(images),
        ignored=[
            *scan.ignored.get(split, ()),
            *(Problem(path=path, reason=EXCLUDED) for path in excluded),
        ],
        recipe=recipe,
        schema=manifest.fields_by_name,
        changed=changed,
        changed_software=other_software,
        exact=other_software.keys() <= set(storage.libraries),
        stored=here.paths,
        keys=here.keys,
        findings=findings,
    )


def _only(images: Images, is_wanted: Callable[[str], bool]) -> Images:
    """Return the images with some paths."""
    return images.take(row for row, path in enumerate(images.paths()) if is_wanted(path))


def _excluded(
    place: Path, manifest: Manifest, listed: Sequence[str], stored: Collection[str] | None
) -> dict[str, None]:
    """Return the paths of a source's images that its conversion excluded, in order.

    If the report that names them is damaged, these are all that are not stored, if their number is
    right.
    """
    count = manifest.ignored.get(EXCLUDED, 0)
    if not count:
        return {}
    there = set(stored or ())
    named = excluded_paths(place, manifest.files)
    if named is None:
        excluded = dict.fromkeys(path for path in listed if path not in there)
        return excluded if stored is not None and len(excluded) == count else {}
    return dict.fromkeys(path for path in listed if path in named and path not in there)


def how_made(manifest: Manifest) -> tuple[Recipe, int | None, int | None]:
    """Return recipe, seed and limit of a conversion.

    Raises:
        CorruptDataset: If the manifest does not state them, or names no source.
    """
    lacking = {"name", "order", "seed", "limit"} - manifest.source.keys()
    if lacking:
        raise CorruptDataset(
            "the manifest does not state how the dataset was made: its source has no "
            f"{', '.join(sorted(lacking))}"
        )
    return manifest.made_with, manifest.source["seed"], manifest.source["limit"]


def _stored_texts(dataset: OpenedDataset, name: str) -> Sequence[list[str] | None]:
    """Return the key or path of each row, by part; None if these files differ from the manifest."""
    files = [entry for entry in dataset.manifest.files if entry.name in string_files(name)]
    place = dataset.path
    if not files or not all(has_sha256(place / file.name, file.sha256, place) for file in files):
        return [None] * len(dataset.parts)
    try:
        texts = dataset.index.paths() if name == "paths" else dataset.index.keys()
        return [texts[part.start : part.start + part.manifest.rows] for part in dataset.parts]
    except (CorruptDataset, ValueError):
        return [None] * len(dataset.parts)


def match_rows(match: SourceMatch) -> tuple[list[Entry | None], list[Finding]]:
    """Return the source file of each row (None if the source lacks it) and all differences.

    The list is empty if the files cannot be matched to rows.
    """
    entries = match.images.entries
    prefix = match.store.prefix
    rows = match.part.manifest.rows
    if match.stored is None:
        if len(entries) == rows:
            return list(entries), []
        reason = (
            f"the index is damaged, and the source gives {len(entries)} rows instead of "
            f"{rows}, so files cannot be matched to rows"
        )
        return [], [Finding(file=prefix + MANIFEST_NAME, reason=reason)]
    stored = match.stored
    by_path = {entry.path: entry for entry in entries}
    if list(by_path) == stored:
        return list(by_path.values()), []
    there = set(stored)
    findings = [
        Finding(file=prefix + path, reason="it is in the source but not in the dataset")
        for path in sorted(by_path.keys() - there)
    ]
    for path, count in Counter(stored).items():
        if count > 1:
            findings.append(Finding(file=prefix + path, reason=f"it is stored {count} times"))
    expected = [path for path in by_path if path in there]
    still_present = [path for path in stored if path in by_path]
    wrong = next(
        (pair for pair in zip(still_present, expected, strict=False) if pair[0] != pair[1]), None
    )
    if wrong and len(still_present) == len(expected):
        reason = f"rows are in the wrong order: {wrong[0]} is in the place of {wrong[1]}"
        findings.append(Finding(file=prefix + MANIFEST_NAME, reason=reason))
    return [by_path.get(path) for path in stored], findings
