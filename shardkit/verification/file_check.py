"""Check the files of a dataset, but not the content of its shards."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from shardkit.dataset.index import INDEX_DIRECTORY, ROWS_NAME, require_counts
from shardkit.dataset.manifest import MANIFEST_NAME, ShardEntry
from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.parts import Part
from shardkit.errors import CorruptDataset
from shardkit.kinds.field import describe_schema
from shardkit.record import dump_json, load_json
from shardkit.system.files import as_name, sha256_of
from shardkit.system.safe_paths import UNFIT, is_file, status_of
from shardkit.system.text import as_command
from shardkit.verification.shard_check import Finding, ShardCheck

_REPEATED = ("format", "classes", "schema", "raw_shape", "recipe", "source")
"""Entries of the manifest that each shard repeats in its metadata."""


def check_files(store: OpenedDataset, *, decode: bool) -> tuple[list[Finding], list[ShardCheck]]:
    """Check the index of a store, and presence and size of every file.

    Returns:
        All damage, and the checks of the shards that can be read; with ``decode``, these decode
        each image.
    """
    manifest = store.manifest
    directory = store.path
    prefix = store.prefix
    findings: list[Finding] = []

    def blame(name: str, reason: str) -> None:
        findings.append(Finding(file=prefix + name, reason=reason))

    readable = set()
    for entry in (*manifest.shards, *manifest.files):
        folder = store.shards_folder if isinstance(entry, ShardEntry) else directory
        try:
            status = status_of(folder, as_name(entry.name))
            if not stat.S_ISREG(status.st_mode):
                blame(entry.name, "it is not a file")
                continue
            if (size := status.st_size) != entry.bytes:
                blame(entry.name, f"it has {size} bytes; the manifest says {entry.bytes}")
            elif entry.is_replaced(status.st_mtime_ns):
                blame(entry.name, "its modification time differs from the manifest")
            elif not isinstance(entry, ShardEntry) and (
                sha256_of(directory / entry.name, directory) != entry.sha256
            ):
                blame(entry.name, f"its content was changed; {_remedy(entry.name, directory)}")
        except (FileNotFoundError, NotADirectoryError):
            blame(entry.name, "it is missing")
            continue
        except UNFIT as error:
            blame(entry.name, f"it cannot be read: {error.strerror}")
            continue
        except OSError as error:
            findings.append(Finding.of_error(prefix + entry.name, error))
            continue
        readable.add(entry.name)
    if is_file(directory, ROWS_NAME):
        try:
            _check_index(store, blame, intact=not findings)
        except OSError as error:
            findings.append(Finding.of_error(prefix + ROWS_NAME, error))
    try:
        parts = store.parts
    except CorruptDataset as error:
        blame(MANIFEST_NAME, str(error))
        return findings, []
    return findings, [
        check for part in parts for check in _shard_checks(store, part, readable, decode=decode)
    ]


def check_view(dataset: OpenedDataset) -> list[Finding]:
    """Compare what a manifest states about a dataset with the indexes of all its stores."""
    findings: list[Finding] = []
    if dataset.is_store:  # that was the check of its files
        return findings

    def blame(name: str, reason: str) -> None:
        findings.append(Finding(file=dataset.prefix + name, reason=reason))

    try:
        _check_index(dataset, blame, intact=True)
    except OSError as error:
        findings.append(Finding.of_error(dataset.prefix + MANIFEST_NAME, error))
    return findings


def _remedy(name: str, directory: Path) -> str:
    if name.startswith(f"{INDEX_DIRECTORY}/"):
        return f"to rebuild the index from the shards, run {as_command('index', directory)}"
    return "restore it from a copy"


def _check_index(
    dataset: OpenedDataset, blame: Callable[[str, str], None], *, intact: bool
) -> None:
    """Compare the index with the manifest; its content digest only if all files are ``intact``."""
    manifest = dataset.manifest
    try:
        index = dataset.index
        require_counts((entries["label"] for entries in index.entries()), manifest.class_counts)
        counts = index.counts()
        content = index.content_digest() if intact else manifest.content_digest
    except CorruptDataset as error:
        blame(ROWS_NAME, str(error))
        return
    for entry in manifest.schema:
        if counts[entry.name] != entry.rows:
            reason = f"it states {entry.rows} rows with {entry.name}; the index has "
            blame(MANIFEST_NAME, f"{reason}{counts[entry.name]}")
    if content != manifest.content_digest:
        blame(MANIFEST_NAME, "it states another content digest than the index gives")


def _shard_checks(
    store: OpenedDataset, part: Part, readable: set[str], *, decode: bool
) -> Iterator[ShardCheck]:
    """Yield the checks of a part's shards, each with the metadata that its conversion wrote."""
    manifest = part.manifest
    start = part.start
    values = {**vars(manifest), "schema": describe_schema(manifest.fields_by_name)}
    meta = load_json(dump_json({name: values[name] for name in _REPEATED}))
    for entry in manifest.shards:
        if entry.name in readable:
            yield ShardCheck(
                folder=store.shards_folder,
                prefix=store.prefix,
                entry=entry,
                format=manifest.format,
                start=start,
                index=store.index,
                decode=decode,
                raw_shape=manifest.raw_shape,
                schema=manifest.fields_by_name,
                meta=meta,
            )
        start += entry.rows
