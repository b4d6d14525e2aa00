"""``repair``: damaged and missing files are rebuilt with their original digests."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, jpeg, make_folder, make_tree, tree
from refusals import refused
from repairing import cut, files_of, flip, healed, make, make_each, make_source
from stated import being_written, stated

from shardkit import UsageError, repair, verify

RECIPES: dict[str, dict[str, Any]] = {
    "copy": {},
    "jpeg": {"encode": "jpeg", "resize": "12x12", "resize_mode": "crop"},
    "raw": {"encode": "raw", "resize": "8x8", "resize_mode": "stretch"},
    "webp": {"encode": "webp", "resize": "9x9", "resize_mode": "stretch"},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only source."""
    return make_source(tmp_path_factory.mktemp("source") / "photos")


@pytest.fixture(scope="module")
def pristine(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The read-only dataset of ``photos`` in each format."""
    return make_each(photos, tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy of one dataset to damage."""
    return shutil.copytree(pristine / "lmdb", tmp_path / "made")


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_other(path: Path) -> None:
    path.write_bytes(jpeg())


def replace_by_link_to_folder(path: Path) -> None:
    path.unlink()
    path.symlink_to("..")


HARMS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "cut": cut,
    "flipped": flip,
    "a dead link": replace_by_link,
    "a FIFO": replace_by_fifo,
    "another file": replace_by_other,
    "a link to a folder": replace_by_link_to_folder,
}


@pytest.mark.parametrize(
    ("to", "recipe"),
    [*((to, "copy") for to in FORMATS), *zip(FORMATS, ("jpeg", "raw", "webp"), strict=True)],
)
def test_any_file_is_rebuilt(photos: Path, tmp_path: Path, to: str, recipe: str) -> None:
    place = make(photos, tmp_path / "made", to, **RECIPES[recipe])
    before, names = tree(place), files_of(place)
    assert len(names) == 4 + 5 + 2 or len(names) == 3 + 5 + 2
    for name in names if recipe == "copy" else names[:1]:
        flip(place / name)
        result = healed(place, photos, before)
        assert (result.files, result.intact) == ([name], len(names) - 1)


@pytest.mark.parametrize("harm", HARMS)
def test_any_file_is_rebuilt_whatever_is_in_its_place(photos: Path, place: Path, harm: str) -> None:
    before = tree(place)
    for name in (files_of(place)[1], "index/keys.npy", "skipped.jsonl"):
        HARMS[harm](place / name)
        assert healed(place, photos, before).files == [name]


def test_many_files_are_rebuilt_in_several_processes(photos: Path, place: Path) -> None:
    before, names = tree(place), files_of(place)
    for name in names:
        (place / name).unlink()
    shutil.rmtree(place / "index")

    result = healed(place, photos, before, workers=2)

    assert (result.files, result.intact) == (sorted(names), 0)
    assert verify(place, against=photos).ok is True


def test_random_damage_is_repaired(photos: Path, place: Path) -> None:
    before, names = tree(place), files_of(place)
    rng = random.Random(5)
    for _ in range(8):
        chosen = rng.sample(names, rng.randint(1, len(names)))
        for name in chosen:
            HARMS[rng.choice([*HARMS][:3])](place / name)
        assert healed(place, photos, before).files == sorted(chosen)


def test_a_dataset_of_the_first_release_is_repaired(tmp_path: Path) -> None:
    golden = Path(__file__).parents[2] / "golden"
    place = shutil.copytree(golden / "webdataset/labelled", tmp_path / "made")
    before = tree(place)
    for name in files_of(place):
        (place / name).unlink()
    assert healed(place, golden / "source", before).intact == 0


def test_intact_files_are_not_touched(photos: Path, place: Path) -> None:
    shard, *others = files_of(place)
    before = {name: (place / name).stat() for name in [*others, "shardkit.json"]}
    flip(place / shard)
    assert repair(place, photos).ok
    for name, status in before.items():
        after = (place / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), name


def test_an_intact_dataset_needs_no_source(photos: Path, place: Path, tmp_path: Path) -> None:
    before = tree(place)
    for _ in range(2):
        result = repair(place, tmp_path / "no such folder")
        assert (result.files, result.ok, result.intact) == ([], True, len(files_of(place)))
    flip(place / files_of(place)[0])
    assert healed(place, photos, before).files
    assert not healed(place, photos, before).files


@pytest.mark.parametrize("order", ["natural", "file"])
def test_reports_are_rebuilt_in_the_order_of_classes(tmp_path: Path, order: str) -> None:
    source = make_folder(tmp_path / "photos/train", ("c2", "c10"))
    make_tree(source, {"c2/a.txt": b"x", "c10/b.txt": b"x", "z.txt": b"x", "c10/bad.jpg": b"x"})
    make_folder(tmp_path / "photos/val", ("c10",))
    make_tree(tmp_path / "photos", {"LICENCE": b"x", "c10": b"x"})
    (tmp_path / "order").write_text("c2\nc10\n")
    options = {"shuffle": False, "shard_samples": 2}
    class_order = str(tmp_path / "order") if order == "file" else order
    make(tmp_path / "photos", tmp_path / "made", "hdf5", class_order=class_order, **options)
    before = tree(tmp_path / "made")
    for path in (tmp_path / "made").rglob("*.*"):
        if path.is_file() and path.name != "shardkit.json":
            path.unlink()

    result = healed(tmp_path / "made", tmp_path / "photos", before)

    assert {"train/ignored.jsonl", "train/skipped.jsonl", "val/shard-000001.h5"} <= {*result.files}


def test_one_split_is_repaired_alone_and_locks_all(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    place = make(tmp_path / "photos", tmp_path / "made", "webdataset")
    before = tree(place)
    cut(place / "val/shard-000000.tar")
    with being_written(place), refused(UsageError, place.name):
        repair(place / "val", tmp_path / "photos/val")
    shutil.rmtree(place / ".shardkit-work")
    assert repair(place / "val", tmp_path / "photos/val").files == ["shard-000000.tar"]
    assert tree(place) == before


def test_empty_splits_and_empty_shards_are_rebuilt(tmp_path: Path) -> None:
    source = make_tree(
        tmp_path / "photos/train",
        {f"a/{n}.jpg": jpeg(seed=n) if n > 3 else b"bad" for n in range(8)},
    )
    make_tree(tmp_path / "photos/val", {"b": None})
    place = make(source.parent, tmp_path / "made", "lmdb", shuffle=False)
    before = tree(place)
    assert [shard.rows for shard in stated(place / "train").shards] == [0, 4]
    for name in ("train/shard-000000.lmdb", "val/index/rows.npy"):
        (place / name).unlink()
    assert healed(place, source.parent, before).ok
