"""The command that doctor prints makes the same labels and rows, and changes what was to change."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, invoke, jpeg, make_tree

from shardkit import open_dataset
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.manifest import Manifest, load_any_manifest
from shardkit.measure.doctor.command import (
    Made,
    class_order,
    classes_command,
    command_words,
    merged,
)
from shardkit.measure.doctor.place import place_of
from shardkit.measure.runner.material import open_split

SMALLER = Recipe(resize=(12, 12)).describe()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Classes whose natural order is not the plain one; the current folder holds them."""
    monkeypatch.chdir(tmp_path)
    files: dict[str, bytes | None] = {
        f"class{name}/{n}.jpg": jpeg(40, 30, 10 * name + n) for name in (2, 10, 1) for n in range(3)
    }
    return make_tree(tmp_path / "photos", files)


def made_of(path: Path) -> Made:
    return Made(**place_of(open_split(str(path), "torch", None), [])["made"])


def run(words: list[str]) -> None:
    done = invoke(*words[1:])
    assert done.exit_code == 0, done.output


def manifest_of(path: Path) -> Manifest:
    found = load_any_manifest(path)
    assert isinstance(found, Manifest)
    return found


MANY = "--class-order natural --seed 7 --quality 61 --limit 7 --orient --background #102030"
OTHER = "--no-shuffle --resize 20x24 --resize-mode pad --filter box --encode webp --check header"


@pytest.mark.parametrize("options", [MANY, OTHER])
@pytest.mark.slow
def test_all_else_stays_as_it_was_made(photos: Path, options: str) -> None:
    run(["shardkit", "convert", "imagefolder", "photos", "made", "--to", "lmdb", *options.split()])
    old = made_of(Path("made"))
    words = command_words(SMALLER, "photos", "again", old)
    run(words)
    before, after = manifest_of(Path("made")), manifest_of(Path("again"))

    assert after.classes == before.classes
    assert after.class_counts == before.class_counts
    assert after.source == before.source
    changed = {"resize", "resize_mode", "enlarge"}
    assert {k: v for k, v in after.recipe.items() if k not in changed} == {
        k: v for k, v in before.recipe.items() if k not in changed
    }
    assert min(after.recipe["resize"]) == 12
    first, second = (open_dataset(path, decode="bytes") for path in ("made", "again"))
    assert [first[n][1] for n in range(len(first))] == [second[n][1] for n in range(len(second))]


@pytest.mark.slow
def test_an_order_of_its_own_takes_a_file_that_is_written_before(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    Path("order").write_text("class2\nclass1\nempty\nclass10\n")
    begin = ["shardkit", "convert", "imagefolder", "photos"]
    run([*begin, "made", "--to", "lmdb", "--class-order", "order"])
    old = made_of(Path("made"))
    writing = classes_command(old)
    subprocess.run(["sh", "-c", writing], check=True, timeout=DEADLINE)
    run(command_words(SMALLER, "photos", "again", old))

    assert manifest_of(Path("again")).classes == ("class2", "class1", "empty", "class10")


@pytest.mark.slow
def test_splits_are_converted_as_splits(photos: Path) -> None:
    make_tree(Path("parts"), {f"{name}/a/0.jpg": jpeg(40, 30, 1) for name in ("one", "two")})
    run(shlex.split("shardkit convert imagefolder parts made --to lmdb --splits"))
    words = command_words(SMALLER, "parts", "again", made_of(Path("made")))
    run(words)

    assert "--splits" in words
    assert Path("again/two/shardkit.json").exists()


def made(classes: list[str] | None, counts: list[int] | None = None) -> Made:
    counts = [1] * len(classes or []) if counts is None else counts
    return Made(path="my made", format="lmdb", classes=classes, counts=counts)


def test_the_order_of_classes_is_told() -> None:
    assert class_order(made(None)) == "plain"
    assert class_order(made(["a10", "a2"])) == "plain"
    assert class_order(made(["a2", "a10"])) == "natural"
    assert class_order(made(["b", "a"])) == "CLASSES"
    assert class_order(made(["a", "b"], [1, 0])) == "CLASSES"  # it may have no folder
    assert classes_command(made(["a"])) == ""


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(), []),
        (Recipe(resize=(256, 256)), ["--resize", "256"]),
        (
            Recipe(resize=(256, 256), resize_mode="crop", encode="raw", enlarge=True),
            ["--resize", "256x256", "--encode", "raw", "--enlarge"],
        ),
        (Recipe(encode="jpeg"), ["--encode", "jpeg"]),
    ],
)
def test_a_folder_is_converted_by_the_recipe_alone(recipe: Recipe, words: list[str]) -> None:
    found = command_words(
        recipe.describe(), "my photos", "made", Made(path="my photos", format="hdf5")
    )

    begin = ["shardkit", "convert", "imagefolder", "my photos", "made", "--to", "hdf5"]
    assert found == [*begin, *words]


@pytest.mark.parametrize(
    ("old", "change", "new"),
    [
        ({"resize": (512, 384), "resize_mode": "crop"}, {"resize": (256, 256)}, (341, 256)),
        ({"resize": (512, 512)}, {"encode": "jpeg"}, (512, 512)),
        ({"encode": "webp", "quality": 70}, {"resize": (256, 256)}, (256, 256)),
    ],
)
def test_what_was_done_before_is_done_again(
    old: dict[str, Any], change: dict[str, Any], new: tuple[int, int]
) -> None:
    found = merged(Recipe(**change).describe(), Recipe(**old).describe())

    assert found.resize == new
    assert found.quality == old.get("quality")
    assert found.encode == change.get("encode", old.get("encode", "keep"))
    assert found.resize_mode == old.get("resize_mode", "shorter")
