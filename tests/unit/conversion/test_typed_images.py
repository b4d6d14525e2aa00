"""Images of other channels and dtypes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import assert_same, encoded, invoke, jpeg, make_dataset, make_tree, picture, png
from hostile.forging import restate
from PIL import Image
from refusals import refused, refuses
from stated import done, restate_json, stated

from shardkit import Field, convert, export, open_dataset, open_source, verify
from shardkit.errors import BadImages, CorruptDataset, UsageError

Pixels = npt.NDArray[Any]
SHAPE = (20, 30, 1)


def wide(seed: int, shape: tuple[int, ...] = SHAPE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 65536, shape, np.uint16)


def png16(image: Pixels) -> bytes:
    return encoded(Image.fromarray(image[:, :, 0]), "PNG")


IMAGES = {f"{name}/{n}.png": wide(n, (20 + n, 30, 1)) for name in ("cat", "dog") for n in range(3)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {name: png16(image) for name, image in IMAGES.items()}
    return make_tree(tmp_path_factory.mktemp("source") / "photos", dict(files))


@pytest.fixture(scope="module")
def place(source: Path) -> Path:
    """A dataset of 16-bit images, which no test changes."""
    return make_dataset(source, source.with_name("made"), pixels="keep")


def stored(path: Path) -> dict[str, Pixels]:
    dataset = open_dataset(path, decode="numpy")
    return {name: dataset[row][0] for row, name in enumerate(dataset.paths)}


def test_rgb_images_state_no_type(source: Path, tmp_path: Path) -> None:
    rgb = stated(make_dataset(source, tmp_path / "out"))
    assert rgb.schema[0].dtype is None
    assert "pixels" not in rgb.recipe


def test_verify_finds_another_type(source: Path, tmp_path: Path) -> None:
    place = make_dataset(source, tmp_path / "out", pixels="keep")
    restate(
        place,
        lambda m: replace(
            m,
            schema=tuple(replace(e, dtype="int32") if e.name == "image" else e for e in m.schema),
        ),
    )
    assert invoke("verify", place, "--level", "decode").exit_code == 1


def test_appended_images_must_be_of_the_type(place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place, tmp_path / "copy")
    tree = make_tree(tmp_path / "more", {"cat/new.png": png(30, 20)})
    result = invoke("append", copy, "--from", tree)
    assert result.exit_code == 1
    assert "uint8, 3 channels" in result.output
    assert "uint16, 1 channel" in result.output


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_raw_pixels_of_any_type(tmp_path: Path, dtype: str) -> None:
    images = [(wide(n, (16, 12, 5)) / 7).astype(dtype) for n in range(4)]
    samples = [{"image": image} for image in images]
    convert(samples, tmp_path / "out", to="lmdb", pixels="keep", encode="raw", resize="16x12")
    dataset = open_dataset(tmp_path / "out", decode="torch", fields=["image"])
    assert dataset.manifest.raw_shape == (16, 12, 5)
    batch = dataset[range(4)]
    for row, path in enumerate(dataset.paths):
        (image,) = batch[row]
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), images[int(path)])
    assert verify(tmp_path / "out", "decode").ok
    with refused(UsageError, "raw_as_png=True"):
        export(tmp_path / "out", tmp_path / "files", layout="imagefolder")
    export(tmp_path / "out", tmp_path / "files", layout="imagefolder", raw_as_png=True)
    files = sorted((tmp_path / "files").rglob("*.npy"))
    assert len(files) == 4
    assert {np.load(file).tobytes() for file in files} == {image.tobytes() for image in images}
    with refused(BadImages, "raw pixels", "uint8, 1 channel"):
        convert(
            open_source("dataset", tmp_path / "out"), tmp_path / "gray", to="lmdb", pixels="gray"
        )


@pytest.mark.parametrize(("kind", "mode"), [("gray", "L"), ("keep", "RGB")])
def test_raw_pixels_of_rgb_become_another_type(tmp_path: Path, kind: Any, mode: str) -> None:
    colors = picture(12, 16, 1)
    make_tree(tmp_path / "photos", {"a/1.png": encoded(colors, "PNG")})
    raw = make_dataset(tmp_path / "photos", tmp_path / "raw", encode="raw", resize="16x12")
    convert(open_source("dataset", raw), tmp_path / "out", to="lmdb", pixels=kind)
    (image,) = stored(tmp_path / "out").values()
    expected = np.asarray(colors.convert(mode)).reshape(16, 12, -1)
    np.testing.assert_array_equal(image, expected)
    assert verify(tmp_path / "out", "decode", against=raw).ok


def test_floats_are_stored_as_arrays(tmp_path: Path) -> None:
    images = [np.random.default_rng(n).normal(size=(9, 8, 2)).astype("float32") for n in range(3)]
    samples = [{"image": image, "number": n} for n, image in enumerate(images)]
    convert(samples, tmp_path / "out", to="lmdb", pixels="keep")
    assert stated(tmp_path / "out").fields == {"image.npy": 3, "json": 3}
    for path, image in stored(tmp_path / "out").items():
        np.testing.assert_array_equal(image, images[int(path)])
    assert verify(tmp_path / "out", "decode").ok
    done("report", tmp_path / "out", "-o", tmp_path / "report.html")
    done("convert", "dataset", tmp_path / "out", tmp_path / "copy", "--to", "lmdb")
    assert_same(stored(tmp_path / "copy"), stored(tmp_path / "out"))


def test_changed_images_are_scaled_in_their_dtype(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", to="lmdb", pixels="keep", resize="10x15", filter="bilinear")
    assert stated(tmp_path / "out").fields == {"cls": 6, "json": 6, "png": 6}
    for path, image in stored(tmp_path / "out").items():
        whole = Image.fromarray(IMAGES[path][:, :, 0].astype(np.float32))
        height = max(10, int(whole.height * 15 / 30))
        scaled = np.asarray(whole.resize((15, height), Image.Resampling.BILINEAR))
        top = (height - 10) // 2
        np.testing.assert_allclose(image[:, :, 0], scaled[top : top + 10], atol=1)


def test_gray(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {
        "a/color.jpg": jpeg(30, 20),
        "a/gray.jpg": encoded(picture(30, 20, mode="L")),
        "a/wide.png": png16(wide(0)),
    }
    source = make_tree(tmp_path / "source", files)
    convert(source, tmp_path / "out", to="lmdb", pixels="gray")
    assert stated(tmp_path / "out").fields == {"cls": 3, "jpg": 1, "json": 3, "png": 2}
    images = stored(tmp_path / "out")
    with Image.open(source / "a/color.jpg") as color:
        np.testing.assert_array_equal(
            images["a/color.jpg"][:, :, 0], np.asarray(color.convert("L"))
        )
    np.testing.assert_array_equal(images["a/wide.png"], wide(0) >> 8)
    done("verify", tmp_path / "out", "--against", source)


def test_other_images_than_the_first_are_bad_files(source: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(source, tmp_path / "mixed")
    (mixed / "dog" / "rgb.png").write_bytes(png(30, 20))
    options: dict[str, Any] = {"to": "lmdb", "pixels": "keep", "shuffle": False}
    with refused(BadImages, "dog/rgb.png", "uint8, 3 channels", "uint16, 1 channel"):
        convert(mixed, tmp_path / "out", **options)
    convert(mixed, tmp_path / "out", **options, on_error="skip")
    assert_same(stored(tmp_path / "out"), IMAGES)


def test_options_that_contradict_each_other(source: Path, tmp_path: Path) -> None:
    for options, facts in (
        ({"encode": "planes", "pixels": "keep"}, ["encode='planes'"]),
        ({"encode": "jpeg", "pixels": "keep"}, ["encode='jpeg'"]),
        ({"encode": "webp", "pixels": "gray"}, ["encode='webp'"]),
        ({"quality": 80, "pixels": "gray"}, ["quality", "encode='jpeg'"]),
        ({"dct_scaling": True, "resize": 9, "pixels": "keep"}, ["dct_scaling", "pixels='rgb'"]),
        ({"background": "black", "pixels": "keep"}, ["background"]),
    ):
        with refused(UsageError, *facts):
            convert(source, tmp_path / "out", to="lmdb", **options)
    floats = [{"image": np.zeros((3, 4), np.float32)}]
    with refused(UsageError, "encode='png'", "uint8", "uint16", "float32"):
        convert(floats, tmp_path / "out", to="lmdb", pixels="keep", encode="png")
    with refused(BadImages, "float32", "uint8", "pixels='keep'"):
        convert(floats, tmp_path / "out", to="lmdb")


def test_a_typed_dataset_does_not_become_rgb_silently(place: Path, tmp_path: Path) -> None:
    words = "convert", "dataset", place, tmp_path / "out", "--to", "lmdb", "--resize", 8
    refuses(2, *words, facts=("uint16, 1 channel", "--pixels keep", "--pixels gray"))
    done(*words, "--pixels", "keep")
    assert {image.dtype.name for image in stored(tmp_path / "out").values()} == {"uint16"}


def test_hostile_manifests_are_refused(place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place, tmp_path / "copy")
    for dtype, shape in (
        ("int64", [1]),
        ("uint16", [0]),
        ("uint16", [5000]),
        ("uint16", [1, 2]),
        ("uint16", None),
    ):

        def change(value: dict[str, Any], dtype: str = dtype, shape: Any = shape) -> None:
            image = next(entry for entry in value["schema"] if entry["name"] == "image")
            image.update(dtype=dtype, shape=shape)

        restate_json(copy, change)
        with refused(CorruptDataset, "shardkit.json"):
            open_dataset(copy)
    restate_json(copy, lambda value: value["schema"][0].update(dtype="uint16", shape=[1]))
    assert len(open_dataset(copy)) == len(IMAGES)


def test_a_stated_field_needs_channels() -> None:
    with refused(ValueError, "shape=(1,)"):
        Field("image", dtype="uint16")
    assert str(Field("image", "uint16", (2,))) == "uint16 image, 2 channels"
