from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from table import for_each

from shardkit import Field
from shardkit.kinds.field import default_schema, describe_schema, load_schema, uniform_arrays
from shardkit.record import (
    IMAGE_FIELDS,
    NO_LABEL,
    Record,
    dump_json,
    image_field,
    load_json,
    make_keys,
    parse_label,
    unquote_key,
)

_SAFE = re.compile(r"[A-Za-z0-9_~%/-]+\Z")

_NAME_BYTES = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.lists(
        st.sampled_from([b"a", b"b", b".", b"_", b"__", b".jpg", b".png", b"%2E", b"\xff", b" "]),
        min_size=1,
        max_size=6,
    ).map(b"".join),
    st.text("aZ0é★\U0001f600\udcff.%_ ~\n", min_size=1, max_size=8).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    ),
)
"""Names of files as the kernel allows them: any bytes but NUL and slash, not "." and ".."."""

NAMES = (
    _NAME_BYTES.map(lambda name: name.replace(b"\0", b"0").replace(b"/", b"|"))
    .filter(lambda name: name not in (b".", b".."))
    .map(os.fsdecode)
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PATH_LISTS = st.lists(PATHS, max_size=12, unique=True)


@given(PATH_LISTS)
def test_keys_are_distinct_and_safe_and_lead_back_to_paths_in_any_order(paths: list[str]) -> None:
    keys = dict(zip(paths, make_keys(paths), strict=True))
    assert len(set(keys.values())) == len(paths)
    assert keys == dict(zip(paths[::-1], make_keys(paths[::-1]), strict=True))
    for path, key in keys.items():
        back = unquote_key(key)
        rest = path.removeprefix(back)
        assert path.startswith(back)
        assert rest == "" or (rest.startswith(".") and "." not in rest[1:] and "/" not in rest)
        assert _SAFE.match(key)
        assert not any(part.startswith("__") for part in key.split("/"))
        assert all(key.split("/"))


@for_each(
    ("path", "key"),
    [
        ("cat/0.jpg", "cat/0"),
        ("cat/a.b.JPG", "cat/a%2Eb"),
        ("v1.0/a.jpg", "v1%2E0/a"),
        ("cat/full moon.jpg", "cat/full%20moon"),
        ("größe.png", "gr%C3%B6%C3%9Fe"),
        ("__x__/___y.jpg", "%5F_x__/%5F__y"),
        ("_x.jpg", "_x"),
        ("a\nb.jpg", "a%0Ab"),
        (".jpg", "%2Ejpg"),
        ("..jpg", "%2E"),
        ("100%.jpg", "100%25"),
        ("\udcff.jpg", "%FF"),
        ("name", "name"),
    ],
)
def test_the_keys_of_version_1_are_frozen(path: str, key: str) -> None:
    assert make_keys([path]) == [key]


def test_files_that_differ_in_their_suffix_keep_it() -> None:
    assert make_keys(["a.jpg", "a.png", "b.jpg"]) == ["a%2Ejpg", "a%2Epng", "b"]
    assert make_keys(["a", "a.jpg"]) == ["a", "a%2Ejpg"]
    assert make_keys(["a.jpg", "a.jpg.png"]) == ["a", "a%2Ejpg%2Epng"]


def test_a_record_needs_a_key() -> None:
    with refused(ValueError):
        Record("", {})


@for_each(
    "name", ["", "a.b.c", "a.", ".a", "A", "_a", "a-b", "a/b", "x" * 33, "jpg\n", "ä", "a._b"]
)
def test_invalid_field_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="field name"):
        Record("k", {name: b""})


@for_each("name", [*IMAGE_FIELDS, "cls", "json", "x" * 32, "0", "mask.png"])
def test_valid_field_names_are_accepted(name: str) -> None:
    assert Record("k", {name: b"1"}).fields[name] == b"1"


@for_each("text", [b"0", b"7", b"10", b"999999999"])
def test_a_label_is_a_decimal_number(text: bytes) -> None:
    assert parse_label(text) == int(text)
    assert Record("k", {"cls": text}).label == int(text)


@for_each(
    "text",
    [
        b"",
        b"-1",
        b"+1",
        b" 1",
        b"1\n",
        b"01",
        b"00",
        b"1.0",
        b"1e3",
        b"1_0",
        b"1000000000",
        "²".encode(),
        "٣".encode(),
    ],
)
def test_anything_else_is_not_a_label(text: bytes) -> None:
    with refused(ValueError):
        parse_label(text)


