"""Columns: the values of one small field over all rows, packed into arrays.

Small fields are numbers, labels, texts, JSON, boxes and keypoints. Records hold them as JSON or
text. The index holds a copy in this form, from which readers take them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import CorruptDataset
from shardkit.record import LABEL, Field, Record, Schema, dump_json

PARTS = ("", "-ends", "-present", "-labels")
"""Ends of the names of a column's files: see `Column`."""

_TYPES: dict[str, np.dtype[Any]] = {
    "label": np.dtype("<i4"),
    "labels": np.dtype("<i4"),
    "text": np.dtype(np.uint8),
    "json": np.dtype(np.uint8),
    "boxes": np.dtype("<f8"),
    "keypoints": np.dtype("<f8"),
}
"""The type of a column by kind of field; that of numbers is their own."""

COLUMN_KINDS = ("number", *_TYPES)
"""The kinds of fields that have a column."""

_VARIABLE = ("labels", "text", "json", "boxes", "keypoints")
"""Kinds with any number of values in a row."""

_FORMS = {"b1": "?", "f2": "e", "f4": "f", "f8": "d"} | {
    f"{kind}{size}": code if kind == "i" else code.upper()
    for kind in "iu"
    for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
}
"""Codes of the `struct` module by type of number."""

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, as texts."""


class Packed(NamedTuple):
    """The value of one row, as bytes."""

    values: bytes
    labels: bytes = b""
    """The labels of boxes."""


def columns_of(schema: Schema) -> dict[str, Field]:
    """Return the fields that have a column: all small ones but the label of the image."""
    return {
        name: field
        for name, field in schema.items()
        if name != LABEL and field.kind in COLUMN_KINDS
    }


def width_of(field: Field) -> int:
    """Return the divisor of the number of values in each row: four for boxes."""
    if field.kind == "keypoints":
        return 3 * len(field.classes or ("",))
    return 4 if field.kind == "boxes" else 1


def type_of(field: Field) -> np.dtype[Any]:
    """Return the type of a field's column."""
    return _TYPES.get(field.kind, field.values)


def value_in(record: Record, meta: Mapping[str, Any], name: str, field: Field) -> Packed | None:
    """Return the value of a small field in a record; None if the record lacks it.

    Args:
        record: The record.
        meta: Its metadata, parsed.
        name: Name of the field.
        field: The field.

    Raises:
        ValueError: If it is not a value of that field.
    """
    if field.kind == "text":
        text = record.fields.get(field.stored_name(name) or "")
        if text is not None:
            text.decode()
        return None if text is None else Packed(text)
    return pack(field, meta[name]) if name in meta else None


def pack(field: Field, value: Any) -> Packed:
    """Return a value, as JSON values state it, in the form of its column.

    Raises:
        ValueError: If it is not a value of that field.
    """
    try:
        return _PACKERS[field.kind](field, value)
    except (struct.error, TypeError, OverflowError) as error:
        raise ValueError(f"{str(value)[:60]} is not a value of a {field.kind}: {error}") from error


