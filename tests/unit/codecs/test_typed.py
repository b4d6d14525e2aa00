from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import jpeg, picture, png
from PIL import Image
from refusals import refused
from table import for_each

from shardkit.codecs.geometry import crop_or_pad
from shardkit.codecs.image import FILTERS, decode, encode
from shardkit.codecs.image_type import DTYPES, GRAY, MOST_CHANNELS, RGB, ImageType
from shardkit.codecs.typed import decode_gray, decode_typed, display, inspect_typed, scale_typed
from shardkit.errors import BadImage


def values(dtype: str, shape: tuple[int, ...] = (13, 17, 3), seed: int = 0) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=shape).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@for_each("dtype", DTYPES)
def test_every_dtype_is_stored_without_loss(dtype: str) -> None:
    pixels = values(dtype, (5, 4, 7))
    for field in ("npy", "raw"):
        data = encode(pixels, field)
        if field == "npy":
            decoded = decode_typed(data, field)
            np.testing.assert_array_equal(np.load(io.BytesIO(data)), pixels)
        else:
            decoded = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(pixels.shape)
        np.testing.assert_array_equal(decoded, pixels)
        assert decoded.dtype == dtype


@for_each("dtype", ["uint8", "uint16"])
@for_each("channels", [1, 2, 3, 4])
def test_png_holds_8_and_16_bits_of_up_to_4_channels(dtype: str, channels: int) -> None:
    pixels = values(dtype, (5, 4, channels))
    kind = ImageType.of(pixels)
    assert kind.lossless == "png"
    data = encode(pixels, "png")
    info = inspect_typed(data, "png")
    assert (info.width, info.height, info.pixels) == (4, 5, kind)
    np.testing.assert_array_equal(decode_typed(data, "png"), pixels)


def test_other_types_are_stored_as_arrays() -> None:
    for kind in (ImageType(5, "uint8"), ImageType(1, "int16"), ImageType(3, "float32")):
        assert kind.lossless == "npy"


@for_each(
    ("mode", "kind", "expected"),
    [
        ("1", "PNG", GRAY),
        ("L", "PNG", GRAY),
        ("L", "BMP", GRAY),
        ("LA", "PNG", ImageType(2, "uint8")),
        ("RGB", "PNG", RGB),
        ("RGB", "WEBP", RGB),
        ("RGBA", "PNG", ImageType(4, "uint8")),
        ("P", "PNG", RGB),
        ("P", "GIF", RGB),
        ("I;16", "PNG", ImageType(1, "uint16")),
        ("I;16", "PPM", ImageType(1, "uint16")),
        ("L", "JPEG", GRAY),
        ("RGB", "JPEG", RGB),
        ("CMYK", "JPEG", RGB),
    ],
)
def test_pixels_are_those_of_pillow(mode: str, kind: str, expected: ImageType) -> None:
    image = picture(20, 12).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(values("uint16", (12, 20)))
    field = {"JPEG": "jpg"}.get(kind, kind.lower())
    data = saved(image, kind)
    with Image.open(io.BytesIO(data)) as read:
        names = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
        wanted = np.asarray(read if mode == "I;16" else read.convert(names[expected.channels]))
    assert inspect_typed(data, field).pixels == expected
    decoded = decode_typed(data, field)
    assert ImageType.of(decoded) == expected
    np.testing.assert_array_equal(decoded, wanted.reshape(decoded.shape))


def test_a_transparent_palette_or_color_adds_alpha() -> None:
    palette = picture(20, 12).convert("P")
    data = saved(palette, "PNG", transparency=0)
    assert inspect_typed(data, "png").pixels == ImageType(4, "uint8")
    with Image.open(io.BytesIO(data)) as read:
        np.testing.assert_array_equal(decode_typed(data, "png"), np.asarray(read.convert("RGBA")))
    gray = saved(picture(20, 12).convert("L"), "PNG", transparency=7)
    assert ImageType.of(decode_typed(gray, "png")) == ImageType(2, "uint8")


def test_ppm_of_16_bits_in_color_is_refused() -> None:
    with pytest.raises(BadImage, match="16-bit color PPM"):
        decode_typed(b"P6 1 1 65535\n" + bytes(6), "ppm")


