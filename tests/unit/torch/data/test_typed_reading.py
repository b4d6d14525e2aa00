"""Reading images of other channels and dtypes, compared with NumPy and Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import FORMATS
from PIL import Image
from refusals import refused

from shardkit import (
    CenterCrop,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    convert,
    make_loader,
    open_dataset,
)
from shardkit.errors import UsageError

Pixels = npt.NDArray[Any]
TYPES = [("uint8", 1), ("uint8", 4), ("uint16", 1), ("uint16", 3), ("int16", 2), ("float32", 5)]
ROWS = 6
HEIGHT, WIDTH = 24, 32


def images(dtype: str, channels: int) -> list[Pixels]:
    rng = np.random.default_rng(0)
    shape = ROWS, HEIGHT, WIDTH, channels
    if np.dtype(dtype).kind == "f":
        return list(rng.normal(size=shape).astype(dtype))
    limits = np.iinfo(dtype)
    return list(rng.integers(limits.min, limits.max, shape, dtype, endpoint=True))


def make(target: Path, stored: list[Pixels], **options: Any) -> Path:
    half = np.zeros((HEIGHT, WIDTH), np.uint8)
    half[:, : WIDTH // 2] = 1
    boxes = np.array([[2.0, 3.0, 12.0, 9.0]])
    samples = [{"image": image, "mask": half, "boxes": boxes} for image in stored]
    schema = {"boxes": "boxes"}
    convert(
        samples,
        target,
        to="lmdb",
        pixels="keep",
        schema=schema,
        shuffle=False,
        workers=1,
        **options,
    )
    return target


@pytest.fixture(scope="module", params=TYPES, ids=str)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Pixels]]:
    stored = images(*request.param)
    return make(tmp_path_factory.mktemp("typed") / "out", stored), stored


def scaled(image: Pixels, size: tuple[int, int], box: Any = None) -> Pixels:
    """Return an image scaled to height and width by Pillow in float32, bilinearly."""
    channels = []
    for channel in np.moveaxis(image, -1, 0):
        plane = Image.fromarray(channel.astype(np.float32))
        values = np.asarray(plane.resize(size[::-1], Image.Resampling.BILINEAR, box))
        if image.dtype.kind != "f":
            limits = np.iinfo(image.dtype)
            values = np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max)
        channels.append(values.astype(image.dtype))
    return np.stack(channels, axis=-1)


def read(path: Path, **options: Any) -> list[Pixels]:
    """Return all images of one batch, (height, width, channels)."""
    dataset = open_dataset(path, fields=["image"], **options)
    return [image.permute(1, 2, 0).numpy() for (image,) in dataset[range(len(dataset))]]


def assert_equal(actual: list[Pixels], expected: list[Pixels]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_native_and_torch_and_numpy_are_the_pixels(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    assert_equal(read(place, decode="torch"), stored)
    dataset = open_dataset(place, fields=["image"], decode="numpy")
    assert_equal([dataset[row][0] for row in range(ROWS)], stored)


def test_crops_move_pixels_exactly(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    cropped = [image[4:20, 8:24] for image in stored]
    assert_equal(read(place, decode=CenterCrop(16)), cropped)
    padded = [np.pad(image, ((4, 4), (0, 0), (0, 0))) for image in stored]
    assert_equal(read(place, decode=CenterCrop(32)), padded)


def test_flips_are_exact(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    flipped = read(place, decode=RandomCrop((HEIGHT, WIDTH), flip=1.0))
    assert_equal(flipped, [image[:, ::-1] for image in stored])


def test_scaling_is_that_of_pillow(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    assert_equal(read(place, decode=Resize((10, 15))), [scaled(i, (10, 15)) for i in stored])
    resized = [scaled(image, (12, 16))[1:11, 3:13] for image in stored]
    assert_equal(read(place, decode=CenterCrop(10, resize=12)), resized)


def test_random_crops_keep_the_type_and_repeat(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    dataset = open_dataset(place, fields=["image"], decode=RandomResizedCrop(8, flip=0.0))
    epochs = []
    for epoch in (3, 3, 4):
        dataset.set_epoch(epoch, seed=5)
        epochs.append([image.numpy() for (image,) in dataset[range(ROWS)]])
    assert {image.dtype for image in epochs[0]} == {stored[0].dtype}
    assert_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], epochs[2])


def test_masks_and_boxes_go_along(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    op = RandomCrop((16, 16), flip=1.0)
    dataset = open_dataset(place, fields=["image", "mask", "boxes"], decode=op)
    dataset.set_epoch(0, seed=1)
    for row in range(ROWS):
        image, mask, _ = dataset[row]
        # The mask is 1 in the left half: where it is, the image shows the same columns.
        columns = mask.numpy()[0][::-1]
        left = WIDTH // 2 - int(columns.sum())
        shown = image.permute(1, 2, 0).numpy()[:, ::-1]
        if 0 < columns.sum() < 16:
            strips = np.lib.stride_tricks.sliding_window_view(stored[row], 16, axis=0)
            found = [(s[left : left + 16].transpose(2, 0, 1) == shown).all() for s in strips]
            assert any(found)


def test_views_share_one_decode(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    loader = make_loader(
        open_dataset(place, fields=["image"]),
        batch_size=ROWS,
        views=[CenterCrop(16), Resize((10, 15))],
    )
    (first,), (second,) = next(iter(loader))
    assert_equal(list(first.permute(0, 2, 3, 1).numpy()), [i[4:20, 8:24] for i in stored])
    assert_equal(list(second.permute(0, 2, 3, 1).numpy()), [scaled(i, (10, 15)) for i in stored])


def test_resident_images_keep_their_dtype(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    dataset = open_dataset(place, fields=["image"], decode=RandomCrop((HEIGHT, WIDTH), flip=1.0))
    (batch,) = next(iter(make_loader(dataset, batch_size=ROWS, resident="cpu")))
    assert_equal(list(batch.permute(0, 2, 3, 1).numpy()), [image[:, ::-1] for image in stored])


def test_transforms_get_the_native_pixels(made: tuple[Path, list[Pixels]]) -> None:
    place, stored = made
    seen: list[Pixels] = []

    def keep(image: torch.Tensor) -> torch.Tensor:
        seen.append(image.permute(1, 2, 0).numpy())
        return image

    read(place, decode="torch", transform=keep)
    assert_equal(seen, stored)


@pytest.mark.parametrize("to", FORMATS)
def test_raw_pixels_are_read_into_one_block(tmp_path: Path, to: Any) -> None:
    stored = images("uint16", 2)
    samples = [{"image": image} for image in stored]
    convert(
        samples,
        tmp_path / "out",
        to=to,
        pixels="keep",
        encode="raw",
        resize=f"{HEIGHT}x{WIDTH}",
        shuffle=False,
    )
    dataset = open_dataset(tmp_path / "out", fields=["image"], decode="torch")
    (block,) = next(iter(make_loader(dataset, batch_size=ROWS)))
    assert block.dtype == torch.uint16
    assert_equal(list(block.permute(0, 2, 3, 1).numpy()), stored)
    assert_equal(read(tmp_path / "out", decode=CenterCrop(16)), [i[4:20, 8:24] for i in stored])


def test_pil_images_have_the_modes_of_pillow(tmp_path: Path) -> None:
    for dtype, channels, mode in (("uint8", 1, "L"), ("uint16", 1, "I;16"), ("float32", 1, "F")):
        stored = images(dtype, channels)
        place = make(tmp_path / dtype, stored)
        image, *_ = open_dataset(place, fields=["image"])[0]
        assert image.mode == mode
        np.testing.assert_array_equal(np.asarray(image), stored[0][:, :, 0])


def test_pil_without_a_mode_is_refused(tmp_path: Path) -> None:
    place = make(tmp_path / "out", images("uint16", 3))
    dataset = open_dataset(place)
    with refused(UsageError, "uint16, 3 channels", "torch"):
        dataset[0]


def test_an_operation_that_renders_rgb_is_refused(tmp_path: Path) -> None:
    class Own(CenterCrop):
        def render(self, *arguments: Any) -> Any:
            raise AssertionError

    place = make(tmp_path / "out", images("uint16", 1))
    with refused(UsageError, "Own"):
        open_dataset(place, decode=Own(8))[0]


@pytest.mark.parametrize(("dtype", "most"), [("uint8", 255), ("uint16", 65535), ("float32", 1)])
def test_normalize_divides_by_the_largest_integer(dtype: str, most: int) -> None:
    batch = torch.from_numpy(np.stack(images(dtype, 2))).permute(0, 3, 1, 2)
    normalized = Normalize(mean=(0.5, 0.25), std=(0.5, 2.0))(batch)
    values = np.stack(images(dtype, 2)).astype(np.float64) / most
    wanted = (values - [0.5, 0.25]) / [0.5, 2.0]
    np.testing.assert_allclose(normalized.permute(0, 2, 3, 1).numpy(), wanted, atol=1e-5)


def test_normalize_needs_one_value_for_each_channel() -> None:
    with pytest.raises(UsageError, match=r"3 values .* 1 channel"):
        Normalize()(torch.zeros((2, 1, 4, 4), dtype=torch.uint8))
