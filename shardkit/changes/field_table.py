"""Values of new fields from a table, matched with the rows of a dataset by key or path."""

from __future__ import annotations

import contextlib
import copy
import json
import mmap
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from shardkit.changes.field_values import FieldValues, as_json, checked
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.record import LABEL
from shardkit.sources.kept import Kept, parse_keep
from shardkit.sources.labels import LabelValues, label_of
from shardkit.sources.table import ANY_TEXT, cell, kind_of_cells, kinds_in, typed
from shardkit.sources.table_rows import SUFFIXES, Row, columns_of, is_text, rows_of
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
        # Python reads single numbers of these in half the time of NumPy's.
        self._offsets, self._sizes = (
            array(kind, numbers.tobytes())
            for kind, numbers in (("q", self._offsets), ("i", self._sizes))
        )
        self._numbers: Sequence[int] = ()
        self.schema = self._complete(datasets[0].manifest.classes or (), keep_classes)

    def read(self, row: int) -> Mapping[str, Any]:
        """Return the values of a row, by field; None if the table lacks it."""
        return {name: value for name, (value,) in self.read_together([row]).items()}

    def read_together(self, rows: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        """Return the values of rows; parsing them together takes a third of the time."""
        listed = [row for row in rows if self._offsets[row] != _NONE]
        texts = self._spool.read((self._offsets[row], self._sizes[row]) for row in listed)
        stored = dict(zip(listed, json.loads(b"[%b]" % b",".join(texts)), strict=True))
        lacking = [None] * len(self._kept)
        values = [stored.get(row, lacking) for row in rows]
        return {
            kept.name: self._typed(kept, [row[number] for row in values])
            for number, kept in enumerate(self._kept)
        }

    def _typed(self, kept: Kept, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a field, given those of its column; None where it is missing."""
        field = self.schema[kept.name]
        kind = kept.kind or field.dtype or field.kind
        if kept.name == LABEL:
            return [None if code is None else self._numbers[code] for code in values]
        if self._text and kept.pointer is None and kind != "text":
            values = [v if v is None else typed(kind, v, kept.source) for v in values]
        if field.is_uniform:  # a list of integers may be one of floats
            return [None if value is None else np.asarray(value, field.dtype) for value in values]
        return values

    def only(self, rows: Sequence[int]) -> FieldValues:
        """Return the values of some rows; this object must outlive it."""
        narrowed = copy.copy(self)
        del narrowed._folder  # the file is removed with the last reference to it
        narrowed._stamps = None
        narrowed._offsets = {row: self._offsets[row] for row in rows}
        narrowed._sizes = {row: self._sizes[row] for row in rows}
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
                keys = self._keys_of(batch)
                numbers = finder.find(keys)
                self._require_once(batch, keys, numbers)
                lacking = np.flatnonzero(numbers == _NONE)
                unknown_count += len(lacking)
                unknown += [keys[n] for n in lacking[: _NAMED - len(unknown)].tolist()]
                known = np.flatnonzero(numbers >= 0)
                values = self._values_of([batch[n] for n in known.tolist()])
                sizes = np.array([*map(len, values)], np.int64)
                found = numbers[known]
                self._offsets[found] = end + np.cumsum(sizes) - sizes
                self._sizes[found] = sizes
                self._stamps[found] = [*map(zlib.crc32, values)]
                end += file.write(b"".join(values))
        lacking = np.flatnonzero(self._offsets == _NONE)
        missing = [finder.name(row) for row in lacking[:_NAMED].tolist()]
        return Matched(rows, unknown, unknown_count, missing, len(lacking))

    def _require_once(
        self, batch: Sequence[Row], keys: Sequence[str], numbers: npt.NDArray[np.int64]
    ) -> None:
        """Refuse keys that match several rows of the dataset, or one that has its values."""
        wrong = numbers == _AMBIGUOUS
        known = np.flatnonzero(numbers >= 0)
        again = np.delete(known, np.unique(numbers[known], return_index=True)[1])
        wrong[again] = True
        wrong[known] |= self._offsets[numbers[known]] != _NONE
        for n in np.flatnonzero(wrong).tolist():
            where = f"{self.path}:{batch[n][0]}: {quoted(keys[n])}"
            if numbers[n] == _AMBIGUOUS:
                raise UsageError(
                    f"{where} matches rows of several splits",
                    remedy="add the split and a slash before it",
                )
            raise UsageError(
                f"{where} is in the table twice, or by key and by path",
                remedy="keep one of the rows",
            )

    def _keys_of(self, batch: Sequence[Row]) -> list[str]:
        with contextlib.suppress(TypeError, KeyError):  # below, a row is refused
            keys: list[str] = [row[self._key] for _, row in cast("Any", batch)]
            if "".join(keys) and all(keys):
                return keys
        return [self._key_of(line, row) for line, row in batch]

    def _key_of(self, line: int, row: Mapping[str, Any] | str) -> str:
        assert self._key is not None
        if isinstance(row, str):
            raise UsageError(f"{self.path}:{line}: {row}")
        key = row.get(self._key)
        if not isinstance(key, str) or not key:
            raise UsageError(f"{self.path}:{line}: its {self._key} is {quoted(key)}, not text")
        return key

    def _values_of(self, batch: Sequence[tuple[int, Any]]) -> list[bytes]:
        """Return the values of rows as JSON; note the kinds and labels that there are."""
        columns = [
            self._texts_of(kept, batch) or self._cells_of(kept, batch) for kept in self._kept
        ]
        return [f"[{','.join(values)}]".encode() for values in zip(*columns, strict=True)]

    def _texts_of(self, kept: Kept, batch: Sequence[tuple[int, Any]]) -> list[str]:
        """Return the JSON of a column of valid texts, in a tenth of the time; else nothing."""
        if kept.pointer is not None or kept.name == LABEL or not kept.may_be_text:
            return []
        texts = [row.get(kept.source) for _, row in batch]
        try:
            "".join(texts).encode()
        except (TypeError, UnicodeEncodeError):  # not text, or not UTF-8
            return []
        if kept.kind is None:
            kinds = self._kinds[kept.name]
            for text in texts if self._text else texts[:1]:
                if ANY_TEXT in kinds:
                    break
                kinds |= kinds_in(text, self._text)
        return [*map(json.encoder.encode_basestring_ascii, texts)]

    def _cells_of(self, kept: Kept, batch: Sequence[tuple[int, Any]]) -> list[str]:
        """Return the JSON of the values in a column."""
        values = []
        for line, row in batch:
            try:
                values.append(as_json(self._value_of(row, kept), _ENCODER.encode))
            except BadImage as error:
                where = f"{self.path}:{line}"
                raise UsageError(f"{where}: {error.problem}", remedy=error.remedy) from error
        return values

    def _value_of(self, row: Mapping[str, Any], kept: Kept) -> Any:
        value = cell(row, kept, self._text)
        if value is None or (value == "" and not kept.may_be_text):
            if not kept.optional:
                raise BadImage(f"it has no {kept.source}; to allow this, write {kept.source}?")
            return None
        if kept.name == LABEL:
            return self._labels.code(label_of(value, kept.source))
        of_text = self._text and kept.pointer is None
        if kept.kind is None:
            self._kinds[kept.name] |= kinds_in(value, of_text)
            return value
        parsed = typed(kept.kind, value, kept.source) if of_text else value
        if kept.kind == "array":
            self._arrays[kept.name].add(_array_field(parsed))
        return value

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

    def read(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges, each an offset and a size."""
        content = self._content
        if content is None:
            with open(self.path, "rb") as file:
                self._content = content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return [content[offset : offset + size] for offset, size in ranges]

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
            for keys, paths in zip(
                _batches(dataset.index.keys()), _batches(dataset.index.paths()), strict=True
            ):
                for texts in (keys,) if keys == paths else (keys, paths):
                    for prefix in {"", dataset.prefix}:
                        names = [prefix + text for text in texts]
                        hashes.extend(map(hash, names))
                        others.extend([hash(name + _SALT) for name in names])
                        rows.append(np.arange(start, start + len(names)))
                start += len(keys)
        numbers = np.concatenate([np.zeros(0, np.int64), *rows])
        values = np.frombuffer(hashes, np.int64)
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._numbers = numbers[order]
        self._others = np.frombuffer(others, np.int64)[order]

    def find(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the row of each key or path: -1 for none, `_AMBIGUOUS` for several."""
        wanted, others = (
            np.fromiter(map(hash, names), np.int64, len(keys))
            for names in (keys, [key + _SALT for key in keys])
        )
        at = self._values.searchsorted(wanted)
        found = np.full(len(keys), _NONE)
        left = np.arange(len(keys))
        while len(left := left[at[left] < len(self._values)]):
            left = left[self._values[at[left]] == wanted[left]]
            keyed = left[self._others[at[left]] == others[left]]
            rows = self._numbers[at[keyed]]
            is_one = (found[keyed] == _NONE) | (found[keyed] == rows)
            found[keyed] = np.where(is_one, rows, _AMBIGUOUS)
            at[left] += 1
        return found

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
    rest = iter(rows)
    while batch := [*islice(rest, _AT_ONCE)]:
        yield batch


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def is_table(path: Path) -> bool:
    """Return whether a file is a table, by its suffix."""
    return path.name.endswith(SUFFIXES)
