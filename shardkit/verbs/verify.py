"""Verify: hold every byte of a dataset against what its manifest and its index promise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardkit.compare import Compared
from shardkit.errors import CorruptDataset, UsageError
from shardkit.examine import ExamineTask, Finding, examine_shard
from shardkit.files import sha256_of
from shardkit.index import INDEX_DIRECTORY, ROWS_NAME, Index, require_counts
from shardkit.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    SplitsManifest,
    load_any_manifest,
    load_manifest,
)
from shardkit.pool import Report, run_tasks
from shardkit.record import dump_json, load_json
from shardkit.verbs.against import SourceReport, attach_source, report_source

_SAID = ("format", "classes", "raw_shape", "recipe", "source")
"""What a shard says of itself, beside its number."""

LEVELS = ("quick", "full", "decode")


@dataclass(kw_only=True)
class Verification:
    """What a verification found."""

    level: str
    manifests: dict[str, str] = field(default_factory=dict)
    """Split, or "" where there are none, to the digest of its manifest."""
    datasets: int = 0
    shards: int = 0
    records: int = 0
    """Records that were read; none at the level ``quick``."""
    bytes: int = 0
    """Bytes of the shards."""
    findings: list[Finding] = field(default_factory=list)
    """All damage."""
    extras: list[str] = field(default_factory=list)
    """Files that do not belong to the dataset: no damage, but worth knowing."""
    source: SourceReport | None = None
    """What came of the comparison with the source, if there was one and it found no fault."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.findings


