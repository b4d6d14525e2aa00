"""Datasets as people download them, rebuilt with a few images: what is read, and what is refused.

The expected values are written by hand.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from helpers import encoded, execute, jpeg, make_tree, png, run_main
from PIL import Image
from refusals import refused, refuses

from shardkit import convert, open_dataset
from shardkit.errors import UsageError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

JPEG = jpeg()


def made(files: Mapping[str, bytes], *options: str) -> Path:
    """Return the dataset of a folder, converted without the name of a kind."""
    source = make_tree(Path("src"), files)
    words = ("--to", "lmdb", "--workers", "1", "--no-shuffle")
    done = run_main("convert", source, "OUT", *words, *options)
    assert done.returncode == 0, done.stderr
    return Path("OUT")


def labels(path: Path) -> dict[str, str]:
    """Return the class of each image of a dataset, by its path."""
    dataset = open_dataset(path)
    classes = dataset.classes or []
    return {name: classes[dataset.targets[row]] for row, name in enumerate(dataset.paths)}


def values(path: Path, field: str) -> dict[str, Any]:
    """Return the value of a field of each image, by its path."""
    dataset = open_dataset(path, fields=[field])
    return {name: dataset[row][0] for row, name in enumerate(dataset.paths)}


def boxes(path: Path) -> dict[str, list[list[object]]]:
    """Return the sides of the boxes and their classes, by the path of the image."""
    names = open_dataset(path).schema["boxes"].classes or ()
    return {
        image: [[*map(float, box[:4]), *(names[int(of)] for of in box[4:])] for box in found]
        for image, found in values(path, "boxes").items()
    }


def run_way(message: str) -> None:
    """Run the commands of a message."""
    way = re.split(r"\. Pass |; or, | \(or ", message.split("run ", 1)[1])[0]
    for command in re.sub("(;|, and) (?=shardkit |tar |\\()", "\n", way).splitlines():
        if command.startswith("shardkit "):
            done = run_main(*shlex.split(command)[1:])
            assert done.returncode == 0, done.stderr
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            execute("bash", "-ec", command, env={"PATH": path}, check=True)


PLACES = {
    **{f"data_256/{name}/1.jpg": JPEG for name in ("a/airfield", "b/badlands", "f/field/wild")},
    **{f"val_256/Places365_val_{n}.jpg": JPEG for n in (1, 2)},
    "places365_train_standard.txt": b"/a/airfield/1.jpg 0\n/b/badlands/1.jpg 1\n"
    b"/f/field/wild/1.jpg 2\n",
    "places365_val.txt": b"Places365_val_1.jpg 2\nPlaces365_val_2.jpg 0\n",
    "categories_places365.txt": b"/a/airfield 0\n/b/badlands 1\n/f/field/wild 2\n",
}


@pytest.mark.parametrize("top", ["", "places/"])
def test_places365_becomes_both_splits(top: str) -> None:
    out = made({f"{top}{name}": content for name, content in PLACES.items()})
    assert labels(out / "train") == {
        "a/airfield/1.jpg": "0",
        "b/badlands/1.jpg": "1",
        "f/field/wild/1.jpg": "2",
    }
    assert labels(out / "val") == {"Places365_val_1.jpg": "2", "Places365_val_2.jpg": "0"}
    assert open_dataset(out / "val").classes == ["0", "1", "2"]


def test_a_list_of_one_split_is_not_the_whole_dataset() -> None:
    """As Places365 without the list of the training set, and Tiny ImageNet in a folder."""
    source = make_tree(Path("a"), {k: v for k, v in PLACES.items() if "train" not in k})
    facts: tuple[str, ...] = ("table a/places365_val.txt", "imagefolder a/data_256")
    refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
    tiny = {f"tiny/train/{name}/images/0.JPEG": JPEG for name in ("n01", "n02")}
    tiny |= {"tiny/val/images/0.JPEG": JPEG, "tiny/val/images/1.JPEG": JPEG}
    tiny["tiny/val/val_annotations.txt"] = b"0.JPEG\tn02\t0\t1\t2\t3\n1.JPEG\tn01\t0\t1\t2\t3\n"
    facts = (
        "table b/tiny/val/val_annotations.txt",
        "--classes b/tiny/train",
        "folder b/tiny/train",
    )
    refuses(2, "convert", make_tree(Path("b"), tiny), "OUT", "--to", "lmdb", facts=facts)


def test_rows_of_one_box_each_are_joined() -> None:
    """As TensorFlow's annotations from Roboflow."""
    table = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
    rows = "{0}1.jpg,24,16,dog,1,2,10,12\n{0}2.jpg,24,16,cat,5,6,7,8\n{0}1.jpg,24,16,cat,0,0,3,4\n"
    files = {f"{split}/{split}{n}.jpg": JPEG for split in ("train", "valid") for n in (1, 2)}
    for split in ("train", "valid"):
        files[f"{split}/_annotations.csv"] = (table + rows.format(split)).encode()
    out = made(files)
    assert boxes(out / "train") == {
        "train1.jpg": [[1, 2, 10, 12, "dog"], [0, 0, 3, 4, "cat"]],
        "train2.jpg": [[5, 6, 7, 8, "cat"]],
    }
    assert len(boxes(out / "valid")) == 2
    assert run_main("verify", out, "--against", "src").returncode == 0


