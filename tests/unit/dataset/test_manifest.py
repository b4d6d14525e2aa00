"""The manifest survives a round trip, or is refused with a shardkit error."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset, make_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import canonical, make_manifest, sealed
from refusals import refused, refuses

from shardkit import ShardkitError
from shardkit.dataset.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    SplitsManifest,
    load_any_manifest,
    load_manifest,
    save_manifest,
)
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.errors import CorruptDataset, UsageError
from shardkit.system.files import SMALL_BYTES

Change = Callable[[dict[str, Any]], object]


def write(directory: Path, value: dict[str, Any], *, seal: bool = True) -> None:
    """Write a manifest as a forger would, with a correct digest if ``seal``."""
    if seal:
        value = json.loads(sealed(value))
    (directory / MANIFEST_NAME).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def saved(directory: Path) -> dict[str, Any]:
    save_manifest(make_manifest(), directory)
    value: dict[str, Any] = json.loads((directory / MANIFEST_NAME).read_bytes())
    return value


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for i, part in enumerate(value) for leaf in leaves(part, (*path, i))]
    return [path]


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = new


def test_a_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    save_manifest(make_manifest(), tmp_path)
    assert load_manifest(tmp_path) == make_manifest()
    assert load_any_manifest(tmp_path).digest == make_manifest().digest


def test_a_manifest_of_splits_survives_a_round_trip(tmp_path: Path) -> None:
    manifest = SplitsManifest(splits={"train": "aa", "val": "bb"})
    save_manifest(manifest, tmp_path)
    assert load_any_manifest(tmp_path) == manifest
    assert {name: split.path for name, split in OpenedDirectory(tmp_path).splits.items()} == {
        "train": tmp_path / "train",
        "val": tmp_path / "val",
    }


def test_the_file_is_ascii_and_contains_its_digest(tmp_path: Path) -> None:
    value = saved(tmp_path)
    assert (tmp_path / MANIFEST_NAME).read_bytes().isascii()
    digest = value.pop("digest")
    assert digest == make_manifest().digest == hashlib.sha256(canonical(value)).hexdigest()
    assert value["format_version"] == 1
    assert value["kind"] == "dataset"


def test_equal_manifests_give_equal_bytes(tmp_path: Path) -> None:
    save_manifest(make_manifest(), tmp_path)
    first = (tmp_path / MANIFEST_NAME).read_bytes()
    save_manifest(replace(make_manifest(), fields={"jpg": 5, "cls": 5}), tmp_path)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_each_changed_byte_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / MANIFEST_NAME
    good = path.read_bytes()
    accepted = []
    for at in range(len(good)):
        for flip in (0x01, 0x2A) if good[at] == ord(" ") else (0x01,):  # 0x2A: a line break
            bad = bytearray(good)
            bad[at] ^= flip
            path.write_bytes(bad)
            try:
                load_any_manifest(tmp_path)
            except ShardkitError:
                continue
            accepted.append((at, chr(good[at]), chr(bad[at])))
    assert accepted == []


def test_a_newer_version_requires_a_newer_shardkit(tmp_path: Path) -> None:
    for version, seal in itertools.product((FORMAT_VERSION + 1, 99, 10**30), (True, False)):
        write(tmp_path, {**saved(tmp_path), "format_version": version}, seal=seal)
        with pytest.raises(UsageError, match=f"version {version}.*newer shardkit"):
            load_any_manifest(tmp_path)


MISSING = object()


def test_a_version_that_never_was_is_refused(tmp_path: Path) -> None:
    for version in (0, -1, 2.0, "1", None, True, [1], MISSING):
        value = saved(tmp_path) | {"format_version": version}
        if version is MISSING:
            del value["format_version"]
        write(tmp_path, value)
        with pytest.raises(CorruptDataset):
            load_any_manifest(tmp_path)


ESCAPES = ["../x", "/x", "a/../../x", "..", ".", "", "a//b", "a/", "./a", "a\0b", "a/.."]


RESERVED = [
    *("folder/a.lmdb", "index/index/a.npy", MANIFEST_NAME, ".shardkit", ".shardkit-x/a"),
    *("facts.npy", "notes.txt", f".facts.npy.{'0' * 16}.tmp", "index", "index/zzz.npy"),
]
"""Names that shardkit gives to other files, or that the user may."""


def test_an_impossible_file_name_is_refused(tmp_path: Path) -> None:
    lone = "\ud800.lmdb"  # a lone surrogate, and no escaped byte
    names = [("shards", name) for name in [*ESCAPES, lone]]
    names += [("files", name) for name in [*ESCAPES, *RESERVED, "shard-000009.lmdb"]]
    names += [("shards", name) for name in [*RESERVED, "index/keys.npy", "skipped.jsonl", "a.lmdb"]]
    for part, name in names:
        value = saved(tmp_path)
        value[part][0]["name"] = name
        write(tmp_path, value)
        with pytest.raises(CorruptDataset) as caught:
            load_any_manifest(tmp_path)
        assert name == lone or repr(name) in str(caught.value)


def test_an_impossible_split_name_is_refused(tmp_path: Path) -> None:
    for name in [*ESCAPES, "index/train"]:
        save_manifest(SplitsManifest(splits={name: "aa"}), tmp_path)
        with refused(CorruptDataset, repr(name)):
            OpenedDirectory(tmp_path)
    save_manifest(SplitsManifest(splits={}), tmp_path)
    with pytest.raises(CorruptDataset):
        load_manifest(tmp_path)


DEEP = '{"a": ' + "[" * 40 + "]" * 40 + "}"


def _set(*path: Any, to: Any) -> Change:
    return lambda value: put(value, path, to)


WRONG: dict[str, Change] = {
    "rows is text": _set("rows", to="5"),
    "rows is a fraction": _set("rows", to=5.0),
    "rows is true": _set("rows", to=True),
    "rows is negative": _set("rows", to=-5),
    "rows do not add up": _set("rows", to=6),
    "a shard's rows do not add up": _set("shards", 0, "rows", to=4),
    "a shard's size is negative": _set("shards", 0, "bytes", to=-1),
    "a shard is null": _set("shards", 0, to=None),
    "a shard lacks its rows": lambda value: value["shards"][0].pop("rows"),
    "a file has rows": _set("files", 0, "rows", to=1),
    "a file is named twice": _set("files", 0, "name", to="shard-000000.lmdb"),
    "shards is an object": _set("shards", to={}),
    "fields is a list": _set("fields", to=[]),
    "a field's count is text": _set("fields", "jpg", to="5"),
    "a class is a number": _set("classes", 0, to=1),
    "classes without counts": _set("class_counts", to=None),
    "counts without classes": _set("classes", to=None),
    "fewer counts than classes": _set("class_counts", to=[5]),
    "a raw shape of two": _set("raw_shape", to=[4, 5]),
    "a raw shape of text": _set("raw_shape", to="453"),
    "a recipe that is a list": _set("recipe", to=[]),
    "a problem without a reason": lambda value: value["skipped"][0].pop("reason"),
    "an unknown entry": _set("extra", to=1),
    "a missing entry": lambda value: value.pop("software"),
    "an unknown kind": _set("kind", to="other"),
    "the kind of splits": _set("kind", to="splits"),
    "a source nested too deeply": lambda value: value["source"].update(json.loads(DEEP)),
    "a source with a number that is not JSON": _set("source", "a", to=[float("nan")]),
}


def test_a_wrong_value_is_refused_even_with_its_digest(tmp_path: Path) -> None:
    accepted = []
    for name, change in WRONG.items():
        value = saved(tmp_path)
        change(value)
        write(tmp_path, value)
        try:
            load_any_manifest(tmp_path)
        except CorruptDataset:
            continue
        accepted.append(name)
    assert accepted == []


def test_json_of_any_depth_is_refused(tmp_path: Path) -> None:
    head = json.dumps(saved(tmp_path), indent=1, sort_keys=True)[:-1]
    # Just below the interpreter's limit reading succeeds and writing anew, one call deeper, fails.
    for depth in (*range(940, 1000), 100_000):
        text = f'{head}, "recipe": {"[" * depth}{"]" * depth}}}'
        (tmp_path / MANIFEST_NAME).write_text(text)
        with pytest.raises(CorruptDataset):
            load_any_manifest(tmp_path)


def test_the_error_for_a_directory_of_splits_names_one(tmp_path: Path) -> None:
    save_manifest(SplitsManifest(splits={"train": "aa", "val": "bb"}), tmp_path)
    with pytest.raises(UsageError, match=r"train, val.*train"):
        load_manifest(tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/x", "dataset", "splits", "lmdb", "index/rows.npy"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_gives_a_shardkit_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("manifest")
    value = saved(directory)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([*leaves(value), *((name,) for name in value)]))
        put(value, path, data.draw(JSON))
    write(directory, value, seal=data.draw(st.booleans()))
    try:
        found = load_any_manifest(directory)
    except ShardkitError:
        return
    save_manifest(found, directory)  # what is accepted can be used and saved
    assert load_any_manifest(directory) == found


@settings(max_examples=80, deadline=None)
@given(content=st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_content_at_all_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    directory = tmp_path_factory.mktemp("manifest")
    (directory / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ShardkitError):
        load_any_manifest(directory)


def test_a_huge_manifest_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_NAME).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=MANIFEST_NAME):
        load_any_manifest(tmp_path)


@pytest.mark.slow
def test_a_manifest_that_no_reader_accepts_is_not_written(tmp_path: Path) -> None:
    huge = replace(make_manifest(), notes={"x" * SMALL_BYTES: 1})
    with pytest.raises(ShardkitError, match="larger shards"):
        save_manifest(huge, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_a_manifest_or_a_split_is_damage(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos")
    made = make_dataset(tmp_path / "photos", tmp_path / "made")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / MANIFEST_NAME).symlink_to(made / MANIFEST_NAME)
    with pytest.raises(CorruptDataset, match="symbolic link"):
        load_manifest(tmp_path / "linked")
    (tmp_path / "linked" / "train").symlink_to(made)
    with pytest.raises(CorruptDataset, match="symbolic link"):
        _ = OpenedDataset(tmp_path / "linked" / "train", "train").manifest


def test_a_dataset_without_its_manifest_is_restored_not_converted_to_itself(
    folder: Path, tmp_path: Path
) -> None:
    place = make_dataset(folder, tmp_path / "made")
    (place / "shardkit.json").unlink()
    for verb in ("info", "verify"):
        refuses(2, verb, place, facts=(place, "shardkit.json", "copy"))


def test_a_folder_of_datasets_names_one(folder: Path, tmp_path: Path) -> None:
    make_dataset(folder, tmp_path / "all/train")
    refuses(2, "info", tmp_path / "all", facts=(tmp_path / "all/train", "shardkit.json"))
