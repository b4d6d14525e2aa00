"""``shardkit info``: the description as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import (
    FORMATS,
    encoded,
    exif,
    invoke,
    jpeg,
    make_dataset,
    make_folder,
    make_tree,
    picture,
    run,
)

from shardkit import convert, describe, open_dataset
from shardkit.recipe import Recipe
from shardkit.registry import open_source


@pytest.mark.parametrize("to", FORMATS)
def test_the_text_describes_the_dataset(folder: Path, tmp_path: Path, to: str) -> None:
    place = make_dataset(folder, tmp_path / "made", to=to)
    result = invoke("info", place)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == str(place)
    for part in (
        f"{to}, 2 shards",
        "6 (4 jpg, 2 png)",
        "imagefolder photos, shuffled with seed 0",
        "bytes unchanged, checked: decode",
        open_dataset(place).manifest.digest,
    ):
        assert part in result.stdout
    assert [line.split() for line in lines[-2:]] == [["cat", "3"], ["dog", "3"]]


def test_json_describes_the_dataset(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    result = invoke("info", place, "--json")
    assert json.loads(result.stdout)["datasets"] == json.loads(json.dumps(describe(place)))
    assert result.exit_code == 0


def test_a_plan_is_described_with_the_next_command(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "a plan"
    invoke("convert", "imagefolder", folder, place, "--to", "lmdb", "--plan-only")
    for done, command in ((0, f"work '{place}' --claim"), (1, f"commit '{place}'")):
        result = invoke("info", place)
        assert f"{done} of 1 tasks are done" in result.stdout
        assert result.stdout.endswith(f"  next      shardkit {command}\n")
        value = json.loads(invoke("info", place, "--json").stdout)
        assert (value["datasets"], value["plan"]) == ({}, {"done": done, "tasks": 1})
        invoke("work", place, "--claim")


def test_a_division_and_a_selection_are_reported(folder: Path, tmp_path: Path) -> None:
    source = open_source("dataset", make_dataset(folder, tmp_path / "made"), where='label == "cat"')
    convert(source, tmp_path / "sides", to="lmdb", val=0.3, stratify=True)
    result = invoke("info", tmp_path / "sides/val")
    assert '  where     label == "cat"\n' in result.stdout
    assert "  divided   val, by --stratify --val 0.3\n" in result.stdout


def test_a_recipe_is_reported(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(resize=(12, 10), resize_mode="crop", encode="jpeg", quality=70, orient=True)
    result = invoke("info", make_dataset(folder, tmp_path / "made", recipe=recipe, shuffle=False))
    for part in (
        "encoded as jpeg",
        "12x10 (crop, bicubic)",
        "quality 70",
        "EXIF orientation",
        "as found",
    ):
        assert part in result.stdout


def test_an_unlabeled_dataset_is_reported_as_such(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"a.jpg": jpeg()})
    result = invoke("info", make_dataset(tmp_path / "photos", tmp_path / "made"))
    assert "none: the dataset has no labels" in result.stdout
    assert "1 shard," in result.stdout


def test_noted_skipped_and_ignored_files_are_reported(tmp_path: Path) -> None:
    make_tree(
        tmp_path / "photos",
        {
            "a/turned.jpg": encoded(picture(), "JPEG", exif=exif(6)),
            "a/bad.jpg": b"junk",
            "a/notes.txt": b"text",
        },
    )
    result = invoke("info", make_dataset(tmp_path / "photos", tmp_path / "made", on_error="skip"))
    for part in (
        "1 image with an EXIF orientation",
        "1 bad file, listed in skipped.jsonl",
        "1 not an image",
    ):
        assert part in result.stdout


def test_many_classes_are_shortened(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"c{n:03d}/1.jpg": jpeg(4, 4) for n in range(45)}
    make_tree(tmp_path / "photos", files)
    place = make_dataset(tmp_path / "photos", tmp_path / "made")
    result = invoke("info", place)
    assert "c029" in result.stdout
    assert "c030" not in result.stdout
    assert "and 15 more (--json prints all)" in result.stdout
    assert len(json.loads(invoke("info", place, "--json").stdout)["datasets"][""]["classes"]) == 45


def test_each_split_is_reported(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train", each=2)
    make_tree(tmp_path / "photos/val", {"cat": None})
    place = make_dataset(tmp_path / "photos", tmp_path / "made")
    result = invoke("info", place)
    assert result.exit_code == 0
    assert str(place / "train") in result.stdout
    assert str(place / "val") in result.stdout
    assert list(json.loads(invoke("info", place, "--json").stdout)["datasets"]) == ["train", "val"]


def test_odd_class_names_are_escaped(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"a\nb\x1b[31m/1.jpg": jpeg(), "ü ö/1.jpg": jpeg()})
    result = invoke("info", make_dataset(tmp_path / "photos", tmp_path / "made"))
    assert "a\\nb" in result.stdout
    assert "\x1b" not in result.stdout
    assert "ü ö" in result.stdout


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.slow
def test_names_that_are_not_utf_8_are_shown(tmp_path: Path, to: str) -> None:
    make_tree(tmp_path / "photos\udcff", {"\udcfe/\udcfd.jpg": jpeg()})
    place = make_dataset(tmp_path / "photos\udcff", tmp_path / "made\udcfc", to=to)
    for options in ([], ["--json"]):
        result = run("info", place, *options)
        assert (result.returncode, result.stderr) == (0, "")


def test_a_missing_dataset_exits_with_2(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        result = run("info", place)
        assert result.returncode == 2
        assert "is not a shardkit dataset" in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["shardkit.json", "index/rows.npy"])
def test_a_damaged_dataset_exits_with_1(folder: Path, tmp_path: Path, name: str) -> None:
    place = make_dataset(folder, tmp_path / "made")
    (place / name).write_bytes(b"\x93NUMPY junk")
    result = run("info", place)
    assert result.returncode == 1
    assert result.stderr.startswith("shardkit: error: ")
    assert "Traceback" not in result.stderr


def test_images_that_are_too_small_are_counted(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(90, 40 + n) for n in range(6)}
    source, place = make_tree(tmp_path / "photos", files), tmp_path / "made"
    for size, text in {"43x80": "3 images are", "41x80": "1 image is", "40x80": ""}.items():
        options = ("--to", "lmdb", "--resize", size, "--force")
        for result in (
            invoke("convert", "imagefolder", source, place, *options),
            invoke("info", place),
        ):
            expected = f"{text} smaller than {size}; --enlarge scales them up"
            assert (expected in result.output) == bool(text)
            assert ("smaller" in result.output) == bool(text)
        small = open_dataset(place).manifest.notes.get("small", 0)
        assert small == int(text[:1] or 0)
