"""Verify a dataset: compare every byte with the manifest and the index."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardkit.dataset.manifest import FACTS_NAME, MANIFEST_NAME, Manifest
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.dataset.parts import changed_fields
from shardkit.errors import CorruptDataset, UsageError
from shardkit.options import about, option, require_valid, takes
from shardkit.system.files import as_text
from shardkit.system.late import load
from shardkit.system.pool import Report, run_tasks
from shardkit.system.urls import STORES, scheme_and_place
from shardkit.verification.file_check import check_files, check_view
from shardkit.verification.record_comparison import ComparisonResult
from shardkit.verification.shard_check import Checks, Finding, ShardCheck
from shardkit.verification.source_comparison import (
    SourceReport,
    attach_source,
    compared_with,
    divide_sources,
    report_source,
)

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
    """Whether the shards are archives of other programs."""
    datasets: int = 0
    shards: int = 0
    records: int = 0
    """Number of records read, once with all layers; 0 at level ``quick``."""
    bytes: int = 0
    """Size of the shards in bytes."""
    findings: list[Finding] = field(default_factory=list)
    """All damage."""
    extras: list[str] = field(default_factory=list)
    """Files that do not belong to the dataset, which is no damage."""
    source: SourceReport | None = None
    """Result of the comparison with the source, if requested and successful."""
    converted: int = 0
    """Number of records that equal their files after the conversion changed an image."""
    replaced: list[str] = field(default_factory=list)
    """Names of the fields that were replaced after the conversion, so not compared with it."""

    @property
    def ok(self) -> bool:
        """Whether the dataset is intact, and equals its source if that was compared."""
        return not self.findings


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
        help="Also compare each record with its file in SRC. Repeat it for each part of a merged "
        "dataset, in order, unless all have the same source, and for the file of each field that "
        "was added later.",
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
            raise UsageError("against= requires level='full' or 'decode': quick reads no records")


@dataclass(frozen=True)
class _Directory:
    directory: str | Path = field(
        metadata=about(
            "The dataset, or its URL in an object store: shards are fetched to a temporary "
            "folder, one for each worker at a time.",
        )
    )


@dataclass(frozen=True)
class VerifyArguments(VerifyOptions, _Directory):
    """The arguments of `verify`."""


@takes(VerifyArguments)
def verify(options: VerifyArguments) -> Verification:
    """Check the dataset in ``directory``, or all of its splits.

    ``against`` is the folder, or the Python samples, that the dataset was made from; or a list of
    these, one for each part. The dataset must contain exactly its files, each once, with the
    manifest's order and labels. Each record must equal its converted file: byte for byte, or, if
    other library versions encoded it, with a PSNR of at least `record_comparison.ALIKE_PSNR`. The
    records of an attached dataset are compared with the index, and the bytes of its archives with
    their SHA-256.

    Raises:
        UsageError: If there is no dataset, its manifest is of a newer version, or ``against``
            cannot be its source.
    """
    scheme, place = scheme_and_place(options.directory)
    root = None if options.root is None else Path(options.root)
    checks: Checks = load(_CHECKS[scheme])(place, root)
    verification = Verification(level=options.level)
    verifier = _Verifier(
        verification, options.against, options.workers, options.on_progress, checks
    )
    with checks.directory() as directory:
        result = verifier.run(directory)
    result.findings = [
        replace(finding, reason=finding.reason.replace(str(directory), checks.place))
        for finding in result.findings
    ]
    return result


@dataclass(frozen=True)
class _Verifier:
    """A verification of the files in a directory."""

    result: Verification
    against: Any
    workers: int
    on_progress: Report | None
    checks: Checks

    def run(self, directory: Path) -> Verification:
        """Check the dataset in ``directory``."""
        result = self.result
        against = self.against
        left_out = 0
        splits = {
            dataset.split: dataset for dataset in _datasets(directory, self.checks.root, result)
        }
        result.manifests = {name: dataset.manifest.digest for name, dataset in splits.items()}
        named = {MANIFEST_NAME}
        tasks: list[ShardCheck] = []
        for dataset in splits.values():
            manifest = dataset.manifest
            if against is not None:
                manifest.require_own_shards(
                    f"{directory} is attached, so it is always compared with its archives: leave "
                    "against= out"
                )
            result.attached |= manifest.archives is not None
            result.datasets += 1
            tasks += self._check_files(dataset)
            names = (MANIFEST_NAME, FACTS_NAME, *(entry.name for entry in manifest.entries))
            named |= {dataset.prefix + name for name in names}
        if result.datasets:
            result.extras = _other_files(directory, named)
        if against is not None and splits:
            sources = divide_sources(splits, against)
            against = sources.base
            layered = [task for task in tasks if task.split not in splits]
            tasks = [task for task in tasks if task.split in splits]
            if against is not None:
                attached = attach_source(tasks, splits, against)
                tasks = attached.tasks
                left_out = attached.left_out
                result.findings += [replace(finding, source=True) for finding in attached.findings]
            tasks += [
                compared_with(task, sources.layers[task.split])
                if task.split in sources.layers
                else task
                for task in layered
            ]
        if result.level != "quick":
            compared = self._check_shards(tasks, splits.keys())
            if against is not None and result.ok:
                prefixes = {dataset.prefix for dataset in splits.values()}
                own = {prefix: compared[prefix] for prefix in compared if prefix in prefixes}
                result.source = report_source(against, own, left_out)
                result.converted = sum(part.converted for part in own.values())
                result.replaced = _replaced(next(iter(splits.values())).manifest)
        else:
            result.findings += self.checks.stored_digests(tasks)
        result.findings.sort(
            key=lambda finding: (finding.file, -1 if finding.row is None else finding.row)
        )
        return result

    def _check_files(self, dataset: OpenedDataset) -> list[ShardCheck]:
        """Check the files of a dataset and its layers; return the checks of the shards."""
        result = self.result
        tasks = list[ShardCheck]()
        stored = [dataset.base]
        found = len(self.result.findings)
        for layer in dataset.manifest.layers:
            try:
                stored += [dataset.layer(layer)] if layer.files else []
            except (CorruptDataset, UsageError) as error:
                file = f"{dataset.prefix}{layer.folder}/{MANIFEST_NAME}"
                reason = _with_it(error, dataset.path / layer.folder / MANIFEST_NAME)
                result.findings.append(Finding(file=file, reason=reason))
        for each in stored:
            result.shards += len(each.manifest.shards)
            result.bytes += each.manifest.bytes
            findings, checks = check_files(each, decode=result.level == "decode")
            result.findings += findings
            tasks += checks
        if dataset.manifest.layers and found == len(result.findings):
            result.findings += check_view(dataset)
        return tasks

    def _check_shards(
        self, tasks: list[ShardCheck], splits: Collection[str]
    ) -> dict[str, ComparisonResult]:
        """Check all shards; return the comparison of each split with its source."""
        twins = {task.entry.sha256: task.prefix + task.entry.name for task in tasks}
        compared: dict[str, ComparisonResult] = {}
        for task, checked in run_tasks(
            self.checks.check, tasks, workers=self.workers, on_progress=self.on_progress
        ):
            self.result.records += checked.records if task.split in splits else 0
            self.result.findings += checked.findings
            if checked.sha256 != task.entry.sha256:
                self.result.findings.append(_other_content(task, twins.get(checked.sha256)))
            if checked.compared:
                compared.setdefault(task.prefix, ComparisonResult()).add(checked.compared)
        return compared


def _replaced(manifest: Manifest) -> list[str]:
    """Return the fields whose values did not come from the source of the conversion."""
    later = {name for layer in manifest.layers for name in layer.fields}
    converted = manifest.base.fields_by_name.keys()
    replaced = changed_fields(manifest.base.source) | later & converted
    return sorted(replaced & manifest.fields_by_name.keys())


def _other_content(task: ShardCheck, twin: str | None) -> Finding:
    reason = "its SHA-256 differs from the manifest"
    if twin is not None:
        reason += f": it has the content of {twin}"
    return Finding(file=task.prefix + task.entry.name, reason=reason)


def _datasets(directory: Path, root: Path | None, result: Verification) -> Iterator[OpenedDataset]:
    """Yield each dataset with an intact manifest; a damaged manifest becomes a finding."""
    try:
        splits = OpenedDirectory(directory, root=root).splits
    except CorruptDataset as error:
        reason = _with_it(error, directory / MANIFEST_NAME)
        result.findings.append(Finding(file=MANIFEST_NAME, reason=reason))
        return
    for dataset in splits.values():
        name = dataset.prefix + MANIFEST_NAME
        try:
            if not dataset.belongs:
                reason = "it does not belong to the other splits"
                result.findings.append(Finding(file=name, reason=reason))
        except (CorruptDataset, UsageError) as error:
            reason = _with_it(error, directory / name)
            result.findings.append(Finding(file=name, reason=reason))
            continue
        yield dataset


def _with_it(error: Exception, path: Path) -> str:
    """Return the message of an error with "it" for the path that it starts with."""
    message = str(error)
    return f"it {message.removeprefix(f'{path} ')}" if message.startswith(f"{path} ") else message


def _other_files(directory: Path, named: set[str]) -> list[str]:
    """Return all other files, and links, which are not followed."""
    paths = []
    for above, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(above, name))]
        paths += [os.path.relpath(os.path.join(above, name), directory) for name in files + links]
    return sorted(name for name in map(as_text, paths) if name not in named)
