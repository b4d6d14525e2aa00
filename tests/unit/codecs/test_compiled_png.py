"""PNGs that the compiled module decodes equal those of Pillow; it leaves all others."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers import encoded, png
from hostile import pngs
from hostile.cases import Case
from parsed_png import parsed_png16
from PIL import Image
from refusals import refused
from table import for_each

from scripts.fuzzing.pngs import compare, outcome, random_png
from shardkit.codecs.image import Decoding, decode, decode_mask
from shardkit.errors import BadImage
from shardkit.system import compiled, native


@pytest.fixture(autouse=True)
def _libdeflate() -> None:
    if not getattr(native.module(), "LIBDEFLATE", ""):
        pytest.skip(f"no libdeflate: {native.describe()}")


@pytest.mark.slow
def test_every_kind_of_png_has_the_pixels_of_pillow() -> None:
    found = compare(range(200), mutate=False)

    assert found["equal"] > 200
    assert not found["different"]


def test_mutated_pngs_have_the_pixels_of_pillow_or_are_left() -> None:
    found = compare(range(200))

    assert found["equal"] > 50
    assert found["refused"] > 50
    assert not found["different"]


@for_each("background", [(255, 255, 255), (0, 1, 127)])
def test_transparent_pixels_are_composited_as_pillow_does(background: tuple[int, int, int]) -> None:
    values, alphas = np.indices((256, 256), np.uint8)
    data = encoded(Image.fromarray(np.stack([values, values[::-1], values, alphas], 2)), "PNG")

    found = compiled.decode_png(data, background)

    with mock.patch.object(native, "module", return_value=None):
        np.testing.assert_array_equal(found, decode(data, "png", Decoding(background)))


_QUICK = [case for case in pngs.CASES if "1 GB" not in case.name and "100,000" not in case.name]


@pytest.mark.parametrize("case", _QUICK, ids=lambda case: case.name)
def test_hostile_pngs_are_decoded_alike_or_left(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path)

    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert outcome(file.read_bytes()) != "different"
    assert outcome(file.read_bytes(), (255, 255, 255)) != "different"


@for_each("mode", ["L", "P", "1", "I;16"])
def test_damage_is_explained_by_python(mode: str) -> None:
    data = bytearray(png(20, 20, mode=mode))
    data[-20] ^= 1

    for decoded in (decode, decode_mask):
        with refused(BadImage, "IDAT"):
            decoded(bytes(data), "png")


@pytest.mark.slow
def test_16_bits_are_kept() -> None:
    kinds = Counter[tuple[int, int]]()
    for number in range(300):
        data = random_png(random.Random(number))
        values = compiled.decode_png16(data)
        if data[24] != 16:
            assert values is None
        elif values is not None:
            np.testing.assert_array_equal(values, parsed_png16(data), str(number))
            assert (values >> 8 != values & 255).any() or values.size < 40
            kinds[values.shape[2], data[28]] += 1
    assert len(kinds) == 8  # gray and RGB, without and with alpha, plain and interlaced


def test_damaged_pngs_of_16_bits_are_left_alone() -> None:
    data = bytearray(png(20, 20, mode="I;16"))
    assert compiled.decode_png16(data) is not None
    data[-20] ^= 1
    assert compiled.decode_png16(data) is None


def test_pixels_can_be_changed() -> None:
    assert decode(png(5, 5), "png").flags.writeable
    assert decode_mask(png(5, 5, mode="P"), "png").flags.writeable
