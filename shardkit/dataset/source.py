"""A dataset as a source: ``shardkit convert dataset`` copies, selects and re-encodes records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.contracts import (
    Entry,
    Images,
    Original,
    OriginalPart,
    PackedEntries,
    ReadTogether,
    Recognition,
    Scan,
    Source,
    SourceKind,
    SourceOptions,
    StoredEntries,
    as_packed,
)
from shardkit.dataset.opened import OpenedDirectory
from shardkit.dataset.parts import CHANGED, converted_digest, with_changed
from shardkit.dataset.records import intact_records, labeled, record_of
from shardkit.dataset.selection import Mask, column_values, select
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage, CorruptDataset, UsageError, setting
from shardkit.kinds.field import Field, apart_of, describe_schema
from shardkit.options import option
from shardkit.record import (
    DATASET_FILE,
    IMAGE,
    LABEL,
    NO_LABEL,
    Record,
)
from shardkit.registry import DATASET, get_format
from shardkit.system.files import as_text
from shardkit.system.text import name_list

if TYPE_CHECKING:
    from shardkit.sources.recognize import Overview

_AT_ONCE = 4096
"""Rows listed at a time."""

_MANY = 1 << 15
"""Rows that are listed in memory."""


@dataclass(frozen=True, kw_only=True)
class DatasetSourceOptions(SourceOptions):
    """The options of this source."""

    where: str | None = option(
        None,
        help="Convert only rows for which EXPR is true. EXPR compares columns with values, and "
        "may use in, and, or, not. Columns are labels, numbers, texts, key, path, width and "
        "height.",
        metavar="EXPR",
    )
    rows: str | Path | bool | None = option(
        None,
        help="Convert only the rows listed in FILE: row numbers or keys, one per line.",
        metavar="FILE",
        stored="listed",
        store=bool,
    )
    """True in a description: the user gave a file."""


class DatasetSource(Source):
    """The records of a dataset, or of all its splits, each compared with the index when read."""

    kind = DATASET

    def __init__(self, folder: str | Path, options: DatasetSourceOptions | None = None) -> None:
        self._folder = Path(folder)
        self._options = options or DatasetSourceOptions()
        splits = OpenedDirectory(self._folder).splits
        self._sets = {name: ShardSet(split) for name, split in splits.items()}
        if self._rows is not None and len(splits) > 1:
            raise UsageError(
                f"{folder} has the splits {name_list(splits)}, and {setting('rows')} lists rows "
                "of one",
                remedy=f"convert {self._folder / next(iter(splits))}",
            )
        first, *others = self._sets.values()
        for other in others:
            if _form(other) != _form(first):
                raise UsageError(
                    f"{other.directory} and {first.directory} have different fields, classes or "
                    "raw pixels",
                    remedy="convert one split at a time",
                )

    @property
    def _rows(self) -> str | Path | None:
        """The file of rows; None without, and in a source that a manifest describes."""
        rows = self._options.rows
        return None if isinstance(rows, bool) else rows

    def __str__(self) -> str:
        return str(self._folder)

    def paths(self) -> Sequence[Path]:
        """Return the folder of the dataset."""
        return [self._folder]

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the selected rows, in order."""
        first = next(iter(self._sets.values()))
        own_classes = first.manifest.classes
        class_names = dict.fromkeys([*(classes or ()), *(own_classes or ())])
        labels = {name: label for label, name in enumerate(class_names)}
        moved = [labels[name] for name in own_classes or ()]
        fields = dict(first.schema)
        if LABEL in fields:
            fields[LABEL] = Field("label", classes=tuple(class_names))
        splits = {}
        understood = {}
        for split, shards in self._sets.items():
            shards.segment(range(min(1, len(shards))))  # refuses a damaged index at once
            chosen = select(shards, where=self._options.where, rows=self._rows)
            if not chosen.any():
                raise UsageError(f"no row of {shards.directory} is selected")
            entries = _entries(shards, chosen, moved)
            splits[split] = Images(self, split, entries)
            text = f"{len(entries):,} of {len(shards):,} rows, {shards.manifest.format}"
            understood[split or "dataset"] = text
        understood |= {
            name: str(field) for name, field in fields.items() if name not in (IMAGE, LABEL)
        }
        return Scan(
            source=self,
            splits=splits,
            classes=None if own_classes is None else tuple(class_names),
            fields=fields,
            understood=understood,
            records=True,
            raw_shape=first.manifest.raw_shape,
            whole=self._options.rows is not True,
            originals=self._originals(),
            exact_sizes=fields.keys() <= {IMAGE, LABEL},
        )

    def _originals(self) -> dict[str, Original]:
        """Return how each split was made, if all its rows are chosen."""
        if self._options != DatasetSourceOptions():
            return {}
        return {
            split: _original(shards)
            for split, shards in self._sets.items()
            if shards.manifest.archives is None
        }

    def column(self, entries: Sequence[Entry], name: str) -> Sequence[Any]:
        """Return a value of each entry of a dataset without splits: None where it is missing."""
        values = column_values(self._sets[""], name)
        return [values[entry.place] for entry in entries]

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the name and the content digest of the dataset, and how rows were selected."""
        return {
            "name": as_text(self._folder.resolve().name),
            "content_digest": self._sets[split].manifest.content_digest,
            **self._options.describe(),
        }

    def read(self, split: str, entry: Entry) -> Record:
        """Return a record, after comparing it with the index.

        Raises BadImage if either is damaged, or the dataset was replaced.
        """
        try:
            record = record_of(self._sets[split], entry.place)
        except (KeyError, IndexError) as error:  # the dataset is another one now
            raise BadImage("it changed since the scan") from error
        except CorruptDataset as error:
            raise BadImage(error.problem, remedy=error.remedy) from error
        if record.key != entry.key or record.meta["path"] != entry.path:
            raise BadImage("it changed since the scan")
        return labeled(record, entry.label)

    def read_together(self, split: str, entries: Sequence[Entry]) -> ReadTogether:
        """Return records of shards; neighbors are compared with the index at once."""
        return intact_records(self._sets[split], as_packed(entries))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the dataset and the row of a record."""
        return f"{self._sets[split].directory}, row {entry.place}"


