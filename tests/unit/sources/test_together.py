"""Files of annotations or tables, or arrays in a file, one for each split, by one command."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers import jpeg, make_tree, run_main
from refusals import refused, refuses

from shardkit import attach, convert, open_dataset, open_source, repair, verify
from shardkit.errors import CorruptDataset, UsageError
from shardkit.sources.opening import reopen


def coco(split: str, names: tuple[str, ...] = ("cat", "dog"), **values: Any) -> bytes:
    """Return annotations of 1.jpg, whose box is 3 wide in train, and 4 wide in val."""
    box = [1, 2, 3 if split == "train" else 4, 5]
    content = {
        "images": [{"id": 7, "file_name": "1.jpg", "width": 24, "height": 16}],
        "annotations": [{"id": 1, "image_id": 7, "category_id": 5, "bbox": box}],
        "categories": [{"id": 5 - n, "name": name} for n, name in enumerate(names)],
    }
    return json.dumps({**content, **values}).encode()


JPEGS = {"train": jpeg(seed=1), "val": jpeg(seed=2)}
COCO = {f"{split}2017/1.jpg": JPEGS[split] for split in JPEGS} | {
    f"annotations/instances_{split}2017.json": coco(split) for split in JPEGS
}
ROBOFLOW = {f"{split}/1.jpg": JPEGS[split] for split in JPEGS} | {
    f"{split}/_annotations.coco.json": coco(split) for split in JPEGS
}


@pytest.mark.parametrize("files", [COCO, ROBOFLOW], ids=["COCO", "Roboflow"])
def test_annotations_of_all_splits_are_read_at_once(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    source = make_tree(tmp_path / "src", {**files, "notes.txt": b"x"})
    target = tmp_path / "out"
    done = run_main("convert", source, target, "--to", "webdataset", "--workers", "1", "--json")
    assert json.loads(done.stdout)["not_read"] == ["notes.txt"]
    for split, width in (("train", 3), ("val", 4)):
        made = open_dataset(target / split, decode="bytes", fields=["image", "boxes"])
        image, boxes = made[0]
        assert (bytes(image), boxes.tolist()) == (JPEGS[split], [[1, 2, 1 + width, 7, 1]])
        assert made.schema["boxes"].classes == ("dog", "cat")
    assert verify(target, against=source).findings == []
    assert verify(target / "val", against=source).findings == []
    (target / "val/shard-000000.tar").unlink()
    assert repair(target, source).findings == []
    make_tree(source, {path: coco("val") for path in files if path.endswith("json")})
    assert verify(target, against=source).findings != []


def test_files_of_captions_are_named_and_left_out(tmp_path: Path) -> None:
    captions = {"annotations/captions_train2017.json": coco("train", categories=[], licenses=[])}
    source = make_tree(tmp_path / "src", {**COCO, **captions})
    done = run_main("convert", source, tmp_path / "out", "--to", "lmdb", "--workers", "1")
    assert f"not read: {next(iter(captions))}" in done.stdout


def test_a_folder_of_annotations_is_read_whole_also_as_coco(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", {**COCO, "notes.txt": b"x"})
    opened = open_source("coco", source)
    assert opened.scan().notes == ["next to it but not read: notes.txt"]
    convert(opened, tmp_path / "out", to="lmdb", workers=1)
    assert [len(open_dataset(tmp_path / "out" / split)) for split in JPEGS] == [1, 1]
    assert verify(tmp_path / "out", against=source).findings == []
    one = make_tree(tmp_path / "one", {"a.json": coco("train"), "1.jpg": JPEGS["train"]})
    convert(open_source("coco", one), tmp_path / "made", to="lmdb", workers=1)
    assert len(open_dataset(tmp_path / "made")) == 1
    assert verify(tmp_path / "made", against=one).findings == []
    with refused(UsageError, tmp_path / "none", "coco"):
        open_source("coco", make_tree(tmp_path / "none", {"1.jpg": JPEGS["train"]}))


def test_the_root_of_one_split_is_not_that_of_all(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", ROBOFLOW)
    command = ("convert", source, tmp_path / "out", "--to", "lmdb", "--root", source / "train")
    refuses(2, *command, facts=("--root", "train, val"))


def test_splits_share_their_classes(tmp_path: Path) -> None:
    files = {f"{split}/{n}.jpg": JPEGS[split] for split in JPEGS for n in (1, 2)}
    files["train/metadata.jsonl"] = b"".join(
        json.dumps({"file_name": f"{n}.jpg", "label": name}).encode() + b"\n"
        for n, name in ((1, "cat"), (2, "fox"))
    )
    files["val/metadata.csv"] = b"file_name,label,age\n1.jpg,fox,3\n2.jpg,dog,4\n"
    source = make_tree(tmp_path / "src", files)
    command = ("convert", source, tmp_path / "out", "--to", "lmdb", "--no-shuffle")
    done = run_main(*command)
    assert "train: no column; val: age" in done.stdout
    labels = {}
    for split in JPEGS:
        made = open_dataset(tmp_path / "out" / split)
        assert made.classes == ["cat", "dog", "fox"]
        labels[split] = [*made.targets]
    assert labels == {"train": [0, 2], "val": [2, 1]}
    assert verify(tmp_path / "out", against=source).findings == []
    refuses(2, "convert", "imagefolder", *command[1:5], facts=(f"shardkit convert {source} ",))


def test_splits_of_one_label_and_of_several_have_the_same_fields(tmp_path: Path) -> None:
    """As Roboflow's columns of 0 and 1, if only some rows of val have several."""
    files = {f"{split}/{split}{n}.jpg": JPEGS[split] for split in JPEGS for n in (1, 2)}
    header = b"filename, cat, dog\n"
    files["train/_classes.csv"] = header + b"train1.jpg, 1, 0\ntrain2.jpg, 0, 1\n"
    files["val/_classes.csv"] = header + b"val1.jpg, 1, 1\nval2.jpg, 0, 1\n"
    source = make_tree(tmp_path / "src", files)
    command = ("convert", source, tmp_path / "out", "--to", "lmdb", "--no-shuffle")
    assert run_main(*command, "--workers", "1").returncode == 0
    made = {split: open_dataset(tmp_path / "out" / split).column("labels") for split in JPEGS}
    labels = {split: [[*row] for row in column] for split, column in made.items()}
    assert labels == {"train": [[0], [1]], "val": [[0, 1], [1]]}
    assert verify(tmp_path / "out", against=source).findings == []


