"""Sources restored from descriptions, which may be anybody's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers import make_tree, png
from refusals import refused
from table import for_each

from shardkit import convert, open_source
from shardkit.contracts import SourceOptions, StoredEntries, recorded
from shardkit.conversion.exclude import exclude_listed
from shardkit.conversion.plan import ConvertOptions, make_plan
from shardkit.dataset import source as dataset_source
from shardkit.errors import UsageError
from shardkit.options import option
from shardkit.registry import get_source, source_names
from shardkit.sources import row_log
from shardkit.sources import samples as samples_module
from shardkit.sources.divided import divided
from shardkit.sources.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Options(SourceOptions):
    text: str | None = option(None, help="A text.", stored="other_name")
    number: int = option(0, help="A number.")
    rate: float = option(1.0, help="A rate.")
    many: tuple[str, ...] = option((), help="Texts.")
    hidden: str = option("default", help="It is not described.", stored="")
    path: str | None = option(None, help="A file.", store=bool)
    seen: list[int] | None = recorded("seen")


def test_a_description_has_what_restores_the_options() -> None:
    options = Options(text="a", rate=2, many=("x", "y"), hidden="b", path="file", seen=[1])
    described = {
        "other_name": "a",
        "number": 0,
        "rate": 2,
        "many": ["x", "y"],
        "path": True,
        "seen": [1],
    }
    assert options.describe() == described
    restored = Options.restored({"": {"name": "x", "unknown": 1, **described}})
    expected: dict[str, Any] = {
        "text": "a",
        "rate": 2,
        "many": ("x", "y"),
        "path": True,
        "seen": [1],
    }
    assert restored == Options(**expected)
    assert restored.describe() == described
    assert Options.restored({"": {}}) == Options()


@for_each(
    "described",
    [{"other_name": 1}, {"other_name": ["a"]}, {"number": "1"}, {"number": True}, {"path": 1}],
)
def test_a_value_of_another_type_is_damage(described: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"is damaged: {next(iter(described))}"):
        Options.restored({"": described})


def test_a_description_names_no_file_to_read(tmp_path: Path) -> None:
    read: Any = Options.restored({"": {"path": str(tmp_path)}})
    assert read.path is True
    names = [
        name
        for name in source_names()
        if "class_names"
        in get_source(name).options.restored({"": {"class_names": True}}).describe()
    ]
    assert {"hdf5", "lmdb", "mnist", "npy", "table", "tfrecord", "webdataset"} <= set(names)
    for name in names:
        options: Any = get_source(name).options.restored({"": {"class_names": "/etc/passwd"}})
        assert options.classes is True


def test_a_description_names_no_code_to_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="MODULE:FUNCTION@"):
        get_source("lmdb").find(tmp_path, {"": {"name": "x", "layout": "os:system"}})


@pytest.mark.parametrize("root", ["..", "/", "elsewhere", 5, ["a"]])
def test_a_description_names_no_folder_outside(root: object, tmp_path: Path) -> None:
    make_tree(tmp_path / "in", {"a.png": png(4, 4)})
    (tmp_path / "in" / "list.csv").write_text("file_name\na.png\n")
    with refused(UsageError):
        get_source("table").find(tmp_path / "in" / "list.csv", {"": {"name": "x", "root": root}})


def test_an_unknown_option_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with refused(UsageError):
        open_source("cifar", tmp_path, lable="fine")


ROWS = """file_name,label
a/x.png,cat
a/x.jpg,dog
./b/y.png,cat
b/y.png,cat
b/y,dog
missing.png,cat
missing.png,dog
a/x.png,
a/z.png,
a/z.png,cat
./b/y.png,cat
b/w.png,bird
"""


@pytest.mark.parametrize("kind", ["table", "hdf5", "samples", "dataset"])
def test_a_long_list_is_that_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names repeat, collide without suffix, are bad, and are unused."""
    names = ["a/x.png", "a/x.jpg", "a/z.png", "b/y.png", "b/y", "b/w.png", "b/unused.png"]
    make_tree(tmp_path / "in", {name: png(4, 4) for name in names})
    (tmp_path / "in" / "list.csv").write_text(ROWS)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros((11, 4, 4, 3), np.uint8)
        file["y"] = np.arange(11) % 3
    samples = Samples([{"image": png(4, 4), "number": number} for number in range(11)])
    convert(samples, tmp_path / "dataset", to="lmdb", shard_samples=4)

    def scanned() -> Any:
        if kind == "samples":
            return samples.scan()
        if kind == "dataset":
            return get_source(kind).open(tmp_path / "dataset").scan()
        if kind == "hdf5":
            return get_source(kind).open(tmp_path / "x.h5", label="y").scan()
        return get_source(kind).open(tmp_path / "in/list.csv", label="label").scan()

    whole = scanned()
    entries = list(whole.splits[""].entries)
    monkeypatch.setattr(row_log, "CHUNK", 3)
    monkeypatch.setattr(samples_module, "CHUNK", 3)
    monkeypatch.setattr(dataset_source, "_AT_ONCE", 3)
    monkeypatch.setattr(dataset_source, "_MANY", 3)
    parts = scanned()
    stored = parts.splits[""].entries
    assert isinstance(stored, StoredEntries)
    assert list(stored) == entries
    assert [stored[row] for row in range(len(stored))] == entries
    assert list(stored[2:5]) == entries[2:5]
    assert (parts.problems, parts.ignored) == (whole.problems, whole.ignored)
    assert parts.understood == whole.understood
    for options in ({}, {"seed": 3}, {"shuffle": False}, {"limit": 4}):
        plans = [make_plan(scan, ConvertOptions(to="lmdb", **options)) for scan in (whole, parts)]
        ordered = [list(plan.splits[0].source.entries) for plan in plans]
        assert ordered[0] == ordered[1]
    (tmp_path / "list.txt").write_text(f"{entries[0].key}\n{entries[4].path}\n")
    left = [exclude_listed(scan, [tmp_path / "list.txt"]) for scan in (whole, parts)]
    assert list(left[1].splits[""].entries) == list(left[0].splits[""].entries)
    assert len(left[1].splits[""]) == len(entries) - 2
    assert left[1].ignored == left[0].ignored


@pytest.mark.parametrize("group", [None, "folder"])
def test_a_long_list_is_divided(
    group: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, {f"{number}/{number}.png": png(4, 4) for number in range(20)})
    rows = "".join(f"{number}/{number}.png\n" for number in range(20))
    (tmp_path / "list.csv").write_text(f"file_name\n{rows}")
    source = open_source("table", tmp_path / "list.csv")
    sides = []
    for chunk in (100, 3):
        monkeypatch.setattr(row_log, "CHUNK", chunk)
        scan = divided(source, val=0.3, test=0.2, stratify=False, group=group, seed=1).scan()
        sides.append({name: list(images.entries) for name, images in scan.splits.items()})
    assert all(sides[0].values())
    assert sides[1] == sides[0]
