"""``shardkit repair``: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import run_main, tree
from refusals import refuses

from shardkit import convert, open_dataset

DONE, LEFT, USAGE = 0, 1, 2


def repair(place: Path, source: Path, *options: object, code: int = DONE) -> tuple[str, str]:
    """Run the command; return what it prints to stdout and stderr."""
    done = run_main("repair", place, "--from", source, "--workers", 1, *options)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    convert(folder, tmp_path / "made", to="lmdb", shard_samples=4, workers=1)
    return tmp_path / "made"


def test_rebuilt_files_are_listed(place: Path, folder: Path) -> None:
    before = tree(place)
    (place / "shard-000001.lmdb").unlink()
    (place / "index/rows.npy").write_bytes(b"x")
    said, errors = repair(place, folder)
    assert said.startswith(f"{place}: 2 files rebuilt, 5 intact, 0 not rebuilt (")
    assert "index/rows.npy, shard-000001.lmdb" in said
    assert errors == ""
    assert tree(place) == before
    said, _ = repair(place, folder)
    assert said.startswith(f"{place}: nothing to repair: 7 files")


def test_irreparable_damage_exits_with_1(place: Path, folder: Path) -> None:
    lost = open_dataset(place).paths[0]
    (folder / lost).rename(folder / "away")
    for name in ("shard-000000.lmdb", "shard-000001.lmdb"):
        (place / name).write_bytes(b"")
    said, errors = repair(place, folder, code=LEFT)
    assert errors.startswith("  not repaired: shard-000000.lmdb: ")
    assert errors.endswith(f"({lost})\n")
    assert errors.count("\n") == 1
    assert "1 file rebuilt, 5 intact, 1 not rebuilt" in said
    assert (place / "shard-000000.lmdb").read_bytes() == b""
    quiet = repair(place, folder, "--quiet", code=LEFT)
    assert quiet[0] == ""
    assert quiet[1].startswith(errors)
    (folder / "away").rename(folder / lost)
    assert repair(place, folder, "--quiet") == ("", "")


def test_json_is_complete(place: Path, folder: Path) -> None:
    (place / "shard-000001.lmdb").unlink()
    value = json.loads(repair(place, folder, "--json")[0])
    assert value.pop("seconds") >= 0
    common = {"exit_code": 0, "error": None, "ok": True}
    assert value == {**common, "findings": [], "files": ["shard-000001.lmdb"], "intact": 6}


def test_wrong_requests_are_one_line(place: Path, folder: Path, tmp_path: Path) -> None:
    for words, fact in {
        (place, "--from", tmp_path / "missing"): "/missing",
        (place, "--from", place): "the dataset itself",
        (tmp_path / "missing", "--from", folder): "/missing",
        (folder, "--from", folder): "/photos",
    }.items():
        for _ in range(2):  # also if the dataset is not intact
            done = refuses(USAGE, "repair", *words, facts=(fact,))
            assert done.stdout == ""
            assert done.stderr.startswith("shardkit: error: ")
            assert done.stderr.count("\n") == 1
            (place / "shard-000000.lmdb").unlink(missing_ok=True)
    assert run_main("repair", place).returncode == USAGE
