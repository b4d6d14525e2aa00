"""Folders as people have them: each is recognized, and none is read as if it had class folders."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import zipfile
from pathlib import Path

import pytest
from foreign import MAKERS
from helpers import jpeg, make_tree, png, run_main
from refusals import refused, refuses

from shardkit import convert, open_dataset, open_source, repair, verify
from shardkit.errors import BadImages, UsageError
from shardkit.sources.recognize import note_other_classes, recognized

pytestmark = pytest.mark.usefixtures("in_tmp_path")

JPEG = jpeg()
MASK = png(mode="L")
LABEL = b"0 0.5 0.5 0.2 0.2\n"
COCO = json.dumps(
    {
        "images": [{"id": 1, "file_name": "1.jpg"}],
        "annotations": [],
        "categories": [{"id": 1, "name": "cat"}],
    }
).encode()
XML = b"<annotation><filename>1.jpg</filename></annotation>"

OTHERS: dict[str, tuple[dict[str, bytes], str]] = {
    "YOLO of Ultralytics": (
        {
            "images/train/1.jpg": JPEG,
            "labels/train/1.txt": LABEL,
            "data.yaml": b"names: [a]\nnc: 1",
        },
        "yolo SRC",
    ),
    "YOLO of Roboflow": ({"train/images/1.jpg": JPEG, "train/labels/1.txt": LABEL}, "yolo SRC"),
    "YOLO of labelImg": ({"1.jpg": JPEG, "1.txt": LABEL, "classes.txt": b"a"}, "yolo SRC"),
    "masks": ({"images/1.jpg": JPEG, "masks/1.png": MASK}, "pairs SRC"),
    "masks in splits": (
        {"train/image/1.jpg": JPEG, "train/label/1_seg.png": MASK, "val/image/2.jpg": JPEG},
        "pairs SRC",
    ),
    "masks of Carvana": ({"train/1.jpg": JPEG, "train_masks/1_mask.png": MASK}, "pairs SRC"),
    "masks next to images": (
        {
            "benign/b (1).png": JPEG,
            "benign/b (1)_mask.png": MASK,
            "benign/b (1)_mask_1.png": MASK,
            "normal/n (1).png": JPEG,
            "normal/n (1)_mask.png": MASK,
        },
        "pairs SRC --mask-suffix '_mask,_mask_1?'",
    ),
    "masks next to images in splits": (
        {"train/healthy/0.jpg": JPEG, "train/ill/1.jpg": JPEG, "train/ill/1-seg.png": MASK},
        "pairs SRC --mask-suffix '-seg?'",
    ),
    "masks next to images without classes": (
        {"1.jpg": JPEG, "1_Segmentation.png": MASK},
        "pairs SRC --mask-suffix _Segmentation",
    ),
    "COCO": (
        {"annotations/instances_val2017.json": COCO, "val2017/1.jpg": JPEG},
        "coco SRC/annotations/instances_val2017.json --root SRC/val2017",
    ),
    "COCO of Roboflow": (
        {"train/_annotations.coco.json": COCO, "train/1.jpg": JPEG},
        "coco SRC/train/_annotations.coco.json",
    ),
    "VOC": (
        {"VOC2012/JPEGImages/1.jpg": JPEG, "VOC2012/Annotations/1.xml": XML},
        "voc SRC/VOC2012",
    ),
    "masks of CamVid": (
        {"train/1.png": MASK, "train_labels/1_L.png": MASK}
        | {"val/2.png": MASK, "val_labels/2_L.png": MASK},
        "pairs SRC",
    ),
    "masks of ISIC": (
        {
            "ISIC_Task1-2_Training_Input/1.jpg": JPEG,
            "ISIC_Task1_Training_GroundTruth/1_segmentation.png": MASK,
        },
        "pairs SRC",
    ),
    "masks of Cityscapes": (
        {
            f"{top}/train/bonn/bonn_{n}_{end}.png": MASK
            for top, end in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds"))
            for n in (1, 2)
        },
        "pairs SRC",
    ),
    "a table of numbers": (
        {"train/1.jpg": JPEG, "train.csv": b"filename,cat,my dog\n1.jpg,0.5,1\n"},
        "table SRC/train.csv --image filename --root SRC/train --keep 'cat,my_dog=my dog:int64'",
    ),
    "a list": (
        {"val/1.jpg": JPEG, "val.txt": b"1.jpg n02\n"},
        "table SRC/val.txt --image 1 --root SRC/val --label 2",
    ),
    "a table": (
        {
            "train_images/1.jpg": JPEG,
            "test_images/2.jpg": JPEG,
            "train.csv": b"file,label\n1.jpg,cat",
        },
        "table SRC/train.csv --image file --root SRC/train_images --label label",
    ),
    "metadata of Hugging Face": (
        {"1.jpg": JPEG, "metadata.csv": b"file_name,text\n1.jpg,a cat"},
        "table SRC/metadata.csv --keep 'text?'",
    ),
    "a folder around YOLO": (
        {"coco8/images/train/1.jpg": JPEG, "coco8/labels/train/1.txt": LABEL, "coco8.txt": b"x"},
        "yolo SRC/coco8",
    ),
    "two folders around COCO": (
        {"a/b/annotations/instances_val2017.json": COCO, "a/b/val2017/1.jpg": JPEG},
        "coco SRC/a/b/annotations/instances_val2017.json --root SRC/a/b/val2017",
    ),
    "a folder around masks, next to another": (
        {"set/images/1.jpg": JPEG, "set/masks/1.png": MASK, "docs/a.txt": b"x"},
        "pairs SRC/set",
    ),
    "YOLO in a cache of the Hub": (
        {
            "blobs/ab12": JPEG,
            "snapshots/f00/images/train/1.jpg": JPEG,
            "snapshots/f00/labels/train/1.txt": LABEL,
        },
        "yolo SRC/snapshots/f00",
    ),
    "a folder around the classes": (
        {"PetImages/Cat/1.jpg": JPEG, "PetImages/Dog/1.jpg": JPEG, "readme[1].txt": b"pets"},
        "imagefolder SRC/PetImages",
    ),
    "a folder around the splits": (
        {
            "ILSVRC/Data/CLS-LOC/train/n01/1.JPEG": JPEG,
            "ILSVRC/Data/CLS-LOC/train/n02/1.JPEG": JPEG,
            "ILSVRC/Data/CLS-LOC/val/n02/1.JPEG": JPEG,
            "ILSVRC/Annotations/1.xml": XML,
            "LOC_synset_mapping.txt": b"n01 tench",
        },
        "imagefolder SRC/ILSVRC/Data/CLS-LOC",
    ),
    "classes next to lists": (
        {
            "images/001.Auk/1.jpg": JPEG,
            "images/002.Jay/1.jpg": JPEG,
            "attributes/x.txt": b"x",
            "labels.txt": b"1 0.5 0.5 0.1 0.1",
        },
        "imagefolder SRC/images",
    ),
    "a cache of the Hub": (
        {"blobs/ab12": JPEG, "snapshots/f00/cat/1.jpg": JPEG, "snapshots/f00/dog/1.jpg": JPEG},
        "imagefolder SRC/snapshots/f00",
    ),
    "environments of LSUN": (
        {"church_val_lmdb/data.mdb": b"", "church_val_lmdb/lock.mdb": b"", "masks.txt": b""},
        "lmdb SRC/church_val_lmdb",
    ),
    "VOC of Kaggle": ({"images/1.jpg": JPEG, "annotations/1.xml": XML}, "voc SRC"),
    "VOC of Roboflow": ({"train/1.jpg": JPEG, "train/1.xml": XML}, "voc SRC"),
    "archives": ({"a.tar": b"", "b.tar": b""}, "webdataset SRC"),
    "archives in a folder": ({"shards/a.tar": b"", "x.txt": b""}, "webdataset SRC/shards"),
    "images alone in a folder": ({"images/1.jpg": JPEG}, "imagefolder SRC/images"),
    "COCO of another machine": (
        {
            "photos/1.jpg": JPEG,
            "a.json": COCO.replace(b'"1.jpg"', json.dumps("C:\\me\\photos\\1.jpg").encode()),
        },
        "coco SRC/a.json",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_are_refused_with_their_command(tmp_path: Path, name: str) -> None:
    files, words = OTHERS[name]
    source = make_tree(tmp_path / "src", files)
    expected = [word.replace("SRC", str(source)) for word in shlex.split(words)]
    target = tmp_path / "out"
    done = refuses(
        2, "convert", "imagefolder", source, target, "--to", "hdf5", facts=("--classes",)
    )
    command = shlex.split(done.stderr.rpartition("shardkit convert ")[2])
    assert command == [*expected[:2], str(target), "--to", "hdf5", *expected[2:]]
    with refused(UsageError, source, expected[0], "classes=True"):
        convert(source, target, to="lmdb")


@pytest.mark.parametrize(
    "name",
    ["YOLO of labelImg", "masks", "masks next to images without classes", "COCO", "VOC", "a table"],
)
def test_a_command_without_a_kind_recognizes_it(tmp_path: Path, name: str) -> None:
    source = make_tree(tmp_path / "src", OTHERS[name][0])
    kind = OTHERS[name][1].split()[0]
    done = run_main("convert", source, tmp_path / "out", "--to", "lmdb", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"read as {kind}: ")
    assert len(open_dataset(tmp_path / "out")) == 1


WRAPPED = {
    "doubled": ["seg_train/seg_train", "seg_test/seg_test"],
    "doubled, as splits": ["train/Train", "val/Val"],
    "of one name": ["train/data", "test/data"],
    "without names of splits": ["a/x", "b/x"],
}


@pytest.mark.parametrize("name", WRAPPED)
def test_folders_with_class_folders_in_a_folder_are_no_classes(tmp_path: Path, name: str) -> None:
    """As the landscapes of Intel at Kaggle: each folder has a folder with the classes."""
    tops = WRAPPED[name]
    files = {f"{top}/{label}/1.jpg": JPEG for top in tops for label in ("forest", "sea")}
    source = make_tree(tmp_path / "src", files)
    (source / tops[1] / "sea/1.jpg").unlink()
    target = tmp_path / "out"
    command = ("convert", source, target, "--to", "lmdb")
    if name == "without names of splits":
        facts = [f"imagefolder {source / top} {target / top[0]}" for top in tops]
        refuses(2, *command, facts=tuple(facts))
        return
    refuses(2, "convert", "imagefolder", *command[1:], facts=(f"shardkit convert {source} ",))
    assert run_main(*command, "--workers", "1").returncode == 0
    made = [open_dataset(path) for path in target.iterdir() if path.is_dir()]
    assert [dataset.classes for dataset in made] == [["forest", "sea"]] * 2
    assert sorted(sorted(dataset.targets) for dataset in made) == [[0], [0, 1]]
    assert run_main("verify", target, "--against", source).returncode == 0


def test_images_in_a_folder_of_no_class_have_no_labels(tmp_path: Path) -> None:
    """As train/train/cat.1.jpg of Kaggle's dogs versus cats, and as train/images/1.jpg."""
    files = {"train/train/cat.1.jpg": JPEG, "test/images/1.jpg": JPEG}
    source = make_tree(tmp_path / "src", files)
    assert run_main("convert", source, tmp_path / "out", "--to", "lmdb").returncode == 0
    for split in ("train", "test"):
        assert [*open_dataset(tmp_path / "out" / split).targets] == [-1]


