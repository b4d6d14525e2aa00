"""Columns: packed values come back, in any split into parts, and damage is refused."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit import Field
from shardkit.kinds.column import (
    Column,
    build_column,
    join_columns,
    pack_value,
    take_rows,
    value_in,
)
from shardkit.kinds.number import number_as_json
from shardkit.record import Record

FIELDS = {
    "number": Field("number", "float64"),
    "label": Field("label", classes=5),
    "labels": Field("labels", classes=5),
    "json": Field("json"),
    "boxes": Field("boxes"),
    "labeled": Field("boxes", classes=3),
    "keypoints": Field("keypoints"),
    "named": Field("keypoints", classes=2),
}
_FINITE = st.floats(-1e6, 1e6)
_POINT = st.tuples(_FINITE, _FINITE, st.integers(0, 2)).map(list)
_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "number": st.floats().map(number_as_json),
    "label": st.integers(0, 4),
    "labels": st.lists(st.integers(0, 4), unique=True),
    "json": st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    "boxes": st.lists(st.lists(_FINITE, min_size=4, max_size=4), max_size=3),
    "labeled": st.lists(
        st.tuples(_FINITE, _FINITE, _FINITE, _FINITE, st.integers(0, 2)).map(list), max_size=3
    ),
    "keypoints": st.lists(_POINT, max_size=3),
    "named": st.lists(st.tuples(_POINT, _POINT), max_size=2).map(
        lambda pairs: [point for pair in pairs for point in pair]
    ),
}


def plain(value: Any) -> Any:
    """Return a column's value as JSON values, with None for NaN."""
    if isinstance(value, tuple):
        return [
            [*box, label] for box, label in zip(*(each.tolist() for each in value), strict=True)
        ]
    if isinstance(value, np.ndarray | np.generic):
        value = value.reshape(-1, 3).tolist() if value.ndim == 3 else value.tolist()
    return number_as_json(value) if isinstance(value, float) else value


@settings(max_examples=30)
@given(st.data(), st.sampled_from(sorted(FIELDS)))
def test_values_come_back_from_any_parts(data: st.DataObject, name: str) -> None:
    field = FIELDS[name]
    values = data.draw(st.lists(st.none() | VALUES[name], max_size=8))
    if name == "json":
        values = [None if value is None else [value] for value in values]
    packed = [None if value is None else pack_value(field, value) for value in values]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    bounds = [0, *cuts, len(values)]
    parts = [build_column(field, packed[a:b]) for a, b in itertools.pairwise(bounds)]
    column = join_columns(field, parts)
    assert [plain(column.value(row)) for row in range(column.rows)] == values
    assert [column.packed(row) for row in range(column.rows)] == packed
    assert column.filled == sum(value is not None for value in values)
    whole = build_column(field, packed)
    for part, array in whole.parts().items():
        assert np.array_equal(array.view(np.uint8), column.parts()[part].view(np.uint8))
    if values:
        rows = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=5))
        taken = take_rows(column, rows)
        assert [plain(taken.value(n)) for n in range(len(rows))] == [values[row] for row in rows]


def test_numbers_of_each_type_are_exact() -> None:
    integers = {name: np.iinfo(name) for name in ("int8", "uint8", "int16", "uint64")}
    extremes: dict[str, list[Any]] = {n: [int(i.min), int(i.max)] for n, i in integers.items()}
    extremes |= {"bool": [False, True], "float16": [-65504.0, 2.0**-24]}
    for dtype, values in extremes.items():
        field = Field("number", dtype)
        column = build_column(field, [pack_value(field, value) for value in values])
        assert column.values.tolist() == values
        assert column.as_numpy().dtype == np.dtype(dtype)


OTHERS: list[tuple[Field, Any]] = [
    (Field("number", "int8"), 128),
    (Field("number", "uint8"), -1),
    (Field("number", "int64"), 1.0),
    (Field("number", "int64"), True),
    (Field("number", "bool"), 1),
    (Field("number", "float32"), 0.1),
    (Field("number", "float16"), 1e9),
    (Field("number", "float64"), "x"),
    (Field("number", "float64"), None),
    (Field("label", classes=2), 2),
    (Field("label", classes=2), -1),
    (Field("label", classes=2), "0"),
    (Field("labels", classes=2), 1),
    (Field("labels", classes=2), [0, 2]),
    (Field("boxes"), [[0, 0, 1]]),
    (Field("boxes"), [[0, 0, 1, 1, 0]]),
    (Field("boxes"), [[0, 0, 1, math.nan]]),
    (Field("boxes"), [[0, 0, 1, "1"]]),
    (Field("boxes"), 7),
    (Field("boxes", classes=1), [[0, 0, 1, 1, 1]]),
    (Field("keypoints"), [[0, 0]]),
    (Field("keypoints"), [[0, 0, 3]]),
    (Field("keypoints"), [[0, 0, 1.0]]),
    (Field("keypoints"), [[0, math.inf, 1]]),
    (Field("keypoints"), 7),
    (Field("keypoints", classes=2), [[0, 0, 1]] * 3),
]


def test_other_values_are_refused() -> None:
    for field, value in OTHERS:
        with pytest.raises(ValueError, match=r"number|label|box|point|type"):
            pack_value(field, value)


def test_a_record_may_lack_a_value() -> None:
    record = Record("k", {"txt": "ä".encode(), "json": json.dumps({"a": 1}).encode()})
    assert value_in(record, record.meta, "text", Field("text")) == ("ä".encode(), b"")
    assert value_in(record, record.meta, "other", Field("text")) is None
    assert value_in(record, record.meta, "b", Field("number", "int64")) is None
    with pytest.raises(ValueError, match="utf-8"):
        value_in(Record("k", {"txt": b"\xff"}), {}, "text", Field("text"))


def test_a_missing_number_is_masked() -> None:
    field = Field("number", "int32")
    column = build_column(field, [pack_value(field, 7), None])
    found = column.as_numpy()
    assert found.tolist() == [7, None]
    assert np.ma.is_masked(found)
    assert isinstance(column, Column)