BOXES: dict[str, tuple[bytes, dict[str, list[list[object]]]]] = {
    "global wheat": (
        b'image_id,width,bbox,source\n1,24,"[8.0, 4.0, 6, 3]",x\n1,24,"[0, 0, 9.5, 5]",x\n',
        {"1.jpg": [[8, 4, 14, 7], [0, 0, 9.5, 5]]},
    ),
    "RSNA": (
        b"patientId,x,y,width,height,Target\n1,,,,,0\n2,2.0,1.0,3.5,4,1\n2,5,6,3,4,1\n",
        {"1.jpg": [], "2.jpg": [[2, 1, 5.5, 5, "1"], [5, 6, 8, 10, "1"]]},
    ),
    "VinBigData": (
        b"image_id,class_name,class_id,x_min,y_min,x_max,y_max\n1,No finding,14,,,,\n"
        b"2,Mass,8,1.5,2,3,4\n2,Mass,8,1,2,3,4\n",
        {"1.jpg": [], "2.jpg": [[1.5, 2, 3, 4, "Mass"], [1, 2, 3, 4, "Mass"]]},
    ),
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes_of_tables_are_recognized(name: str) -> None:
    table, expected = BOXES[name]
    out = made({"train/1.jpg": JPEG, "train/2.jpg": JPEG, "train.csv": table})
    assert boxes(out) == expected


def test_boxes_that_may_be_sizes_or_corners_need_a_choice() -> None:
    table = b'image_id,bbox\n1,"[1, 2, 6, 13]"\n'
    source = make_tree(Path("src"), {"train/1.jpg": JPEG, "train.csv": table})
    facts = ("--boxes bbox:xywh", "--boxes bbox:xyxy")
    refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)


def test_boxes_as_fractions_are_not_pixels() -> None:
    """As in Open Images, whose values are kept."""
    table = b"ImageID,LabelName,XMin,XMax,YMin,YMax\n1,/m/0,0.1,0.9,0.2,1\n1,/m/1,0,0.5,0,0.5\n"
    files = {"train/1.jpg": JPEG, "boxes.csv": table}
    assert list(values(made(files), "xmax").values()) == [["0.9", "0.5"]]
    words = ["--to", "lmdb", "--root", "src/train", "--image", "ImageID", "--suffix", ".jpg"]
    words += ["--join-rows", "--boxes", "XMin,YMin,XMax,YMax:xyxy"]
    facts = ("XMin,YMin,XMax,YMax", "fractions", "--keep")
    refuses(2, "convert", "table", "src/boxes.csv", "B", *words, facts=facts)


def test_captions_of_several_rows_are_kept() -> None:
    """As in Flickr8k."""
    table = b'image,caption\n1.jpg,a girl\n1.jpg,"a child, outside"\n2.jpg,a dog\n'
    out = made({"Images/1.jpg": JPEG, "Images/2.jpg": JPEG, "captions.txt": table})
    assert values(out, "caption") == {"1.jpg": ["a girl", "a child, outside"], "2.jpg": ["a dog"]}


def test_several_rows_of_labels_are_several_labels() -> None:
    table = b"image,label\n1.jpg,cat\n1.jpg,dog\n1.jpg,cat\n2.jpg,dog\n"
    out = made({"images/1.jpg": JPEG, "images/2.jpg": JPEG, "labels.csv": table})
    assert {name: [*map(int, of)] for name, of in values(out, "labels").items()} == {
        "1.jpg": [1, 1],
        "2.jpg": [0, 1],
    }


def test_rows_that_repeat_a_label_are_one_label() -> None:
    table = b"image,label\n1.jpg,cat\n1.jpg,cat\n2.jpg,dog\n"
    out = made({"images/1.jpg": JPEG, "images/2.jpg": JPEG, "labels.csv": table})
    assert labels(out) == {"1.jpg": "cat", "2.jpg": "dog"}


def test_rows_that_contradict_each_other_are_bad() -> None:
    table = b"image,label,age\n1.jpg,cat,3\n1.jpg,dog,3\n2.jpg,dog,4\n2.jpg,dog,4\n"
    make_tree(Path("src"), {"1.jpg": JPEG, "2.jpg": JPEG, "labels.csv": table})
    words = ["--to", "lmdb", "--image", "image", "--label", "label", "--keep", "age:int64"]
    refuses(1, "convert", "table", "src/labels.csv", "A", *words, facts=("1.jpg", "--join-rows"))
    words += ["--join-rows"]
    refuses(
        1, "convert", "table", "src/labels.csv", "B", *words, facts=("1.jpg", "differ in label")
    )
    words += ["--on-error", "skip"]
    assert run_main("convert", "table", "src/labels.csv", "D", *words).returncode == 0
    assert (labels(Path("D")), values(Path("D"), "age")) == ({"2.jpg": "dog"}, {"2.jpg": 4})


