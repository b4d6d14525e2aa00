"""One rule for labels: integers, names, missing and mixed ones, from every kind of source."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign import beton_images, write_table, write_tfrecord
from helpers import png, run_main
from hostile.foreign_shards import BetonColumn, write_beton, write_litdata, write_mds
from refusals import refused, refuses
from table import for_each
from tars import PRODUCERS

from shardkit import convert, open_dataset, open_source
from shardkit.errors import UsageError

NAN = float("nan")


def in_table(folder: Path, labels: Sequence[Any], suffix: str) -> tuple[str, Path, dict[str, Any]]:
    rows = [{"file_name": f"{n}.png", "class": label} for n, label in enumerate(labels)]
    (folder / "images").mkdir()
    for row in rows:
        (folder / "images" / row["file_name"]).write_bytes(png(seed=int(row["file_name"][0])))
    path = write_table(folder / f"t.{suffix}", rows)
    return "table", path, {"label": "class", "root": str(folder / "images")}


def in_tar(folder: Path, labels: Sequence[Any], suffix: str) -> tuple[str, Path, dict[str, Any]]:
    files: dict[str, bytes] = {}
    for number, label in enumerate(labels):
        text = "" if label is None else str(label)
        data = json.dumps({"a": label}) if suffix == "json" else text
        files |= {f"{number}.png": png(seed=number), f"{number}.{suffix}": data.encode()}
    PRODUCERS["Python, GNU"](folder / "x.tar", files)
    return "webdataset", folder / "x.tar", {"label": "json:/a" if suffix == "json" else suffix}


def in_hdf5(folder: Path, labels: Sequence[Any]) -> tuple[str, Path, dict[str, Any]]:
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = np.zeros((len(labels), 8, 8, 3), np.uint8)
        if any(isinstance(label, str) for label in labels):
            file["y"] = ["" if label is None else str(label) for label in labels]
        else:
            file["y"] = np.array([NAN if label is None else label for label in labels])
    return "hdf5", folder / "x.h5", {"image": "x", "label": "y"}


def in_arrays(folder: Path, labels: Sequence[Any]) -> tuple[str, Path, dict[str, Any]]:
    stated = np.array([NAN if label is None else label for label in labels])
    if any(isinstance(label, str) for label in labels):
        stated = np.array(["" if label is None else str(label) for label in labels])
    np.savez(folder / "x.npz", images=np.zeros((len(labels), 8, 8, 3), np.uint8), labels=stated)
    return "npy", folder / "x.npz", {}


def in_hugging_face(folder: Path, labels: Sequence[Any]) -> tuple[str, Path, dict[str, Any]]:
    if any(isinstance(label, str) for label in labels):
        labels = [None if label is None else str(label) for label in labels]
    images = [{"bytes": png(seed=number), "path": None} for number in range(len(labels))]
    pq.write_table(pa.table({"image": images, "kind": pa.array(labels)}), folder / "x.parquet")
    return "huggingface", folder / "x.parquet", {"label": "kind"}


def in_tfrecord(folder: Path, labels: Sequence[Any]) -> tuple[str, Path, dict[str, Any]]:
    kinds = {int: "int", float: "float", str: "byte", type(None): "byte"}
    rows = [
        {
            "image": (png(seed=number), "byte"),
            "label": ((label or "").encode() if kinds[type(label)] == "byte" else label, kind),
        }
        for number, label in enumerate(labels)
        for kind in [kinds[type(label)]]
    ]
    return "tfrecord", write_tfrecord(folder / "x.tfrecord", rows), {}


def in_columns(folder: Path, labels: Sequence[Any], kind: str) -> tuple[str, Path, dict[str, Any]]:
    samples = [
        (png(seed=number), b"" if label is None else str(label).encode())
        for number, label in enumerate(labels)
    ]
    columns = {"image": "jpeg", "label": "str"}
    write = write_mds if kind == "mds" else write_litdata
    (folder / kind).mkdir()
    return kind, write(folder / kind, columns, [samples]), {}


Write = Callable[[Path, Sequence[Any]], tuple[str, Path, dict[str, Any]]]
SOURCES: dict[str, Write] = {
    **{name: partial(in_table, suffix=name) for name in ("csv", "tsv", "jsonl", "parquet")},
    **{name: partial(in_tar, suffix=name) for name in ("cls", "json")},
    **{name: partial(in_columns, kind=name) for name in ("mds", "litdata")},
    "hdf5": in_hdf5,
    "npz": in_arrays,
    "huggingface": in_hugging_face,
    "tfrecord": in_tfrecord,
}


def made(folder: Path, written: tuple[str, Path, dict[str, Any]], **more: Any) -> Any:
    kind, path, options = written
    source = open_source(kind, path, **options, **more)
    scan = source.scan()
    assert scan.problems == {"": []}
    convert(source, folder / "made", to="lmdb", shuffle=False, workers=1)
    dataset = open_dataset(folder / "made", decode="bytes")
    return [int(label) for label in dataset.targets], dataset.classes, scan.understood["label"]


@pytest.mark.parametrize("kind", SOURCES)
def test_integers_stay_and_missing_labels_stay_missing(kind: str, tmp_path: Path) -> None:
    labels, classes, words = made(tmp_path, SOURCES[kind](tmp_path, [2, 10, -1, 0, 10]))
    assert labels == [2, 10, -1, 0, 10]
    assert classes == [str(number) for number in range(11)]
    assert words.endswith(": 3 integers from 0 to 10, 1 missing")


@pytest.mark.parametrize("kind", SOURCES)
def test_integers_as_floats_are_integers(kind: str, tmp_path: Path) -> None:
    labels, _, words = made(tmp_path, SOURCES[kind](tmp_path, [3.0, None, 10.0, -1.0]))
    assert labels == [3, -1, 10, -1]
    assert words.endswith(": 2 integers from 3 to 10, 2 missing")


@pytest.mark.parametrize("kind", SOURCES)
def test_names_are_sorted_and_empty_ones_missing(kind: str, tmp_path: Path) -> None:
    labels, classes, words = made(tmp_path, SOURCES[kind](tmp_path, ["dog", None, "cat", "cat"]))
    assert labels == [1, -1, 0, 0]
    assert classes == ["cat", "dog"]
    assert words.endswith(": 2 names, first cat=0, 1 missing")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_mixture_is_refused_with_the_odd_values(kind: str, tmp_path: Path) -> None:
    kind, path, options = SOURCES[kind](tmp_path, ["1", "n/a", "0", "1", "unknown"])
    with refused(UsageError, "numbers", "'n/a', 'unknown'", "2 images", "empty", "classes="):
        open_source(kind, path, **options).scan()


def csv_of(folder: Path, *labels: str) -> Path:
    for number in range(len(labels)):
        (folder / f"{number}.png").write_bytes(png(seed=number))
    rows = [f'{number}.png,"{label}"\n' for number, label in enumerate(labels)]
    (folder / "t.csv").write_text("file_name,class\n" + "".join(rows))
    return folder / "t.csv"


def scanned(path: Path, **options: Any) -> Any:
    scan = open_source("table", path, label="class", **options).scan()
    return [entry.label for entry in scan.splits[""].entries], scan.classes


@for_each(
    ("labels", "names", "expected", "classes"),
    [
        (["10", "02", "", "11"], None, [1, 0, -1, 2], ("02", "10", "11")),  # padded: no numbers
        (["7", "A", "-1", "b"], "7 A b", [0, 1, -1, 2], ("7", "A", "b")),
        (["7", "A", "-1", "b"], "7 A b -1", [0, 1, 3, 2], ("7", "A", "b", "-1")),
        (["1", "-1", "1"], "-1 1", [1, 0, 1], ("-1", "1")),
        (["1.0", "-1.0", "1.0"], "-1 1", [1, 0, 1], ("-1", "1")),
        (["1.0", "-1.0", "1.0"], "0 1", [1, -1, 1], ("0", "1")),
    ],
)
def test_a_file_of_names_makes_numbers_names(
    labels: list[str],
    names: str | None,
    expected: list[int],
    classes: tuple[str, ...],
    tmp_path: Path,
) -> None:
    options = {}
    if names is not None:
        (tmp_path / "names").write_text(names.replace(" ", "\n"))
        options = {"classes": str(tmp_path / "names")}
    assert scanned(csv_of(tmp_path, *labels), **options) == (expected, classes)


@for_each(
    ("labels", "facts"),
    [
        (["0.5", "1.0", "0.25"], ["'0.5', '0.25'", "2 images", "keep=", "classes="]),
        (["1", "-1", "1"], ["1 (2 images)", "-1 (1 image)", "classes="]),
        (["cat", "1.5", "dog"], ["names", "'1.5' (1 image)"]),
        (["cat", "dog", "Cat"], ["'Cat'", "'cat'", "classes="]),
        (["caf\u00e9", "cafe\u0301"], [r"'cafe\u0301'", r"'caf\xe9'", "classes="]),
        (["3", "-2"], ["-2", "only -1", "keep="]),
        (["0", "99999999"], ["99999999"]),
    ],
)
def test_labels_that_may_mean_something_else_are_refused(
    labels: list[str], facts: list[str], tmp_path: Path
) -> None:
    with refused(UsageError, *facts):
        scanned(csv_of(tmp_path, *labels))


def test_a_list_in_a_cell_is_several_labels(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "['cat', 'dog']", "['dog'\n 'bird']", "[]", "cat", "('bird',)")
    source = open_source("table", path, labels="class")
    scan = source.scan()
    assert scan.schema["labels"].classes == ("bird", "cat", "dog")
    stored = [record.meta["labels"] for record in scan.splits[""].read(range(5))]
    assert stored == [[1, 2], [0, 2], [], [1], [0]]
    problems = open_source("table", path, label="class").scan().problems[""]
    assert ["a list" in problem.reason for problem in problems] == [True] * 4


def test_numbers_in_lists_are_padded_with_minus_one(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "[2, -1]", "[0 2]", "[1.]")
    scan = open_source("table", path, labels="class").scan()
    stored = [record.meta["labels"] for record in scan.splits[""].read(range(3))]
    assert stored == [[2], [0, 2], [1]]
    for broken in ("['cat'", "[cat, dog]", "['a''b']", "[[1]]"):
        scan = open_source("table", csv_of(tmp_path, "a", broken), labels="class").scan()
        (problem,) = scan.problems[""]
        assert "class" in problem.reason, broken


def test_folders_are_names_whatever_they_look_like(tmp_path: Path) -> None:
    files = {f"{name}/{n}.png": png(seed=n) for n, name in enumerate(["7", "null", "A", "-1"])}
    PRODUCERS["Python, GNU"](tmp_path / "x.tar", files)
    scan = open_source("webdataset", tmp_path / "x.tar", label="folder").scan()
    assert scan.classes == ("-1", "7", "A", "null")


def test_ffcv_has_missing_labels(tmp_path: Path) -> None:
    column = BetonColumn("label", 1, "<i8", [(2,), (-1,), (0,)])
    images = beton_images([png(seed=number) for number in range(3)])
    path = write_beton(tmp_path / "x.beton", [images, column])
    assert made(tmp_path, ("ffcv", path, {}))[0] == [2, -1, 0]


def test_the_summary_says_how_labels_were_read(tmp_path: Path) -> None:
    _, path, options = in_table(tmp_path, ["4", "", "2"], "csv")
    command = ["convert", "table", path, tmp_path / "made", "--to", "lmdb", "--label", "class"]
    command += ["--root", options["root"]]
    assert "  labels    class: 2 integers from 2 to 4, 1 missing\n" in run_main(*command).stdout
    path.write_text("file_name,class\n0.png,\n1.png,nan\n")
    assert "  labels    class: none, 2 missing\n" in run_main(*command, "--force").stdout
    path.write_text("file_name,class\n0.png,4\n1.png,four\n")
    refuses(2, *command, "--force", facts=("four", "--classes"))
    path.write_text("file_name,class\n0.png,\"['a', 'b']\"\n1.png,b\n")
    command[-4:-2] = ["--labels", "class"]
    assert "  labels    class: 2 names, first a=0\n" in run_main(*command, "--force").stdout
