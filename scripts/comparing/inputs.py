"""Inputs of all scenarios: ``python inputs.py TREE FOLDER``, with the test support of a tree.

Made once, since some libraries write other bytes each time; both commits read the same files.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import foreign
import h5py
import numpy as np

NAMES = [f"{folder}/{number}.png" for folder in ("bird", "cat", "dog") for number in range(5)]


def main(tree: Path, inputs: Path) -> None:
    """Write all inputs."""
    images = pictures(NAMES, 32, 32, 3)
    digits = pictures(
        [f"{digit}/{number}.png" for digit in range(3) for number in range(4)], 28, 28
    )
    for name, make, content in (
        ("arrays", foreign.make_hdf5_arrays, images),
        ("cifar", foreign.make_cifar10, images),
        ("coco", foreign.make_coco, images),
        ("ffcv", foreign.make_beton, images),
        ("hdf5", foreign.make_hdf5, images),
        ("litdata", foreign.make_litdata, images),
        ("lmdb", foreign.make_lmdb, images),
        ("mds", foreign.make_mds, images),
        ("mnist", foreign.make_mnist, digits),
        ("npy", foreign.make_npy_folders, images),
        ("npz", foreign.make_npz, images),
        ("parquet", foreign.make_parquet, images),
        ("saved", foreign.make_saved, images),
        ("table", foreign.make_table, images),
        ("tar", foreign.make_tar, images),
        ("tfrecord", foreign.make_tfrecord, images),
        ("voc", foreign.make_voc, images),
    ):
        (inputs / name).mkdir()
        make(inputs / name, content)
    make_vlen(inputs / "vlen", images)
    make_photos(tree, inputs)


def pictures(names: list[str], *shape: int) -> dict[str, bytes]:
    """Return PNG files of random pixels."""
    rng = np.random.default_rng(1)
    return {name: foreign.png_of(rng.integers(0, 256, shape, np.uint8)) for name in names}


def make_vlen(folder: Path, images: dict[str, bytes]) -> None:
    """Write encoded images of variable length and integer labels, as `attach` reads them."""
    folder.mkdir()
    with h5py.File(folder / "x.h5", "w") as file:
        rows = file.create_dataset("jpeg", (len(images),), h5py.vlen_dtype(np.uint8))
        for row, data in enumerate(images.values()):
            rows[row] = np.frombuffer(data, np.uint8)
        file["label"] = [row % 3 for row in range(len(images))]


def make_photos(tree: Path, inputs: Path) -> None:
    """Write folders of the sample images: all, few, divided, some broken, and with annotations."""
    photos = inputs / "photos"
    shutil.copytree(tree / "sample_data", photos)
    for name, folders in (("circles", ("circle",)), ("more", ("star", "circle"))):
        for folder in folders:
            (inputs / name / folder).mkdir(parents=True)
            for path in sorted((photos / folder).glob("*_1*.jpg")):
                shutil.copy(path, inputs / name / folder / f"{name}-{path.name}")
    for split in ("train", "val"):
        for folder in ("circle", "star"):
            shutil.copytree(photos / folder, inputs / "splits" / split / folder)
    (inputs / "exclude.txt").write_text("circle/circle_00\nstar/star_05.jpg\n")
    shutil.copytree(inputs / "circles", inputs / "broken")
    for number, path in enumerate(sorted((inputs / "broken").rglob("*.jpg"))[:3]):
        path.write_bytes((b"", b"not an image", path.read_bytes()[:300])[number])
    annotated = inputs / "annotated"
    shutil.copytree(photos, annotated)
    annotations = next(tree.glob("**/annotations.jsonl")).parent
    shutil.copytree(annotations, annotated, dirs_exist_ok=True)
    lines = (annotations / "annotations.jsonl").read_text().splitlines()
    (annotated / "keypoints.json").write_text(json.dumps(as_coco([*map(json.loads, lines)])))


def as_coco(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return annotations with keypoints: two corners of each box."""
    shapes = sorted({row["label"] for row in rows})
    annotations = [
        {
            "id": 100 * number + part,
            "image_id": number,
            "category_id": shapes.index(row["label"]),
            "bbox": [left, top, right - left, bottom - top],
            "keypoints": [left, top, 2, right, bottom, 1],
            "num_keypoints": 2,
        }
        for number, row in enumerate(rows)
        for part, (left, top, right, bottom, _) in enumerate(row["boxes"])
    ]
    return {
        "categories": [
            {"id": number, "name": name, "keypoints": ["first", "last"]}
            for number, name in enumerate(shapes)
        ],
        "images": [{"id": number, "file_name": row["image"]} for number, row in enumerate(rows)],
        "annotations": annotations,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
