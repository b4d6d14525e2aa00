"""The parts of a dataset that was appended to or merged: shards of one source each.

The shards of a part keep the metadata that their conversion wrote. So a part is described like the
dataset that it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardkit.dataset.manifest import FORMAT_VERSION, PARTS, Manifest, PartEntry
from shardkit.errors import CorruptDataset
from shardkit.kinds.field import describe_schema
from shardkit.recipe import Recipe
from shardkit.record import dump_json, load_json

REPEATED = ("format", "classes", "schema", "raw_shape", "recipe", "source")
"""Entries of a manifest that each shard repeats in its metadata."""

CHANGED = "changed"
"""The entry of a ``source`` for fields that did not come from it: an object with their names,
``fields``, and the ``content_digest`` of the records before any change, if that is known."""


def changed_fields(source: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of fields that did not come from a source: they were changed later."""
    changed = source.get(CHANGED)
    names = changed.get("fields") if isinstance(changed, dict) else None
    texts = names if isinstance(names, list) else ()
    return frozenset(name for name in texts if isinstance(name, str))


def with_changed(source: Mapping[str, Any], fields: Collection[str], digest: str) -> dict[str, Any]:
    """Return the description of a source after a change of fields.

    ``digest`` is the content digest before any change; "" if unknown.
    """
    names = sorted(changed_fields(source) | set(fields))
    if not names:
        return dict(source)
    before = {"content_digest": digest} if digest else {}
    return {**source, CHANGED: {"fields": names, **before}}


def converted_digest(manifest: Manifest) -> str:
    """Return the content digest of a dataset before any change of its fields, also in a copy."""
    changed = manifest.base.source.get(CHANGED)
    digest = changed.get("content_digest") if isinstance(changed, dict) else None
    return digest if isinstance(digest, str) else manifest.base.content_digest


def how_made(manifest: Manifest) -> tuple[Recipe, int | None, int | None]:
    """Return recipe, seed and limit of a conversion; CorruptDataset if they are not stated."""
    lacking = {"name", "order", "seed", "limit"} - manifest.source.keys()
    if lacking:
        raise CorruptDataset(
            "the manifest does not state how the dataset was created: its source has no "
            f"{', '.join(sorted(lacking))}"
        )
    return manifest.made_with, manifest.source["seed"], manifest.source["limit"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a dataset."""

    manifest: Manifest
    """The dataset's manifest with the shards, rows, classes, source, software and skipped files of
    the part alone."""
    start: int
    """Its first row."""
    first: int
    """As `PartEntry.first`."""

    @property
    def meta(self) -> dict[str, Any]:
        """The description of the dataset in each of its shards, as JSON values."""
        manifest = self.manifest
        values = {**vars(manifest), "schema": describe_schema(manifest.fields_by_name)}
        repeated = {name: values[name] for name in REPEATED}
        return load_json(dump_json({"shardkit": FORMAT_VERSION, **repeated}))


def entries_of(manifest: Manifest) -> list[PartEntry]:
    """Return the parts of a dataset, as a manifest states them; a single one for any other."""
    manifest = manifest.base
    if manifest.stated_parts:
        return list(manifest.stated_parts)
    classes = None if manifest.classes is None else len(manifest.classes)
    return [
        PartEntry(
            shards=len(manifest.shards),
            first=0,
            classes=classes,
            skipped=len(manifest.skipped),
            source=manifest.source,
            software=manifest.software,
        )
    ]


def dataset_parts(manifest: Manifest) -> list[Part]:
    """Return the parts of a dataset: the whole dataset, unless it was appended to or merged."""
    manifest = manifest.base  # layers belong to the whole dataset
    entries = entries_of(manifest)
    ends = [0, *itertools.accumulate(item.shards for item in entries)]
    skips = [0, *itertools.accumulate(item.skipped for item in entries)]
    parts = []
    start = 0
    for number, entry in enumerate(entries):
        shards = manifest.shards[ends[number] : ends[number + 1]]
        rows = sum(shard.rows for shard in shards)
        part = replace(
            manifest,
            rows=rows,
            shards=shards,
            classes=None if manifest.classes is None else manifest.classes[: entry.classes],
            source=entry.source,
            software=entry.software,
            skipped=manifest.skipped[skips[number] : skips[number + 1]],
        )
        parts.append(Part(manifest=part, start=start, first=entry.first))
        start += rows
    return parts


def sources_of(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the source of each part, given the ``source`` of a manifest with valid parts."""
    if source.get("kind") == PARTS:
        return [entry["source"] for entry in source[PARTS]]
    return [dict(source)]


def source_of(entries: Sequence[PartEntry]) -> dict[str, Any]:
    """Return the ``source`` of a manifest with these parts."""
    names = dict.fromkeys(str(entry.source.get("name")) for entry in entries)
    return {
        "kind": PARTS,
        "name": ", ".join(names),
        "images": sum(entry.source.get("images", 0) for entry in entries),
        "limit": None,
        "order": PARTS,
        "seed": None,
        PARTS: [asdict(entry) for entry in entries],
    }