SHARED = {
    "parts": [f"{part}/{label}/{part}.jpg" for part in ("art", "photo") for label in "xy"],
    "splits": [f"{label}/{part}/{label}.jpg" for part in ("train", "test") for label in "xy"],
    "masks": [f"{label}/{of}/1.png" for label in "xy" for of in ("images", "masks")],
}


@pytest.mark.parametrize("name", SHARED)
def test_folders_with_the_same_folders_are_no_classes(tmp_path: Path, name: str) -> None:
    """As domains (PACS), splits of each class, or images and masks of each class (BUSI's kind)."""
    source = make_tree(tmp_path / "src", dict.fromkeys(SHARED[name], MASK))
    done = refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("--classes",))
    assert (
        run_main("convert", source, "DST", "--to", "lmdb", "--classes", "--dry-run").returncode == 0
    )
    refuses(2, "convert", "imagefolder", source, "DST", "--to", "lmdb", facts=("--classes",))
    way = done.stderr.split("run ", 1)[1].split(". Pass ")[0]
    script, *commands = f"true; {way}".split("; shardkit ")
    with contextlib.chdir(tmp_path):
        subprocess.run(["bash", "-ec", script], check=True)
        for command in commands:
            assert run_main(*shlex.split(command), "--workers", "1").returncode == 0
        made = {path.name: open_dataset(path) for path in Path("DST").iterdir() if path.is_dir()}
    if name == "masks":
        fields = {label: [*dataset.schema] for label, dataset in made.items()}
        assert fields == {"x": ["image", "mask"], "y": ["image", "mask"]}
    else:
        assert sorted(made) == (["art", "photo"] if name == "parts" else ["test", "train"])
        assert [(of.classes, sorted(of.targets)) for of in made.values()] == [
            (["x", "y"], [0, 1])
        ] * 2


