"""Recognize a folder that already holds the result of a conversion, so a rerun does nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry
from shardkit.conversion.plan import Plan, SplitPlan
from shardkit.conversion.staging import StagingDirectory
from shardkit.dataset.index import Index
from shardkit.dataset.manifest import (
    MANIFEST_NAME,
    Manifest,
    SplitsManifest,
    load_any_manifest,
    load_manifest,
    split_directory,
)
from shardkit.errors import BadImage, ShardkitError
from shardkit.record import describe_schema, dump_json, load_json
from shardkit.system.safe_paths import is_file, status_of


def finished(plan: Plan, target: Path) -> dict[str, Manifest] | None:
    """Return the manifests in ``target`` if it holds the result of ``plan``, or None.

    This compares options, library versions, classes, the names, labels, order and shards of all
    images, their sizes if files are stored unchanged, and the sizes of the dataset's files. It
    reads only the images that were left out as bad, to check that they still are.
    """
    if not is_file(target, MANIFEST_NAME) or StagingDirectory(target).is_ready:
        return None
    try:
        top = load_any_manifest(target)
        names = list(top.splits) if isinstance(top, SplitsManifest) else [""]
        if sorted(names) != sorted(split.name for split in plan.splits):
            return None
        manifests = {
            split.name: load_manifest(split_directory(target, split.name)) for split in plan.splits
        }
        digests = {name: manifest.digest for name, manifest in manifests.items()}
        if isinstance(top, SplitsManifest) and top.splits != digests:
            return None
        same = all(
            _matches(split, plan, manifests[split.name], target / split.name)
            for split in plan.splits
        )
    except (ShardkitError, OSError, ValueError):
        return None  # damaged: the user decides what to do
    return manifests if same else None


def _matches(split: SplitPlan, plan: Plan, manifest: Manifest, place: Path) -> bool:
    return (
        _described(manifest) == _planned(split, plan)
        and all(status_of(place, entry.name).st_size == entry.bytes for entry in manifest.entries)
        and _same_images(split, plan, manifest, place)
    )


def _described(manifest: Manifest) -> Any:
    made = (manifest.format, manifest.classes, manifest.recipe, manifest.source, manifest.software)
    schema = describe_schema(manifest.fields_by_name)
    return _plain(*made, schema, manifest.raw_shape, manifest.ignored)


def _planned(split: SplitPlan, plan: Plan) -> Any:
    ignored = Counter(problem.reason for problem in plan.scan.ignored.get(split.name, ()))
    described = (split.meta["recipe"], split.meta["source"], plan.software)
    shape = plan.options.recipe.raw_shape
    schema = describe_schema(plan.scan.schema)
    return _plain(plan.options.to, plan.scan.classes, *described, schema, shape, ignored)


def _plain(*values: Any) -> Any:
    """Return values as a round trip through JSON returns them."""
    return load_json(dump_json({"values": values}))


def _same_images(split: SplitPlan, plan: Plan, manifest: Manifest, place: Path) -> bool:
    """Return whether the rows are the planned images in order, without those left out."""
    left_out = {problem.path for problem in manifest.skipped}
    unreadable = {problem.path for problem in plan.scan.problems.get(split.name, ())}
    entries = split.source.entries
    bad = [entry for entry in entries if entry.path in left_out]
    if left_out != unreadable | {entry.path for entry in bad}:
        return False
    if left_out and plan.options.on_error != "skip":
        return False
    shards = [
        [entry for entry in split.shard_source(number).entries if entry.path not in left_out]
        for number in range(split.shards)
    ]
    if [len(shard) for shard in shards if shard] != [shard.rows for shard in manifest.shards]:
        return False
    kept = [entry for shard in shards for entry in shard]
    index = Index(place, manifest.rows)
    rows = index.rows()
    return (
        [entry.path for entry in kept] == list(index.paths())
        and (not plan.scan.known or [entry.label for entry in kept] == rows["label"].tolist())
        and (
            not (plan.scan.known and plan.scan.exact_sizes and plan.options.recipe.keeps_bytes)
            or [entry.bytes for entry in kept] == rows["length"].tolist()
        )
        and all(_is_bad(entry, split, plan) for entry in bad)
    )


def _is_bad(entry: Entry, split: SplitPlan, plan: Plan) -> bool:
    try:
        (record,) = split.source.read([split.source.entries.index(entry)])
        plan.options.recipe.apply(record, plan.scan.schema)
    except BadImage:
        return True
    return False
