"""Arrays that follow the crop of their image (``follow=``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused

from shardkit import (
    Buckets,
    CenterCrop,
    Field,
    RandomCrop,
    RandomResizedCrop,
    Windows,
    convert,
    make_loader,
    open_dataset,
)
from shardkit.errors import UsageError

ROWS = 8
FIELDS = ("image", "pixels", "latent")


def make(path: Path, *, width: int = 32, height: int = 24) -> Path:
    """Make images with a copy of their pixels, and a latent of one value per 4 x 4 pixels."""
    rng = np.random.default_rng(0)
    samples = []
    for row in range(ROWS):
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        samples.append(
            {
                "image": image,
                "pixels": image.transpose(2, 0, 1),
                "latent": rng.normal(size=(2, height // 4, width // 4)).astype(np.float16),
                "episode": 0,
                "frame": row,
                "halves": torch.ones(1, height // 4, width // 4, dtype=torch.bfloat16) * row,
                "spectrum": np.zeros((2, 3)),
            }
        )
    convert(samples, path, to="lmdb", shuffle=False, workers=1)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("following") / "lmdb")


def opened(path: Path, **options: Any) -> Any:
    return open_dataset(path, **{"fields": FIELDS, "follow": ("pixels", "latent"), **options})


@pytest.mark.parametrize(
    ("op", "most"), [(CenterCrop(16), 0), (RandomCrop(16, flip=0.5), 0), (RandomResizedCrop(20), 2)]
)
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_an_array_of_the_pixels_shows_what_the_image_shows(
    path: Path, op: Any, most: int, engine: Any
) -> None:
    loader = make_loader(opened(path, decode=op), 4, shuffle=True, engine=engine, num_workers=1)
    for images, pixels, _ in loader:
        assert pixels.dtype == torch.uint8
        assert pixels.shape == images.shape
        assert int((images.int() - pixels.int()).abs().max()) <= most


def test_a_crop_on_the_grid_copies_values(path: Path) -> None:
    stored = opened(path, follow=(), decode="torch")[:]
    moved = opened(path, decode=CenterCrop(16))[:]
    for (_, _, whole), (_, _, part) in zip(stored, moved, strict=True):
        assert part.dtype == torch.float16
        assert torch.equal(part, whole[:, 1:5, 2:6])


def test_arrays_stay_as_they_are_without_an_operation_or_a_wish(path: Path) -> None:
    whole = opened(path, decode="torch")[0]
    assert whole[1].shape == (3, 24, 32)
    assert torch.equal(whole[2], opened(path, follow=(), decode=CenterCrop(16))[0][2])


def test_bfloat16_keeps_its_type(path: Path) -> None:
    dataset = opened(path, fields=("image", "halves"), follow=("halves",), decode=CenterCrop(16))
    _, halves = dataset[3]
    assert torch.equal(halves, torch.full((1, 4, 4), 3, dtype=torch.bfloat16))


def test_each_view_has_its_own_crop(path: Path) -> None:
    dataset = opened(path, decode=RandomCrop(16))
    for one, other in make_loader(dataset, 4, shuffle=True, views=2, num_workers=0):
        assert torch.equal(one[0], one[1])
        assert torch.equal(other[0], other[1])
        assert not torch.equal(one[1], other[1])


def test_frames_of_a_window_share_one_crop(path: Path) -> None:
    windows = Windows(by="episode", order="frame", fields={"image": (-1, 0), "pixels": (-1, 0)})
    dataset = opened(path, fields=None, follow=("pixels",), decode=RandomCrop(16), windows=windows)
    for batch in make_loader(dataset, 4, shuffle=True, num_workers=0):
        assert torch.equal(batch["image"], batch["pixels"])


def test_buckets_crop_arrays(path: Path) -> None:
    dataset = opened(path, decode="torch")
    loader = make_loader(dataset, 4, sampler=Buckets([(24, 24)]), num_workers=0)
    for images, pixels, latents in loader:
        assert torch.equal(images, pixels)
        assert latents.shape == (4, 2, 6, 6)


def test_images_of_several_sizes_give_a_list(tmp_path: Path) -> None:
    wide, high = make(tmp_path / "wide", width=64), make(tmp_path / "high", height=64)
    for folder, shape in ((wide, (2, 6, 4)), (high, (2, 4, 8))):
        (_, _, latent) = opened(folder, decode=RandomResizedCrop((24, 16)))[0]
        assert latent.shape == (2, 6, 4), shape


def test_other_fields_are_refused(path: Path) -> None:
    wrong: list[tuple[Any, tuple[str, ...]]] = [
        ("latent", ("a list such as ['image']",)),
        (("episode",), ("episode",)),
        (("image",), ("image",)),
        (("spectrum",), ("spectrum", "float64", "2 x 3")),
    ]
    for follow, facts in wrong:
        with refused(UsageError, *facts):
            opened(path, fields=(*FIELDS, "spectrum"), follow=follow)


def test_a_row_whose_array_cannot_follow_is_named(tmp_path: Path) -> None:
    sample = {"image": np.zeros((8, 8, 3), np.uint8), "latent": np.zeros((1, 9, 9))}
    schema = {"latent": Field("array")}
    samples = [sample, {**sample, "latent": np.zeros(3)}]
    convert(samples, tmp_path / "x", to="lmdb", schema=schema, shuffle=False, workers=1)
    dataset = open_dataset(
        tmp_path / "x", decode=CenterCrop(4), fields=("image", "latent"), follow=("latent",)
    )
    with refused(UsageError, "row 0,", "'latent'", "9"):
        dataset[0]
    with refused(UsageError, "row 1,", "'latent'"):
        dataset[1]


def test_resident_data_cannot_be_cropped_with_the_images(path: Path) -> None:
    with refused(UsageError, "pixels, latent", "resident="):
        make_loader(opened(path, decode=RandomCrop(16)), 4, resident="cpu")
