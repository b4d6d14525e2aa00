"""A third-party source joins by its entry point; one that can be attached is one file."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import invoke, jpeg, make_tree, tree
from refusals import refused

from shardkit import convert, open_dataset, open_source, verify
from shardkit.errors import UsageError
from shardkit.testing import SourceConformance

pytestmark = pytest.mark.usefixtures("third_party")


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
    table: Path, tmp_path: Path, third_party: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source("csv", table, label_column="species")
    convert(source, tmp_path / "made", to="lmdb")
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != third_party])
    importlib.invalidate_caches()
    with refused(UsageError, "'csv'"):
        verify(tmp_path / "made", against=table)


# A new source that can be attached is one file and one line in a registry.


def write_pack(path: Path, images: Mapping[str, bytes]) -> Path:
    parts = [
        f"{name.partition('/')[0]} {len(data)} {name}\n".encode() + data
        for name, data in images.items()
    ]
    path.write_bytes(b"".join(parts))
    return path


class TestPack(SourceConformance):
    name = "pack"

    def make(self, folder: Path, images: Mapping[str, bytes]) -> Path:
        return write_pack(folder / "images.pack", images)

    def spoil(self, path: Path, image: str) -> None:
        content = path.read_bytes()
        start = content.index(f" {image}\n".encode()) + len(f" {image}\n".encode())
        path.write_bytes(content[:start] + bytes(8) + content[start + 8 :])


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    images = {f"{name}/{n}.jpg": jpeg(seed=n) for name in ("cat", "dog") for n in range(4)}
    return write_pack(tmp_path / "photos.pack", images)


def run(*args: Any) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_it_converts_attaches_and_is_built_by_jobs(pack: Path, tmp_path: Path) -> None:
    assert "Convert the images in .pack files." in run("convert", "--help")
    assert "Files of images end to end." in run("attach", "--help")
    assert "--prefix" in run("attach", "pack", "--help")

    own, more = ("--prefix", "cat/"), ("--to", "lmdb", "--shard-samples", 2, "--quiet")
    made, jobs, index = tmp_path / "made", tmp_path / "jobs", tmp_path / "index"
    run("convert", "pack", pack, made, *own, *more)
    run("verify", made, "--against", pack)

    run("convert", "pack", pack, jobs, *own, *more, "--plan-only")
    run("work", jobs, "--claim", "--kind", "pack")  # its code runs only if trusted
    run("commit", jobs)
    assert tree(jobs) == tree(made)

    before = pack.read_bytes(), pack.stat()
    run("attach", "pack", pack, index, *own)
    run("verify", index, "--level", "decode")
    assert (pack.read_bytes(), pack.stat()) == before
    assert sorted(open_dataset(index).paths) == sorted(open_dataset(made).paths)
    assert "already contains the index" in run("attach", "pack", pack, index, *own)
