"""Files of other programs, made with the real libraries: sources to convert."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import h5py
import lmdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from hostile.foreign_shards import (
    BetonColumn,
    Sample,
    image_at,
    pil_value,
    tfrecord_record,
    write_beton,
    write_litdata,
    write_mds,
)
from PIL import Image
from tars import PRODUCERS
from tfrecord import TFRecordWriter

from shardkit import convert
from shardkit.dataset.shardset import open_shards

Images = Mapping[str, bytes]
"""Content of each image file, by path; the path's first part is the class."""


def class_of(name: str) -> str:
    return name.partition("/")[0]


def png_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG file as conversions write it."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def pixels_of(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)))


def problems(found: Any) -> dict[str, str]:
    """Return the reason of each problem of a scan without splits, by path."""
    return {problem.path: problem.reason for problem in found.problems[""]}


def overwrite(path: Path, offset: int, size: int) -> None:
    """Replace some bytes of a file by some that are not an image."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"no image"[:size].ljust(size, b"."))


# TFRecord

Features = Mapping[str, tuple[Any, str]]
"""Value and type of each feature: ``byte``, ``int`` or ``float``."""


def write_tfrecord(path: Path, rows: Sequence[Features]) -> Path:
    """Write records of features; compressed if the path says so."""
    plain = path.with_name(path.name.removesuffix(".gz"))
    writer = TFRecordWriter(str(plain))
    for row in rows:
        writer.write(dict(row))
    writer.close()
    if plain != path:
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    return path


def tfrecord_rows(images: Images) -> list[Features]:
    return [
        {
            "image": (data, "byte"),
            "label": (class_of(name).encode(), "byte"),
            "weight": (1.5, "float"),
        }
        for name, data in images.items()
    ]


def make_tfrecord(folder: Path, images: Images) -> Path:
    return write_tfrecord(folder / "x.tfrecord", tfrecord_rows(images))


def spoil_tfrecord(path: Path, image: str) -> None:
    """Overwrite an image, with a checksum that is right."""
    data = bytearray(path.read_bytes())
    offset = 0
    for _ in range(int(image.rpartition("/")[2])):
        offset += struct.unpack_from("<Q", data, offset)[0] + 16
    (length,) = struct.unpack_from("<Q", data, offset)
    record = data[offset + 12 : offset + 12 + length]
    where = record.index(b"\x89PNG")
    record[where : where + 8] = b"no image"
    data[offset : offset + length + 16] = tfrecord_record(bytes(record))
    path.write_bytes(data)


# Arrow and Parquet, as Hugging Face's datasets writes them


def arrow_table(images: Images) -> Any:
    """Return images and class labels as a table with the metadata of ``datasets``."""
    import pyarrow as pa

    classes = sorted({class_of(name) for name in images})
    features = {
        "image": {"_type": "Image"},
        "label": {"names": classes, "_type": "ClassLabel"},
        "caption": {"dtype": "string", "_type": "Value"},
    }
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", image), ("label", pa.int64()), ("caption", pa.string())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    rows = [
        {
            "image": {"bytes": data, "path": name},
            "label": classes.index(class_of(name)),
            "caption": f"a {name}",
        }
        for name, data in images.items()
    ]
    return pa.Table.from_pylist(rows, schema)


def make_parquet(folder: Path, images: Images) -> Path:
    import pyarrow.parquet as pq

    pq.write_table(arrow_table(images), folder / "x.parquet", row_group_size=4)
    return folder / "x.parquet"


def spoil_parquet(path: Path, image: str) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    pq.write_table(_spoiled(table, int(image)), path, row_group_size=4)


def _spoiled(table: Any, row: int) -> Any:
    import pyarrow as pa

    rows = table.to_pylist()
    rows[row]["image"]["bytes"] = b"not an image"
    return pa.Table.from_pylist(rows, table.schema)


def make_saved(folder: Path, images: Images) -> Path:
    """Write what ``Dataset.save_to_disk`` writes."""
    _write_arrow(folder / "data-00000-of-00001.arrow", arrow_table(images))
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def spoil_saved(path: Path, image: str) -> None:
    import pyarrow as pa

    file = path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
    _write_arrow(file, _spoiled(table, int(image)))


def _write_arrow(path: Path, table: Any) -> None:
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


# Arrays of pixels


def make_cifar10(folder: Path, images: Images, classes: Sequence[str] | None = None) -> Path:
    """Write images of 32 x 32 pixels as the training batches; the test batch has none."""
    names = list(classes or sorted({class_of(name) for name in images}))
    rows = [
        bytes([names.index(class_of(name))]) + pixels_of(data).transpose(2, 0, 1).tobytes()
        for name, data in images.items()
    ]
    for number in range(5):
        part = rows[number * len(rows) // 5 : (number + 1) * len(rows) // 5]
        (folder / f"data_batch_{number + 1}.bin").write_bytes(b"".join(part))
    (folder / "test_batch.bin").write_bytes(b"")
    (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n", "utf-8")
    return folder


def make_mnist(folder: Path, images: Images, part: str = "train", suffix: str = "") -> Path:
    """Write grayscale images; classes are numbers."""
    pixels = np.stack([pixels_of(data) for data in images.values()])
    labels = bytes(int(class_of(name)) for name in images)
    content = struct.pack(">IIII", 0x803, *pixels.shape) + pixels.tobytes()
    stated = struct.pack(">II", 0x801, len(labels)) + labels
    for name, data in (("images-idx3", content), ("labels-idx1", stated)):
        packed = gzip.compress(data) if suffix else data
        (folder / f"{part}-{name}-ubyte{suffix}").write_bytes(packed)
    return folder


def make_npy_folders(folder: Path, images: Images) -> Path:
    for name, data in images.items():
        path = folder / name.replace(".png", ".npy")
        path.parent.mkdir(exist_ok=True)
        np.save(path, pixels_of(data))
    return folder


def make_npy_arrays(folder: Path, images: Images) -> Path:
    np.save(folder / "images.npy", np.stack([pixels_of(data) for data in images.values()]))
    np.save(folder / "labels.npy", np.array([class_of(name) for name in images]))
    return folder


def make_npz(folder: Path, images: Images, *, packed: bool = False) -> Path:
    save = np.savez_compressed if packed else np.savez
    pixels = np.stack([pixels_of(data) for data in images.values()])
    save(folder / "x.npz", images=pixels, labels=np.array([class_of(name) for name in images]))
    return folder / "x.npz"


# FFCV: `test_ffcv` compares what this writes with a file of FFCV itself


def beton_images(images: Sequence[bytes], name: str = "image", *, raw: bool = False) -> BetonColumn:
    """Return a field of images, encoded or as pixels."""
    pixels = [pixels_of(data) for data in images]
    rows = [(int(raw), each.shape[1], each.shape[0], None) for each in pixels]
    values = [each.tobytes() for each in pixels] if raw else images
    return BetonColumn(name, 2, "u1 <u2 <u2 <u8", rows, values)


def make_beton(folder: Path, images: Images, *, raw: bool = False) -> Path:
    """Write images with the numbers of their classes."""
    names = sorted({class_of(name) for name in images})
    labels = [int(n) if n.isdigit() else names.index(n) for n in map(class_of, images)]
    columns = [
        beton_images([*images.values()], raw=raw),
        BetonColumn("label", 1, "<i8", [(label,) for label in labels]),
    ]
    return write_beton(folder / "x.beton", columns)


def spoil_beton(path: Path, image: str) -> None:
    """Overwrite the start of an image."""
    row, data = _row_of(image.rpartition(".")[0]), path.read_bytes()
    (start,) = struct.unpack_from("<Q", data, 24 + 2 * 1041 + 24 * row + 5)
    overwrite(path, start, 8)


# MosaicML Streaming and LitData: `foreign_shards` says how they are


def _halves(images: Images, *, raw: bool) -> list[list[Sample]]:
    """Return samples of image and label in two shards."""
    rows = [(_pil(data) if raw else data, class_of(name).encode()) for name, data in images.items()]
    half = len(rows) // 2
    return [[*rows[:half]], [*rows[half:]]]


def _pil(data: bytes) -> bytes:
    pixels = pixels_of(data)
    return pil_value("RGB", pixels.shape[1], pixels.shape[0], pixels.tobytes())


def make_mds(folder: Path, images: Images, *, raw: bool = False) -> Path:
    columns = {"image": "pil" if raw else "png", "label": "str"}
    return write_mds(folder, columns, _halves(images, raw=raw))


def make_litdata(folder: Path, images: Images, *, raw: bool = False) -> Path:
    columns = {"image": "pil" if raw else "bytes", "label": "str"}
    return write_litdata(folder, columns, _halves(images, raw=raw))


def spoil_columns(path: Path, image: str, *, raw: bool = False) -> None:
    """Overwrite the start of an image, or of its pixels."""
    file, offset = image_at(path, image, 0, 2)
    overwrite(file, offset + 15 * raw, 8)


# Tar


def make_tar(folder: Path, images: Images) -> Path:
    files = {}
    for name, data in images.items():
        files[name] = data
        files[name.replace(".png", ".cls")] = class_of(name).encode()
    PRODUCERS["Python, GNU"](folder / "x.tar", files)
    return folder / "x.tar"


def spoil_tar(path: Path, image: str) -> None:
    with tarfile.open(path) as archive:
        member = archive.getmember(image)
    overwrite(path, member.offset_data, member.size)


# LMDB and HDF5


def make_lmdb(folder: Path, images: Images) -> Path:
    """Write an environment in which every key is the name of an image."""
    return write_lmdb(folder, {name.encode(): data for name, data in images.items()})


def write_lmdb(folder: Path, values: Mapping[bytes, bytes]) -> Path:
    with lmdb.open(str(folder), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for key, value in values.items():
            txn.put(key, value)
    return folder


def spoil_lmdb(path: Path, image: str) -> None:
    write_lmdb(path, {image.encode(): b"not an image"})


def make_hdf5(folder: Path, images: Images) -> Path:
    """Write encoded images of variable length."""
    with h5py.File(folder / "x.h5", "w") as file:
        kind = h5py.vlen_dtype(np.uint8)
        rows = file.create_dataset("jpeg", (len(images),), kind)
        for row, data in enumerate(images.values()):
            rows[row] = np.frombuffer(data, np.uint8)
        file["label"] = [class_of(name) for name in images]
    return folder / "x.h5"


def make_hdf5_arrays(folder: Path, images: Images) -> Path:
    with h5py.File(folder / "x.h5", "w") as file:
        pixels = np.stack([pixels_of(data) for data in images.values()])
        file.create_dataset("x", data=pixels, chunks=(2, *pixels.shape[1:]), compression="gzip")
        file["y"] = [class_of(name) for name in images]
    return folder / "x.h5"


def spoil_hdf5(path: Path, image: str) -> None:
    row = _row_of(image)
    with h5py.File(path, "r+") as file:
        if "jpeg" in file:
            file["jpeg"][row] = np.frombuffer(b"not an image", np.uint8)
        else:
            file["x"][row] = file["x"][row] ^ 1


def _row_of(image: str) -> int:
    return int(re.sub("[^0-9]", "", image.rpartition("/")[2]))


def spoil_cifar(path: Path, image: str) -> None:
    overwrite(path / f"{image.partition('/')[0]}.bin", _row_of(image) * 3073 + 1, 8)


def spoil_mnist(path: Path, image: str) -> None:
    overwrite(path / "train-images-idx3-ubyte", 16 + _row_of(image) * 28 * 28, 8)


def spoil_npy(path: Path, image: str) -> None:
    file = path / image.replace(".png", ".npy")
    overwrite(file, file.stat().st_size - 8, 8)


def spoil_npz(path: Path, image: str) -> None:
    arrays = dict(np.load(path))
    arrays["images"][_row_of(image)] ^= 1
    np.savez_compressed(path, **arrays)


# Tables and annotations of image files


def make_table(folder: Path, images: Images, suffix: str = "csv") -> Path:
    """Write a table next to the folders of images."""
    make_folder_of(folder, images)
    rows = [{"path": name, "class": class_of(name)} for name in images]
    return write_table(folder / f"table.{suffix}", rows)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows in the format that the suffix states."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(map(dict, rows))), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            dialect = "excel-tab" if path.suffix == ".tsv" else "excel"
            writer = csv.DictWriter(file, list(rows[0]), dialect=dialect)
            writer.writeheader()
            writer.writerows(rows)
    return path


def make_coco(folder: Path, images: Images) -> Path:
    """Write an annotation of the class for each image; IDs of categories have gaps."""
    make_folder_of(folder, images)
    names = sorted({class_of(name) for name in images})
    content = {
        "categories": [{"id": 7 * n + 3, "name": name} for n, name in enumerate(names)],
        "images": [{"id": n, "file_name": name} for n, name in enumerate(images)],
        "annotations": [
            {
                "id": n,
                "image_id": n,
                "category_id": 7 * names.index(class_of(name)) + 3,
                "bbox": [1, 2, 3, 4],
            }
            for n, name in enumerate(images)
        ],
    }
    (folder / "annotations.json").write_text(json.dumps(content, indent=1))
    return folder / "annotations.json"


def make_voc(folder: Path, images: Images) -> Path:
    """Write an object of the class for each image; names have no folders."""
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "Annotations").mkdir()
    make_folder_of(folder / "JPEGImages", images)
    for number, name in enumerate(images):
        write_voc(
            folder / "Annotations" / f"{number:03d}.xml", name, [(class_of(name), 2, 3, 4, 6)]
        )
    ids = "".join(f"{number:03d}\n" for number in range(len(images)))
    (folder / "ImageSets" / "Main" / "trainval.txt").write_text(ids)
    return folder


def write_voc(path: Path, image: str, objects: Sequence[tuple[Any, ...]]) -> None:
    """Write an annotation; an object is a name and the corners of its box, from 1."""
    sides = ("xmin", "ymin", "xmax", "ymax")
    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = image
    for name, *numbers in objects:
        each = ElementTree.SubElement(root, "object")
        ElementTree.SubElement(each, "name").text = name
        ElementTree.SubElement(each, "difficult").text = "0"
        box = ElementTree.SubElement(each, "bndbox")
        for side, number in zip(sides, numbers, strict=True):
            ElementTree.SubElement(box, side).text = str(number)
    ElementTree.ElementTree(root).write(path, "utf-8")


def make_pairs(folder: Path, images: Images) -> Path:
    """Write a mask for each image; the images are their own masks."""
    make_folder_of(folder / "images", images)
    make_folder_of(folder / "masks", images)
    return folder


def make_yolo(folder: Path, images: Images) -> Path:
    """Write one box of the class for each image, in the layout of Ultralytics."""
    names = sorted({class_of(name) for name in images})
    make_folder_of(folder / "images", images)
    for name in images:
        label = (folder / "labels" / name).with_suffix(".txt")
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text(f"{names.index(class_of(name))} 0.5 0.5 0.4 0.2\n")
    (folder / "data.yaml").write_text(f"nc: {len(names)}\nnames: {json.dumps(names)}\n")
    return folder


def spoil_yolo(path: Path, image: str) -> None:
    _spoil_file(path, image)


def spoil_voc(path: Path, image: str) -> None:
    _spoil_file(path / "JPEGImages", image)


def spoil_named(path: Path, image: str) -> None:
    _spoil_file(path.parent, image)


def make_zip(folder: Path, images: Images, *, packed: bool = False) -> Path:
    """Write a zip archive: stored; or, packed, in one folder, with what macOS adds."""
    top = "photos/" if packed else ""
    how = ZIP_DEFLATED if packed else ZIP_STORED
    with ZipFile(folder / "photos.zip", "w", how) as archive:
        for name, data in images.items():
            archive.writestr(f"{top}{name}", data)
            if packed:
                archive.writestr(f"__MACOSX/photos/._{name}", b"\0\5\x16\7")
    return folder / "photos.zip"


def make_table_in_zip(folder: Path, images: Images) -> Path:
    """Write a zip archive of images and of the table that lists them."""
    path = make_zip(folder, images)
    with ZipFile(path, "a", ZIP_DEFLATED) as archive:
        rows = (f"{name},{class_of(name)}\n" for name in images)
        archive.writestr("table.csv", f"path,class\n{''.join(rows)}")
    return path / "table.csv"


def spoil_zip(path: Path, image: str) -> None:
    """Overwrite the content of a member."""
    with ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n in (image, f"photos/{image}")]
        info = archive.getinfo(name)
    start = info.header_offset + 30 + len(name.encode())
    overwrite(path, start, info.compress_size)


# The conformance suite's view of all of them


class Maker(NamedTuple):
    """How to make a source of some images, and to spoil one of them."""

    kind: str
    make: Callable[[Path, Images], Path]
    spoil: Callable[[Path, str], None]
    images: Callable[[], dict[str, bytes]]
    options: Mapping[str, Any] = {}
    pixels: bool = False
    """Whether any bytes are an image."""
    labels: bool = True
    """Whether records have labels."""
    in_place: bool = True
    """Whether its files can be attached, if those of its kind can be."""


_NAMES = ("cat/1.png", "dog/2.png", "cat/3.png", "bird/größer.png", "dog/a b.png", "bird/6.png")


def _pictures(*shape: int, names: Sequence[str] = _NAMES) -> Callable[[], dict[str, bytes]]:
    """Return a function that makes images of random pixels of a shape."""

    def make() -> dict[str, bytes]:
        rng = np.random.default_rng(0)
        return {name: png_of(rng.integers(0, 256, shape, np.uint8)) for name in names}

    return make


def make_folder_of(folder: Path, images: Images) -> Path:
    for name, data in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def _spoil_file(path: Path, image: str) -> None:
    (path / image).write_bytes(b"not an image")


_DIGITS = tuple(f"{digit}/{number}.png" for number, digit in enumerate("301120"))
_SMALL = _pictures(6, 5, 3)
_NUMBERED = _pictures(6, 5, 3, names=_DIGITS)


def make_stored(folder: Path, images: Images, *, shuffle: bool = True) -> Path:
    """Convert the images to a dataset."""
    source = make_folder_of(folder / "photos", images)
    convert(source, folder / "stored", to="webdataset", shuffle=shuffle)
    return folder / "stored"


def spoil_stored(path: Path, image: str) -> None:
    """Change a byte in the middle of an image."""
    shards = open_shards(path)
    row = list(shards.paths).index(image)
    place = shards.files.path(0)
    content = bytearray(place.read_bytes())
    content[int(shards.rows["offset"][row]) + int(shards.rows["length"][row]) // 2] ^= 1
    place.write_bytes(content)


_TRAIN = {"split": "train"}
_NAMED = {"image": "path", "label": "class"}

MAKERS = {
    "imagefolder": Maker("imagefolder", make_folder_of, _spoil_file, _SMALL),
    "dataset": Maker("dataset", make_stored, spoil_stored, _SMALL),
    "webdataset": Maker("webdataset", make_tar, spoil_tar, _SMALL),
    "lmdb": Maker("lmdb", make_lmdb, spoil_lmdb, _SMALL, {"label": "folder"}),
    "hdf5": Maker("hdf5", make_hdf5, spoil_hdf5, _SMALL, {"label": "label", "image": "jpeg"}),
    "hdf5 arrays": Maker(
        "hdf5", make_hdf5_arrays, spoil_hdf5, _SMALL, {"label": "y"}, pixels=True, in_place=False
    ),
    "ffcv": Maker("ffcv", make_beton, spoil_beton, _NUMBERED),
    "ffcv raw": Maker("ffcv", partial(make_beton, raw=True), spoil_beton, _NUMBERED, pixels=True),
    "mds": Maker("mds", make_mds, spoil_columns, _SMALL),
    "mds raw": Maker(
        "mds",
        partial(make_mds, raw=True),
        partial(spoil_columns, raw=True),
        _SMALL,
        pixels=True,
        in_place=False,
    ),
    "litdata": Maker("litdata", make_litdata, spoil_columns, _SMALL),
    "litdata raw": Maker(
        "litdata",
        partial(make_litdata, raw=True),
        partial(spoil_columns, raw=True),
        _SMALL,
        pixels=True,
        in_place=False,
    ),
    "huggingface": Maker("huggingface", make_parquet, spoil_parquet, _SMALL),
    "huggingface saved": Maker("huggingface", make_saved, spoil_saved, _SMALL),
    "tfrecord": Maker("tfrecord", make_tfrecord, spoil_tfrecord, _SMALL),
    "cifar": Maker("cifar", make_cifar10, spoil_cifar, _pictures(32, 32, 3), _TRAIN, True),
    "mnist": Maker(
        "mnist", make_mnist, spoil_mnist, _pictures(28, 28, names=_DIGITS), _TRAIN, True
    ),
    "npy": Maker("npy", make_npy_folders, spoil_npy, _SMALL, pixels=True),
    "coco": Maker("coco", make_coco, spoil_named, _SMALL, labels=False),
    "pairs": Maker("pairs", make_pairs, spoil_yolo, _SMALL, labels=False),
    "yolo": Maker("yolo", make_yolo, spoil_yolo, _SMALL, labels=False),
    "voc": Maker("voc", make_voc, spoil_voc, _SMALL, labels=False),
    "table": Maker("table", make_table, spoil_named, _SMALL, _NAMED),
    "table in zip": Maker(
        "table",
        make_table_in_zip,
        lambda path, image: spoil_zip(path.parent, image),
        _SMALL,
        _NAMED,
    ),
    "zip": Maker("zip", make_zip, spoil_zip, _SMALL),
    "zip packed": Maker("zip", partial(make_zip, packed=True), spoil_zip, _SMALL, in_place=False),
    "npz": Maker("npy", partial(make_npz, packed=True), spoil_npz, _SMALL, pixels=True),
}
