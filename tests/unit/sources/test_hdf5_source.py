"""HDF5 files of other programs: arrays and encoded images, and files that are hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from foreign import pixels_of
from helpers import png
from refusals import refused

from shardkit import Field, attach, convert, open_dataset, open_source, verify
from shardkit.errors import UsageError

PICTURES = [png(8, 6, seed) for seed in range(3)]
PIXELS = np.stack([pixels_of(data) for data in PICTURES])


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("hdf5", path, **options).scan()


def images(found: Any) -> list[bytes]:
    records = found.splits[""].read(range(len(found.splits[""])))
    return [record.fields[record.image_field or ""] for record in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        vlen = file.create_dataset("train/vlen", (3,), h5py.vlen_dtype(np.uint8))
        strings = file.create_dataset("train/strings", (3,), h5py.string_dtype())
        for row, data in enumerate(PICTURES):
            vlen[row] = np.frombuffer(data, np.uint8)
            strings[row] = f"class {row % 2}"
        file["train/void"] = np.array(PICTURES, dtype=f"V{max(map(len, PICTURES))}")
        file["x"] = PIXELS
        file["chw"] = PIXELS.transpose(0, 3, 1, 2)
        file["gray"] = PIXELS[..., 0]
        file["float"] = PIXELS / np.float32(255)
        file["y"] = np.array([[2], [0], [1]], np.int16)
    return tmp_path / "x.h5"


@pytest.mark.parametrize("name", ["train/vlen", "train/void", "x", "/x", "chw"])
def test_arrays_and_encoded_images_are_read(name: str, path: Path) -> None:
    found = scan(path, image=name, label="y")
    assert [pixels_of(data).tolist() for data in images(found)] == PIXELS.tolist()
    assert found.classes == ("0", "1", "2")
    assert [entry.label for entry in found.splits[""].entries] == [2, 0, 1]
    assert "float" in found.understood["unused"]
    assert " y (" not in found.understood["unused"]


def test_a_dataset_may_name_the_images(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["id"] = ["cat/a", "/b.png", ""]
    names = [entry.path for entry in scan(path, image="x", name="id").splits[""].entries]
    assert names == ["cat/a.png", "b.png", "x/00000002.png"]
    with refused(UsageError, path, "'nope'", "id"):
        scan(path, image="x", name="nope")


def test_labels_may_be_texts_and_images_gray(path: Path) -> None:
    found = scan(path, image="gray", label="train/strings")
    assert found.classes == ("class 0", "class 1")
    assert [pixels_of(data).tolist() for data in images(found)] == PIXELS[..., 0].tolist()


def test_labels_of_another_type_are_refused(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        lists = file.create_dataset("lists", (3,), h5py.vlen_dtype(np.int64))
        lists[0] = [1, 2]
        file["references"] = np.array([file.ref] * 3, h5py.ref_dtype)
        regions = [file["x"].regionref[row] for row in range(3)]
        file["regions"] = np.array(regions, h5py.regionref_dtype)
        file["pairs"] = np.zeros(3, [("a", "i4")])
        file["opaque"] = np.zeros(3, "V2")
    for name, what in (
        ("lists", "(lists 3)"),
        ("train/vlen", "(image 3)"),
        ("references", "(references 3)"),
        ("regions", "(references 3)"),
        ("pairs", "(compounds 3)"),
        ("opaque", "bytes"),
    ):
        with refused(UsageError, name, what):
            scan(path, image="x", label=name)


def test_wrong_datasets_are_named(path: Path, tmp_path: Path) -> None:
    for options, reason in (
        ({"image": "none"}, "no image column 'none'; it has chw"),
        ({"image": "float"}, r"float \(float.* is not an image column.*pixels='keep'"),
        ({"image": "x", "label": "z"}, "no column 'z' of integers"),
        ({"image": "x", "label": "float"}, "no column 'float' of integers"),
    ):
        with pytest.raises(UsageError, match=reason):
            scan(path, **options)
    with h5py.File(path, "r+") as file:
        file["short"] = [1, 2]
    with pytest.raises(UsageError, match=r"2 values.*3 images"):
        scan(path, image="x", label="short")
    with h5py.File(tmp_path / "fewer.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((3, 4, 4, 3), np.uint8), [1, 2]
    with refused(UsageError, tmp_path / "fewer.h5", "labels", "2", "3"):
        scan(tmp_path / "fewer.h5")
    assert scan(tmp_path / "fewer.h5", label="none").classes is None
    (tmp_path / "bad.h5").write_bytes(b"not hdf5")
    with pytest.raises(UsageError, match=r"bad\.h5"):
        scan(tmp_path / "bad.h5")


def test_other_files_are_never_read(path: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["external"] = h5py.ExternalLink(str(path), "/x")
        file["soft"] = h5py.SoftLink("/x")
        file["group/circle"] = h5py.SoftLink("/group")
        layout = h5py.VirtualLayout(PIXELS.shape, np.uint8)
        layout[:] = h5py.VirtualSource(str(path), "x", PIXELS.shape)
        file.create_virtual_dataset("virtual", layout)
        (tmp_path / "raw").write_bytes(PIXELS.tobytes())
        file.create_dataset(
            "storage",
            PIXELS.shape,
            np.uint8,
            external=[(str(tmp_path / "raw"), 0, h5py.h5f.UNLIMITED)],
        )
    for name in ("external", "soft"):
        with pytest.raises(UsageError, match=f"'{name}'"):
            scan(tmp_path / "y.h5", image=name)
    for name in ("virtual", "storage"):
        found = scan(tmp_path / "y.h5", image=name)
        with refused(ValueError, name):
            images(found)


@pytest.fixture
def more(path: Path) -> Path:
    """The file with a mask, text, numbers and arrays for each image."""
    with h5py.File(path, "r+") as file:
        file["mask"] = np.arange(3 * 6 * 8, dtype=np.uint16).reshape(3, 6, 8)
        file["text"] = ["a", "größe", ""]
        file["age"] = np.array([3, -1, 2**40])
        file["score"] = np.array([0.5, 1.5, -2], ">f4")
        file["latent"] = np.arange(12, dtype=np.float16).reshape(3, 2, 2)
        file["found"] = np.array([[[1, 2, 3, 4]]] * 3)
        file["short"] = [1, 2]
        compound = np.dtype([("a", "i4"), ("b", "f4")])
        file["pairs"] = np.zeros(3, compound)
    return path


def test_more_datasets_are_kept(more: Path, tmp_path: Path) -> None:
    keep = "mask=mask:mask,text,age,score,latent,boxes=found:boxes,list=latent:json,no=none:text?"
    source = open_source("hdf5", more, image="x", label="y", keep=keep)
    convert(source, tmp_path / "made", to="lmdb", shuffle=False)
    assert verify(tmp_path / "made", against=more).findings == []
    dataset = open_dataset(tmp_path / "made", decode="bytes")
    assert dataset.column("age").tolist() == [3, -1, 2**40]
    assert dataset.column("score").tolist() == [0.5, 1.5, -2]
    assert dataset.column("text").tolist() == ["a", "größe", ""]
    assert dataset.schema["latent"] == Field("array", "float16", (2, 2))
    with h5py.File(more) as file:
        for row, record in enumerate(source.scan().splits[""].read(range(3))):
            assert pixels_of(record.fields["mask.png"]).tolist() == file["mask"][row].tolist()
            assert record.fields["latent.npy"] == file["latent"][row].tobytes()
            assert record.meta["boxes"] == [[1, 2, 3, 4]]
            assert record.meta["list"] == file["latent"][row].tolist()
    understood = source.scan().understood
    assert understood["latent"] == "latent (float16 3x2x2): float16 array, 2 x 2"
    assert understood["age"] == "age (int64 3): int64 number"


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        ("z", ()),
        ("short", ("3", "2")),
        ("pairs", ()),
        ("a=age:/b", ("JSON",)),
    ],
)
def test_datasets_that_cannot_be_kept_are_named(
    keep: str, reason: tuple[str, ...], more: Path
) -> None:
    with refused(UsageError, *reason):
        scan(more, image="x", keep=keep)


def test_files_of_matlab_are_read_as_matlab_shows_them(tmp_path: Path) -> None:
    """Arrays of MATLAB have their axes in reverse order: 4 x 5 x 3 x 2 and 4 x 5 x 2 here."""
    pixels = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    path = tmp_path / "m.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["images"] = pixels.transpose(0, 3, 2, 1)
        file["masks"] = pixels[..., 0].transpose(0, 2, 1)
        file["labels"] = np.array([[3.0, 1.0]])
        for name in ("images", "masks"):
            file[name].attrs["MATLAB_class"] = np.bytes_("uint8")
    found = scan(path, image="images", label="labels")
    assert [pixels_of(data).tolist() for data in images(found)] == pixels.tolist()
    assert [entry.label for entry in found.splits[""].entries] == [3, 1]
    gray = [pixels_of(data).tolist() for data in images(scan(path, image="masks"))]
    assert gray == pixels[..., 0].tolist()
    convert(
        open_source("hdf5", path, image="images", keep="mask=masks:mask"),
        tmp_path / "made",
        to="lmdb",
        shuffle=False,
    )
    masks = [
        np.asarray(row[0]).tolist() for row in open_dataset(tmp_path / "made", fields=["mask"])[:]
    ]
    assert masks == pixels[..., 0].tolist()
    with refused(UsageError, "m.mat", "images", "MATLAB"):
        attach(open_source("hdf5", path, image="images"), tmp_path / "index")
