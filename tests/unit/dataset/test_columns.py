"""Columns come back packed, in any parts; equal records have equal content digests."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fields import SCHEMA, make_fields, sample_of
from helpers import FORMATS, png
from hostile.damage import edit
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit import BlockShuffle, Field, convert, make_loader, open_dataset, verify
from shardkit.errors import CorruptDataset
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
from shardkit.verification.reindex import reindex

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
    segments = [build_column(field, packed[a:b]) for a, b in itertools.pairwise(bounds)]
    column = join_columns(field, segments)
    assert [plain(column.value(row)) for row in range(column.rows)] == values
    assert [column.packed(row) for row in range(column.rows)] == packed
    assert column.filled == sum(value is not None for value in values)
    whole = build_column(field, packed)
    for ending, array in whole.arrays().items():
        assert np.array_equal(array.view(np.uint8), column.arrays()[ending].view(np.uint8))
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


# The content digest: equal for equal records in any container, different for any other record.

CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "key": lambda sample: sample.update(key="another"),
    "image": lambda sample: sample.update(image=png(26, 20, 99)),
    "mask": lambda sample: sample["mask"].__setitem__((0, 0), 77),
    "label": lambda sample: sample.update(label="bee"),
    "tags": lambda sample: sample.update(tags=["old"]),
    "price": lambda sample: sample.update(price=0.75),
    "caption": lambda sample: sample.update(caption="number 2 äß★"),
    "extra": lambda sample: sample["extra"].update(number=3),
    "boxes": lambda sample: sample["boxes"][1].__setitem__(4, 0),
    "latent": lambda sample: sample["latent"].__setitem__((0, 0, 0), 0),
    "half": lambda sample: sample.update(half=sample["half"] + 1),
    "wave": lambda sample: sample.update(wave=sample["wave"].T.copy()),
    "blob": lambda sample: sample.update(blob=b"\0\2"),
    "missing": lambda sample: sample.update(caption=None),
}


def digest_of(samples: list[dict[str, Any]], place: Path, **options: Any) -> str:
    options = {"to": "lmdb", "shuffle": False, "workers": 1, **options}
    made = convert(samples, place, schema=SCHEMA, **options)
    return made.manifests[""].content_digest


def test_format_and_shards_do_not_matter(tmp_path: Path) -> None:
    samples = [sample_of(number) for number in range(10)]
    found = {
        digest_of(samples, tmp_path / f"{to}{size}", to=to, shard_samples=size)
        for to, size in zip(FORMATS, (3, 10, 4), strict=True)
    }
    assert len(found) == 1


@pytest.mark.slow
def test_each_difference_matters(tmp_path: Path) -> None:
    samples = [sample_of(number) for number in range(4)]
    found = {"none": digest_of(samples, tmp_path / "none")}
    for name, change in CHANGES.items():
        changed = [sample_of(number) for number in range(4)]
        change(changed[2])
        found[name] = digest_of(changed, tmp_path / name)
    found["fewer"] = digest_of(samples[:3], tmp_path / "fewer")
    found["order"] = digest_of(samples, tmp_path / "order", shuffle=True)
    assert len(set(found.values())) == len(found), found


def test_class_names_matter(tmp_path: Path) -> None:
    samples = [sample_of(number) | {"label": number % 3} for number in range(4)]
    named = {**SCHEMA, "label": Field("label", classes=("x", "bee", "cat"))}
    other = convert(samples, tmp_path / "b", to="lmdb", schema=named, shuffle=False, workers=1)
    assert digest_of(samples, tmp_path / "a") != other.manifests[""].content_digest


def test_a_forged_digest_is_found(tmp_path: Path) -> None:
    place = make_fields(tmp_path / "made")
    edit(place, lambda manifest: manifest.update(content_digest="0" * 64))
    (finding,) = verify(place, "quick").findings
    assert (finding.file, "content digest" in finding.reason) == ("shardkit.json", True)
    with pytest.raises(CorruptDataset, match="manifest"):
        reindex(place)


@pytest.mark.parametrize("shuffle", [False, True, BlockShuffle(rows=2, buffer=4)])
def test_a_state_continues_in_another_format(tmp_path: Path, shuffle: bool | BlockShuffle) -> None:
    datasets = [
        open_dataset(make_fields(tmp_path / to, to, whole=True), fields=["label", "latent"])
        for to in FORMATS
    ]
    loaders = [
        make_loader(dataset, 3, shuffle=shuffle, seed=4, num_workers=1) for dataset in datasets
    ]
    batches = iter(loaders[0])
    next(batches)
    state = loaders[0].state_dict()
    rest = [labels.tolist() for _, labels in batches]
    for loader in loaders[1:]:
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == rest
    for loader in loaders:
        loader.close()
