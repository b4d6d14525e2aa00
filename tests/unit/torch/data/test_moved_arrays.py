"""Arrays of shape (channels, height, width) follow the geometry of their image."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from refusals import refused
from table import for_each

from shardkit.codecs.geometry import Frame
from shardkit.torch.data.following import move_array, moved_shape

SIZE = (512, 512)


def latent(dtype: Any = np.float32) -> npt.NDArray[Any]:
    return np.random.default_rng(0).normal(50, 20, (4, 64, 64)).astype(dtype)


def crop(left: int, top: int, width: int, height: int, **changes: Any) -> Frame:
    """Return a crop of an image of 512 x 512 pixels that keeps its scale."""
    return Frame(SIZE, SIZE, (left, top, width, height), (width, height))._replace(**changes)


@for_each("dtype", ["float16", "float32", "float64", "int64", "uint8", "bool"])
def test_a_crop_on_the_grid_copies_values(dtype: str) -> None:
    array = latent(dtype)
    moved = move_array(array, crop(64, 128, 256, 192))
    assert moved.dtype == array.dtype
    np.testing.assert_array_equal(moved, array[:, 16:40, 8:40])


def test_a_flip_reverses_columns() -> None:
    array = latent()
    moved = move_array(array, crop(64, 0, 128, 512, flip=True))
    np.testing.assert_array_equal(moved, array[:, :, 8:24][..., ::-1])


@for_each("filter_", ["bilinear", "bicubic"])
def test_a_crop_off_the_grid_is_scaled_as_pillow_does(filter_: str) -> None:
    array = latent()
    moved = move_array(array, crop(13, 21, 300, 200, size=(224, 224)), filter_)
    box = (5 / 8, 5 / 8, 305 / 8, 205 / 8)
    how = Image.Resampling[filter_.upper()]
    expected = [Image.fromarray(plane).resize((28, 28), how, box) for plane in array[:, 2:28, 1:40]]
    np.testing.assert_array_equal(moved, np.stack([np.asarray(image) for image in expected]))


def test_a_crop_of_a_scaled_image_is_in_its_pixels() -> None:
    array = latent()
    frame = Frame(SIZE, (256, 256), (64, 64, 128, 128), (128, 128))
    assert moved_shape(array, frame) == (16, 16)
    how = Image.Resampling.BILINEAR
    inside = array[:, 16:48, 16:48]
    expected = [np.asarray(Image.fromarray(plane).resize((16, 16), how)) for plane in inside]
    np.testing.assert_array_equal(move_array(array, frame), np.stack(expected))


def test_zeros_are_outside_the_image() -> None:
    array = latent()
    moved = move_array(array, crop(-64, 256, 640, 512))
    np.testing.assert_array_equal(moved, np.pad(array, ((0, 0), (0, 32), (8, 8)))[:, 32:96])


@for_each("dtype", ["int8", "uint8", "uint16", "int64", "uint64"])
def test_integers_are_rounded_and_clipped(dtype: str) -> None:
    edge = np.zeros((1, 8, 8), dtype)
    limits = np.iinfo(edge.dtype)
    edge[:, :, :4], edge[:, :, 4:] = limits.min, limits.max
    frame = Frame((8, 8), (8, 8), (0, 0, 8, 8), (32, 8))  # four times as wide
    moved = move_array(edge, frame, "bicubic")  # which overshoots at edges
    assert moved.dtype == edge.dtype
    assert moved[0, 0, 0] == limits.min
    assert float(moved[0, 0, -1]) == pytest.approx(float(limits.max))
    assert (np.diff(moved[0, 0].astype(object)) >= 0).all()


@for_each("array", [np.zeros((8, 8)), np.zeros((1, 8, 8), complex)])
def test_other_arrays_are_refused(array: npt.NDArray[Any]) -> None:
    with refused(ValueError):
        move_array(array, crop(0, 0, 8, 8))


def test_a_crop_far_larger_than_the_image_takes_the_memory_of_its_result() -> None:
    frame = Frame((64, 64), (1, 1), (-500_000, -500_000, 1_000_000, 1_000_000), (64, 64))
    moved = move_array(latent(), frame)
    assert moved.shape == (4, 64, 64)
    assert not moved.any()  # the image is smaller than a value


def test_an_array_larger_than_its_image_is_refused() -> None:
    with refused(ValueError):
        move_array(np.zeros((1, 8, 9)), Frame((8, 8), (8, 8), (0, 0, 8, 8), (8, 8)))
