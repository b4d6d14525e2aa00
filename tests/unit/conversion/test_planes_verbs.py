"""Every command and function knows planes."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    FORMATS,
    encoded,
    exif,
    invoke,
    jpeg,
    make_dataset,
    make_tree,
    opened,
    picture,
    png,
)
from PIL import Image
from pyarrow import parquet

from shardkit import CenterCrop, export, make_loader, open_dataset
from shardkit.codecs import planes
from shardkit.codecs.image import apply_orientation
from shardkit.conversion import disk
from shardkit.dataset.manifest import load_manifest
from shardkit.dataset.shardset import open_shards
from shardkit.errors import DiskFull, UsageError
from shardkit.recipe import Recipe
from shardkit.system import compiled

pytestmark = pytest.mark.skipif(not compiled.is_available(), reason="it writes planes")

PLANES = Recipe(encode="planes")
STORED = {"cls": 7, "jpg": 1, "json": 7, "png": 1, "y4m": 5}
TURNED = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, bytes | None] = {
        "cat/half.jpg": jpeg(41, 33, subsampling=2),
        "cat/full.jpg": jpeg(40, 31, subsampling=0),
        "cat/progressive.jpg": jpeg(51, 35, progressive=True),
        "cat/turned.jpg": jpeg(30, 21, exif=exif(TURNED)),
        "dog/gray.jpg": encoded(picture(45, 50, mode="L")),
        "dog/plain.png": png(44, 38),
        "dog/print.jpg": encoded(picture(40, 30).convert("CMYK")),
    }
    return make_tree(tmp_path_factory.mktemp("source"), files)


@pytest.fixture(scope="module", params=FORMATS)
def place(request: Any, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of planes, which no test changes."""
    target = tmp_path_factory.mktemp("planes") / "made"
    return make_dataset(source, target, to=request.param, recipe=PLANES)


def run(*words: object) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def pixels(path: Path) -> dict[str, Any]:
    dataset = open_dataset(path, decode="numpy")
    return {name: dataset[row][0] for row, name in enumerate(dataset.paths)}


