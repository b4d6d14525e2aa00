"""Verify a dataset: compare every byte with the manifest and the index."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.dataset.attached import is_replaced, shards_folder
from shardkit.dataset.index import INDEX_DIRECTORY, ROWS_NAME, Index, require_counts
from shardkit.dataset.manifest import (
    FACTS_NAME,
    MANIFEST_NAME,
    AttachedManifest,
    Manifest,
    ShardEntry,
    SplitsManifest,
    load_any_manifest,
    load_manifest,
    split_directory,
)
from shardkit.dataset.parts import Part, parts_of
from shardkit.errors import CorruptDataset, UsageError
from shardkit.record import describe_schema, dump_json, load_json
from shardkit.stores.urls import as_local, as_url
from shardkit.system.files import as_name, as_text, sha256_of
from shardkit.system.pool import Report, run_tasks
from shardkit.system.safe_paths import is_file, status_of
from shardkit.verification.record_comparison import ComparisonResult
from shardkit.verification.remote import RemoteChecks, mirrored
from shardkit.verification.shard_check import CheckedShard, Finding, ShardCheck, check_shard
from shardkit.verification.source_comparison import SourceReport, attach_source, report_source

_SAID = ("format", "classes", "schema", "raw_shape", "recipe", "source")
"""Entries of the manifest that each shard repeats in its metadata."""

_Run = Callable[[list[ShardCheck]], Iterator[tuple[ShardCheck, CheckedShard]]]

LEVELS = ("quick", "full", "decode")


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
    """Number of records read; 0 at level ``quick``."""
    bytes: int = 0
    """Size of the shards in bytes."""
    findings: list[Finding] = field(default_factory=list)
    """All damage."""
    extras: list[str] = field(default_factory=list)
    """Files that do not belong to the dataset, which is no damage."""
    source: SourceReport | None = None
    """Result of the comparison with the source, if requested and successful."""

    @property
    def ok(self) -> bool:
        """Whether the dataset is intact, and equals its source if that was compared."""
        return not self.findings


def verify(  # noqa: PLR0913 - the options of the command
    directory: str | Path,
    level: str = "full",
    *,
    against: Any = None,
    root: str | Path | None = None,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Verification:
    """Check the dataset in ``directory``, or all of its splits.

    Args:
        directory: The dataset, or its URL in an object store: shards are fetched to a temporary
            folder, one for each worker at a time.
        level: ``quick`` checks manifests, the index, and presence and size of all files; ``full``
            also each shard's SHA-256 and each record; ``decode`` also decodes each image.
        against: The folder, or the Python samples, that the dataset was made from; a list of these,
            one for each part, if it was merged or appended to, unless all are the same. The dataset
            must contain exactly its files, each once, with the manifest's order and labels. Each
            record must equal its
            converted file: byte for byte, or, if other library versions encoded it, with a PSNR of
            at least `record_comparison.ALIKE_PSNR`.
        root: Folder of the archives of an attached dataset, whose records are compared with the
            index, and whose bytes with their SHA-256; None means where `shardkit.attach` found
            them.
        workers: Number of processes.
        on_progress: Called with the progress since the last call.

    Raises:
        UsageError: If there is no dataset, its manifest is of a newer version, or ``against``
            cannot be its source.
    """
    if level not in LEVELS:
        raise UsageError(f"level={level!r} is unknown; choose from {', '.join(LEVELS)}")
    if against is not None and level == "quick":
        raise UsageError("against requires level='full' or 'decode': 'quick' reads no records")
    url = as_url(directory)
    if url is None:
        run = partial(run_tasks, check_shard, workers=workers, on_progress=on_progress)
        archives = None if root is None else Path(root)
        return _verify(Path(as_local(directory)), level, against, run, root=archives)
    remote = RemoteChecks(url)
    run = partial(run_tasks, remote.check, workers=workers, on_progress=on_progress)
    with mirrored(url) as place:
        result = _verify(place, level, against, run, remote.stored_digests)
        result.findings = [
            replace(each, reason=each.reason.replace(str(place), url)) for each in result.findings
        ]
    return result


def _verify(  # noqa: PLR0913 - all from one caller
    directory: Path,
    level: str,
    against: Any,
    run: _Run,
    check_quickly: Callable[[list[ShardCheck]], list[Finding]] = lambda _: [],
    *,
    root: Path | None = None,
) -> Verification:
    """Verify a local dataset, or the mirror of a remote one.

    ``run`` checks each shard completely, and ``check_quickly`` all of them without reading them.
    """
    result = Verification(level=level)
    left_out = 0
    manifests = dict(_manifests(directory, result))
    by_split = {prefix.removesuffix("/"): manifest for prefix, manifest in manifests.items()}
    result.manifests = {split: manifest.digest for split, manifest in by_split.items()}
    named = {MANIFEST_NAME}
    tasks: list[ShardCheck] = []
    for prefix, manifest in manifests.items():
        if against is not None and isinstance(manifest, AttachedManifest):
            raise UsageError(
                f"{directory} is attached, so it is always compared with its archives: leave "
                "against out"
            )
        result.attached |= isinstance(manifest, AttachedManifest)
        place = directory / as_name(prefix)
        folder = shards_folder(place, manifest, root)
        tasks += _check_files(directory, prefix, manifest, folder, result)
        names = (MANIFEST_NAME, FACTS_NAME, *(entry.name for entry in manifest.entries))
        named |= {prefix + name for name in names}
    if result.datasets:
        result.extras = _others(directory, named)
    if against is not None and manifests:
        attached = attach_source(tasks, directory, by_split, against)
        tasks, left_out = attached.tasks, attached.left_out
        result.findings += [replace(finding, source=True) for finding in attached.findings]
    if level != "quick":
        compared = _examine(run, tasks, result)
        if against is not None and result.ok:
            result.source = report_source(against, compared, left_out)
    else:
        result.findings += check_quickly(tasks)
    result.findings.sort(
        key=lambda finding: (finding.file, -1 if finding.row is None else finding.row)
    )
    return result


def _examine(
    run: _Run, tasks: list[ShardCheck], result: Verification
) -> dict[str, ComparisonResult]:
    """Check all shards; return the comparison of each split with its source."""
    twins = {task.entry.sha256: task.prefix + task.entry.name for task in tasks}
    compared: dict[str, ComparisonResult] = {}
    for task, examined in run(tasks):
        result.records += examined.records
        result.findings += examined.findings
        if examined.sha256 != task.entry.sha256:
            result.findings.append(_other_content(task, twins.get(examined.sha256)))
        if examined.compared:
            compared.setdefault(task.prefix, ComparisonResult()).add(examined.compared)
    return compared


def _other_content(task: ShardCheck, twin: str | None) -> Finding:
    reason = "its SHA-256 differs from the manifest"
    if twin is not None:
        reason += f": it has the content of {twin}"
    return Finding(file=task.prefix + task.entry.name, reason=reason)


def _manifests(directory: Path, result: Verification) -> Iterator[tuple[str, Manifest]]:
    """Yield each dataset's prefix and manifest; a damaged manifest becomes a finding."""
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
            manifest = load_manifest(split_directory(directory, split))
        except (CorruptDataset, UsageError) as error:
            result.findings.append(Finding(file=name, reason=str(error)))
            continue
        if manifest.digest != digest:
            reason = "it does not belong to the other splits"
            result.findings.append(Finding(file=name, reason=reason))
        yield f"{split}/", manifest