def verify(
    directory: str | Path,
    level: str = "full",
    *,
    against: str | Path | None = None,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Verification:
    """Check the dataset in ``directory``, or all of its splits.

    Args:
        directory: The dataset.
        level: ``quick`` checks manifests, presence and size of all files, and the index; ``full``
            also each shard's SHA-256 and each record against the index; ``decode`` also decodes
            each image.
        against: The folder that the dataset was made from. Every file in it must be there once, and
            no other, in the order and with the label that the manifest gives, and each record must
            be what the recipe makes of its file: byte for byte, or, if it was encoded by other
            versions of libraries, with a PSNR of `shardkit.compare.ALIKE_PSNR` at least.
        workers: Number of processes.
        on_progress: Called with what was done since the last call.

    Raises:
        UsageError: If there is no dataset, its manifest is of a newer version, or ``against``
            cannot be its source.
    """
    directory = Path(directory)
    if level not in LEVELS:
        raise UsageError(f"level={level!r} is unknown; known are {', '.join(LEVELS)}")
    if against is not None and level == "quick":
        raise UsageError("the level quick reads no record, so that none can be compared")
    result = Verification(level=level)
    left_out = 0
    manifests = dict(_manifests(directory, result))
    by_split = {prefix.removesuffix("/"): manifest for prefix, manifest in manifests.items()}
    result.manifests = {split: manifest.digest for split, manifest in by_split.items()}
    named = {MANIFEST_NAME}
    tasks: list[ExamineTask] = []
    for prefix, manifest in manifests.items():
        tasks += _check_files(directory, prefix, manifest, result)
        named |= {prefix + MANIFEST_NAME, *(prefix + entry.name for entry in manifest.entries)}
    if result.datasets:
        result.extras = _others(directory, named)
    if against is not None and manifests:
        attached = attach_source(tasks, directory, by_split, Path(against))
        tasks, left_out = attached.tasks, attached.left_out
        result.findings += [replace(finding, source=True) for finding in attached.findings]
    if level != "quick":
        compared = _examine(tasks, result, workers, on_progress)
        if against is not None and result.ok:
            result.source = report_source(Path(against), compared, left_out)
    result.findings.sort(
        key=lambda finding: (finding.file, -1 if finding.row is None else finding.row)
    )
    return result


def _examine(
    tasks: list[ExamineTask], result: Verification, workers: int, on_progress: Report | None
) -> dict[str, Compared]:
    """Read all shards; return what came of comparing each split with its source."""
    twins = {task.entry.sha256: task.prefix + task.entry.name for task in tasks}
    compared: dict[str, Compared] = {}
    for task, examined in run_tasks(examine_shard, tasks, workers=workers, on_progress=on_progress):
        result.records += examined.records
        result.findings += examined.findings
        if examined.sha256 != task.entry.sha256:
            result.findings.append(_other_content(task, twins.get(examined.sha256)))
        if examined.compared:
            compared.setdefault(task.prefix, Compared()).add(examined.compared)
    return compared


def _other_content(task: ExamineTask, twin: str | None) -> Finding:
    reason = "its SHA-256 is not the one in the manifest"
    if twin is not None:
        reason += f": it holds what belongs into {twin}"
    return Finding(file=task.prefix + task.entry.name, reason=reason)


def _manifests(directory: Path, result: Verification) -> Iterator[tuple[str, Manifest]]:
    """Give each dataset's prefix and manifest; damage to manifests becomes a finding."""
    try:
        top = load_any_manifest(directory)
    except CorruptDataset as error:
        reason = str(error).removeprefix(f"{directory / MANIFEST_NAME} ")
        result.findings.append(Finding(file=MANIFEST_NAME, reason=reason))
        return
    if isinstance(top, Manifest):
        yield "", top
        return
    yield from _split_manifests(directory, top, result)


def _split_manifests(
    directory: Path, top: SplitsManifest, result: Verification
) -> Iterator[tuple[str, Manifest]]:
    for split, digest in top.splits.items():
        name = f"{split}/{MANIFEST_NAME}"
        try:
            manifest = load_manifest(directory / split)
        except (CorruptDataset, UsageError) as error:
            result.findings.append(Finding(file=name, reason=str(error)))
            continue
        if manifest.digest != digest:
            reason = "it is not the manifest that was written with the other splits"
            result.findings.append(Finding(file=name, reason=reason))
        yield f"{split}/", manifest


def _check_files(
    directory: Path, prefix: str, manifest: Manifest, result: Verification
) -> list[ExamineTask]:
    """Check presence and size of every file and the index; return the shards worth reading."""
    place = directory / prefix
    result.datasets += 1
    result.shards += len(manifest.shards)
    result.bytes += manifest.bytes

    def blame(name: str, reason: str) -> None:
        result.findings.append(Finding(file=prefix + name, reason=reason))

    present = []
    for entry in manifest.entries:
        path = place / entry.name
        try:
            if not path.is_file():
                blame(entry.name, "it is missing")
                continue
            if (found := path.stat().st_size) != entry.bytes:
                blame(entry.name, f"it has {found} bytes; the manifest says {entry.bytes}")
            elif not isinstance(entry, ShardEntry) and sha256_of(path) != entry.sha256:
                blame(entry.name, f"its content was changed; {_remedy(entry.name, place)}")
        except OSError as error:
            blame(entry.name, f"it cannot be read: {error.strerror}")
            continue
        if isinstance(entry, ShardEntry):
            present.append(entry.name)
    if os.path.isfile(place / ROWS_NAME):
        _check_index(place, manifest, blame)
    return list(_tasks(directory, prefix, manifest, result.level, set(present)))


def _others(directory: Path, named: set[str]) -> list[str]:
    found = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name not in named)


def _remedy(name: str, place: Path) -> str:
    if name.startswith(f"{INDEX_DIRECTORY}/"):
        return f"`shardkit index {place}` rebuilds the index from the shards"
    return "restore it from a copy"


def _check_index(place: Path, manifest: Manifest, blame: Callable[[str, str], None]) -> None:
    try:
        rows = Index(place, manifest.rows).rows()
        require_counts(rows["label"], manifest.class_counts)
    except CorruptDataset as error:
        blame(ROWS_NAME, str(error))


def _tasks(
    directory: Path, prefix: str, manifest: Manifest, level: str, present: set[str]
) -> Iterator[ExamineTask]:
    start = 0
    said = load_json(dump_json({name: getattr(manifest, name) for name in _SAID}))
    for entry in manifest.shards:
        if entry.name in present:
            yield ExamineTask(
                directory=directory / prefix,
                prefix=prefix,
                entry=entry,
                format=manifest.format,
                start=start,
                rows=manifest.rows,
                decode=level == "decode",
                raw_shape=manifest.raw_shape,
                meta=said,
            )
        start += entry.rows
