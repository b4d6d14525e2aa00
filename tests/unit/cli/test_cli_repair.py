"""``shardkit repair``: output and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import invoke, jpeg, make_dataset, make_folder, make_tree, run_main, tree

from shardkit import open_dataset
from shardkit.dataset.manifest import MANIFEST_NAME, load_manifest
from shardkit.errors import UsageError

DONE, LEFT, USAGE = 0, 1, 2


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    return make_dataset(folder, tmp_path / "made")


def test_rebuilt_files_are_listed(place: Path, folder: Path) -> None:
    before = tree(place)
    (place / "shard-000001.lmdb").unlink()
    (place / "index/rows.npy").write_bytes(b"x")
    result = invoke("repair", place, "--from", folder, "--workers", 1)
    assert result.exit_code == DONE
    assert result.stdout.startswith(f"{place}: 2 files rebuilt, 5 intact, 0 not rebuilt (")
    assert "repaired  index/rows.npy, shard-000001.lmdb" in result.stdout
    assert result.stderr == ""
    assert tree(place) == before


def test_nothing_to_repair_is_reported(place: Path, folder: Path) -> None:
    result = invoke("repair", place, "--from", folder, "--workers", 1)
    assert result.exit_code == DONE
    assert result.stdout.startswith(f"{place}: nothing to repair: 7 files as the conversion wrote ")


def test_irreparable_damage_exits_with_1(place: Path, folder: Path) -> None:
    lost = open_dataset(place).paths[0]
    (folder / lost).unlink()
    for name in ("shard-000000.lmdb", "shard-000001.lmdb"):
        (place / name).write_bytes(b"")
    result = invoke("repair", place, "--from", folder, "--workers", 1)
    assert result.exit_code == LEFT
    said = f"  not repaired: shard-000000.lmdb: the source lacks 1 of its files ({lost})\n"
    assert result.stderr == said
    assert "1 file rebuilt, 5 intact, 1 not rebuilt" in result.stdout
    assert (place / "shard-000000.lmdb").read_bytes() == b""


def test_a_source_that_does_not_exist_is_refused_even_if_the_dataset_is_intact(
    place: Path, folder: Path
) -> None:
    result = invoke("repair", place, "--from", folder / "nope")
    with pytest.raises(UsageError, match="nope does not exist"):
        raise result.exception or AssertionError
    assert invoke("repair", place, "--from", folder).exit_code == 0


def test_json_is_complete(place: Path, folder: Path) -> None:
    (place / "shard-000001.lmdb").unlink()
    result = invoke("repair", place, "--from", folder, "--workers", 1, "--json")
    value = json.loads(result.stdout)
    seconds = value.pop("seconds")
    assert seconds >= 0
    common = {"exit_code": 0, "error": None}
    assert value == {
        **common,
        "ok": True,
        "files": ["shard-000001.lmdb"],
        "findings": [],
        "intact": 6,
    }


def test_quiet_prints_nothing(place: Path, folder: Path) -> None:
    lost = open_dataset(place).paths[0]
    (place / "shard-000000.lmdb").unlink()
    (folder / lost).rename(folder / "away")
    left = invoke("repair", place, "--from", folder, "--workers", 1, "--quiet")
    assert (left.output, left.exit_code) == ("", LEFT)
    (folder / "away").rename(folder / lost)
    done = invoke("repair", place, "--from", folder, "--workers", 1, "--quiet")
    assert (done.output, done.exit_code) == ("", DONE)


def test_names_in_the_source_are_escaped(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {"cat/a\n\x1b[31m.jpg": jpeg(), "cat/b.jpg": jpeg()})
    place = make_dataset(source, tmp_path / "made")
    (source / "cat/a\n\x1b[31m.jpg").unlink()
    (place / load_manifest(place).shards[0].name).unlink()
    result = invoke("repair", place, "--from", source, "--workers", 1)
    assert result.exit_code == LEFT
    assert "\x1b" not in result.output
    assert r"(cat/a\n\x1b[31m.jpg)" in result.stderr


def test_many_remaining_findings_are_shortened(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {f"a/{n:03}.jpg": jpeg(seed=n) for n in range(212)})
    place = make_dataset(source, tmp_path / "made", to="webdataset")
    for path in source.rglob("*.jpg"):
        path.write_bytes(b"bad")
    for path in place.glob("*.tar"):
        path.unlink()
    result = invoke("repair", place, "--from", source, "--workers", 1)
    assert result.exit_code == LEFT
    lines = result.stderr.splitlines()
    assert len(lines) == 51
    assert lines[-1] == "  not repaired: ... and 3 more (--json prints all)"


@pytest.mark.slow
def test_usage_errors_are_one_line(place: Path, folder: Path, tmp_path: Path) -> None:
    (place / "shard-000000.lmdb").unlink()
    cases = {
        (place, "--from", tmp_path / "missing"): "does not exist",
        (place, "--from", place): "is a shardkit dataset, not a folder of images",
        (tmp_path / "missing", "--from", folder): "the directory does not exist",
        (folder, "--from", folder): "is not a shardkit dataset",
    }
    for arguments, said in cases.items():
        result = run_main("repair", *arguments)
        assert result.returncode == USAGE
        assert result.stdout == ""
        assert said in result.stderr
        assert result.stderr.startswith("shardkit: error: ")
        assert result.stderr.count("\n") == 1
    assert run_main("repair", place).returncode == USAGE


def test_a_damaged_manifest_exits_with_1(place: Path, folder: Path) -> None:
    text = (place / MANIFEST_NAME).read_text()
    (place / MANIFEST_NAME).write_text(text.replace('"cat"', '"cow"'))
    result = run_main("repair", place, "--from", folder)
    assert result.returncode == LEFT
    assert "Restore it from a copy, or convert again" in result.stderr


@pytest.mark.slow
def test_splits_are_repaired_together(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to="hdf5")
    before = tree(place)
    for split in ("train", "val"):
        (place / split / "shard-000000.h5").unlink()
        shutil.rmtree(place / split / "index")
    result = invoke("repair", place, "--from", tmp_path / "photos", "--workers", 2)
    assert result.exit_code == DONE
    assert "12 files rebuilt" in result.stdout
    assert tree(place) == before
