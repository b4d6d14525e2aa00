"""Recognize a folder that already holds the result of a conversion, so a rerun does nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Original
from shardkit.conversion.plan import Plan, SplitPlan
from shardkit.conversion.staging import StagingDirectory
from shardkit.dataset.index import Index
from shardkit.dataset.manifest import MANIFEST_NAME, Manifest
from shardkit.dataset.opened import OpenedDirectory
from shardkit.dataset.parts import sources_of
from shardkit.errors import BadImage, ShardkitError
from shardkit.kinds.field import describe_schema
from shardkit.pipeline import convert_record
from shardkit.record import dump_json, load_json
from shardkit.system.safe_paths import UNFIT, is_file, status_of


def finished(plan: Plan, target: Path) -> dict[str, Manifest] | None:
    """Return the manifests in ``target`` if it holds the result of ``plan``, or None.

    This compares options, library versions, classes, the names, labels, order and shards of all
    images, their sizes if files are stored unchanged, and the sizes of the dataset's files. It
    reads only the images that were left out as bad, to check that they still are.
    """
    if not is_file(target, MANIFEST_NAME) or StagingDirectory(target).is_ready:
        return None
    try:
        dataset = OpenedDirectory(target)
        if dataset.splits.keys() != {split.name for split in plan.splits}:
            return None
        manifests = dataset.manifests()
        same = all(
            _matches(split, plan, manifests[split.name], dataset.splits[split.name].path)
            for split in plan.splits
        )
    except (*UNFIT, ShardkitError, ValueError):
        return None  # damaged: the user decides what to do
    return {split.name: manifests[split.name] for split in plan.splits} if same else None


def _matches(split: SplitPlan, plan: Plan, manifest: Manifest, folder: Path) -> bool:
    return (
        (
            _is_copy(split, plan, split.original, manifest)
            if split.original
            else _described(manifest) == _planned(split, plan)
        )
        and all(status_of(folder, entry.name).st_size == entry.bytes for entry in manifest.entries)
        and _same_images(split, plan, manifest, folder)
    )


def _is_copy(split: SplitPlan, plan: Plan, original: Original, manifest: Manifest) -> bool:
    """Return whether a dataset may be the planned copy of another one."""
    stored = (manifest.format, manifest.recipe, sources_of(manifest.source), bool(manifest.layers))
    parts = [part.source for part in original.parts]
    planned = (plan.options.to, original.recipe, parts, False)
    is_whole = len(manifest.skipped) == len(split.skipped_before)
    is_same = manifest.content_digest == original.content_digest or not is_whole
    return is_same and _plain(*stored) == _plain(*planned)


def _described(manifest: Manifest) -> Any:
    facts = (manifest.format, manifest.classes, manifest.recipe, manifest.source, manifest.software)
    schema = describe_schema(manifest.fields_by_name)
    return _plain(*facts, schema, manifest.raw_shape, manifest.ignored)


def _planned(split: SplitPlan, plan: Plan) -> Any:
    ignored = Counter(problem.reason for problem in plan.scan.ignored.get(split.name, ()))
    facts = (split.meta["recipe"], split.meta["source"], plan.software)
    shape = plan.options.recipe.raw_shape
    schema = describe_schema(plan.scan.schema)
    return _plain(plan.options.to, plan.scan.classes, *facts, schema, shape, ignored)


def _plain(*values: Any) -> Any:
    """Return values as a round trip through JSON returns them."""
    return load_json(dump_json({"values": values}))


def _same_images(split: SplitPlan, plan: Plan, manifest: Manifest, folder: Path) -> bool:
    """Return whether the rows are the planned images in order, without those left out."""
    left_out = {problem.path for problem in manifest.skipped} - split.skipped_before
    unreadable = {problem.path for problem in plan.scan.problems.get(split.name, ())}
    entries = enumerate(split.source.entries if left_out else ())
    bad = [row for row, entry in entries if entry.path in left_out]
    if left_out != unreadable | {split.source.entries[row].path for row in bad}:
        return False
    if left_out and plan.options.on_error != "skip":
        return False
    counts = np.diff(np.subtract(split.cuts, np.searchsorted(bad, split.cuts))).tolist()
    if [count for count in counts if count] != [shard.rows for shard in manifest.shards]:
        return False
    compares_sizes = plan.scan.known and plan.scan.exact_sizes and plan.options.recipe.keeps_bytes
    kept = (entry for entry in split.source.entries if entry.path not in left_out)
    for segment in Index(folder, manifest.rows).segments():
        labels = segment.rows["label"].tolist()
        lengths = segment.rows["length"].tolist()
        for path, label, length, entry in zip(segment.paths, labels, lengths, kept, strict=False):
            if (
                entry.path != path
                or (plan.scan.known and entry.label != label)
                or (compares_sizes and entry.bytes != length)
            ):
                return False
    return all(_is_bad(row, split, plan) for row in bad)


def _is_bad(row: int, split: SplitPlan, plan: Plan) -> bool:
    try:
        (record,) = split.source.read([row])
        convert_record(plan.options.recipe, record, plan.scan.schema)
    except BadImage:
        return True
    return False
