"""Files of annotations or tables, one for each split of a folder, by one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_tree, run_main
from refusals import refused, refuses

from shardkit import UsageError, convert, open_dataset, open_source, repair, verify
from shardkit.errors import CorruptDataset
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
    assert opened.scan().notes == ["next to it, not read: notes.txt"]
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
