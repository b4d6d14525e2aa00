"""Compare two datasets by key and content (`shardkit diff`), from their indexes alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.columns import columns_of
from shardkit.dataset.index import HEAD, Rows, apart_of
from shardkit.dataset.index_reader import IndexReader
from shardkit.dataset.manifest import MANIFEST_NAME, dataset_directories
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import CorruptDataset, UsageError
from shardkit.record import ABSENT, IMAGE, LABEL, NO_LABEL, STORED_KINDS

PATH = "path"
"""Stands for the source path among the fields of a record."""

_HEADS = ("length", "width", "height", "field")
"""What the index states about an image in addition to its checksum and its label."""

_READ_ROWS = 64
"""Records read at a time to compare their bytes."""

_ABSENT_CODE = STORED_KINDS.index(ABSENT)
_ZEROS = bytes(1 << 20)


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
    """What both datasets state differently: ``classes``, ``split``, or the description of a field,
    by name; None where a dataset lacks it."""
    reordered: bool = False
    """Whether the records that both have are in another order, which is not a difference."""

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


def diff(first: str | Path, second: str | Path, *, read_bytes: bool = False) -> Differences:
    """Compare two datasets by key, in any formats, or each split with that of the same name.

    Images, masks, arrays and bytes are compared by length, size and CRC-32, other fields by value,
    all from the index. So no record is read, and damage to a shard is not found: run ``verify``.
    Labels are compared by the names of their classes.

    Args:
        first: A dataset.
        second: Another one.
        read_bytes: Whether to read and compare the bytes of images, masks, arrays and bytes.

    Raises:
        UsageError: If one is no dataset, or only one of them has splits.
        CorruptDataset: If a manifest or an index is damaged, or, with ``read_bytes``, a record.
    """
    one, other = (dataset_directories(Path(path)) for path in (first, second))
    if ("" in one) != ("" in other):
        path, splits = (first, one) if "" in other else (second, other)
        raise UsageError(
            f"{path} contains splits ({', '.join(splits)}), and the other dataset does not: name "
            f"one of them, such as {Path(path) / next(iter(splits))}"
        )
    return Differences(
        splits={
            name: _compare(name, one.get(name), other.get(name), read_bytes=read_bytes)
            for name in dict.fromkeys([*one, *other])
        }
    )


def _compare(
    name: str, first: Path | None, second: Path | None, *, read_bytes: bool
) -> DatasetDifference:
    if first is None or second is None:
        place = first or second
        assert place is not None
        keys = list(ShardSet(place, verify=True).keys)
        if first is None:
            return DatasetDifference(
                rows=(0, len(keys)), added=keys, described={"split": (None, name)}
            )
        return DatasetDifference(
            rows=(len(keys), 0), removed=keys, described={"split": (name, None)}
        )
    return _Comparison(ShardSet(first, verify=True), ShardSet(second, verify=True)).run(read_bytes)


class _Comparison:
    """The comparison of two datasets."""

    def __init__(self, first: ShardSet, second: ShardSet) -> None:
        self._sets = first, second
        one, other = _rows_by_key(first), _rows_by_key(second)
        self._common = [key for key in one if key in other]
        self._rows = tuple(
            np.array([rows[key] for key in self._common], np.int64) for rows in (one, other)
        )
        """The rows of the common records in both datasets."""
        self._changed: dict[int, list[str]] = {}
        """The fields that differ, by position among the common records."""
        self._result = DatasetDifference(
            rows=(len(first), len(second)),
            added=[key for key in other if key not in one],
            removed=[key for key in one if key not in other],
            reordered=bool((np.diff(self._rows[1]) < 0).any()),
        )

    def run(self, read_bytes: bool) -> DatasetDifference:
        first, second = self._sets
        schema = {name: known for name, known in first.schema.items() if name in second.schema}
        self._describe()
        if IMAGE in schema or LABEL in schema:
            self._labels()
        for name in (IMAGE, *apart_of(schema)):
            if name in schema and first.schema[name].kind == second.schema[name].kind:
                self._apart(name, read_bytes)
        for name, known in columns_of(schema).items():
            if (known.kind, known.dtype) == (second.schema[name].kind, second.schema[name].dtype):
                self._column(name)
        self._texts()
        self._result.changed = [
            ChangedRecord(key=self._common[place], fields=tuple(fields))
            for place, fields in sorted(self._changed.items())
        ]
        return self._result

    def _blame(self, places: Sequence[int] | npt.NDArray[Any], name: str) -> None:
        for place in np.asarray(places).tolist():
            self._changed.setdefault(place, []).append(name)

    def _describe(self) -> None:
        """Compare classes and schema."""
        first, second = (shards.manifest for shards in self._sets)
        found: dict[str, tuple[Any, Any]] = {"classes": (first.classes, second.classes)}
        schemas = [
            {name: None if name == LABEL else str(known) for name, known in shards.schema.items()}
            for shards in self._sets
        ]
        for name in dict.fromkeys([*schemas[0], *schemas[1]]):
            found[name] = tuple(schema.get(name) for schema in schemas)  # type: ignore[assignment]
        for name, pair in _class_lists(self._sets).items():
            found[f"classes of {name}"] = pair
        self._result.described = {name: pair for name, pair in found.items() if pair[0] != pair[1]}

    def _labels(self) -> None:
        one, other = (
            shards.labels[rows] for shards, rows in zip(self._sets, self._rows, strict=True)
        )
        first, second = (shards.manifest.classes or () for shards in self._sets)
        number = {name: label for label, name in enumerate(first)}
        for name in second:
            number.setdefault(name, len(number))
        # The last element is for `NO_LABEL`, which is -1.
        as_first = np.array([*(number[name] for name in second), NO_LABEL], np.int64)
        self._blame(np.flatnonzero(one != as_first[other]), LABEL)

    def _apart(self, name: str, read_bytes: bool) -> None:
        """Compare a field with bytes of its own."""
        one, other = (
            shards.entries_of(name).read(rows)
            for shards, rows in zip(self._sets, self._rows, strict=True)
        )
        same = np.ones(len(one), np.bool_)
        for part in _HEADS:
            same &= one[part] == other[part]
        labels_differ = same & (one["label"] != other["label"])
        same &= (one["checksum"] == other["checksum"]) | labels_differ
        for place in np.flatnonzero(labels_differ).tolist():
            same[place] = _same_content(one[place : place + 1], other[place : place + 1])
        if read_bytes:
            there = np.flatnonzero(same & (one["field"] != _ABSENT_CODE))
            same[list(self._unlike(name, there))] = False
        self._blame(np.flatnonzero(~same), name)

    def _unlike(self, name: str, places: npt.NDArray[np.int64]) -> Iterator[int]:
        """Yield the places whose bytes differ; each read compares the checksum."""
        for start in range(0, len(places), _READ_ROWS):
            some = places[start : start + _READ_ROWS]
            found = [
                shards.find(rows[some], name)
                for shards, rows in zip(self._sets, self._rows, strict=True)
            ]
            buffers = [memoryview(bytearray(max(each.lengths, default=0))) for each in found]
            for number, place in enumerate(some.tolist()):
                one, other = (
                    each.read(number, buffer).data
                    for each, buffer in zip(found, buffers, strict=True)
                )
                if one != other:
                    yield place

    def _column(self, name: str) -> None:
        one, other = (
            IndexReader(shards.directory, shards.manifest, verify=True)
            .column(name, shards.schema[name], lacking=name in shards.manifest.lacking)
            .whole()
            for shards in self._sets
        )
        pairs = zip(*(rows.tolist() for rows in self._rows), strict=True)
        self._blame(
            [
                place
                for place, (row, twin) in enumerate(pairs)
                if one.packed(row) != other.packed(twin)
            ],
            name,
        )

    def _texts(self) -> None:
        one, other = (list(shards.paths) for shards in self._sets)
        pairs = zip(*(rows.tolist() for rows in self._rows), strict=True)
        self._blame(
            [place for place, (row, twin) in enumerate(pairs) if one[row] != other[twin]], PATH
        )


def _rows_by_key(shards: ShardSet) -> dict[str, int]:
    rows = {key: row for row, key in enumerate(shards.keys)}
    if len(rows) != len(shards):
        raise CorruptDataset(
            f"{shards.directory / MANIFEST_NAME} describes {len(shards)} rows, but only "
            f"{len(rows)} different keys: records of one key cannot be compared"
        )
    return rows


def _class_lists(sets: Sequence[ShardSet]) -> Mapping[str, tuple[Any, Any]]:
    """Return the class names of fields other than the label, where both datasets have the field."""
    first, second = (shards.schema for shards in sets)
    return {
        name: (known.classes, second[name].classes)
        for name, known in first.items()
        if name != LABEL and name in second
    }


def _same_content(one: Rows, other: Rows) -> bool:
    """Return whether two images of equal length have the same CRC-32, under different labels.

    The checksum covers the head, with the label, and then the image. For images of one length,
    the head's part in the checksum is that of its CRC-32 followed by as many zeros.
    """
    heads = [zlib.crc32(row.tobytes()[HEAD]) for row in (one, other)]
    left = int(one["length"][0])
    while left:
        piece = memoryview(_ZEROS)[:left]
        heads = [zlib.crc32(piece, head) for head in heads]
        left -= len(piece)
    return heads[0] ^ heads[1] == int(one["checksum"][0]) ^ int(other["checksum"][0])
