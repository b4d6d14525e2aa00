"""Compare two datasets by key and content (`shardkit diff`), from their indexes alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.conversion.build import repeated_keys
from shardkit.dataset.index import HEAD, Rows, StringTable, require_counts
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import CorruptDataset, UsageError
from shardkit.kinds.field import apart_of, columns_of
from shardkit.record import IMAGE, LABEL, NO_LABEL
from shardkit.system.text import name_list
from shardkit.system.text_hashes import TextHashes

PATH = "path"
"""Stands for the source path among the fields of a record."""

_HEADS = ("length", "width", "height", "field")
"""Entries of the index about an image, but its checksum and its label."""

_COMPARED_ROWS = 4096
"""Records whose entries in the indexes are compared at a time."""

_SPAN = 8
"""Maximum texts read per requested text before they are read one by one."""

_ZEROS = bytes(1 << 20)

_Sets = tuple[ShardSet, ShardSet]


@dataclass(frozen=True, kw_only=True)
class ChangedRecord:
    """A record that both datasets have, with different content."""

    key: str
    fields: tuple[str, ...]
    """Names of the fields that differ; ``path`` is the source path."""


@dataclass(kw_only=True)
class DatasetDifference:
    """The differences of two datasets, or of two splits of the same name."""

    rows: tuple[int, int]
    """Number of rows of both; 0 where a split is missing."""
    added: list[str] = field(default_factory=list)
    """Keys that only the second dataset has, in its order."""
    removed: list[str] = field(default_factory=list)
    """Keys that only the first dataset has, in its order."""
    changed: list[ChangedRecord] = field(default_factory=list)
    """Records that differ, in the order of the first dataset."""
    described: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Different descriptions: ``classes``, ``split``, or the description of a field,
    by name; None where a dataset lacks it."""
    reordered: bool = False
    """Whether the common records are in a different order, which is not a difference."""

    @property
    def equal(self) -> bool:
        """Whether both datasets have the same fields, classes and records, in any order."""
        return not (self.added or self.removed or self.changed or self.described)


@dataclass(kw_only=True)
class Differences:
    """The result of `diff`."""

    splits: dict[str, DatasetDifference]
    """The differences by split; "" without splits."""

    @property
    def equal(self) -> bool:
        """Whether all splits are equal."""
        return all(split.equal for split in self.splits.values())


def diff(first: str | Path, second: str | Path) -> Differences:
    """Compare two datasets of any formats by key, or their splits of the same name.

    Images, masks, arrays and bytes are compared by length, size and CRC-32, other fields by value,
    all from the index. So no record is read, and damage to a shard is not found: run ``verify``.
    Labels are compared by the names of their classes.

    Args:
        first: A dataset.
        second: Another one.

    Raises:
        UsageError: If one is not a dataset, or only one of them has splits.
        CorruptDataset: If a manifest or an index is damaged.
    """
    first_splits, second_splits = (OpenedDirectory(path).splits for path in (first, second))
    if ("" in first_splits) != ("" in second_splits):
        path, splits = (first, first_splits) if "" in second_splits else (second, second_splits)
        raise UsageError(
            f"{path} contains splits ({name_list(splits)}), and the other dataset does not",
            remedy=f"pass one of them, such as {Path(path) / next(iter(splits))}",
        )
    return Differences(
        splits={
            name: _compare(name, first_splits.get(name), second_splits.get(name))
            for name in dict.fromkeys([*first_splits, *second_splits])
        }
    )


def _compare(
    name: str, first: OpenedDataset | None, second: OpenedDataset | None
) -> DatasetDifference:
    if first is None or second is None:
        only = first or second
        assert only is not None
        keys = list(ShardSet(only, verify=True).keys)
        if first is None:
            return DatasetDifference(
                rows=(0, len(keys)), added=keys, described={"split": (None, name)}
            )
        return DatasetDifference(
            rows=(len(keys), 0), removed=keys, described={"split": (name, None)}
        )
    return _differences((ShardSet(first, verify=True), ShardSet(second, verify=True)))


def _differences(sets: _Sets) -> DatasetDifference:
    first, second = sets
    for shards in sets:
        labels = (entries["label"] for entries in shards.index.complete().entries())
        require_counts(labels, shards.manifest.class_counts)
    hashes = TextHashes()
    for shards in sets:
        hashes.add_all(shards.keys)
    lone = hashes.single()
    in_step = not any(repeated_keys(shards.keys) for shards in sets) and all(
        key == twin for (_, key), (_, twin) in zip_longest(*_shared(sets, lone), fillvalue=(0, ""))
    )
    pairs: Iterable[tuple[int, int]]
    if in_step:
        pairs = ((row, twin) for (row, _), (twin, _) in zip(*_shared(sets, lone), strict=True))
        added, removed = (
            [key for key in shards.keys if hash(key) in lone] for shards in (second, first)
        )
        reordered = False
    else:  # only then all keys are in memory
        first_rows = _rows_by_key(first)
        second_rows = _rows_by_key(second)
        pairs = [(row, second_rows[key]) for key, row in first_rows.items() if key in second_rows]
        added = [key for key in second_rows if key not in first_rows]
        removed = [key for key in first_rows if key not in second_rows]
        reordered = any(twin < before for (_, before), (_, twin) in pairwise(pairs))
    changed = list[ChangedRecord]()
    pairs = iter(pairs)
    while batch := list(islice(pairs, _COMPARED_ROWS)):
        rows = np.array(batch, np.int64).T
        changed += _Comparison(sets, (rows[0], rows[1])).changed()
    return DatasetDifference(
        rows=(len(first), len(second)),
        added=added,
        removed=removed,
        changed=changed,
        described=_descriptions(sets),
        reordered=reordered,
    )


