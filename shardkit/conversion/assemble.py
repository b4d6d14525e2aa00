"""What every manifest is assembled from: reports, digests of files, and sums of counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from shardkit.dataset.manifest import (
    FileEntry,
    Manifest,
    SplitsManifest,
    save_manifest,
)
from shardkit.dataset.reports import report_lines
from shardkit.errors import Problem
from shardkit.system.files import as_name, sha256_of, sync

_Name = TypeVar("_Name", str, int)


def total(counts: Iterable[Mapping[_Name, int]]) -> Counter[_Name]:
    """Return the sum of counts, by name."""
    found: Counter[_Name] = Counter()
    for part in counts:
        found.update(part)
    return found


def save_report(name: str, problems: Collection[Problem], folder: Path) -> list[str]:
    """Write a report, unless there is nothing to report; return the files written."""
    if not problems:
        return []
    with (folder / name).open("wb") as file:
        file.writelines(report_lines(problems))
    return [name]


def file_entry(name: str, folder: Path) -> FileEntry:
    """Return the entry of a finished file, after syncing it."""
    path = folder / name
    sync(path)
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=sha256_of(path, folder))


def save_manifests(manifests: Mapping[str, Manifest], folder: Path) -> None:
    """Write the manifest of a dataset, or those of splits and then that of all."""
    for name, manifest in manifests.items():
        save_manifest(manifest, folder / as_name(name))
    if "" not in manifests:
        digests = {name: manifest.digest for name, manifest in manifests.items()}
        save_manifest(SplitsManifest(splits=digests), folder)
