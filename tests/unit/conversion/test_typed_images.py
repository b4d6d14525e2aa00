"""Conversions, and all verbs, of images of other channels and dtypes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import FORMATS, encoded, invoke, jpeg, make_dataset, make_tree, picture, png, run_main
from PIL import Image

from shardkit import Field, convert, export, open_dataset
from shardkit.codecs.png16 import encode_png16
from shardkit.codecs.typed import scale_typed
from shardkit.dataset import manifest
from shardkit.dataset.manifest import MANIFEST_NAME, load_manifest, save_manifest
from shardkit.errors import BadImages, CorruptDataset, UsageError
from shardkit.recipe import Recipe
from shardkit.system.files import read_small

Pixels = npt.NDArray[Any]
SHAPE = (20, 30, 1)


def wide(seed: int, shape: tuple[int, ...] = SHAPE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 65536, shape, np.uint16)


IMAGES = {f"{name}/{n}.png": wide(n, (20 + n, 30, 1)) for name in ("cat", "dog") for n in range(3)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {name: encode_png16(image) for name, image in IMAGES.items()}
    return make_tree(tmp_path_factory.mktemp("source"), dict(files))


@pytest.fixture(scope="module", params=FORMATS)
def place(request: Any, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 16-bit images, which no test changes."""
    target = tmp_path_factory.mktemp("typed") / "made"
    return make_dataset(source, target, to=request.param, recipe=Recipe(pixels="keep"))


def run(*words: object) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def stored(path: Path) -> dict[str, Pixels]:
    dataset = open_dataset(path, decode="numpy")
    return {name: dataset[row][0] for row, name in enumerate(dataset.paths)}


def assert_same(first: dict[str, Pixels], second: dict[str, Pixels]) -> None:
    assert first.keys() == second.keys()
    for name, image in first.items():
        assert image.dtype == second[name].dtype
        np.testing.assert_array_equal(image, second[name], name)


def test_files_are_stored_unchanged(source: Path, place: Path) -> None:
    (image,) = (entry for entry in load_manifest(place).schema if entry.name == "image")
    assert (image.dtype, image.shape) == ("uint16", (1,))
    assert_same(stored(place), IMAGES)
    dataset = open_dataset(place, decode="bytes")
    for row, path in enumerate(dataset.paths):
        assert dataset[row][0] == (source / path).read_bytes()


def test_older_releases_refuse_it(place: Path) -> None:
    assert b'"format_version": 2' in read_small(place / MANIFEST_NAME)


def test_rgb_is_written_as_before(source: Path, tmp_path: Path) -> None:
    place = make_dataset(source, tmp_path / "out", to="lmdb")
    assert b'"format_version": 1' in read_small(place / MANIFEST_NAME)
    assert load_manifest(place).schema[0].dtype is None
    assert "pixels" not in load_manifest(place).recipe


@pytest.mark.parametrize("level", ["quick", "full", "decode"])
def test_verify(source: Path, place: Path, level: str) -> None:
    run("verify", place, "--level", level)
    run("verify", place, "--against", source)


def test_verify_finds_another_type(source: Path, tmp_path: Path) -> None:
    place = make_dataset(source, tmp_path / "out", recipe=Recipe(pixels="keep"))
    before = load_manifest(place)
    schema = [replace(e, dtype="int32") if e.name == "image" else e for e in before.schema]
    save_manifest(replace(before, schema=tuple(schema)), place)
    assert invoke("verify", place, "--level", "decode").exit_code == 1


def test_repair_and_append(source: Path, place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place, tmp_path / "copy")
    shard = copy / load_manifest(copy).shards[0].name
    intact = shard.read_bytes()
    damaged = bytearray(intact)
    damaged[damaged.index(b"IDAT") + 20] ^= 1
    shard.write_bytes(damaged)
    assert invoke("verify", copy).exit_code == 1
    run("repair", copy, "--from", source)
    assert shard.read_bytes() == intact
    more = {"cat/new.png": wide(9)}
    tree = make_tree(tmp_path / "more", {name: encode_png16(i) for name, i in more.items()})
    run("append", copy, "--from", tree)
    assert_same(stored(copy), IMAGES | more)
    run("verify", copy, "--level", "decode")


