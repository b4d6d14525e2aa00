"""Compare a dataset with its source: find each record's file, and report the result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Images
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.errors import BadImage, CorruptDataset, UsageError
from shardkit.recipe import Recipe
from shardkit.system.files import as_text
from shardkit.system.late import load
from shardkit.verification.record_comparison import ComparisonResult, SourceComparison
from shardkit.verification.shard_check import Finding, ShardCheck
from shardkit.verification.source_match import SourceMatch, match_rows, match_sources


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Result of a successful comparison of a dataset with its source."""

    name: str
    """Name of the source's folder."""
    files: int
    """Number of image files that the dataset was made from."""
    bytes: int
    """Size of these files in bytes."""
    left_out: int
    """Number of other image files: bad ones that were skipped, those that were excluded, and those
    beyond the limit."""
    same: int
    """Records identical, byte for byte, to their converted files."""
    alike: int
    """Records that differ slightly because other library versions encoded them."""
    least_psnr: float | None
    """Lowest peak signal-to-noise ratio of these records, in decibels."""
    sha256: str
    """SHA-256 of the list of these files as ``sha256sum`` prints it, sorted by path, byte for byte;
    with splits, each path starts with its split."""


class AttachedSource(NamedTuple):
    """The result of matching a source with a dataset, before any record is read."""

    tasks: list[ShardCheck]
    """The shards to check, each with the files to compare its records with."""
    findings: list[Finding]
    left_out: int
    """Number of the source's image files that do not belong in the dataset."""


_READERS = {"fields": "shardkit.changes.layer_source:images_of"}
"""What finds the rows of a layer in a source that a user named, by the kind that the layer states.

It gets the source, the dataset of each split by the split of the layer, and the description of the
layer's source. It returns the rows by that split, or nothing if they were made from something else.
"""


class Sources(NamedTuple):
    """The sources that a user named, divided by what was made from them."""

    base: Any
    """Those of the conversion; None without any."""
    layers: Mapping[str, Images]
    """The rows of each layer whose source was named, by its split, such as ``val/layers/000001``.
    """


def divide_sources(
    splits: Mapping[str, OpenedDataset], given: Any, *, base_only: bool = False
) -> Sources:
    """Find which sources the dataset was made from, and which its layers.

    Args:
        splits: The dataset of each split.
        given: A source, or a list of these.
        base_only: Whether sources of layers may be unreadable, as if the index is damaged.

    Raises:
        UsageError: If a source of a layer cannot be read.
        CorruptDataset: If a layer describes no source.
    """
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    base = list[Any]()
    layers = dict[str, Images]()
    described = _described_layers(splits)
    for item in items:
        made = dict[str, Images]()
        for folder, description in described.items():
            datasets = {f"{dataset.prefix}{folder}": dataset for dataset in splits.values()}
            try:
                made |= load(_READERS[description["kind"]])(item, datasets, description)
            except (CorruptDataset, UsageError):
                if not base_only:
                    raise
                break
        else:
            base += [] if made else [item]
        layers |= made
    if len(base) == len(items):
        return Sources(given, layers)
    return Sources(base if len(base) > 1 else next(iter(base), None), layers)


def _described_layers(splits: Mapping[str, OpenedDataset]) -> dict[str, Mapping[str, Any]]:
    """Return the folder of each layer and the description of its source, if that can be read."""
    first = next(iter(splits.values()))
    described = dict[str, Mapping[str, Any]]()
    for layer in first.manifest.layers:
        if layer.files:
            with suppress(CorruptDataset):  # found by the check of its files
                described[layer.folder] = first.layer(layer).manifest.source
    return {folder: source for folder, source in described.items() if source["kind"] in _READERS}