def _original(shards: ShardSet) -> Original:
    """Return the conversion of a dataset, as its manifest describes it."""
    manifest = shards.manifest
    base = shards.manifest.base
    dataset = shards.dataset
    changed = dataset.later | (base.fields_by_name.keys() - shards.schema.keys())
    digest = converted_digest(manifest) if changed or CHANGED in base.source else ""
    storage = get_format(manifest.format)
    parts = [
        OriginalPart(
            rows=part.manifest.rows,
            source=with_changed(part.manifest.source, changed, digest),
            software={
                name: version
                for name, version in part.manifest.software.items()
                if name not in storage.libraries
            },
            skipped=part.manifest.skipped,
        )
        for part in dataset.parts
    ]
    source = with_changed(base.source, changed, digest)
    return Original(manifest.content_digest, source, base.recipe, parts, dataset.ignored)


def _form(shards: ShardSet) -> tuple[Any, ...]:
    """Return the properties that all splits must share."""
    manifest = shards.manifest
    return manifest.classes, describe_schema(shards.schema), manifest.raw_shape


def _entries(shards: ShardSet, chosen: Mask, labels: Sequence[int]) -> Sequence[Entry]:
    """Return the entry of each chosen row. Large datasets read entries from the index on access."""
    old_labels = shards.labels.astype(np.int32)
    new_labels = np.array([*labels, NO_LABEL])  # the last one, -1, is that of no label
    fields = (IMAGE, *apart_of(shards.schema))
    starts = range(0, len(shards), _AT_ONCE)

    def load(chunk: int) -> PackedEntries:
        start = starts[chunk]
        rows = np.arange(start, min(start + _AT_ONCE, len(shards)))
        entries = [shards.entries_of(name).read(rows) for name in fields]
        sizes = sum(index["length"].astype(np.int64) for index in entries)
        stamps = np.bitwise_xor.reduce([index["checksum"] for index in entries])
        texts = (shards.paths[start : rows[-1] + 1], shards.keys[start : rows[-1] + 1])
        moved = new_labels[old_labels[rows]]
        return PackedEntries.of_columns(*texts, moved, sizes, stamps, rows).take(
            np.flatnonzero(chosen[rows])
        )

    if len(shards) <= _MANY:
        return PackedEntries.joined(map(load, range(len(starts))))
    counts = (int(chosen[start : start + _AT_ONCE].sum()) for start in starts)
    return StoredEntries(load, [0, *accumulate(counts)])


def _recognize(seen: Overview) -> Iterator[Recognition]:
    if any(seen.has(f"{folder}/{DATASET_FILE}") for folder in (".", *seen.folders())):
        yield Recognition(DATASET_FILE)


SOURCE = SourceKind(
    name=DatasetSource.kind,
    title="Copy, select or re-encode a shardkit dataset.",
    help="""Convert a shardkit dataset to another one in DST: in another format, with another
    shard size, as a subset, or with re-encoded images.

    SRC is the dataset, or a directory of splits. Without image options, records are stored
    unchanged and in order, so DST has the same content digest as SRC. Each record is compared with
    its checksums; a damaged record counts as a bad file.

    \b
    Examples:
      shardkit convert dataset photos photos-tar --to webdataset
      shardkit convert dataset photos pets --to lmdb --where 'label in ("cat", "dog")'
      shardkit convert dataset photos small --to hdf5 --resize 224x224 --encode raw
    """,
    options=DatasetSourceOptions,
    recognize=_recognize,
    source=DatasetSource,
)
