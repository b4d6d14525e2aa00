"""Verify a dataset: compare every byte with the manifest and the index."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardkit.dataset.manifest import FACTS_NAME, MANIFEST_NAME
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.errors import CorruptDataset, UsageError, setting
from shardkit.options import option, require_valid, takes
from shardkit.system.files import as_text
from shardkit.system.late import load
from shardkit.system.pool import Progress, Report, run_tasks, worthwhile
from shardkit.system.urls import STORES, as_local, scheme_and_path
from shardkit.verification.file_check import check_files, check_index
from shardkit.verification.findings import Finding, ShardCheck
from shardkit.verification.record_comparison import ComparisonResult
from shardkit.verification.shard_check import Checks
from shardkit.verification.source_comparison import Comparison, SourceReport

LEVELS = ("quick", "full", "decode")

_CHECKS = {
    "": "shardkit.verification.shard_check:Checks",
    **dict.fromkeys(STORES, "shardkit.remote.verification:RemoteChecks"),
}
"""How the files of a dataset are checked, by the scheme of its URL."""


@dataclass(kw_only=True)
class Verification:
    """The result of a verification."""

    level: str
    manifests: dict[str, str] = field(default_factory=dict)
    """Digest of each manifest, by split name ("" without splits)."""
    attached: bool = False
    """Whether the shards are archives from other programs."""
    datasets: int = 0
    shards: int = 0
    records: int = 0
    """Number of records read, once with all layers; 0 at level ``quick``."""
    bytes: int = 0
    """Size of the shards in bytes."""
    findings: list[Finding] = field(default_factory=list)
    """All damage."""
    extras: list[str] = field(default_factory=list)
    """Files that are not part of the dataset, which do not count as damage."""
    source: SourceReport | None = None
    """Result of the comparison with the source, if requested and successful."""
    converted: int = 0
    """Number of records that equal their files after the conversion changed an image."""
    replaced: list[str] = field(default_factory=list)
    """Names of the fields that were replaced after the conversion, and are not compared with it."""

    @property
    def ok(self) -> bool:
        """Whether the dataset is intact, and equals its source if that was compared."""
        return not self.findings

    @property
    def can_restore(self) -> bool:
        """Whether `repair`, or the user of an attached dataset, can restore damaged files."""
        return any(
            finding.file != MANIFEST_NAME and (self.attached or finding.kind == "damaged")
            for finding in self.findings
        )


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `verify`."""

    level: str = option(
        "full",
        help="quick: check manifest, files, sizes and index. full: also each shard's and record's "
        "checksum. decode: also each image's pixels.",
        choices=LEVELS,
    )
    _: KW_ONLY
    against: Any = option(
        None,
        help="Also compare each record with its file in SRC. Repeat the option for each part of "
        "a merged dataset, in order, unless all parts have the same source, and for the file of "
        "each field that was added later.",
        metavar="SRC",
        is_repeated=True,
    )
    root: str | Path | None = option(
        None,
        help="Folder of the archives of an attached dataset.",
        metavar="DIR",
        shown="where `attach` found them",
    )
    workers: int = option(1, help="Number of processes.", minimum=1, shown="number of CPUs")
    on_progress: Report | None = option(
        None, help="Called with the progress since the last call.", is_keyword_only=True
    )

    def __post_init__(self) -> None:
        require_valid(self)
        if self.against is not None and self.level == "quick":
            raise UsageError(
                f"{setting('against')} requires {setting('level', 'full')} or 'decode': quick "
                "reads no records"
            )


@takes(VerifyOptions)
def verify(options: VerifyOptions, directory: str | Path) -> Verification:
    """Check the dataset in ``directory``, or all of its splits.

    ``against`` is the folder, or the Python samples, that the dataset was created from; or a list
    of these, one per part. The dataset must contain exactly its files, each once, with the
    manifest's order and labels. Each record must equal its converted file: byte for byte, or, if
    other library versions encoded it, with a PSNR of at least `record_comparison.ALIKE_PSNR`. The
    records of an attached dataset are compared with the index, and the bytes of its archives with
    their SHA-256.

    Args:
        directory: The dataset, or its URL in an object store: shards are fetched to a temporary
            folder, one per worker at a time.

    Raises:
        UsageError: If there is no dataset, its manifest has a newer version, or ``against`` cannot
            be its source.
    """
    scheme, path = scheme_and_path(directory)
    root = None if options.root is None else Path(options.root)
    checks: Checks = load(_CHECKS[scheme])(as_local(path), root)
    result = Verification(level=options.level)
    with checks.directory() as folder:
        _Verifier(folder, options, checks, result).run()
    result.findings = sorted(
        (
            replace(finding, reason=finding.reason.replace(str(folder), checks.location))
            for finding in dict.fromkeys(result.findings)  # a file may be examined twice
        ),
        key=lambda finding: (finding.file, -1 if finding.row is None else finding.row),
    )
    return result


