"""A source that wraps a source: what it does not change, it passes on."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from shardkit.contracts import Comparison, Entry, Scan, Source
from shardkit.errors import Problem
from shardkit.kinds.packing import only_fields
from shardkit.record import Record


class Wrapper(Source):
    """The images of another source, changed."""

    def __init__(self, source: Source) -> None:
        self.kind = source.kind
        self.source = source

    def inner(self, split: str) -> str:
        """Return the split of the other source that has the images of a split."""
        return split

    def __str__(self) -> str:
        return str(self.source)

    def paths(self) -> Sequence[Path]:
        """Return the paths of the other source."""
        return self.source.paths()

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images; see `shardkit.contracts.Source`, also for the methods below."""
        return self.source.scan(classes)

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the description of a split."""
        return self.source.describe(self.inner(split))

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        return self.read_given(split, entry)[0]

    def read_given(self, split: str, entry: Entry) -> tuple[Record, Comparison]:
        """Return the record of an image and its comparison; override this in place of `read`."""
        return self.source.read_given(self.inner(split), entry)

    def locate(self, split: str, entry: Entry) -> str:
        """Return the location of an image."""
        return self.source.locate(self.inner(split), entry)

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a split as the conversion listed them."""
        return self.source.relist(scan, split, skipped)

    def files(self, split: str, entries: Sequence[Entry]) -> Sequence[bytes] | None:
        """Return the file of each image; None if a subclass changes records."""
        if type(self).read_given is not Wrapper.read_given:
            return None
        return self.source.files(self.inner(split), entries)

    @property
    def chunk_bytes(self) -> int:  # type: ignore[override]
        """Bytes of images that a process prepares at a time."""
        return self.source.chunk_bytes

    def ahead(self, split: str, entries: Sequence[Entry]) -> None:
        """Start to read images."""
        self.source.ahead(self.inner(split), entries)

    def only(self, entries: Sequence[Entry]) -> Self:
        """Return a source with these images alone, if they are in memory."""
        narrowed = copy.copy(self)
        narrowed.source = self.source.only(entries)
        return narrowed

    def column(self, entries: Sequence[Entry], name: str) -> Iterable[Any]:
        """Return a value of each entry by which images can be grouped."""
        return self.source.column(entries, name)


class SomeFields(Wrapper):
    """The images of a source, scanned before, with some of their fields."""

    def __init__(self, scan: Scan, names: Collection[str]) -> None:
        super().__init__(scan.source)
        self.schema = scan.schema
        self.names = names

    def read_given(self, split: str, entry: Entry) -> tuple[Record, Comparison]:
        """Return the record of an image with the wanted fields alone."""
        record, comparison = super().read_given(split, entry)
        return self.narrow(record), comparison

    def narrow(self, record: Record) -> Record:
        """Return a record with the wanted fields alone."""
        return only_fields(record, self.schema, self.names)

    def narrowed(self, scan: Scan) -> Scan:
        """Return the scan of the other source as one of this."""
        splits = {split: replace(images, source=self) for split, images in scan.splits.items()}
        return replace(scan, source=self, splits=splits, exact_sizes=False)