def test_pixels_in_a_table_get_the_command_that_reads_them() -> None:
    """As MNIST and FER2013 at Kaggle."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8), np.uint8)
    rows = [",".join(map(str, image.ravel())) for image in pixels]
    header = ",".join(f"pixel{n}" for n in range(64))
    digits = "\n".join([f"label,{header}", *(f"{n},{row}" for n, row in enumerate(rows))])
    faces = ["emotion,pixels,Usage"]
    faces += [f"{n},{row.replace(',', ' ')},{'AB'[n % 2]}" for n, row in enumerate(rows)]
    for name, table, expected in (
        ("digits", digits, {"DST/digits": [0, 1, 2]}),
        ("faces", "\n".join(faces), {"DST/A": [0, 2], "DST/B": [1]}),
    ):
        source = make_tree(Path(name), {f"{name}.csv": table.encode()})
        done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=(f"{name}.csv", "pixels"))
        run_way(done.stderr)
        for path, numbers in expected.items():
            dataset = open_dataset(path)
            assert sorted(dataset.targets) == numbers
            assert dataset.classes == ["0", "1", "2"]
            for row, number in enumerate(dataset.targets):
                assert np.array_equal(np.asarray(dataset[row][0].convert("L")), pixels[number])


def test_unfinished_downloads_are_named() -> None:
    for name in ("photos.zip.part", "Unconfirmed 1.crdownload"):
        source = make_tree(Path(name[:3]), {name: b"PK"})
        facts = (name, "download it again")
        refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
        refuses(2, "convert", source / name, "OUT", "--to", "lmdb", facts=facts)


def test_archives_of_numpy_are_splits() -> None:
    for split, numbers in (("train", [1, 0]), ("test", [2])):
        images = np.zeros((len(numbers), 4, 4, 3), np.uint8)
        make_tree(Path("src"), {})
        np.savez(f"src/{split}.npz", images=images, labels=numbers)
    out = made({})
    assert [*open_dataset(out / "train").targets] == [1, 0]
    assert [*open_dataset(out / "test").targets] == [2]
    make_tree(Path("one"), {})
    np.savez("one/pathmnist.npz", test_images=images, test_labels=numbers)
    assert run_main("convert", "one", "OUT2", "--to", "lmdb").returncode == 0


def test_images_in_a_parquet_table_get_the_kind_that_reads_them() -> None:
    pq.write_table(pa.table({"data": [JPEG], "label": [1]}), "t.parquet")
    words = ("--to", "lmdb", "--image", "data")
    refuses(2, "convert", "table", "t.parquet", "OUT", *words, facts=("convert huggingface",))
    assert run_main("convert", "huggingface", "t.parquet", "OUT", "--to", "lmdb").returncode == 0


def test_annotations_next_to_images_are_not_lost() -> None:
    """As of LabelMe and Supervisely."""
    for name in ("annotations/{}.json", "ds0/ann/{}.jpg.json"):
        folder = "images" if name.startswith("ann") else "ds0/img"
        files = {f"{folder}/{n}.jpg": JPEG for n in (1, 2)}
        files |= {name.format(n): json.dumps({"shapes": []}).encode() for n in (1, 2)}
        source = make_tree(Path(folder[:3]), files)
        facts = (name.format(1), "COCO", "--classes")
        refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)


def test_a_partition_is_not_a_label() -> None:
    """As in CelebA."""
    files = {f"img_align_celeba/{n}.jpg": JPEG for n in (1, 2)}
    out = made({**files, "list_eval_partition.txt": b"1.jpg 0\n2.jpg 1\n"})
    assert open_dataset(out).classes == []
    assert [*open_dataset(out).targets] == [-1, -1]


def test_a_single_folder_of_images_next_to_others_is_no_class() -> None:
    """As in Oxford Buildings."""
    files = {f"oxbuild_images/{n}.jpg": JPEG for n in (1, 2)} | {"gt_files/good.txt": b"oxc1\n"}
    assert [*open_dataset(made(files)).targets] == [-1, -1]


def test_a_negative_label_in_python_is_stated_as_none() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    with refused(UsageError, "such as -1", "as None"):
        convert([(image, -1)], "OUT", to="lmdb")
    convert([(image, 1), (image, None)], "OUT", to="lmdb")
    assert sorted(open_dataset("OUT").targets) == [-1, 1]


def test_lists_next_to_class_folders_are_named() -> None:
    """As in Food-101, whose lists select the splits."""
    names = [f"{name}/{n}" for name in ("pie", "ribs") for n in (1, 2)]
    files = {f"food/images/{name}.jpg": JPEG for name in names}
    files |= {"food/meta/train.txt": b"pie/1\nribs/1\n", "food/meta/test.txt": b"pie/2\nribs/2\n"}
    files["food/README.txt"] = b"pie/1 is a pie"
    source = make_tree(Path("src"), files)
    done = run_main("convert", source, "OUT", "--to", "lmdb")
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("read as"))
    assert "without food/meta/test.txt, food/meta/train.txt (--exclude FILE" in line
    words = ("--to", "lmdb", "--exclude", source / "food/meta/test.txt")
    assert run_main("convert", "imagefolder", source / "food/images", "A", *words).returncode == 0
    assert labels(Path("A")) == {"pie/1.jpg": "pie", "ribs/1.jpg": "ribs"}


def test_boxes_in_lists_are_named() -> None:
    """As in WIDER FACE."""
    files = {
        f"WIDER_{split}/images/{event}/{split}_{n}.jpg": JPEG
        for split in ("train", "val")
        for event in ("0--Parade", "1--Dancing")
        for n in (1, 2)
    }
    for split in ("train", "val"):
        rows = [f"{event}/{split}_1.jpg\n1\n1 2 3 4 0 0\n" for event in ("0--Parade", "1--Dancing")]
        files[f"wider_face_split/wider_face_{split}_bbx_gt.txt"] = "".join(rows).encode()
    source = make_tree(Path("src"), files)
    facts = ("wider_face_train_bbx_gt.txt (boxes", "COCO", "wider_face_val_bbx_gt.txt")
    refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)


def test_a_mask_of_each_object_becomes_one_mask() -> None:
    """As in the Data Science Bowl 2018."""
    for name in ("00ae", "01bf"):
        files = {f"{name}/images/{name}.png": png(width=4, height=2)}
        for number, column in enumerate((1, 3), 1):
            mask = np.zeros((2, 4), np.uint8)
            mask[:, column] = 255
            files[f"{name}/masks/{number}.png"] = encoded(Image.fromarray(mask), "PNG")
        source = make_tree(Path("train"), files)
    done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=("masks", "--classes"))
    run_way(done.stderr)
    masks = values(Path("DST"), "mask")
    assert len(masks) == 2
    assert {tuple(map(int, row)) for mask in masks.values() for row in np.asarray(mask)} == {
        (0, 1, 0, 2)
    }


def test_a_folder_for_each_image_is_no_class() -> None:
    """As in the test set of the Data Science Bowl 2018."""
    files = {f"{name}/images/{name}.png": png() for name in ("0aa", "0bb")}
    source = make_tree(Path("test"), files)
    facts = ("one image each", "--classes")
    done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
    run_way(done.stderr)
    assert {*open_dataset("DST").paths} == {"0aa.png", "0bb.png"}
    assert [*open_dataset("DST").targets] == [-1, -1]


def test_other_masks_next_to_an_image_are_no_images() -> None:
    """As the parts of ADE20K."""
    files = {
        f"{room}/ADE_1{end}.png": png(mode="L") for room in "ab" for end in ("", "_seg", "_parts_1")
    }
    source = make_tree(Path("src"), files)
    facts = ("--mask-suffix '_seg?'", "--mask-suffix _parts_1,_seg")
    refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
    words = ("--to", "lmdb", "--mask-suffix", "_parts_1,_seg")
    assert run_main("convert", "pairs", source, "OUT", *words).returncode == 0
    assert labels(Path("OUT")) == {"a/ADE_1.png": "a", "b/ADE_1.png": "b"}


def test_captions_of_the_hub_are_kept() -> None:
    rows = b'{"file_name": "1.jpg", "text": "a cat"}\n{"file_name": "2.jpg", "text": "a dog"}\n'
    out = made({"train/1.jpg": JPEG, "train/2.jpg": JPEG, "train/metadata.jsonl": rows})
    assert values(out, "text") == {"1.jpg": "a cat", "2.jpg": "a dog"}


def test_classes_next_to_masks_are_noted() -> None:
    """As in CUB-200 with its segmentations."""
    files = {
        f"{top}/{bird}/1.{end}": content
        for top, end, content in (("images", "jpg", JPEG), ("segmentations", "png", png(mode="L")))
        for bird in ("001.Auk", "002.Jay")
    }
    source = make_tree(Path("src"), files)
    done = run_main("convert", source, "OUT", "--to", "lmdb")
    way = done.stdout.split("to read them, run shardkit ")[1].splitlines()[0]
    assert run_main(*shlex.split(way)).returncode == 0
    assert open_dataset("DST").classes == ["001.Auk", "002.Jay"]


def test_archives_next_to_folders_of_images_need_a_choice() -> None:
    """As ImageNet with its development kit, and Caltech 101 in a folder."""
    files = {f"{split}/{name}/1.jpg": JPEG for split in ("train", "val") for name in "ab"}
    source = make_tree(Path("src"), files)
    with tarfile.open(source / "devkit.tar", "w"):
        pass
    facts = ("imagefolder src OUT/imagefolder", "webdataset src OUT/webdataset")
    refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
    assert run_main("convert", "imagefolder", source, "OUT", "--to", "lmdb").returncode == 0
    assert labels(Path("OUT/val")) == {"a/1.jpg": "a", "b/1.jpg": "b"}


def test_a_second_folder_of_masks_is_noted() -> None:
    """As in DRIVE, whose folder `mask` has the field of view, and not the vessels."""
    files = {
        f"DRIVE/{split}/{name}": png(mode="L")
        for split in ("training", "test")
        for name in ("images/21_x.png", "mask/21_x_mask.png", "1st_manual/21_x_manual1.png")
    }
    source = make_tree(Path("src"), files)
    done = run_main("convert", source, "OUT", "--to", "lmdb")
    masks = done.stdout.split("to read all, pass --masks ")[1].splitlines()[0]
    words = ("--to", "lmdb", "--masks", masks)
    assert run_main("convert", "pairs", source / "DRIVE", "BOTH", *words).returncode == 0
    assert [*open_dataset("BOTH/test").schema] == ["image", "mask", "mask_1st_manual"]


def of_images(names: str, texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a file for each of some names, and others."""
    return {**dict.fromkeys(names.split(), JPEG), **texts}