@dataclass(frozen=True)
class _Verifier:
    """A verification of the files in a directory."""

    directory: Path
    options: VerifyOptions
    checks: Checks
    result: Verification

    def run(self) -> None:
        """Check the dataset, and compare it with its source, if there is one."""
        result = self.result
        splits = self._splits()
        stores = self._intact(store for dataset in splits.values() for store in dataset.stores)
        tasks = list[ShardCheck]()
        for store in stores:
            findings, of_store = check_files(store, decode=result.level == "decode")
            result.findings += findings
            result.shards += len(store.manifest.shards)
            result.bytes += store.manifest.bytes
            tasks += of_store
        for dataset in splits.values():
            intact = not any(file.file.startswith(dataset.prefix) for file in result.findings)
            if intact and not dataset.is_store:
                result.findings += check_index(dataset, intact=True)
        comparison = None
        if self.options.against is not None and splits:
            comparison = Comparison(splits, stores, self.options.against)
            tasks, differences = comparison.extend(tasks)
            result.findings += differences
        if result.level == "quick":
            result.findings += self.checks.stored_digests(tasks)
            return
        compared = self._check_shards(tasks, splits.values())
        if comparison and result.ok and (source := comparison.report(compared)):
            result.source = source
            result.converted = sum(report.converted for report in compared.values())
            result.replaced = comparison.replaced()

    def _splits(self) -> dict[str, OpenedDataset]:
        """Return each dataset with an intact manifest, and note which they are."""
        result = self.result
        try:
            opened = OpenedDirectory(self.directory, root=self.checks.root)
        except CorruptDataset as error:
            self._blame(MANIFEST_NAME, str(error))
            return {}
        datasets = self._intact(opened.splits.values())
        for dataset in datasets:
            if self.options.against is not None:
                dataset.manifest.require_own_shards(
                    f"{self.directory} is attached, so it is always compared with its archives: "
                    f"leave out {setting('against')}"
                )
            result.attached |= dataset.manifest.archives is not None
            result.manifests[dataset.split] = dataset.manifest.digest
        result.datasets = len(datasets)
        result.extras = _other_files(self.directory, datasets) if datasets else []
        return {dataset.split: dataset for dataset in datasets}

    def _intact(self, datasets: Iterable[OpenedDataset]) -> list[OpenedDataset]:
        """Return those with an intact manifest; any other is a finding."""
        intact = []
        for dataset in datasets:
            name = dataset.prefix + MANIFEST_NAME
            try:
                if not dataset.belongs:
                    self._blame(name, "it does not belong to the other splits")
                intact.append(dataset)
            except (CorruptDataset, UsageError) as error:
                self._blame(name, str(error))
        return intact

    def _blame(self, name: str, reason: str) -> None:
        """Note a finding; "it" stands for the path that the reason starts with."""
        path = f"{self.directory / name} "
        reason = f"it {reason.removeprefix(path)}" if reason.startswith(path) else reason
        self.result.findings.append(Finding(file=name, reason=reason))

    def _check_shards(
        self, tasks: list[ShardCheck], datasets: Collection[OpenedDataset]
    ) -> dict[str, ComparisonResult]:
        """Check all shards; return the comparisons of those in the datasets' own folders."""
        result = self.result
        options = self.options
        prefixes = {dataset.prefix for dataset in datasets}
        twins = {task.entry.sha256: task.file for task in tasks}
        compared: dict[str, ComparisonResult] = {}
        if options.on_progress:
            options.on_progress(Progress(total=sum(task.entry.rows for task in tasks)))
        workers = worthwhile(options.workers, (task.entry.bytes for task in tasks))
        for task, checked in run_tasks(
            self.checks.check, tasks, workers=workers, on_progress=options.on_progress
        ):
            result.findings += checked.findings
            if checked.sha256 != task.entry.sha256:
                reason = "its SHA-256 differs from the manifest"
                if checked.sha256 in twins:
                    reason += f": it has the content of {twins[checked.sha256]}"
                result.findings.append(task.finding(reason))
            if task.prefix in prefixes:  # a record counts once with all layers
                result.records += checked.records
                if checked.compared:
                    compared.setdefault(task.prefix, ComparisonResult()).add(checked.compared)
        return compared


def _other_files(directory: Path, datasets: Iterable[OpenedDataset]) -> list[str]:
    """Return all files that belong to no dataset, and links, which are not followed."""
    named = {MANIFEST_NAME}
    for dataset in datasets:
        named |= {entry.name for entry in dataset.files} | {dataset.prefix + FACTS_NAME}
    paths = []
    for above, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(above, name))]
        paths += [os.path.relpath(os.path.join(above, name), directory) for name in files + links]
    return sorted(name for name in map(as_text, paths) if name not in named)
