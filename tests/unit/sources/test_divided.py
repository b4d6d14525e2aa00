"""Images divided into train, val and test: by path and seed, exactly by class, never by group."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import invoke, jpeg, make_tree, png, run_main, tree
from interrupted import stopped_at_any_step
from refusals import refused
from table import for_each

import shardkit
from shardkit import convert, open_dataset, open_source, repair, verify
from shardkit.dataset.manifest import load_manifest
from shardkit.errors import CorruptDataset, UsageError
from shardkit.sources.divided import Division, reopen

PATHS = [f"{'cat' if n % 5 else 'dog'}/{n % 7}/{n}.png" for n in range(70)]
LABELS = [int(not n % 5) for n in range(70)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {path: png(6, 5, number) for number, path in enumerate(PATHS)}
    return make_tree(tmp_path_factory.mktemp("photos") / "photos", files)


def test_the_division_never_changes() -> None:
    """Another one would move images of somebody's validation set to training."""
    sides = Division(val=0.1, test=0.1, seed=3).divide([f"{n}.jpg" for n in range(40)], [])
    assert sides["val"] == [0, 1, 5, 9, 11, 13, 14, 17, 25, 33, 35]
    assert sides["test"] == [3, 12]


def test_images_that_are_added_move_no_others() -> None:
    division = Division(val=0.3, seed=1)
    some, more = (division.divide(PATHS[:n], LABELS) for n in (40, 70))
    assert [row for row in more["val"] if row < 40] == some["val"]
    assert Division(val=0.3, test=0.2, seed=1).divide(PATHS, LABELS)["val"] == more["val"]
    assert Division(val=0.3, seed=2).divide(PATHS, LABELS)["val"] != more["val"]


def test_stratified_shares_are_exact() -> None:
    sides = Division(val=0.1, test=0.25, stratify=True).divide(PATHS, LABELS)
    assert sorted(itertools.chain(*sides.values())) == list(range(70))
    counts = {side: np.bincount(np.array(LABELS)[rows]).tolist() for side, rows in sides.items()}
    assert counts == {"train": [36, 9], "val": [6, 1], "test": [14, 4]}


@for_each(
    ("labels", "val"),
    [
        (sorted(range(10)) * 4, 4),
        ([*range(675), *range(125)], 80),
        ([*range(700)] + [0] * 100, 80),
    ],
)
@for_each("seed", [0, 1])
def test_small_classes_make_up_for_one_another(labels: list[int], val: int, seed: int) -> None:
    paths = [f"{n}.png" for n in range(len(labels))]
    for test in (0.0, 0.1):
        sides = Division(val=0.1, test=test, stratify=True, seed=seed).divide(paths, labels)
        assert [len(sides[name]) for name in ("val", "test") if name in sides] == (
            [val, val] if test else [val]
        )
        counts = np.bincount(labels)
        of_val = np.bincount(np.array(labels)[sides["val"]], minlength=len(counts))
        assert (abs(of_val - 0.1 * counts) <= 1).all()


def test_groups_that_make_a_side_too_large_are_a_warning(tmp_path: Path) -> None:
    files = {f"{n % 2}/{n}.png": png(6, 5, n) for n in range(40)}
    photos = make_tree(tmp_path / "photos", files)
    reason = r"val has 20 of 40 images \(50.0%\) instead of the requested 30.0%"
    with pytest.warns(UserWarning, match=reason):
        convert(photos, tmp_path / "x", to="lmdb", val=0.3, stratify=True, group="folder")


@for_each("stratify", [False, True])
def test_a_group_is_never_on_two_sides(stratify: bool) -> None:
    groups = [str(n % 23) for n in range(70)]
    sides = Division(val=0.3, test=0.2, stratify=stratify, group="x").divide(groups, LABELS)
    of = [{groups[row] for row in rows} for rows in sides.values()]
    assert all(of)
    assert sum(map(len, of)) == len(set().union(*of)) == 23
    assert sorted(itertools.chain(*sides.values())) == list(range(70))


