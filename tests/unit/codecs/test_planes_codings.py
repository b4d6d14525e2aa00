"""Planes of JPEGs in rare codings: equal with the compiled module and with TurboJPEG."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import encoded, jpeg, picture
from PIL import Image, ImageFile
from table import for_each

from shardkit.codecs import planes
from shardkit.codecs.structure import jpeg_coefficient_bytes
from shardkit.codecs.turbo import Region
from shardkit.system import compiled

ROOT = Path(__file__).parents[3]
ARITHMETIC = sorted((ROOT / "tests/support/arithmetic").glob("*.jpg"))
"""A drawing of 37 x 19 pixels, compressed with `cjpeg -arithmetic`, which Pillow cannot write."""
LIBRARIES = sorted((ROOT / ".venv/turbojpeg").glob("*.libs/libturbojpeg*"))

needs_module = pytest.mark.skipif(not compiled.is_available(), reason="the module is not built")

_PRINT = """
import sys, zlib
from pathlib import Path
from shardkit.codecs import planes
if sys.argv[2:]:
    planes._MOST_COEFFICIENTS = int(sys.argv[2])
for path in sorted(Path(sys.argv[1]).iterdir()):
    record = planes.from_jpeg(path.read_bytes())
    print(path.name, record and (len(record), zlib.crc32(record)))
"""


def pillow(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def records(folder: Path, *, turbo: bool, limit: int | None = None) -> list[str]:
    """Return name, length and CRC-32 of the record of each file, read by one implementation."""
    variables = {"SHARDKIT_NATIVE": "on"}
    if turbo:
        variables = {"SHARDKIT_NATIVE": "off", "SHARDKIT_TURBOJPEG": str(LIBRARIES[0])}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT, str(folder), *([] if limit is None else [str(limit)])],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


@pytest.fixture(params=[False, True], ids=["module", "turbo"])
def turbo(request: Any) -> bool:
    """Whether to read JPEGs with TurboJPEG."""
    if request.param and not LIBRARIES:
        pytest.skip("TurboJPEG is not installed")
    if not request.param and not compiled.is_available():
        pytest.skip("the module is not built")
    return bool(request.param)


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


def test_turbojpeg_reads_the_same_arithmetic_codings() -> None:
    assert len(ARITHMETIC) == 4
    if LIBRARIES and compiled.is_available():
        folder = ARITHMETIC[0].parent
        assert records(folder, turbo=True) == records(folder, turbo=False)


@pytest.mark.slow
@needs_module
@pytest.mark.skipif(not LIBRARIES, reason="TurboJPEG is not installed")
def test_the_longest_sides_and_restarts_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 24)
    for size in ((65500, 3), (3, 65500)):
        for subsampling in range(3):
            for coding in ({}, {"progressive": True}, {"restart_marker_blocks": 7}):
                name = f"{size[0]}-{subsampling}-{'-'.join(coding)}"
                data = jpeg(*size, subsampling=subsampling, **coding)
                (tmp_path / name).write_bytes(data)
                record = planes.from_jpeg(data)
                assert record is not None
                np.testing.assert_array_equal(planes.decode(record), pillow(data))
        gray = encoded(picture(*size, mode="L"))
        (tmp_path / f"{size[0]}-gray").write_bytes(gray)
        record = planes.from_jpeg(gray)
        assert record is not None
        np.testing.assert_array_equal(planes.decode(record), pillow(gray))
    assert records(tmp_path, turbo=True) == records(tmp_path, turbo=False)


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
    assert jpeg_coefficient_bytes(jpeg(41, 33, progressive=True, **options)) == 128 * blocks
    assert jpeg_coefficient_bytes(separate_scans(jpeg(41, 33, **options))) == 128 * blocks
    assert jpeg_coefficient_bytes(jpeg(41, 33, **options)) == 0


def test_damaged_headers_need_none() -> None:
    data = jpeg(41, 33, progressive=True)
    frame = data.index(b"\xff\xc2")
    for end in range(data.index(b"\xff\xda") + 4):
        assert jpeg_coefficient_bytes(data[:end]) == 0
    for size in range(11):
        jpeg_coefficient_bytes(data[: frame + 2] + bytes([0, size]) + data[frame + 4 :])
    for factors in (0x00, 0x10, 0xFF):
        jpeg_coefficient_bytes(data[: frame + 11] + bytes([factors]) + data[frame + 12 :])


def test_jpegs_that_need_more_memory_keep_their_bytes(tmp_path: Path, turbo: bool) -> None:
    for name, data in {
        "baseline": jpeg(300, 200),
        "gray": encoded(picture(160, 160, mode="L"), progressive=True),
        "progressive": jpeg(160, 160, progressive=True),
    }.items():
        (tmp_path / name).write_bytes(data)
    limit = 400 * 128  # the blocks of 160 x 160 gray pixels
    lines = records(tmp_path, turbo=turbo, limit=limit)
    assert [line.split()[0] for line in lines if line.endswith("None")] == ["progressive"]
    below = records(tmp_path, turbo=turbo, limit=limit - 1)
    assert [line.split()[0] for line in below if line.endswith("None")] == ["gray", "progressive"]