def number_as_json(value: float) -> Any:
    """Return a number as records state it: JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _pack_number(field: Field, value: Any) -> Packed:
    kind, form = field.values.kind, struct.Struct("<" + _FORMS[field.values.str[1:]])
    if kind == "f":
        value = _SPECIAL.get(value, value) if isinstance(value, str) else value
        if type(value) not in (int, float):
            raise TypeError("it is not a number")
        packed = form.pack(value)
        (stored,) = form.unpack(packed)
        if stored != value and not math.isnan(value):
            raise ValueError(f"{value} is not a number of the type {field.dtype}")
        return Packed(packed)
    if type(value) is not (bool if kind == "b" else int):
        raise TypeError(f"it is not of the type {field.dtype}")
    return Packed(form.pack(value))


def _pack_label(field: Field, value: Any) -> Packed:
    return Packed(_pack_classes(field, [value]))


def _pack_labels(field: Field, value: Any) -> Packed:
    return Packed(_pack_classes(field, value))


def _pack_classes(field: Field, labels: Sequence[Any]) -> bytes:
    count = len(field.classes or ())
    for label in labels:
        if type(label) is not int or not 0 <= label < count:
            raise ValueError(f"{str(label)[:60]} is not one of {count} labels")
    return struct.pack(f"<{len(labels)}i", *labels)


def _pack_json(field: Field, value: Any) -> Packed:
    return Packed(dump_json(value))


def _pack_boxes(field: Field, value: Any) -> Packed:
    width = 4 if field.classes is None else 5
    corners: list[float] = []
    for box in value:
        if len(box) != width:
            raise ValueError(f"a box has {len(box)} numbers instead of {width}")
        corners += box[:4]
    labels = _pack_classes(field, [box[4] for box in value]) if width == 5 else b""
    return Packed(_pack_coordinates(corners), labels)


def _pack_keypoints(field: Field, value: Any) -> Packed:
    numbers: list[float] = []
    for point in value:
        if len(point) != 3 or type(point[2]) is not int or not 0 <= point[2] <= 2:
            raise ValueError(
                f"{str(point)[:60]} is no keypoint: x, y, and a visibility of 0, 1 or 2"
            )
        numbers += point
    if len(numbers) % width_of(field):
        raise ValueError(f"{len(value)} keypoints are not objects of {len(field.classes or ())}")
    return Packed(_pack_coordinates(numbers))


def _pack_coordinates(numbers: Sequence[float]) -> bytes:
    if not all(type(each) in (int, float) and math.isfinite(each) for each in numbers):
        raise TypeError("a coordinate is not a number")
    return struct.pack(f"<{len(numbers)}d", *numbers)


_PACKERS = {
    "number": _pack_number,
    "label": _pack_label,
    "labels": _pack_labels,
    "json": _pack_json,
    "boxes": _pack_boxes,
    "keypoints": _pack_keypoints,
}


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

    def parts(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store, by the end of their file's name, one of `PARTS`."""
        arrays = (self.values, self.ends, self.present, self.labels)
        return {name: array for name, array in zip(PARTS, arrays, strict=True) if array is not None}

    def has(self, row: int) -> bool:
        """Return whether a row has a value."""
        return self.present is None or bool(self.present[row])

    def span(self, row: int) -> slice:
        """Return which of the values are those of a row."""
        if self.ends is None:
            return slice(row, row + 1)
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def packed(self, row: int) -> Packed | None:
        """Return the value of a row as `value_in` returns it."""
        if not self.has(row):
            return None
        return Packed(self.values[self.span(row)].tobytes(), self._labels(row).tobytes())

    def value(self, row: int) -> Any:
        """Return the value of a row.

        Returns:
            A NumPy number; an int for a label; int32 of shape (N,) for labels; a text; JSON values;
            for boxes float64 of shape (N, 4), and int32 of shape (N,) if they have labels; for
            keypoints float64 of shape (N, 3), or (objects, points, 3) if they have names; None if
            the row has none.

        Raises:
            CorruptDataset: If a text or JSON value is damaged.
        """
        if not self.has(row):
            return None
        kind, values = self.field.kind, self.values[self.span(row)]
        if kind in ("number", "label"):
            return values[0] if kind == "number" else int(values[0])
        if kind in ("text", "json"):
            try:
                text = values.tobytes().decode()
                return text if kind == "text" else json.loads(text)
            except (ValueError, RecursionError) as error:
                raise CorruptDataset(
                    f"the index is damaged: row {row} of a column: {error}; to rebuild it from the "
                    "shards, run `shardkit index`"
                ) from error
        if kind == "labels":
            return values
        if kind == "keypoints":
            shape = (3,) if self.field.classes is None else (len(self.field.classes), 3)
            return values.reshape(-1, *shape)
        boxes = values.reshape(-1, 4)
        return boxes if self.labels is None else (boxes, self._labels(row))

    def _labels(self, row: int) -> npt.NDArray[np.int32]:
        if self.labels is None:
            return np.zeros(0, np.int32)
        span = self.span(row)
        return self.labels[span.start // 4 : span.stop // 4]

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
        found = np.empty(self.rows, object)
        for row in range(self.rows):
            found[row] = self.value(row)
        return found


def build_column(field: Field, rows: Sequence[Packed | None]) -> Column:
    """Return the column of packed values."""
    dtype = type_of(field)
    has = np.array([each is not None for each in rows], np.bool_)
    present = None if has.all() else has
    blank = Packed(b"" if field.kind in _VARIABLE else bytes(dtype.itemsize))
    filled = [blank if each is None else each for each in rows]
    values = np.frombuffer(b"".join([each.values for each in filled]), dtype)
    if field.kind not in _VARIABLE:
        return Column(field, values, None, present)
    ends = np.cumsum([len(each.values) // dtype.itemsize for each in filled], dtype=np.int64)
    labels = None
    if field.kind == "boxes" and field.classes is not None:
        labels = np.frombuffer(b"".join([each.labels for each in filled]), "<i4")
    return Column(field, values, ends, present, labels)


def join_columns(field: Field, columns: Sequence[Column]) -> Column:
    """Return the column of the rows of several columns, in order."""
    if len(columns) < 2:
        return columns[0] if columns else build_column(field, ())
    values = np.concatenate([each.values for each in columns])
    ends = labels = present = None
    if field.kind in _VARIABLE:
        counts = [np.diff(_required(each.ends), prepend=0) for each in columns]
        ends = np.cumsum(np.concatenate(counts), dtype=np.int64)
    if columns[0].labels is not None:
        labels = np.concatenate([_required(each.labels) for each in columns])
    if any(each.present is not None for each in columns):
        present = np.concatenate(
            [
                np.ones(each.rows, np.bool_) if each.present is None else each.present
                for each in columns
            ]
        )
    return Column(field, values, ends, present, labels)


def _required(array: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if array is None:
        raise ValueError("a part of a column lacks an array")
    return array


def take_rows(column: Column, rows: Sequence[int] | npt.NDArray[np.int64]) -> Column:
    """Return the column of some rows, in that order, including duplicates."""
    if column.ends is None:
        places = np.asarray(rows, np.int64)
        present = None if column.present is None else column.present[places]
        return Column(column.field, column.values[places], None, present)
    return join_columns(column.field, [_slice(column, row) for row in rows])


def _slice(column: Column, row: int) -> Column:
    """Return the column of one row."""
    span = column.span(row)
    labels = None if column.labels is None else column.labels[span.start // 4 : span.stop // 4]
    present = None if column.present is None else column.present[row : row + 1]
    ends = np.array([span.stop - span.start])
    return Column(column.field, column.values[span], ends, present, labels)