def test_classes_of_folders_alone_are_noted_with_the_command_for_those_inside(
    tmp_path: Path,
) -> None:
    names = ("in/abbey", "in/alley", "out/bar")
    source = make_tree(tmp_path / "src", {f"{name}/1.jpg": JPEG for name in names})
    (note,) = open_source("imagefolder", source).scan().notes
    script, command = note.split("run ", 1)[1].split("; shardkit ")
    with contextlib.chdir(tmp_path):
        subprocess.run(["bash", "-ec", script], check=True)
        assert run_main(*shlex.split(command), "--no-shuffle").returncode == 0
        made = open_dataset("DST")
    assert (made.classes, [*made.targets]) == ([*names], [0, 1, 2])


def test_a_text_for_each_image_is_kept_by_the_command_of_the_message(tmp_path: Path) -> None:
    """As folders for training LoRA."""
    files = {f"{n}.jpg": jpeg(seed=n) for n in (1, 2)} | {f"{n}.txt": b"cat %d" % n for n in (1, 2)}
    source = make_tree(tmp_path / "src", files)
    done = refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("1.txt", "--classes"))
    script, command = done.stderr.split("run ", 1)[1].split(". Pass ")[0].split("; shardkit ")
    with contextlib.chdir(tmp_path):
        subprocess.run(["bash", "-ec", script], check=True)
        assert run_main(*shlex.split(command), "--no-shuffle").returncode == 0
        made = open_dataset("DST", decode="bytes", fields=["image", "caption"])
    samples = {(bytes(made[row][0]), made[row][1]) for row in range(len(made))}
    assert samples == {(files["1.jpg"], "cat 1"), (files["2.jpg"], "cat 2")}


