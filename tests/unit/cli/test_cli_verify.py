"""``shardkit verify`` and ``shardkit index``: exit codes and reports of damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import invoke, make_folder, make_tree, png, run_main

from shardkit import open_dataset
from shardkit.conversion.convert import convert
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import CorruptDataset, UsageError

CODES = {"sound": 0, "damaged": 1, "usage": 2}


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    convert(folder, tmp_path / "made", to="lmdb", shard_samples=3)
    return tmp_path / "made"


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    make_folder(tmp_path / "splits/train", each=2)
    make_folder(tmp_path / "splits/val", each=2)
    convert(tmp_path / "splits", tmp_path / "made", to="hdf5")
    return tmp_path / "made"


def damage(place: Path, row: int = 4) -> tuple[str, str, str]:
    """Flip a byte of the image in ``row``; return its key, its source path and its shard."""
    dataset = open_dataset(place)
    starts = np.cumsum([0, *(shard.rows for shard in dataset.manifest.shards)])
    shard = int(np.searchsorted(starts, row, side="right")) - 1
    name = dataset.manifest.shards[shard].name
    content = bytearray((place / name).read_bytes())
    content[int(dataset._shards.rows["offset"][row]) + 20] ^= 0xFF
    (place / name).write_bytes(content)
    return dataset.keys[row], dataset.paths[row], name


@pytest.mark.parametrize("level", ["quick", "full", "decode"])
def test_an_intact_dataset_exits_with_0(place: Path, level: str) -> None:
    result = invoke("verify", place, "--level", level, "--workers", 1)
    assert result.exit_code == CODES["sound"]
    assert result.stdout.startswith(f"{place}: intact ({level}: 2 shards")
    assert ("6 records" in result.stdout) == (level != "quick")
    assert result.stderr == ""


def test_a_damaged_record_is_named_and_exits_with_1(place: Path) -> None:
    key, path, shard = damage(place)
    result = invoke("verify", place, "--workers", 1)
    assert result.exit_code == CODES["damaged"]
    (line,) = [line for line in result.stderr.splitlines() if "row 4" in line]
    for part in ("damaged:", key, path, shard, "checksum"):
        assert part in line
    assert "2 findings" in result.stdout


def test_several_processes_report_the_same(place: Path) -> None:
    damage(place)
    one = invoke("verify", place, "--workers", 1, "--json")
    two = invoke("verify", place, "--workers", 2, "--json")
    assert json.loads(one.stdout)["findings"] == json.loads(two.stdout)["findings"]
    assert one.exit_code == two.exit_code == CODES["damaged"]


def test_json_holds_everything_and_nothing_else_is_printed(place: Path) -> None:
    key, path, shard = damage(place)
    (place / "README").write_bytes(b"x")
    result = invoke("verify", place, "--workers", 1, "--json")
    value: dict[str, Any] = json.loads(result.stdout)
    assert (value["ok"], value["level"], value["datasets"], value["shards"], value["records"]) == (
        False,
        "full",
        1,
        2,
        6,
    )
    (named,) = [finding for finding in value["findings"] if finding["row"] is not None]
    assert (named["file"], named["key"], named["path"], named["row"]) == (shard, key, path, 4)
    assert value["extras"] == ["README"]
    assert result.exit_code == CODES["damaged"]


def test_quiet_prints_nothing_and_sets_the_exit_code(place: Path) -> None:
    sound = invoke("verify", place, "--quiet", "--workers", 1)
    assert (sound.output, sound.exit_code) == ("", CODES["sound"])
    damage(place)
    damaged = invoke("verify", place, "--quiet", "--workers", 1)
    assert (damaged.output, damaged.exit_code) == ("", CODES["damaged"])


def test_foreign_files_are_reported(place: Path) -> None:
    (place / "README").write_bytes(b"x")
    result = invoke("verify", place, "--workers", 1)
    assert result.exit_code == CODES["sound"]
    assert "not part of the dataset: README" in result.stdout


@pytest.mark.parametrize("level", ["quick", "full"])
def test_an_edited_manifest_exits_with_1(place: Path, level: str) -> None:
    text = (place / MANIFEST_NAME).read_text()
    (place / MANIFEST_NAME).write_text(text.replace('"cat"', '"cow"'))
    result = invoke("verify", place, "--level", level)
    assert result.exit_code == CODES["damaged"]
    assert MANIFEST_NAME in result.stderr


def test_a_damaged_index_names_its_remedy(place: Path) -> None:
    (place / "index/rows.npy").write_bytes(b"")
    result = invoke("verify", place, "--level", "quick")
    assert result.exit_code == CODES["damaged"]
    assert f"shardkit index {place}" in result.stderr


def test_all_splits_are_verified(splits: Path) -> None:
    result = invoke("verify", splits, "--workers", 1)
    assert result.exit_code == CODES["sound"]
    assert "8 records" in result.stdout
    key, path, shard = damage(splits / "val", row=1)
    result = invoke("verify", splits, "--workers", 1)
    assert result.exit_code == CODES["damaged"]
    assert f"val/{shard}: record {key} (row 1, from {path})" in result.stderr


@pytest.mark.parametrize("what", ["manifest", "split"])
def test_a_missing_split_is_damage_not_a_usage_error(splits: Path, what: str) -> None:
    if what == "manifest":
        (splits / "val" / MANIFEST_NAME).unlink()
    else:
        shutil.rmtree(splits / "val")
    result = run_main("verify", splits)
    assert result.returncode == CODES["damaged"]
    assert f"val/{MANIFEST_NAME}" in result.stderr
    assert "Traceback" not in result.stderr


def test_odd_names_are_escaped(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"a/x\ny\x1b[31m.png": png()})
    convert(tmp_path / "photos", tmp_path / "made", to="lmdb")
    damage(tmp_path / "made", row=0)
    result = invoke("verify", tmp_path / "made", "--workers", 1)
    assert result.exit_code == CODES["damaged"]
    assert len(result.stderr.splitlines()) == 2
    assert "\x1b" not in result.output
    assert "x\\ny" in result.stderr


def test_a_missing_dataset_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    for arguments in (("verify", tmp_path / "nowhere"), ("index", tmp_path)):
        result = run_main(*arguments)
        assert result.returncode == CODES["usage"]
        assert result.stderr.startswith("shardkit: error: ")
        assert len(result.stderr.splitlines()) == 1
        assert result.stdout == ""


@pytest.mark.parametrize(
    "options", [["--level", "thorough"], ["--workers", "0"], ["--workers", "x"], ["--unknown"], []]
)
def test_a_wrong_option_exits_with_2(place: Path, options: list[str]) -> None:
    result = run_main("verify", *([place] if options else []), *options)
    assert result.returncode == CODES["usage"]
    assert "Traceback" not in result.stderr


def test_damage_found_by_the_command_exits_with_1(place: Path) -> None:
    key, _, shard = damage(place)
    result = run_main("verify", place)
    assert result.returncode == CODES["damaged"]
    assert key in result.stderr
    assert shard in result.stderr
    assert "Traceback" not in result.stderr


def test_index_rebuilds_a_lost_index(place: Path) -> None:
    before = {path.name: path.read_bytes() for path in (place / "index").iterdir()}
    shutil.rmtree(place / "index")
    result = invoke("index", place)
    assert result.exit_code == 0
    assert result.stdout == f"{place}: index of 6 rows rebuilt\n"
    assert {path.name: path.read_bytes() for path in (place / "index").iterdir()} == before


def test_index_rebuilds_each_splits_index(splits: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(splits / split / "index")
    result = invoke("index", splits)
    assert result.stdout.count("index of 4 rows rebuilt") == 2
    assert invoke("verify", splits, "--workers", 1).exit_code == 0


def test_index_can_be_quiet(place: Path) -> None:
    result = invoke("index", place, "--quiet")
    assert (result.exit_code, result.output) == (0, "")


def test_index_refuses_damaged_shards_with_1(place: Path) -> None:
    _, _, shard = damage(place)
    result = run_main("index", place)
    assert result.returncode == CODES["damaged"]
    assert shard in result.stderr
    assert "shardkit verify" in result.stderr


def test_library_errors_become_bad_image(tmp_path: Path, place: Path) -> None:
    assert isinstance(invoke("verify", tmp_path / "nowhere").exception, UsageError)
    damage(place)
    assert isinstance(invoke("index", place).exception, CorruptDataset)