def test_columns_of_different_names_are_not_the_labels_of_all_splits(tmp_path: Path) -> None:
    files = {f"{split}/1.jpg": JPEGS[split] for split in JPEGS}
    files |= {"train.csv": b"id,target\n1,ill\n", "val.csv": b"id,patient\n1,P9\n"}
    source = make_tree(tmp_path / "src", files)
    facts = ("patient", "target", "DST/train", "DST/val")
    refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb", facts=facts)


def test_splits_in_splits_are_refused_with_the_commands(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("train", "test"):
        with zipfile.ZipFile(tmp_path / f"src/{name}.zip", "w") as archive:
            for split in ("train", "val"):
                archive.writestr(f"{split}/cat/1.jpg", JPEGS["train"])
    facts = (f"zip {tmp_path / 'src/train.zip'}", f"zip {tmp_path / 'src/test.zip'}")
    refuses(2, "convert", tmp_path / "src", tmp_path / "out", "--to", "lmdb", facts=facts)


def test_splits_with_other_categories_are_refused(tmp_path: Path) -> None:
    files = {**COCO, "annotations/instances_val2017.json": coco("val", ("cat", "fox"))}
    source = make_tree(tmp_path / "src", files)
    facts = ("boxes", "DST/train", "DST/val", f"--root {source}/val2017")
    refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb", facts=facts)


def test_equal_names_in_several_folders_need_a_choice(tmp_path: Path) -> None:
    files = {"a/1.jpg": JPEGS["train"], "b/1.jpg": JPEGS["val"], "all.json": coco("train")}
    source = make_tree(tmp_path / "src", files)
    facts = (f"--root {source}/a", f"--root {source}/b")
    refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb", facts=facts)


@pytest.mark.parametrize("member", [["../x.json", ""], ["/etc/passwd", ""], [1, 2], "abc", None])
def test_manifests_cannot_name_files_elsewhere(member: Any, tmp_path: Path) -> None:
    with refused(CorruptDataset, "split"):
        reopen("coco", make_tree(tmp_path, ROBOFLOW), {"val": {"name": "x", "member": member}}, {})


PIXELS = np.random.default_rng(3).integers(0, 256, (7, 6, 5, 3), np.uint8)
TRAIN, TEST = PIXELS[:4], PIXELS[4:]
LABELS = {"train": [2, 0, 0, 1], "test": [10, 0, 2]}


def arrays(path: Path, **values: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            file[name.replace("__", "/")] = value
    return path


def named(images: str, labels: str) -> dict[str, Any]:
    """Return the arrays of both splits, with ``{}`` for the split in a name."""
    values: dict[str, Any] = {images.format("train"): TRAIN, images.format("test"): TEST}
    return values | {labels.format(split): LABELS[split] for split in LABELS}


@pytest.mark.parametrize(
    ("images", "labels"),
    [("x_{}", "y_{}"), ("{}_images", "{}_labels"), ("{}__images", "{}__labels"), ("X_{}", "y_{}")],
)
def test_arrays_of_all_splits_in_one_file_are_read_at_once(
    images: str, labels: str, tmp_path: Path
) -> None:
    path = arrays(tmp_path / "data.h5", **named(images, labels), classes=[b"a", b"b"])
    target = tmp_path / "out"
    convert(open_source("hdf5", path), target, to="hdf5", workers=1, shuffle=False)
    for split, pixels in (("train", TRAIN), ("test", TEST)):
        made = open_dataset(target / split)
        assert [np.asarray(image).tolist() for image, _ in made[:]] == pixels.tolist()
        assert [*made.targets] == LABELS[split]
        assert made.classes == [*map(str, range(11))]


def test_their_dataset_is_compared_and_repaired(tmp_path: Path) -> None:
    path = arrays(tmp_path / "data.h5", **named("x_{}", "y_{}"))
    target = tmp_path / "out"
    command = ("convert", path, target, "--to", "webdataset", "--workers", "1")
    run_main(*command)
    assert "nothing to do" in run_main(*command).stdout
    assert verify(target, against=path).findings == []
    assert verify(target / "test", against=path).findings == []
    (target / "test/shard-000000.tar").unlink()
    assert repair(target, path).findings == []
    swapped = {"x_train": TEST, "y_train": LABELS["test"], "x_test": TRAIN}
    arrays(path, **swapped, y_test=LABELS["train"])
    assert {finding.path for finding in verify(target, against=path).findings}


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"y_train": [0, 1, 2]}, ("y_train", "3", "4", "--label none")),
        ({"y_train": LABELS["test"], "y_test": LABELS["train"]}, ("y_test", "4", "3")),
        (
            {"y_train": None, "y_test": None, "y": LABELS["train"], "x_test": TRAIN[::-1]},
            ("--image", "x_test", "x_train"),
        ),
        ({"z_train": TRAIN}, ("--image", "z_train")),
        ({"photos": TRAIN}, ("--image", "photos")),
        ({"x_train": None, "x_train_1": TRAIN, "x_train_2": TRAIN}, ("--image", "x_train_2")),
    ],
    ids=["fewer labels", "swapped", "shared labels", "two arrays", "no split", "twice"],
)
def test_arrays_that_may_belong_to_another_split_are_refused(
    change: dict[str, Any], facts: tuple[str, ...], tmp_path: Path
) -> None:
    values = {**named("x_{}", "y_{}"), **change}
    path = arrays(tmp_path / "a.h5", **{name: v for name, v in values.items() if v is not None})
    refuses(2, "convert", path, tmp_path / "out", "--to", "lmdb", facts=facts)