TABLES: dict[str, tuple[dict[str, bytes], dict[str, str]]] = {
    "names with their folder": (
        {
            "images/a.jpg": JPEG,
            "images/b.jpg": JPEG,
            "labels.csv": b"file,label\nimages/b.jpg,dog\nimages/a.jpg,cat\n",
        },
        {"images/a.jpg": "cat", "images/b.jpg": "dog"},
    ),
    "semicolons": (
        {
            "images/a.jpg": JPEG,
            "images/b.jpg": JPEG,
            "labels.csv": b"file;label\nb.jpg;dog\na.jpg;cat\n",
        },
        {"a.jpg": "cat", "b.jpg": "dog"},
    ),
    "numbers that the images of a test have, too": (
        {f"{split}/{n}.jpg": of for split, of in (("test", MASK), ("train", JPEG)) for n in (1, 2)}
        | {"trainLabels.csv": b"id,label\n1,frog\n2,cat\n"},
        {"1.jpg": "frog", "2.jpg": "cat"},
    ),
    "a folder with a part of the rows": (
        {
            "img_a/1.jpg": JPEG,
            "img_b/1.jpg": JPEG,
            "img_b/2.jpg": JPEG,
            "all.csv": b"id,label\n1,x\n2,y\n",
        },
        {"1.jpg": "x", "2.jpg": "y"},
    ),
    "parts": (
        {
            "images_1/a.jpg": JPEG,
            "images_2/b.jpg": JPEG,
            "HAM_metadata.csv": b"n,image_id,dx\n0,a,nv\n1,b,mel\n",
        },
        {"images_1/a.jpg": "nv", "images_2/b.jpg": "mel"},
    ),
    "a folder in a folder": (
        {"jpeg/train/a.jpg": JPEG, "jpeg/test/b.jpg": JPEG, "train.csv": b"id,target\na,nv\n"},
        {"a.jpg": "nv"},
    ),
    "metadata that is not of the Hub": (
        {
            "images/a.jpg": JPEG,
            "images/b.jpg": JPEG,
            "metadata.csv": b"image_id,dx\na,nv\nb,mel\n",
        },
        {"a.jpg": "nv", "b.jpg": "mel"},
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_next_to_folders_of_images_labels_them(tmp_path: Path, name: str) -> None:
    files, expected = TABLES[name]
    source = make_tree(tmp_path / "src", files)
    done = run_main("convert", source, tmp_path / "out", "--to", "lmdb", "--workers", "1")
    assert done.returncode == 0, done.stderr
    made = open_dataset(tmp_path / "out", decode="bytes")
    samples = [(path, *made[row]) for row, path in enumerate(made.paths)]
    assert {path: (made.classes or [])[label] for path, _, label in samples} == expected
    assert {bytes(image) for _, image, _ in samples} == {JPEG}


SEVERAL: dict[str, tuple[dict[str, bytes], list[str]]] = {
    "folders that a table may mean": (
        {"test/1.jpg": JPEG, "train/1.jpg": JPEG, "labels.csv": b"id,label\n1,frog\n"},
        ["--root SRC/test", "--root SRC/train"],
    ),
    "class folders next to a split in a table": (
        {
            "train/n01/1.jpg": JPEG,
            "val/v1.jpg": JPEG,
            "LOC_val_solution.csv": b"ImageId,Prediction\nv1,n01 1 2 9 9 \n",
        },
        ["imagefolder SRC/train", "table SRC/LOC_val_solution.csv"],
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_what_may_be_meant_is_listed(tmp_path: Path, name: str) -> None:
    files, commands = SEVERAL[name]
    source = make_tree(tmp_path / "src", files)
    facts = tuple(command.replace("SRC", str(source)) for command in commands)
    refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb", facts=facts)


UNREAD: dict[str, dict[str, bytes]] = {
    "labels.xlsx": {"images/1.jpg": JPEG, "labels.xlsx": b"PK"},
    "labels.json": {"images/p1.jpg": JPEG, "labels.json": b'{"p1": "cat"}'},
    "captions.txt": {"images/1.jpg": JPEG, "captions.txt": b"1.jpg#0 a cat\n1.jpg#1 a tabby\n"},
    "train.csv": {"train/001.jpg": JPEG, "train.csv": b"id,label\n1.0,cat\n"},
    "ground_truth.txt": {
        "val/1.JPEG": JPEG,
        "val/2.JPEG": JPEG,
        "train/n01/1.JPEG": JPEG,
        "devkit/data/ground_truth.txt": b"490\n361\n",
    },
    "cars_annos.mat": {
        "cars_train/1.jpg": JPEG,
        "cars_test/1.jpg": JPEG,
        "devkit/cars_annos.mat": b"MATLAB",
    },
    "list.jsonl": {"dataset/1.jpg": JPEG, "dataset/list.jsonl": b'{"image": "1.jpg"}'},
    "attributes.txt": {
        "img/1.jpg": JPEG,
        "attributes.txt": b"1\nsmiling young\n1.jpg -1 1",
        "partition.txt": b"1.jpg 0",
    },
    "list.csv": {"001.jpg": JPEG, "list.csv": b"id,label\n1,cat\n"},
}


def test_labels_alone_are_read_by_the_commands_of_the_message(tmp_path: Path) -> None:
    """As ImageNet's validation images come, with a label in each line, or with boxes at Kaggle."""
    images = {f"val/v{n}.JPEG": jpeg(seed=n) for n in (1, 2, 10)}
    solution = b"ImageId,PredictionString\nv2,n02110341 1 2 3 4 n02110341 5 6 7 8 \n"
    solution += b"v1,n01440764 1 2 3 4 \nv10,n02110341 1 2 3 4 \n"
    for name, content, expected in (
        ("ILSVRC2012_validation_ground_truth.txt", b"490\n361\n171\n", ["490", "361", "171"]),
        ("LOC_val_solution.csv", solution, ["n01440764", "n02110341", "n02110341"]),
    ):
        source = make_tree(tmp_path / name[:3] / "src", {**images, name: content})
        done = refuses(2, "convert", source, "DST", "--to", "lmdb", facts=(name, "--classes"))
        script, command = done.stderr.split("run ", 1)[1].split(". Pass ")[0].split("; shardkit ")
        subprocess.run(["bash", "-ec", script], cwd=source, check=True)
        with contextlib.chdir(source):
            assert run_main(*shlex.split(command), "--no-shuffle").returncode == 0
            made = open_dataset("DST", decode="bytes")
            classes = made.classes or []
            labels = {path: classes[made[row][1]] for row, path in enumerate(made.paths)}
        assert [labels[f"v{n}.JPEG"] for n in (1, 10, 2)] == expected  # as names are sorted


def test_all_of_imagenet_as_kaggle_packs_it_gets_both_commands(tmp_path: Path) -> None:
    inner = "ILSVRC/Data/CLS-LOC"
    files = {f"{inner}/train/{name}/{name}_1.JPEG": JPEG for name in ("n01440764", "n02110341")}
    files |= {f"{inner}/val/v1.JPEG": JPEG, f"{inner}/test/t1.JPEG": JPEG}
    files["LOC_train_solution.csv"] = b"ImageId,Prediction\nn01440764_1,n01440764 1 2 3 4 \n"
    files["LOC_val_solution.csv"] = b"ImageId,Prediction\nv1,n02110341 1 2 3 4 \n"
    source = make_tree(tmp_path / "src", files)
    done = refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("--classes",))
    way = done.stderr.split("run ", 1)[1].split(". Pass ")[0]
    script, *commands = way.split("; shardkit ")
    subprocess.run(["bash", "-ec", script], cwd=source, check=True)
    with contextlib.chdir(source):
        for command in commands:
            assert run_main(*shlex.split(command)).returncode == 0
        made = [open_dataset(f"DST/{split}") for split in ("train", "val")]
        assert [dataset.classes for dataset in made] == [["n01440764", "n02110341"]] * 2
        assert [sorted(dataset.targets) for dataset in made] == [[0, 1], [1]]
    facts = ("LOC_val_solution.csv", "imagefolder")
    refuses(2, "convert", "imagefolder", source, "DST", "--to", "lmdb", facts=facts)


def test_what_cannot_be_read_gets_another_way(tmp_path: Path) -> None:
    cvat = b'<annotations><image id="0" name="1.jpg"><box label="cat"/></image></annotations>'
    source = make_tree(tmp_path / "cvat", {"images/1.jpg": JPEG, "annotations.xml": cvat})
    refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("annotations.xml", "COCO"))
    source = make_tree(tmp_path / "labelme", {"1.jpg": JPEG, "1.json": b'{"imagePath": "1.jpg"}'})
    refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("1.json", "COCO"))
    for names in (("data_batch_1", "test_batch"), ("train", "test", "meta")):
        source = make_tree(tmp_path / names[0] / "py", dict.fromkeys(names, b"\x80"))
        facts = (source, "torchvision.datasets.CIFAR10", str(source.parent))
        refuses(2, "convert", source, "DST", "--to", "lmdb", facts=facts)
    source = make_tree(tmp_path / "tar", {"t.csv": b"path\n1.jpg\n", "i.tar": b"PK"})
    words = ("--to", "lmdb", "--image", "path", "--root", source / "i.tar")
    refuses(2, "convert", "table", source / "t.csv", "DST", *words, facts=("i.tar", "unpack"))


def test_a_folder_of_texts_next_to_their_images_is_no_class(tmp_path: Path) -> None:
    """As KITTI's."""
    files = dict.fromkeys(("training/image_2/000000.png", "testing/image_2/000000.png"), png())
    texts = dict.fromkeys(("training/calib/000000.txt", "training/label_2/000000.txt"), b"Car 0 0")
    source = make_tree(tmp_path / "kitti", files | texts)
    refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("label_2/000000.txt", "COCO"))
    other = make_tree(tmp_path / "other", {"cat/1.jpg": JPEG, "dog/2.jpg": JPEG, "new/a.txt": b"a"})
    kinds = [(str(kind), kind.by.inside) for kind in recognized(other)]
    assert kinds == [("class folders such as cat", "")]
    assert [*note_other_classes(other)] == []