def _shared(sets: _Sets, lone: Set[int]) -> Iterator[Iterator[tuple[int, str]]]:
    """Yield, for each dataset, the rows and keys without those whose hash occurs once."""
    for shards in sets:
        yield ((row, key) for row, key in enumerate(shards.keys) if hash(key) not in lone)


def _descriptions(sets: _Sets) -> dict[str, tuple[Any, Any]]:
    """Compare classes and schema."""
    first, second = (shards.manifest for shards in sets)
    descriptions: dict[str, tuple[Any, Any]] = {"classes": (first.classes, second.classes)}
    schemas = [
        {name: None if name == LABEL else str(field) for name, field in shards.schema.items()}
        for shards in sets
    ]
    for name in dict.fromkeys([*schemas[0], *schemas[1]]):
        descriptions[name] = (schemas[0].get(name), schemas[1].get(name))
    for name, pair in _class_lists(sets).items():
        descriptions[f"classes of {name}"] = pair
    return {name: pair for name, pair in descriptions.items() if pair[0] != pair[1]}


class _Comparison:
    """The comparison of some records that both datasets have, given their rows in both."""

    def __init__(
        self, sets: _Sets, rows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    ) -> None:
        self._sets = sets
        self._rows = rows
        self._changed: dict[int, list[str]] = {}
        """The fields that differ, by position among the records."""

    def changed(self) -> list[ChangedRecord]:
        """Return the records that differ, in order."""
        first, second = self._sets
        schema = {name: field for name, field in first.schema.items() if name in second.schema}
        if IMAGE in schema or LABEL in schema:
            self._labels()
        for name in (IMAGE, *apart_of(schema)):
            if name in schema and first.schema[name].kind == second.schema[name].kind:
                self._apart(name)
        for name, column in columns_of(schema).items():
            if (column.kind, column.dtype) == (second.schema[name].kind, second.schema[name].dtype):
                self._column(name)
        self._paths()
        return [
            ChangedRecord(key=first.keys[int(self._rows[0][position])], fields=tuple(fields))
            for position, fields in sorted(self._changed.items())
        ]

    def _blame(self, positions: Sequence[int] | npt.NDArray[Any], name: str) -> None:
        for position in np.asarray(positions).tolist():
            self._changed.setdefault(position, []).append(name)

    def _labels(self) -> None:
        first_labels, second_labels = (
            shards.entries.read(rows)["label"]
            for shards, rows in zip(self._sets, self._rows, strict=True)
        )
        first, second = (shards.manifest.classes or () for shards in self._sets)
        number = {name: label for label, name in enumerate(first)}
        for name in second:
            number.setdefault(name, len(number))
        # The last element is for `NO_LABEL`, which is -1.
        as_first = np.array([*(number[name] for name in second), NO_LABEL], np.int64)
        self._blame(np.flatnonzero(first_labels != as_first[second_labels]), LABEL)

    def _apart(self, name: str) -> None:
        """Compare a field with bytes of its own."""
        first, second = (
            shards.entries_of(name).read(rows)
            for shards, rows in zip(self._sets, self._rows, strict=True)
        )
        equal = np.ones(len(first), np.bool_)
        for column in _HEADS:
            equal &= first[column] == second[column]
        labels_differ = equal & (first["label"] != second["label"])
        equal &= (first["checksum"] == second["checksum"]) | labels_differ
        for position in np.flatnonzero(labels_differ).tolist():
            equal[position] = _same_content(
                first[position : position + 1], second[position : position + 1]
            )
        self._blame(np.flatnonzero(~equal), name)

    def _column(self, name: str) -> None:
        first, second = (
            shards.values(name, rows) for shards, rows in zip(self._sets, self._rows, strict=True)
        )
        count = len(self._rows[0])
        self._blame([row for row in range(count) if first.packed(row) != second.packed(row)], name)

    def _paths(self) -> None:
        first, second = (
            _texts(shards.paths, rows) for shards, rows in zip(self._sets, self._rows, strict=True)
        )
        self._blame(
            [row for row, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]],
            PATH,
        )


def _texts(table: StringTable, rows: npt.NDArray[np.int64]) -> list[str]:
    """Return the texts of some rows, read at once if they are near each other."""
    first = int(rows.min())
    last = int(rows.max())
    if last - first < _SPAN * len(rows):
        near = table[first : last + 1]
        return [near[row - first] for row in rows.tolist()]
    return [table[row] for row in rows.tolist()]


def _rows_by_key(shards: ShardSet) -> dict[str, int]:
    rows = {key: row for row, key in enumerate(shards.keys)}
    if len(rows) != len(shards):
        raise CorruptDataset(
            f"{shards.directory / MANIFEST_NAME} describes {len(shards)} rows, but only "
            f"{len(rows)} different keys: records with the same key cannot be compared"
        )
    return rows


def _class_lists(sets: _Sets) -> Mapping[str, tuple[Any, Any]]:
    """Return the class names of fields other than the label, where both datasets have the field."""
    first, second = (shards.schema for shards in sets)
    return {
        name: (field.classes, second[name].classes)
        for name, field in first.items()
        if name != LABEL and name in second
    }


def _same_content(first: Rows, second: Rows) -> bool:
    """Return whether two images of equal length have the same CRC-32, under different labels.

    The checksum covers the head, with the label, and then the image. For images of one length,
    the head contributes the CRC-32 of itself and as many zeros to the checksum.
    """
    heads = [zlib.crc32(row.tobytes()[HEAD]) for row in (first, second)]
    remaining = int(first["length"][0])
    while remaining:
        zeros = memoryview(_ZEROS)[:remaining]
        heads = [zlib.crc32(zeros, head) for head in heads]
        remaining -= len(zeros)
    return heads[0] ^ heads[1] == int(first["checksum"][0]) ^ int(second["checksum"][0])
