"""HDF5 files with a dataset for each image, and files whose writer has not finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from foreign import pixels_of
from helpers import png
from refusals import refused, refuses
from table import for_each

from shardkit import UsageError, convert, open_dataset, open_source, verify

PIXELS = np.random.default_rng(1).integers(0, 256, (4, 9, 7, 3), np.uint8)
FILES = [png(8, 6, seed) for seed in range(4)]
NAMES = ["cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png"]


def write(path: Path, values: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            file[name] = value
    return path


def read(path: Path, **options: Any) -> tuple[list[bytes], list[str | None], Any]:
    """Return the images of a file, and the name of each label."""
    scan = open_source("hdf5", path, **options).scan()
    images = scan.splits[""]
    data = [next(iter(record.fields.values())) for record in images.read(range(len(images)))]
    classes = scan.classes or ()
    names = [classes[e.label] if e.label >= 0 else None for e in images.entries]
    return data, names, scan


@for_each("store", [lambda data: np.frombuffer(data, np.uint8), np.void])
def test_each_dataset_is_an_encoded_image(store: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", dict(zip(NAMES, map(store, FILES), strict=True)))
    data, labels, scan = read(path)
    assert data == FILES
    assert labels == ["cat", "cat", "dog", "dog"]
    assert [entry.path for entry in scan.splits[""].entries] == [f"x/{name}" for name in NAMES]


def test_each_dataset_is_an_array(tmp_path: Path) -> None:
    values = {"0": PIXELS[0], "1": PIXELS[1, :, :, 0], "2": PIXELS[2, :, :, :1]}
    data, labels, scan = read(write(tmp_path / "x.h5", values))
    expected = [PIXELS[0], PIXELS[1, :, :, 0], PIXELS[2, :, :, 0]]
    assert all(np.array_equal(pixels_of(d), e) for d, e in zip(data, expected, strict=True))
    assert labels == [None] * 3
    assert [entry.path for entry in scan.splits[""].entries] == ["x/0.png", "x/1.png", "x/2.png"]


def test_labels_may_be_datasets_next_to_images(tmp_path: Path) -> None:
    values: dict[str, Any] = {"about": 7}
    for number, label in enumerate([3, 0, -1]):
        values |= {f"{number}/image": PIXELS[number], f"{number}/label": np.int64(label)}
    path = write(tmp_path / "x.h5", values)
    _, labels, scan = read(path, images="*/image", labels="*/label")
    assert labels == ["3", "0", None]
    assert [problem.path for problem in scan.ignored[""]] == ["x.h5:about"]
    assert read(path, images="*/image", labels="none")[1] == [None] * 3
    with refused(UsageError, "keep="):
        read(path, images="*/image", keep="a")


def test_they_are_converted_and_compared(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", dict(zip(NAMES, PIXELS, strict=True)))
    convert(open_source("hdf5", path), tmp_path / "made", to="lmdb", shuffle=False)
    assert open_dataset(tmp_path / "made").classes == ["cat", "dog"]
    assert verify(tmp_path / "made", against=path).ok


def test_what_is_no_image_or_has_no_group_is_bad(tmp_path: Path) -> None:
    values = {"cat/0": PIXELS[0], "cat/1": PIXELS[1].astype("f4"), "2": PIXELS[2]}
    scan = read(write(tmp_path / "x.h5", values), images="*", labels="folder")[2]
    reasons = {problem.path: problem.reason for problem in scan.problems[""]}
    assert "float32" in reasons.pop("x/cat/1.png")
    assert "no group" in reasons.pop("x/2.png")
    assert not reasons


def test_labels_and_texts_are_no_candidates_for_images(tmp_path: Path) -> None:
    labels = np.ones((4, 1, 1, 1), np.uint8)
    values = {"x": PIXELS, "y": labels, "z": ["cat", "dog", "cat", "cat"]}
    assert len(read(write(tmp_path / "x.h5", values))[0]) == 4
    values = {f"{n}/image": PIXELS[n] for n in range(3)} | {"0/n": np.float32(1)}
    with refused(UsageError, "x.h5", "images='*/image'"):
        read(write(tmp_path / "x.h5", values))


def test_rows_of_images_are_no_images_each(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", {"x": PIXELS, "y": np.arange(4, dtype=np.uint8)})
    assert len(read(path, labels="y")[0]) == 4
    assert len(read(path)[0]) == 4


@for_each("shape", [(4,), (4, 1), (4, 1, 1, 1)])
def test_labels_may_have_more_sides_of_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    labels = np.array([1, 0, 0, 1], np.uint8).reshape(shape)
    path = write(tmp_path / "x.h5", {"x": PIXELS, "y": labels})
    assert read(path, labels="y")[1] == ["1", "0", "0", "1"]


@for_each("texts", [np.array([b"b", b"a", b"b", b"c"]), np.array(["b  ", "a", "b", "c"], "S3")])
def test_labels_may_be_texts_of_fixed_length(texts: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", {"x": PIXELS, "y": texts})
    assert read(path, labels="y")[1] == ["b", "a", "b", "c"]


def test_a_file_that_is_open_for_writing_is_not_called_damaged(tmp_path: Path) -> None:
    code = """if True:
        import h5py, sys
        file = h5py.File(sys.argv[1], "w", libver="latest")
        file["x"] = [1]
        file.swmr_mode = True
        file.flush()
        print(flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", code, str(tmp_path / "x.h5")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:  # type: ignore[call-overload]
        writer.stdout.readline()
        made = tmp_path / "made"
        facts = ("x.h5", "open for writing", "h5clear")
        refuses(2, "convert", "hdf5", tmp_path / "x.h5", made, "--to", "lmdb", facts=facts)
