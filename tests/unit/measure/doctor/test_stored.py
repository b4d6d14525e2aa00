"""Stored images are known without decoding, and those that take most of the time are named."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from helpers import jpeg, make_dataset, make_tree
from torch.utils.data import Dataset, Subset

from shardkit import attach, open_dataset
from shardkit.measure.doctor.stored import Group, Header, headers, slowest_group, stored_images

USUAL = [Header("jpg", 400, 300, 9000, n % 4) for n in range(90)]


def slowest(slow: list[Header], seconds: float = 0.1) -> Group | None:
    times = np.array([0.001] * len(USUAL) + [seconds] * len(slow))
    return slowest_group(times, [*USUAL, *slow], ["a", "b", "c", "d", "maps"])


def test_a_class_is_named_before_its_encoding_and_size() -> None:
    found = slowest([Header("png", 4000, 3000, 9, 4)] * 10)

    assert found is not None
    assert (found.by, found.name, found.kind, found.images) == ("class", "maps", "png", 0.1)
    assert round(found.time, 2) == 0.92
    assert found.megapixels == 12


def test_an_encoding_is_named_before_the_size() -> None:
    found = slowest([Header("png", 4000, 3000, 9, n % 4) for n in range(10)])

    assert found is not None
    assert (found.by, found.name) == ("encoding", "png")


def test_the_largest_images_are_named() -> None:
    found = slowest([Header("jpg", 4000, 3000, 9, n % 4) for n in range(10)])

    assert found is not None
    assert (found.by, found.name, found.kind) == ("size", "", "jpg")


def test_one_outlier_is_not_a_group() -> None:
    assert slowest([Header("jpg", 400, 300, 9, n % 4) for n in range(9)], 0.0015) is None
    assert slowest_group(np.array([0.001] * 89 + [5.0]), USUAL, None) is None


class Folder(Dataset[Any]):
    """What torchvision's ImageFolder shows of its files."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples


def test_the_files_of_an_image_folder_are_known(tmp_path: Path) -> None:
    tree = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(3)}
    files = sorted(make_tree(tmp_path / "photos", {**tree}).rglob("*.jpg"))
    folder = Folder([(str(path), number) for number, path in enumerate(files)])
    dataset = Subset(Subset(folder, [0, 2, 1]), [1, 2])

    assert stored_images(dataset)[0] == (files[2].read_bytes(), 2)
    assert [(h.kind, h.width, h.label) for h in headers(dataset, [1, 0])] == [
        ("jpg", 64, 1),
        ("jpg", 64, 2),
    ]
    assert stored_images(Folder([])) is None


def test_the_stored_images_of_a_selection_are_those_of_its_rows(tmp_path: Path) -> None:
    files = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(5)}
    photos = make_tree(tmp_path / "photos", {**files})
    made = make_dataset(photos, tmp_path / "made")
    dataset = open_dataset(made, fields=("image",), as_dict=True, decode="torch").select([4, 1])

    paths = open_dataset(made).paths
    expected = [(photos / paths[row]).read_bytes() for row in (4, 1)]
    assert [data for data, _ in stored_images(dataset)[:]] == expected


def test_the_stored_images_of_an_attached_dataset_are_found_where_it_was_opened(
    tmp_path: Path,
) -> None:
    image = jpeg(64, 48, 1)
    files = make_tree(tmp_path / "files", {"0.jpg": image, "0.cls": b"0"})
    (tmp_path / "old").mkdir()
    with tarfile.open(tmp_path / "old/a.tar", "w") as archive:
        archive.add(files, "")
    attach(tmp_path / "old", tmp_path / "attached")
    moved = (tmp_path / "old").rename(tmp_path / "new")

    dataset = open_dataset(tmp_path / "attached", root=moved)
    assert stored_images(dataset)[0][0] == image