def compared_with(task: ShardCheck, images: Images) -> ShardCheck:
    """Return the check of a shard of a layer that also compares it with its source.

    Args:
        task: The check.
        images: The rows of the layer.
    """
    entries = images.entries[task.start : task.start + task.entry.rows]
    against = SourceComparison(
        source=images.source,
        split=images.split,
        entries=list(entries),
        recipe=Recipe.restored(task.meta["recipe"]),
        schema=task.schema,
        changed=(),
        exact=True,
    )
    return replace(task, against=against)


def attach_source(
    tasks: Sequence[ShardCheck], splits: Mapping[str, OpenedDataset], root: Any
) -> AttachedSource:
    """Find the source file of each record.

    Args:
        tasks: The readable shards.
        splits: The dataset of each split with an intact manifest, by name.
        root: The source.

    Raises:
        UsageError: If ``root`` cannot be the source.
        CorruptDataset: If the recipe or source in a manifest is invalid.
    """
    findings: list[Finding] = []
    attached = {(task.split, task.entry.name): task for task in tasks}
    left_out = 0
    names = OpenedDirectory(next(iter(splits.values())).top).splits.keys()
    for origins in match_sources(splits, root):
        scan = next(iter(origins.values())).scan
        findings += [
            Finding(file=split, reason="it is a split of the source but not of the dataset")
            for split in sorted(scan.splits.keys() - names)
            if len(scan.splits[split]) or scan.problems.get(split)
        ]
        for split, origin in origins.items():
            prefix = splits[split].prefix
            rows, wrong = match_rows(origin, prefix)
            findings += [*origin.findings, *wrong, *_good_ones(origin, prefix)]
            left_out += origin.left_out
            shards = {entry.name for entry in origin.part.manifest.shards}
            for task in tasks:
                if task.split == split and task.entry.name in shards and rows:
                    start = task.start - origin.part.start
                    against = SourceComparison(
                        source=scan.source,
                        split=split,
                        entries=rows[start : start + task.entry.rows],
                        recipe=origin.recipe,
                        schema=origin.schema,
                        changed=origin.changed,
                        exact=origin.exact,
                    )
                    attached[split, task.entry.name] = replace(task, against=against)
    return AttachedSource([*attached.values()], [*dict.fromkeys(findings)], left_out)


def report_source(
    root: Any, compared: Mapping[str, ComparisonResult], left_out: int
) -> SourceReport:
    """Sum up all comparisons; the keys of ``compared`` are the prefixes of the splits' paths."""
    total = ComparisonResult()
    for prefix, part in compared.items():
        files = {prefix + path: digest for path, digest in part.files.items()}
        total.add(replace(part, files=files))
    digest = hashlib.sha256()
    for path in sorted(total.files, key=lambda path: path.encode("utf-8", "surrogateescape")):
        line = _sum_line(total.files[path], path)
        digest.update(line.encode("utf-8", "surrogateescape"))
    return SourceReport(
        name=_name(root),
        files=len(total.files),
        bytes=total.bytes,
        left_out=left_out,
        same=total.same,
        alike=total.alike,
        least_psnr=total.least_psnr,
        sha256=digest.hexdigest(),
    )


def _name(root: Any) -> str:
    if isinstance(root, (list, tuple)) and all(isinstance(path, (str, Path)) for path in root):
        return ", ".join(map(_name, root))
    is_path = isinstance(root, (str, Path))
    return as_text(Path(root).resolve().name) if is_path else type(root).__name__


def _sum_line(digest: str, path: str) -> str:
    """Return the line that ``sha256sum`` prints for a file; a backslash marks an escaped name."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "\\" if escaped != path else ""
    return f"{mark}{digest}  {escaped}\n"


def _good_ones(origin: SourceMatch, prefix: str) -> Iterator[Finding]:
    """Find files that were skipped as bad but are good."""
    with origin.recipe.at_work():
        for row, entry in enumerate(origin.skipped.entries):
            try:
                (record,) = origin.skipped.read([row])
                origin.recipe.apply(record, origin.schema)
            except BadImage:
                continue
            reason = "it was skipped as bad, but it is good"
            yield Finding(file=prefix + entry.path, reason=reason)