@pytest.mark.slow
def test_a_conversion_divides_its_source(photos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "to": "lmdb",
        "val": 0.2,
        "test": 0.1,
        "stratify": True,
        "shard_samples": 9,
    }
    made = convert(photos, tmp_path / "made", **options)
    assert {name: each.rows for name, each in made.manifests.items()} == {
        "train": 49,
        "val": 14,
        "test": 7,
    }
    assert convert(photos, tmp_path / "made", **options).unchanged
    convert(photos, tmp_path / "two", **options, workers=2)
    before = tree(tmp_path / "made")
    assert tree(tmp_path / "two") == before
    for place in (tmp_path / "made", tmp_path / "made/val"):
        assert verify(place, against=photos).findings == []
    (tmp_path / "made/train/shard-000003.lmdb").unlink()
    assert repair(tmp_path / "made", photos).findings == []
    assert tree(tmp_path / "made") == before
    rows = shardkit.split(whole(photos, tmp_path), val=0.2, test=0.1, stratify=True)
    paths = open_dataset(tmp_path / "whole").paths
    for name, each in rows.items():
        listed = sorted(paths[row] for row in each)
        assert listed == sorted(open_dataset(tmp_path / "made" / name).paths)


def whole(photos: Path, place: Path) -> Path:
    convert(photos, place / "whole", to="hdf5")
    return place / "whole"