PLANE = b"imagesource:GoogleEarth\n1 2 10 2 10 12 1 12 plane 0\n"

TEXTS: dict[str, tuple[dict[str, bytes], dict[str, dict[str, Any]]]] = {
    "KITTI": (
        of_images(
            "training/image_2/0.jpg training/image_2/1.jpg testing/image_2/0.jpg",
            {f"training/{name}/{n}.txt": b"%d" % n for n in (0, 1) for name in ("calib", "label_2")}
            | {"training/label_2/1.txt": b"Car 0 0 1 2 20 12"},
        ),
        {"": {"0.jpg": "0", "1.jpg": "Car 0 0 1 2 20 12"}},
    ),
    "Supervisely": (
        of_images(
            "ds0/img/a.jpg ds1/img/b.jpg",
            {"ds0/ann/a.jpg.json": b'{"objects": [1]}', "ds1/ann/b.jpg.json": b'{"objects": []}'},
        ),
        {"ds0": {"a.jpg": {"objects": [1]}}, "ds1": {"b.jpg": {"objects": []}}},
    ),
    "DOTA": (
        of_images(
            "train/images/P1.jpg val/images/P2.jpg",
            {
                "train/labelTxt-v1.0/labelTxt/P1.txt": PLANE,
                "val/labelTxt-v1.0/labelTxt/P2.txt": b"gsd:1",
            },
        ),
        {"train": {"P1.jpg": PLANE.decode()}, "val": {"P2.jpg": "gsd:1"}},
    ),
    "VisDrone": (
        of_images(
            "DET-train/images/1.jpg DET-val/images/1.jpg",
            {"DET-train/annotations/1.txt": b"1,2,3,4", "DET-val/annotations/1.txt": b"5,6,7,8"},
        ),
        {"train": {"1.jpg": "1,2,3,4"}, "val": {"1.jpg": "5,6,7,8"}},
    ),
    "SA-1B": (
        of_images(
            "sa_00/1.jpg sa_01/2.jpg",
            {"sa_00/1.json": b'{"annotations": [1]}', "sa_01/2.json": b'{"annotations": [2]}'},
        ),
        {"": {"sa_00/1.jpg": {"annotations": [1]}, "sa_01/2.jpg": {"annotations": [2]}}},
    ),
    "labelme": (
        of_images(
            "images/train/1.jpg images/val/2.jpg",
            {"json/train/1.json": b'{"shapes": [1]}', "json/val/2.json": b'{"shapes": [2]}'},
        ),
        {"train": {"1.jpg": {"shapes": [1]}}, "val": {"2.jpg": {"shapes": [2]}}},
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_each_image_is_stored_by_the_commands_of_the_message(name: str) -> None:
    files, expected = TEXTS[name]
    source = make_tree(Path("src"), files)
    done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=("tar ", "--classes"))
    run_way(done.stderr)
    assert {split: values(Path("DST", split), "annotation") for split in expected} == expected


def test_boxes_in_lists_of_objects_are_read_by_the_commands_of_the_message() -> None:
    """As in BDD100K, whose other objects have no boxes, and CrowdHuman."""
    car = {"category": "car", "box2d": {"x1": 1.5, "y1": 2, "x2": 10, "y2": 12}}
    lane = {"category": "lane", "poly2d": [[1, 2]]}
    frames = [{"name": "a.jpg", "labels": [lane, car]}, {"name": "b.jpg", "attributes": {"x": 1}}]
    person = {"tag": "person", "fbox": [9, 2, 8, 4], "hbox": [9, 1, 2, 3]}
    rows = [{"ID": "7,c9", "gtboxes": [person]}, {"ID": "8,c9", "gtboxes": []}]
    bdd = {f"bdd/images/100k/{name}.jpg": JPEG for name in ("train/a", "train/b", "val/a", "val/b")}
    for split in ("train", "val"):
        bdd[f"bdd/labels/det_20/det_{split}.json"] = json.dumps(frames).encode()
    crowd = {f"Images/{name}.jpg": JPEG for name in ("7,c9", "8,c9")}
    crowd["annotation_train.odgt"] = "\n".join(map(json.dumps, rows)).encode()
    for name, files in (("BDD", bdd), ("crowd", crowd)):
        source = make_tree(Path(name), files)
        done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=("_train.", "--classes"))
        run_way(done.stderr.replace("DST", f"DST{name}"))
    found = [[1.5, 2, 10, 12, "car"]]
    assert boxes(Path("DSTBDD/train")) == {"a.jpg": found, "b.jpg": []}
    assert boxes(Path("DSTBDD/val")) == {"a.jpg": found, "b.jpg": []}
    assert values(Path("DSTBDD/train"), "labels")["a.jpg"] == [lane, car]
    assert (
        run_main(
            "verify",
            "DSTBDD/val",
            "--against",
            "BDD/bdd/labels/det_20/det_val.json@BDD/bdd/images/100k/val",
        ).returncode
        == 0
    )
    assert boxes(Path("DSTcrowd")) == {"7,c9.jpg": [[9, 2, 17, 6, "person"]], "8,c9.jpg": []}


