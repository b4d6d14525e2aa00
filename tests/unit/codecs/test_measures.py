"""Measures of pixels: the compiled module and Python agree, and blur is found in few bits."""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import encoded, png_file
from PIL import Image, ImageFilter
from planted_faults import scene
from refusals import refused
from table import for_each

from shardkit.codecs.image import Pixels, decode
from shardkit.codecs.measures import MEASURES, WAVES, may_be_blurred, measure, measure_png
from shardkit.codecs.properties import properties
from shardkit.codecs.structure import plain_png
from shardkit.dataset.located import EncodedImage
from shardkit.reporting.image_facts import measure_images
from shardkit.system import native

compiled = pytest.mark.skipif(native.module() is None, reason="the compiled module is not used")


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def measured(pixels: Pixels, size: tuple[int, int] | None = None) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(native, "module", lambda: None)
            return measure(pixels, size)

    return measured


def pictures() -> list[Pixels]:
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 300), (300, 1), (19, 18), (19, 19), (31, 33), (32, 32), (64, 97), (5, 40)]
    noise = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    flat = [np.full((40, 50, 3), level, np.uint8) for level in (0, 127, 255)]
    stripes = np.zeros((48, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    return [*noise, *flat, stripes, np.asarray(scene(1)), np.asarray(scene(2))[:, ::-1]]


@compiled
def test_the_compiled_module_measures_the_same(reference: Callable[..., Any]) -> None:
    for pixels in pictures():
        assert measure(pixels).tobytes() == reference(pixels).tobytes(), pixels.shape
    for size in ((500, 375), (497, 369), (500, 369)):  # of which these are an eighth
        pixels = np.asarray(scene(1, (63, 47)))
        assert measure(pixels, size).tobytes() == reference(pixels, size).tobytes()


@compiled
@for_each("channels", [1, 3])
def test_rows_of_a_png_with_each_filter_are_measured(channels: int) -> None:
    width, height = 21, 30
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (height, 1 + width * channels), np.uint8)
    rows[:, 0] = np.arange(height) % 5
    head = bytes([0, 0, 0, width, 0, 0, 0, height, 8, 0 if channels == 1 else 2, 0, 0, 0])
    data = png_file(head, rows.tobytes())
    found, plain = np.zeros(1, MEASURES), plain_png(data)
    assert plain
    measure_png(plain, rows.tobytes(), found)
    pixels = decode(data, "png")
    expected = measure(pixels)

    assert found["pixels"][0] == zlib.crc32(pixels.tobytes())
    assert (found["hash"][0], found["mean"][0].tolist()) == (
        expected["hash"],
        expected["mean"].tolist(),
    )
    assert (found["done"][0], found["components"][0]) == (1, channels)


@compiled
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_facts_of_tiny_and_narrow_images_are_the_same(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sides = (1, 2, 7, 8, 33, 64, 300)
    for width, height in itertools.product(sides, sides):
        data = encoded(noise(width, height), kind)
        image = EncodedImage(data, "jpg" if kind == "JPEG" else "png", 0, width, height)
        facts = measure_images([image].__getitem__, np.zeros(1, MEASURES))
        with monkeypatch.context() as patch:
            patch.setattr(native, "module", lambda: None)
            expected = measure_images([image].__getitem__, np.zeros(1, MEASURES))
        assert facts.tobytes() == expected.tobytes(), (width, height)


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@compiled
def test_content_of_another_size_is_refused() -> None:
    module, out = native.module(), np.zeros(1, MEASURES).view(np.uint8)
    assert module
    with refused(ValueError):
        module.measure(bytes(299), 10, 10, (80, 80), WAVES, out)
    for extent in ((81, 80), (80, 72), (0, 0)):
        with refused(ValueError):
            module.measure(bytes(300), 10, 10, extent, WAVES, out)
    with refused(ValueError):
        module.measure_png(bytes(300), 10, 10, 3, WAVES, out)
    with refused(ValueError):
        module.measure(bytes(300), 10, 10, (80, 80), WAVES, out[:-8])
    assert not module.measure_png(b"\5" * 310, 10, 10, 3, WAVES, out)  # an unknown filter
    assert not module.measure_jpeg(encoded(scene(1)), 10, 10, WAVES, out)


def test_a_blurred_jpeg_has_few_bits() -> None:
    sharp = scene(1, (500, 375))
    blurred = sharp.filter(ImageFilter.GaussianBlur(3))

    def few(image: Image.Image, quality: int) -> bool:
        data = encoded(image, quality=quality)
        return may_be_blurred(len(data), image.size, properties(data, "jpg").quantizers)

    assert all(few(blurred, quality) for quality in (50, 75, 90, 95))
    assert not any(few(sharp, quality) for quality in (90, 95))


def test_the_hash_survives_scaling_and_compression() -> None:
    image = scene(5, (400, 300))
    whole = measure(np.asarray(image))
    for other in (image.resize((200, 150)), Image.open(io.BytesIO(encoded(image, quality=50)))):
        changed = measure(np.asarray(other))
        assert int(whole["hash"] ^ changed["hash"]).bit_count() <= 2
