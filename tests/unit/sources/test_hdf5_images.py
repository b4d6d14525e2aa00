"""HDF5 files with a dataset for each image, and files whose writer has not finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from foreign import pixels_of
from helpers import png, run_main
from refusals import refused, refuses
from table import for_each

from shardkit import convert, open_dataset, open_source, verify
from shardkit.errors import UsageError

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
    _, labels, scan = read(path, image="*/image", label="*/label")
    assert labels == ["3", "0", None]
    assert [problem.path for problem in scan.ignored[""]] == ["x.h5:about"]
    assert read(path, image="*/image", label="none")[1] == [None] * 3
    with refused(UsageError, "keep="):
        read(path, image="*/image", keep="a")


def test_they_are_converted_and_compared(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", dict(zip(NAMES, PIXELS, strict=True)))
    convert(open_source("hdf5", path), tmp_path / "made", to="lmdb", shuffle=False)
    assert open_dataset(tmp_path / "made").classes == ["cat", "dog"]
    assert verify(tmp_path / "made", against=path).ok


def test_what_is_no_image_or_has_no_group_is_bad(tmp_path: Path) -> None:
    values = {"cat/0": PIXELS[0], "cat/1": PIXELS[1].astype("f4"), "2": PIXELS[2]}
    path = write(tmp_path / "x.h5", values)
    scan = read(path, image="*", label="folder")[2]
    reasons = {problem.path: problem.reason for problem in scan.problems[""]}
    assert "float32" in reasons.pop("x/cat/1.png")
    assert "not in a group" in reasons["x/2.png"]
    assert "the option label=none" in reasons.pop("x/2.png")
    assert not reasons
    command = ("convert", "hdf5", path, tmp_path / "out", "--to", "lmdb", "--image", "*")
    for more in ((), ("--dry-run",), ("--json",), ("--dry-run", "--json")):
        done = run_main(*command, "--label", "folder", *more)
        assert "--label none" in done.stdout + done.stderr
        assert "label=" not in done.stdout + done.stderr


def test_labels_and_texts_are_no_candidates_for_images(tmp_path: Path) -> None:
    labels = np.ones((4, 1, 1, 1), np.uint8)
    values = {"x": PIXELS, "y": labels, "z": ["cat", "dog", "cat", "cat"]}
    assert len(read(write(tmp_path / "x.h5", values))[0]) == 4
    values = {f"{n}/image": PIXELS[n] for n in range(3)} | {"0/n": np.float32(1)}
    with refused(UsageError, "x.h5", "image='*/image'"):
        read(write(tmp_path / "x.h5", values))


def test_rows_of_images_are_no_images_each(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", {"x": PIXELS, "y": np.arange(4, dtype=np.uint8)})
    assert len(read(path, label="y")[0]) == 4
    assert len(read(path)[0]) == 4


@for_each("shape", [(4,), (4, 1), (4, 1, 1, 1)])
def test_labels_may_have_more_sides_of_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    labels = np.array([1, 0, 0, 1], np.uint8).reshape(shape)
    path = write(tmp_path / "x.h5", {"x": PIXELS, "y": labels})
    assert read(path, label="y")[1] == ["1", "0", "0", "1"]


@for_each("texts", [np.array([b"b", b"a", b"b", b"c"]), np.array(["b  ", "a", "b", "c"], "S3")])
def test_labels_may_be_texts_of_fixed_length(texts: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", {"x": PIXELS, "y": texts})
    assert read(path, label="y")[1] == ["b", "a", "b", "c"]


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


LABELS = np.array([2, 0, 1, 1])


@for_each(
    ("image", "label"),
    [
        ("images", "labels"),
        ("x", "y"),
        ("X", "Y"),
        ("data", "target"),
        ("image", "label"),
        ("train_x", "train_y"),
        ("X_train", "y_train"),
        ("train/img", "train/class_label"),
        ("trainImages", "trainLabels"),
    ],
)
def test_labels_of_a_usual_name_are_used(image: str, label: str, tmp_path: Path) -> None:
    others = {"test_y": np.arange(7), "age": np.arange(4), "weight": np.ones(4)}
    path = write(tmp_path / "x.h5", {image: PIXELS, label: LABELS, **others})
    data, labels, scan = read(path)
    assert len(data) == 4
    assert labels == ["2", "0", "1", "1"]
    assert (
        scan.understood["label"]
        == f"{label}: 3 integers from 0 to 2, first 0=0".partition(", first")[0]
    )
    assert not scan.notes
    assert read(path, label="none")[1] == [None] * 4


def test_labels_may_be_one_hot_or_floats(tmp_path: Path) -> None:
    one_hot = np.eye(3, dtype="f4")[LABELS]
    assert read(write(tmp_path / "x.h5", {"x": PIXELS, "y": one_hot}))[1] == ["2", "0", "1", "1"]
    path = write(tmp_path / "f.h5", {"x": PIXELS, "y": LABELS.astype("f8")})
    assert read(path)[1] == ["2", "0", "1", "1"]
    one_hot[2] = [1, 0, 1]
    path = write(tmp_path / "z.h5", {"x": PIXELS, "y": one_hot})
    with refused(UsageError, "z.h5", "[1.0, 0.0, 1.0]", "keep='y'", "label='none'"):
        read(path)
    scan = read(path, label="none", keep="y")[2]
    records = scan.splits[""].read(range(4))
    arrays = [np.frombuffer(record.fields["y.npy"], "f4").tolist() for record in records]
    assert arrays == one_hot.tolist()


@for_each("names", [("ans",), ("class_id", "class_name")])
def test_what_may_be_labels_is_noted_if_it_is_not_used(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    path = write(tmp_path / "x.h5", {"images": PIXELS} | dict.fromkeys(names, LABELS))
    done = run_main("convert", "hdf5", path, tmp_path / names[0], "--to", "lmdb")
    assert done.returncode == 0
    (note,) = (line for line in done.stdout.splitlines() if "noted" in line)
    assert all(name in note for name in names)


def test_labels_may_be_in_another_file(tmp_path: Path) -> None:
    path = write(tmp_path / "split_train_x.h5", {"x": PIXELS})
    write(tmp_path / "split_valid_y.h5", {"y": np.arange(4)})
    assert read(path)[1] == [None] * 4
    write(tmp_path / "split_train_y.h5", {"y": LABELS.reshape(4, 1, 1, 1)})
    option = "split_train_y.h5:y"
    command = ("convert", "hdf5", path, tmp_path / "out", "--to", "lmdb")
    refuses(2, *command, facts=("split_train_x.h5", f"--label {option}", "--label none"))
    both = ("convert", "hdf5", tmp_path, tmp_path / "made", "--to", "lmdb", "--image", "x")
    refuses(2, *both, facts=("each file separately", f"--label {option}"))
    assert read(path, label="none")[1] == [None] * 4
    assert read(path, label=option)[2].understood["label"].startswith(f"{option}: 3 integers")
    assert run_main(*command, "--label", tmp_path / option).returncode == 0
    assert verify(tmp_path / "out", against=path).ok
    assert sorted(open_dataset(tmp_path / "out").targets) == [0, 1, 1, 2]
    for label, *facts in (
        ("none.h5:y", "none.h5"),
        ("../split_train_y.h5:y", "folder"),
        ("split_train_y.h5:z", "z"),
        ("split_valid_y.h5:", "split_valid_y.h5:", "FILE:DATASET"),
    ):
        with refused(UsageError, *facts):
            read(path, label=label)
    with refused(UsageError, "label=", "3"):
        read(tmp_path / "split_*_?.h5", label=option)


def test_advice_with_an_asterisk_is_quoted_for_a_shell(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", {f"{n}/image": PIXELS[n] for n in range(3)} | {"n": 1})
    command = ("convert", "hdf5", path, tmp_path / "out", "--to", "lmdb")
    refuses(2, *command, facts=("--image '*/image'",))