def coco(images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> bytes:
    categories = [{"id": 3, "name": "cat"}, {"id": 5, "name": "sky"}]
    texts = {"images": images, "annotations": annotations, "categories": categories}
    return json.dumps(texts).encode()


def test_segments_of_panoptic_annotations_are_boxes() -> None:
    segments = [
        {"id": 7, "category_id": 5, "bbox": [0, 0, 9, 4], "iscrowd": 0},
        {"id": 8, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 1},
    ]
    annotations = [
        {"image_id": 1, "file_name": "1.png", "segments_info": segments},
        {"image_id": 2, "file_name": "2.png", "segments_info": segments[:1]},
    ]
    images = [{"id": n, "file_name": f"{n}.jpg"} for n in (1, 2)]
    content = coco(images, annotations)
    out = made({"val/1.jpg": JPEG, "val/2.jpg": JPEG, "annotations/panoptic_val.json": content})
    assert boxes(out) == {
        "1.jpg": [[0, 0, 9, 4, "sky"], [1, 2, 4, 6, "cat"]],
        "2.jpg": [[0, 0, 9, 4, "sky"]],
    }
    assert values(out, "annotations") == {"1.jpg": annotations[:1], "2.jpg": annotations[1:]}


def test_annotations_that_name_images_by_url_are_recognized() -> None:
    """As in LVIS, whose splits share COCO's training images."""
    files = {f"train2017/{n}.jpg": JPEG for n in (1, 2)} | {"val2017/3.jpg": JPEG}
    for split, number in (("train", 1), ("val", 2)):
        images = [{"id": number, "coco_url": f"http://x.org/train2017/{number}.jpg"}]
        box = {"id": 1, "image_id": number, "category_id": 3, "bbox": [1, 2, 3, number]}
        files[f"lvis_v1_{split}.json"] = coco(images, [box])
    out = made(files)
    assert boxes(out / "train") == {"train2017/1.jpg": [[1, 2, 4, 3, "cat"]]}
    assert boxes(out / "val") == {"train2017/2.jpg": [[1, 2, 4, 4, "cat"]]}


def test_the_first_line_of_a_list_is_no_header() -> None:
    """As the scenes of ADE20K, whose names have no suffix."""
    names = ("training/ADE_train_1", "validation/ADE_val_1")
    files = {f"images/{name}.jpg": JPEG for name in names}
    files |= {f"annotations/{name}.png": png(mode="L") for name in names}
    files["sceneCategories.txt"] = b"ADE_train_1 bedroom\nADE_val_1 street\n"
    source = make_tree(Path("src"), files)
    done = run_main("convert", source, "OUT", "--to", "lmdb")
    assert {*open_dataset("OUT/validation").paths} == {"images/validation/ADE_val_1.jpg"}
    run_way(done.stdout.split("To read them, ")[1].partition(" if its lines")[0])
    assert labels(Path("DST")) == {f"{names[0]}.jpg": "bedroom", f"{names[1]}.jpg": "street"}
    words = ("--to", "lmdb", "--image", "ADE_train_1", "--label", "bedroom", "--suffix", ".jpg")
    facts = ("has no header", "ADE_train_1.jpg")
    refuses(2, "convert", "table", source / "sceneCategories.txt", "A", *words, facts=facts)


def test_folders_of_masks_without_images_are_left_out() -> None:
    """As labelme exports masks, also as arrays and as pictures for people."""
    names = ("JPEGImages/1.jpg", "SegmentationClassVisualization/1.jpg")
    files = {**dict.fromkeys(names, JPEG), "SegmentationClassPNG/1.png": png(mode="L")}
    out = made({**files, "SegmentationClass/1.npy": b"\x93NUMPY", "class_names.txt": b"cat\n"})
    assert [*open_dataset(out).schema] == ["image", "mask"]
    assert [*open_dataset(out).paths] == ["JPEGImages/1.jpg"]


def test_numbers_that_divide_numbered_images_are_splits() -> None:
    """As in CUB-200-2011."""
    paths = ["001.Auk/1.jpg", "001.Auk/2.jpg", "002.Jay/3.jpg", "002.Jay/4.jpg"]
    files = {f"CUB/images/{path}": JPEG for path in paths}
    for name, column in (
        ("images", paths),
        ("image_class_labels", [1, 1, 2, 2]),
        ("train_test_split", [1, 0, 0, 1]),
        ("bounding_boxes", ["1.0 2.0 3.0 4.0"] * 4),
    ):
        lines = [f"{number} {value}\n" for number, value in enumerate(column, 1)]
        files[f"CUB/{name}.txt"] = "".join(lines).encode()
    done = run_main("convert", make_tree(Path("src"), files), "OUT", "--to", "lmdb")
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("read as"))
    assert "not read: CUB/bounding_boxes.txt" in line
    run_way(line.split("to read its splits, ")[1].split("); ")[0])
    assert labels(Path("DST/train")) == {paths[0]: "001.Auk", paths[3]: "002.Jay"}
    assert labels(Path("DST/test")) == {paths[1]: "001.Auk", paths[2]: "002.Jay"}


