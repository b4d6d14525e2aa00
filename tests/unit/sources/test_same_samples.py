"""The same 96 samples through every source, and files in a store: equal in every respect."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buckets import BUCKET, Bucket
from foreign import (
    Images,
    class_of,
    make_beton,
    make_cifar10,
    make_coco,
    make_folder_of,
    make_hdf5,
    make_hdf5_arrays,
    make_litdata,
    make_lmdb,
    make_mds,
    make_mnist,
    make_npy_arrays,
    make_npy_folders,
    make_npz,
    make_parquet,
    make_saved,
    make_stored,
    make_table,
    make_tar,
    make_tfrecord,
    make_voc,
    make_yolo,
    make_zip,
    png_of,
    tfrecord_rows,
    write_tfrecord,
)
from helpers import invoke, tree

from shardkit import Field, convert, export, open_dataset, open_source

CLASSES = ("bird", "cat", "dog")


def pictures(*shape: int, names: tuple[str, ...] = CLASSES) -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    paths = [f"{name}/{number:02d}.png" for name in names for number in range(96 // len(names))]
    return {path: png_of(rng.integers(0, 256, shape, np.uint8)) for path in paths}


COLOR = pictures(32, 32, 3)
NUMBERED = pictures(32, 32, 3, names=("0", "1", "2"))
GRAY = pictures(28, 28, names=("0", "1", "2", "3"))

Make = Callable[[Path, Images], Path]


def make_named_tfrecord(folder: Path, images: Images) -> Path:
    rows = zip(tfrecord_rows(images), images, strict=True)
    named = [{**row, "name": (name.encode(), "byte")} for row, name in rows]
    return write_tfrecord(folder / "x.tfrecord", named)


def make_exported(folder: Path, images: Images, layout: Any, part: str = "") -> Path:
    """Export the images from a dataset; return the exported folder, or a file in it."""
    export(make_stored(folder, images, shuffle=False), folder / "exported", layout=layout)
    return folder / "exported" / part


CASES: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "imagefolder": ("imagefolder", make_folder_of, {}),
    "zip": ("zip", make_zip, {}),
    "dataset": ("dataset", partial(make_stored, shuffle=False), {}),
    "webdataset": ("webdataset", make_tar, {}),
    "tfrecord": ("tfrecord", make_tfrecord, {}),
    "tfrecord, names": ("tfrecord", make_named_tfrecord, {"name": "name"}),
    "lmdb": ("lmdb", make_lmdb, {"label": "folder"}),
    "hdf5, encoded": ("hdf5", make_hdf5, {"image": "jpeg", "label": "label"}),
    "hdf5, arrays": ("hdf5", make_hdf5_arrays, {"image": "x", "label": "y"}),
    "ffcv": ("ffcv", make_beton, {}),
    "ffcv, raw": ("ffcv", partial(make_beton, raw=True), {}),
    "litdata": ("litdata", make_litdata, {}),
    "litdata, raw": ("litdata", partial(make_litdata, raw=True), {}),
    "mds": ("mds", make_mds, {}),
    "mds, raw": ("mds", partial(make_mds, raw=True), {}),
    "huggingface, parquet": ("huggingface", make_parquet, {"name": "image"}),
    "huggingface, saved": ("huggingface", make_saved, {"name": "image"}),
    "huggingface, no names": ("huggingface", make_parquet, {}),
    "npy, folders": ("npy", make_npy_folders, {}),
    "npy, arrays": ("npy", make_npy_arrays, {}),
    "npz": ("npy", make_npz, {}),
    "npz, compressed": ("npy", partial(make_npz, packed=True), {}),
    **{
        f"table, {suffix}": (
            "table",
            partial(make_table, suffix=suffix),
            {"image": "path", "label": "class"},
        )
        for suffix in ("csv", "tsv", "jsonl", "parquet")
    },
    "coco": ("coco", make_coco, {}),
    "voc": ("voc", make_voc, {}),
    "yolo": ("yolo", make_yolo, {}),
    "cifar": ("cifar", partial(make_cifar10, classes=CLASSES), {"split": "train"}),
    "mnist": ("mnist", make_mnist, {"split": "train"}),
    "mnist, compressed": ("mnist", partial(make_mnist, suffix=".gz"), {"split": "train"}),
    **{
        f"export --layout {layout}": (
            kind,
            partial(make_exported, layout=layout, part=part),
            options,
        )
        for layout, kind, part, options in (
            ("imagefolder", "imagefolder", "", {}),
            ("csv", "table", "metadata.csv", {"label": "label"}),
            ("parquet", "huggingface", "", {"name": "image"}),
            ("webdataset", "webdataset", "", {"label": "folder"}),
        )
    },
}


NAMELESS = (
    *("tfrecord", "hdf5, encoded", "hdf5, arrays", "huggingface, no names", "npy, arrays", "npz"),
    *("litdata", "litdata, raw", "mds", "mds, raw"),
    *("ffcv", "ffcv, raw", "npz, compressed", "cifar", "mnist", "mnist, compressed"),
)
"""Cases whose files hold no names of images."""

WITH_BOXES = ("coco", "voc", "yolo")
"""Sources whose samples have boxes instead of a label."""


def digest_of(images: Images, names: Iterable[str]) -> str:
    """Return the content digest of a dataset of images and labels that have these names."""
    classes = sorted({class_of(name) for name in images})
    samples = [
        {"key": name, "image": data, "label": classes.index(class_of(path))}
        for name, (path, data) in zip(names, images.items(), strict=True)
    ]
    schema = {"label": Field("label", classes=tuple(classes))}
    with tempfile.TemporaryDirectory() as folder:
        made = convert(samples, Path(folder, "made"), to="hdf5", schema=schema, shuffle=False)
    return made.manifests[""].content_digest


@pytest.mark.parametrize("case", CASES)
def test_every_source_gives_the_same_samples(case: str, tmp_path: Path) -> None:
    kind, make, options = CASES[case]
    images = {"mnist": GRAY, "ffcv": NUMBERED}.get(kind, COLOR)
    (tmp_path / "source").mkdir()
    source = open_source(kind, make(tmp_path / "source", images), **options)
    made = convert(source, tmp_path / "made", to="webdataset", shuffle=False)
    dataset = open_dataset(tmp_path / "made", decode="bytes")
    if kind in WITH_BOXES:  # the class is that of the only box
        classes = list(dataset.schema["boxes"].classes or ())
        labels = [int(of_box[0]) for _, of_box in dataset.column("boxes")]
    else:
        classes, labels = dataset.classes, [dataset[row][1] for row in range(len(dataset))]
    assert classes == sorted({class_of(name) for name in images})
    found = [(classes[label], dataset[row][0]) for row, label in enumerate(labels)]
    assert found == [(class_of(name), data) for name, data in images.items()]
    prefix = "images/" if kind == "yolo" else ""
    keys = [prefix + name.removesuffix(".png") for name in images]
    found_keys = list(dataset.keys)
    assert len(set(found_keys)) == 96
    assert (found_keys == keys) == (case not in NAMELESS)
    if kind not in WITH_BOXES:  # they have more fields
        assert made.manifests[""].content_digest == digest_of(images, found_keys)


def test_every_source_has_a_case() -> None:
    commands = re.findall(r"^  (\w+) {2,}", invoke("convert", "--help").output, re.MULTILINE)
    # Its samples have masks instead of labels: tests/unit/sources/test_pairs.py.
    assert {kind for kind, _, _ in CASES.values()} == set(commands) - {"pairs"}


# Files in an object store convert to the same bytes as the same files in a local folder.

IMAGES: Images = {
    f"{name}/{number}.png": png_of(np.full((8, 8, 3), 20 * number + label, np.uint8))
    for label, name in enumerate(("cat", "dog"))
    for number in range(6)
}


BY_URL: dict[str, tuple[Make, str, tuple[str, ...]]] = {
    "webdataset": (make_tar, "webdataset", ()),
    "tfrecord": (make_tfrecord, "tfrecord", ()),
    "ffcv": (make_beton, "ffcv", ()),
    "hdf5": (make_hdf5, "hdf5", ("--image", "jpeg", "--label", "label")),
    "hdf5, arrays": (make_hdf5_arrays, "hdf5", ("--image", "x", "--label", "y")),
    "parquet": (make_parquet, "huggingface", ("--name", "image")),
    **{
        f"table, {suffix}": (
            partial(make_table, suffix=suffix),
            "table",
            ("--image", "path", "--label", "class"),
        )
        for suffix in ("csv", "tsv", "jsonl", "parquet")
    },
}


@pytest.mark.parametrize("case", BY_URL)
def test_files_convert_by_url_to_the_same_bytes(case: str, bucket: Bucket, tmp_path: Path) -> None:
    make, kind, options = BY_URL[case]
    for name in ("source", "alone"):
        (tmp_path / name).mkdir()
    made = make(tmp_path / "source", IMAGES)
    path = made.rename(tmp_path / "alone" / made.name)  # not above a table's images: that is stated
    bucket.put(f"in/{path.name}", path.read_bytes())
    root = ("--root", made.parent) if kind == "table" else ()
    more = ("--to", "webdataset", *options, *root)

    near = invoke("convert", kind, path, tmp_path / "near", *more)
    url, copies = f"s3://{BUCKET}/in/{path.name}", ("--cache", tmp_path / "copies")
    far = invoke("convert", kind, url, tmp_path / "far", *more, *copies)

    assert (near.exit_code, far.exit_code) == (0, 0), near.output + far.output
    assert tree(tmp_path / "far") == tree(tmp_path / "near")
