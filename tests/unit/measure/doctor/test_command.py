"""The command for another conversion keeps labels and rows, and changes only what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, jpeg, make_tree, run_main

from shardkit import attach, open_dataset, open_source
from shardkit.dataset.manifest import load_manifest
from shardkit.measure.doctor.command import Provenance, command_words, merged, provenance_of
from shardkit.recipe import Recipe

SMALLER = Recipe(resize=12)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Classes whose natural order is not the plain one, in the current folder."""
    monkeypatch.chdir(tmp_path)
    files: dict[str, bytes | None] = {
        f"class{name}/{n}.jpg": jpeg(40, 30, 10 * name + n) for name in (2, 10, 1) for n in range(3)
    }
    return make_tree(tmp_path / "photos", files)


def convert(*words: str) -> None:
    done = run_main("convert", "imagefolder", *words, "--workers", 1)
    assert done.returncode == 0, done.stderr


def convert_again(change: Recipe, path: str = "made") -> Path:
    """Run the command for a dataset, and return the new one."""
    words = command_words(change, provenance_of(path, Path(path)))
    words[words.index("SRC")] = "photos"
    convert(*words[3:])
    return Path(words[4])


MANY = "--class-order natural --seed 7 --quality 61 --limit 7 --orient --background #102030"
OTHER = "--no-shuffle --resize 20x24 --resize-mode pad --filter box --encode webp --check header"


@pytest.mark.parametrize("options", [MANY, OTHER])
def test_other_options_stay(photos: Path, options: str) -> None:
    convert("photos", "made", "--to", "lmdb", *options.split())
    again = convert_again(SMALLER)
    before, after = load_manifest(Path("made")), load_manifest(again)

    assert after.classes == before.classes
    assert after.class_counts == before.class_counts
    assert after.source == before.source
    changed = {"resize", "resize_mode", "enlarge"}
    assert {k: v for k, v in after.recipe.items() if k not in changed} == {
        k: v for k, v in before.recipe.items() if k not in changed
    }
    assert min(after.recipe["resize"]) == 12
    assert open_dataset(again).targets.tolist() == open_dataset("made").targets.tolist()


@pytest.mark.slow
def test_a_custom_class_order_needs_a_file(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    Path("order").write_text("class2\nclass1\nempty\nclass10\n")
    convert("photos", "made", "--to", "lmdb", "--class-order", "order")
    source, classes = provenance_of("made", Path("made")).hints("again")
    _, _, writing = classes.partition(": ")
    subprocess.run(["sh", "-c", writing], check=True, timeout=DEADLINE)

    assert source == "SRC is the folder that made was converted from: photos"
    assert load_manifest(convert_again(SMALLER)).classes == ("class2", "class1", "empty", "class10")


def test_options_of_other_sources_are_left_to_the_user() -> None:
    source = {"kind": "webdataset", "name": "x.tar", "order": "shuffled", "seed": 7, "label": "cls"}
    made = Provenance(path="made", format="lmdb", source=source, classes=["b", "a"], counts=[1, 0])
    words = command_words(Recipe(), made)
    assert words[:4] == ["shardkit", "convert", "webdataset", "SRC"]
    assert words[-2:] == ["--seed", "7"]
    assert "--class-order" not in words
    assert made.hints("again") == [
        "SRC is what made was converted from: x.tar",
        "add the options that were given then (label=cls)",
    ]


@pytest.mark.parametrize(
    ("classes", "counts", "order"),
    [
        (None, [], "plain"),
        (["a10", "a2"], [1, 1], "plain"),
        (["a2", "a10"], [1, 1], "natural"),
        (["b", "a"], [1, 1], "CLASSES"),
        (["a", "b"], [1, 0], "CLASSES"),  # it may have no folder
    ],
)
def test_the_order_of_classes_is_found(
    classes: list[str] | None, counts: list[int], order: str
) -> None:
    assert (
        Provenance(
            path="made",
            format="lmdb",
            source={"kind": "imagefolder"},
            classes=classes,
            counts=counts,
        ).class_order()
        == order
    )


@pytest.mark.parametrize(
    ("recipe", "target", "options"),
    [
        (Recipe(), "my photos-shards", ""),
        (Recipe(resize=256), "my photos-256", "--resize 256"),
        (
            Recipe(resize=(256, 256), resize_mode="crop", encode="raw", enlarge=True),
            "my photos-raw256",
            "--resize 256x256 --enlarge --encode raw",
        ),
        (Recipe(encode="jpeg"), "my photos-jpeg", "--encode jpeg"),
    ],
)
def test_a_folder_needs_only_the_recipe(recipe: Recipe, target: str, options: str) -> None:
    made = Provenance(path="my photos", format="lmdb", source={"kind": "imagefolder"}, folder=True)

    start = ["shardkit", "convert", "imagefolder", "my photos", target, "--to", "lmdb"]
    assert command_words(recipe, made) == [*start, *options.split()]
    assert made.hints("new") == ["then: make_loader(open_dataset('new', ...), ...)"]


def test_a_split_stands_for_all() -> None:
    words = command_words(
        SMALLER,
        Provenance(path="made/train", format="lmdb", source={"kind": "imagefolder"}, splits=True),
    )

    assert words[3:] == [
        "SRC",
        f"{Path.cwd()}/made-12",
        "--to",
        "lmdb",
        "--resize",
        "12",
        "--splits",
    ]


@pytest.mark.parametrize(
    ("old", "change", "new"),
    [
        ({"resize": (512, 384), "resize_mode": "crop"}, {"resize": 256}, (341, 256)),
        ({"resize": 512}, {"encode": "jpeg"}, (512, 512)),
        ({"encode": "webp", "quality": 70}, {"resize": 256}, (256, 256)),
    ],
)
def test_recipes_merge(old: dict[str, Any], change: dict[str, Any], new: tuple[int, int]) -> None:
    found = merged(Recipe(**change), Recipe(**old).describe())

    assert found.resize == new
    assert found.quality == old.get("quality")
    assert found.encode == change.get("encode", old.get("encode", "keep"))
    assert found.resize_mode == old.get("resize_mode", "shorter")


def test_a_folder_in_place_becomes_shards(photos: Path) -> None:
    attach(open_source("imagefolder", photos), "index")
    words = command_words(SMALLER, provenance_of("index", Path("index")))
    assert words[words.index("--to") + 1] == "webdataset"