SEQUENCES = {
    "MOT17": {
        f"{split}/MOT17-0{n}/{name}": content
        for split in ("train", "test")
        for n in (1, 2)
        for name, content in (("img1/000001.jpg", JPEG), ("det/det.txt", b"1,-1,9,4,2,3,1\n"))
    },
    "GOT-10k": {
        f"{split}/GOT-10k_{n}/{name}": content
        for split in ("train", "test")
        for n in (1, 2)
        for name, content in (("000001.jpg", JPEG), ("groundtruth.txt", b"347,443,429,272\n"))
    },
    "KITTI": {
        f"{split}/{name}": content
        for split in ("training", "testing")
        for n in (1, 2)
        for name, content in ((f"image_02/000{n}/1.jpg", JPEG), (f"label_02/000{n}.txt", b"0 0\n"))
    },
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_are_no_classes(name: str) -> None:
    files = SEQUENCES[name]
    source = make_tree(Path("src"), files)
    facts = ("sequences", "exported as COCO", "--classes")
    with zipfile.ZipFile("a.zip", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    refuses(2, "convert", "a.zip", "OUT", "--to", "lmdb", facts=(*facts, "unpack it"))
    done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
    run_way(done.stderr)
    made = [
        (top, open_dataset(path))
        for top in ("train", "test")
        for path in Path("DST").glob(f"{top}*")
    ]
    assert {target for _, dataset in made for target in dataset.targets} == {-1}
    expected = sorted(image for image in files if image.endswith(".jpg"))
    found = sorted((top, path) for top, dataset in made for path in dataset.paths)
    assert len(found) == len(expected)
    assert all(
        image.startswith(top) and image.endswith(path)
        for (top, path), image in zip(found, expected, strict=True)
    )


def test_folders_of_classes_and_a_table_are_both_splits() -> None:
    """As the German traffic signs (GTSRB)."""
    header = b"Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"
    row = b"0000%d.ppm;24;16;5;6;20;12;%d\n"
    folder = "GTSRB/Final_Training/Images"
    image = encoded(Image.new("RGB", (24, 16)), "PPM")
    files = {f"{folder}/0000{n}/0000{n}_00000.ppm": image for n in (0, 1)}
    files |= {f"{folder}/0000{n}/GT-0000{n}.csv": header + row % (n, n) for n in (0, 1)}
    files |= {f"GTSRB/Final_Test/Images/0000{n}.ppm": image for n in (0, 1)}
    table = header + row % (0, 1) + row % (1, 0)
    for name in ("GTSRB/Final_Test/Images/GT-final_test.csv", "GT-final_test.csv"):
        source = make_tree(Path(f"{name[:5]}-src"), {**files, name: table})
        facts = ("may be splits", "--label ClassId", "imagefolder")
        done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
        run_way(done.stderr.replace("DST", name[:5]))
        assert dict(targets(Path(f"{name[:5]}/Final_Test"))) == {"00000.ppm": 1, "00001.ppm": 0}
        assert [number for _, number in targets(Path(f"{name[:5]}/Final_Training"))] == [0, 1]


def targets(path: Path) -> list[tuple[str, int]]:
    """Return the path and label of each image of a dataset, in the order of the paths."""
    dataset = open_dataset(path)
    return sorted(zip(dataset.paths, map(int, dataset.targets), strict=True))


def test_a_table_of_another_folder_is_of_no_split() -> None:
    """As GTSRB at Kaggle, whose class folders are numbers."""
    files, tables = (
        {},
        {"Train": "ClassId,Path\n", "Test": "ClassId,Path\n", "Meta": "Path,ClassId\n"},
    )
    for number in (0, 2, 10):
        for name, image in (("Train", f"Train/{number}/1.png"), ("Test", f"Test/0{number}.png")):
            files[image] = png()
            tables[name] += f"{number},{image}\n"
        files[f"Meta/{number}.png"] = png()
        tables["Meta"] += f"Meta/{number}.png,{number}\n"
    out = made(files | {f"{name}.csv": table.encode() for name, table in tables.items()})
    assert targets(out / "train") == [(f"Train/{n}/1.png", n) for n in (0, 10, 2)]
    assert targets(out / "test") == [("Test/00.png", 0), ("Test/010.png", 10), ("Test/02.png", 2)]
    assert open_dataset(out / "test").classes == [*map(str, range(11))]


def test_numbers_in_file_names_become_fields() -> None:
    """As age, gender and race in UTKFace, where some names lack one."""
    names = ("100_0_4_2017.jpg.chip.jpg", "7_1_0_2016.jpg.chip.jpg", "61_1_20170109.jpg.chip.jpg")
    source = make_tree(Path("src"), {f"UTKFace/{name}": JPEG for name in names})
    facts = ("only folder", "numbers (100_0_4_)", "--classes")
    done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
    run_way(done.stderr)
    found = [values(Path("DST"), f"number_{n}") for n in (1, 2, 3)]
    assert found == [{names[0]: a, names[1]: b} for a, b in ((100, 7), (0, 1), (4, 0))]


@pytest.mark.parametrize(
    "names", [("cat.0", "cat.1", "dog.0", "dog.1"), ("a1__0", "a1__5", "a10__0", "a10__5")]
)
def test_words_in_file_names_become_classes(names: tuple[str, ...]) -> None:
    """As Dogs vs. Cats and COIL-100."""
    source = make_tree(Path("src"), {f"coil 100/{name}.jpg": JPEG for name in names})
    facts = ("only folder", "may contain classes", "--classes")
    done = refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=facts)
    run_way(done.stderr)
    expected = {f"{name}.jpg": name.replace("__", ".").split(".")[0] for name in names}
    assert labels(Path("DST")) == expected
    noted = run_main("convert", source / "coil 100", "NOTED", "--to", "lmdb")
    run_way(noted.stdout.replace("DST", "AGAIN").split("\n  time")[0])
    assert labels(Path("AGAIN")) == expected


def test_channels_that_are_not_rgb_have_a_way_out() -> None:
    """As EuroSAT with 13 bands."""
    pixels = np.arange(8 * 8 * 13, dtype=np.uint16).reshape(8, 8, 13)
    for name in ("Crop/1.tif", "Forest/2.tif"):
        (Path("src") / name).parent.mkdir(parents=True)
        tifffile.imwrite(
            Path("src") / name, pixels, photometric="minisblack", planarconfig="contig"
        )
    done = refuses(1, "convert", "src", "OUT", "--to", "lmdb", facts=("--pixels keep",))
    assert "decoded" not in done.stderr  # nothing of Pillow's own
    assert run_main("convert", "src", "OUT", "--to", "lmdb", "--pixels", "keep").returncode == 0
    dataset = open_dataset("OUT", decode="numpy")
    assert np.array_equal(np.asarray(dataset[0][0]).reshape(pixels.shape), pixels)


FOLDERS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "Chest X-Ray at Kaggle": (
        ("xray/train/a/1", "xray/val/b/2", "xray/xray/train/a/1", "xray/xray/val/b/2"),
        "may be a copy",
        {"train/a/1.jpg": "a", "val/b/2.jpg": "b"},
    ),
    "SUN397": (
        ("a/abbey/1", "a/alley/2", "b/bar/indoor/3"),
        "initials",
        {
            "a/abbey/1.jpg": "a/abbey",
            "a/alley/2.jpg": "a/alley",
            "b/bar/indoor/3.jpg": "b/bar/indoor",
        },
    ),
    "parts of ChestX-ray14": (
        ("images_001/images/1", "images_002/images/2"),
        "parts of one folder",
        {"images_001/images/1.jpg": "", "images_002/images/2.jpg": ""},
    ),
    "MVTec AD": (
        ("train/good/1", "test/good/2", "test/bad/3", "truth/bad/3"),
        "truth may not",
        {"train/good/1.jpg": "good", "test/good/2.jpg": "good", "test/bad/3.jpg": "bad"},
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_no_classes_get_the_command_that_reads_them(name: str) -> None:
    images, fact, expected = FOLDERS[name]
    source = make_tree(Path("src"), {f"{image}.jpg": JPEG for image in images})
    run_way(refuses(2, "convert", source, "OUT", "--to", "lmdb", facts=(fact, "--")).stderr)
    found: dict[str, str] = {}
    tops = [top for top in ("train/", "val/", "test/") if Path("DST", top).exists()]
    for top in tops or [""]:
        dataset = open_dataset(Path("DST", top))
        names = [*(dataset.classes or []), ""]  # -1 is the last one
        found |= {
            top + path: names[of] for path, of in zip(dataset.paths, dataset.targets, strict=True)
        }
    assert found == expected


def test_splits_in_a_folder_are_splits() -> None:
    """As CINIC-10, and State Farm with a table of the images in the classes."""
    files = {f"CINIC/{split}/{name}/1.jpg": JPEG for split in ("train", "valid") for name in "ab"}
    out = made(files)
    assert labels(out / "train") == labels(out / "valid") == {"a/1.jpg": "a", "b/1.jpg": "b"}
    names = {f"imgs/train/c{n}/{n}.jpg": JPEG for n in (0, 1)} | {"imgs/test/7.jpg": JPEG}
    table = b"subject,classname,img\np002,c0,0.jpg\np002,c1,1.jpg\n"
    source = make_tree(Path("farm"), {**names, "drivers.csv": table})
    assert run_main("convert", source, "FARM", "--to", "lmdb").returncode == 0
    assert labels(Path("FARM/train")) == {"c0/0.jpg": "c0", "c1/1.jpg": "c1"}
    assert targets(Path("FARM/test")) == [("7.jpg", -1)]


COLUMNS: dict[str, tuple[bytes, dict[str, list[object]]]] = {
    "points": (b"image,x,y\n1.jpg,3,4\n2.jpg,5,4\n", {"x": [3, 5], "y": [4, 4]}),
    "links": (b"image,link\n1.jpg,http://a\n2.jpg,http://b\n", {"link": ["http://a", "http://b"]}),
    "Open Images": (
        b"ImageID,LabelName,IsOccluded,IsInside\n1,/m/0,1,0\n2,/m/1,1,1\n",
        {"labelname": ["/m/0", "/m/1"], "isoccluded": [1, 1], "isinside": [0, 1]},
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_are_no_labels_are_kept(name: str) -> None:
    table, expected = COLUMNS[name]
    out = made({"images/1.jpg": JPEG, "images/2.jpg": JPEG, "data.csv": table})
    assert [*open_dataset(out).targets] == [-1, -1]
    for field, cells in expected.items():
        assert [*values(out, field).values()] == cells


def test_a_list_that_starts_with_a_number_has_no_header() -> None:
    """As FGVC Aircraft, and the splits of Oxford-IIIT Pet."""
    for ids, suffix in (("034 747-400\n095 Boeing 717\n", "0"), ("Cat_1 x\nCat_20 y\n", "1")):
        names = [line.split()[0] for line in ids.splitlines()]
        make_tree(Path("src"), {f"images/{name}.jpg": JPEG for name in names})
        make_tree(Path("src"), {f"list{suffix}.txt": ids.encode()})
        words = ["--to", "lmdb", "--root", "src/images", "--image", "1", "--label", "2"]
        words += ["--suffix", ".jpg"]
        done = run_main("convert", "table", f"src/list{suffix}.txt", f"OUT{suffix}", *words)
        assert done.returncode == 0, done.stderr
    assert labels(Path("OUT0")) == {"034.jpg": "747-400", "095.jpg": "Boeing 717"}
    assert labels(Path("OUT1")) == {"Cat_1.jpg": "x", "Cat_20.jpg": "y"}
