"""A dataset as a source: ``shardkit convert dataset`` copies, selects and re-encodes records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Entry, Images, PackedEntries, Scan, SourceKind, SourceOption
from shardkit.dataset.index import apart_of
from shardkit.dataset.manifest import dataset_directories
from shardkit.dataset.selection import Mask, column_values, select
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage, CorruptDataset, Problem, UsageError
from shardkit.record import IMAGE, LABEL, LABEL_FIELD, NO_LABEL, Field, Record, describe_schema
from shardkit.system.files import as_text

_AT_ONCE = 4096
"""Rows listed at a time."""


class DatasetSource:
    """The records of a dataset, or of all its splits, each compared with the index when read.

    Args:
        folder: The dataset.
        where: Only rows for which this expression is true: see `shardkit.dataset.selection`.
        rows: Only the rows of this file.
    """

    kind = "dataset"

    def __init__(
        self,
        folder: str | Path,
        *,
        where: str | None = None,
        rows: str | Path | None = None,
        _listed: bool = False,
    ) -> None:
        self._folder = Path(folder)
        places = dataset_directories(self._folder)
        self._sets = {split: ShardSet(place) for split, place in places.items()}
        self._where, self._rows = where, rows
        self._listed = _listed or rows is not None
        if rows is not None and len(places) > 1:
            raise UsageError(
                f"{folder} has the splits {', '.join(places)}, and --rows lists rows of one: "
                f"convert {self._folder / next(iter(places))}"
            )
        first, *others = self._sets.values()
        for other in others:
            if _form(other) != _form(first):
                raise UsageError(
                    f"{other.directory} has other fields, classes or raw pixels than "
                    f"{first.directory}: convert one split at a time"
                )

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> DatasetSource:
        """Open the dataset that another one was made from."""
        options = next(iter(described.values()))
        return cls(path, where=options.get("where"), _listed=bool(options.get("listed")))

    def __str__(self) -> str:
        return str(self._folder)

    def paths(self) -> Sequence[Path]:
        """Return the folder of the dataset."""
        return [self._folder]

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the selected rows, in order.

        Raises:
            UsageError: If no row is selected, or a selection is invalid.
            CorruptDataset: If an index is damaged.
        """
        first = next(iter(self._sets.values()))
        own = first.manifest.classes
        known = dict.fromkeys([*(classes or ()), *(own or ())])
        labels = {name: label for label, name in enumerate(known)}
        moved = [labels[name] for name in own or ()]
        fields = dict(first.schema)
        if LABEL in fields:
            fields[LABEL] = Field("label", classes=tuple(known))
        splits, understood = {}, {}
        for split, shards in self._sets.items():
            shards.part(np.arange(min(1, len(shards))))  # refuses a damaged index at once
            chosen = select(shards, where=self._where, rows=self._rows)
            entries = PackedEntries(_entries(shards, chosen, moved))
            if not len(entries):
                raise UsageError(f"no row of {shards.directory} is selected")
            splits[split] = Images(self, split, entries)
            text = f"{len(entries):,} of {len(shards):,} rows, {shards.manifest.format}"
            understood[split or "dataset"] = text
        understood |= {
            name: str(field) for name, field in fields.items() if name not in (IMAGE, LABEL)
        }
        return Scan(
            source=self,
            splits=splits,
            classes=None if own is None else tuple(known),
            fields=fields,
            understood=understood,
            records=True,
            raw_shape=first.manifest.raw_shape,
            whole=not self._listed or self._rows is not None,
            exact_sizes=fields.keys() <= {IMAGE, LABEL},
        )

    def column(self, entries: Sequence[Entry], name: str) -> Sequence[Any]:
        """Return a value of each entry of a dataset without splits: None where it is missing.

        Raises:
            UsageError: If there is no such column.
        """
        values = column_values(self._sets[""], name)
        return [values[entry.place] for entry in entries]

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the name and the content digest of the dataset, and how rows were selected."""
        found: dict[str, Any] = {
            "name": as_text(self._folder.resolve().name),
            "content_digest": self._sets[split].manifest.content_digest,
        }
        if self._where is not None:
            found["where"] = self._where
        if self._listed:
            found["listed"] = True
        return found

    def read(self, split: str, entry: Entry) -> Record:
        """Return a record, after comparing it with the index.

        Raises:
            BadImage: If the record or its index is damaged, or the dataset was replaced.
        """
        try:
            record = self._sets[split].record(entry.place)
        except CorruptDataset as error:
            raise BadImage(str(error)) from error
        if record.key != entry.key or record.meta["path"] != entry.path:
            raise BadImage("it changed since the scan")
        if entry.label in (NO_LABEL, record.label):
            return record
        return Record(record.key, {**record.fields, LABEL_FIELD: b"%d" % entry.label})

    def locate(self, split: str, entry: Entry) -> str:
        """Return the dataset and the row of a record."""
        return f"{self._sets[split].directory}, row {entry.place}"

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return all rows: a damaged record stays listed."""
        return scan.splits[split].entries if split in scan.splits else ()


def _form(shards: ShardSet) -> tuple[Any, ...]:
    """Return what all splits must have in common."""
    manifest = shards.manifest
    return manifest.classes, describe_schema(shards.schema), manifest.raw_shape


def _entries(shards: ShardSet, chosen: Mask, labels: Sequence[int]) -> Iterator[Entry]:
    """Yield the entry of each chosen row.

    Args:
        shards: The dataset.
        chosen: The rows.
        labels: The new label of each label.
    """
    own = shards.labels.tolist()
    fields = (IMAGE, *apart_of(shards.schema))
    for start in range(0, len(shards), _AT_ONCE):
        rows = np.arange(start, min(start + _AT_ONCE, len(shards)))
        entries = [shards.entries_of(name).read(rows) for name in fields]
        sizes = sum(each["length"].astype(np.int64) for each in entries)
        stamps = np.bitwise_xor.reduce([each["checksum"] for each in entries])
        listed = (shards.paths[start : rows[-1] + 1], shards.keys[start : rows[-1] + 1])
        for row, path, key, size, stamp in zip(
            rows.tolist(), *listed, np.asarray(sizes).tolist(), stamps.tolist(), strict=True
        ):
            if chosen[row]:
                label = own[row] if own[row] == NO_LABEL else labels[own[row]]
                yield Entry(path, key, label, size, stamp, row)


SOURCE = SourceKind(
    name=DatasetSource.kind,
    title="Copy, select or re-encode a dataset of shardkit.",
    help="""Convert a dataset of shardkit to another one in DST: in another format, with other
    shards, a subset, or with other images.

    SRC is the dataset, or a directory of splits. Without options for images, records are stored
    unchanged and in their order, so DST has the content digest of SRC. Each record is compared with
    its checksums; a damaged one is a bad file.

    \b
    Examples:
      shardkit convert dataset photos photos-tar --to webdataset
      shardkit convert dataset photos pets --to lmdb --where 'label in ("cat", "dog")'
      shardkit convert dataset photos small --to hdf5 --resize 224x224 --encode raw
    """,
    options=(
        SourceOption(
            flags="--where",
            metavar="EXPR",
            help="Only rows for which this is true: comparisons of columns with values, in, and, "
            "or, not. Columns are labels, numbers, texts, key, path, width and height.",
        ),
        SourceOption(
            flags="--rows",
            metavar="FILE",
            help="Only the rows that FILE lists: row numbers or keys, one per line.",
        ),
    ),
    open=DatasetSource,
    find=DatasetSource.find,
)
