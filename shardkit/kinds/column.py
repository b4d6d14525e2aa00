"""Columns: the values of one small field over all rows, packed into arrays.

Records hold small values as JSON or text. The index holds a copy in this form, from which readers
take them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import damaged_index
from shardkit.kinds.field import Field, Packed, Stack
from shardkit.record import Record

ENDINGS = ("", "-ends", "-present", "-labels")
"""Ends of the names of a column's files: see `Column`."""


def type_of(field: Field) -> np.dtype[Any]:
    """Return the type of a field's column."""
    return field.values if field.type.column_type is None else field.type.column_type


def value_in(record: Record, meta: Mapping[str, Any], name: str, field: Field) -> Packed | None:
    """Return the value of a small field in a record; None if the record lacks it.

    ``meta`` is its parsed metadata. Raises ValueError if it is not a value of that field.
    """
    value = field.type.in_record(record, meta, name)
    return None if value is None and name not in meta else pack_value(field, value)


def pack_value(field: Field, value: Any) -> Packed:
    """Return a value, as JSON values state it, in the form of its column.

    Raises ValueError if it is not a value of that field.
    """
    try:
        return field.type.pack_column(field, value)
    except (struct.error, TypeError, OverflowError) as error:
        raise ValueError(f"{str(value)[:60]} is not a value of a {field.kind}: {error}") from error


class Column(NamedTuple):
    """The values of a small field over some rows."""

    field: Field
    values: npt.NDArray[Any]
    """One value for each row (0 where it is missing); or the values of all rows end to end: bytes
    of UTF-8 for text and JSON, int32 for labels, four float64 for each box, and x, y and visibility
    of each keypoint."""
    ends: npt.NDArray[np.int64] | None = None
    """Position after each row's last value, if rows have any number of values."""
    present: npt.NDArray[np.bool_] | None = None
    """Whether each row has a value; None if all have."""
    labels: npt.NDArray[np.int32] | None = None
    """The label of each box, if boxes have labels."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.values if self.ends is None else self.ends)

    @property
    def filled(self) -> int:
        """The number of rows with a value."""
        return self.rows if self.present is None else int(np.count_nonzero(self.present))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store, by the end of their file's name, one of `ENDINGS`."""
        arrays = (self.values, self.ends, self.present, self.labels)
        return {
            name: array for name, array in zip(ENDINGS, arrays, strict=True) if array is not None
        }

    def has(self, row: int) -> bool:
        """Return whether a row has a value."""
        return self.present is None or bool(self.present[row])

    def span(self, row: int) -> slice:
        """Return the slice of `values` that belongs to a row."""
        if self.ends is None:
            return slice(row, row + 1)
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def packed(self, row: int) -> Packed | None:
        """Return the value of a row as `value_in` returns it."""
        if not self.has(row):
            return None
        return Packed(self.values[self.span(row)].tobytes(), self._labels(row).tobytes())

    def value(self, row: int) -> Any:
        """Return the value of a row, None if it has none.

        A NumPy number; an int for a label; int32 of shape (N,) for labels; a text; JSON values; for
        boxes float64 of shape (N, 4), and int32 of shape (N,) if they have labels; for keypoints
        float64 of shape (N, 3), or (objects, points, 3) if they have names. Raises CorruptDataset
        if a text or JSON value is damaged.
        """
        if not self.has(row):
            return None
        labels = None if self.labels is None else self._labels(row)
        try:
            return self.field.type.unpack(self.field, self.values[self.span(row)], labels)
        except (ValueError, RecursionError) as error:
            raise damaged_index(f"row {row} of a column: {error}") from error

    def _labels(self, row: int) -> npt.NDArray[np.int32]:
        if self.labels is None:
            return np.zeros(0, np.int32)
        span = self.span(row)
        width = self.field.type.width(self.field)
        return self.labels[span.start // width : span.stop // width]

    def classes(self) -> npt.NDArray[np.int32] | None:
        """Return the numbers of classes in all rows, end to end; None if the kind has none."""
        return self.values if self.field.type.holds_classes else self.labels

    def stack(self) -> Stack | None:
        """Return the values as one array; None if they are a list, or some are missing in it."""
        stack = self.field.type.stack(self.field, self.values, self.ends)
        if stack is None or self.present is None or self.present.all():
            return stack
        return self.field.type.fill_missing(stack, self.present)

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return all values as one array with an element for each row.

        It is a masked array if rows lack the number or label, and an array of objects, None where
        a row has no value, for the other kinds.
        """
        if self.ends is None:
            if self.present is None:
                return self.values
            masked: npt.NDArray[Any] = np.ma.MaskedArray(self.values, ~self.present)
            return masked
        values = np.empty(self.rows, object)
        for row in range(self.rows):
            values[row] = self.value(row)
        return values


def build_column(field: Field, rows: Sequence[Packed | None]) -> Column:
    """Return the column of packed values."""
    dtype = type_of(field)
    kind = field.type
    has = np.array([row is not None for row in rows], np.bool_)
    present = None if has.all() else has
    blank = Packed(b"" if kind.is_variable else bytes(dtype.itemsize))
    filled = [blank if row is None else row for row in rows]
    values = np.frombuffer(b"".join([row.values for row in filled]), dtype)
    if not kind.is_variable:
        return Column(field, values, None, present)
    ends = np.cumsum([len(row.values) // dtype.itemsize for row in filled], dtype=np.int64)
    labels = None
    if kind.has_labels(field):
        labels = np.frombuffer(b"".join([row.labels for row in filled]), "<i4")
    return Column(field, values, ends, present, labels)


def join_columns(field: Field, columns: Sequence[Column]) -> Column:
    """Return the column of the rows of several columns, in order."""
    if len(columns) < 2:
        return columns[0] if columns else build_column(field, ())
    values = np.concatenate([column.values for column in columns])
    ends = labels = present = None
    if field.type.is_variable:
        counts = [np.diff(_required(column.ends), prepend=0) for column in columns]
        ends = np.cumsum(np.concatenate(counts), dtype=np.int64)
    if columns[0].labels is not None:
        labels = np.concatenate([_required(column.labels) for column in columns])
    if any(column.present is not None for column in columns):
        present = np.concatenate([*map(presence, columns)])
    return Column(field, values, ends, present, labels)


def presence(column: Column) -> npt.NDArray[np.bool_]:
    """Return whether each row has a value."""
    return np.ones(column.rows, np.bool_) if column.present is None else column.present


def _required(array: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if array is None:
        raise ValueError("a chunk of a column lacks an array")
    return array


def take_rows(column: Column, rows: Sequence[int] | npt.NDArray[np.int64]) -> Column:
    """Return the column of some rows, in that order, including duplicates."""
    if column.ends is None:
        positions = np.asarray(rows, np.int64)
        present = None if column.present is None else column.present[positions]
        return Column(column.field, column.values[positions], None, present)
    return join_columns(column.field, [_slice(column, row) for row in rows])


def _slice(column: Column, row: int) -> Column:
    """Return the column of one row."""
    span = column.span(row)
    labels = None if column.labels is None else column._labels(row)
    present = None if column.present is None else column.present[row : row + 1]
    ends = np.array([span.stop - span.start])
    return Column(column.field, column.values[span], ends, present, labels)
