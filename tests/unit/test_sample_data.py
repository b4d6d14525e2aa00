"""The sample data and their annotations."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from helpers import ORIENTATION, opened

from shardkit import convert, open_dataset, verify

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_data"
ANNOTATIONS = ROOT / "docs" / "examples" / "annotations"


def files_of(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_masks_and_boxes_fit_the_pictures() -> None:
    assert len(files_of(ANNOTATIONS)) == 97
    for line in (ANNOTATIONS / "annotations.jsonl").read_text().splitlines():
        stated = json.loads(line)
        image, mask = SAMPLES / stated["image"], ANNOTATIONS / stated["mask"]
        values = np.array(opened(mask.read_bytes()))
        assert values.shape[::-1] == opened(image.read_bytes()).size
        ((left, top, right, bottom, label),) = stated["boxes"]
        assert {*values.flat} == {0, label + 1}
        values[top:bottom, left:right] = 0
        assert not values.any()
        pixels = np.array(opened(image.read_bytes()).convert("RGB")).astype(int)
        shown = np.array(opened(mask.read_bytes())) > 0
        if image.suffix != ".png":
            assert pixels[shown].mean() > pixels[~shown].mean() + 30


def test_the_sample_data_has_its_special_cases() -> None:
    names = files_of(SAMPLES)
    images = [opened(path.read_bytes()) for path in names.values() if path.suffix != ".txt"]
    assert (len(names), len(images)) == (97, 96)
    assert {image.format for image in images} >= {"JPEG", "PNG", "WEBP"}
    assert sum(image.getexif().get(ORIENTATION, 1) != 1 for image in images) == 4
    stems = [name.rpartition(".")[0] for name in names]
    assert len(stems) - len(set(stems)) == 1
    assert any(" " in name for name in names)
    assert any(not name.isascii() for name in names)
    assert any(name.endswith(".JPG") for name in names)


def test_the_sample_data_can_be_converted(tmp_path: Path) -> None:
    manifest = convert(SAMPLES, tmp_path / "out", to="webdataset").manifests[""]
    assert manifest.classes == ("circle", "square", "star", "triangle")
    assert manifest.rows == 96
    assert manifest.class_counts == (24, 24, 24, 24)
    assert manifest.notes == {"orientation": 4}
    assert manifest.ignored == {"not an image": 1}


def test_the_sample_data_is_small_and_decodes() -> None:
    for path in files_of(SAMPLES).values():
        if path.suffix != ".txt":
            assert path.stat().st_size < 40_000
            opened(path.read_bytes()).load()


def test_the_example_converts_all_annotations(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "convert_fields.py"))
    example["main"](str(SAMPLES), str(ANNOTATIONS), str(tmp_path / "out"))
    assert verify(tmp_path / "out", "decode").ok
    dataset = open_dataset(tmp_path / "out", fields=("caption", "label", "boxes"))
    assert list(dataset.schema) == ["image", "mask", "label", "caption", "boxes"]
    assert {field.rows for field in dataset.manifest.schema} == {96}
    shapes = example["SHAPES"]
    for row, (caption, label) in enumerate(
        zip(dataset.column("caption"), dataset.column("label"), strict=True)
    ):
        assert caption.endswith(shapes[label])
        boxes, labels = dataset.column("boxes")[row]
        assert labels.tolist() == [label]
        assert (boxes >= 0).all()
        assert (boxes <= 64).all()
