"""A third-party source joins by its entry point, without changes to shardkit."""

from __future__ import annotations

import csv
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from helpers import invoke, jpeg, make_tree
from refusals import refused

from shardkit import UsageError, convert, open_source, verify
from shardkit.testing import SourceConformance

THIRD_PARTY = str(Path(__file__).parents[2] / "support" / "thirdparty")


@pytest.fixture(autouse=True)
def third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the package importable here and in child processes."""
    monkeypatch.syspath_prepend(THIRD_PARTY)
    inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([THIRD_PARTY, *inherited]))
    yield
    sys.modules.pop("shardkit_csv", None)
    importlib.invalidate_caches()


def write_table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


class TestCsvTable(SourceConformance):
    name = "csv"

    def make(self, folder: Path, images: Mapping[str, bytes]) -> Path:
        make_tree(folder, images)
        rows = [{"path": name, "label": name.partition("/")[0]} for name in images]
        return write_table(folder / "table.csv", rows)

    def spoil(self, path: Path, image: str) -> None:
        (path.parent / image).write_bytes(b"not an image")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of two splits, with labels in a custom column."""
    names = [f"{number}.jpg" for number in range(8)]
    make_tree(tmp_path / "photos", {name: jpeg(seed=n) for n, name in enumerate(names)})
    rows = [
        {"path": name, "species": "owl" if n % 2 else "cat", "split": "val" if n > 5 else "train"}
        for n, name in enumerate(names)
    ]
    return write_table(tmp_path / "photos" / "table.csv", rows)


@pytest.mark.slow
def test_the_command_line_converts_verifies_and_repairs_it(table: Path, tmp_path: Path) -> None:
    listed = invoke("convert", "--help").output
    assert "Convert image files listed in a CSV table." in listed
    assert "imagefolder" in listed
    help_text = invoke("convert", "csv", "--help").output
    assert "--label-column" in help_text
    assert "--class-order" not in help_text

    made = tmp_path / "made"
    options = ("--label-column", "species", "--to", "hdf5", "--shard-samples", 2, "--quiet")
    assert invoke("convert", "csv", table, made, *options).exit_code == 0
    source = json.loads((made / "train" / "shardkit.json").read_text())["source"]
    assert (source["kind"], source["name"]) == ("csv", "table.csv")
    assert source["label_column"] == "species"
    assert invoke("convert", "csv", table, made, *options).exit_code == 0  # nothing to do

    shard = made / "train" / "shard-000001.h5"
    before = shard.read_bytes()
    shard.unlink()
    assert invoke("verify", made, "--against", table).exit_code == 1
    assert invoke("repair", made, "--from", table).exit_code == 0
    assert shard.read_bytes() == before
    assert invoke("verify", made, "--against", table).exit_code == 0


def test_a_wrong_option_is_a_usage_error(table: Path, tmp_path: Path) -> None:
    with refused(UsageError):
        convert(open_source("csv", table, label_column="kind"), tmp_path / "made", to="lmdb")


def test_without_its_package_the_error_names_the_installed_sources(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source("csv", table, label_column="species")
    convert(source, tmp_path / "made", to="lmdb")
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != THIRD_PARTY])
    importlib.invalidate_caches()
    with refused(UsageError, "'csv'"):
        verify(tmp_path / "made", against=table)
