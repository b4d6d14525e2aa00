"""The command for another conversion keeps labels, order and fields, and changes the images."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import jpeg, make_tree, run_main

from shardkit import attach, open_dataset, open_source
from shardkit.measure.doctor.command import Convertible, convertible
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
    done = run_main("convert", *words, "--workers", 1)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("attached", [False, True])
def test_labels_and_order_stay(photos: Path, attached: bool) -> None:
    if attached:
        attach(open_source("imagefolder", photos), "made")
    else:
        options = "--class-order natural --seed 7 --limit 7 --resize 30x20 --resize-mode stretch"
        convert("imagefolder", "photos", "made", "--to", "hdf5", *options.split())
    found = convertible("made", Path("made"))
    words = found.words(SMALLER)
    convert(*words[2:])

    before, after = open_dataset("made"), open_dataset("made-12")
    assert after.classes == before.classes
    assert after.targets.tolist() == before.targets.tolist()
    assert [*after.keys] == [*before.keys]
    assert after.manifest.format == ("webdataset" if attached else "hdf5")
    sizes = {image.size for image, _ in map(after.__getitem__, range(len(after)))}
    assert sizes == {(16, 12)} if attached else {(12, 18)}
    assert ("loses less" in found.hints("made-12")[-1]) == (not attached)


def test_a_split_stands_for_all(photos: Path) -> None:
    convert("imagefolder", "photos", "made", "--to", "lmdb", "--val", "0.4", "--stratify")
    words = convertible("made/train", Path("made/train")).words(SMALLER)
    convert(*words[2:])

    assert words[4] == str(Path.cwd() / "made-12")
    for split in ("train", "val"):
        assert len(open_dataset(f"made-12/{split}")) == len(open_dataset(f"made/{split}"))


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
    made = Convertible(kind="imagefolder", path="my photos", format="lmdb")

    start = ["shardkit", "convert", "imagefolder", "my photos", target, "--to", "lmdb"]
    assert made.words(recipe) == [*start, *options.split()]
    assert made.hints("new") == ["then: make_loader(open_dataset('new', ...), ...)"]