def assert_same_pixels(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, image in first.items():
        np.testing.assert_array_equal(image, second[name], name)


def test_verify_repair_and_append(source: Path, place: Path, tmp_path: Path) -> None:
    assert load_manifest(place).fields == STORED
    for level in ("quick", "full", "decode"):
        run("verify", place, "--level", level)
    run("verify", place, "--against", source)
    copy = shutil.copytree(place, tmp_path / "copy")
    shard = copy / load_manifest(copy).shards[0].name
    intact = shard.read_bytes()
    damaged = bytearray(intact)
    damaged[damaged.index(b"\nFRAME") + 79] ^= 1
    shard.write_bytes(damaged)
    assert invoke("verify", copy).exit_code == 1
    run("repair", copy, "--from", source)
    assert shard.read_bytes() == intact
    run("diff", place, copy, "--bytes")
    run("append", copy, "--from", make_tree(tmp_path / "more", {"cat/new.jpg": jpeg(20, 30)}))
    assert load_manifest(copy).fields == {"cls": 8, "jpg": 1, "json": 8, "png": 1, "y4m": 6}
    run("verify", copy, "--level", "decode")
    assert invoke("diff", place, copy).exit_code == 1


def test_verify_compares_the_checksums_of_bands(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planes, "_checksums", lambda *_: [0] * planes.BANDS)
    place = make_dataset(source, tmp_path / "made", recipe=PLANES)
    monkeypatch.undo()
    run("verify", place, "--level", "full")
    result = invoke("verify", place, "--level", "decode")
    assert result.exit_code == 1
    assert "cat/half.jpg" in result.output
    assert "the checksum of its band 1 of 12 does not match" in result.output


def test_merge_and_split(source: Path, place: Path, tmp_path: Path) -> None:
    to = load_manifest(place).format
    tree = {"cat/new.jpg": jpeg(20, 30), "dog/new.jpg": jpeg(21, 30)}
    more = make_dataset(
        make_tree(tmp_path / "more", tree), tmp_path / "other", to=to, recipe=PLANES
    )
    run("merge", place, more, tmp_path / "both")
    run("verify", tmp_path / "both", "--level", "decode")
    assert_same_pixels(pixels(tmp_path / "both"), pixels(place) | pixels(more))
    run("split", place, "--val", "0.4", "--out", tmp_path / "parts", "--to", to)
    parts = [tmp_path / "parts" / name for name in ("train", "val")]
    assert_same_pixels(pixels(parts[0]) | pixels(parts[1]), pixels(place))
    assert sum(load_manifest(part).fields.get("y4m", 0) for part in parts) == STORED["y4m"]


def test_info_show_report_and_index(place: Path, tmp_path: Path) -> None:
    assert "y4m" in run("info", place)
    run("show", place, "cat/half.jpg", "-o", tmp_path / "shown.png")
    assert (tmp_path / "shown.png").stat().st_size > 0
    run("report", place, "-o", tmp_path / "report.html")
    copy = shutil.copytree(place, tmp_path / "copy")
    shutil.rmtree(copy / "index")
    run("index", copy)
    run("verify", copy)


@pytest.mark.parametrize("encode", ["keep", "planes", "png", "raw"])
def test_convert_dataset(place: Path, tmp_path: Path, encode: str) -> None:
    target = tmp_path / "out"
    shape = ("--resize", "20x20", "--enlarge") if encode == "raw" else ()
    run("convert", "dataset", place, target, "--to", "lmdb", "--encode", encode, *shape)
    run("verify", target, "--against", place)
    if encode in ("keep", "planes"):
        assert load_manifest(target).fields == STORED
        assert_same_pixels(pixels(target), pixels(place))
        dataset = open_shards(target)
        described = dataset.record(list(dataset.paths).index("cat/turned.jpg")).meta
        assert described["orientation"] == TURNED
    if encode == "png":
        expected = pixels(place)
        image = Image.fromarray(expected["cat/turned.jpg"])
        expected["cat/turned.jpg"] = np.asarray(apply_orientation(image, TURNED))
        assert_same_pixels(pixels(target), expected)


def test_planes_are_turned_on_request(place: Path, tmp_path: Path) -> None:
    run("convert", "dataset", place, tmp_path / "out", "--to", "lmdb", "--orient")
    assert pixels(place)["cat/turned.jpg"].shape == (21, 30, 3)
    assert pixels(tmp_path / "out")["cat/turned.jpg"].shape == (30, 21, 3)


@pytest.mark.parametrize("layout", ["imagefolder", "csv", "webdataset", "parquet"])
def test_export_as_png_on_request(place: Path, source: Path, tmp_path: Path, layout: str) -> None:
    with pytest.raises(UsageError, match=r"stores planes.*raw_as_png=True"):
        export(place, tmp_path / "files", layout=layout)
    assert not (tmp_path / "files").exists()
    export(place, tmp_path / "files", layout=layout, raw_as_png=True)
    if layout == "parquet":
        tables = map(parquet.read_table, (tmp_path / "files").rglob("*.parquet"))
        images = [row["image"]["bytes"] for table in tables for row in table.to_pylist()]
    elif layout == "webdataset":
        images = []
        for archive in (tmp_path / "files").glob("*.tar"):
            with tarfile.open(archive) as members:
                files = [each for each in members if each.name.endswith((".png", ".jpg"))]
                images += [members.extractfile(each).read() for each in files]  # type: ignore[union-attr]
    else:
        images = [
            path.read_bytes()
            for path in (tmp_path / "files").rglob("*")
            if path.suffix in (".png", ".jpg")
        ]
    assert len(images) == 7
    assert (source / "dog/plain.png").read_bytes() in images
    assert (source / "dog/print.jpg").read_bytes() in images
    expected = {np.asarray(image).tobytes() for image in pixels(place).values()}
    assert {np.asarray(opened(data).convert("RGB")).tobytes() for data in images} == expected


def test_a_disk_that_holds_only_the_jpegs_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = encoded(Image.new("RGB", (200, 200), "teal"))
    source = make_tree(tmp_path / "plain", {f"a/{n}.jpg": plain for n in range(4)})
    monkeypatch.setattr(disk, "free_bytes", lambda _: 4 * 200 * 200)  # planes take 1.5 of that
    assert make_dataset(source, tmp_path / "kept", to="webdataset").exists()
    with pytest.raises(DiskFull, match="needs about"):
        make_dataset(source, tmp_path / "planes", to="webdataset", recipe=PLANES)
    assert not (tmp_path / "planes").exists()


@pytest.mark.slow
def test_bench_tune_and_doctor_measure(tmp_path: Path) -> None:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(40, 30, n) for n in range(64)}
    place = make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made", recipe=PLANES)
    words = ("--json", "--decode", "CenterCrop(24)", "--batch-size", "8")
    short = ("--loader", "auto", "--cache", "warm", "--rounds", "1", "--seconds", "0.1")
    (line,) = json.loads(run("bench", place, *words, *short))["lines"]
    assert line["problem"] == ""
    assert line["measured"]["images_per_second"]["median"] > 0
    tuned = json.loads(run("tune", place, *words, "--budget", "1s", "--out", tmp_path / "tuned"))
    assert tuned["ranking"]
    settings = str(tmp_path / "tuned")
    loader = make_loader(open_dataset(place, decode=CenterCrop(24)), shuffle=True, tuned=settings)
    assert sum(len(labels) for _, labels in loader) == 64
    profile = json.loads(run("doctor", place, *words, "--budget", "1s"))["profile"]
    assert profile["kind"] == "y4m"
    assert profile["stages"]["decode"]["seconds"] > 0