def test_appended_images_must_be_of_the_type(place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place, tmp_path / "copy")
    tree = make_tree(tmp_path / "more", {"cat/new.png": png(30, 20)})
    result = invoke("append", copy, "--from", tree)
    assert result.exit_code == 1
    assert "it is of uint8, 3 channels; the first image is of uint16, 1 channel" in result.output


def test_merge_and_split(place: Path, tmp_path: Path) -> None:
    to = load_manifest(place).format
    more = {"cat/new.png": wide(9)}
    tree = make_tree(tmp_path / "more", {name: encode_png16(i) for name, i in more.items()})
    other = make_dataset(tree, tmp_path / "other", to=to, recipe=Recipe(pixels="keep"))
    run("merge", place, other, tmp_path / "both")
    assert_same(stored(tmp_path / "both"), IMAGES | more)
    run("verify", tmp_path / "both", "--level", "decode")
    run("split", place, "--val", "0.4", "--out", tmp_path / "parts", "--to", to)
    parts = [tmp_path / "parts" / name for name in ("train", "val")]
    assert_same(stored(parts[0]) | stored(parts[1]), IMAGES)


def test_info_show_report_index_and_diff(place: Path, tmp_path: Path) -> None:
    assert "uint16, 1 channel" in run("info", place)
    run("show", place, "cat/0", "-o", tmp_path / "shown.png")
    with Image.open(tmp_path / "shown.png") as shown:
        assert np.asarray(shown).max() == 255
    run("report", place, "-o", tmp_path / "report.html")
    copy = shutil.copytree(place, tmp_path / "copy")
    shutil.rmtree(copy / "index")
    run("index", copy)
    run("verify", copy)
    run("diff", place, copy, "--bytes")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_raw_pixels_of_any_type(tmp_path: Path, to: str, dtype: str) -> None:
    images = [(wide(n, (16, 12, 5)) / 7).astype(dtype) for n in range(4)]
    samples = [{"image": image} for image in images]
    convert(samples, tmp_path / "out", to=to, pixels="keep", encode="raw", resize="16x12")
    dataset = open_dataset(tmp_path / "out", decode="native", fields=["image"])
    assert dataset.manifest.raw_shape == (16, 12, 5)
    batch = dataset[range(4)]
    for row, path in enumerate(dataset.paths):
        (image,) = batch[row]
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), images[int(path)])
    run("verify", tmp_path / "out", "--level", "decode")
    with pytest.raises(UsageError, match="stores raw pixels"):
        export(tmp_path / "out", tmp_path / "files", layout="imagefolder")
    export(tmp_path / "out", tmp_path / "files", layout="imagefolder", raw_as_png=True)
    files = sorted((tmp_path / "files").rglob("*.npy"))
    assert len(files) == 4
    assert {np.load(file).tobytes() for file in files} == {image.tobytes() for image in images}


@pytest.mark.parametrize("to", FORMATS)
def test_floats_are_stored_as_arrays(tmp_path: Path, to: str) -> None:
    images = [np.random.default_rng(n).normal(size=(9, 8, 2)).astype("float32") for n in range(3)]
    samples = [{"image": image, "number": n} for n, image in enumerate(images)]
    convert(samples, tmp_path / "out", to=to, pixels="keep")
    assert load_manifest(tmp_path / "out").fields == {"image.npy": 3, "json": 3}
    for path, image in stored(tmp_path / "out").items():
        np.testing.assert_array_equal(image, images[int(path)])
    run("verify", tmp_path / "out", "--level", "decode")
    run("report", tmp_path / "out", "-o", tmp_path / "report.html")
    run("convert", "dataset", tmp_path / "out", tmp_path / "copy", "--to", "lmdb")
    assert_same(stored(tmp_path / "copy"), stored(tmp_path / "out"))