def test_words_in_the_names_of_images_may_be_classes(tmp_path: Path) -> None:
    """As in Oxford-IIIT Pet, whose classes may have several words."""
    names = [f"{word}_{n}.jpg" for word in ("Abyssinian", "pit_bull_terrier") for n in (1, 22)]
    source = make_tree(tmp_path / "pets", dict.fromkeys(names, JPEG))
    (note,) = note_other_classes(source)
    assert "(Abyssinian, pit_bull_terrier)" in note
    photos = [f"{word}_{n:04}.jpg" for word in ("IMG", "DSC", "DSCN", "PXL") for n in (1, 22)]
    album = make_tree(tmp_path / "album", {f"all/{name}": JPEG for name in photos})
    assert [*note_other_classes(album / "all")] == [], "cameras write these words"
    convert(album, "DST", to="lmdb")
    assert list(open_dataset("DST").classes or ()) == ["all"]


def test_folders_that_differ_only_in_a_split_are_no_classes(tmp_path: Path) -> None:
    """As CycleGAN's datasets, DIV2K and Market-1501."""
    classes = {"trainA", "testA", "trainB", "testB"}
    source = make_tree(tmp_path / "src", {f"{name}/1.jpg": JPEG for name in classes})
    done = refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("--classes",))
    commands = done.stderr.split("run shardkit ")[1].split(". Pass ")[0].split("; shardkit ")
    with contextlib.chdir(tmp_path):
        for command in commands:
            assert run_main(*shlex.split(command)).returncode == 0
        assert {path.name for path in Path("DST").iterdir()} == classes
        assert open_dataset("DST/trainB").classes == []
    run_main("convert", source, tmp_path / "forced", "--to", "lmdb", "--classes")
    assert open_dataset(tmp_path / "forced").classes == sorted(classes)
    stations = dict.fromkeys(
        ("train station/1.jpg", "bus station/1.jpg", "bullet train/1.jpg"), JPEG
    )
    run_main("convert", make_tree(tmp_path / "photos", stations), tmp_path / "s", "--to", "lmdb")
    assert open_dataset(tmp_path / "s").classes == ["bullet train", "bus station", "train station"]


