"""A dataset against its source: which file each record must have come from, and what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shardkit.compare import Against, Compared
from shardkit.conversion.origin import Origin, find_origins, match_rows, scan_source
from shardkit.errors import BadImage
from shardkit.examine import ExamineTask, Finding
from shardkit.manifest import Manifest, dataset_directories


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """What came of holding a dataset against its source."""

    name: str
    """The name of the source's folder."""
    files: int
    """Image files that the dataset was made from."""
    bytes: int
    """Bytes of these files."""
    left_out: int
    """Image files beside these: bad ones that were skipped, and those beyond a limit."""
    same: int
    """Records of which every byte is as the recipe makes it of the file."""
    alike: int
    """Records that other versions of libraries make a little otherwise."""
    least_psnr: float | None
    """The peak signal-to-noise ratio of the worst of those, in decibels."""
    sha256: str
    """SHA-256 of the list of these files as ``sha256sum`` prints it, sorted by path, byte for byte;
    where there are splits, a path begins with its split."""


class Attached(NamedTuple):
    """What a source says of a dataset before any record is read."""

    tasks: list[ExamineTask]
    """The shards, with what their records are to be compared with."""
    findings: list[Finding]
    left_out: int
    """Image files of the source that are not to be in the dataset."""


def attach_source(
    tasks: Sequence[ExamineTask], directory: Path, manifests: Mapping[str, Manifest], root: Path
) -> Attached:
    """Find the file that each record must have come from.

    Args:
        tasks: The shards that can be read.
        directory: The dataset.
        manifests: Split, or "", to its manifest, of those that are whole.
        root: The source.

    Raises:
        UsageError: If ``root`` cannot be the source.
        CorruptDataset: If a manifest does not say how its dataset was made.
    """
    scan = scan_source(root, manifests)
    origins = find_origins(directory, manifests, scan)
    findings = [
        Finding(file=split, reason="it is a split of the source, and not of the dataset")
        for split in sorted(scan.splits.keys() - dataset_directories(directory).keys())
        if len(scan.splits[split]) or scan.problems.get(split)
    ]
    attached = []
    for split, origin in origins.items():
        prefix = f"{split}/" if split else ""
        rows, wrong = match_rows(origin, prefix)
        findings += [*origin.findings, *wrong, *_good_ones(origin, prefix)]
        for task in tasks:
            if task.split == split:
                against = Against(
                    root=origin.images.root,
                    entries=rows[task.start : task.start + task.entry.rows],
                    recipe=origin.recipe,
                    exact=origin.exact,
                )
                attached.append(replace(task, against=against if rows else None))
    return Attached(attached, findings, sum(origin.left_out for origin in origins.values()))


def report_source(root: Path, compared: Mapping[str, Compared], left_out: int) -> SourceReport:
    """Return what came of all comparisons; ``compared`` has the prefix of each split's paths."""
    total = Compared()
    for prefix, part in compared.items():
        files = {prefix + path: digest for path, digest in part.files.items()}
        total.add(replace(part, files=files))
    digest = hashlib.sha256()
    for path in sorted(total.files, key=lambda path: path.encode("utf-8", "surrogateescape")):
        line = _sum_line(total.files[path], path)
        digest.update(line.encode("utf-8", "surrogateescape"))
    return SourceReport(
        name=root.resolve().name,
        files=len(total.files),
        bytes=total.bytes,
        left_out=left_out,
        same=total.same,
        alike=total.alike,
        least_psnr=total.least_psnr,
        sha256=digest.hexdigest(),
    )


def _sum_line(digest: str, path: str) -> str:
    """Return what ``sha256sum`` prints for a file; it marks a name in which it escapes."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "\\" if escaped != path else ""
    return f"{mark}{digest}  {escaped}\n"


def _good_ones(origin: Origin, prefix: str) -> Iterator[Finding]:
    """Find files that were left out as bad, and are not."""
    with origin.recipe.at_work():
        for row, entry in enumerate(origin.skipped.entries):
            try:
                (record,) = origin.skipped.read([row])
                origin.recipe.apply(record)
            except BadImage:
                continue
            reason = "it was left out as bad, and is good: it was mended, or never was bad"
            yield Finding(file=prefix + entry.path, reason=reason)
