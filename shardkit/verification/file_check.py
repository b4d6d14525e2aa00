"""Check the files of a dataset, but not the content of its shards."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from shardkit.dataset.index import INDEX_DIRECTORY, ROWS_NAME, require_counts
from shardkit.dataset.manifest import MANIFEST_NAME, FileEntry, ShardEntry
from shardkit.dataset.opened import OpenedDataset
from shardkit.dataset.parts import Part
from shardkit.errors import CorruptDataset
from shardkit.system.files import as_name, sha256_of
from shardkit.system.late import load
from shardkit.system.safe_paths import UNFIT, status_of
from shardkit.system.text import as_command
from shardkit.verification.findings import Finding, ShardCheck

_LISTING = "shardkit.attaching.check:check_listing"
"""Compares the files in the folder of a dataset with one file for each row."""


def check_files(store: OpenedDataset, *, decode: bool) -> tuple[list[Finding], list[ShardCheck]]:
    """Check the index of a store, and presence and size of every file.

    Return all damage, and the checks of the shards that can be read; with ``decode``, these decode
    each image.
    """
    findings = list[Finding]()
    readable = set[str]()
    loose = store.manifest.is_loose
    shards = () if loose else store.manifest.shards  # also archives elsewhere
    for entry in (*shards, *store.manifest.files):
        file = store.prefix + entry.name
        try:
            is_file, fault = _examine(store, entry)
        except OSError as error:
            findings.append(Finding.of_error(file, error))
            continue
        if fault:
            findings.append(Finding(file=file, reason=fault))
        if is_file:
            readable.add(entry.name)
    if ROWS_NAME in readable:
        findings += check_index(store, intact=not findings)
    if loose and not findings:
        findings, readable = load(_LISTING)(store)
    checks = (check for part in store.parts for check in _shard_checks(store, part, decode=decode))
    return findings, [check for check in checks if check.entry.name in readable]


def _examine(store: OpenedDataset, entry: FileEntry) -> tuple[bool, str]:
    """Return whether a file can be read, and what is wrong with it; of shards, only the size."""
    is_shard = isinstance(entry, ShardEntry)
    try:
        status = status_of(store.shards_folder if is_shard else store.path, as_name(entry.name))
        if not stat.S_ISREG(status.st_mode):
            return False, "it is not a file"
        fault = ""
        if (size := status.st_size) != entry.bytes:
            fault = f"it has {size} bytes; the manifest lists {entry.bytes}"
        elif entry.is_replaced(status.st_mtime_ns):
            fault = "its modification time differs from the manifest"
        elif not is_shard and sha256_of(store.path / entry.name, store.path) != entry.sha256:
            fault = f"its content was changed; {_remedy(entry.name, store.path)}"
        return True, fault
    except (FileNotFoundError, NotADirectoryError):
        return False, "it is missing"
    except UNFIT as error:
        return False, f"it cannot be read: {error.strerror}"


def _remedy(name: str, directory: Path) -> str:
    if name.startswith(f"{INDEX_DIRECTORY}/"):
        return f"to rebuild the index from the shards, run {as_command('index', directory)}"
    return "restore it from a copy"


def check_index(dataset: OpenedDataset, *, intact: bool) -> list[Finding]:
    """Compare the index with the manifest; its content digest only if all files are ``intact``."""
    manifest = dataset.manifest
    try:
        index = dataset.index
        require_counts((entries["label"] for entries in index.entries()), manifest.class_counts)
        counts = index.counts()
        content = index.content_digest() if intact else manifest.content_digest
    except CorruptDataset as error:
        return [Finding(file=dataset.prefix + ROWS_NAME, reason=str(error))]
    except OSError as error:
        return [Finding.of_error(dataset.prefix + ROWS_NAME, error)]
    reasons = [
        f"it declares {entry.rows} rows with {entry.name}; the index has {counts[entry.name]}"
        for entry in manifest.schema
        if counts[entry.name] != entry.rows
    ]
    if content != manifest.content_digest:
        reasons.append("its content digest differs from that of the index")
    return [Finding(file=dataset.prefix + MANIFEST_NAME, reason=reason) for reason in reasons]


def _shard_checks(store: OpenedDataset, part: Part, *, decode: bool) -> Iterator[ShardCheck]:
    """Yield the checks of a part's shards, each with the metadata that its conversion wrote."""
    manifest = part.manifest
    index = store.index
    meta = part.meta
    start = part.start
    for entry in manifest.shards:
        yield ShardCheck(
            folder=store.shards_folder,
            loose=manifest.is_loose,
            prefix=store.prefix,
            entry=entry,
            format=manifest.format,
            start=start,
            index=index,
            decode=decode,
            raw_shape=manifest.raw_shape,
            schema=manifest.fields_by_name,
            meta=meta,
        )
        start += entry.rows