def _check_files(
    directory: Path, prefix: str, manifest: Manifest, folder: Path, result: Verification
) -> list[ShardCheck]:
    """Check the index, and presence and size of every file; return the shards to read."""
    place = directory / as_name(prefix)
    result.datasets += 1
    result.shards += len(manifest.shards)
    result.bytes += manifest.bytes

    def blame(name: str, reason: str) -> None:
        result.findings.append(Finding(file=prefix + name, reason=reason))

    before = len(result.findings)
    present = []
    for entry in (*manifest.shards, *manifest.files):
        above = folder if isinstance(entry, ShardEntry) else place
        path = above / entry.name
        try:
            status = status_of(above, as_name(entry.name))
            if not stat.S_ISREG(status.st_mode):
                blame(entry.name, "it is not a file")
                continue
            if (found := status.st_size) != entry.bytes:
                blame(entry.name, f"it has {found} bytes; the manifest says {entry.bytes}")
            elif is_replaced(entry, status):
                blame(entry.name, "its modification time differs from the manifest")
            elif not isinstance(entry, ShardEntry) and sha256_of(path, place) != entry.sha256:
                blame(entry.name, f"its content was changed; {_remedy(entry.name, place)}")
        except (FileNotFoundError, NotADirectoryError):
            blame(entry.name, "it is missing")
            continue
        except OSError as error:
            blame(entry.name, f"it cannot be read: {error.strerror}")
            continue
        if isinstance(entry, ShardEntry):
            present.append(entry.name)
    if is_file(place, ROWS_NAME):
        _check_index(place, manifest, blame, sound=len(result.findings) == before)
    try:
        parts = parts_of(manifest)
    except CorruptDataset as error:
        blame(MANIFEST_NAME, str(error))
        return []
    there = set(present)
    return [
        task
        for part in parts
        for task in _tasks(directory, prefix, part, folder, result.level, there)
    ]


