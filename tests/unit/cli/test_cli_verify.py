"""``shardkit verify`` and ``shardkit index``: exit codes and reports of damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import make_folder, run_main, tree
from refusals import refuses

from shardkit import convert, open_dataset

SOUND, DAMAGED, USAGE = 0, 1, 2


def ran(*words: object, code: int = SOUND) -> tuple[str, str]:
    """Run a command; return what it prints to stdout and stderr."""
    done = run_main(*words)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def verify(place: Path, *options: object, code: int = SOUND) -> tuple[str, str]:
    return ran("verify", place, "--workers", 1, *options, code=code)


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    convert(folder, tmp_path / "made", to="lmdb", shard_samples=3, workers=1)
    return tmp_path / "made"


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    make_folder(tmp_path / "splits/train", each=2)
    make_folder(tmp_path / "splits/val", each=2)
    convert(tmp_path / "splits", tmp_path / "made", to="hdf5", workers=1)
    return tmp_path / "made"


def damage(place: Path, row: int = 4) -> tuple[str, str, str]:
    """Flip a byte of the image in ``row``; return its key, its source path and its shard."""
    dataset = open_dataset(place, decode="bytes")
    image = dataset[row][0]
    for path in place.glob("shard-*"):
        content = bytearray(path.read_bytes())
        if (start := content.find(image)) >= 0:
            content[start + 20] ^= 0xFF
            path.write_bytes(content)
            return dataset.keys[row], dataset.paths[row], path.name
    raise AssertionError("no shard has it")


@pytest.mark.parametrize("level", ["quick", "full", "decode"])
def test_an_intact_dataset_exits_with_0(place: Path, level: str) -> None:
    (place / "README").write_bytes(b"x")
    said, errors = verify(place, "--level", level)
    assert said.startswith(f"{place}: intact ({level}: 2 shards")
    assert ("6 records" in said) == (level != "quick")
    assert ": README" in said  # it is not part of the dataset
    assert errors == ""
    assert verify(place, "--level", level, "--quiet") == ("", "")


def test_a_damaged_record_is_named_and_exits_with_1(place: Path) -> None:
    key, path, shard = damage(place)
    said, errors = verify(place, code=DAMAGED)
    (line,) = [line for line in errors.splitlines() if "row 4" in line]
    for part in ("damaged:", key, path, shard, "checksum"):
        assert part in line
    assert "2 findings" in said
    quiet = verify(place, "--quiet", code=DAMAGED)
    assert quiet[0] == ""
    assert line in quiet[1].splitlines()


def test_json_holds_everything_and_is_the_same_from_several_processes(place: Path) -> None:
    key, path, shard = damage(place)
    (place / "README").write_bytes(b"x")
    one, two = (
        json.loads(ran("verify", place, "--workers", workers, "--json", code=DAMAGED)[0])
        for workers in (1, 2)
    )
    assert one["findings"] == two["findings"]
    expected = {"ok": False, "level": "full", "datasets": 1, "shards": 2, "records": 6}
    assert expected.items() <= one.items()
    (named,) = [finding for finding in one["findings"] if finding["row"] is not None]
    assert (named["file"], named["key"], named["path"], named["row"]) == (shard, key, path, 4)
    assert one["extras"] == ["README"]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_damaged_files_beside_the_shards_are_named(place: Path, level: str) -> None:
    index = place / "index/rows.npy"
    content = index.read_bytes()
    index.write_bytes(b"")
    assert f"shardkit index {place}" in verify(place, "--level", level, code=DAMAGED)[1]
    index.write_bytes(content)
    text = (place / "shardkit.json").read_text()
    (place / "shardkit.json").write_text(text.replace('"cat"', '"cow"'))
    assert "shardkit.json" in verify(place, "--level", level, code=DAMAGED)[1]


def test_wrong_requests_exit_with_2(place: Path, tmp_path: Path) -> None:
    for words in (("verify", tmp_path / "nowhere"), ("index", tmp_path)):
        done = refuses(USAGE, *words, facts=("not a shardkit dataset",))
        assert done.stdout == ""
        assert done.stderr.startswith("shardkit: error: ")
        assert done.stderr.count("\n") == 1
    for options in ("--level thorough", "--workers 0", "--workers x", "--unknown"):
        assert options.split()[0] in ran("verify", place, *options.split(), code=USAGE)[1]
    assert "DATASET" in ran("verify", code=USAGE)[1]


def test_index_rebuilds_a_lost_index(place: Path) -> None:
    before = tree(place)
    shutil.rmtree(place / "index")
    said, _ = ran("index", place)
    assert said.startswith(f"{place}: index of 6 rows")
    assert tree(place) == before
    assert ran("index", place, "--quiet") == ("", "")
    _, _, shard = damage(place)
    refuses(DAMAGED, "index", place, facts=(shard, "shardkit verify"))


def test_index_rebuilds_each_splits_index(splits: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(splits / split / "index")
    assert ran("index", splits)[0].count("index of 4 rows") == 2
    verify(splits)