@for_each("array", [np.zeros(3), np.zeros((2, 0)), np.zeros((1, 1, 1, 1)), np.array([["a"]])])
def test_arrays_that_are_no_images_are_refused(array: npt.NDArray[Any]) -> None:
    file = io.BytesIO()
    np.save(file, array)
    with refused(BadImage):
        decode_typed(file.getvalue(), "npy")


def test_damaged_arrays_are_refused() -> None:
    data = encode(values("float32"), "npy")
    for wrong in (data[:-1], data + b"\0", b"\x93NUMPY", b"", data.replace(b"<f4", b"|O8")):
        with pytest.raises(BadImage, match="damaged"):
            decode_typed(wrong, "npy")


def test_gray_is_the_luma_of_pillow() -> None:
    for data, field in ((jpeg(), "jpg"), (png(), "png"), (png(mode="RGBA"), "png")):
        rgb = Image.fromarray(decode(data, field))
        decoded = decode_gray(data, field)
        np.testing.assert_array_equal(decoded[:, :, 0], np.asarray(rgb.convert("L")))


def test_gray_keeps_the_upper_bits_of_16() -> None:
    pixels = values("uint16", (5, 4, 1))
    decoded = decode_gray(encode(pixels, "png"), "png")
    np.testing.assert_array_equal(decoded, pixels >> 8)


@for_each("filter_", FILTERS)
@for_each("dtype", DTYPES)
def test_scaling_is_that_of_pillow_in_float32(dtype: str, filter_: str) -> None:
    pixels = values(dtype)
    box = (1.5, 0.0, 15.25, 12.0)
    scaled = scale_typed(pixels, box, (7, 20), filter_)
    for channel in range(3):
        image = Image.fromarray(pixels[:, :, channel].astype(np.float32))
        wanted = np.asarray(image.resize((20, 7), FILTERS[filter_], box)).astype(np.float64)
        if np.dtype(dtype).kind != "f":
            limits = np.iinfo(dtype)
            wanted = np.clip(np.rint(wanted), limits.min, limits.max)
        np.testing.assert_array_equal(scaled[:, :, channel], wanted.astype(dtype))
    assert scaled.dtype == dtype


def test_scaling_clips_what_overshoots() -> None:
    pixels = np.zeros((8, 8, 1), np.uint16)
    pixels[:, 4:] = 65535
    scaled = scale_typed(pixels, (0.0, 0.0, 8.0, 8.0), (64, 64), "bicubic")
    assert (scaled.min(), scaled.max()) == (0, 65535)


def test_nothing_is_scaled_to_its_own_size() -> None:
    pixels = values("int32")
    assert scale_typed(pixels, (0.0, 0.0, 17.0, 13.0), (13, 17), "bicubic") is pixels


def test_a_crop_beyond_the_image_is_filled() -> None:
    pixels = values("int16", (3, 3, 2))
    padded = crop_or_pad(pixels, (-1, 1, 5, 4), 9)
    wanted = np.full((4, 5, 2), 9, np.int16)
    wanted[:2, 1:4] = pixels[1:]
    np.testing.assert_array_equal(padded, wanted)
    outside = crop_or_pad(pixels, (-9, -9, 2, 2))
    assert outside.shape == (2, 2, 2)
    assert not outside.any()


def test_display_stretches_all_dtypes_but_uint8() -> None:
    gray = np.arange(4, dtype=np.uint8).reshape(2, 2, 1)
    assert display(gray)[:, :, 1].tolist() == [[0, 1], [2, 3]]
    wide = np.array([[100, 200], [300, 400]], np.uint16)[:, :, None]
    assert display(wide)[:, :, 0].tolist() == [[0, 85], [170, 255]]
    floats = np.array([[np.nan, -1.0], [np.inf, 1.0]], np.float32)[:, :, None]
    assert display(floats)[:, :, 2].tolist() == [[0, 0], [255, 255]]
    assert not display(np.full((2, 2, 5), 7, np.float64)).any()
    extreme = np.array([[[-1.7e308], [1.7e308]]])
    assert display(extreme)[0, :, 0].tolist() == [0, 255]
    assert display(values("uint8", (2, 2, 4))).shape == (2, 2, 3)


@for_each(
    ("channels", "dtype"),
    [(0, "uint8"), (MOST_CHANNELS + 1, "uint8"), (1, "int64"), (1, "bool"), (1, "object")],
)
def test_types_that_no_image_has_are_refused(channels: int, dtype: str) -> None:
    with pytest.raises(ValueError, match="an image"):
        ImageType(channels, dtype)