@pytest.mark.filterwarnings("ignore:val has")
def test_folders_stay_together(photos: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    done = invoke(
        "convert", "imagefolder", photos, made, "--to", "lmdb", "--val", 0.3, "--group", "folder"
    )
    assert done.exit_code == 0, done.output
    train, val = ({path.rpartition("/")[0] for path in open_dataset(made / n).paths} for n in NAMES)
    assert train
    assert val
    assert not train & val


NAMES = ("train", "val")


@pytest.mark.filterwarnings("ignore:val has")
def test_samples_are_divided_by_a_column(tmp_path: Path) -> None:
    samples = [{"image": png(6, 5, n), "patient": f"p{n % 9}", "age": n % 9} for n in range(45)]
    convert(samples, tmp_path / "all", to="lmdb")
    for group in ("patient", "age"):
        rows = shardkit.split(tmp_path / "all", val=0.3, group=group)
        dataset = open_dataset(tmp_path / "all")
        sides = [set(dataset.column("patient")[each]) for each in rows.values()]
        assert not sides[0] & sides[1]
        assert len(sides[0] | sides[1]) == 9
    with refused(UsageError, "'blood'"):
        shardkit.split(tmp_path / "all", val=0.3, group="blood")
    with refused(UsageError, "list of 45 samples", "Convert them first", "split --group patient"):
        convert(samples, tmp_path / "x", to="lmdb", val=0.3, group="patient")
    with refused(UsageError, "stratify=True"):
        convert(samples, tmp_path / "x", to="lmdb", val=0.3, stratify=True)
    convert(samples, tmp_path / "divided", to="lmdb", val=0.3, workers=2)
    assert verify(tmp_path / "divided", against=samples).findings == []


def test_lists_of_two_divisions_are_never_together(photos: Path, tmp_path: Path) -> None:
    """However early a run ends that replaces them."""
    place, out = whole(photos, tmp_path), tmp_path / "out"
    command = ("split", place, "--out", out, "--force", "--val", 0.5, "--seed")
    former = shardkit.split(place, val=0.2, test=0.2, seed=5)
    rows = shardkit.split(place, val=0.5, seed=6)
    states = []
    for after in itertools.count():
        assert run_main(*command[:-2], 0.2, "--test", 0.2, "--seed", 5).returncode == 0
        with stopped_at_any_step(after):
            done = run_main(*command, 6)
        lists = {file.stem: np.loadtxt(file, dtype=int).tolist() for file in out.glob("*.txt")}
        states.append(
            [
                all(name in each and lists[name] == each[name].tolist() for name in lists)
                for each in (former, rows)
            ]
        )
        assert any(states[-1]), after
        if done.returncode == 0:
            break
        assert run_main(*command, 6).returncode == 0
        assert sorted(os.listdir(out)) == ["train.txt", "val.txt"]
    assert len(states) > 5


def test_lists_select_rows_again(photos: Path, tmp_path: Path) -> None:
    place = whole(photos, tmp_path)
    done = invoke("split", place, "--val", 0.2, "--seed", 5)
    assert done.exit_code == 0, done.output
    rows = shardkit.split(place, val=0.2, seed=5)
    for side in NAMES:
        file = tmp_path / f"whole-split/{side}.txt"
        assert np.loadtxt(file, dtype=int).tolist() == rows[side].tolist()
        convert(open_source("dataset", place, rows=file), tmp_path / side, to="lmdb")
        chosen = open_dataset(place).select(rows[side])
        assert list(open_dataset(tmp_path / side).keys) == list(chosen.keys)
    with refused(UsageError):
        open_source("dataset", tmp_path / "val", rows=file).scan()
    assert invoke("split", place, "--val", 0.2, "--seed", 5).exit_code == 0
    assert isinstance(invoke("split", place, "--val", 0.3).exception, UsageError)
    assert invoke("split", place, "--val", 0.2, "--test", 0.2, "--force").exit_code == 0
    assert "test.txt is a list" in str(invoke("split", place, "--val", 0.3).exception)
    assert invoke("split", place, "--val", 0.3, "--force").exit_code == 0
    assert not (tmp_path / "whole-split/test.txt").exists()
    for words in (("--out", photos), ("--out", photos, "--force")):
        foreign = invoke("split", place, "--val", 0.2, *words)
        assert "contains other files" in str(foreign.exception)
    assert not list(photos.glob("*.txt"))
    assert verify(place).extras == []
    told = run_main("split", place, "--val", 0.3, "--to", "hdf5", "--out", tmp_path / "two")
    assert told.returncode == 0, told.stderr
    assert verify(tmp_path / "two", against=place).findings == []
    for others, fact, option in (
        ("two", "contains a dataset;", ()),
        ("whole-split", "contains lists of rows;", ("--to", "lmdb")),
        ("whole", "is the dataset, or inside it;", ()),
        ("whole/lists", "is the dataset, or inside it;", ()),
    ):
        both = invoke("split", place, "--val", 0.3, "--out", tmp_path / others, *option)
        assert f"{others} {fact} choose another folder with --out" in str(both.exception)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"val": 1.0}, ("0", "1")),
        ({"val": -0.1}, ()),
        ({"val": 0.5, "test": 0.5}, ()),
        ({"stratify": True}, ("val=", "test=")),
        ({"group": "folder"}, ("val=", "test=")),
        ({"val": 1e-9}, ()),
        ({"val": 0.3, "group": "person"}, ("group='person'",)),
    ],
)
def test_wrong_options_are_refused(
    photos: Path, tmp_path: Path, options: dict[str, object], reason: tuple[str, ...]
) -> None:
    with refused(UsageError, *reason):
        convert(photos, tmp_path / "made", to="lmdb", **options)  # type: ignore[arg-type]


def test_a_source_with_splits_is_refused(tmp_path: Path) -> None:
    make_tree(
        tmp_path / "s", {f"{side}/a/{n}.jpg": jpeg(8, 8, n) for side in NAMES for n in (1, 2)}
    )
    with refused(UsageError, "/train", "val="):
        convert(tmp_path / "s", tmp_path / "made", to="lmdb", val=0.1)


@for_each(
    "division",
    [
        {"val": 0.1, "side": "test"},
        {"val": 7, "side": "val"},
        {"val": 0.1},
        {"val": 0.1, "side": "val", "code": "x"},
        {"val": 0.1, "side": "val", "seed": "1"},
        {"val": 0.1, "side": "val", "group": ["a"]},
    ],
)
def test_a_damaged_description_is_refused(division: dict[str, object]) -> None:
    with refused(CorruptDataset):
        reopen(lambda _: pytest.fail("opened"), {"val": {"name": "x", "division": division}})


def test_the_manifest_states_the_division(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "made", to="lmdb", val=0.2, seed=9)
    assert load_manifest(tmp_path / "made/val").source["division"] == {
        "val": 0.2,
        "test": 0.0,
        "stratify": False,
        "group": None,
        "seed": 9,
        "side": "val",
    }
