"""Checks and findings of `shardkit verify`: shards to check, and damage found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.dataset.index import Index, IndexSegment
from shardkit.dataset.manifest import MANIFEST_NAME, ShardEntry
from shardkit.kinds.field import Schema
from shardkit.system.files import as_name
from shardkit.verification.record_comparison import ComparisonResult, SourceComparison


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Damage to a file, or a difference from the source."""

    file: str
    """The damaged file, relative to the verified directory."""
    reason: str
    key: str | None = None
    """Key of the damaged record; None if the damage is not in one record."""
    path: str | None = None
    """The record's source path."""
    row: int | None = None
    """The record's row in its dataset."""
    source: bool = False
    """Whether the source differs; the dataset may be unchanged."""
    as_stored: bool = False
    """Whether the record has the bytes that the conversion stored: the image was already bad."""
    unread: bool = False
    """Whether the file could not be read, so that nothing is known about its content."""
    receipt: bool = False
    """Whether it differs from a receipt; it may be undamaged."""

    @classmethod
    def of_error(cls, file: str, error: OSError) -> Finding:
        """Return the finding for a file that could not be read."""
        reason = f"it cannot be read: {error.strerror or error}; run the same command again"
        return cls(file=file, reason=reason, unread=True)

    @property
    def kind(self) -> str:
        """The kind; "bad image" is a fault of the source, "not read" an error."""
        if self.unread:
            return "not read"
        differs = self.source or self.receipt
        return "differs" if differs else "bad image" if self.as_stored else "damaged"

    def __str__(self) -> str:
        if self.row is None:
            return f"{self.file}: {self.reason}"
        if self.key is None:
            return f"{self.file}: row {self.row}: {self.reason}"
        return f"{self.file}: record {self.key} (row {self.row}, from {self.path}): {self.reason}"


@dataclass(frozen=True, kw_only=True)
class ShardCheck:
    """One shard to check: the task of a worker process."""

    folder: Path
    """Folder of the shard."""
    prefix: str
    """Prefix of file names in findings: the folder of the store, or ""."""
    entry: ShardEntry
    format: str
    start: int
    """The shard's first row in the dataset."""
    loose: bool
    """Whether each row is a file in the folder."""
    index: Index
    """The index of the store."""
    decode: bool
    raw_shape: tuple[int, int, int] | None
    schema: Schema
    """The fields of all records."""
    meta: dict[str, Any]
    """Expected metadata of the shard."""
    against: SourceComparison | None = None
    """The source to compare the records with, in addition to the index."""

    @property
    def path(self) -> Path:
        """The shard's file."""
        return self.folder / as_name(self.entry.name)

    @property
    def file(self) -> str:
        """The name of the shard in findings."""
        return self.prefix + self.entry.name

    def of_manifest(self, reason: str) -> Finding:
        """Return a contradiction between the manifest and an intact shard."""
        return Finding(file=self.prefix + MANIFEST_NAME, reason=reason)

    def finding(
        self, reason: str, row: int | None = None, index: IndexSegment | None = None, file: str = ""
    ) -> Finding:
        """Return damage of the shard, or of the record at a ``row`` of ``index``."""
        finding = Finding(file=self.prefix + (file or self.entry.name), reason=reason)
        if row is None:
            return finding
        finding = replace(finding, row=self.start + row)
        if index is None or row >= len(index.keys):
            return finding
        return replace(finding, key=index.keys[row], path=index.paths[row])


class CheckedShard(NamedTuple):
    """The result of checking one shard."""

    findings: list[Finding]
    """All damage to its records and structure, not including a wrong SHA-256."""
    records: int
    """Number of records read."""
    sha256: str
    compared: ComparisonResult | None
    """Result of the comparison with the source, if requested."""