def test_a_split_of_arrays_may_lack_labels(tmp_path: Path) -> None:
    values = named("x_{}", "y_{}")
    del values["y_test"]
    path = arrays(tmp_path / "a.h5", **values)
    scan = open_source("hdf5", path).scan()
    labels = {split: [entry.label for entry in of.entries] for split, of in scan.splits.items()}
    assert labels == {"train": LABELS["train"], "test": [-1] * 3}
    assert open_source("hdf5", path, label="none").scan().classes is None
    assert [*open_source("hdf5", path, image="x_train").scan().splits] == [""]


def test_splits_in_one_file_are_neither_attached_nor_divided(tmp_path: Path) -> None:
    path = arrays(tmp_path / "a.h5", **named("x_{}", "y_{}"))
    with refused(UsageError, path, "test, train", "image="):
        attach(open_source("hdf5", path), tmp_path / "index")
    refuses(2, "convert", path, tmp_path / "out", "--to", "lmdb", "--val", "0.1", facts=("--val",))
    forged = reopen("hdf5", path, {"train": {"name": "a.h5", "member": []}}, {})
    with refused(CorruptDataset, "splits"):
        forged.scan()


def tars(source: Path, names: list[str]) -> Path:
    """Write archives of one image each, whose label is the position of the name."""
    for label, name in enumerate(names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(source / name, "w") as archive:
            for suffix, data in (("jpg", JPEGS["train"]), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{label}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return source


@pytest.mark.parametrize(
    "names",
    [
        ["train/0.tar", "train/1.tar", "val/0.tar"],
        ["my-train-0.tar", "my-train-1.tar", "my-val-0.tar"],
    ],
    ids=["folders", "names"],
)
def test_archives_of_splits_are_never_mixed(names: list[str], tmp_path: Path) -> None:
    source = tars(tmp_path / "src", names)
    target = tmp_path / "out"
    command = (source, target, "--to", "lmdb", "--workers", "1", "--no-shuffle")
    refuses(2, "convert", "webdataset", *command, facts=("train", "val", f"convert {source}"))
    assert run_main("convert", *command).returncode == 0
    labels = {split: [*open_dataset(target / split).targets] for split in ("train", "val")}
    assert labels == {"train": [0, 1], "val": [2]}
    assert verify(target, against=source).findings == []
    other = tars(tmp_path / "other", names[::-1])
    assert verify(target, against=other).findings != []
    every = f"{source}/{'*/' * ('/' in names[0])}*.tar"
    assert run_main("convert", "webdataset", every, *command[1:], "--force").returncode == 0


def test_a_pattern_in_a_manifest_does_not_lead_out(tmp_path: Path) -> None:
    source = tars(tmp_path / "src", ["train.tar"])
    with refused(CorruptDataset, "split"):
        reopen("webdataset", source, {"train": {"name": "src", "member": ["{..,a}/x.tar"]}}, {})
