"""Planes, also of rare codings: Pillow's pixels from both implementations, and refused records."""

from __future__ import annotations

import base64
import io
import math
import random
import runpy
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import encoded, picture
from helpers import jpeg as jpeg_file
from hostile import jpegs
from hostile.cases import files_of
from PIL import Image, ImageFile
from refusals import refused
from table import for_each

from shardkit.codecs import planes
from shardkit.codecs.geometry import Region
from shardkit.codecs.image import decode
from shardkit.codecs.structure import jpeg_coefficient_bytes
from shardkit.errors import BadImage, UsageError
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import Record
from shardkit.system import compiled, native

ROOT = Path(__file__).parents[3]


SIDES = [(1, 1), (2, 1), (1, 2), (3, 3), (4, 5), (5, 4), (7, 9), (16, 16), (17, 15), (31, 33)]
"""Widths and heights around blocks, and where libjpeg does not interpolate chroma."""
LONG = [(65500, 1), (1, 65500), (65500, 3), (5, 65499)]
CODINGS: list[dict[str, Any]] = [
    {},
    {"quality": 5},
    {"quality": 100},
    {"progressive": True},
    {"restart_marker_blocks": 1},
]

needs_module = pytest.mark.skipif(not compiled.is_available(), reason="the module is not built")


def noise(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def jpeg(pixels: npt.NDArray[np.uint8], **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


def record_of(data: bytes) -> bytes:
    record = planes.from_jpeg(data)
    assert record is not None
    return record


def require_equal(record: bytes, expected: npt.NDArray[Any]) -> None:
    """Compare both implementations with RGB, of the image and of random crops."""
    height, width, _ = expected.shape
    draw = random.Random(width * height)
    assert planes.stated_size(record) == (width, height)
    layout = planes._layout(record)
    for number in range(6):
        region = Region(0, 0, width, height)
        if number:
            across, down = draw.randint(1, width), draw.randint(1, height)
            left, top = draw.randint(0, width - across), draw.randint(0, height - down)
            region = Region(left, top, across, down)
        cut = expected[region.top :, region.left :][: region.height, : region.width]
        np.testing.assert_array_equal(planes.decode(record, region), cut)
        np.testing.assert_array_equal(planes._finish(record, layout, region), cut)


def pillow(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@needs_module
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_pixels_equal_pillow_s(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 24)
    for width, height in SIDES:
        for coding in CODINGS:
            data = jpeg(noise(width, height), subsampling=sampling, **coding)
            require_equal(record_of(data), pillow(data))
    for width, height in LONG:
        data = jpeg(noise(width, height), subsampling=sampling)
        require_equal(record_of(data), pillow(data))


@needs_module
@for_each("side", SIDES)
def test_gray_has_one_plane(side: tuple[int, int]) -> None:
    data = jpeg(noise(*side)[:, :, 0])
    record = record_of(data)
    assert b" Cmono " in record
    assert len(record) == planes._layout(record).start + side[0] * side[1]
    require_equal(record, pillow(data))


@needs_module
@for_each("mode", ["CMYK", "RGB"])
def test_other_kinds_of_jpegs_have_no_planes(mode: str) -> None:
    buffer = io.BytesIO()
    if mode == "CMYK":
        Image.fromarray(noise(20, 20)).convert("CMYK").save(buffer, "JPEG")
    else:
        Image.fromarray(noise(20, 20)).save(buffer, "JPEG", keep_rgb=True)
    assert planes.from_jpeg(buffer.getvalue()) is None


@needs_module
def test_other_samplings_and_damage_have_no_planes() -> None:
    data = jpeg(noise(40, 40), subsampling="4:2:2")
    factors = data.index(b"\xff\xc0") + 11
    assert data[factors] == 0x21
    for luma in (0x12, 0x41, 0x14):  # 4:4:0, 4:1:1 and 4:4:1
        assert planes.from_jpeg(data[:factors] + bytes([luma]) + data[factors + 1 :]) is None
    assert planes.from_jpeg(data[: len(data) // 2]) is None
    assert planes.from_jpeg(b"") is None


@needs_module
def test_gray_may_state_any_sampling() -> None:
    data = jpeg(noise(37, 21)[:, :, 0])
    factors = data.index(b"\xff\xc0") + 11
    for stated in (0x12, 0x22, 0x44, 0x31):
        patched = data[:factors] + bytes([stated]) + data[factors + 1 :]
        require_equal(record_of(patched), pillow(patched))


@needs_module
def test_hostile_jpegs_give_their_pixels_or_keep_their_bytes(tmp_path: Path) -> None:
    fields = Counter[str]()
    for case, path in files_of(jpegs.CASES, tmp_path):
        data = path.read_bytes()
        record = planes.from_jpeg(data)
        if record is not None and len(record) < 1 << 22:
            planes.decode(record)
        stored = Record("a", {"jpg": data, "json": b'{"path":"a.jpg"}'})
        try:
            kept = convert_record(Recipe(tolerate_damage=True), stored).record
        except BadImage:
            continue
        result = convert_record(Recipe(tolerate_damage=True, encode="planes"), stored).record
        assert result.meta == kept.meta, case.name
        field = result.image_field or ""
        fields[field] += 1
        if field == "jpg":
            assert result == kept, case.name
        else:
            expected = decode(data, "jpg")
            np.testing.assert_array_equal(planes.decode(result.fields[field]), expected)
            assert not kept.meta.keys() & {"damaged", "odd"}, case.name
    assert min(fields["jpg"], fields["y4m"]) >= 5, fields


@for_each("sampling", ["420", "444"])
@for_each("side", SIDES)
def test_from_rgb_reads_back(sampling: str, side: tuple[int, int]) -> None:
    pixels = noise(*side)
    record = planes.from_rgb(pixels, sampling)
    assert planes.stated_size(record) == side
    decoded = planes.decode(record).astype(int)
    np.testing.assert_array_equal(
        decoded, planes._finish(record, planes._layout(record), all_of(side))
    )
    if sampling == "444":
        assert np.abs(decoded - pixels).max() <= 2


def changed(record: bytes, before: bytes, value: bytes) -> bytes:
    """Return a record with another byte behind some of its bytes."""
    place = record.index(before) + len(before)
    return record[:place] + value + record[place + 1 :]


def all_of(side: tuple[int, int]) -> Region:
    return Region(0, 0, *side)


def test_gray_pixels_are_stored_exactly() -> None:
    pixels = np.repeat(noise(13, 11)[:, :, :1], 3, 2)
    record = planes.from_rgb(pixels, "420")
    assert b" Cmono " in record
    np.testing.assert_array_equal(planes.decode(record), pixels)


def test_the_record_is_this() -> None:
    pixels = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    header = b"YUV4MPEG2 W3 H1 F1:1 Ip A1:1 C420jpeg XCOLORRANGE=FULL\n"
    content = bytes([76, 150, 29]) + bytes([64, 255]) + bytes([138, 107])
    checksum = (zlib.crc32(content) ^ zlib.crc32(bytes(7))).to_bytes(4, "little")  # of one band
    text = base64.b64encode(checksum + bytes(44))
    frame = b"FRAME" + b"".join(b" X" + text[start : start + 16] for start in range(0, 64, 16))
    assert planes.from_rgb(pixels, "420") == header + frame + b"\n" + content


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("sampling", ["420", "444", "mono"])
@pytest.mark.parametrize("height", [1, 2, 24, 25, 59, 120])
def test_checksums_of_bands_add_up_to_that_of_the_record(
    height: int, sampling: str, module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not module:
        monkeypatch.setattr(native, "module", lambda: None)
    pixels = noise(7, height)
    if sampling == "mono":
        pixels[:] = pixels[:, :, :1]
    record = planes.from_rgb(pixels, sampling)
    layout = planes._layout(record)
    rows, total = 2 * math.ceil(height / 24), zlib.crc32(record)
    zeros = bytes(len(record) - layout.start)
    content = np.frombuffer(record, np.uint8)[layout.start :]
    for band in range(planes.BANDS):
        masked = np.zeros(len(zeros), np.uint8)
        start = 0
        for high, wide in layout.sides:
            step = rows if high == height else rows // 2
            inside = slice(
                start + wide * min(high, step * band), start + wide * min(high, step * (band + 1))
            )
            masked[inside] = content[inside]
            start += wide * high
        checksum = zlib.crc32(masked.tobytes()) ^ zlib.crc32(zeros)
        assert layout.checksums[band] == checksum
        total ^= checksum
    assert total == zlib.crc32(record[: layout.start] + zeros)
    planes.require_bands(record)


@for_each(
    "change",
    [
        lambda record: record[:-1],
        lambda record: record + b"\0",
        lambda record: record.replace(b"W20", b"W21"),
        lambda record: record.replace(b"W20", b"W020"),
        lambda record: record.replace(b"W20", b"W-0"),
        lambda record: record.replace(b"W20", b"W999999999"),
        lambda record: record.replace(b"C420jpeg", b"C420paldv"),
        lambda record: record.replace(b"FULL", b"LIMITED"),
        lambda record: record.replace(b"FRAME X", b"FRAME  X"),
        lambda record: record.replace(b"FRAME X", b"FRAME Y"),
        lambda record: changed(record, b"FRAME X", b"="),
        lambda record: changed(record, b"FRAME X", b"\xff"),
        lambda record: changed(record, b"FRAME X", b"\n"),
        lambda record: record[:20],
        lambda record: b"",
    ],
)
def test_other_records_are_refused(change: Any) -> None:
    record = change(planes.from_rgb(noise(20, 10), "420"))
    with pytest.raises(BadImage):
        planes.decode(record)
    out = np.empty((10, 20, 3), np.uint8)
    assert not compiled.finish_planes(record, (20, 10), (0, 0, 20, 10), out)


@needs_module
@for_each("region", [(-1, 0, 5, 5), (0, -1, 5, 5), (16, 0, 5, 5), (0, 6, 5, 5), (0, 0, 0, 5)])
def test_the_module_refuses_regions_outside(region: tuple[int, int, int, int]) -> None:
    record = planes.from_rgb(noise(20, 10), "420")
    out = np.empty((max(region[3], 0), max(region[2], 0), 3), np.uint8)
    assert not compiled.finish_planes(record, (20, 10), region, out)


def test_nothing_reads_planes_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    with refused(UsageError, "encode"):
        planes.from_jpeg(jpeg(noise(8, 8)))


@for_each("subsampling", ["4:4:4", "4:2:2", "4:2:0", "gray"])
def test_the_example_gives_the_same_pixels(subsampling: str) -> None:
    read = runpy.run_path(str(ROOT / "docs/examples/planes_to_rgb.py"))["read_planes"]
    for width, height in SIDES:
        pixels = noise(width, height)
        data = (
            jpeg(pixels[..., 0]) if subsampling == "gray" else jpeg(pixels, subsampling=subsampling)
        )
        np.testing.assert_array_equal(read(record_of(data)), decode(data, "jpg"))


@for_each("sampling", ["420", "444", "mono"])
def test_the_example_checks_the_bands_of_the_rows(sampling: str) -> None:
    read = runpy.run_path(str(ROOT / "docs/examples/planes_to_rgb.py"))["read_planes"]
    pixels = noise(9, 100)
    if sampling == "mono":
        pixels[:] = pixels[:, :, :1]
    record = planes.from_rgb(pixels, sampling)
    expected = planes.decode(record)
    for top, bottom in ((0, 3), (37, 61), (99, 100), (0, 100)):
        np.testing.assert_array_equal(read(record, top, bottom), expected[top:bottom])
    content = np.frombuffer(record, np.uint8).copy()
    content[planes._layout(record).start + 9 * 60] ^= 1
    damaged = content.tobytes()
    np.testing.assert_array_equal(read(damaged, 0, 58), expected[:58])
    np.testing.assert_array_equal(read(damaged, 72, 100), expected[72:])
    with pytest.raises(ValueError, match="damaged"):
        read(damaged, 55, 65)


def test_wrong_checksums_of_bands_are_refused() -> None:
    record = planes.from_rgb(noise(9, 100), "420")
    planes.require_bands(record)
    for band in (0, 5, 11):
        place = record.index(b"FRAME X") + 7 + 18 * (band // 3) + 5 * (band % 3)
        forged = changed(record, record[:place], b"A" if record[place] != 65 else b"B")
        planes.decode(forged)
        with refused(BadImage):
            planes.require_bands(forged)


# Planes of JPEGs in rare codings give Pillow's pixels.

ARITHMETIC = sorted((ROOT / "tests/support/arithmetic").glob("*.jpg"))
"""A drawing of 37 x 19 pixels, compressed with `cjpeg -arithmetic`, which Pillow cannot write."""


@needs_module
@for_each("path", ARITHMETIC)
def test_arithmetic_coding_gives_pillow_s_pixels(path: Path) -> None:
    data = path.read_bytes()
    assert b"\xff\xcc" in data  # DAC: conditioning of the arithmetic coder
    record = planes.from_jpeg(data)
    assert record is not None
    np.testing.assert_array_equal(planes.decode(record), pillow(data))
    layout = planes._layout(record)
    everything = Region(0, 0, 37, 19)
    np.testing.assert_array_equal(planes._finish(record, layout, everything), pillow(data))


@needs_module
@for_each("chroma", ["420", "444"])
def test_changed_pixels_are_converted_as_libjpeg_does(chroma: str) -> None:
    """JPEGs of quality 100 keep blocks of one color exactly."""
    colors = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    pixels = colors.repeat(16, 0).repeat(16, 1)
    buffer = io.BytesIO()
    sampling = {"420": "4:2:0", "444": "4:4:4"}[chroma]
    Image.fromarray(pixels).save(buffer, "JPEG", quality=100, subsampling=sampling)
    assert planes.from_rgb(pixels, chroma) == planes.from_jpeg(buffer.getvalue())


def separate_scans(data: bytes) -> bytes:
    """Return a JPEG whose first scan has one of its components."""
    start = data.index(b"\xff\xda")
    assert data[start + 4] == 3
    return data[: start + 2] + b"\0\x08\1\1\0\0\x3f\0" + data[start + 14 :]


@for_each(
    ("subsampling", "blocks"),
    [
        (0, 3 * 6 * 5),  # 41 x 33 pixels in units of 8 x 8, each of three blocks
        (1, 4 * 3 * 5),  # 16 x 8, four blocks
        (2, 6 * 3 * 3),  # 16 x 16, six blocks
    ],
)
def test_several_scans_need_memory_for_coefficients(subsampling: int, blocks: int) -> None:
    options = {"subsampling": subsampling}
    assert jpeg_coefficient_bytes(jpeg_file(41, 33, progressive=True, **options)) == 128 * blocks
    assert jpeg_coefficient_bytes(separate_scans(jpeg_file(41, 33, **options))) == 128 * blocks
    assert jpeg_coefficient_bytes(jpeg_file(41, 33, **options)) == 0


def test_damaged_headers_need_none() -> None:
    data = jpeg_file(41, 33, progressive=True)
    frame = data.index(b"\xff\xc2")
    for end in range(data.index(b"\xff\xda") + 4):
        assert jpeg_coefficient_bytes(data[:end]) == 0
    for size in range(11):
        jpeg_coefficient_bytes(data[: frame + 2] + bytes([0, size]) + data[frame + 4 :])
    for factors in (0x00, 0x10, 0xFF):
        jpeg_coefficient_bytes(data[: frame + 11] + bytes([factors]) + data[frame + 12 :])


@needs_module
def test_jpegs_that_need_more_memory_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "baseline": jpeg_file(300, 200),
        "gray": encoded(picture(160, 160, mode="L"), progressive=True),
        "progressive": jpeg_file(160, 160, progressive=True),
    }
    blocks = 400  # of 160 x 160 gray pixels
    for less, kept in ((0, ["progressive"]), (1, ["gray", "progressive"])):
        monkeypatch.setattr(planes, "_MOST_COEFFICIENTS", 128 * blocks - less)
        assert [name for name, data in files.items() if planes.from_jpeg(data) is None] == kept
