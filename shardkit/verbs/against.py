"""A dataset against its source: which file each record must have come from, and what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.compare import Against, Compared
from shardkit.conversion.origin import Origin, find_origin, match_rows, scan_source
from shardkit.errors import CorruptDataset, UsageError
from shardkit.examine import ExamineTask, Finding
from shardkit.index import Index
from shardkit.manifest import Manifest
from shardkit.sources.imagefolder import Entry

_CONTAINERS = ("h5py", "lmdb")
"""Libraries whose versions change the file around an image, and not the image."""


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """What came of holding a dataset against its source."""

    name: str
    """The name of the source's folder."""
    files: int
    """Image files that the dataset was made from."""
    bytes: int
    """Bytes of these files."""
    same: int
    """Records of which every byte is as the recipe makes it of the file."""
    alike: int
    """Records that other versions of libraries make a little otherwise."""
    least_psnr: float | None
    """The peak signal-to-noise ratio of the worst of those, in decibels."""
    sha256: str
    """SHA-256 of the list of these files as ``sha256sum`` prints it, sorted by path."""


def attach_source(
    tasks: Sequence[ExamineTask], directory: Path, manifests: Mapping[str, Manifest], root: Path
) -> tuple[list[ExamineTask], list[Finding]]:
    """Return the tasks, with what their records are to be compared with, and what is wrong already.

    Args:
        tasks: The shards that can be read.
        directory: The dataset.
        manifests: Split, or "", to its manifest.
        root: The source.

    Raises:
        UsageError: If ``root`` cannot be the source.
        CorruptDataset: If a manifest does not say how its dataset was made.
    """
    scan = scan_source(root, manifests)
    origins = {split: find_origin(manifest, split, scan) for split, manifest in manifests.items()}
    stored = {split: _paths(directory / split, manifests[split]) for split in manifests}
    _require_kinship(origins, stored, f"{root} holds none of the files that {directory} was")
    attached, findings = [], []
    for split, origin in origins.items():
        findings += origin.findings
        rows: list[Entry | None] = list(origin.images.entries)
        paths = stored[split]
        if paths is not None:
            rows, wrong = match_rows(origin, paths, f"{split}/" if split else "")
            findings += wrong
        elif len(rows) != manifests[split].rows:
            rows = []  # nobody knows which file belongs where; that the index is damaged is said
        exact = not origin.changed_software.keys() - set(_CONTAINERS)
        for task in tasks:
            if task.split == split:
                part = rows[task.start : task.start + task.entry.rows]
                against = Against(
                    root=origin.images.root, entries=part, recipe=origin.recipe, exact=exact
                )
                attached.append(replace(task, against=against if part else None))
    return attached, findings


def report_source(root: Path, compared: Mapping[str, Compared]) -> SourceReport:
    """Return what came of all comparisons; ``compared`` has the prefix of each split's paths."""
    total = Compared()
    for prefix, part in compared.items():
        files = {prefix + path: digest for path, digest in part.files.items()}
        total.add(replace(part, files=files))
    digest = hashlib.sha256()
    for path in sorted(total.files, key=lambda path: path.encode("utf-8", "surrogateescape")):
        digest.update(f"{total.files[path]}  {path}\n".encode("utf-8", "surrogateescape"))
    return SourceReport(
        name=root.resolve().name,
        files=len(total.files),
        bytes=total.bytes,
        same=total.same,
        alike=total.alike,
        least_psnr=total.least_psnr,
        sha256=digest.hexdigest(),
    )


def _paths(place: Path, manifest: Manifest) -> list[str] | None:
    """Return the source path of each row, or None if the index cannot tell."""
    try:
        return list(Index(place, manifest.rows).paths())
    except (CorruptDataset, ValueError):
        return None


def _require_kinship(
    origins: Mapping[str, Origin], stored: Mapping[str, list[str] | None], said: str
) -> None:
    """Refuse a folder that has nothing to do with the dataset, for fear of a million findings."""
    known = [paths for paths in stored.values() if paths]
    if known and all(
        {entry.path for entry in origin.images.entries}.isdisjoint(stored[split] or ())
        for split, origin in origins.items()
    ):
        raise UsageError(f"{said} made from; is it the right folder?")