def test_a_column_of_paths_goes_before_numbers_that_fit_by_chance(tmp_path: Path) -> None:
    """As GTSRB, whose class IDs are also names of pictograms."""
    files = {"Train/0/0.png": MASK, "Train/1/1.png": MASK, "Meta/0.png": MASK, "Meta/1.png": MASK}
    table = b"Width,ClassId,Path\n1,0,Train/0/0.png\n1,1,Train/1/1.png\n"
    source = make_tree(tmp_path / "src", {**files, "Train.csv": table})
    assert run_main("convert", source, tmp_path / "out", "--to", "lmdb").returncode == 0
    dataset = open_dataset(tmp_path / "out")
    assert sorted(dataset.keys) == ["Train/0/0", "Train/1/1"]


def test_parts_of_a_listed_set_are_no_classes(tmp_path: Path) -> None:
    """As HAM10000, whose table names images of two folders by ID."""
    files = {"part1/a.jpg": JPEG, "part2/b.jpg": JPEG}
    source = make_tree(tmp_path / "src", {**files, "meta.csv": b"image_id,dx\na,mel\nb,nv\n"})
    done = refuses(2, "convert", source, "DST", "--to", "lmdb", facts=("meta.csv", "--classes"))
    command = done.stderr.split("run shardkit ")[1].split(". Pass ")[0]
    target = tmp_path / "out"
    assert run_main(*shlex.split(command.replace("DST", str(target)))).returncode == 0
    assert open_dataset(target).classes == ["mel", "nv"]
    nested = {f"images_{n}/images/{n}.png": MASK for n in (1, 2)}
    chest = b"Image Index,Finding Labels\n1.png,Mass|Edema\n2.png,No Finding\n"
    chests = make_tree(tmp_path / "chest", {**nested, "Data_Entry.csv": chest})
    words = ("--to", "lmdb", "--no-shuffle", "--workers", "1")
    assert run_main("convert", chests, tmp_path / "chests", *words).returncode == 0
    made = open_dataset(tmp_path / "chests")
    assert made.schema["labels"].classes == ("Edema", "Mass", "No Finding")
    assert [[*row] for row in made.column("labels")] == [[0, 1], [2]]
    assert [*made.paths] == ["images_1/images/1.png", "images_2/images/2.png"]
    make_tree(source, {"part1/c.jpg": JPEG, "meta.csv": b"image_id,dx\na,0\nc,0\nb,1\n"})
    assert [*open_source("imagefolder", source).scan().splits] == [""]
    (source / "part1/c.jpg").unlink()
    make_tree(source, {"meta.csv": b"image_id,dx\na,part1\nb,part2\n"})
    convert(source, tmp_path / "made", to="lmdb")
    assert open_dataset(tmp_path / "made").classes == ["part1", "part2"]


def test_a_table_next_to_a_zip_archive_is_not_lost(tmp_path: Path) -> None:
    """As Kaggle's downloads."""
    with zipfile.ZipFile(make_tree(tmp_path / "src", {"a.txt": b""}) / "i.zip", "w") as archive:
        archive.writestr("train/1.jpg", JPEG)
    done = run_main("convert", tmp_path / "src", "DST", "--to", "lmdb", "--dry-run", "--json")
    assert json.loads(done.stdout)["not_read"] == ["a.txt"]
    make_tree(tmp_path / "src", {"train.csv": b"id,label\n9,a\n"})
    facts = ("train.csv", "convert zip", "convert table", "i.zip")
    refuses(2, "convert", tmp_path / "src", "DST", "--to", "lmdb", facts=facts)


