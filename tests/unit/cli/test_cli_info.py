"""``shardkit info``: the description as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, exif, jpeg, make_folder, make_tree, run_main
from refusals import refuses

from shardkit import convert, describe, open_dataset, open_source


def info(place: Path) -> str:
    """Return what the command prints as text."""
    done = run_main("info", place)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def told(place: Path) -> dict[str, dict[str, object]]:
    """Return the datasets that the command describes as JSON."""
    done = run_main("info", place, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, dict[str, object]] = json.loads(done.stdout)["datasets"]
    return found


@pytest.mark.parametrize("to", FORMATS)
def test_a_dataset_is_described(folder: Path, tmp_path: Path, to: Any) -> None:
    place = tmp_path / "made"
    convert(folder, place, to=to, shard_samples=4, workers=1)
    lines = info(place).splitlines()
    assert lines[0] == str(place)
    for fact in (
        *(f"{to}, 2 shards", "6 (4 jpg, 2 png)", "imagefolder photos, ", "seed 0"),
        *("bytes unchanged", "decode", json.loads((place / "shardkit.json").read_text())["digest"]),
    ):
        assert any(fact in line for line in lines), fact
    assert [line.split() for line in lines[-2:]] == [["cat", "3"], ["dog", "3"]]
    assert told(place) == json.loads(json.dumps(describe(place)))


def test_the_dtype_of_images_that_are_not_rgb_is_shown(folder: Path, tmp_path: Path) -> None:
    for pixels, shown in (("rgb", False), ("gray", True)):
        convert(folder, tmp_path / pixels, to="lmdb", pixels=pixels, workers=1)  # type: ignore[arg-type]
        assert ("uint8" in info(tmp_path / pixels)) == shown


def test_a_plan_is_described_with_the_next_command(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "a plan"
    run_main("convert", "imagefolder", folder, place, "--to", "lmdb", "--plan-only")
    for done, command in ((0, f"work '{place}' --claim"), (1, f"commit '{place}'")):
        shown = info(place)
        assert f"{done} of 1 tasks" in shown
        assert shown.endswith(f"  next      shardkit {command}\n")
        value = json.loads(run_main("info", place, "--json").stdout)
        assert (value["datasets"], value["plan"]) == ({}, {"done": done, "tasks": 1})
        run_main("work", place, "--claim")


def test_a_division_and_a_selection_are_reported(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "made", to="lmdb", workers=1)
    source = open_source("dataset", tmp_path / "made", where='label == "cat"')
    convert(source, tmp_path / "sides", to="lmdb", val=0.3, stratify=True, workers=1)
    shown = info(tmp_path / "sides/val")
    assert '  where     label == "cat"\n' in shown
    assert "  divided   val, by --stratify --val 0.3\n" in shown


def test_recipe_notes_and_files_left_out_are_reported(tmp_path: Path) -> None:
    files = {"a/t.jpg": jpeg(exif=exif(6)), "a/bad.jpg": b"x", "a/notes.txt": b"x"}
    options: dict[str, Any] = {"resize": "12x10", "encode": "jpeg", "quality": 70, "shuffle": False}
    kept, changed = tmp_path / "kept", tmp_path / "changed"
    for place, more in ((kept, dict[str, Any]()), (changed, {"orient": True, **options})):
        source = make_tree(tmp_path / "photos", {**files})
        convert(source, place, to="lmdb", on_error="skip", workers=1, **more)
        assert "1 bad file" in info(place)
        assert "skipped.jsonl" in info(place)
        assert "1 not an image" in info(place)
    assert "1 image with an EXIF orientation" in info(kept)
    for fact in ("jpeg", "12x10 (crop, bicubic)", "quality 70", "EXIF", "as found"):
        assert fact in info(changed)


def test_an_unlabeled_dataset_is_reported_as_such(tmp_path: Path) -> None:
    convert(make_tree(tmp_path / "p", {"a.jpg": jpeg()}), tmp_path / "made", to="lmdb", workers=1)
    assert "no labels" in info(tmp_path / "made")
    assert "1 shard," in info(tmp_path / "made")


def test_many_classes_are_shortened_and_odd_names_escaped(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"c{n:03d}/1.jpg": jpeg(4, 4) for n in range(43)}
    files |= {"a\nb\x1b[31m/1.jpg": jpeg(), "ü ö/1.jpg": jpeg()}
    place = tmp_path / "made"
    convert(make_tree(tmp_path / "photos", files), place, to="lmdb", class_order="plain", workers=1)
    shown = info(place)
    assert "a\\nb" in shown
    assert "\x1b" not in shown
    assert "c028" in shown
    assert "c029" not in shown
    assert "and 15 more (--json" in shown
    classes = told(place)[""]["classes"]
    assert isinstance(classes, dict)
    assert {"ü ö", "a\nb\x1b[31m", "c042"} < {*classes}
    assert len(classes) == 45


def test_each_split_is_reported(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train", each=2)
    make_tree(tmp_path / "photos/val", {"cat": None})
    convert(tmp_path / "photos", tmp_path / "made", to="lmdb", workers=1)
    assert list(told(tmp_path / "made")) == ["train", "val"]
    for split in ("train", "val"):
        assert str(tmp_path / "made" / split) in info(tmp_path / "made")


@pytest.mark.parametrize("to", FORMATS)
def test_names_that_are_not_utf_8_are_shown(tmp_path: Path, to: Any) -> None:
    source = make_tree(tmp_path / "photos\udcff", {"\udcfe/\udcfd.jpg": jpeg()})
    place = tmp_path / "made\udcfc"
    convert(source, place, to=to, workers=1)
    assert "\\udcfc" in info(place)
    assert list(told(place)) == [""]
    assert open_dataset(place).classes == ["\udcfe"]


def test_what_is_no_dataset_or_damaged_is_refused(folder: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert refuses(2, "info", place, facts=("not a shardkit dataset",)).stdout == ""
    for name in ("shardkit.json", "index/rows.npy"):
        convert(folder, tmp_path / name[0], to="lmdb", workers=1)
        (tmp_path / name[0] / name).write_bytes(b"\x93NUMPY junk")
        done = refuses(1, "info", tmp_path / name[0], facts=(name,))
        assert done.stderr.startswith("shardkit: error: ")
        assert done.stderr.count("\n") == 1
