"""Values of new fields from a table, matched with the rows of a dataset by key or path."""

from __future__ import annotations

import copy
import json
import mmap
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.changes.field_values import FieldValues, checked
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.record import LABEL
from shardkit.sources.kept import Kept, parse_keep
from shardkit.sources.labels import LabelValues, label_of
from shardkit.sources.table import cell, kind_of_cells, kinds_in, typed
from shardkit.sources.table_rows import SUFFIXES, columns_of, is_text, rows_of
from shardkit.system.temporary import TemporaryFolder
from shardkit.system.text import quoted

_AT_ONCE = 4096
"""Rows of a table to match at a time."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))

_NAMED = 5
"""Keys that a message names; it counts all."""

_NONE = -1
"""The offset of a row without a value."""


class Matched(NamedTuple):
    """How the rows of a table fit those of a dataset."""

    rows: int
    """Number of rows of the table."""
    unknown: Sequence[str]
    """Keys that no row of the dataset has; the first ones."""
    unknown_count: int
    missing: Sequence[str]
    """Keys of rows of the dataset that the table lacks; the first ones."""
    missing_count: int


class TableValues(FieldValues):
    """The values of columns of a table, matched with the rows of a dataset by key or path.

    The file is CSV, TSV, JSONL or Parquet; its rows may be in any of the datasets. ``key`` is the
    column of keys or paths; with splits, these may start with the split and a slash. ``fields`` are
    ``[NAME=]COLUMN[:KIND][?]``, as for ``--keep``. ``keep_classes`` keeps classes of the dataset
    that none of the labels has.

    UsageError if the table lacks a column, names a row twice, or has a bad value.
    """

    def __init__(
        self,
        path: Path,
        datasets: Sequence[OpenedDataset],
        key: str | None,
        fields: Sequence[str],
        *,
        keep_classes: bool = False,
    ) -> None:
        self.path = str(path)
        self._folder = TemporaryFolder()
        self._spool = _Ranges(str(self._folder.path / "values"))
        self._kept = parse_keep(",".join(fields), "field", labels=True)
        self._text = is_text(self.path)
        columns = columns_of(self.path)
        self._key = key or next((name for name in ("key", "path") if name in columns), None)
        if self._key is None:
            raise UsageError(
                f"{path}",
                remedy=f"choose the key column with {setting('key')} from {_list(columns)}",
            )
        for name in (self._key, *(kept.source for kept in self._kept)):
            if name not in columns:
                raise UsageError(f"{path} has no column {quoted(name)}; it has {_list(columns)}")
        if not self._kept:
            raise UsageError(
                f"{path}",
                remedy=f"choose columns with {setting('field', 'COLUMN')}, or NAME=COLUMN, from "
                f"{_list(columns)}",
            )
        used = {self._key, *(kept.source for kept in self._kept)}
        self._used = [name for name in columns if name in used]
        count = sum(dataset.manifest.rows for dataset in datasets)
        self._offsets: Any = np.full(count, _NONE, np.int64)
        self._sizes: Any = np.zeros(count, np.int32)
        self._stamps: Any = np.zeros(count, np.uint32)
        self._labels = LabelValues()
        self._kinds: dict[str, set[str]] = {kept.name: set() for kept in self._kept}
        self._arrays: dict[str, set[Field]] = {kept.name: set() for kept in self._kept}
        self.matched = self._match(datasets)
        self._numbers: Sequence[int] = ()
        self.schema = self._complete(datasets[0].manifest.classes or (), keep_classes)

    def read(self, row: int) -> Mapping[str, Any]:
        """Return the values of a row, by field; nothing if the table lacks it."""
        return self.read_together([row])[0]

    def read_together(self, rows: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        """Return the values of rows; parsing them together takes a third of the time."""
        listed = [row for row in rows if self._offsets[row] != _NONE]
        texts = (self._spool.read(int(self._offsets[row]), int(self._sizes[row])) for row in listed)
        stored = dict(zip(listed, json.loads(b"[%b]" % b",".join(texts)), strict=True))
        return [self._found(stored[row]) if row in stored else {} for row in rows]

    def _found(self, stored: Sequence[Any]) -> Mapping[str, Any]:
        """Return the values of a row that has some, by field."""
        found = {}
        for kept, value in zip(self._kept, stored, strict=True):
            if value is None:
                continue
            field = self.schema[kept.name]
            if kept.name == LABEL:
                found[LABEL] = self._numbers[value]
            elif isinstance(value, str) and self._text and kept.pointer is None:
                found[kept.name] = typed(kept.kind or field.dtype or field.kind, value, kept.source)
            else:
                found[kept.name] = value
            if field.is_uniform:  # a list of integers may be one of floats
                found[kept.name] = np.asarray(found[kept.name], field.dtype)
        return found

    def only(self, rows: Sequence[int]) -> FieldValues:
        """Return the values of some rows; this object must outlive it."""
        narrowed = copy.copy(self)
        del narrowed._folder  # the file is removed with the last reference to it
        narrowed._stamps = None
        narrowed._offsets = {row: int(self._offsets[row]) for row in rows}
        narrowed._sizes = {row: int(self._sizes[row]) for row in rows}
        return narrowed

    def sizes(self, rows: range) -> Sequence[int]:
        """Return the bytes of the values of rows as JSON."""
        sizes: list[int] = self._sizes[rows.start : rows.stop].tolist()
        return sizes

    def stamps(self, rows: range) -> Sequence[int]:
        """Return the CRC-32 of the values of rows."""
        stamps: list[int] = self._stamps[rows.start : rows.stop].tolist()
        return stamps

    def describe(self) -> dict[str, Any]:
        """Return the name of the table, the column of keys, and the fields."""
        fields = ",".join(str(kept) for kept in self._kept)
        return {"name": Path(self.path).name, "key": self._key, "fields": fields}

    def _match(self, datasets: Sequence[OpenedDataset]) -> Matched:
        """Write the values to a file, with the position of those of each row."""
        finder = _RowFinder(datasets)
        unknown: list[str] = []
        unknown_count = rows = 0
        end = 0
        with open(self._spool.path, "xb") as file:
            for batch in _batches(rows_of(self.path, self._used)):
                rows += len(batch)
                keys = [self._key_of(line, row) for line, row in batch]
                for (line, row), key, found in zip(batch, keys, finder.find(keys), strict=True):
                    if found == _AMBIGUOUS:
                        raise UsageError(
                            f"{self.path}:{line}: {quoted(key)} matches rows of several splits",
                            remedy="add the split and a slash before it",
                        )
                    if found < 0:
                        unknown_count += 1
                        unknown += [key] * (len(unknown) < _NAMED)
                        continue
                    if self._offsets[found] != _NONE:
                        raise UsageError(
                            f"{self.path}:{line}: {quoted(key)} is in the table twice, or by "
                            "key and by path",
                            remedy="keep one of the rows",
                        )
                    data = self._values_of(line, row)
                    self._offsets[found] = end
                    self._sizes[found] = len(data)
                    end += len(data)
                    self._stamps[found] = zlib.crc32(data)
                    file.write(data)
        lacking = np.flatnonzero(self._offsets == _NONE)
        missing = [finder.name(row) for row in lacking[:_NAMED].tolist()]
        return Matched(rows, unknown, unknown_count, missing, len(lacking))

    def _key_of(self, line: int, row: Mapping[str, Any] | str) -> str:
        assert self._key is not None
        if isinstance(row, str):
            raise UsageError(f"{self.path}:{line}: {row}")
        key = row.get(self._key)
        if not isinstance(key, str) or not key:
            raise UsageError(f"{self.path}:{line}: its {self._key} is {quoted(key)}, not text")
        return key

    def _values_of(self, line: int, row: Mapping[str, Any] | str) -> bytes:
        """Return the values of a row as JSON; note the kinds and labels that there are."""
        assert isinstance(row, Mapping)
        found: list[Any] = []
        try:
            for kept in self._kept:
                value = cell(row, kept, self._text)
                if value is None or (value == "" and kept.kind not in (None, "text")):
                    if not kept.optional:
                        raise BadImage(
                            f"it has no {kept.source}; to allow this, write {kept.source}?"
                        )
                    value = None
                elif kept.name == LABEL:
                    value = self._labels.code(label_of(value, kept.source))
                elif kept.kind is None:
                    self._kinds[kept.name] |= kinds_in(value, self._text and kept.pointer is None)
                else:
                    parsed = value
                    if self._text and kept.pointer is None:
                        parsed = typed(kept.kind, value, kept.source)
                    if kept.kind == "array":
                        self._arrays[kept.name].add(_array_field(parsed))
                found.append(value)
        except BadImage as error:
            raise UsageError(f"{self.path}:{line}: {error.problem}", remedy=error.remedy) from error
        return _ENCODER.encode(found).encode()

    def _complete(self, classes: Sequence[str], keep_classes: bool) -> dict[str, Field]:
        """Return the fields, now that all values are known."""
        schema = {}
        for kept in self._kept:
            if kept.name == LABEL:
                schema[LABEL], self._numbers = _numbered(self._labels, classes, keep_classes)
            elif kept.kind == "array":
                schema[kept.name] = _common_field(self._arrays[kept.name])
            else:
                schema[kept.name] = _kept_field(kept, self._kinds[kept.name])
        return checked(schema)


class _Ranges:
    """Ranges of a file, which is opened on first use. Pickled, it is the path."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._content: mmap.mmap | None = None

    def read(self, offset: int, size: int) -> bytes:
        if self._content is None:
            with open(self.path, "rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._content[offset : offset + size]

    def __reduce__(self) -> tuple[type[_Ranges], tuple[str]]:
        return _Ranges, (self.path,)


def _kept_field(kept: Kept, kinds: set[str]) -> Field:
    field = kept.field(kind_of_cells(kinds))
    if field.type.is_picture:
        raise UsageError(
            f"{setting('field', str(kept))}: images cannot be added to a dataset",
            remedy="convert again",
        )
    return field


def _array_field(value: Any) -> Field:
    """Return the field of a list of numbers, or of lists of one length; of others, any array."""
    try:
        values = np.asarray(value)
        if values.ndim and values.dtype.kind in "biuf":
            return Field("array", values.dtype, values.shape)
    except ValueError:  # the lengths differ, or are 0
        pass
    return Field("array")


def _common_field(arrays: Set[Field]) -> Field:
    """Return the field of all arrays of a column: of one shape, if they have the same."""
    shapes = {array.shape for array in arrays}
    if None in shapes or len(shapes) != 1:
        return Field("array")
    return Field("array", np.result_type(*(array.values for array in arrays)), shapes.pop())


def _numbered(
    labels: LabelValues, classes: Sequence[str], keep_classes: bool
) -> tuple[Field, Sequence[int]]:
    """Return the field of labels, with new classes after the old ones, and their numbers."""
    texts = set(labels.texts())
    names = None
    are_numbers = all(text.isdecimal() for text in texts)  # positions of classes
    if classes and are_numbers and not texts <= set(classes):
        names = classes
    if not (keep_classes or are_numbers):
        classes = [name for name in classes if name in texts]
    assigned = labels.assign(classes or None, names)
    if assigned.classes is None:
        raise UsageError("there are no labels")
    return Field("label", classes=assigned.classes), assigned.labels


_AMBIGUOUS = -2


class _RowFinder:
    """Finds rows of all splits by key or path, in 48 bytes of memory for each, or 96 of several.

    Texts are equal if two hashes of 64 bits are, which Python keys with a secret of the process.
    """

    def __init__(self, datasets: Sequence[OpenedDataset]) -> None:
        self._datasets = datasets
        hashes = array("q")
        others = array("q")
        rows = []
        start = 0
        for dataset in datasets:
            index = dataset.index
            prefixes = {"", dataset.prefix}
            for prefix in sorted(prefixes):
                for texts in (index.keys(), index.paths()):
                    for text in texts:
                        hashes.append(hash(prefix + text))
                        others.append(hash(prefix + text + _SALT))
                    rows.append(np.arange(start, start + len(texts)))
            start += dataset.manifest.rows
        numbers = np.concatenate(rows)
        values = np.frombuffer(hashes, np.int64)
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._numbers = numbers[order]
        self._others = np.frombuffer(others, np.int64)[order]

    def find(self, keys: Sequence[str]) -> list[int]:
        """Return the row of each key or path: -1 for none, `_AMBIGUOUS` for several."""
        wanted, others = (
            np.array([hash(key + salt) for key in keys], np.int64) for salt in ("", _SALT)
        )
        first = self._values.searchsorted(wanted)
        last = self._values.searchsorted(wanted, side="right")
        found = np.full(len(keys), _NONE)
        for nth in range(int((last - first).max(initial=0))):
            keyed = np.flatnonzero(first + nth < last)
            at = first[keyed] + nth
            alike = self._others[at] == others[keyed]
            keyed, rows = keyed[alike], self._numbers[at[alike]]
            is_one = (found[keyed] == _NONE) | (found[keyed] == rows)
            found[keyed] = np.where(is_one, rows, _AMBIGUOUS)
        result: list[int] = found.tolist()
        return result

    def name(self, row: int) -> str:
        """Return the path of a row, after its split."""
        for dataset in self._datasets:
            if row < dataset.manifest.rows:
                return dataset.prefix + dataset.index.paths()[row]
            row -= dataset.manifest.rows
        raise IndexError(row)


_SALT = "\0"
"""Appended to a text for its second hash."""


def _batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    yield batch


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def is_table(path: Path) -> bool:
    """Return whether a file is a table, by its suffix."""
    return path.name.endswith(SUFFIXES)