def test_a_row_without_its_label_does_not_change_the_kind_of_labels(tmp_path: Path) -> None:
    for row, reason in ((b"a", "1 value"), (b"a,", "differ in breed"), (b",pug", "no file name")):
        files = {"train/a.jpg": JPEG, "train/b.jpg": JPEG}
        table = b"id,breed\na,pug\n%s\nb,beagle\n" % row
        source = make_tree(tmp_path / f"src{row.decode()}", {**files, "labels.csv": table})
        done = run_main("convert", source, "DST", "--to", "lmdb", "--dry-run")
        assert "\n  label     breed: " in done.stdout
        (bad,) = (line for line in done.stdout.splitlines() if "  bad  " in line)
        assert reason in bad


@pytest.mark.parametrize("folder", ["", "lists/"])
def test_the_folder_of_a_recognized_list_is_its_source(tmp_path: Path, folder: str) -> None:
    files = {"lists/train/a.jpg": JPEG, "lists/labels.csv": b"id,breed\na,pug\n"}
    make_tree(tmp_path / "src", {**files, "lists/sample_submission.csv": b"id,pug\nx,1\n"})
    source, made = tmp_path / "src" / folder, tmp_path / "made"
    assert run_main("convert", source, made, "--to", "lmdb", "--workers", "1").returncode == 0
    assert verify(made, against=source).ok
    (made / "shard-000000.lmdb").write_bytes(b"")
    repair(made, source)
    assert verify(made).ok
    for image in (tmp_path / "src/lists/train").iterdir():
        image.write_bytes(MASK)
    assert not verify(made, against=source).ok


def test_a_dataset_in_the_folder_of_its_source_does_not_hide_it(tmp_path: Path) -> None:
    files = {"train/a.jpg": JPEG, "test/b.jpg": JPEG, "labels.csv": b"id,breed\na,pug\n"}
    source = make_tree(tmp_path / "src", files)
    for name in ("first", "second"):
        assert run_main("convert", source, source / name, "--to", "lmdb").returncode == 0
    assert list(open_dataset(source / "second").paths) == ["a.jpg"]


def test_the_command_of_a_table_names_all_fields(tmp_path: Path) -> None:
    """Fields cannot be called width."""
    table = b"image_id,width,my dog,Age\n1,32,2,7\n"
    source = make_tree(tmp_path / "src", {"train/1.jpg": JPEG, "train.csv": table})
    assert run_main("convert", source, tmp_path / "out", "--to", "lmdb").returncode == 0
    fields = ["column_width", "my_dog", "age"]
    assert [int(value) for value in open_dataset(tmp_path / "out", fields=fields)[0]] == [32, 2, 7]


def test_labels_next_to_masks_are_noted(tmp_path: Path) -> None:
    """As in Oxford's pets."""
    names = ("Abyssinian_1", "yorkshire_terrier_9")
    files = {f"images/{name}.jpg": JPEG for name in names}
    files |= {f"annotations/trimaps/{name}.png": MASK for name in names}
    files["annotations/list.txt"] = b"# NAME CLASS\n%s 1 1 1\n%s 37 2 25\n" % (
        *map(str.encode, names),
    )
    source = make_tree(tmp_path / "src", files)
    done = run_main("convert", source, tmp_path / "out", "--to", "lmdb", "--dry-run")
    way = next(line for line in done.stdout.splitlines() if "annotations/list.txt may" in line)
    command = way.split("run shardkit ")[1].split(" if its ")[0].replace("DST", str(tmp_path / "o"))
    assert run_main(*shlex.split(command), "--no-shuffle").returncode == 0
    assert list(open_dataset(tmp_path / "o").targets) == [1, 37]


def test_what_is_next_to_the_source_is_named(tmp_path: Path) -> None:
    files = {"train/1.jpg": JPEG, "other/9.jpg": JPEG, "train.csv": b"name,label\n1.jpg,cat\n"}
    source = make_tree(tmp_path / "src", {**files, "sample_submission.csv": b"name,label\n"})
    done = run_main("convert", source, tmp_path / "out", "--to", "lmdb", "--json")
    assert json.loads(done.stdout)["not_read"] == ["other/", "sample_submission.csv"]
    done = run_main("convert", source, tmp_path / "out2", "--to", "lmdb")
    assert "not read: other/, sample_submission.csv" in done.stdout.splitlines()[0]


def test_names_that_state_classes_are_noted(tmp_path: Path) -> None:
    """As at Kaggle's dogs versus cats: `test1` is a split, and no class."""
    files = {f"train/{name}.{n}.jpg": JPEG for name in ("cat", "dog") for n in (0, 1)}
    scanned = open_source("imagefolder", make_tree(tmp_path, {**files, "test1/1.jpg": JPEG})).scan()
    assert (scanned.classes, [*scanned.splits]) == (None, ["test1", "train"])
    (note,) = scanned.notes
    assert "cat, dog" in note


