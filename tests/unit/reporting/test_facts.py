"""Facts of images: what they state and where they are; equal images alone are identical."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers import copy_dataset, encoded, exif, make_dataset, make_tree, png, tree
from PIL import Image, ImageFilter
from planted_faults import scene

from shardkit import append, convert, report, verify
from shardkit.codecs.measures import measure
from shardkit.codecs.properties import properties
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.recipe import Recipe
from shardkit.reporting import facts as facts_module
from shardkit.reporting.collection import Collection
from shardkit.reporting.facts import load_facts
from shardkit.reporting.identical import find_identical
from shardkit.reporting.image_facts import BROKEN, MEASURED, Facts
from shardkit.reporting.page import page


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    files = {f"cat/{n}.jpg": encoded(scene(n), quality=80) for n in range(5)}
    files["cat/gray.png"] = png(30, 20, 3, "L")
    source = make_tree(tmp_path / "photos", files)
    return make_dataset(source, tmp_path / "made", shuffle=False)


def test_facts_are_those_of_the_pixels(dataset: Path) -> None:
    facts = load_facts(open_shards(dataset))
    for row, name, most in ((2, "2.jpg", 0.1), (5, "gray.png", 1e-3)):  # a JPEG is reduced
        content = (dataset.parent / "photos/cat" / name).read_bytes()
        pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), np.float64)

        assert facts[row]["state"] == MEASURED
        assert facts[row]["mean"] == pytest.approx(pixels.mean((0, 1)), abs=most)
        assert facts[row]["content"] == zlib.crc32(content)
    assert facts[5]["std"] == pytest.approx(pixels.std((0, 1)), abs=1e-3)
    assert facts[5]["pixels"] == zlib.crc32(pixels.astype(np.uint8).tobytes())
    assert facts[["quality", "orientation", "frames"]][2].item() == (80, 1, 1)
    assert [*facts["mode"]] == [b"RGB"] * 5 + [b"L"]


def test_facts_do_not_change_the_dataset(dataset: Path) -> None:
    before = tree(dataset)
    load_facts(open_shards(dataset))
    after = tree(dataset)
    result = verify(dataset)

    assert set(after) - set(before) == {FACTS_NAME}
    assert before.items() <= after.items()
    assert result.ok
    assert result.extras == []


def test_a_new_dataset_replaces_facts_too(dataset: Path) -> None:
    load_facts(open_shards(dataset))

    convert(dataset.parent / "photos", dataset, to="hdf5", force=True)

    assert not (dataset / FACTS_NAME).exists()


def test_facts_do_not_depend_on_workers(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_ROWS", 2)
    alone = load_facts(open_shards(dataset))
    (dataset / FACTS_NAME).unlink()

    assert load_facts(open_shards(dataset), workers=2).tobytes() == alone.tobytes()


def test_only_missing_facts_are_measured(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = load_facts(open_shards(dataset))
    measured: list[list[int]] = []
    measure_rows = facts_module.measure_rows

    def watch(shards: ShardSet, rows: npt.NDArray[np.int64]) -> Facts:
        measured.append(rows.tolist())
        return measure_rows(shards, rows)

    monkeypatch.setattr(facts_module, "measure_rows", watch)
    load_facts(open_shards(dataset))
    assert measured == []
    more = make_tree(dataset.parent / "more", {"cat/5.png": png(9, 9), "dog/6.png": png(9, 9, 2)})
    append(dataset, more)
    assert load_facts(open_shards(dataset))[:6].tobytes() == facts.tobytes()
    assert measured == [[6, 7]]
    assert verify(dataset, level="full").ok
    facts = load_facts(open_shards(dataset))
    measured.clear()
    stored = np.load(dataset / FACTS_NAME)
    stored["checksum"][1] ^= 1  # of another record
    stored["version"][3] += 1
    np.save(dataset / FACTS_NAME, stored)

    assert load_facts(open_shards(dataset)).tobytes() == facts.tobytes()
    assert measured == [[1, 3]]


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00garbage", None])
def test_damaged_facts_are_measured_again(dataset: Path, content: bytes | None) -> None:
    facts = load_facts(open_shards(dataset))
    path = dataset / FACTS_NAME
    if content is None:  # a link out of the dataset
        (dataset.parent / "elsewhere.npy").write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(dataset.parent / "elsewhere.npy")
    else:
        path.write_bytes(content)

    assert load_facts(open_shards(dataset)).tobytes() == facts.tobytes()
    assert not path.is_symlink()


def test_a_dataset_that_cannot_be_written_has_facts(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(facts_module, "write_npy", refuse)

    assert (load_facts(open_shards(dataset))["state"] == MEASURED).all()
    assert not (dataset / FACTS_NAME).exists()


def test_an_image_that_cannot_be_decoded_is_broken(tmp_path: Path) -> None:
    content = encoded(scene(1))
    files = {"a.jpg": content, "b.jpg": content[: len(content) // 2], "c.png": png()[:60]}
    source = make_tree(tmp_path / "photos", files)
    place = make_dataset(source, tmp_path / "made", shuffle=False, recipe=Recipe(check="none"))

    assert load_facts(open_shards(place))["state"].tolist() == [MEASURED, BROKEN, BROKEN]


@pytest.mark.parametrize("quality", [10, 50, 75, 90, 95, 100])
def test_the_quality_of_a_jpeg_is_estimated(quality: int) -> None:
    assert properties(encoded(quality=quality), "jpg").quality == quality


def test_properties_are_those_of_the_header() -> None:
    turned = properties(encoded(exif=exif(6)), "jpg")
    profiled = properties(encoded(kind="PNG", icc_profile=b"profile"), "png")

    assert (turned.orientation, turned.icc) == (6, False)
    assert (profiled.icc, profiled.quality, profiled.mode) == (True, 0, b"RGB")


def test_sharpness_falls_with_blur_and_not_with_contrast() -> None:
    def sharpness(image: Image.Image) -> float:
        return float(measure(np.asarray(image))["sharpness"])

    image = scene(3)
    faint = image.point(lambda level: 100 + level // 4)
    blurred = [sharpness(image.filter(ImageFilter.GaussianBlur(n))) for n in (1, 2, 4)]

    assert [sharpness(image), *blurred] == sorted([sharpness(image), *blurred], reverse=True)
    assert sharpness(faint) == pytest.approx(sharpness(image), abs=0.08)
    assert sharpness(Image.new("RGB", (40, 40))) == 0


@pytest.mark.parametrize("seed", range(3))
def test_forged_facts_make_no_harm(dataset: Path, seed: int) -> None:
    stored = load_facts(open_shards(dataset))
    forged = np.frombuffer(np.random.default_rng(seed).bytes(stored.nbytes), stored.dtype).copy()
    for name in ("checksum", "version"):
        forged[name] = stored[name]
    forged["state"] %= 3
    with open(dataset / FACTS_NAME, "r+b") as file:
        file.seek(-forged.nbytes, 2)
        file.write(forged.tobytes())
    made = report(dataset)

    json.dumps(made.as_dict(), allow_nan=False)
    assert "</html>" in page(made)


# Identical pictures: facts name candidates, and only equal images count.

PICTURE = encoded(scene(0))
COMMENTED = PICTURE[:2] + b"\xff\xfe\0\x06note" + PICTURE[2:]


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    files = {
        "0.jpg": PICTURE,
        "1.jpg": COMMENTED,
        "2.jpg": encoded(scene(1)),
        "3.jpg": PICTURE,
        "4.png": png(9, 9)[:60],
        "5.png": png(9, 9)[:60],
        "6.png": png(9, 9, 1)[:60],
    }
    source = make_tree(tmp_path / "photos", files)
    return copy_dataset(source, tmp_path / "made", shuffle=False, recipe=Recipe(check="none"))


def test_bytes_and_pixels_are_compared(copies: Path) -> None:
    same = find_identical(Collection([copies]))

    assert same.bytes.tolist() == [0, 1, 2, 0, 4, 4, 6]
    assert same.pixels.tolist() == [0, 0, 2, 0, 4, 4, 6]


def test_facts_alone_make_no_picture_identical(copies: Path) -> None:
    load_facts(open_shards(copies))
    stored = np.load(copies / FACTS_NAME)
    for name in ("hash", "pixels", "content"):
        stored[name] = stored[name][0]
    np.save(copies / FACTS_NAME, stored)
    same = find_identical(Collection([copies]))

    assert same.bytes.tolist() == [0, 1, 2, 0, 4, 4, 6]
    assert same.pixels.tolist() == [0, 0, 2, 0, 4, 4, 6]
