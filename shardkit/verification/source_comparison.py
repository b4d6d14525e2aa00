"""Compare a dataset with its source: attach each record's file, and report the result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.parts import changed_fields
from shardkit.errors import BadImage
from shardkit.pipeline import convert_record
from shardkit.system.files import as_text
from shardkit.verification.findings import Finding, ShardCheck
from shardkit.verification.named_sources import Sources
from shardkit.verification.record_comparison import ComparisonResult, SourceComparison
from shardkit.verification.source_match import SourceMatch, match_rows


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


class Comparison:
    """The comparison of a dataset with the sources that a user named.

    ``splits`` are the dataset of each split ("" without splits), ``stores`` their stores with
    intact manifests. UsageError if ``named`` cannot be the sources.
    """

    def __init__(
        self, splits: Mapping[str, OpenedDataset], stores: Sequence[OpenedDataset], named: Any
    ) -> None:
        sources = Sources(splits, named)
        self._first = next(iter(splits.values()))
        self._root = sources.base
        self._matches = [match for store in stores for match in sources.of(store)]

    def extend(self, tasks: Sequence[ShardCheck]) -> tuple[list[ShardCheck], list[Finding]]:
        """Return checks of shards that also compare records with their source files.

        The findings are the differences that are known before any record is read.
        """
        compared = {task.file: task for task in tasks}
        findings = list[Finding]()
        for match in self._matches:
            rows, wrong = match_rows(match)
            findings += [*match.findings, *wrong, *_good_ones(match)]
            for shard in match.part.manifest.shards:
                task = compared.get(match.store.prefix + shard.name)
                if task and rows:
                    start = task.start - match.part.start
                    against = SourceComparison(
                        source=match.images.source,
                        split=match.images.split,
                        entries=rows[start : start + shard.rows],
                        recipe=match.recipe,
                        schema=match.part.manifest.fields_by_name,
                        changed=match.changed,
                        exact=match.exact,
                    )
                    compared[task.file] = replace(task, against=against)
        unique = dict.fromkeys(replace(finding, source=True) for finding in findings)
        return [*compared.values()], [*unique]

    def report(self, compared: Mapping[str, ComparisonResult]) -> SourceReport | None:
        """Sum up all comparisons; the keys of ``compared`` are the prefixes of the splits' paths.

        None if the user named sources of later fields alone.
        """
        if self._root is None:
            return None
        total = ComparisonResult()
        for prefix, report in compared.items():
            files = {prefix + path: digest for path, digest in report.files.items()}
            total.add(replace(report, files=files))
        digest = hashlib.sha256()
        for path in sorted(total.files, key=lambda path: path.encode("utf-8", "surrogateescape")):
            line = _sum_line(total.files[path], path)
            digest.update(line.encode("utf-8", "surrogateescape"))
        return SourceReport(
            name=_name(self._root),
            files=len(total.files),
            bytes=total.bytes,
            left_out=sum(match.left_out for match in self._matches),
            same=total.same,
            alike=total.alike,
            least_psnr=total.least_psnr,
            sha256=digest.hexdigest(),
        )

    def replaced(self) -> list[str]:
        """Return the names of fields that were replaced since, so not compared with the source."""
        dataset = self._first
        base = dataset.base.manifest
        replaced = dataset.later & base.fields_by_name.keys()
        return sorted(
            replaced | (changed_fields(base.source) & dataset.manifest.fields_by_name.keys())
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


def _good_ones(match: SourceMatch) -> Iterator[Finding]:
    """Find files that were skipped as bad but are good."""
    schema = match.part.manifest.fields_by_name
    for row, entry in enumerate(match.skipped.entries):
        try:
            (record,) = match.skipped.read([row])
            convert_record(match.recipe, record, schema)
        except BadImage:
            continue
        reason = "it was skipped as bad, but it is good"
        yield Finding(file=match.store.prefix + entry.path, reason=reason)