def test_several_masks_of_each_image_need_a_choice(tmp_path: Path) -> None:
    files = {f"images/{n}.jpg": JPEG for n in (1, 2)}
    files |= {f"masks/{n}_{part}.png": MASK for n in (1, 2) for part in ("left", "right")}
    source = make_tree(tmp_path / "src", files)
    facts = ("--pattern '{}_left'", "--pattern '{}_right'")
    refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb", facts=facts)
    refuses(2, "convert", "pairs", source, tmp_path / "out", "--to", "lmdb", facts=("{}_right",))


@pytest.mark.parametrize("name", UNREAD)
def test_images_without_classes_next_to_an_unread_list_are_refused(
    tmp_path: Path, name: str
) -> None:
    source = make_tree(tmp_path / "src", UNREAD[name])
    with refused(UsageError, name, "convert table", "classes=True"):
        convert(source, tmp_path / "out", to="lmdb")
    refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb", facts=(name, "--classes"))


FOLDERS = {
    "names like those of masks": {"cat/1_mask.jpg": JPEG, "dog/2.jpg": JPEG, "dog/mask.jpg": JPEG},
    "one class in splits": {"train/cat/1.jpg": JPEG, "val/cat/1.jpg": JPEG},
    "classes with one folder each": {"cat/2020/a/1.jpg": JPEG, "dog/1.jpg": JPEG},
    "classes in folders of their name": {"cat/cat/1.jpg": JPEG, "dog/dog/1.jpg": JPEG},
    "classes": {"cat/1.jpg": JPEG, "dog/1.jpg": JPEG, "README.md": b"pets"},
    "classes in splits": {"train/cat/1.jpg": JPEG, "val/cat/1.jpg": JPEG},
    "images": {"image_1.jpg": JPEG, "image_2.jpg": JPEG},
    "letters": {"x/1.jpg": JPEG, "y/1.jpg": JPEG},
    "classes called like parts": {"image/1.jpg": JPEG, "segment/2.jpg": JPEG, "notes.txt": b"a b"},
    "captions": {"cat/1.jpg": JPEG, "cat/1.txt": b"a cat on a mat", "labels.txt": b"cat"},
    "classes with a table": {
        "cat/1.jpg": JPEG,
        "dog/2.jpg": JPEG,
        "all.csv": b"file,label\ncat/1.jpg,cat\n",
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_images_stay_folders_of_images(tmp_path: Path, name: str) -> None:
    source = make_tree(tmp_path / "src", FOLDERS[name])
    open_source("imagefolder", source).scan()
    done = run_main("convert", source, tmp_path / "out", "--to", "lmdb", "--workers", "1", "--json")
    assert json.loads(done.stdout)["read_as"].startswith("imagefolder: ")


def test_classes_takes_folders_as_they_are(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", OTHERS["YOLO of Ultralytics"][0])
    convert(source, tmp_path / "out", to="lmdb", classes=True)
    assert open_dataset(tmp_path / "out").classes == ["images", "labels"]
    assert run_main("verify", tmp_path / "out", "--against", source).returncode == 0


def test_a_flat_split_next_to_classes_needs_a_list(tmp_path: Path) -> None:
    """As ImageNet, whose validation images are in one folder."""
    source = make_tree(tmp_path / "src", {"train/n01/1.JPEG": JPEG, "val/ILSVRC_1.JPEG": JPEG})
    with refused(UsageError, "shardkit convert table", source / "val", "classes=True"):
        convert(source, tmp_path / "out", to="lmdb")
    assert sorted(open_source("imagefolder", source, classes=True).scan().splits) == [
        "train",
        "val",
    ]


def test_what_is_packed_or_empty_is_named(tmp_path: Path) -> None:
    for name in ("a.rar", "b.zip.001"):
        source = make_tree(tmp_path / name[0], {name: b"x", "notes.doc": b"x"})
        refuses(2, "convert", source, "DST", "--to", "lmdb", facts=(source, name, "unpack"))
    (tmp_path / "none").mkdir()
    refuses(2, "convert", tmp_path / "none", "DST", "--to", "lmdb", facts=(tmp_path / "none",))


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
    source = make_tree(tmp_path / "src", {"cat/1.jpg": JPEG, "cat/2.jpg": pointer})
    with refused(BadImages, "cat/2.jpg", "git lfs pull"):
        convert(source, tmp_path / "out", to="lmdb")


def test_what_no_kind_recognizes_is_refused(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", {"notes.doc": b"x"})
    refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb", facts=(source, "imagefolder"))
    make_tree(source, {"a.json": COCO, "b.json": COCO, "1.jpg": JPEG})
    done = refuses(2, "convert", source, tmp_path / "out", "--to", "lmdb")
    assert done.stderr.count("shardkit convert coco") == 2


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_sources_of_each_kind_are_recognized(tmp_path: Path, name: str) -> None:
    """Those that the conformance suite makes: certainly, or with others."""
    maker = MAKERS[name]
    path = maker.make(tmp_path, maker.images())
    done = run_main("convert", path, tmp_path / "out", "--to", "lmdb", "--dry-run", "--json")
    answer = json.loads(done.stdout)
    assert maker.kind in (answer.get("read_as") or answer["error"]["what"])
