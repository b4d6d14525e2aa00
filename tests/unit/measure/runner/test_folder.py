"""The baseline reads as torchvision's ImageFolder does: with Pillow, one file at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jpeg, make_folder, make_tree
from PIL import Image
from refusals import refused

from shardkit import CenterCrop, RandomResizedCrop, Resize, UsageError
from shardkit.errors import BadImage
from shardkit.measure.runner.folder import PlainFolder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=3)


def test_images_and_labels_match_the_files(photos: Path) -> None:
    dataset = PlainFolder(photos, "pil")

    assert len(dataset) == 6
    for row, (path, label) in enumerate(dataset.samples):
        assert dataset[row][0].tobytes() == Image.open(path).convert("RGB").tobytes()
        assert dataset[row][1] == label == ["cat", "dog"].index(Path(path).parent.name)


def test_decode_selects_the_type(photos: Path) -> None:
    (array, _), (tensor, _) = (PlainFolder(photos, kind)[1] for kind in ("numpy", "torch"))
    stored, _ = PlainFolder(photos, "bytes")[1]

    assert array.shape == (18, 21, 3)
    assert np.array_equal(array, tensor.permute(1, 2, 0).numpy())
    assert stored == Path(PlainFolder(photos, "bytes").samples[1][0]).read_bytes()


@pytest.mark.parametrize(
    ("operation", "box", "size"),
    [(CenterCrop(12), (4, 3, 16, 15), None), (Resize((30, 40)), None, (40, 30))],
)
def test_crops_equal_pillows(tmp_path: Path, operation: Any, box: Any, size: Any) -> None:
    make_tree(tmp_path / "one", {"a/0.jpg": jpeg(20, 18)})
    found, _ = PlainFolder(tmp_path / "one", operation)[0]
    expected = Image.open(tmp_path / "one/a/0.jpg").convert("RGB")
    expected = expected.crop(box) if box else expected
    if size:
        expected = expected.resize(size, Image.Resampling.BILINEAR)

    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.array(expected))


def test_random_crops_have_the_size_and_differ(photos: Path) -> None:
    dataset = PlainFolder(photos, RandomResizedCrop(8))

    drawn = [dataset[row][0] for row in range(len(dataset))]

    assert {tuple(each.shape) for each in drawn} == {(3, 8, 8)}
    assert len({each.numpy().tobytes() for each in drawn}) == len(drawn)


def test_a_transform_comes_last(photos: Path) -> None:
    dataset = PlainFolder(photos, "pil", transform=lambda image: image.size)

    assert dataset[0] == ((20, 18), 0)


def test_the_error_names_a_damaged_image(tmp_path: Path) -> None:
    content = jpeg(64, 64)
    make_tree(tmp_path / "bad", {"a/0.jpg": content[: len(content) // 3]})

    with refused(BadImage, "0.jpg"):
        PlainFolder(tmp_path / "bad", "pil")[0]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no images"):
        PlainFolder(make_tree(tmp_path / "empty", {}), "pil")
