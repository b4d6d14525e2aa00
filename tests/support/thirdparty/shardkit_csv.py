"""A source from another package: image files that a CSV table lists.

The table has a column for paths, relative to its folder, one for class names, and optionally one,
``split``, for splits. Rows keep their order.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Images, Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import Record, make_keys
from shardkit.sources.images import image_record


class CsvTable:
    kind = "csv"

    def __init__(self, path: str | Path, *, label_column: str = "label") -> None:
        self.path = Path(path)
        self.label_column = label_column

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> CsvTable:
        description = next(iter(described.values()))
        return cls(path, label_column=str(description.get("label_column")))

    def paths(self) -> Sequence[Path]:
        return [self.path]

    def describe(self, split: str) -> Mapping[str, Any]:
        return {"name": self.path.name, "label_column": self.label_column}

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [
                    (row.get("split") or "", row["path"], row[self.label_column])
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

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        return scan.splits[split].entries if split in scan.splits else ()

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
    options=(SourceOption(flags="--label-column", default="label", help="Column of class names."),),
    open=CsvTable,
    find=CsvTable.find,
)
