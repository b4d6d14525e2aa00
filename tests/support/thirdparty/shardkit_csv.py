"""A source from another package: image files that a CSV table lists.

The table has a column for paths, relative to its folder, one for class names, and optionally one,
``split``, for splits. Rows keep their order.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Images, Scan, Source, SourceKind, SourceOptions
from shardkit.errors import BadImage, UsageError
from shardkit.options import option
from shardkit.record import Record, make_keys
from shardkit.sources.images import image_record


@dataclass(frozen=True, kw_only=True)
class CsvTableOptions(SourceOptions):
    """The options of this source."""

    label_column: str = option("label", help="Column of class names.")


class CsvTable(Source):
    kind = "csv"

    def __init__(self, path: str | Path, options: CsvTableOptions) -> None:
        self.path = Path(path)
        self.options = options

    def __str__(self) -> str:
        return str(self.path)

    def paths(self) -> Sequence[Path]:
        return [self.path]

    def describe(self, split: str) -> Mapping[str, Any]:
        return {"name": self.path.name, **self.options.describe()}

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [
                    (row.get("split") or "", row["path"], row[self.options.label_column])
                    for row in csv.DictReader(file)
                ]
        except (OSError, ValueError, csv.Error, KeyError) as error:
            raise UsageError(f"{self.path} is not a table of images: {error!r}") from error
        ordered = tuple(dict.fromkeys((*(classes or ()), *(name for *_, name in rows))))
        splits = {}
        for split in dict.fromkeys(split for split, *_ in rows):
            members = [(path, name) for place, path, name in rows if place == split]
            keys = make_keys(path for path, _ in members)
            entries = [
                self._entry(path, key, ordered.index(name))
                for key, (path, name) in zip(keys, members, strict=True)
            ]
            splits[split] = Images(self, split, entries)
        return Scan(source=self, splits=splits, classes=ordered)

    def read(self, split: str, entry: Entry) -> Record:
        try:
            data = Path(self.locate(split, entry)).read_bytes()
        except OSError as error:
            raise BadImage(f"it cannot be read: {error.strerror}") from error
        if self._entry(entry.path, entry.key, entry.label) != entry:
            raise BadImage("it changed since the scan")
        return image_record(entry, data)

    def locate(self, split: str, entry: Entry) -> str:
        return str(self.path.parent / entry.path)

    def _entry(self, path: str, key: str, label: int) -> Entry:
        try:
            status = (self.path.parent / path).stat()
        except OSError:
            return Entry(path, key, label, 0, 0)  # reading it reports the error
        return Entry(path, key, label, status.st_size, status.st_mtime_ns)


SOURCE = SourceKind(
    name=CsvTable.kind,
    title="Convert image files listed in a CSV table.",
    help="Convert the images that the table SRC lists to a dataset in DST.",
    options=CsvTableOptions,
    source=CsvTable,
)
