"""The image files that a user's dataset opens are found, and their images tried as a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import jpeg, make_tree
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from shardkit.measure.doctor.opened_files import only_image, opened_paths
from shardkit.measure.doctor.pipeline import Loading, Pipeline
from shardkit.measure.doctor.profile import Profile, profile
from shardkit.measure.doctor.remedies import propose
from shardkit.measure.doctor.stored import convert_images, to_convert, write_images
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import StepSpec, Subject

ROWS = 12


class Own(Dataset[Any]):
    """Images, and for each a file that is none."""

    def __init__(self, folder: Path, *, masks: bool = False, files: int = ROWS) -> None:
        self.folder, self.masks, self.files = folder, masks, files

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        (self.folder / "notes.txt").read_text()
        if self.masks:
            Image.open(self.folder / f"a/{(row + 1) % ROWS}.jpg").load()
        with open(self.folder / f"a/{row % self.files}.jpg", "rb") as file:
            image = Image.open(file).convert("RGB")
        return torch.full((3, 32, 32), image.width, dtype=torch.uint8), row


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, bytes | None] = {f"a/{n}.jpg": jpeg(64, 48, n) for n in range(ROWS)}
    return make_tree(tmp_path_factory.mktemp("opened") / "photos", {**files, "notes.txt": b"none"})


def session(dataset: Any) -> Session:
    loader = DataLoader(dataset, 4)
    return Session(subject=Subject(loader="made:up"), dataset=dataset, loader=loader)


def profiled(dataset: Any) -> Profile:
    return profile(session(dataset), loading=Loading(), seconds=60.0, step=StepSpec())


def test_paths_are_collected_within_the_context_only(photos: Path) -> None:
    one, two = photos / "a/1.jpg", photos / "a/2.jpg"
    with opened_paths() as paths:
        one.read_bytes()
        with open(os.fsencode(two), "rb"):
            pass
    (photos / "a/3.jpg").read_bytes()
    assert paths == [str(one), str(two)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a/1.jpg"], "a/1.jpg"),
        (["notes.txt", "a/1.jpg", "a/1.jpg", "missing", "a"], "a/1.jpg"),
        (["a/1.jpg", "a/2.jpg"], ""),
        (["notes.txt"], ""),
        ([], ""),
    ],
)
def test_the_only_image_is_told_from_other_files(
    names: list[str], found: str, photos: Path
) -> None:
    expected = str(photos / found) if found else ""
    assert only_image([str(photos / name) for name in names]) == expected


def test_the_images_of_an_own_dataset_are_found_and_converted(photos: Path, tmp_path: Path) -> None:
    dataset = Own(photos)
    found = profiled(dataset)
    assert list(found.stages) == ["dataset", "collate"]
    assert found.files == [str(photos / f"a/{row}.jpg") for row in found.rows]
    assert (found.kind, found.side, found.crop) == ("jpg", 48, 32)

    (remedy,) = [each for each in propose(found) if each.recipe is not None]
    assert remedy.name == "the same images as a dataset of shardkit"
    assert remedy.decode == "RandomResizedCrop(32)"
    assert remedy.price.endswith("of disk; skips everything else that Own does")

    given = session(dataset)
    write_images(given, rows=found.rows, files=found.files, folder=tmp_path / "source")
    assert remedy.recipe is not None
    convert_images(tmp_path / "source", tmp_path / "made", remedy.recipe)
    loader = Pipeline(given, Loading(batch_size=4)).loader(remedy, str(tmp_path / "made"), [0])
    images, labels = next(iter(loader))
    assert (tuple(images.shape), labels.tolist()) == ((4, 3, 32, 32), [0] * 4)

    converted = to_convert(given, files=found.files)
    assert (converted.path, converted.kind) == (str(photos / "a"), "imagefolder")
    then, labels = converted.hints("made", remedy.decode)
    assert "decode=RandomResizedCrop(32)" in then
    assert labels.startswith("labels are the folders in ")


@pytest.mark.parametrize("options", [{"masks": True}, {"files": 3}])
def test_a_row_without_a_file_of_its_own_is_not_taken_for_it(
    options: dict[str, Any], photos: Path
) -> None:
    found = profiled(Own(photos, **options))
    assert not found.kind
    assert [remedy for remedy in propose(found) if remedy.recipe] == []