def test_a_record_without_a_label_has_no_label() -> None:
    assert Record("k", {}).label == NO_LABEL


@for_each("text", [b"[]", b"1", b"null", b'"x"'])
def test_metadata_must_be_an_object(text: bytes) -> None:
    with pytest.raises(ValueError, match="JSON"):
        _ = Record("k", {"json": text}).meta


def test_metadata_is_empty_without_its_field() -> None:
    assert Record("k", {}).meta == {}


def test_the_image_field_is_found_among_others() -> None:
    assert image_field(["cls", "json", "png"]) == "png"
    assert image_field(["cls", "json"]) is None
    assert Record("k", {"cls": b"1", "raw": b""}).image_field == "raw"


def test_the_codes_of_image_fields_are_frozen() -> None:
    assert IMAGE_FIELDS[:8] == ("jpg", "png", "webp", "bmp", "gif", "tiff", "ppm", "raw")


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers(), max_size=4))
def test_json_is_ascii_and_independent_of_the_order_of_names(value: dict[str, object]) -> None:
    text = dump_json(value)
    assert text == dump_json(dict(reversed(value.items())))
    assert text.isascii()
    assert json.loads(text) == value


def test_json_holds_names_that_are_not_utf8() -> None:
    assert json.loads(dump_json({"path": "\udcff"})) == {"path": "\udcff"}


# --- fields ---


@for_each(
    ("arguments", "reason"),
    [
        (("picture",), "the kind 'picture' is unknown"),
        (("number",), "a number needs a dtype"),
        (("text", "int8"), "a text has no dtype"),
        (("number", "complex64"), "a number cannot have the dtype complex64"),
        (("array", "object"), "is not plain"),
        (("array", "i4,i4"), "is unknown"),
        (("array", "longdouble"), "is not plain"),
        (("array", None, (2,)), "only an array, or an image with a dtype, has a shape"),
        (("array", "int8", (0,)), "out of range"),
        (("array", "int8", (1,) * 17), "out of range"),
        (("array", "int8", (1 << 16, 1 << 16)), "out of range"),
        (("label",), "the classes are missing"),
        (("labels",), "the classes are missing"),
        (("label", None, None, ("a", "a")), "two classes have the same name"),
        (("text", None, None, 2), "a text cannot have classes"),
        (("keypoints", None, None, ()), "at least one keypoint"),
    ],
)
def test_a_field_that_cannot_be_is_refused(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Field(*arguments)


def test_a_schema_survives_a_round_trip() -> None:
    schema = {
        "image": Field("image"),
        "label": Field("label", classes=("a", "b")),
        "latent": Field("array", "<f2", [4, 8]),
        "bits": Field("array", "bfloat16", (2,)),
        "boxes": Field("boxes", classes=3),
        "joints": Field("keypoints", classes=("left eye", "right eye")),
        "when": Field("array", "datetime64[s]", ()),
    }
    described = load_json(dump_json({"schema": describe_schema(schema)}))["schema"]
    assert described[1]["classes"] is None
    assert load_schema(described, ("a", "b")) == schema
    assert [field.stored_name(name) for name, field in schema.items()] == [
        None,
        "cls",
        "latent.npy",
        "bits.npy",
        None,
        None,
        "when.npy",
    ]
    assert uniform_arrays(schema).keys() == {"latent.npy", "bits.npy", "when.npy"}
    assert str(schema["latent"]) == "float16 array, 4 x 8"
    assert load_schema(None, ("a",)) == default_schema(("a",))


GOOD = {"name": "x", "kind": "array", "dtype": "int8", "shape": [2], "classes": None}


@for_each(
    "schema",
    [
        7,
        ["x"],
        [{}],
        [GOOD, GOOD],
        [{**GOOD, "name": "X"}],
        [{**GOOD, "name": 7}],
        [{**GOOD, "name": "path"}],
        [{**GOOD, "name": "image"}],
        [{**GOOD, "kind": ["array"]}],
        [{**GOOD, "dtype": ["int8"]}],
        [{**GOOD, "shape": ["2"]}],
        [{**GOOD, "shape": [2.0]}],
        [{**GOOD, "shape": [True]}],
        [{**GOOD, "kind": "label", "dtype": None, "shape": None, "classes": [1]}],
    ],
)
def test_a_damaged_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"schema|field|image"):
        load_schema(schema, None)