def test_changed_images_are_scaled_in_their_dtype(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", to="lmdb", pixels="keep", resize="10x15", filter="bilinear")
    assert load_manifest(tmp_path / "out").fields == {"cls": 6, "json": 6, "png": 6}
    for path, image in stored(tmp_path / "out").items():
        whole = IMAGES[path]
        height = 20 + int(path[4])
        size = max(10, int(height * 15 / 30)), 15
        scaled = scale_typed(whole, (0.0, 0.0, 30.0, float(height)), size, "bilinear")
        top = (scaled.shape[0] - 10) // 2
        np.testing.assert_array_equal(image, scaled[top : top + 10])


def test_gray(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {
        "a/color.jpg": jpeg(30, 20),
        "a/gray.jpg": encoded(picture(30, 20, mode="L")),
        "a/wide.png": encode_png16(wide(0)),
    }
    source = make_tree(tmp_path / "source", files)
    convert(source, tmp_path / "out", to="lmdb", pixels="gray")
    assert load_manifest(tmp_path / "out").fields == {"cls": 3, "jpg": 1, "json": 3, "png": 2}
    images = stored(tmp_path / "out")
    with Image.open(source / "a/color.jpg") as color:
        np.testing.assert_array_equal(
            images["a/color.jpg"][:, :, 0], np.asarray(color.convert("L"))
        )
    np.testing.assert_array_equal(images["a/wide.png"], wide(0) >> 8)
    run("verify", tmp_path / "out", "--against", source)


def test_other_images_than_the_first_are_bad_files(source: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(source, tmp_path / "mixed")
    (mixed / "dog" / "rgb.png").write_bytes(png(30, 20))
    options: dict[str, Any] = {"to": "lmdb", "pixels": "keep", "shuffle": False}
    with pytest.raises(BadImages, match=r"uint8, 3 channels; the first image is of uint16"):
        convert(mixed, tmp_path / "out", **options)
    convert(mixed, tmp_path / "out", **options, on_error="skip")
    assert_same(stored(tmp_path / "out"), IMAGES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode": "planes", "pixels": "keep"}, "encode='planes' does not hold the images of"),
        ({"encode": "jpeg", "pixels": "keep"}, "encode='jpeg' does not hold the images of"),
        ({"encode": "webp", "pixels": "gray"}, "encode='webp' does not hold the images of"),
        ({"quality": 80, "pixels": "gray"}, "requires encode='jpeg'"),
        ({"resizer": "torch", "resize": 9, "pixels": "keep"}, "are for pixels='rgb'"),
        ({"background": "black", "pixels": "keep"}, "background has no effect"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe(**options)


def test_png_does_not_hold_floats(tmp_path: Path) -> None:
    samples = [{"image": np.zeros((3, 4), np.float32)}]
    with pytest.raises(UsageError, match=r"encode='png' holds uint8 and uint16.*float32"):
        convert(samples, tmp_path / "out", to="lmdb", pixels="keep", encode="png")


def test_floats_require_pixels_keep(tmp_path: Path) -> None:
    samples = [{"image": np.zeros((3, 4), np.float32)}]
    with pytest.raises(BadImages, match=r"float32, not uint8.*--pixels keep"):
        convert(samples, tmp_path / "out", to="lmdb")


def test_a_typed_dataset_does_not_become_rgb_silently(place: Path, tmp_path: Path) -> None:
    words = "convert", "dataset", place, tmp_path / "out", "--to", "lmdb", "--resize", 8
    result = run_main(*words)
    assert result.returncode == 2
    assert "has images of uint16, 1 channel: give --pixels keep, or --pixels gray" in result.stderr
    run(*words, "--pixels", "keep")
    assert {image.dtype.name for image in stored(tmp_path / "out").values()} == {"uint16"}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("int64", (1,)), ("uint16", (0,)), ("uint16", (5000,)), ("uint16", (1, 2)), ("uint16", None)],
)
def test_hostile_manifests_are_refused(
    source: Path, tmp_path: Path, dtype: str, shape: tuple[int, ...] | None
) -> None:
    place = make_dataset(source, tmp_path / "out", recipe=Recipe(pixels="keep"))
    file = place / MANIFEST_NAME
    described = json.loads(file.read_bytes())
    del described["digest"]
    image = next(entry for entry in described["schema"] if entry["name"] == "image")
    image.update(dtype=dtype, shape=shape)
    file.write_bytes(manifest._render(described))
    with pytest.raises(CorruptDataset, match="not a valid manifest"):
        load_manifest(place)


def test_a_stated_field_needs_channels() -> None:
    with pytest.raises(ValueError, match=r"one number of channels, as in shape=\(1,\)"):
        Field("image", dtype="uint16")
    assert str(Field("image", "uint16", (2,))) == "image of uint16, 2 channels"
