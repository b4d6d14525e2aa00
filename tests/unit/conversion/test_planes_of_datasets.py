"""Datasets of planes: their checksums, other encodings, turning, exports and measurements."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import encoded, exif, invoke, jpeg, make_dataset, make_tree, opened, picture, png
from PIL import Image
from pyarrow import parquet
from refusals import refused
from stated import done, has_compiled_module

from shardkit import CenterCrop, convert, export, make_loader, open_dataset
from shardkit.errors import DiskFull, UsageError

pytestmark = pytest.mark.skipif(not has_compiled_module(), reason="it writes planes")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, bytes | None] = {
        "cat/half.jpg": jpeg(41, 33, subsampling=2),
        "cat/turned.jpg": jpeg(30, 21, exif=exif(6)),
        "dog/gray.jpg": encoded(picture(45, 50, mode="L")),
        "dog/plain.png": png(44, 38),
        "dog/print.jpg": encoded(picture(40, 30).convert("CMYK")),
    }
    return make_tree(tmp_path_factory.mktemp("source") / "photos", files)


@pytest.fixture(scope="module")
def place(source: Path) -> Path:
    """A dataset of planes, which no test changes."""
    return make_dataset(source, source.with_name("made"), encode="planes")


def pixels(path: Path) -> dict[str, Any]:
    dataset = open_dataset(path, decode="numpy")
    return {name: dataset[row][0] for row, name in enumerate(dataset.paths)}


def test_verify_compares_the_checksums_of_bands(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.codecs.planes._checksums", lambda *_: [0] * 12)
    place = make_dataset(source, tmp_path / "made", encode="planes")
    monkeypatch.undo()
    done("verify", place, "--level", "full")
    result = invoke("verify", place, "--level", "decode")
    assert result.exit_code == 1
    assert "cat/half.jpg" in result.output
    assert "band 1 of 12" in result.output


@pytest.mark.parametrize("encode", ["png", "raw"])
def test_planes_become_other_images(place: Path, tmp_path: Path, encode: str) -> None:
    shape = ("--resize", "20x20", "--enlarge") if encode == "raw" else ()
    words = ("convert", "dataset", place, tmp_path / "out", "--to", "lmdb", "--encode", encode)
    done(*words, *shape)
    done("verify", tmp_path / "out", "--against", place)
    found = pixels(tmp_path / "out")
    if encode == "raw":
        assert {image.shape for image in found.values()} == {(20, 20, 3)}
        return
    for name, image in pixels(place).items():
        turned = np.rot90(image, -1) if name == "cat/turned.jpg" else image
        np.testing.assert_array_equal(found[name], turned, name)


def test_planes_are_turned_on_request(place: Path, tmp_path: Path) -> None:
    done("convert", "dataset", place, tmp_path / "out", "--to", "lmdb", "--orient")
    turned = pixels(place)["cat/turned.jpg"]
    np.testing.assert_array_equal(pixels(tmp_path / "out")["cat/turned.jpg"], np.rot90(turned, -1))


def images_of(folder: Path) -> list[bytes]:
    """Return the image files of an export, or those in its tables and archives."""
    found = []
    for path in filter(Path.is_file, folder.rglob("*")):
        if path.suffix == ".parquet":
            found += [row["image"]["bytes"] for row in parquet.read_table(path).to_pylist()]
        elif path.suffix == ".tar":
            with tarfile.open(path) as members:
                files = [each for each in members if each.name.endswith((".png", ".jpg"))]
                found += [members.extractfile(each).read() for each in files]  # type: ignore[union-attr]
        elif path.suffix in (".png", ".jpg"):
            found.append(path.read_bytes())
    return found


@pytest.mark.parametrize("layout", ["imagefolder", "csv", "webdataset", "parquet"])
def test_export_as_png_on_request(place: Path, source: Path, tmp_path: Path, layout: Any) -> None:
    with refused(UsageError, place.name, "raw_as_png=True"):
        export(place, tmp_path / "files", layout=layout)
    assert not (tmp_path / "files").exists()
    export(place, tmp_path / "files", layout=layout, raw_as_png=True)
    images = images_of(tmp_path / "files")
    assert len(images) == 5
    assert (source / "dog/plain.png").read_bytes() in images
    assert (source / "dog/print.jpg").read_bytes() in images
    expected = {np.asarray(image).tobytes() for image in pixels(place).values()}
    assert {np.asarray(opened(data).convert("RGB")).tobytes() for data in images} == expected


def test_a_disk_that_holds_only_the_jpegs_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = encoded(Image.new("RGB", (200, 200), "teal"))
    source = make_tree(tmp_path / "plain", {f"a/{n}.jpg": plain for n in range(4)})
    # Planes take 1.5 of that.
    monkeypatch.setattr("shardkit.conversion.disk.free_bytes", lambda _: 4 * 200 * 200)
    convert(source, tmp_path / "kept", to="webdataset", shard_samples=4)
    with refused(DiskFull, "needs about"):
        convert(source, tmp_path / "planes", to="webdataset", encode="planes", shard_samples=4)
    assert not (tmp_path / "planes").exists()


@pytest.mark.slow
def test_bench_tune_and_doctor_measure(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(40, 30, n) for n in range(64)}
    place = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made", encode="planes")
    words = ("--json", "--decode", "CenterCrop(24)", "--batch-size", "8")
    short = ("--loader", "auto", "--cache", "warm", "--rounds", "1", "--seconds", "0.1")
    (line,) = json.loads(done("bench", place, *words, *short))["lines"]
    assert line["problem"] == ""
    assert line["measured"]["images_per_second"]["median"] > 0
    tuned = json.loads(done("tune", place, *words, "--budget", "1s", "--out", tmp_path / "tuned"))
    assert tuned["ranking"]
    settings = str(tmp_path / "tuned")
    loader = make_loader(open_dataset(place, decode=CenterCrop(24)), shuffle=True, tuned=settings)
    assert sum(len(labels) for _, labels in loader) == 64
    profile = json.loads(done("doctor", place, *words, "--budget", "1s"))["profile"]
    assert profile["kind"] == "y4m"
    assert profile["stages"]["decode"]["seconds"] > 0