def _others(directory: Path, named: set[str]) -> list[str]:
    """Return all other files, and links, which are not followed."""
    found = []
    for above, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(above, name))]
        found += [os.path.relpath(os.path.join(above, name), directory) for name in files + links]
    return sorted(name for name in map(as_text, found) if name not in named)


def _remedy(name: str, place: Path) -> str:
    if name.startswith(f"{INDEX_DIRECTORY}/"):
        return f"to rebuild the index from the shards, run `shardkit index {place}`"
    return "restore it from a copy"


def _check_index(
    place: Path, manifest: Manifest, blame: Callable[[str, str], None], *, sound: bool
) -> None:
    """Compare the index with the manifest; its content digest only if all files are ``sound``."""
    try:
        index = Index(place, manifest.rows)
        require_counts(index.rows()["label"], manifest.class_counts)
        counts = index.counts(manifest.fields_by_name, manifest.lacking)
        content = manifest.content_digest
        if sound:
            content = index.content_digest(manifest.fields_by_name, manifest.lacking)
    except CorruptDataset as error:
        blame(ROWS_NAME, str(error))
        return
    for entry in manifest.schema:
        if counts[entry.name] != entry.rows:
            reason = f"it states {entry.rows} rows with {entry.name}; the index has "
            blame(MANIFEST_NAME, f"{reason}{counts[entry.name]}")
    if content != manifest.content_digest:
        blame(MANIFEST_NAME, "it states another content digest than the index gives")


def _tasks(  # noqa: PLR0913, PLR0917 - all from one caller
    directory: Path, prefix: str, part: Part, folder: Path, level: str, present: set[str]
) -> Iterator[ShardCheck]:
    """Yield the shards of a part to check, each with the metadata that its conversion wrote."""
    manifest, start = part.manifest, part.start
    stated = {**vars(manifest), "schema": describe_schema(manifest.fields_by_name)}
    said = load_json(dump_json({name: stated[name] for name in _SAID}))
    for entry in manifest.shards:
        if entry.name in present:
            yield ShardCheck(
                directory=directory / as_name(prefix),
                folder=folder,
                prefix=prefix,
                entry=entry,
                format=manifest.format,
                start=start,
                rows=part.rows,
                decode=level == "decode",
                raw_shape=manifest.raw_shape,
                schema=manifest.fields_by_name,
                lacking=part.lacking,
                meta=said,
            )
        start += entry.rows
